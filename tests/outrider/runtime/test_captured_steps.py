"""Tokens decoded by captured steps are those drawn step by step, alone and in company, and leave the same behind.

Captures here call again what they hold, over the same tensors as a CUDA graph would.
"""

import random
from collections.abc import Callable, Sequence
from itertools import product

import pytest
import torch

from kernels.sampling import NO_LOGITS, Draw, Sample, SamplingParams
from kernels.sparse import SparseConfig
from outrider.runtime import decode_loop
from outrider.runtime.cuda_graph import CannotCapture, PagedRunner, Repeating
from outrider.runtime.decode_loop import DecodeLoop
from outrider.runtime.fused_decoder import FusedDecoder
from outrider.runtime.loader import LoadedModel
from outrider.runtime.model_runner import Chunk, ModelRunner
from outrider.runtime.paged_attention import EAGER, AttentionChoice
from tests.outrider.runtime.test_decode_loop import drawn_by, numbers, step_by_step, tokens
from tests.outrider.runtime.tiny import VOCABULARY

PAGED = AttentionChoice(EAGER, "to be captured", block_tokens=4)
CONFIG = SparseConfig(keep_mass=0.97, max_support=40)
KNOWN = VOCABULARY - 3  # the rest is padding
GAMMA = 6
LAWS = [SamplingParams(temperature=0), SamplingParams(), SamplingParams(temperature=0.6)]


def build(load: Callable[..., LoadedModel], name: str = "qwen3", *, with_noise: bool = True) -> DecodeLoop:
    loop = DecodeLoop(ModelRunner.build(load(name), 8, 48, attention=PAGED, blocks=60), KNOWN, CONFIG)
    assert capture(loop, with_noise=with_noise) == "steps of up to 3 sequences"
    return loop


def capture(loop: DecodeLoop, *, with_noise: bool = True) -> str:
    return loop.capture(Repeating(), sequences=3, tokens=GAMMA, with_noise=with_noise, seconds=1e3, most_bytes=1 << 30)


def held(model: ModelRunner, tokens: Sequence[int]) -> int:
    """A slot that holds these, written in pieces."""
    slot = model.pool.allocate()
    if tokens:
        model.forward([Chunk(slot, tokens, 0, len(tokens))])
    return slot


@pytest.mark.parametrize(
    ("name", "captures_passes", "with_noise"),
    [("qwen3", False, True), ("qwen3", True, False), ("mistral-sliding", True, False), ("gpt2", True, False)],
)
def test_decoded_tokens_are_those_drawn_step_by_step(
    name: str, captures_passes: bool, with_noise: bool, load: Callable[..., LoadedModel]
) -> None:
    """The kernels that noise takes are interpreted here, which is slow."""
    loop = build(load, name, with_noise=with_noise)
    model = loop.model_runner
    if captures_passes:
        model.capture(Repeating(), max_sequences=3, widest=2, seconds=1e3, most_bytes=1 << 30)
    rng = random.Random(1)
    for law, first, gamma in product(
        LAWS[:2] if with_noise else LAWS, (1, 9) if with_noise else (1, 2, 9), (GAMMA, 1)[: 2 - with_noise]
    ):
        prompt = rng.choices(range(VOCABULARY), k=5 + first)
        one, other = held(model, prompt[:5]), held(model, prompt[:5])
        draws = drawn_by(law, rng, gamma, (7, 5 + first) if with_noise else None)
        assert loop.obstacle([draws]) is None
        (samples,) = loop.decode([Chunk(one, prompt[5:], 5, first)], [draws])
        assert numbers(samples) == numbers(step_by_step(model, other, prompt[5:], draws))
        assert [each.scores is not None for each in samples] == [law.is_greedy] * gamma
        assert model.pool.length(one) == model.pool.length(other) == 5 + first + gamma - 1
        ends = [model.forward([Chunk(slot, [7], model.pool.length(slot), 0)]).clone() for slot in (one, other)]
        assert torch.allclose(ends[0], ends[1], atol=1e-5)
        model.pool.free(one)
        model.pool.free(other)
    model.pool.check_integrity()


def company(model: ModelRunner, seed: int) -> tuple[list[Chunk], list[list[Draw]], list[list[int]]]:
    """Three sequences in the same pool, each with a prompt, a law and a number of tokens of its own."""
    rng = random.Random(seed)
    chunks, draws, prompts = [], [], []
    for number in range(3):
        prompt = rng.choices(range(VOCABULARY), k=rng.randrange(2, 12))
        new = rng.randrange(1, 3)
        slot = held(model, prompt[:-new])
        chunks.append(Chunk(slot, prompt[-new:], len(prompt) - new, new))
        noise = (seed, len(prompt)) if rng.random() < 0.4 else None
        draws.append(drawn_by(LAWS[(seed + number) % 3], rng, rng.randrange(1, GAMMA + 1), noise))
        prompts.append(prompt)
    return chunks, draws, prompts


def check_company(loop: DecodeLoop) -> None:
    model = loop.model_runner
    for seed in range(4):
        chunks, draws, prompts = company(model, seed)
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
        for chunk in chunks:
            model.pool.free(chunk.slot)
    model.pool.check_integrity()


def test_in_company_each_decodes_what_it_decodes_alone_and_only_where_it_may(load: Callable[..., LoadedModel]) -> None:
    """Those that are done early go on with the others' steps, and must leave no trace of it."""
    check_company(build(load))


@pytest.mark.parametrize(
    "mutant",
    [
        "bits",
        "positions",
        pytest.param("limits", marks=pytest.mark.slow),
        pytest.param("by_noise", marks=pytest.mark.slow),
    ],
)
def test_what_is_put_in_place_wrongly_shows(
    mutant: str, load: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = build(load)
    whole = decode_loop._Table.fill

    def wrong(self: decode_loop._Table, *told: object) -> None:
        whole(self, *told)  # type: ignore[arg-type]
        if mutant == "limits":
            self._put["limits"].fill_(48)
        if mutant == "bits":
            self._put["bits"][1:] = self._put["bits"][:-1].clone()
        if mutant == "by_noise":
            self._put["by_noise"].zero_()
        if mutant == "positions":
            self._put["positions"].sub_(1)

    monkeypatch.setattr(decode_loop._Table, "fill", wrong)
    if mutant in ("bits", "by_noise"):  # alone and in company alike
        slot, pool = loop.model_runner.pool.allocate(), loop.model_runner.pool
        draws = drawn_by(SamplingParams(), random.Random(2), GAMMA, (3, 1) if mutant == "by_noise" else None)
        (samples,) = loop.decode([Chunk(slot, [5], 0, 1)], [draws])
        assert tokens(samples) != tokens(step_by_step(loop.model_runner, pool.allocate(), [5], draws))
        return
    with pytest.raises(AssertionError):
        check_company(loop)


def test_logits_that_are_no_numbers_end_the_decoding(load: Callable[..., LoadedModel]) -> None:
    loaded = load("llama")
    loop = DecodeLoop(ModelRunner.build(loaded, 2, 48, attention=PAGED), KNOWN, CONFIG)
    capture(loop)
    assert isinstance(loaded.fused, FusedDecoder)
    embedding, pool = loaded.fused._layers.embedding, loop.model_runner.pool
    for law, noise in ((SamplingParams(temperature=0), None), (SamplingParams(), None), (SamplingParams(), (1, 1))):
        slot, draws = pool.allocate(), drawn_by(law, random.Random(1), 3, noise)
        ((first,),) = loop.decode([Chunk(slot, [5], 0, 1)], [draws[:1]])
        pool.rollback(slot, 0)
        kept = embedding[first.token].clone()
        embedding[first.token] = float("nan")
        (samples,) = loop.decode([Chunk(slot, [5], 0, 1)], [draws])
        embedding[first.token] = kept
        assert tokens(samples) == [first.token, NO_LOGITS]
        assert samples[1] == Sample(NO_LOGITS)
        assert pool.length(slot) == 2
        pool.free(slot)


def test_what_has_no_graph_is_named_and_left_to_single_steps(load: Callable[..., LoadedModel]) -> None:
    loop = DecodeLoop(ModelRunner.build(load("llama"), 4, 48, attention=PAGED), KNOWN, CONFIG)
    plain = Draw(SamplingParams(), 0.5)
    assert loop.obstacle([[plain]]) == "no steps are captured"
    capture(loop, with_noise=False)
    assert loop.obstacle([[plain]] * 3) is None
    pool = loop.model_runner.pool
    for refused, why in (
        ([[plain]] * 4, "4 sequences, where there is room for 3"),
        ([[plain] * 7], "7 tokens, where there is room for 6"),
        ([[plain._replace(params=SamplingParams(top_p=0.9))]], "top-k, top-p or min-p"),
        ([[plain, plain._replace(max_entropy=1.0)]], "an entropy to stop at"),
        ([[plain._replace(noise=(1, 1))]], "noise, which takes Triton"),
    ):
        assert loop.obstacle(refused) == why
        slots = [pool.allocate() for _ in refused]
        with pytest.raises(ValueError, match=why):
            loop.decode([Chunk(slot, [1], 0, 1) for slot in slots], refused)
        for slot in slots:
            assert pool.length(slot) == 0
            pool.free(slot)


class Ticking:
    """A capturer whose graphs take a second each, and which cannot make some."""

    bytes = 0

    def __init__(self, cannot: int = 1 << 30) -> None:
        self.now, self._cannot = 0.0, cannot

    def clock(self) -> float:
        return self.now

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        if self.now >= self._cannot:
            raise CannotCapture("it asks for a number")
        self.now += 1.0
        return run


def test_what_time_will_not_do_for_is_left_out_and_said(load: Callable[..., LoadedModel]) -> None:
    model = ModelRunner.build(load("llama"), 4, 48, attention=PAGED)
    assert isinstance(model.paged_runner, PagedRunner)
    size = decode_loop.DecodeLoopSize(4, GAMMA, 48, 4, KNOWN, logits_size=VOCABULARY, with_noise=False)
    for capturer, seconds, said in (
        (Ticking(), 100.0, "steps of up to 4 sequences"),
        (Ticking(), 5.0, "steps of up to 2 sequences: 4.0 s have passed, and all may take 5"),
        (Ticking(cannot=3), 100.0, "steps of up to 1 sequences: it asks for a number"),
    ):
        steps = decode_loop.CapturedSteps(model, model.paged_runner, size, CONFIG)
        assert steps.capture(capturer, seconds=seconds, most_bytes=1 << 30, clock=capturer.clock) == said
