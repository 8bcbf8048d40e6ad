"""The decode loop draws the tokens and the q̂ of single steps, eagerly and by captured steps.

Without a device a replay calls the captured function again, over the same tensors as a CUDA graph would.
"""

import random
from collections.abc import Callable, Sequence
from itertools import count, cycle, product

import pytest
import torch

from kernels.adjustments import Adjuster, LogitRules, apply
from kernels.rng import Domain, uniform
from kernels.sampling import NO_LOGITS, UNSURE, Draw, Sample, SamplingParams, sample
from kernels.sparse import SparseConfig
from kernels.verify import Proposed, Rule, Uniforms, verify
from kernels.verify_c import is_available
from outrider.runtime import captured_steps
from outrider.runtime.cuda_graph import Capturer
from outrider.runtime.decode_loop import DecodeLoop
from outrider.runtime.fused_decoder import FusedDecoder
from outrider.runtime.loader import LoadedModel
from outrider.runtime.model_runner import Chunk, ModelRunner
from outrider.runtime.torch_runner import TorchRunner
from tests.outrider.runtime.steps import PAGED
from tests.outrider.runtime.tiny import GATED, VOCABULARY

CONFIG = SparseConfig(keep_mass=0.97, max_support=40)
KNOWN = VOCABULARY - 3  # the rest is padding
GAMMA = 6
PENALTIES = LogitRules(repetition_penalty=1.4, frequency_penalty=0.8, banned_tokens=(1, KNOWN - 1))
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
    model: ModelRunner,
    slot: int,
    chunk: Sequence[int],
    draws: Sequence[Draw],
    vocab_size: int = KNOWN,
    adjuster: Adjuster | None = None,
) -> list[Sample]:
    """One forward and one sample a token."""
    samples = list[Sample]()
    for draw in draws:
        logits = model.forward([Chunk(slot, chunk, model.pool.length(slot), len(chunk) - 1)])[:, :vocab_size]
        samples += sample(logits if adjuster is None else apply(logits, [adjuster.row()]), [draw], CONFIG)
        chunk = [samples[-1].token]
        if adjuster is not None:
            adjuster.push(chunk[0])
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
    """By uniforms, or by noise of a seed from a position on."""
    if noise is None:
        return [Draw(params, rng.random()) for _ in range(gamma)]
    return [Draw(params, noise=(noise[0], noise[1] + i)) for i in range(gamma)]


def filled(model: ModelRunner, tokens: Sequence[int]) -> int:
    """A slot that holds these tokens."""
    slot = model.pool.allocate()
    if tokens:
        model.forward([Chunk(slot, tokens, 0, len(tokens))])
    return slot


def eager_loop(loaded: LoadedModel, max_sequences: int = 8, *, fuse: bool = True) -> DecodeLoop:
    return DecodeLoop(TorchRunner.build(loaded, max_sequences, 48, fuse=fuse), KNOWN, CONFIG)


def captured_loop(loaded: LoadedModel, *, tokens: int = GAMMA) -> DecodeLoop:
    loop = DecodeLoop(TorchRunner.build(loaded, 8, 48, attention=PAGED, blocks=60), KNOWN, CONFIG)
    bounds = {"seconds": 1e3, "most_bytes": 1 << 30}
    found = loop.capture(Capturer(), sequences=3, tokens=tokens, with_kernels=True, **bounds)  # type: ignore[arg-type]
    assert found == "steps of up to 3 sequences"
    return loop


@pytest.mark.parametrize(
    "path", ["torch", pytest.param("c", marks=pytest.mark.skipif(not is_available(), reason="no library in C"))]
)
@pytest.mark.parametrize("by_noise", [False, True])
def test_a_target_draws_as_verification_does(by_noise: bool, path: str, load: Load) -> None:
    loop = DecodeLoop(TorchRunner.build(load("llama"), 2, 48), KNOWN, None, path)
    z = 0.3 * torch.randn(64, KNOWN, generator=torch.Generator().manual_seed(5))
    rule = Rule.COUPLED if by_noise else Rule.TOKENWISE
    for params in PARAMS:
        places = range(len(z))
        draws = [Draw(params, uniform(3, i, 0, Domain.RESAMPLE), (3, i) if by_noise else None) for i in places]
        alone = [Proposed((), (), params, seed=3, base_length=i, rule=rule) for i in places]
        drawn = loop._drawn(z, draws, [None] * len(draws))
        assert [each.token for each in drawn] == [each.next_token for each in verify(z, alone, path)]
        assert all(each.q is None and each.scores is None for each in drawn)


@pytest.mark.usefixtures("layers_by_torch")
@pytest.mark.parametrize(
    ("name", "first", "fuse"),
    [
        *((name, k, True) for name, k in zip(GATED, cycle([1, 13]), strict=False)),
        ("qwen3", 2, True),
        ("gpt2", 3, False),
    ],
)
def test_decoded_tokens_are_those_of_single_steps(name: str, first: int, fuse: bool, load: Load) -> None:
    """Bit for bit, after a prompt most of which is cached, with all params and penalties, by uniforms and by noise."""
    loop = eager_loop(load(name), fuse=fuse)
    model = loop.model_runner
    rng = random.Random(first)
    prompt = rng.choices(range(VOCABULARY), k=5 + first)
    one, other = filled(model, prompt[:5]), filled(model, prompt[:5])
    for params, by_noise in product(PARAMS, (False, True)):
        draws = make_draws(params, rng, 6, (first, 5 + first) if by_noise else None)
        adjuster = rng.choice((None, Adjuster(PENALTIES, prompt, KNOWN)))
        assert loop.obstacle([draws], [adjuster]) is None
        (samples,) = loop.decode([Chunk(one, prompt[5:], 5, first)], [draws], adjusters=[adjuster])
        expected = step_by_step(model, other, prompt[5:], draws, adjuster=adjuster)
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


def assert_alike(found: Sequence[Sample], wanted: Sequence[Sample]) -> None:
    """The same tokens, and weights within 1 of 65,535; of tokens with a weight of 1 others may be kept."""
    assert tokens(found) == tokens(wanted)
    for mine, theirs in zip(found, wanted, strict=True):
        weights = [
            {} if q is None else dict(zip(q.ids.tolist(), q.weights.tolist(), strict=True)) for q in (mine.q, theirs.q)
        ]
        assert all(abs(weights[0].get(x, 0) - weights[1].get(x, 0)) <= 1 for x in weights[0] | weights[1])


@pytest.mark.parametrize(
    ("name", "captures_steps", "by_noise"),
    [("qwen3", False, True), ("qwen3", True, False), ("mistral-sliding", True, False), ("gpt2", True, False)],
)
def test_captured_steps_draw_the_tokens_of_single_steps(
    name: str, captures_steps: bool, by_noise: bool, load: Load
) -> None:
    loop = captured_loop(load(name))
    model = loop.model_runner
    if captures_steps:
        model.capture(Capturer(), max_sequences=3, widest=2, seconds=1e3, most_bytes=1 << 30)
    rng = random.Random(1)
    for params, first, gamma in product((GREEDY, PLAIN) if by_noise else PARAMS[:3], (1, 9), (GAMMA, 1)):
        prompt = rng.choices(range(VOCABULARY), k=5 + first)
        one, other = filled(model, prompt[:5]), filled(model, prompt[:5])
        draws = make_draws(params, rng, gamma, (7, 5 + first) if by_noise else None)
        assert loop.obstacle([draws]) is None
        (samples,) = loop.decode([Chunk(one, prompt[5:], 5, first)], [draws])
        assert_alike(samples, step_by_step(model, other, prompt[5:], draws))
        assert [each.scores is not None for each in samples] == [params.is_greedy] * gamma
        assert model.pool.length(one) == model.pool.length(other) == 5 + first + gamma - 1
        mine, theirs = (model.forward([Chunk(slot, [7], model.pool.length(slot), 0)]).clone() for slot in (one, other))
        assert torch.allclose(mine, theirs, atol=1e-5)
        model.pool.free(one)
        model.pool.free(other)
    model.pool.check_integrity()
    assert loop.obstacle([[Draw(PARAMS[-1], noise=(1, 1))]]) == "top-k, top-p or min-p"


def test_captured_steps_draw_the_token_after_a_full_context(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where context and γ together have the length of a stretch, to which the sizes of work lists are rounded up."""
    monkeypatch.setattr("kernels.attention_work.STRETCH", 48 + GAMMA)
    loop = captured_loop(load("qwen3"))
    one, other = (filled(loop.model_runner, range(47)) for _ in range(2))
    (samples,) = loop.decode([Chunk(one, [7], 47, 1)], [[Draw(PLAIN, 0.3)]])
    assert_alike(samples, step_by_step(loop.model_runner, other, [7], [Draw(PLAIN, 0.3)]))


def test_decoding_ends_before_the_first_token_above_its_entropy_bound(load: Load) -> None:
    loop = eager_loop(load("llama"))
    pool, ended = loop.model_runner.pool, set[int]()
    one, other = pool.allocate(), pool.allocate()
    for params, bound in product(PARAMS, (0.0, 1.0, 2.0, 3.0, 100.0)):
        first, *rest = make_draws(params, random.Random(7), 6, None)
        draws = [first, *(draw._replace(max_entropy=bound) for draw in rest)]
        (samples,) = loop.decode([Chunk(one, [3, 1, 4], 0, 3)], [draws])
        assert numbers(samples) == numbers(step_by_step(loop.model_runner, other, [3, 1, 4], draws))
        assert pool.length(one) == pool.length(other)
        ended.add(len(samples))
        for slot in (one, other):
            pool.rollback(slot, 0)
    assert {2, 6} < ended


@pytest.mark.parametrize("is_captured", [False, True])
def test_only_a_draft_never_draws_the_mask_token(is_captured: bool, load: Load) -> None:
    """A target draws from its own distribution. The captured draft draws one token in a row at most."""
    loaded = load("llama")
    loaded.mask_token = None
    draft = captured_loop(loaded, tokens=1) if is_captured else eager_loop(loaded)
    target = DecodeLoop(draft.model_runner, KNOWN, None)
    slot = draft.model_runner.pool.allocate()

    def best(loop: DecodeLoop) -> int:
        draft.model_runner.pool.rollback(slot, 0)
        return loop.decode([Chunk(slot, [3, 1], 0, 1)], [[Draw(GREEDY)]])[0][0].token

    favourite = best(draft)
    loaded.mask_token = favourite
    draft = captured_loop(loaded, tokens=1) if is_captured else draft
    slot = draft.model_runner.pool.allocate()
    assert best(draft) != favourite
    if is_captured:
        return
    assert best(target) == favourite


@pytest.mark.parametrize("is_captured", [False, True])
def test_decoding_ends_after_a_stop_token(is_captured: bool, load: Load) -> None:
    """Of its own sequence; the other one goes on."""
    loop = captured_loop(load("llama")) if is_captured else eager_loop(load("llama"))
    pool, draws = loop.model_runner.pool, [make_draws(GREEDY, random.Random(1), GAMMA, None)] * 2
    slots = [pool.allocate() for _ in range(2)]
    chunks = [Chunk(slot, [3, 1 + slot], 0, 1) for slot in slots]
    first, second = map(tokens, loop.decode(chunks, draws))
    stop = first[2]
    for slot in slots:
        pool.rollback(slot, 0)
    found = list(map(tokens, loop.decode(chunks, draws, [{stop, VOCABULARY}, {VOCABULARY}])))
    assert found == [first[: first.index(stop) + 1], second]
    assert [pool.length(slot) for slot in slots] == [1 + len(each) for each in found]


def test_decoding_continues_over_scattered_blocks(load: Load) -> None:
    loop = eager_loop(load("llama"), 3)
    pool = loop.model_runner.pool
    slots = [pool.allocate() for _ in range(3)]
    for start in range(0, 40, 8):  # the blocks of the three alternate
        loop.model_runner.forward([Chunk(slot, range(start, start + 8), start, 8) for slot in slots])
    draws = [Draw(PLAIN, u) for u in (0.2, 0.9, 0.5, 0.1)]
    (samples,) = loop.decode([Chunk(slots[1], [7], 40, 0)], [draws])
    assert numbers(samples) == numbers(step_by_step(loop.model_runner, slots[2], [7], draws))
    assert torch.equal(*(loop.model_runner.forward([Chunk(slot, [9], 44, 0)]) for slot in slots[1:]))


def test_a_pass_that_fails_changes_no_length(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = eager_loop(load("gpt2"), 3, fuse=False)
    runner, passes = loop.model_runner, count(1)
    slots, logits = [filled(runner, range(5)), filled(runner, range(9))], runner.logits

    def failing(chunks: Sequence[Chunk]) -> torch.Tensor:
        if next(passes) == 3:
            raise RuntimeError("a pass")
        return logits(chunks)

    monkeypatch.setattr(runner, "logits", failing)
    chunks = [Chunk(slot, [7], runner.pool.length(slot), 0) for slot in slots]
    with pytest.raises(RuntimeError, match="a pass"):
        loop.decode(chunks, [[Draw(GREEDY)] * 4] * 2)
    assert [runner.pool.length(slot) for slot in slots] == [5, 9]
    runner.pool.check_integrity()


@pytest.mark.parametrize("make", [eager_loop, captured_loop])
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


@pytest.mark.parametrize(
    ("name", "make", "params", "seeds"),
    [("llama", eager_loop, PARAMS, range(4)), ("qwen3", captured_loop, [GREEDY, PARAMS[-1], PLAIN], (1, 4))],
)
def test_sequences_decoded_together_are_those_decoded_alone(
    name: str,
    make: Callable[[LoadedModel], DecodeLoop],
    params: Sequence[SamplingParams],
    seeds: Sequence[int],
    load: Load,
) -> None:
    """A sequence that ends early continues in captured steps, and leaves no trace of them.

    With both seeds of the captured loop, whose kernels are interpreted here, one sequence of three has noise; between
    them each temperature has uniforms.
    """
    loop = make(load(name))
    model = loop.model_runner
    for seed in seeds:
        rng = random.Random(seed)
        chunks, draws, prompts = [], [], []
        for number in range(3):
            prompt = rng.choices(range(VOCABULARY), k=rng.randrange(2, 12))
            new = rng.randrange(1, 3)
            chunks.append(Chunk(filled(model, prompt[:-new]), prompt[-new:], len(prompt) - new, new))
            noise = (seed, len(prompt)) if rng.random() < 0.4 else None
            draws.append(make_draws(params[(seed + number) % len(params)], rng, rng.randrange(1, GAMMA + 1), noise))
            prompts.append(prompt)
        together = loop.decode(chunks, draws)
        for chunk, own, prompt, samples in zip(chunks, draws, prompts, together, strict=True):
            slot = model.pool.allocate()
            (alone,) = loop.decode([Chunk(slot, prompt, 0, 0)], [own])
            assert tokens(samples) == tokens(alone)
            assert len(samples) == len(own)
            most = own[0].params.top_k or CONFIG.max_support
            assert all(each.q is None or len(each.q.ids) <= most for each in samples)
            model.pool.rollback(slot, 0)
            text = [*prompt, *tokens(samples), 7]
            whole = model.forward([Chunk(slot, text, 0, len(text) - 2)]).clone()
            at = model.pool.length(chunk.slot)
            assert at == len(text) - 2
            assert torch.allclose(model.forward([Chunk(chunk.slot, text[at:], at, 0)]), whole, atol=1e-4)
            model.pool.free(slot)
            model.pool.free(chunk.slot)
    model.pool.check_integrity()


@pytest.fixture
def target_loop(load: Load) -> DecodeLoop:
    """Captured steps of a target."""
    loop = DecodeLoop(TorchRunner.build(load("llama"), 8, 48, attention=PAGED, blocks=60), KNOWN, None)
    bounds = {"sequences": 3, "tokens": 12, "seconds": 1e3, "most_bytes": 1 << 30}
    loop.capture(Capturer(), with_kernels=True, **bounds)  # type: ignore[arg-type]
    return loop


def test_captured_steps_of_a_target_draw_the_tokens_of_verification(target_loop: DecodeLoop) -> None:
    """At temperature 0, by uniforms and by noise, in one batch."""
    model, rng, rounds = target_loop.model_runner, random.Random(3), 12
    noises = [None, None, (5, 4)]
    slots = [model.pool.allocate() for _ in noises]
    prompts = [rng.choices(range(VOCABULARY), k=4) for _ in noises]
    draws = [
        make_draws(params, rng, rounds, noise) for params, noise in zip((GREEDY, COOL, PLAIN), noises, strict=True)
    ]
    chunks = [Chunk(slot, prompt, 0, 4) for slot, prompt in zip(slots, prompts, strict=True)]
    found = list(map(tokens, target_loop.decode(chunks, draws)))
    for prompt, own, drawn in zip(prompts, draws, found, strict=True):
        slot, text = model.pool.allocate(), list(prompt)
        for draw in own:
            logits = model.forward([Chunk(slot, text[model.pool.length(slot) :], model.pool.length(slot), 0)])
            proposal = Proposed(
                (), (), draw.params, draw.noise[0] if draw.noise else 0, draw.noise[1] if draw.noise else 0,
                Rule.COUPLED if draw.noise else Rule.TOKENWISE, uniforms=Uniforms((), draw.uniform),
            )  # fmt: skip
            text.append(verify(logits[-1:, :KNOWN], [proposal], "torch")[0].next_token)
        assert drawn == text[4:]
        model.pool.free(slot)


def test_a_captured_loop_of_a_target_ends_one_token_after_a_text_ends(target_loop: DecodeLoop) -> None:
    pool, rng = target_loop.model_runner.pool, random.Random(2)
    draws = [make_draws(PLAIN, rng, 8, None) for _ in range(2)]
    slots = [pool.allocate() for _ in range(2)]
    chunks = [Chunk(slot, [3, 1 + slot], 0, 1) for slot in slots]
    first, second = map(tokens, target_loop.decode(chunks, draws))
    assert (len(first), len(second)) == (8, 8)
    for slot in slots:
        pool.rollback(slot, 0)
    end = first.index(first[2]) + 1
    found = list(map(tokens, target_loop.decode(chunks, draws, [{first[2]}, ()])))
    assert found == [first[:end], second[: end + 1]]
    assert [pool.length(slot) for slot in slots] == [1 + len(each) for each in found]
    for slot in slots:
        pool.rollback(slot, 0)
    found = list(map(tokens, target_loop.decode(chunks, [draws[0][:3], draws[1]])))  # a text may end by its length
    assert found == [first[:3], second[:4]]


def test_an_interrupt_ends_captured_steps(target_loop: DecodeLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first step, or while one runs: then the token of that step is the last."""
    pool, slot = target_loop.model_runner.pool, target_loop.model_runner.pool.allocate()
    draws = make_draws(PLAIN, random.Random(2), 8, None)
    (whole,) = map(tokens, target_loop.decode([Chunk(slot, [3, 1], 0, 1)], [draws]))
    pool.rollback(slot, 0)
    target_loop.interrupt.set()
    (found,) = map(tokens, target_loop.decode([Chunk(slot, [3, 1], 0, 1)], [draws]))
    assert found == whole[:1]
    target_loop.interrupt.clear()

    run = captured_steps._StepBuffers._advance
    steps = list[int]()

    def interrupting(self: captured_steps._StepBuffers) -> None:
        steps.append(1)
        if len(steps) == 3:
            target_loop.interrupt.set()
        run(self)

    monkeypatch.setattr(captured_steps._StepBuffers, "_advance", interrupting)
    bounds = {"sequences": 1, "tokens": 8, "seconds": 1e3, "most_bytes": 1 << 30}
    target_loop.capture(Capturer(), with_kernels=True, **bounds)  # type: ignore[arg-type]
    steps.clear()
    target_loop.interrupt.clear()
    pool.rollback(slot, 0)
    (found,) = map(tokens, target_loop.decode([Chunk(slot, [3, 1], 0, 1)], [draws]))
    assert found == whole[:4]
    assert pool.length(slot) == 5


def test_draws_without_a_graph_are_named_and_refused(load: Load) -> None:
    plain = Draw(PLAIN, 0.5)
    bare = DecodeLoop(TorchRunner.build(load("llama"), 4, 48, attention=PAGED), KNOWN, CONFIG)
    assert bare.obstacle([[plain]]) == "no steps are captured for a paged KV cache"
    bounds = {"sequences": 1, "tokens": 8, "seconds": 1e3, "most_bytes": 1 << 30}
    found = bare.capture(Capturer(), with_kernels=False, **bounds)  # type: ignore[arg-type]
    assert found == "none: the Triton kernels of verification do not draw the tokens"
    assert bare.obstacle([[plain]]) == "no steps are captured for a paged KV cache"
    loop = captured_loop(load("llama"))
    assert loop.obstacle([[plain]] * 3) is None
    assert loop.obstacle([[plain]] * 3, [None, Adjuster(PENALTIES, [1], KNOWN), None]) == "changed logits"
    pool = loop.model_runner.pool
    for refused, reason in (
        ([[plain]] * 4, "4 sequences; steps of 3 at most are captured"),
        ([[plain] * 7], "7 tokens; 6 at most are captured"),
        ([[Draw(SamplingParams(top_p=0.9), noise=(1, 1))]], "top-k, top-p or min-p"),
        ([[plain, plain._replace(max_entropy=1.0)]], "max_entropy"),
    ):
        assert loop.obstacle(refused) == reason
        slots = [pool.allocate() for _ in refused]
        with pytest.raises(ValueError, match=reason):
            loop.decode([Chunk(slot, [1], 0, 1) for slot in slots], refused)
        for slot in slots:
            assert pool.length(slot) == 0
            pool.free(slot)
