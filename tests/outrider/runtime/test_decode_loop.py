"""Several tokens in one call are the tokens, and the laws, that one call each would have drawn."""

import math
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle, product

import pytest
import torch

from kernels import coupled
from kernels.distribution import SamplingLaw, probabilities
from kernels.entropy import UNSURE, entropy, entropy_of_weights
from kernels.sparse import SparseConfig, SparseLaw, draw
from outrider.runtime.decode_loop import Sampling, ScriptedLoop
from outrider.runtime.fused_decoder import FusedDecoder
from outrider.runtime.loader import LoadedModel
from outrider.runtime.packed import Chunk, PackedModel
from tests.outrider.runtime.tiny import GATED, VOCABULARY

CONFIG = SparseConfig(keep_mass=0.97, max_support=40)
KNOWN = VOCABULARY - 3  # the rest is padding
LAWS = [
    SamplingLaw(temperature=0),
    SamplingLaw(),
    SamplingLaw(temperature=0.6),
    SamplingLaw(temperature=1.4, top_k=9),
    SamplingLaw(top_p=0.8),
    SamplingLaw(top_k=30, top_p=0.9, min_p=0.05),
]


def step_by_step(
    model: PackedModel, slot: int, chunk: list[int], sampling: Sampling
) -> tuple[list[int], list[SparseLaw | None]]:
    tokens, laws = list[int](), list[SparseLaw | None]()
    for place, u in enumerate(sampling.uniforms):
        logits = model.forward([Chunk(slot, chunk, model.pool.length(slot), len(chunk) - 1)])
        logits = logits[:, : sampling.vocab_size]
        law: list[SparseLaw | None] = [None]
        bounds = sampling.bounds[place : place + 1] or None
        if sampling.noise is None:
            chunk, law = draw(logits, sampling.law, sampling.config, [u], bounds)
        else:
            chunk = coupled.draw(logits, [sampling.law], sampling.noise[place : place + 1], bounds)
        tokens += chunk
        laws += law
        if chunk == [UNSURE]:
            break
    return tokens, laws


def triples(laws: list[SparseLaw | None]) -> list[tuple[list[int], list[int], int] | None]:
    return [None if law is None else (law.ids.tolist(), law.weights.tolist(), law.total) for law in laws]


def noise(seed: int, at: int, gamma: int) -> torch.Tensor:
    return coupled.noise_of([(seed, at + place) for place in range(gamma)], KNOWN)


@pytest.mark.parametrize(("name", "first"), [*zip(GATED, cycle([1, 13]), strict=False), ("qwen3", 2), ("qwen3", 13)])
def test_written_tokens_are_those_drawn_step_by_step(name: str, first: int, load: Callable[..., LoadedModel]) -> None:
    """Bit for bit, after a prompt that the cache holds most of, for every law, by uniforms and by shared noise."""
    model = PackedModel.build(load(name), max_sequences=2, max_length=48)
    rng = random.Random(first)
    prompt = rng.choices(range(VOCABULARY), k=5 + first)
    one, other = model.pool.allocate(), model.pool.allocate()
    for slot in (one, other):
        model.forward([Chunk(slot, prompt[:5], 0, 4)])
    for law, by_noise in product(LAWS, (False, True)):
        sampling = Sampling(
            law, CONFIG, [rng.random() for _ in range(6)], KNOWN, noise(first, 5 + first, 6) if by_noise else None
        )
        written = model.decode([Chunk(one, prompt[5:], 5, first)], [sampling])[0]
        tokens, laws = written.tokens, written.laws
        expected, expected_laws = step_by_step(model, other, prompt[5:], sampling)
        assert tokens == expected
        assert triples(laws) == triples(expected_laws)
        if by_noise:
            assert laws == [None] * 6
        assert model.pool.length(one) == model.pool.length(other) == 5 + first + 5
        for slot in (one, other):
            model.pool.rollback(slot, 5)


@pytest.mark.parametrize("law", LAWS, ids=str)
@pytest.mark.parametrize("by_noise", [False, True], ids=["uniforms", "noise"])
def test_both_ways_end_before_the_first_token_of_a_law_above_its_bound(
    by_noise: bool, law: SamplingLaw, load: Callable[..., LoadedModel]
) -> None:
    """Bit for bit: also at a bound that is the very entropy of one of the laws, which is not above it."""
    model = PackedModel.build(load("llama"), max_sequences=2, max_length=48)
    one, other = model.pool.allocate(), model.pool.allocate()
    rng = random.Random(7)
    by = noise(7, 3, 6) if by_noise else None
    free = Sampling(law, CONFIG, [rng.random() for _ in range(6)], KNOWN, by)
    told_free = model.decode([Chunk(one, [3, 1, 4], 0, 3)], [free])[0]
    unbounded, laws = told_free.tokens, told_free.laws
    entropies = _entropies(model, other, [3, 1, 4, *unbounded[:-1]], 2, law, None if by_noise else laws)
    assert max(entropies) > min(entropies)
    ended = set()
    for bound in (*entropies, -1.0, 100.0, *(math.nextafter(each, 0) for each in entropies)):
        sampling = replace(free, bounds=[math.inf, *[bound] * 5])
        written = []
        for slot in (one, other):
            model.pool.rollback(slot, 0)
            if slot == one:
                done = model.decode([Chunk(slot, [3, 1, 4], 0, 3)], [sampling])[0]
                tokens, told = done.tokens, done.laws
            else:
                tokens, told = step_by_step(model, slot, [3, 1, 4], sampling)
            written.append((tokens, triples(told), model.pool.length(slot)))
        assert written[0] == written[1]
        kept = 1 + next((i for i, each in enumerate(entropies[1:]) if each > bound), 5)
        assert written[0][0] == [*unbounded[:kept], *[UNSURE] * (kept < 6)]
        assert written[0][2] == 3 + min(kept, 5)
        ended.add(kept)
    assert {1, 6} <= ended


def _entropies(
    model: PackedModel, slot: int, tokens: list[int], first: int, law: SamplingLaw, told: list[SparseLaw | None] | None
) -> list[float]:
    """The entropy of what each token was drawn from, as this file has it: of q̂, of q, or of the softmax at T = 0."""
    if law.is_greedy or told is None:
        logits = [
            model.forward([Chunk(slot, tokens[: at + 1] if at == first else [tokens[at]], 0 if at == first else at, 0)])
            for at in range(first, len(tokens))
        ]
        plain = replace(law, temperature=1.0) if law.is_greedy else law
        return [entropy(probabilities(row[-1:, :KNOWN], plain)[0]) for row in logits]
    return [entropy_of_weights(torch.tensor(each.weights.astype("int64"))) for each in told if each is not None]


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_sequences_written_together_are_those_written_alone(name: str, load: Callable[..., LoadedModel]) -> None:
    """Each has a prompt, a law, a number of tokens and an end of its own; only rounding may tell the company."""
    model = PackedModel.build(load(name), max_sequences=24, max_length=48)
    rng = random.Random(5)
    chunks, alone, samplings = list[Chunk](), list[Chunk](), list[Sampling]()
    for number, (law, by_noise) in enumerate(product(LAWS, (False, True))):
        held, new, gamma = rng.randrange(12), rng.randrange(1, 5), rng.randrange(1, 7)
        prompt = rng.choices(range(VOCABULARY), k=held + new)
        for kept in (chunks, alone):
            slot = model.pool.allocate()
            if held:
                model.forward([Chunk(slot, prompt[:held], 0, held)])
            kept.append(Chunk(slot, prompt[held:], held, 0))
        by = noise(number, held + new, gamma) if by_noise else None
        bounds = [math.inf, *[3.0] * (gamma - 1)] if number % 3 == 0 else []
        samplings.append(Sampling(law, CONFIG, [rng.random() for _ in range(gamma)], KNOWN, by, bounds))
    together = model.decode(chunks, samplings)
    assert any(each.tokens[-1] == UNSURE for each in together), "one that ends early leaves the others to go on"
    for chunk, single, sampling, written in zip(chunks, alone, samplings, together, strict=True):
        (expected,) = model.decode([single], [sampling])
        assert written.tokens == expected.tokens
        assert [law is None for law in written.laws] == [law is None for law in expected.laws]
        for told, same in zip(written.laws, expected.laws, strict=True):
            if told is not None and same is not None:
                assert told.ids.tolist() == same.ids.tolist()
                assert abs(told.weights.astype(int) - same.weights.astype(int)).max() <= 1
        assert model.pool.length(chunk.slot) == model.pool.length(single.slot)
        ends = [model.forward([Chunk(each.slot, [7], model.pool.length(each.slot), 0)]) for each in (chunk, single)]
        assert torch.allclose(ends[0], ends[1], atol=1e-4)


def test_each_token_is_chosen_by_the_noise_of_its_own_place(load: Callable[..., LoadedModel]) -> None:
    """A flat law, so that each token is the noise's own: where it is least."""
    model = PackedModel.build(load("llama"), max_sequences=1, max_length=48)
    slot, by = model.pool.allocate(), noise(8, 3, 6)
    law = SamplingLaw(temperature=100.0)
    tokens = model.decode([Chunk(slot, [3, 1, 4], 0, 3)], [Sampling(law, CONFIG, [0.0] * 6, KNOWN, by)])[0].tokens
    assert tokens == by.argmax(-1).tolist()


def test_what_was_written_is_in_the_cache(load: Callable[..., LoadedModel]) -> None:
    model = PackedModel.build(load("llama"), max_sequences=2, max_length=48)
    slot, fresh = model.pool.allocate(), model.pool.allocate()
    sampling = Sampling(SamplingLaw(), CONFIG, [0.2, 0.9, 0.5], KNOWN)
    tokens = model.decode([Chunk(slot, [3, 1, 4], 0, 3)], [sampling])[0].tokens
    after = model.forward([Chunk(slot, [tokens[-1], 7], 5, 0)])
    whole = model.forward([Chunk(fresh, [3, 1, 4, *tokens, 7], 0, 5)])
    assert torch.allclose(after, whole, atol=1e-5)


def test_logits_that_are_no_numbers_end_the_writing(load: Callable[..., LoadedModel]) -> None:
    loaded = load("llama")
    model = PackedModel.build(loaded, max_sequences=1, max_length=48)
    assert isinstance(loaded.fused, FusedDecoder)
    slot = model.pool.allocate()
    for law, by in ((SamplingLaw(temperature=0), None), (SamplingLaw(), None), (SamplingLaw(), noise(1, 1, 3))):
        first = model.decode([Chunk(slot, [5], 0, 1)], [Sampling(law, CONFIG, [0.4], KNOWN, by)])[0].tokens
        model.pool.rollback(slot, 0)
        embedding = loaded.fused._layers.embedding
        kept = embedding[first[0]].clone()
        embedding[first[0]] = float("nan")
        written = model.decode([Chunk(slot, [5], 0, 1)], [Sampling(law, CONFIG, [0.4, 0.5, 0.6], KNOWN, by)])[0]
        embedding[first[0]] = kept
        model.pool.rollback(slot, 0)
        assert written.tokens == [*first, -1]
        assert len(written.laws) == len(written.scores) == 2
        assert written.laws[-1] is None
        assert written.scores[-1] is None


@pytest.mark.parametrize("by", [None, noise(2, 2, 4)], ids=["uniforms", "noise"])
def test_compiled_or_not_the_loop_does_the_same(load: Callable[..., LoadedModel], by: torch.Tensor | None) -> None:
    loaded = load("qwen3")
    model = PackedModel.build(loaded, max_sequences=1, max_length=48)
    assert isinstance(loaded.fused, FusedDecoder)
    slot = model.pool.allocate()
    sampling = Sampling(SamplingLaw(top_p=0.9), CONFIG, [0.3, 0.6, 0.1, 0.8], KNOWN, by)
    compiled = model.decode([Chunk(slot, [9, 2], 0, 2)], [sampling])[0]
    assert isinstance(loaded.fused._decode_loop._loop, torch.jit.ScriptModule)
    model.pool.rollback(slot, 0)
    loaded.fused._decode_loop._loop = ScriptedLoop(loaded.fused._layers)
    plain = model.decode([Chunk(slot, [9, 2], 0, 2)], [sampling])[0]
    assert compiled.tokens == plain.tokens
    assert triples(compiled.laws) == triples(plain.laws)
    assert [row is None for row in compiled.scores] == [row is None for row in plain.scores] == [by is None] * 4
    for row, same in zip(compiled.scores, plain.scores, strict=True):
        if row is not None and same is not None:
            assert torch.equal(row, same)


def test_what_cannot_be_written_is_refused(load: Callable[..., LoadedModel]) -> None:
    model = PackedModel.build(load("llama"), max_sequences=1, max_length=8)
    slot = model.pool.allocate()
    sampling = Sampling(SamplingLaw(), CONFIG, [0.5] * 7, KNOWN)
    with pytest.raises(ValueError, match="holds 0 positions: 9 more go beyond its 8"):
        model.decode([Chunk(slot, [1, 2, 3], 0, 3)], [sampling])
    assert model.pool.length(slot) == 0
    assert model.has_decode_loop
    unfused = PackedModel.build(load("llama"), max_sequences=1, max_length=48, fuse=False)
    assert not unfused.has_decode_loop
    with pytest.raises(ValueError, match="cannot decode"):
        unfused.decode([Chunk(unfused.pool.allocate(), [1], 0, 1)], [sampling])
