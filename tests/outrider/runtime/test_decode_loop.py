"""Several tokens in one call are the tokens, and the q̂, that one call each would have drawn."""

import math
import random
from collections.abc import Callable, Sequence
from itertools import cycle, product

import pytest
import torch

from kernels.rng import noise_rows
from kernels.sampling import NO_LOGITS, UNSURE, Draw, Sample, SamplingParams, entropy, probabilities, sample
from kernels.sparse import SparseConfig
from outrider.runtime.decode_loop import DecodeLoop
from outrider.runtime.fused_decoder import FusedDecoder
from outrider.runtime.loader import LoadedModel
from outrider.runtime.model_runner import Chunk, ModelRunner
from tests.outrider.runtime.tiny import GATED, VOCABULARY

CONFIG = SparseConfig(keep_mass=0.97, max_support=40)
KNOWN = VOCABULARY - 3  # the rest is padding
LAWS = [
    SamplingParams(temperature=0),
    SamplingParams(),
    SamplingParams(temperature=0.6),
    SamplingParams(temperature=1.4, top_k=9),
    SamplingParams(top_p=0.8),
    SamplingParams(top_k=30, top_p=0.9, min_p=0.05),
]


def step_by_step(
    model: ModelRunner, slot: int, chunk: Sequence[int], draws: Sequence[Draw], vocab_size: int = KNOWN
) -> list[Sample]:
    """One forward and one sample a token."""
    samples = list[Sample]()
    for draw in draws:
        logits = model.forward([Chunk(slot, chunk, model.pool.length(slot), len(chunk) - 1)])
        samples += sample(logits[:, :vocab_size], [draw], CONFIG)
        chunk = [samples[-1].token]
        if chunk == [UNSURE]:
            break
    return samples


Numbers = tuple[int, tuple[list[int], list[int], int] | None]


def numbers(samples: Sequence[Sample]) -> list[Numbers]:
    """Tokens and q̂, to be compared."""
    return [
        (each.token, None if each.q is None else (each.q.ids.tolist(), each.q.weights.tolist(), each.q.total))
        for each in samples
    ]


def tokens(samples: Sequence[Sample]) -> list[int]:
    return [each.token for each in samples]


def drawn_by(law: SamplingParams, rng: random.Random, gamma: int, noise: tuple[int, int] | None) -> list[Draw]:
    """By uniforms, or by noise from a seed and a position on."""
    if noise is None:
        return [Draw(law, rng.random()) for _ in range(gamma)]
    return [Draw(law, noise=(noise[0], noise[1] + i)) for i in range(gamma)]


def loop_of(loaded: LoadedModel, max_sequences: int = 2, *, fuse: bool = True) -> DecodeLoop:
    return DecodeLoop(ModelRunner.build(loaded, max_sequences, 48, fuse=fuse), KNOWN, CONFIG)


@pytest.mark.parametrize(
    ("name", "first", "fuse"),
    [
        *((name, k, True) for name, k in zip(GATED, cycle([1, 13]), strict=False)),
        ("qwen3", 2, True),
        ("gpt2", 3, False),
    ],
)
def test_decoded_tokens_are_those_drawn_step_by_step(
    name: str, first: int, fuse: bool, load: Callable[..., LoadedModel]
) -> None:
    """Bit for bit, after a prompt that the cache holds most of, for every law, by uniforms and by shared noise."""
    loop = loop_of(load(name), fuse=fuse)
    model = loop.model_runner
    rng = random.Random(first)
    prompt = rng.choices(range(VOCABULARY), k=5 + first)
    one, other = model.pool.allocate(), model.pool.allocate()
    for slot in (one, other):
        model.forward([Chunk(slot, prompt[:5], 0, 4)])
    for law, by_noise in product(LAWS, (False, True)):
        draws = drawn_by(law, rng, 6, (first, 5 + first) if by_noise else None)
        assert loop.obstacle([draws]) is None
        (samples,) = loop.decode([Chunk(one, prompt[5:], 5, first)], [draws])
        expected = step_by_step(model, other, prompt[5:], draws)
        assert numbers(samples) == numbers(expected)
        if by_noise:
            assert [each.q for each in samples] == [None] * 6
        for mine, theirs in zip(samples, expected, strict=True):
            assert (mine.scores is None) is (theirs.scores is None) is (mine.q is not None)
            if mine.scores is not None and theirs.scores is not None:
                assert torch.equal(mine.scores, theirs.scores)
        assert model.pool.length(one) == model.pool.length(other) == 5 + first + 5
        for slot in (one, other):
            model.pool.rollback(slot, 5)


@pytest.mark.parametrize("law", LAWS, ids=str)
@pytest.mark.parametrize("by_noise", [False, True], ids=["uniforms", "noise"])
def test_decoding_ends_before_the_first_token_above_its_bound(
    by_noise: bool, law: SamplingParams, load: Callable[..., LoadedModel]
) -> None:
    """Bit for bit: also at a bound that is the very entropy of one of the tokens, which is not above it."""
    loop = loop_of(load("llama"))
    model = loop.model_runner
    one, other = model.pool.allocate(), model.pool.allocate()
    free = drawn_by(law, random.Random(7), 6, (7, 3) if by_noise else None)
    (unbounded,) = loop.decode([Chunk(one, [3, 1, 4], 0, 3)], [free])
    entropies = _entropies(model, other, [3, 1, 4, *tokens(unbounded)[:-1]], law, unbounded)
    assert max(entropies) > min(entropies)
    ended = set()
    for bound in (*entropies, -1.0, 100.0, *(math.nextafter(each, 0) for each in entropies)):
        draws = [free[0], *(draw._replace(max_entropy=bound) for draw in free[1:])]
        decoded = []
        for slot in (one, other):
            model.pool.rollback(slot, 0)
            if slot == one:
                (samples,) = loop.decode([Chunk(slot, [3, 1, 4], 0, 3)], [draws])
            else:
                samples = step_by_step(model, slot, [3, 1, 4], draws)
            decoded.append((numbers(samples), model.pool.length(slot)))
        assert decoded[0] == decoded[1]
        kept = 1 + next((i for i, each in enumerate(entropies[1:]) if each > bound), 5)
        assert [token for token, _ in decoded[0][0]] == [*tokens(unbounded)[:kept], *[UNSURE] * (kept < 6)]
        assert decoded[0][1] == 3 + min(kept, 5)
        ended.add(kept)
    assert {1, 6} <= ended


def _entropies(
    model: ModelRunner, slot: int, text: list[int], law: SamplingParams, samples: Sequence[Sample]
) -> list[float]:
    """The entropy of what each token was drawn from: of q̂, of q, or of the softmax at T = 0."""
    model.pool.rollback(slot, 0)
    model.forward([Chunk(slot, text[:2], 0, 2)])
    found = []
    for at, each in enumerate(samples, start=2):
        logits = model.forward([Chunk(slot, text[at : at + 1], at, 0)])[:, :KNOWN]
        p = probabilities(logits, SamplingParams() if law.is_greedy else law)[0].numpy()
        found.append(entropy(p) if each.q is None else entropy(each.q.weights / each.q.total))
    model.pool.rollback(slot, 0)
    return found


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_sequences_decoded_together_are_those_decoded_alone(name: str, load: Callable[..., LoadedModel]) -> None:
    """Each has a prompt, a law, a number of tokens and an end of its own; only rounding may tell the company."""
    loop = loop_of(load(name), 24)
    model = loop.model_runner
    rng = random.Random(5)
    chunks, alone, draws = list[Chunk](), list[Chunk](), list[list[Draw]]()
    for number, (law, by_noise) in enumerate(product(LAWS, (False, True))):
        held, new, gamma = rng.randrange(12), rng.randrange(1, 5), rng.randrange(1, 7)
        prompt = rng.choices(range(VOCABULARY), k=held + new)
        for kept in (chunks, alone):
            slot = model.pool.allocate()
            if held:
                model.forward([Chunk(slot, prompt[:held], 0, held)])
            kept.append(Chunk(slot, prompt[held:], held, 0))
        own = drawn_by(law, rng, gamma, (number, held + new) if by_noise else None)
        bound = 3.0 if number % 3 == 0 else math.inf
        draws.append([own[0], *(draw._replace(max_entropy=bound) for draw in own[1:])])
    together = loop.decode(chunks, draws)
    assert any(each[-1].token == UNSURE for each in together), "one that ends early leaves the others to go on"
    for chunk, single, own, samples in zip(chunks, alone, draws, together, strict=True):
        (expected,) = loop.decode([single], [own])
        assert tokens(samples) == tokens(expected)
        assert [each.q is None for each in samples] == [each.q is None for each in expected]
        for mine, theirs in zip(samples, expected, strict=True):
            if mine.q is not None and theirs.q is not None:
                assert mine.q.ids.tolist() == theirs.q.ids.tolist()
                assert abs(mine.q.weights.astype(int) - theirs.q.weights.astype(int)).max() <= 1
        assert model.pool.length(chunk.slot) == model.pool.length(single.slot)
        ends = [model.forward([Chunk(each.slot, [7], model.pool.length(each.slot), 0)]) for each in (chunk, single)]
        assert torch.allclose(ends[0], ends[1], atol=1e-4)


def test_each_token_is_chosen_by_the_noise_of_its_own_position(load: Callable[..., LoadedModel]) -> None:
    """A flat law, so that each token is the noise's own: where it is least."""
    loop = loop_of(load("llama"))
    slot, law = loop.model_runner.pool.allocate(), SamplingParams(temperature=100.0)
    (samples,) = loop.decode([Chunk(slot, [3, 1, 4], 0, 3)], [[Draw(law, noise=(8, 3 + i)) for i in range(6)]])
    assert tokens(samples) == noise_rows([(8, 3 + i) for i in range(6)], KNOWN).argmax(-1).tolist()


def test_what_was_decoded_is_in_the_cache(load: Callable[..., LoadedModel]) -> None:
    loop = loop_of(load("llama"))
    model = loop.model_runner
    slot, fresh = model.pool.allocate(), model.pool.allocate()
    (samples,) = loop.decode([Chunk(slot, [3, 1, 4], 0, 3)], [[Draw(SamplingParams(), u) for u in (0.2, 0.9, 0.5)]])
    after = model.forward([Chunk(slot, [samples[-1].token, 7], 5, 0)])
    whole = model.forward([Chunk(fresh, [3, 1, 4, *tokens(samples), 7], 0, 5)])
    assert torch.allclose(after, whole, atol=1e-5)


def test_decoding_goes_on_where_blocks_lie_apart(load: Callable[..., LoadedModel]) -> None:
    """Keys and values are gathered for the whole call then, and written back at its end."""
    loop = loop_of(load("llama"), 3)
    pool = loop.model_runner.pool
    slots = [pool.allocate() for _ in range(3)]
    for start in range(0, 40, 8):  # the blocks of the three take turns
        loop.model_runner.forward([Chunk(slot, range(start, start + 8), start, 8) for slot in slots])
    draws = [Draw(SamplingParams(), u) for u in (0.2, 0.9, 0.5, 0.1)]
    (samples,) = loop.decode([Chunk(slots[1], [7], 40, 0)], [draws])
    assert numbers(samples) == numbers(step_by_step(loop.model_runner, slots[2], [7], draws))
    ends = [loop.model_runner.forward([Chunk(slot, [9], 44, 0)]) for slot in slots[1:]]
    assert torch.equal(ends[0], ends[1])


def test_logits_that_are_no_numbers_end_the_decoding(load: Callable[..., LoadedModel]) -> None:
    loaded = load("llama")
    loop = loop_of(loaded, 1)
    assert isinstance(loaded.fused, FusedDecoder)
    slot, embedding = loop.model_runner.pool.allocate(), loaded.fused._layers.embedding
    for law, noise in ((SamplingParams(temperature=0), None), (SamplingParams(), None), (SamplingParams(), (1, 1))):
        draws = drawn_by(law, random.Random(1), 3, noise)
        ((first,),) = loop.decode([Chunk(slot, [5], 0, 1)], [draws[:1]])
        loop.model_runner.pool.rollback(slot, 0)
        kept = embedding[first.token].clone()
        embedding[first.token] = float("nan")
        (samples,) = loop.decode([Chunk(slot, [5], 0, 1)], [draws])
        embedding[first.token] = kept
        assert loop.model_runner.pool.length(slot) == 2
        loop.model_runner.pool.rollback(slot, 0)
        assert tokens(samples) == [first.token, NO_LOGITS]
        assert samples[1] == Sample(NO_LOGITS)


def test_compiled_or_not_the_layers_do_the_same(load: Callable[..., LoadedModel]) -> None:
    loaded = load("qwen3")
    loop = loop_of(loaded, 1)
    assert isinstance(loaded.fused, FusedDecoder)
    slot, draws = loop.model_runner.pool.allocate(), [Draw(SamplingParams(top_p=0.9), u) for u in (0.3, 0.6, 0.1, 0.8)]
    (compiled,) = loop.decode([Chunk(slot, [9, 2], 0, 2)], [draws])
    assert isinstance(loaded.fused._run, torch.jit.ScriptModule)
    loop.model_runner.pool.rollback(slot, 0)
    loaded.fused._run = loaded.fused._layers
    (plain,) = loop.decode([Chunk(slot, [9, 2], 0, 2)], [draws])
    assert numbers(compiled) == numbers(plain)


def test_what_does_not_fit_is_refused(load: Callable[..., LoadedModel]) -> None:
    loop = DecodeLoop(ModelRunner.build(load("llama"), max_sequences=1, max_length=8), KNOWN, CONFIG)
    slot = loop.model_runner.pool.allocate()
    with pytest.raises(ValueError, match="holds 0 positions: 9 more go beyond its 8"):
        loop.decode([Chunk(slot, [1, 2, 3], 0, 3)], [[Draw(SamplingParams(), 0.5)] * 7])
    assert loop.model_runner.pool.length(slot) == 0
