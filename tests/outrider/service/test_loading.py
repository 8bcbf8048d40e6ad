"""How much room keys and values get."""

from __future__ import annotations

import pytest
import torch

from outrider.runtime.kv_cache import BLOCK_TOKENS
from outrider.runtime.loader import LoadedModel, ModelSource, load_model
from outrider.runtime.memory import MIB, block_bytes
from outrider.service.loading import DEFAULT_CPU_KV_MB, kv_blocks
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
    room = (given or DEFAULT_CPU_KV_MB) * MIB
    assert blocks * block_bytes(loaded) <= room < (blocks + 1) * block_bytes(loaded)


def test_one_sequence_at_its_longest_must_fit() -> None:
    target = load_model(ModelSource(str(MODELS / "target"), dtype="bfloat16", device="cpu"))
    with pytest.raises(SettingsError, match=r"--kv-cache-mb: 1 MiB hold \d+ blocks .* --max-sequence-tokens 1024"):
        kv_blocks(settings("--kv-cache-mb", "1"), target, BLOCK_TOKENS, left=0)


@pytest.mark.gpu
def test_on_a_gpu_it_is_a_share_of_what_is_free() -> None:
    loaded = load_model(ModelSource(DRAFT, dtype="bfloat16", device="cuda"))
    free, _ = torch.cuda.mem_get_info(loaded.device)
    blocks = kv_blocks(settings("--kv-memory-fraction", "0.01"), loaded, BLOCK_TOKENS, left=free)
    assert blocks * block_bytes(loaded) == pytest.approx(0.01 * free, rel=0.05)
