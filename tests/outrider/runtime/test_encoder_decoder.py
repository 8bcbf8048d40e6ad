"""Encoder–decoder models in packed batches give the logits of transformers."""

import copy
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outrider.runtime import fused_encoder_decoder
from outrider.runtime.batch import PackedBatch
from outrider.runtime.fused_encoder_decoder import FusedCrossDecoder
from outrider.runtime.loader import adopt
from outrider.runtime.model_runner import Chunk
from outrider.runtime.torch_runner import TorchRunner
from tests.encoder_decoders import MODELS, START, V, build, inputs, loaded, logits_of

TOKENS = 60
SEQUENCES = 6


@pytest.mark.parametrize("kind", ["fused", "fused, weights not packed", "not fused"])
@pytest.mark.parametrize("name", list(MODELS))
def test_packed_batches_give_the_logits_of_transformers(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts in pieces of any length, several in a batch, with drafts that are rolled back; one begins anew."""
    if "not packed" in kind:
        monkeypatch.setattr(fused_encoder_decoder, "can_pack", lambda dtype, device: False)
    runner, coin = TorchRunner.build(loaded(name), SEQUENCES, 80, fuse=kind != "not fused"), random.Random(1)
    assert runner.loaded.encoder is not None
    decoder = runner.loaded.encoder.decoder
    assert (decoder is None) == (kind == "not fused")
    if isinstance(decoder, FusedCrossDecoder):
        assert isinstance(decoder._run, torch.jit.ScriptModule)
    pool, own_inputs = runner.pool, inputs(name, SEQUENCES)
    slots = [pool.allocate() for _ in own_inputs]
    for slot, each in zip(slots, own_inputs, strict=True):
        runner.encode(slot, each)
    texts = [[START, *(coin.randrange(V) for _ in range(TOKENS - 1))] for _ in own_inputs]
    found = [torch.zeros(TOKENS, V) for _ in own_inputs]
    for step in range(200):
        if step == 10:  # as after preemption
            pool.rollback(slots[2], 0)
            runner.encode(slots[2], own_inputs[2])
        chunks, wanted = [], []
        for index in coin.sample(range(SEQUENCES), coin.randint(1, SEQUENCES)):
            slot = slots[index]
            start = pool.length(slot)
            own = texts[index][start : start + coin.randint(1, 7)]
            if own:
                rejected = [coin.randrange(V) for _ in range(coin.randint(0, 3))]
                chunks.append(Chunk(slot, [*own, *rejected], start, 0))
                wanted.append((index, start, len(own)))
        if not chunks:
            continue
        rows = runner.forward(chunks).split([len(chunk.tokens) for chunk in chunks])
        for (index, start, count), own_rows in zip(wanted, rows, strict=True):
            found[index][start : start + count] = own_rows[:count]
            pool.rollback(slots[index], start + count)
    for index, text in enumerate(texts):
        assert pool.length(slots[index]) == TOKENS
        torch.testing.assert_close(found[index], logits_of(name, own_inputs[index], text), rtol=1e-4, atol=1e-3)
        other = logits_of(name, own_inputs[index - 1], text)
        assert (other - found[index]).abs().max() > 0.1, "the encoder's input matters"
    for slot in slots:
        pool.free(slot)
    pool.check_integrity()
    assert pool.used_blocks == 0


@pytest.mark.parametrize("name", list(MODELS))
def test_each_norm_and_bias_is_used_at_its_own_place(name: str) -> None:
    """Random ones: those of new models are all 1 or 0. Building compares the fused logits with transformers', too."""
    torch.manual_seed(3)
    model, own_input, tokens = copy.deepcopy(build(name)), inputs(name, 1)[0], [START, 7, 9, 4]
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.3 * torch.randn_like(parameter)
    found = []
    for fuse in (False, True):
        runner = TorchRunner.build(adopt(copy.deepcopy(model), name, name), 1, 80, fuse=fuse)
        slot = runner.pool.allocate()
        runner.encode(slot, own_input)
        found.append(runner.forward([Chunk(slot, tokens, 0, 0)]))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-3)


def test_masks_with_a_bias_have_the_dtype_of_the_queries() -> None:
    """CUDA refuses any other; a CPU takes all."""
    unused: Any = None
    pool: Any = SimpleNamespace(dtype=torch.bfloat16)
    (mask,) = PackedBatch([3], [2], 2, [0], unused, pool).biased_masks(torch.zeros(4, 8))
    assert (mask.dtype, mask.shape) == (torch.bfloat16, (4, 1, 2, 5))


def test_a_sequence_whose_encoder_has_not_run_is_refused() -> None:
    runner = TorchRunner.build(loaded("t5"), 2, 80)
    slot = runner.pool.allocate()
    for _ in range(2):  # without an encoder, and with an empty one
        with pytest.raises(ValueError, match="the encoder of slot 0 has not run"):
            runner.forward([Chunk(slot, [START], 0, 0)])
        if runner.pool.encoder_slot(slot) is None:
            runner.pool.add_encoder(slot, 7)


def test_a_fork_keeps_its_encoder() -> None:
    """As a branch of the outcome cache, which outlives the sequence's own slot."""
    runner = TorchRunner.build(loaded("bart"), 4, 80)
    pool, own_input = runner.pool, inputs("bart", 4)[3]
    slot = pool.allocate()
    runner.encode(slot, own_input)
    runner.forward([Chunk(slot, [START, 5, 6], 0, 0)])
    fork = pool.fork(slot)
    pool.free(slot)
    other = runner.allocate_for_trial()
    runner.forward([Chunk(other, [START] * 40, 0, 0)])
    rows = runner.forward([Chunk(fork, [7, 8], 3, 0)])
    torch.testing.assert_close(rows, logits_of("bart", own_input, [START, 5, 6, 7, 8])[3:], rtol=1e-4, atol=1e-3)
    pool.free(fork)
    pool.free(other)
    pool.check_integrity()
    assert pool.used_blocks == 0
