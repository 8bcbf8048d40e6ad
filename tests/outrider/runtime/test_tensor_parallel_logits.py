"""Two ranks give the logits of one, whatever becomes of the blocks: this process is rank 0, the worker a real one."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from outrider.runtime.errors import CheckpointError, ModelLost
from outrider.runtime.loader import ModelSource, load_model
from outrider.runtime.model_runner import Chunk, ModelRunner
from tests.outrider.runtime import tiny
from tests.outrider.runtime.two_ranks import as_rank_0

CLOSE = 1e-4  # of logits of some size, whose sums are put together from two halves
SPLIT = ("llama-biased", "qwen3", "gemma3", "mixtral")
WHOLE = ("olmo2",)
"""Whose plan splits other layers, and leaves every rank all heads."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny model by its name in `tiny.FAMILIES`."""
    return lambda name: tiny.save(tiny.FAMILIES[name](), tmp_path_factory.mktemp(name))


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def alone(folder: Path) -> ModelRunner:
    """The same model on one rank."""
    loaded = load_model(ModelSource(str(folder), dtype="float32", device="cpu"))
    return ModelRunner.build(loaded, max_sequences=4, max_length=64, fuse=False)


def history(packed: ModelRunner) -> Tensor:
    """Logits of passes over sequences that are cut, forked in the middle of a block, rolled back and ended.

    A fork that goes on writes into a copy of the block that it shares.
    """
    pool = packed.pool
    first, second = pool.allocate(), pool.allocate()
    logits = [packed.forward([Chunk(first, list(range(3, 23)), 0, 0), Chunk(second, [5, 80, 7], 0, 2)])]
    fork = pool.fork(first)
    logits.append(packed.forward([Chunk(fork, [40, 41, 42], 20, 0), Chunk(second, [9], 3, 0)]))
    # What the first wrote is where it was, and not under what the fork has written.
    pool.rollback(first, 18)
    logits.append(packed.forward([Chunk(first, [60, 61, 62, 63], 18, 0), Chunk(fork, [43], 23, 0)]))
    pool.free(second)
    again = pool.allocate()
    logits.append(packed.forward([Chunk(again, list(range(30, 70)), 0, 38), Chunk(first, [8], 22, 0)]))
    for slot in (first, fork, again):
        pool.free(slot)
    pool.check_integrity()
    return torch.cat(logits)


@pytest.mark.parametrize("family", [*SPLIT, *WHOLE])
def test_two_ranks_give_the_logits_of_one(folder: Callable[[str], Path], family: str) -> None:
    model = folder(family)
    expected = history(alone(model))
    with as_rank_0(model) as packed:
        found = history(packed)
        parts, config = 1 if family in WHOLE else 2, packed.loaded.config
        assert {layer.heads for layer in packed.loaded.layers} == {config.num_attention_heads // parts}
        assert {layer.kv_heads for layer in packed.loaded.layers} == {config.num_key_value_heads // parts}
        pages, heads = packed.pool.paged, {layer.kv_heads for layer in packed.loaded.layers}
        assert pages is not None
        assert {each.size(2) for each in (*pages.keys, *pages.values)} == heads
        assert packed.loaded.vocab_size == tiny.VOCABULARY
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) < CLOSE * float(expected.abs().max())


def test_the_pool_has_the_blocks_that_every_rank_has_room_for(folder: Callable[[str], Path]) -> None:
    model = folder("llama")
    blocks = []
    for ours, theirs in (("2", "1"), ("1", "2"), ("2", "2")):
        with as_rank_0(model, "--kv-cache-mb", ours, theirs=("--kv-cache-mb", theirs)) as packed:
            blocks.append(packed.pool.blocks.count)
    assert blocks[0] == blocks[1] == blocks[2] // 2


def test_ranks_that_were_told_otherwise_do_not_begin(folder: Callable[[str], Path]) -> None:
    told = ("--max-sequence-tokens", "48")
    said = "the ranks differ in their tokens of a sequence: 64 on rank 0, 48 on rank 1"
    with pytest.raises(CheckpointError, match=said), as_rank_0(folder("llama"), theirs=told):
        pass


def test_a_worker_whose_step_breaks_says_why(folder: Callable[[str], Path]) -> None:
    with as_rank_0(folder("llama"), ends_with=1) as packed:
        assert packed.pool.paged is not None
        assert packed.pool.paged.on_copy is not None
        packed.pool.paged.on_copy([10**6], [0])  # in the worker's memory alone
        with pytest.raises(ModelLost, match=r"rank 1 ends: a pass broke: .* out of DATA bounds"):
            history(packed)
