"""Captured passes give what passes give as they come, whatever they are filled up with; what is captured, and when.

Captures here call again what they hold, over the same tensors as a CUDA graph would.
"""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.runtime import batch as paged
from outrider.runtime.cuda_graph import CannotCapture, GraphRunner, PagedRunner, Repeating, buckets_for
from outrider.runtime.loader import LoadedModel
from outrider.runtime.model_runner import Chunk, ModelRunner
from outrider.runtime.paged_attention import EAGER, AttentionChoice
from tests.outrider.runtime.tiny import VOCABULARY

PAGED = AttentionChoice(EAGER, "to be captured", block_tokens=4)
ROOM = 40
SEQUENCES = 3
WIDEST = 4


def build(load: Callable[..., LoadedModel], name: str = "qwen3", dtype: str = "float32") -> ModelRunner:
    return ModelRunner.build(load(name, dtype), SEQUENCES + 1, ROOM, attention=PAGED)


def capture(model: ModelRunner, **how: object) -> str:
    told = {"max_sequences": SEQUENCES, "widest": WIDEST, "seconds": 1e3, "most_bytes": 1 << 30, **how}
    return model.capture(Repeating(), **told)  # type: ignore[arg-type]


def ran_by(model: ModelRunner) -> list[int | None]:
    """Will hold the size whose graph runs each pass from now on, or None where none does."""
    ran: list[int | None] = []
    if model.captured is None:
        return ran
    find = model.captured._find

    def noted(layout: paged.Layout) -> Any:
        found = find(layout)
        ran.append(None if found is None else found.rows)
        return found

    model.captured._find = noted  # type: ignore[method-assign]
    return ran


def rounds(model: ModelRunner, seed: int) -> tuple[list[Tensor], list[int | None]]:
    """Prompts and then rounds of any lengths, some rows of which are rolled back; logits, and which graph ran each."""
    rng = random.Random(seed)
    slots = [model.pool.allocate() for _ in range(SEQUENCES + 1)]
    told, ran = [], ran_by(model)
    for step in range(30):
        chunks = []
        for slot in rng.sample(slots, rng.randint(1, SEQUENCES + 1)):
            model.pool.rollback(slot, max(0, model.pool.length(slot) - rng.randint(0, 3)))
            held = model.pool.length(slot)
            if held > ROOM - 8:
                model.pool.rollback(slot, 2)
                held = 2
            count = rng.randint(1, WIDEST + (step % 7 == 0))
            silent = count if step % 5 == 4 else 0
            chunks.append(Chunk(slot, rng.choices(range(VOCABULARY), k=count), held, silent))
        told.append(model.forward(chunks).float().clone())
    model.pool.check_integrity()
    return told, ran


@pytest.mark.parametrize("name", ["qwen3", "mistral-sliding", "gpt2", "gemma2", "gpt-oss"])
def test_a_captured_pass_gives_what_it_gives_as_it_comes(name: str, load: Callable[..., LoadedModel]) -> None:
    eager, model = build(load, name), build(load, name)
    assert capture(model) == f"{len(buckets_for(SEQUENCES, WIDEST))} of {len(buckets_for(SEQUENCES, WIDEST))} sizes"
    (wanted, _), (found, ran) = rounds(eager, 5), rounds(model, 5)
    assert len(set(ran)) > 6, "several sizes"
    assert None in ran, "and passes that no graph takes"
    for one, other in zip(found, wanted, strict=True):
        assert one.shape == other.shape
        # A pass of another number of rows may be rounded otherwise.
        assert torch.allclose(one, other, atol=1e-5)


def test_in_16_bits_too(load: Callable[..., LoadedModel]) -> None:
    eager, model = build(load, dtype="bfloat16"), build(load, dtype="bfloat16")
    capture(model)
    for one, other in zip(rounds(model, 6)[0], rounds(eager, 6)[0], strict=True):
        assert torch.allclose(one, other, atol=0.05)


@pytest.mark.parametrize("mutant", ["room", "nowhere", "lengths"])
def test_a_graph_that_is_filled_up_wrongly_shows(
    mutant: str, load: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    eager, model = build(load), build(load)
    capture(model)
    whole = paged.Layout.padded

    def wrong(self: paged.Layout, shape: paged.Shape, *, nowhere: int) -> paged.Layout:
        layout = whole(self, shape, nowhere=0 if mutant == "nowhere" else nowhere)
        if mutant == "room":
            layout.positions[:] = 0
        if mutant == "lengths":
            layout.lengths[: len(self.lengths)] -= 1
        return layout

    monkeypatch.setattr(paged.Layout, "padded", wrong)
    with pytest.raises((AssertionError, RuntimeError)):  # noqa: PT012  # either: what differs, or what runs no more
        for one, other in zip(rounds(model, 5)[0], rounds(eager, 5)[0], strict=True):
            assert torch.allclose(one, other, atol=1e-5)


def test_sizes_go_up_to_the_largest_pass_and_waste_at_most_half_of_what_they_take() -> None:
    sizes = buckets_for(64, 17)
    assert sizes == sorted(set(sizes))
    assert (sizes[0], sizes[-1], len(sizes)) == (1, 64 * 17, 21)
    for rows in range(1, 64 * 17 + 1):
        assert next(size for size in sizes if size >= rows) <= 1.5 * rows
    assert buckets_for(3, 2) == [1, 2, 3, 4, 6]
    assert buckets_for(8, 4, pass_tokens=16)[-1] == 16


class Ticking:
    """A capturer whose graphs take a second each and hold a MiB, or which cannot make some."""

    def __init__(self, cannot: int = 1 << 30) -> None:
        self.now, self.bytes, self._cannot = 0.0, 0, cannot

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        if self.now >= self._cannot:
            raise CannotCapture("it asks for a number")
        run()
        self.now += 1.0
        self.bytes += 1 << 20
        return run


def test_what_time_or_memory_will_not_do_for_is_left_out_and_said(load: Callable[..., LoadedModel]) -> None:
    sizes = buckets_for(SEQUENCES, WIDEST)

    def captured_with(capturer: Ticking, **bounds: float) -> tuple[str, list[int]]:
        model = build(load)
        assert isinstance(model.paged_runner, PagedRunner)
        runner = GraphRunner(model.paged_runner, block_tokens=4, vocab_size=model.loaded.vocab_size, max_sequences=3)
        told = {"seconds": 1e3, "most_bytes": 1 << 30, **bounds}
        said = runner.capture(capturer, sizes, clock=lambda: capturer.now, **told)  # type: ignore[arg-type]
        return said, runner.sizes

    said, kept = captured_with(Ticking(), seconds=4.5)
    assert said == f"4 of {len(sizes)} sizes: one takes 1.0 s, and all may take 4.5"
    assert kept == [*sizes[:3], sizes[-1]], "the first tells how long one takes; then the smallest"
    said, kept = captured_with(Ticking(), most_bytes=2 << 20)
    assert said == f"3 of {len(sizes)} sizes: they hold 3 MiB of 2"
    assert kept == sizes[-3:]
    said, kept = captured_with(Ticking(cannot=2))
    assert said == f"2 of {len(sizes)} sizes: it asks for a number"
    said, kept = captured_with(Ticking(cannot=0))
    assert (said, kept) == (f"0 of {len(sizes)} sizes: it asks for a number", [])


@pytest.mark.parametrize("captured", [False, True])
def test_logits_over_pages_are_in_the_dtype_of_the_model(captured: bool, load: Callable[..., LoadedModel]) -> None:
    """Captured or not: kernels that judge them are compiled for one dtype."""
    model = build(load, "llama", "bfloat16")
    if captured:
        capture(model)
    slot, ran = model.pool.allocate(), ran_by(model)
    assert model.forward([Chunk(slot, [5], 0, 0)]).dtype == torch.bfloat16
    assert ran == ([1] if captured else [])


def test_the_next_pass_writes_over_logits_but_not_over_those_that_are_kept(load: Callable[..., LoadedModel]) -> None:
    model = build(load)
    capture(model)
    slot = model.pool.allocate()
    kept = model.logits([Chunk(slot, [5], 0, 0)])
    lent = model.forward([Chunk(slot, [6], 1, 0)])
    known = kept.clone(), lent.clone()
    model.forward([Chunk(slot, [7], 2, 0)])
    assert torch.equal(kept, known[0])
    assert not torch.equal(lent, known[1])


def test_where_keys_and_values_are_not_in_pages_nothing_is_captured(load: Callable[..., LoadedModel]) -> None:
    assert capture(ModelRunner.build(load("llama"), 1, 8)) == "none: keys and values are not in pages"
