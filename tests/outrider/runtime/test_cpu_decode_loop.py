"""The decode loop in C draws the tokens that single steps draw."""

import random
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from kernels import cpu_decoder
from kernels.adjustments import Adjuster, LogitRules
from kernels.sampling import NO_LOGITS, UNSURE, Draw, Sample, SamplingParams
from kernels.sparse import SparseConfig
from outrider.runtime.decode_loop import DecodeLoop
from outrider.runtime.loader import LoadedModel, ModelSource, load_model
from outrider.runtime.model_runner import Chunk
from outrider.runtime.torch_runner import TorchRunner
from tests.outrider.runtime.test_cpu_decoder import SHAPE, SLOWER, checkpoint, embedding_of, needs_library, runner

pytestmark = needs_library


PARAMS = [
    SamplingParams(temperature=0),
    SamplingParams(),
    SamplingParams(temperature=0.05),
    SamplingParams(temperature=1e-300),
    SamplingParams(temperature=4.0),  # many tokens are equally likely, more than `max_support`
    SamplingParams(temperature=1.4, top_k=9),
    SamplingParams(top_p=0.8),
    SamplingParams(temperature=4.0, top_p=0.95),
    SamplingParams(min_p=0.1),
    SamplingParams(temperature=2.0, top_k=300, top_p=0.9, min_p=0.02),
]
WIDE = 3001
"""Tokens of a larger vocabulary, most of which are improbable."""
PENALTIES = LogitRules(repetition_penalty=1.3, presence_penalty=0.37, frequency_penalty=0.71)
RULES = [
    PENALTIES,
    None,
    LogitRules(frequency_penalty=-2.3, logit_bias=((7, 14.1), (WIDE - 1, 9.0)), banned_tokens=(3, WIDE - 2)),
    LogitRules(logit_bias=((40, 12.5),), stop_token_ids=(40, 41), min_new_tokens=50),
    LogitRules(repetition_penalty=0.5, presence_penalty=-0.9),
]
"""Changes to logits: with tokens that the target alone knows, and stop tokens that are banned for long."""


def adjusters(prompts: Sequence[list[int]]) -> list[Adjuster | None]:
    rules = [RULES[i % len(RULES)] for i in range(len(prompts))]
    return [None if each is None else Adjuster(each, ids, WIDE) for each, ids in zip(rules, prompts, strict=True)]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """A model in which each token has a twin with the same logit, WIDE / 2 ids above it."""
    torch.manual_seed(2)
    config = transformers.LlamaConfig(**SHAPE | {"vocab_size": WIDE}, num_key_value_heads=2)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        head = torch.randn(WIDE // 2 + 1, 48) * 3 / 48**0.5
        model.lm_head.weight.copy_(head.repeat(2, 1)[:WIDE])
    folder = tmp_path_factory.mktemp("wide")
    model.to(torch.bfloat16).save_pretrained(folder)
    return load_model(ModelSource(str(folder), dtype="bfloat16", device="cpu"))


@pytest.fixture(scope="module")
def wide_floats(wide: LoadedModel) -> LoadedModel:
    """The same in float32."""
    return load_model(ModelSource(wide.name, dtype="float32", device="cpu"))


def one_by_one(
    loop: DecodeLoop, slot: int, chunk: list[int], draws: Sequence[Draw], adjuster: Adjuster | None = None
) -> list[Sample]:
    """As the loop, in Python: a pass and a sample for each token."""
    model = loop.model_runner
    samples = list[Sample]()
    for draw in draws:
        logits = model.logits([Chunk(slot, chunk, model.pool.length(slot), len(chunk) - 1)])
        samples += loop._drawn(loop.without_mask(logits), [draw], [None if adjuster is None else adjuster.row()])
        if samples[-1].token < 0:
            break
        chunk = [samples[-1].token]
        if adjuster is not None:
            adjuster.push(samples[-1].token)
    return samples


def assert_alike(mine: Sample, theirs: Sample, config: SparseConfig) -> None:
    """The same token, from weights that differ by 1 at most; where sums of float32 differ, so may the least tokens."""
    assert mine.token == theirs.token
    assert (mine.q is None) is (theirs.q is None)
    if mine.q is None or theirs.q is None:
        return
    assert list(mine.q.ids) == sorted(set(mine.q.ids.tolist()))
    assert mine.q.total == int(mine.q.weights.sum(dtype=int))
    assert mine.q.weights.min() >= 1
    assert len(mine.q.ids) <= config.max_support
    ours = dict(zip(mine.q.ids.tolist(), mine.q.weights.tolist(), strict=True))
    others = dict(zip(theirs.q.ids.tolist(), theirs.q.weights.tolist(), strict=True))
    assert all(abs(ours[token] - others[token]) <= 1 for token in ours.keys() & others.keys())
    extra = ours.keys() ^ others.keys()
    least = min(*ours.values(), *others.values())
    assert len(extra) <= 1, (extra, len(ours))
    assert all(ours.get(token, others.get(token)) <= least + 1 for token in extra)


CONFIGS = [SparseConfig(), SparseConfig(keep_mass=0.9, max_support=40), SparseConfig(1.0, 7)]


@pytest.mark.parametrize("by_noise", [False, True])
@pytest.mark.parametrize(
    ("model_of", "config"),
    [*product(("wide", "wide_floats"), CONFIGS), *((library, CONFIGS[0]) for library in SLOWER)],
)
def test_the_loop_draws_the_tokens_of_single_steps(
    model_of: str,
    by_noise: bool,
    config: SparseConfig,
    wide: LoadedModel,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By uniforms and by noise; several sequences, with different parameters, penalties and numbers of tokens."""
    if model_of in SLOWER:
        monkeypatch.setattr(cpu_decoder, "library", lambda: cpu_decoder._loaded(model_of))
        loaded = load_model(ModelSource(wide.name, dtype="bfloat16", device="cpu"))
    else:
        loaded = request.getfixturevalue(model_of)
    model = TorchRunner.build(loaded, 24, 256)
    loop, rng = DecodeLoop(model, WIDE - 4, config), random.Random(1)
    prompts = [rng.choices(range(WIDE), k=rng.randint(1, 40)) for _ in PARAMS]
    draws: list[list[Draw]] = []
    for i, params in enumerate(PARAMS):
        count = 1 + (i + 1) * 5 % 7
        shared = [(i, len(prompts[i]) + j) if by_noise else None for j in range(count)]
        draws.append([Draw(params, rng.random(), noise) for noise in shared])
    ours, theirs = ([model.pool.allocate() for _ in PARAMS] for _ in range(2))
    changing = adjusters(prompts)
    chunks = [Chunk(slot, tokens, 0, 0) for slot, tokens in zip(ours, prompts, strict=True)]
    found = loop.decode(chunks, draws, adjusters=changing)
    for i, samples in enumerate(found):
        wanted = one_by_one(loop, theirs[i], prompts[i], draws[i], changing[i])
        assert len(samples) == len(wanted) == len(draws[i])
        for mine, right in zip(samples, wanted, strict=True):
            assert_alike(mine, right, config)
            assert (mine.scores is None) is (right.scores is None)
            if mine.scores is not None and right.scores is not None and draws[i][0].params.is_greedy:
                assert torch.equal(mine.scores, right.scores)
            elif mine.scores is not None and right.scores is not None:  # up to a factor
                assert torch.allclose(mine.scores / mine.scores.min(), right.scores / right.scores.min(), atol=1e-5)
        assert model.pool.length(ours[i]) == model.pool.length(theirs[i])
        after = [model.logits([Chunk(slot[i], [5], model.pool.length(slot[i]), 0)]) for slot in (ours, theirs)]
        assert torch.equal(*after)


@pytest.mark.parametrize("model_of", ["wide", "wide_floats"])
@pytest.mark.parametrize("by_noise", [False, True])
def test_a_target_draws_from_the_whole_distribution(
    by_noise: bool, model_of: str, request: pytest.FixtureRequest
) -> None:
    """As verification draws. Some draw a quarter of all tokens, where q̂ holds 256 of 3,001; and the ends of u."""
    model = TorchRunner.build(request.getfixturevalue(model_of), 24, 256)
    loop, rng, every = DecodeLoop(model, WIDE - 4, None), random.Random(3), [*PARAMS, SamplingParams(top_k=2500)]
    ends, beyond = [0.0, 1.0 - 2.0**-53], set[int]()
    for repetition in range(6):
        slots = [[model.pool.allocate() for _ in every] for _ in range(2)]
        prompts = [rng.choices(range(WIDE), k=rng.randint(1, 20)) for _ in every]
        draws: list[list[Draw]] = []
        for i, params in enumerate(every, repetition * len(every)):
            uniforms = [rng.choice(ends) if rng.random() < 0.2 else rng.random() for _ in range(12)]
            draws.append([Draw(params, u, (i, 40 + j) if by_noise else None) for j, u in enumerate(uniforms)])
        changing = adjusters(prompts)
        chunks = [Chunk(slot, each, 0, 0) for slot, each in zip(slots[0], prompts, strict=True)]
        found = loop.decode(chunks, draws, adjusters=changing)
        for slot, prompt, own, samples, adjuster in zip(slots[1], prompts, draws, found, changing, strict=True):
            wanted = one_by_one(loop, slot, prompt, own, adjuster)
            assert [each.token for each in samples] == [each.token for each in wanted]
            assert all(each.q is None and each.scores is None for each in samples)
            beyond |= {each.token for each in samples}
        for slot in (*slots[0], *slots[1]):
            model.pool.free(slot)
    assert len(beyond) > 200


def test_a_uniform_at_the_edge_of_two_tokens_draws_the_second(tmp_path: Path) -> None:
    """Of 128 tokens with equal logits; sums of 1/128 are exact. The other 128 have the opposite logit."""
    torch.manual_seed(4)
    model = AutoModelForCausalLM.from_config(
        transformers.LlamaConfig(**SHAPE | {"vocab_size": 256}, num_key_value_heads=2)
    )
    with torch.no_grad():
        row = torch.randn(1, 48)
        model.lm_head.weight.copy_(torch.cat((row, -row)).repeat_interleave(128, 0))
    model.save_pretrained(tmp_path)
    ours = TorchRunner.build(load_model(ModelSource(str(tmp_path), dtype="float32", device="cpu")), 1, 256)
    draws = [Draw(SamplingParams(top_k=128), token / 128) for token in range(128)]
    (samples,) = DecodeLoop(ours, 256, None).decode([Chunk(ours.pool.allocate(), [5], 0, 0)], [draws])
    assert [each.token % 128 for each in samples] == list(range(128))


@pytest.mark.parametrize("config", [SparseConfig(), None])
def test_the_loop_ends_a_sequence_after_a_stop_token(config: SparseConfig | None, wide: LoadedModel) -> None:
    model = TorchRunner.build(wide, 4, 256)
    loop, slots = DecodeLoop(model, WIDE, config), [model.pool.allocate() for _ in range(2)]
    chunks = [Chunk(slot, [11, 12 + slot], 0, 1) for slot in slots]
    draws = [[Draw(SamplingParams(), 0.1 * i) for i in range(1, 8)]] * 2
    first, second = ([each.token for each in own] for own in loop.decode(chunks, draws))
    for slot in slots:
        model.pool.rollback(slot, 0)
    found = loop.decode(chunks, draws, [{first[3], WIDE}, {WIDE}])
    ended = first[: first.index(first[3]) + 1]
    other = second if config else second[: len(ended)]  # a target's loop ends for all
    assert [[each.token for each in own] for own in found] == [ended, other]
    assert [model.pool.length(slot) for slot in slots] == [1 + len(own) for own in found]


@pytest.mark.parametrize("config", [SparseConfig(), None])
def test_an_interrupted_loop_ends_after_a_token(config: SparseConfig | None, wide: LoadedModel) -> None:
    model = TorchRunner.build(wide, 4, 256)
    loop, slots = DecodeLoop(model, WIDE, config), [model.pool.allocate() for _ in range(2)]
    chunks = [Chunk(slot, [11, 12 + slot], 0, 1) for slot in slots]
    draws = [[Draw(SamplingParams(), 0.1 * i) for i in range(1, 8)]] * 2
    whole = loop.decode(chunks, draws)
    for slot in slots:
        model.pool.rollback(slot, 0)
    loop.interrupt.set()
    found = loop.decode(chunks, draws)
    assert [[each.token for each in own] for own in found] == [[own[0].token] for own in whole]
    assert [model.pool.length(slot) for slot in slots] == [2, 2]
    loop.interrupt.clear()
    rest = loop.decode(
        [Chunk(s, [own[0].token], 2, 0) for s, own in zip(slots, found, strict=True)], [draws[0][1:]] * 2
    )
    assert [[each.token for each in own] for own in rest] == [[each.token for each in own[1:]] for own in whole]


def test_a_uniform_at_the_edge_of_a_cell_draws_the_next_token(wide: LoadedModel) -> None:
    model = TorchRunner.build(wide, 4, 256)
    loop, slot = DecodeLoop(model, WIDE, SparseConfig()), model.pool.allocate()

    def draw(u: float) -> Sample:
        model.pool.rollback(slot, 0)
        return loop.decode([Chunk(slot, [11, 12], 0, 1)], [[Draw(SamplingParams(), u)]])[0][0]

    q = draw(0.0).q
    assert q is not None
    edges = q.weights.cumsum(dtype=int)[:-1].tolist()
    assert len(edges) > 10
    for i, edge in enumerate(edges):
        u = -(-(edge << 53) // q.total) / 2.0**53  # the least uniform of the cell
        assert draw(u).token == q.ids[i + 1] == q.token_at(u)
        assert draw(u - 2.0**-53).token == q.ids[i]


@pytest.mark.parametrize("params", [SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_k=3)])
@pytest.mark.parametrize("by_noise", [False, True])
def test_the_loop_stops_where_the_draft_is_unsure(params: SamplingParams, by_noise: bool, wide: LoadedModel) -> None:
    model = TorchRunner.build(wide, 4, 256)
    loop, lengths = DecodeLoop(model, WIDE, SparseConfig()), set[int]()
    for bound in (0.9, 2.0, 3.0, 4.0, 5.0, 9.0):
        one, other = model.pool.allocate(), model.pool.allocate()
        bounds = [9.0, *[bound] * 5]  # a request's bound does not hold for the first token
        draws = [Draw(params, 0.37, (3, 2 + i) if by_noise else None, each) for i, each in enumerate(bounds)]
        (samples,) = loop.decode([Chunk(one, [11, 12], 0, 1)], [draws])
        wanted = one_by_one(loop, other, [11, 12], draws)
        assert [each.token for each in samples] == [each.token for each in wanted]
        assert samples[-1].token == UNSURE or len(samples) == 6
        lengths.add(len(samples))
        model.pool.free(one)
        model.pool.free(other)
    assert len(lengths) > 1


def test_the_loop_stops_at_bad_logits(tmp_path: Path) -> None:
    """The other sequences go on, and none draws the mask token."""
    model = runner(checkpoint("qwen3", tmp_path))
    with torch.inference_mode():
        embedding_of(model)[7] = torch.nan
    loaded = model.loaded
    loop = DecodeLoop(model, 97, SparseConfig())
    slots = [model.pool.allocate() for _ in range(3)]
    for params in (SamplingParams(temperature=0), SamplingParams()):
        draws = [[Draw(params, 0.2)] * 4] * 3
        chunks = [Chunk(slot, [8, token], 0, 1) for slot, token in zip(slots, (7, 9, 10), strict=True)]
        found = loop.decode(chunks, draws)
        assert [each.token for each in found[0]] == [NO_LOGITS]
        assert [len(each) for each in found[1:]] == [4, 4]
        favourite = found[1][0].token
        for slot in slots:
            model.pool.rollback(slot, 0)
        loaded.mask_token = favourite
        (found[1],) = loop.decode(chunks[1:2], draws[:1])
        assert favourite not in [each.token for each in found[1]]
        loaded.mask_token = None
        for slot in slots:
            model.pool.rollback(slot, 0)
