"""Tokens written by captured steps are those drawn step by step, alone and in company, and leave the same behind.

Captures here call again what they hold, over the same tensors as a CUDA graph would.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product

import pytest
import torch

from kernels import coupled
from kernels.distribution import SamplingLaw
from kernels.sparse import SparseConfig
from outrider.runtime import captured_decode_loop
from outrider.runtime.cuda_graph import CannotCapture, PagedRunner, Repeating
from outrider.runtime.decode_loop import Decoded, Sampling
from outrider.runtime.fused_decoder import FusedDecoder
from outrider.runtime.loader import LoadedModel
from outrider.runtime.packed import Chunk, PackedModel
from outrider.runtime.paged_attention import EAGER, AttentionChoice
from tests.outrider.runtime.test_decode_loop import step_by_step, triples
from tests.outrider.runtime.tiny import VOCABULARY

PAGED = AttentionChoice(EAGER, "to be captured", block_tokens=4)
CONFIG = SparseConfig(keep_mass=0.97, max_support=40)
KNOWN = VOCABULARY - 3  # the rest is padding
GAMMA = 6
LAWS = [SamplingLaw(temperature=0), SamplingLaw(), SamplingLaw(temperature=0.6)]


def build(load: Callable[..., LoadedModel], name: str = "qwen3", *, races: bool = True) -> PackedModel:
    model = PackedModel.build(load(name), 8, 48, attention=PAGED, blocks=60)
    assert capture(model, races=races) == "steps of up to 3 sequences"
    return model


def capture(model: PackedModel, *, races: bool = True) -> str:
    return model.capture_decode_loop(
        Repeating(),
        CONFIG,
        sequences=3,
        tokens=GAMMA,
        vocab_size=KNOWN,
        races=races,
        seconds=1e3,
        most_bytes=1 << 30,
    )


def drawn(rng: random.Random, law: SamplingLaw, gamma: int, race: tuple[int, int] | None = None) -> Sampling:
    return Sampling(law, CONFIG, [rng.random() for _ in range(gamma)], KNOWN, race=race)


def spelled_out(sampling: Sampling) -> Sampling:
    """The same with its noise made here."""
    if sampling.race is None:
        return sampling
    seed, position = sampling.race
    noise = coupled.noise_of([(seed, position + i) for i in range(len(sampling.uniforms))], KNOWN)
    return replace(sampling, race=None, noise=noise)


def held(model: PackedModel, tokens: Sequence[int]) -> int:
    """A slot that holds these, written in pieces."""
    slot = model.pool.allocate()
    if tokens:
        model.forward([Chunk(slot, tokens, 0, len(tokens))])
    return slot


@pytest.mark.parametrize(
    ("name", "captures_passes", "races"),
    [("qwen3", False, True), ("qwen3", True, False), ("mistral-sliding", True, False), ("gpt2", True, False)],
)
def test_written_tokens_are_those_drawn_step_by_step(
    name: str, captures_passes: bool, races: bool, load: Callable[..., LoadedModel]
) -> None:
    """The kernels that races take are interpreted here, which is slow."""
    model = build(load, name, races=races)
    if captures_passes:
        model.capture(Repeating(), max_sequences=3, widest=2, seconds=1e3, most_bytes=1 << 30)
    rng = random.Random(1)
    for law, first, gamma in product(
        LAWS[:2] if races else LAWS, (1, 9) if races else (1, 2, 9), (GAMMA, 1)[: 2 - races]
    ):
        prompt = rng.choices(range(VOCABULARY), k=5 + first)
        one, other = held(model, prompt[:5]), held(model, prompt[:5])
        sampling = drawn(rng, law, gamma, (7, 5 + first) if races else None)
        assert model.can_decode([sampling])
        (written,) = model.decode([Chunk(one, prompt[5:], 5, first)], [sampling])
        tokens, laws = step_by_step(model, other, prompt[5:], spelled_out(sampling))
        assert written.tokens == tokens
        assert triples(written.laws) == triples(laws)
        assert [row is not None for row in written.scores] == [law.is_greedy and not races] * gamma
        assert model.pool.length(one) == model.pool.length(other) == 5 + first + gamma - 1
        ends = [model.forward([Chunk(slot, [7], model.pool.length(slot), 0)]).clone() for slot in (one, other)]
        assert torch.allclose(ends[0], ends[1], atol=1e-5)
        model.pool.free(one)
        model.pool.free(other)
    model.pool.check_integrity()


def company(model: PackedModel, seed: int) -> tuple[list[Chunk], list[Sampling], list[list[int]]]:
    """Three sequences in the same pool, each with a prompt, a law and a number of tokens of its own."""
    rng = random.Random(seed)
    chunks, samplings, prompts = [], [], []
    for number in range(3):
        prompt = rng.choices(range(VOCABULARY), k=rng.randrange(2, 12))
        new = rng.randrange(1, 3)
        slot = held(model, prompt[:-new])
        chunks.append(Chunk(slot, prompt[-new:], len(prompt) - new, new))
        race = (seed, len(prompt)) if rng.random() < 0.4 else None
        samplings.append(drawn(rng, LAWS[(seed + number) % 3], rng.randrange(1, GAMMA + 1), race))
        prompts.append(prompt)
    return chunks, samplings, prompts


def check_company(model: PackedModel) -> None:
    for seed in range(4):
        chunks, samplings, prompts = company(model, seed)
        together = model.decode(chunks, samplings)
        for chunk, sampling, prompt, written in zip(chunks, samplings, prompts, together, strict=True):
            slot = model.pool.allocate()
            (alone,) = model.decode([Chunk(slot, prompt, 0, 0)], [sampling])
            assert written.tokens == alone.tokens
            assert len(written.tokens) == len(sampling.uniforms)
            model.pool.rollback(slot, 0)
            told = [*prompt, *written.tokens, 7]
            whole = model.forward([Chunk(slot, told, 0, len(told) - 2)]).clone()
            at = model.pool.length(chunk.slot)
            assert at == len(told) - 2
            assert torch.allclose(model.forward([Chunk(chunk.slot, told[at:], at, 0)]), whole, atol=1e-4)
            model.pool.free(slot)
        for chunk in chunks:
            model.pool.free(chunk.slot)
    model.pool.check_integrity()


def test_in_company_each_writes_what_it_writes_alone_and_only_where_it_may(load: Callable[..., LoadedModel]) -> None:
    """Those that are done early go on with the others' steps, and must leave no trace of it."""
    check_company(build(load))


@pytest.mark.parametrize(
    "mutant",
    [
        "bits",
        "positions",
        pytest.param("limits", marks=pytest.mark.slow),
        pytest.param("races", marks=pytest.mark.slow),
    ],
)
def test_what_is_put_in_place_wrongly_shows(
    mutant: str, load: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(load)
    whole = captured_decode_loop._Table.fill

    def wrong(self: captured_decode_loop._Table, *told: object) -> None:
        whole(self, *told)  # type: ignore[arg-type]
        if mutant == "limits":
            self._put["limits"].fill_(48)
        if mutant == "bits":
            self._put["bits"][1:] = self._put["bits"][:-1].clone()
        if mutant == "races":
            self._put["races"].zero_()
        if mutant == "positions":
            self._put["positions"].sub_(1)

    monkeypatch.setattr(captured_decode_loop._Table, "fill", wrong)
    if mutant == "bits":  # alone and in company alike
        slot, sampling = model.pool.allocate(), drawn(random.Random(2), SamplingLaw(), GAMMA)
        tokens = model.decode([Chunk(slot, [5], 0, 1)], [sampling])[0].tokens
        assert tokens != step_by_step(model, model.pool.allocate(), [5], sampling)[0]
        return
    if mutant == "races":
        slot, sampling = model.pool.allocate(), drawn(random.Random(2), SamplingLaw(), GAMMA, (3, 1))
        tokens = model.decode([Chunk(slot, [5], 0, 1)], [sampling])[0].tokens
        assert tokens != step_by_step(model, model.pool.allocate(), [5], spelled_out(sampling))[0]
        return
    with pytest.raises(AssertionError):
        check_company(model)


def test_logits_that_are_no_numbers_end_the_writing(load: Callable[..., LoadedModel]) -> None:
    loaded = load("llama")
    model = PackedModel.build(loaded, 2, 48, attention=PAGED)
    capture(model)
    assert isinstance(loaded.fused, FusedDecoder)
    embedding = loaded.fused._layers.embedding
    for law, race in ((SamplingLaw(temperature=0), None), (SamplingLaw(), None), (SamplingLaw(), (1, 1))):
        slot, sampling = model.pool.allocate(), Sampling(law, CONFIG, [0.4, 0.5, 0.6], KNOWN, race=race)
        first = model.decode([Chunk(slot, [5], 0, 1)], [replace(sampling, uniforms=[0.4])])[0].tokens
        model.pool.rollback(slot, 0)
        kept = embedding[first[0]].clone()
        embedding[first[0]] = float("nan")
        written = model.decode([Chunk(slot, [5], 0, 1)], [sampling])[0]
        embedding[first[0]] = kept
        assert written == Decoded([*first, -1], [*written.laws[:1], None], [*written.scores[:1], None])
        assert model.pool.length(slot) == 2
        model.pool.free(slot)


def test_what_has_no_graph_is_said_and_left_to_others(load: Callable[..., LoadedModel]) -> None:
    model = PackedModel.build(load("llama"), 4, 48, attention=PAGED)
    plain = Sampling(SamplingLaw(), CONFIG, [0.5], KNOWN)
    assert not model.can_decode([plain])
    capture(model, races=False)
    assert model.has_decode_loop
    assert model.makes_noise
    assert model.can_decode([plain] * 3)
    for refused, why in (
        ([plain] * 4, "4 sequences, where there is room for 3"),
        ([replace(plain, uniforms=[0.5] * 7)], "7 tokens, where there is room for 6"),
        ([replace(plain, law=SamplingLaw(top_p=0.9))], "a law with filters"),
        ([replace(plain, bounds=[1.0])], "an entropy to stop at"),
        ([replace(plain, race=(1, 1))], "noise that is not made on the device"),
        ([replace(plain, vocab_size=5)], "over 94 tokens"),
    ):
        assert not model.can_decode(refused)
        slots = [model.pool.allocate() for _ in refused]
        with pytest.raises(ValueError, match=why):
            model.decode([Chunk(slot, [1], 0, 1) for slot in slots], refused)
        for slot in slots:
            assert model.pool.length(slot) == 0
            model.pool.free(slot)


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
    model = PackedModel.build(load("llama"), 4, 48, attention=PAGED)
    assert isinstance(model.runner, PagedRunner)
    size = captured_decode_loop.DecodeLoopSize(
        sequences=4, tokens=GAMMA, max_length=48, block_tokens=4, vocab_size=KNOWN, logits_size=VOCABULARY, races=False
    )
    for capturer, seconds, said in (
        (Ticking(), 100.0, "steps of up to 4 sequences"),
        (Ticking(), 5.0, "steps of up to 2 sequences: 4.0 s have passed, and all may take 5"),
        (Ticking(cannot=3), 100.0, "steps of up to 1 sequences: it asks for a number"),
    ):
        writer = captured_decode_loop.CapturedDecodeLoop(model.runner, size, CONFIG)
        assert writer.capture(capturer, seconds=seconds, most_bytes=1 << 30, clock=capturer.clock) == said
