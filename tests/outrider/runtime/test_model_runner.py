"""Packed steps give the logits of transformers, for each family and any mixture of chunks."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from outrider.runtime import sdpa
from outrider.runtime.block_pool import BlockPool
from outrider.runtime.fused_decoder import FusedDecoder
from outrider.runtime.loader import LoadedModel
from outrider.runtime.model_runner import Chunk
from outrider.runtime.paged_attention import AttentionChoice
from outrider.runtime.torch_runner import TorchRunner
from tests.outrider.runtime.steps import MAX_LENGTH, random_steps, reference_logits
from tests.outrider.runtime.tiny import EXPERTS, FAMILIES, VOCABULARY, Reference

SMALL_BLOCKS = AttentionChoice("sdpa", "a test", block_tokens=4)
SMALL_BLOCKS_OF = {"qwen3": AttentionChoice("sdpa", "the decoder in C needs multiples of 16", block_tokens=16)}

Load = Callable[..., LoadedModel]
Checkpoint = Callable[[str], Path]

# |difference| / |logits| of the median row. One step of rounding is 2^-8 in bfloat16 and 2^-11 in float16. Where
# rounding decides between two experts, that row and all that read it differ by more.
NEAR = {"bfloat16": 0.05, "float16": 0.01}


@pytest.mark.parametrize("name", FAMILIES)
def test_any_steps_give_the_logits_of_transformers(
    name: str, load: Load, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts, single tokens, forks, rollbacks, rows without logits; several windows long.

    Unfused, then fused. Then rows are cut into blocks, and no sequence gets consecutive blocks of the pool.
    """
    loaded, expected = load(name), list[Tensor]()
    for fuse in (False, True):
        if fuse:
            monkeypatch.setattr(sdpa, "BLOCK", 8)
            monkeypatch.setattr(BlockPool, "reserve", lambda *_: None)
        choice = SMALL_BLOCKS_OF.get(name, SMALL_BLOCKS)
        model = TorchRunner.build(loaded, 5, MAX_LENGTH, fuse=fuse, attention=choice)
        found, wanted = random_steps(model, seed=1, counts=(1, 1, 1, 2, 4, 7, 24))
        expected = expected or reference_logits(Reference(checkpoint(name)), wanted)
        for step, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
            assert (mine.shape, mine.dtype) == (theirs.shape, torch.float32)
            size = float(theirs.abs().max()) if len(theirs) else 0.0
            assert torch.allclose(mine, theirs, rtol=0, atol=1e-5 * max(1.0, size)), (fuse, step)


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3"])
def test_a_sequence_has_the_same_bits_in_any_batch(name: str, load: Load) -> None:
    """Texts of one to twelve blocks with common prefixes; chunks of one row, of a few, and a long one."""
    model = TorchRunner.build(load(name), 24, 48, attention=SMALL_BLOCKS_OF.get(name, SMALL_BLOCKS))
    rng = random.Random(1)
    text = rng.choices(range(VOCABULARY), k=48)
    whole = model.pool.allocate()
    model.forward([Chunk(whole, text, 0, len(text))])
    chunks = []
    for count in (1, 1, 1, 2, 2, 3, 17) * 3:
        slot, start = model.pool.fork(whole), rng.randint(1, 48 - count)
        model.pool.rollback(slot, start)
        chunks.append(Chunk(slot, text[start : start + count], start, 0))
    together = model.forward(chunks)
    for chunk in chunks:
        model.pool.rollback(chunk.slot, chunk.start)
    assert torch.equal(torch.cat([model.forward([chunk]) for chunk in chunks]), together)
    model.pool.check_integrity()


def test_what_is_left_in_free_blocks_does_not_matter(llama: LoadedModel) -> None:
    model = TorchRunner.build(llama, 2, 48, attention=SMALL_BLOCKS)
    assert model.pool.by_head is not None
    for store in model.pool.by_head.stores:
        store.fill_(torch.nan)
    for count in (1, 6, 30):
        slot = model.pool.allocate()
        assert model.forward([Chunk(slot, list(range(count)), 0, 0)]).isfinite().all()


def test_the_decoder_in_c_needs_blocks_of_whole_vectors(load: Load) -> None:
    loaded = load("qwen3")
    TorchRunner.build(loaded, 2, 48, attention=SMALL_BLOCKS_OF["qwen3"])
    if not isinstance(loaded.fused, FusedDecoder) or loaded.fused.cpu_decoder is None:
        pytest.skip("torch runs the layers on this processor")
    with pytest.raises(ValueError, match=r"^block_tokens is 4; it must be a multiple of 16$"):
        TorchRunner.build(loaded, 2, 48, attention=SMALL_BLOCKS)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "gpt2", "phi", "mixtral", "qwen3-moe", "gpt-oss"])
def test_sixteen_bits_stay_near_float32(name: str, load: Load) -> None:
    """A wrong mask or a missing factor moves logits by their own size."""
    exact, *rounded = (
        torch.cat(random_steps(TorchRunner.build(load(name, dtype), 5, MAX_LENGTH, fuse=dtype in NEAR), 3)[0])
        for dtype in ("float32", *NEAR)
    )
    for logits, near in zip(rounded, NEAR.values(), strict=True):
        assert logits.dtype == torch.float32
        distance = (logits - exact).norm(dim=-1) / exact.norm(dim=-1)
        assert distance.median() <= near * (2 if name in EXPERTS else 1)


@pytest.fixture(scope="module")
def llama(load: Load) -> LoadedModel:
    return load("llama")


def test_a_failed_step_changes_no_length(llama: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    model = TorchRunner.build(llama, 2, 48)
    slot = model.pool.allocate()
    model.forward([Chunk(slot, [1, 2, 3], 0, 3)])

    def fail(*args: object) -> Tensor:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(model, "program", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            model.forward([Chunk(slot, [4, 5], 3, 0)])
    assert model.pool.length(slot) == 3
    model.pool.check_integrity()
    model.forward([Chunk(slot, [4, 5], 3, 0)])


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ([Chunk(0, [], 3, 0)], "no tokens"),
        ([Chunk(0, [1], 4, 0)], "starts at 4; the slot holds 3"),
        ([Chunk(0, [1] * 46, 3, 0)], "holds 3 positions and gets 46 more; the limit is 48"),
        ([Chunk(0, [1, 2], 3, 3)], "logits_from of slot 0 is 3, outside 0 to 2"),
        ([Chunk(0, [1, VOCABULARY], 3, 0)], "token 97 .* outside 0 to 96"),
        ([Chunk(1, [1], 0, 0)], "slot 1 does not exist"),
        ([], "a pass needs at least one"),
        ([Chunk(0, [1], 3, 0)] * 2, "twice"),
    ],
    ids=str,
)
def test_chunks_that_do_not_fit_are_refused_with_their_numbers(
    llama: LoadedModel, chunks: list[Chunk], message: str
) -> None:
    model = TorchRunner.build(llama, 2, 48)
    slot = model.pool.allocate()
    model.forward([Chunk(slot, [1, 2, 3], 0, 3)])
    with pytest.raises(ValueError, match=message):
        model.forward(chunks)
    assert model.pool.length(slot) == 3


def test_a_pool_longer_than_the_context_is_refused(llama: LoadedModel) -> None:
    with pytest.raises(ValueError, match=r"max_length is 65; the context of .* has 64 positions"):
        TorchRunner.build(llama, 1, 65)
