"""The packed forward gives what transformers gives, however sequences are cut, mixed, rolled back or forked."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPT2LMHeadModel
from transformers.modeling_outputs import CausalLMOutput

from outrider.runtime.errors import CheckpointError
from outrider.runtime.fused_decoder import FusedDecoder
from outrider.runtime.loader import LoadedModel, ModelSource, load_model
from outrider.runtime.model_runner import Chunk, ModelRunner
from tests.outrider.runtime import tiny
from tests.outrider.runtime.tiny import CONFIGS, VOCABULARY, Truth

CLOSE = 1e-5
LENGTH = 24


@pytest.fixture(scope="module", params=[(name, fuse) for name in CONFIGS for fuse in (False, True)], ids=str)
def pair(
    request: pytest.FixtureRequest, load: Callable[..., LoadedModel], checkpoint: Callable[[str], Path]
) -> tuple[ModelRunner, Truth]:
    name, fuse = request.param
    return ModelRunner.build(load(name), max_sequences=4, max_length=48, fuse=fuse), Truth(checkpoint(name))


def sequence(seed: int, length: int = LENGTH) -> list[int]:
    return random.Random(seed).choices(range(VOCABULARY), k=length)


def run(model: ModelRunner, slot: int, tokens: list[int], cuts: list[int]) -> Tensor:
    """Runs a sequence alone in chunks of the given sizes; all logits."""
    assert sum(cuts) == len(tokens)
    rows, start = [], 0
    for cut in cuts:
        rows.append(model.forward([Chunk(slot, tokens[start : start + cut], start, 0)]))
        start += cut
    return torch.cat(rows)


def close(found: Tensor, wanted: Tensor) -> bool:
    """Within 1e-5 of the size of the logits, which is about 1."""
    return bool((found - wanted).abs().max() <= CLOSE * max(1.0, float(wanted.abs().max())))


@pytest.mark.parametrize("cuts", [[24], [1] * 24, [8, 1, 6, 1, 1, 7], [23, 1]], ids=str)
def test_however_a_sequence_is_cut_its_logits_are_those_of_transformers(
    pair: tuple[ModelRunner, Truth], cuts: list[int]
) -> None:
    model, truth = pair
    tokens = sequence(1)
    slot = model.pool.allocate()
    found = run(model, slot, tokens, cuts)
    model.pool.free(slot)
    assert found.dtype == torch.float32
    assert close(found, truth(tokens))


def test_sequences_in_one_pass_do_not_see_each_other(pair: tuple[ModelRunner, Truth]) -> None:
    model, truth = pair
    rng = random.Random(7)
    tokens = [sequence(seed) for seed in (11, 12, 13, 14)]
    slots = [model.pool.allocate() for _ in tokens]
    found: list[list[Tensor]] = [[] for _ in tokens]
    done = [0] * len(tokens)
    while min(done) < LENGTH:
        members = [i for i in range(len(tokens)) if done[i] < LENGTH and rng.random() < 0.8]
        rng.shuffle(members)
        if not members:
            continue
        sizes = [min(LENGTH - done[i], rng.choice([1, 1, 2, 5, 9])) for i in members]
        chunks = [
            Chunk(slots[i], tokens[i][done[i] : done[i] + n], done[i], 0) for i, n in zip(members, sizes, strict=True)
        ]
        for i, rows in zip(members, model.forward(chunks).split(sizes), strict=True):
            found[i].append(rows)
            done[i] += len(rows)
    for i, slot in enumerate(slots):
        assert close(torch.cat(found[i]), truth(tokens[i])), f"sequence {i}"
        model.pool.free(slot)
    model.pool.check_integrity()


def test_a_rejected_draft_leaves_no_trace(pair: tuple[ModelRunner, Truth]) -> None:
    model, truth = pair
    tokens, wrong = sequence(21), sequence(22)
    slot = model.pool.allocate()
    run(model, slot, tokens[:10], [10])
    for kept in (10, 9, 4):
        model.forward([Chunk(slot, wrong[:6], model.pool.length(slot), 0)])
        model.pool.rollback(slot, kept)
    found = model.forward([Chunk(slot, tokens[4:], 4, 0)])
    model.pool.free(slot)
    assert close(found, truth(tokens)[4:])


def test_a_fork_goes_its_own_way(pair: tuple[ModelRunner, Truth]) -> None:
    model, truth = pair
    tokens, other = sequence(31), sequence(32)
    slot = model.pool.allocate()
    run(model, slot, tokens[:9], [9])
    fork = model.pool.fork(slot)
    branched = tokens[:9] + other[9:]
    chunks = [Chunk(fork, branched[9:], 9, 0), Chunk(slot, tokens[9:], 9, 0)]
    mine, theirs = model.forward(chunks).split(LENGTH - 9)
    model.pool.free(slot)
    model.pool.free(fork)
    assert close(mine, truth(branched)[9:])
    assert close(theirs, truth(tokens)[9:])


def test_logits_come_for_the_wanted_rows_only(pair: tuple[ModelRunner, Truth]) -> None:
    model, truth = pair
    a, b, c = sequence(41, 10), sequence(42, 6), sequence(43, 5)
    slots = [model.pool.allocate() for _ in range(3)]
    found = model.forward([Chunk(slots[0], a, 0, 7), Chunk(slots[1], b, 0, 6), Chunk(slots[2], c, 0, 0)])
    wanted = torch.cat([truth(a)[7:], truth(c)])
    assert found.shape == (3 + 0 + 5, VOCABULARY)
    assert close(found, wanted)
    nothing = model.forward([Chunk(slots[1], a, 6, len(a))])
    assert nothing.shape == (0, VOCABULARY)
    tail = model.forward([Chunk(slots[1], b, 16, 4)])
    assert close(tail, truth([*b, *a, *b])[-2:])
    for slot in slots:
        model.pool.free(slot)


def test_a_sequence_reads_the_same_alone_and_in_company(load: Callable[..., LoadedModel]) -> None:
    model = ModelRunner.build(load("llama"), 3, 48)
    tokens = sequence(51)
    alone, company, other = (model.pool.allocate() for _ in range(3))
    single = run(model, alone, tokens, [12, 4, 4, 4])
    rows, start = [], 0
    for cut in (12, 4, 4, 4):
        chunks = [Chunk(other, sequence(52 + start, 3), model.pool.length(other), 3)]
        chunks.append(Chunk(company, tokens[start : start + cut], start, 0))
        rows.append(model.forward(chunks))
        start += cut
    assert (torch.cat(rows) - single).abs().max() <= 1e-5


def test_bfloat16_stays_near_float32(load: Callable[..., LoadedModel]) -> None:
    """Rounding to 8 bits moves logits by about a hundredth; a wrong mask moves them by their own size."""
    models = [ModelRunner.build(load("llama", dtype), 1, 48) for dtype in ("float32", "bfloat16")]
    tokens = sequence(61)
    exact, rounded = (run(model, model.pool.allocate(), tokens, [10, 1, 5, 8]) for model in models)
    assert rounded.dtype == torch.float32
    assert ((rounded - exact).norm() / exact.norm()) < 0.05


def test_the_head_never_sees_rows_nobody_wants(load: Callable[..., LoadedModel]) -> None:
    loaded = load("gpt2")
    seen: list[int] = []
    loaded.model.lm_head.register_forward_hook(lambda module, args, out: seen.append(out.shape[-2]))
    model = ModelRunner.build(loaded, 2, 48, fuse=False)
    a, b = model.pool.allocate(), model.pool.allocate()
    model.forward([Chunk(a, sequence(1, 20), 0, 19)])
    model.forward([Chunk(a, sequence(2, 10), 20, 8), Chunk(b, sequence(3, 20), 0, 20)])
    model.forward([Chunk(b, sequence(3, 20), 20, 20)])
    assert seen == [1, 2, 0]


def old_forward(scale: float) -> Callable[..., CausalLMOutput]:
    """A forward as older architectures have it, without a choice of rows."""

    def forward(self: Any, input_ids: Tensor, position_ids: Tensor | None = None, **options: Any) -> CausalLMOutput:
        hidden = self.transformer(input_ids, position_ids=position_ids, **options).last_hidden_state
        return CausalLMOutput(logits=self.lm_head(hidden) * scale)

    return forward


def test_without_a_choice_of_rows_the_head_is_applied_to_the_wanted_ones(
    load: Callable[..., LoadedModel], checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    truth = Truth(checkpoint("gpt2"))
    monkeypatch.setattr(GPT2LMHeadModel, "forward", old_forward(1.0))
    loaded = load("gpt2")
    seen: list[int] = []
    loaded.model.lm_head.register_forward_hook(lambda module, args, out: seen.append(out.shape[-2]))
    model = ModelRunner.build(loaded, 2, 48, fuse=False)
    a, b = model.pool.allocate(), model.pool.allocate()
    tokens = sequence(81)
    assert close(model.forward([Chunk(a, tokens[:9], 0, 7)]), truth(tokens)[7:9])
    rows = model.forward([Chunk(b, tokens[:4], 0, 3), Chunk(a, tokens[9:12], 9, 1)])
    assert close(rows, truth(tokens)[[3, 10, 11]])
    assert close(model.forward([Chunk(a, tokens[12:], 12, 0)]), truth(tokens)[12:])
    assert seen == [2, 3, 12]


def test_logits_that_are_more_than_the_head_are_refused_without_a_choice_of_rows(
    load: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GPT2LMHeadModel, "forward", old_forward(2.0))
    with pytest.raises(CheckpointError, match="other logits than its own forward"):
        load("gpt2")


@pytest.mark.parametrize("fuse", [False, True])
def test_a_long_prompt_over_a_large_vocabulary_makes_few_logits(fuse: bool, tmp_path: Path) -> None:
    """No tensor of a pass is as large as the logits of all its rows would be."""
    vocabulary, length, sizes = 20_000, 60, []
    config = tiny.CONFIGS["llama"]()
    config.vocab_size = vocabulary
    loaded = load_model(ModelSource(str(tiny.save(config, tmp_path)), device="cpu"))
    model = ModelRunner.build(loaded, 1, 64, fuse=fuse)
    if isinstance(loaded.fused, FusedDecoder):
        loaded.fused._run = loaded.fused._layers  # the same uncompiled, so that each operation shows

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and not out._is_view():
                sizes.append(out.numel())
            return out

    with Sizes():
        logits = model.forward([Chunk(model.pool.allocate(), [7] * length, 0, length - 1)])
    assert logits.shape == (1, vocabulary)
    assert len(sizes) > 20
    assert vocabulary <= max(sizes) < 2 * vocabulary


def test_a_broken_pass_changes_no_length(load: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch) -> None:
    model = ModelRunner.build(load("llama"), 2, 48)
    tokens = sequence(71)
    slot = model.pool.allocate()
    model.forward([Chunk(slot, tokens[:5], 0, 5)])

    def explode(*args: object) -> Tensor:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(model, "program", explode)
        with pytest.raises(RuntimeError, match="out of memory"):
            model.forward([Chunk(slot, tokens[5:9], 5, 0)])
    assert model.pool.length(slot) == 5
    model.pool.check_integrity()
    model.forward([Chunk(slot, tokens[5:9], 5, 0)])


@pytest.mark.parametrize(
    ("chunk", "message"),
    [
        (Chunk(0, [], 3, 0), "no tokens"),
        (Chunk(0, [1], 2, 0), "starts at 2, its slot holds 3"),
        (Chunk(0, [1], 4, 0), "starts at 4, its slot holds 3"),
        (Chunk(0, [1] * 46, 3, 0), "holds 3 positions: 46 more go beyond its 48"),
        (Chunk(0, [1, 2], 3, 3), "logits_from 3 .* outside its 2 tokens"),
        (Chunk(0, [1, 2], 3, -1), "logits_from -1"),
        (Chunk(0, [1, -1], 3, 0), "token -1 .* outside 0 to 96"),
        (Chunk(0, [1, VOCABULARY], 3, 0), "token 97 .* outside 0 to 96"),
        (Chunk(1, [1], 0, 0), "slot 1 is not taken"),
        (Chunk(9, [1], 0, 0), "slot 9 is not taken"),
    ],
    ids=str,
)
def test_a_chunk_that_does_not_fit_is_refused_with_its_numbers(
    load: Callable[..., LoadedModel], chunk: Chunk, message: str
) -> None:
    model = ModelRunner.build(_cached(load), 2, 48)
    slot = model.pool.allocate()
    model.forward([Chunk(slot, [1, 2, 3], 0, 3)])
    with pytest.raises(ValueError, match=message):
        model.forward([chunk])
    assert model.pool.length(slot) == 3


def test_a_pass_without_chunks_or_with_a_slot_twice_is_refused(load: Callable[..., LoadedModel]) -> None:
    model = ModelRunner.build(_cached(load), 2, 48)
    slot = model.pool.allocate()
    with pytest.raises(ValueError, match="at least one chunk"):
        model.forward([])
    with pytest.raises(ValueError, match="twice"):
        model.forward([Chunk(slot, [1], 0, 0), Chunk(slot, [1], 0, 0)])


def test_a_pool_that_does_not_fit_the_model_is_refused(load: Callable[..., LoadedModel]) -> None:
    with pytest.raises(ValueError, match=r"max_length 65 is beyond .* context of 64"):
        ModelRunner.build(_cached(load), 1, 65)


def test_warm_up_leaves_the_pool_as_it_was(load: Callable[..., LoadedModel]) -> None:
    model = ModelRunner.build(_cached(load), 2, 48)
    model.warm_up([1, 2, 5, 30])
    assert model.pool.used_blocks == 0
    model.pool.check_integrity()


_SHARED: list[LoadedModel] = []


def _cached(load: Callable[..., LoadedModel]) -> LoadedModel:
    """One model for the tests that do not look at its logits."""
    if not _SHARED:
        _SHARED.append(load("llama"))
    return _SHARED[0]


def test_all_gated_decoders_are_fused(load: Callable[..., LoadedModel]) -> None:
    for name in tiny.GATED:
        model = ModelRunner.build(load(name), 1, 16)
        assert type(model.loaded.fused).__name__ == "FusedDecoder", name
