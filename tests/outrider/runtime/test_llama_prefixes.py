"""The prefix cache of llama.cpp: saved sequences, alone and through both services."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from outrider.client import Client, Completion
from outrider.runtime import llama_pool
from outrider.runtime.batch import Chunk
from outrider.runtime.block_pool import PoolExhausted
from outrider.runtime.gguf_convert import convert
from outrider.runtime.llama_cpp import LlamaRunner
from outrider.runtime.llama_pool import LEAST_SAVED_TOKENS, LlamaPool
from outrider.runtime.prefix_cache import PrefixCache
from tests.cluster import MODELS, Cluster, wait_healthy
from tests.gguf_files import FAMILIES, build, save_tokenizer, write_gguf
from tests.metrics import scrape
from tests.outrider.runtime import tiny
from tests.outrider.runtime.tiny import VOCABULARY

pytest.importorskip("llama_cpp", reason="the extra `llama` is not installed: make test-llama")
pytest.importorskip("gguf", reason="the extra `llama` is not installed: make test-llama")

LENGTH = 64
LEAST = 8  # in place of LEAST_SAVED_TOKENS: the tiny models have short contexts
TEXT = [3 + 5 * i % 40 for i in range(24)]
OTHER = [4 + 3 * i % 40 for i in range(24)]


@pytest.fixture(autouse=True)
def _save_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_pool, "LEAST_SAVED_TOKENS", LEAST)


def make(folder: Path, name: str = "llama", kind: str = "f32", sequences: int = 8) -> tuple[LlamaRunner, PrefixCache]:
    save_tokenizer(tiny.save(FAMILIES[name](), folder), VOCABULARY)
    runner = build(write_gguf(folder, kind), sequences=sequences, length=LENGTH)
    return runner, runner.prefix_cache(enabled=True)


def logits(runner: LlamaRunner, tokens: Sequence[int], slot: int, start: int = 0) -> Tensor:
    return runner.logits([Chunk(slot, list(tokens[start:]), start, 0)])


def save(runner: LlamaRunner, prefixes: PrefixCache, tokens: Sequence[int], salt: str = "") -> Tensor:
    """Runs a sequence, saves it and ends it. Returns its logits."""
    slot = runner.pool.allocate()
    found = logits(runner, tokens, slot)
    prefixes.keep(slot, tokens, salt)
    runner.pool.free(slot)
    return found


@pytest.mark.parametrize(("name", "kind"), [("llama", "f32"), ("qwen3", "f32"), ("gpt2", "f32"), ("llama", "bf16")])
def test_a_sequence_goes_on_after_the_prefix_of_a_saved_one(name: str, kind: str, tmp_path: Path) -> None:
    """llama.cpp keeps values of float32 by column, and those of bfloat16 by row."""
    near = 1e-4 if kind == "f32" else 1e-2
    runner, prefixes = make(tmp_path, name, kind)
    save(runner, prefixes, TEXT)
    held = runner.pool.allocate()
    logits(runner, OTHER, held)  # other cells are in use when it is restored
    longer, shorter = [*TEXT, 9, 9], [*TEXT[:15], 9, 9]
    for tokens, length in ((longer, len(TEXT)), (shorter, 15), (TEXT, len(TEXT) - 1)):
        slot, alone = runner.pool.allocate(), runner.pool.allocate()
        assert prefixes.find(tokens) == prefixes.adopt(slot, tokens) == runner.pool.length(slot) == length
        runner.pool.check_integrity()
        expected = logits(runner, tokens, alone)[length:]
        torch.testing.assert_close(logits(runner, tokens, slot, length), expected, rtol=near, atol=near)
        for each in (slot, alone):
            runner.pool.free(each)
    expected = logits(runner, [*OTHER, 5], runner.pool.allocate())[len(OTHER) :]
    torch.testing.assert_close(logits(runner, [*OTHER, 5], held, len(OTHER)), expected, rtol=near, atol=near)


def test_the_longest_common_prefix_counts_and_those_of_other_salts_do_not(tmp_path: Path) -> None:
    runner, prefixes = make(tmp_path)
    for tokens in ([*TEXT[:12], *OTHER[:8]], [*TEXT[:16], *OTHER[:4]], OTHER[: LEAST - 1]):
        save(runner, prefixes, tokens, "one")
    for _ in range(2):
        save(runner, prefixes, TEXT, "another")
    save(runner, prefixes, TEXT[:18], "a third")
    assert prefixes.find(TEXT, "one") == 16
    assert prefixes.find(TEXT, "a third") == 18
    assert prefixes.find(TEXT, "another") == len(TEXT) - 1, "the last token must run"
    assert prefixes.find(TEXT) == 0
    assert prefixes.find(TEXT[:LEAST], "one") == 0, "too short"
    assert prefixes.find(OTHER, "one") == 0, "too short to be saved"


def test_a_longer_sequence_replaces_its_own_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_pool, "MOST_SAVED", 2)
    runner, prefixes = make(tmp_path)
    save(runner, prefixes, OTHER)
    for tokens in (TEXT[:10], TEXT[:16], TEXT, TEXT[:12], TEXT[-LEAST + 1 :]):  # the last one is too short
        save(runner, prefixes, tokens)
    assert prefixes.find([*TEXT, 9]) == len(TEXT)
    assert prefixes.find([*OTHER, 9]) == len(OTHER), "only one place was taken"


def test_the_longest_unused_is_dropped_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_pool, "MOST_SAVED", 2)
    runner, prefixes = make(tmp_path)
    third = [7, *TEXT]
    for tokens in (TEXT, OTHER):
        save(runner, prefixes, tokens)
    slot = runner.pool.allocate()
    assert prefixes.adopt(slot, [*TEXT, 9]) == len(TEXT)
    save(runner, prefixes, third)
    assert [prefixes.find([*each, 9]) for each in (TEXT, OTHER, third)] == [len(TEXT), 0, len(third)]


def test_all_that_is_saved_is_no_larger_than_the_pool(tmp_path: Path) -> None:
    runner, prefixes = make(tmp_path, sequences=1)
    texts = [[first, *TEXT[:20]] for first in range(3, 9)]
    for tokens in texts:
        save(runner, prefixes, tokens)
    kept = [tokens for tokens in texts if prefixes.find([*tokens, 9])]
    assert 1 <= len(kept) <= LENGTH // len(texts[0]) < len(texts)
    assert kept == texts[-len(kept) :]


@pytest.mark.parametrize(
    ("saved", "tokens"), [(TEXT, [*TEXT, *OTHER]), ([*TEXT, *OTHER], [*TEXT, 9])], ids=["its own", "the saved one's"]
)
def test_a_sequence_without_free_blocks_for_all_tokens_adopts_nothing(
    saved: list[int], tokens: list[int], tmp_path: Path
) -> None:
    runner, prefixes = make(tmp_path, sequences=1)
    save(runner, prefixes, saved)
    held, slot = runner.pool.allocate(), runner.pool.allocate()
    logits(runner, OTHER[:1], held)
    assert runner.pool.blocks.num_free == 1
    assert prefixes.find(tokens) == len(TEXT)
    assert prefixes.adopt(slot, tokens) == 0
    assert runner.pool.is_empty(slot)
    assert runner.pool.blocks.num_free == 1
    runner.pool.check_integrity()
    with pytest.raises(ValueError, match=f"slot {held} holds"):
        prefixes.adopt(held, TEXT)


def test_positions_beyond_the_length_of_a_slot_are_not_saved(tmp_path: Path) -> None:
    runner, prefixes = make(tmp_path)
    pool, (slot, other) = runner.pool, (runner.pool.allocate(), runner.pool.allocate())
    logits(runner, TEXT, slot)
    pool.grow(slot, len(TEXT) + 4)
    runner.run_pass([Chunk(slot, [9] * 4, len(TEXT), 0)])
    prefixes.keep(slot, [*TEXT, *OTHER])
    assert prefixes.adopt(other, [*TEXT, 9]) == len(TEXT)
    pool.check_integrity()


def test_a_sequence_that_llama_cpp_does_not_restore_can_still_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, prefixes = make(tmp_path)
    monkeypatch.setattr(LlamaPool, "save", lambda *_: np.zeros(8, np.uint8))
    expected = save(runner, prefixes, TEXT)
    slot = runner.pool.allocate()
    with pytest.raises(PoolExhausted, match=f"cannot restore {len(TEXT)} positions"):
        prefixes.adopt(slot, [*TEXT, 9])
    runner.pool.rollback(slot, 0)  # as both engines do
    runner.pool.check_integrity()
    assert torch.equal(logits(runner, TEXT, slot), expected)


def test_what_nan_may_have_reached_is_not_saved(tmp_path: Path) -> None:
    runner, prefixes = make(tmp_path)
    assert isinstance(runner.pool, LlamaPool)
    runner.pool.holds_nan = True
    save(runner, prefixes, TEXT)
    assert prefixes.find([*TEXT, 9]) == 0


def test_models_with_sliding_windows_save_nothing(tmp_path: Path) -> None:
    """llama.cpp saves their last window only, and a shorter prefix needs the positions before it."""
    runner, prefixes = make(tmp_path, "gemma3")
    save(runner, prefixes, TEXT)
    assert prefixes.find([*TEXT, 9]) == 0


PROMPT = [5 + 7 * i % 900 for i in range(LEAST_SAVED_TOKENS + 20)]
FLAGS = ("--dtype", "float32", "--max-sequence-tokens", "256")


def test_requests_share_a_prefix_and_a_salt(tmp_path: Path) -> None:
    """With the noise of the seed the tokens are the same, in files of float32."""

    def complete(tail: list[int], salt: str = "a test", gamma: int = 3) -> Completion:
        return client.complete(
            PROMPT + tail,
            max_new_tokens=12, ignore_eos=True, seed=3, rule="coupled", gamma=gamma, cache_salt=salt,
        )  # fmt: skip

    for name in ("target", "draft"):
        convert(str(MODELS / name), tmp_path / f"{name}.gguf", "f32")
    with Cluster() as cluster:
        verifier = cluster.verifier(model=tmp_path / "target.gguf", flags=FLAGS)
        service = cluster.draft(verifier, model=tmp_path / "draft.gguf", flags=FLAGS)
        wait_healthy(verifier, service)
        with Client(service.address) as client:
            first, again, other = (complete(tail) for tail in ([9, 8], [9, 8], [7]))
            alone, apart = complete([9, 8], gamma=0), complete([7], "another tenant")
            drafts = scrape(service.metrics_url)
    cached = [each.usage.cached_tokens for each in (first, again, other, alone, apart)]
    assert cached == [0, len(PROMPT) + 1, len(PROMPT), len(PROMPT) + 1, 0]
    assert first.token_ids == again.token_ids == alone.token_ids
    assert other.token_ids == apart.token_ids
    assert drafts["outrider_draft_prefix_cache_hits_total"][()] == 2 * len(PROMPT) + 1
