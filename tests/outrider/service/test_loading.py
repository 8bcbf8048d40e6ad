"""The size of the KV cache, and limits above the model's."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from outrider.runtime.kv_cache import BLOCK_TOKENS
from outrider.runtime.loader import LoadedModel, ModelSource, load_model
from outrider.runtime.memory import MIB, block_bytes
from outrider.service.loading import DEFAULT_CPU_KV_MB, build_model_runner, kv_blocks
from outrider.service.settings import ServiceSettings, SettingsError
from tests.cluster import MODELS

DRAFT = str(MODELS / "draft")


def settings(*flags: str) -> ServiceSettings:
    found: ServiceSettings = ServiceSettings.from_command_line(["--model", DRAFT, *flags], program="a service")
    return found


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model(ModelSource(DRAFT, dtype="bfloat16", device="cpu"))


@pytest.mark.parametrize("given", [None, 4])
def test_on_a_cpu_a_setting_says_how_many(loaded: LoadedModel, given: int | None) -> None:
    flags = () if given is None else ("--kv-cache-mb", str(given))
    blocks = kv_blocks(settings("--max-sequence-tokens", "64", *flags), loaded, BLOCK_TOKENS, left=0)
    capacity = (given or DEFAULT_CPU_KV_MB) * MIB
    assert blocks * block_bytes(loaded) <= capacity < (blocks + 1) * block_bytes(loaded)


def test_one_sequence_at_its_longest_must_fit() -> None:
    target = load_model(ModelSource(str(MODELS / "target"), dtype="bfloat16", device="cpu"))
    with pytest.raises(SettingsError, match=r"--kv-cache-mb: 1 MiB hold \d+ blocks .* --max-sequence-tokens 1024"):
        kv_blocks(settings("--kv-cache-mb", "1"), target, BLOCK_TOKENS, left=0)


def test_more_tokens_than_the_context_has_leave_a_line_in_the_log(loaded: LoadedModel) -> None:
    with capture_logs() as lines:
        build_model_runner(settings("--max-sequence-tokens", "99999"), loaded, 16, pass_tokens=4)
    (line,) = [line for line in lines if line["log_level"] == "warning"]
    assert (line["max_sequence_tokens"], line["context_length"]) == (99999, loaded.context_length)
