"""Several tokens in one call are the tokens, and the q̂, that one call each draws; eagerly, and by captured steps.

Captures here call again what they hold, over the same tensors as a CUDA graph would.
"""

import math
import random
from collections.abc import Callable, Sequence
from itertools import cycle, product

import pytest
import torch

from kernels.rng import noise_rows
from kernels.sampling import NO_LOGITS, UNSURE, Draw, Sample, SamplingParams, entropy, probabilities, sample
from kernels.sparse import SparseConfig
from outrider.runtime import decode_loop
from outrider.runtime.cuda_graph import PagedRunner, Repeating
from outrider.runtime.decode_loop import CapturedSteps, DecodeLoop, DecodeLoopSize
from outrider.runtime.fused_decoder import FusedDecoder
from outrider.runtime.loader import LoadedModel
from outrider.runtime.model_runner import Chunk, ModelRunner
from tests.outrider.runtime.steps import PAGED, Ticking
from tests.outrider.runtime.tiny import GATED, VOCABULARY

CONFIG = SparseConfig(keep_mass=0.97, max_support=40)
KNOWN = VOCABULARY - 3  # the rest is padding
GAMMA = 6
GREEDY, PLAIN, COOL = SamplingParams(temperature=0), SamplingParams(), SamplingParams(temperature=0.6)
PARAMS = [
    GREEDY,
    PLAIN,
    COOL,
    SamplingParams(temperature=1.4, top_k=9),
    SamplingParams(top_p=0.8),
    SamplingParams(top_k=30, top_p=0.9, min_p=0.05),
]
Load = Callable[..., LoadedModel]


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


def numbers(samples: Sequence[Sample]) -> list[object]:
    """Tokens and q̂, to be compared."""
    return [
        (each.token, None if each.q is None else (each.q.ids.tolist(), each.q.weights.tolist(), each.q.total))
        for each in samples
    ]


def tokens(samples: Sequence[Sample]) -> list[int]:
    return [each.token for each in samples]


def make_draws(params: SamplingParams, rng: random.Random, gamma: int, noise: tuple[int, int] | None) -> list[Draw]:
    """By uniforms, or by noise from a seed and a position on."""
    if noise is None:
        return [Draw(params, rng.random()) for _ in range(gamma)]
    return [Draw(params, noise=(noise[0], noise[1] + i)) for i in range(gamma)]


def filled(model: ModelRunner, tokens: Sequence[int]) -> int:
    """A slot that holds these."""
    slot = model.pool.allocate()
    if tokens:
        model.forward([Chunk(slot, tokens, 0, len(tokens))])
    return slot


def last_logits(model: ModelRunner, slot: int) -> torch.Tensor:
    return model.forward([Chunk(slot, [7], model.pool.length(slot), 0)]).clone()


def eager_loop(loaded: LoadedModel, max_sequences: int = 2, *, fuse: bool = True) -> DecodeLoop:
    return DecodeLoop(ModelRunner.build(loaded, max_sequences, 48, fuse=fuse), KNOWN, CONFIG)


def captured_loop(loaded: LoadedModel, *, with_noise: bool = True) -> DecodeLoop:
    loop = DecodeLoop(ModelRunner.build(loaded, 8, 48, attention=PAGED, blocks=60), KNOWN, CONFIG)
    bounds = {"seconds": 1e3, "most_bytes": 1 << 30}
    found = loop.capture(Repeating(), sequences=3, tokens=GAMMA, with_noise=with_noise, **bounds)  # type: ignore[arg-type]
    assert found == "steps of up to 3 sequences"
    return loop


BOTH = pytest.mark.parametrize("make", [eager_loop, captured_loop])


# --------------------------------------------------------------------------------------------------------- one sequence


@pytest.mark.parametrize(
    ("name", "first", "fuse"),
    [
        *((name, k, True) for name, k in zip(GATED, cycle([1, 13]), strict=False)),
        ("qwen3", 2, True),
        ("gpt2", 3, False),
    ],
)
def test_decoded_tokens_are_those_drawn_step_by_step(name: str, first: int, fuse: bool, load: Load) -> None:
    """Bit for bit, after a prompt most of which is cached, with all params, by uniforms and by shared noise."""
    loop = eager_loop(load(name), fuse=fuse)
    model = loop.model_runner
    rng = random.Random(first)
    prompt = rng.choices(range(VOCABULARY), k=5 + first)
    one, other = filled(model, prompt[:5]), filled(model, prompt[:5])
    for params, by_noise in product(PARAMS, (False, True)):
        draws = make_draws(params, rng, 6, (first, 5 + first) if by_noise else None)
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


@pytest.mark.parametrize(
    ("name", "captures_steps", "with_noise"),
    [("qwen3", False, True), ("qwen3", True, False), ("mistral-sliding", True, False), ("gpt2", True, False)],
)
def test_captured_steps_draw_what_is_drawn_step_by_step(
    name: str, captures_steps: bool, with_noise: bool, load: Load
) -> None:
    """Less with noise, whose kernels are interpreted here."""
    loop = captured_loop(load(name), with_noise=with_noise)
    model = loop.model_runner
    if captures_steps:
        model.capture(Repeating(), max_sequences=3, widest=2, seconds=1e3, most_bytes=1 << 30)
    rng = random.Random(1)
    cases = product((GREEDY, PLAIN), (1, 9), (GAMMA,)) if with_noise else product(PARAMS[:3], (1, 2, 9), (GAMMA, 1))
    for params, first, gamma in cases:
        prompt = rng.choices(range(VOCABULARY), k=5 + first)
        one, other = filled(model, prompt[:5]), filled(model, prompt[:5])
        draws = make_draws(params, rng, gamma, (7, 5 + first) if with_noise else None)
        assert loop.obstacle([draws]) is None
        (samples,) = loop.decode([Chunk(one, prompt[5:], 5, first)], [draws])
        assert numbers(samples) == numbers(step_by_step(model, other, prompt[5:], draws))
        assert [each.scores is not None for each in samples] == [params.is_greedy] * gamma
        assert model.pool.length(one) == model.pool.length(other) == 5 + first + gamma - 1
        assert torch.allclose(last_logits(model, one), last_logits(model, other), atol=1e-5)
        model.pool.free(one)
        model.pool.free(other)
    model.pool.check_integrity()


@pytest.mark.parametrize("params", PARAMS, ids=str)
@pytest.mark.parametrize("by_noise", [False, True], ids=["uniforms", "noise"])
def test_decoding_ends_before_the_first_token_above_its_entropy_bound(
    by_noise: bool, params: SamplingParams, load: Load
) -> None:
    """Also at a bound that is the very entropy of one of the tokens, which is not above it."""
    loop = eager_loop(load("llama"))
    model = loop.model_runner
    one, other = model.pool.allocate(), model.pool.allocate()
    free = make_draws(params, random.Random(7), 6, (7, 3) if by_noise else None)
    (unbounded,) = loop.decode([Chunk(one, [3, 1, 4], 0, 3)], [free])
    entropies = _entropies(model, other, [3, 1, 4, *tokens(unbounded)[:-1]], params, unbounded)
    assert max(entropies) > min(entropies)
    ended = set()
    for bound in (*entropies, -1.0, 100.0, *(math.nextafter(each, 0) for each in entropies)):
        draws = [free[0], *(draw._replace(max_entropy=bound) for draw in free[1:])]
        for slot in (one, other):
            model.pool.rollback(slot, 0)
        (samples,) = loop.decode([Chunk(one, [3, 1, 4], 0, 3)], [draws])
        assert numbers(samples) == numbers(step_by_step(model, other, [3, 1, 4], draws))
        kept = 1 + next((i for i, each in enumerate(entropies[1:]) if each > bound), 5)
        assert tokens(samples) == [*tokens(unbounded)[:kept], *[UNSURE] * (kept < 6)]
        assert model.pool.length(one) == model.pool.length(other) == 3 + min(kept, 5)
        ended.add(kept)
    assert {1, 6} <= ended


def _entropies(
    model: ModelRunner, slot: int, text: list[int], params: SamplingParams, samples: Sequence[Sample]
) -> list[float]:
    """The entropy of what each token was drawn from: of q̂, of q, or of the softmax at T = 0."""
    model.forward([Chunk(slot, text[:2], 0, 2)])
    found = []
    for at, each in enumerate(samples, start=2):
        logits = model.forward([Chunk(slot, text[at : at + 1], at, 0)])[:, :KNOWN]
        p = probabilities(logits, PLAIN if params.is_greedy else params)[0].numpy()
        found.append(entropy(p) if each.q is None else entropy(each.q.weights / each.q.total))
    return found


def test_each_token_is_chosen_by_the_noise_of_its_own_position(load: Load) -> None:
    """A flat distribution, so that each token is the noise's own: where it is least."""
    loop = eager_loop(load("llama"))
    slot, params = loop.model_runner.pool.allocate(), SamplingParams(temperature=100.0)
    (samples,) = loop.decode([Chunk(slot, [3, 1, 4], 0, 3)], [[Draw(params, noise=(8, 3 + i)) for i in range(6)]])
    assert tokens(samples) == noise_rows([(8, 3 + i) for i in range(6)], KNOWN).argmax(-1).tolist()


def test_decoding_goes_on_where_blocks_lie_apart(load: Load) -> None:
    """Keys and values are gathered for the whole call then, and written back at its end."""
    loop = eager_loop(load("llama"), 3)
    pool = loop.model_runner.pool
    slots = [pool.allocate() for _ in range(3)]
    for start in range(0, 40, 8):  # the blocks of the three take turns
        loop.model_runner.forward([Chunk(slot, range(start, start + 8), start, 8) for slot in slots])
    draws = [Draw(PLAIN, u) for u in (0.2, 0.9, 0.5, 0.1)]
    (samples,) = loop.decode([Chunk(slots[1], [7], 40, 0)], [draws])
    assert numbers(samples) == numbers(step_by_step(loop.model_runner, slots[2], [7], draws))
    assert torch.equal(*(loop.model_runner.forward([Chunk(slot, [9], 44, 0)]) for slot in slots[1:]))


@BOTH
def test_nan_logits_end_the_decoding(make: Callable[[LoadedModel], DecodeLoop], load: Load) -> None:
    loaded = load("llama")
    loop = make(loaded)
    assert isinstance(loaded.fused, FusedDecoder)
    pool, embedding = loop.model_runner.pool, loaded.fused._layers.embedding
    for params, noise in ((GREEDY, None), (PLAIN, None), (PLAIN, (1, 1))):
        slot, draws = pool.allocate(), make_draws(params, random.Random(1), 3, noise)
        ((first,),) = loop.decode([Chunk(slot, [5], 0, 1)], [draws[:1]])
        pool.rollback(slot, 0)
        before = embedding[first.token].clone()
        embedding[first.token] = float("nan")
        (samples,) = loop.decode([Chunk(slot, [5], 0, 1)], [draws])
        embedding[first.token] = before
        assert tokens(samples) == [first.token, NO_LOGITS]
        assert samples[1] == Sample(NO_LOGITS)
        assert pool.length(slot) == 2
        pool.free(slot)


def test_layers_decode_the_same_compiled_or_not(load: Load) -> None:
    loaded = load("qwen3")
    loop = eager_loop(loaded, 1)
    assert isinstance(loaded.fused, FusedDecoder)
    slot, draws = loop.model_runner.pool.allocate(), [Draw(SamplingParams(top_p=0.9), u) for u in (0.3, 0.6, 0.1, 0.8)]
    (compiled,) = loop.decode([Chunk(slot, [9, 2], 0, 2)], [draws])
    assert isinstance(loaded.fused._run, torch.jit.ScriptModule)
    loop.model_runner.pool.rollback(slot, 0)
    loaded.fused._run = loaded.fused._layers
    (plain,) = loop.decode([Chunk(slot, [9, 2], 0, 2)], [draws])
    assert numbers(compiled) == numbers(plain)


# ------------------------------------------------------------------------------------------------------------- together


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_sequences_decoded_together_are_those_decoded_alone(name: str, load: Load) -> None:
    """Each has a prompt, params, a number of tokens and an end of its own; they may differ by rounding alone."""
    loop = eager_loop(load(name), 24)
    model = loop.model_runner
    rng = random.Random(5)
    chunks, alone, draws = list[Chunk](), list[Chunk](), list[list[Draw]]()
    for number, (params, by_noise) in enumerate(product(PARAMS, (False, True))):
        held, new, gamma = rng.randrange(12), rng.randrange(1, 5), rng.randrange(1, 7)
        prompt = rng.choices(range(VOCABULARY), k=held + new)
        for each in (chunks, alone):
            each.append(Chunk(filled(model, prompt[:held]), prompt[held:], held, 0))
        own = make_draws(params, rng, gamma, (number, held + new) if by_noise else None)
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
        assert torch.allclose(last_logits(model, chunk.slot), last_logits(model, single.slot), atol=1e-4)


def assert_same_together(loop: DecodeLoop) -> None:
    """Three sequences in a pool decode together what they decode alone, and leave no trace past their own ends."""
    model = loop.model_runner
    for seed in range(4):
        rng = random.Random(seed)
        chunks, draws, prompts = [], [], []
        for number in range(3):
            prompt = rng.choices(range(VOCABULARY), k=rng.randrange(2, 12))
            new = rng.randrange(1, 3)
            chunks.append(Chunk(filled(model, prompt[:-new]), prompt[-new:], len(prompt) - new, new))
            noise = (seed, len(prompt)) if rng.random() < 0.4 else None
            draws.append(make_draws(PARAMS[(seed + number) % 3], rng, rng.randrange(1, GAMMA + 1), noise))
            prompts.append(prompt)
        together = loop.decode(chunks, draws)
        for chunk, own, prompt, samples in zip(chunks, draws, prompts, together, strict=True):
            slot = model.pool.allocate()
            (alone,) = loop.decode([Chunk(slot, prompt, 0, 0)], [own])
            assert tokens(samples) == tokens(alone)
            assert len(samples) == len(own)
            model.pool.rollback(slot, 0)
            text = [*prompt, *tokens(samples), 7]
            whole = model.forward([Chunk(slot, text, 0, len(text) - 2)]).clone()
            at = model.pool.length(chunk.slot)
            assert at == len(text) - 2
            assert torch.allclose(model.forward([Chunk(chunk.slot, text[at:], at, 0)]), whole, atol=1e-4)
            model.pool.free(slot)
            model.pool.free(chunk.slot)
    model.pool.check_integrity()


def test_captured_steps_of_several_sequences_keep_them_apart(load: Load) -> None:
    """Those that are done early go on with the others' steps, and must leave no trace of it."""
    assert_same_together(captured_loop(load("qwen3")))


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "mutant", ["bits", "positions", *(pytest.param(each, marks=SLOW) for each in ("limits", "by_noise"))]
)
def test_wrong_inputs_of_captured_steps_are_noticed(mutant: str, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = captured_loop(load("qwen3"))
    fill = decode_loop._Table.fill

    def wrong(self: decode_loop._Table, *arguments: object) -> None:
        fill(self, *arguments)  # type: ignore[arg-type]
        match mutant:
            case "limits":
                self._put["limits"].fill_(48)
            case "bits":
                self._put["bits"][1:] = self._put["bits"][:-1].clone()
            case "by_noise":
                self._put["by_noise"].zero_()
            case "positions":
                self._put["positions"].sub_(1)

    monkeypatch.setattr(decode_loop._Table, "fill", wrong)
    if mutant in ("bits", "by_noise"):  # wrong alone and together alike
        model = loop.model_runner
        draws = make_draws(PLAIN, random.Random(2), GAMMA, (3, 1) if mutant == "by_noise" else None)
        (samples,) = loop.decode([Chunk(model.pool.allocate(), [5], 0, 1)], [draws])
        assert tokens(samples) != tokens(step_by_step(model, model.pool.allocate(), [5], draws))
        return
    with pytest.raises(AssertionError):
        assert_same_together(loop)


# ----------------------------------------------------------------------------------------------------- what is captured


def test_draws_without_a_graph_are_named_and_refused(load: Load) -> None:
    plain = Draw(PLAIN, 0.5)
    bare = DecodeLoop(ModelRunner.build(load("llama"), 4, 48, attention=PAGED), KNOWN, CONFIG)
    assert bare.obstacle([[plain]]) == "no steps are captured"
    loop = captured_loop(load("llama"), with_noise=False)
    assert loop.obstacle([[plain]] * 3) is None
    pool = loop.model_runner.pool
    for refused, reason in (
        ([[plain]] * 4, "4 sequences, where there is room for 3"),
        ([[plain] * 7], "7 tokens, where there is room for 6"),
        ([[plain._replace(params=SamplingParams(top_p=0.9))]], "top-k, top-p or min-p"),
        ([[plain, plain._replace(max_entropy=1.0)]], "an entropy to stop at"),
        ([[plain._replace(noise=(1, 1))]], "noise, which takes Triton"),
    ):
        assert loop.obstacle(refused) == reason
        slots = [pool.allocate() for _ in refused]
        with pytest.raises(ValueError, match=reason):
            loop.decode([Chunk(slot, [1], 0, 1) for slot in slots], refused)
        for slot in slots:
            assert pool.length(slot) == 0
            pool.free(slot)


def test_tokens_beyond_the_longest_sequence_are_refused(load: Load) -> None:
    loop = DecodeLoop(ModelRunner.build(load("llama"), max_sequences=1, max_length=8), KNOWN, CONFIG)
    slot = loop.model_runner.pool.allocate()
    with pytest.raises(ValueError, match="holds 0 positions: 9 more go beyond its 8"):
        loop.decode([Chunk(slot, [1, 2, 3], 0, 3)], [[Draw(PLAIN, 0.5)] * 7])
    assert loop.model_runner.pool.length(slot) == 0


@pytest.mark.parametrize(
    ("fails_at", "seconds", "expected"),
    [
        (math.inf, 100.0, "steps of up to 4 sequences"),
        (math.inf, 5.0, "steps of up to 2 sequences: 4.0 s have passed, and all may take 5"),
        (3, 100.0, "steps of up to 1 sequences: it asks for a number"),
    ],
)
def test_steps_are_captured_within_their_time(fails_at: float, seconds: float, expected: str, load: Load) -> None:
    model = ModelRunner.build(load("llama"), 4, 48, attention=PAGED)
    assert isinstance(model.paged_runner, PagedRunner)
    size = DecodeLoopSize(4, GAMMA, 48, 4, KNOWN, logits_size=VOCABULARY, with_noise=False)
    steps, capturer = CapturedSteps(model, model.paged_runner, size, CONFIG), Ticking(fails_at)
    assert steps.capture(capturer, seconds=seconds, most_bytes=1 << 30, clock=capturer.clock) == expected
