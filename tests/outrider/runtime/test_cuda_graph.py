"""Captured steps give what eager ones give, whatever pads them; what is captured, and when.

Captures here call again what they hold, over the same tensors as a CUDA graph would.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from outrider.runtime import batch
from outrider.runtime.cuda_graph import GraphRunner, PagedRunner, Repeating, buckets_for
from outrider.runtime.loader import LoadedModel
from outrider.runtime.model_runner import Chunk, ModelRunner
from tests.outrider.runtime.steps import MAX_LENGTH, PAGED, Ticking, random_steps

Load = Callable[..., LoadedModel]
SEQUENCES, WIDEST = 3, 4
COUNTS = (1, 1, 2, 3, 4, 4, 5)


def build(load: Load, name: str = "qwen3", dtype: str = "float32") -> ModelRunner:
    return ModelRunner.build(load(name, dtype), SEQUENCES + 1, MAX_LENGTH, attention=PAGED)


def capture(model: ModelRunner) -> str:
    bounds = {"seconds": 1e3, "most_bytes": 1 << 30}
    return model.capture(Repeating(), max_sequences=SEQUENCES, widest=WIDEST, **bounds)  # type: ignore[arg-type]


def replayed_by(model: ModelRunner) -> list[int | None]:
    """Will hold the size whose graph replays each step, or None where none does."""
    sizes: list[int | None] = []
    assert model.captured is not None
    find = model.captured._find

    def noting(host_batch: batch.HostBatch) -> Any:
        found = find(host_batch)
        sizes.append(None if found is None else found.rows)
        return found

    model.captured._find = noting  # type: ignore[method-assign]
    return sizes


def assert_as_eager(model: ModelRunner, eager: ModelRunner, allowed: float) -> None:
    found, wanted = (random_steps(each, 5, 40, COUNTS, unwanted=0.1)[0] for each in (model, eager))
    for one, other in zip(found, wanted, strict=True):
        assert one.shape == other.shape
        # A step of another number of rows may be rounded otherwise.
        assert torch.allclose(one.float(), other.float(), atol=allowed)


@pytest.mark.parametrize(
    ("name", "dtype", "allowed"),
    [
        *((name, "float32", 1e-5) for name in ("qwen3", "mistral-sliding", "gpt2", "gemma2", "gpt-oss")),
        ("qwen3", "bfloat16", 0.05),
    ],
)
def test_a_captured_step_gives_what_an_eager_one_gives(name: str, dtype: str, allowed: float, load: Load) -> None:
    eager, model = build(load, name, dtype), build(load, name, dtype)
    assert capture(model) == f"{len(buckets_for(SEQUENCES, WIDEST))} of {len(buckets_for(SEQUENCES, WIDEST))} sizes"
    sizes = replayed_by(model)
    assert_as_eager(model, eager, allowed)
    assert len(set(sizes)) > 6, "several sizes"
    assert None in sizes, "and steps that no graph takes"


@pytest.mark.parametrize("mutant", ["positions", "null position", "lengths"])
def test_wrong_padding_is_noticed(mutant: str, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    eager, model = build(load), build(load)
    capture(model)
    padded = batch.HostBatch.padded

    def wrong(self: batch.HostBatch, shape: batch.Shape, *, null_position: int) -> batch.HostBatch:
        host_batch = padded(self, shape, null_position=0 if mutant == "null position" else null_position)
        if mutant == "positions":
            host_batch.positions[:] = 0
        if mutant == "lengths":
            host_batch.lengths[: len(self.lengths)] -= 1
        return host_batch

    monkeypatch.setattr(batch.HostBatch, "padded", wrong)
    with pytest.raises((AssertionError, RuntimeError)):  # either: what differs, or what runs no more
        assert_as_eager(model, eager, 1e-5)


SIZES = buckets_for(SEQUENCES, WIDEST)


@pytest.mark.parametrize(
    ("fails_at", "bounds", "reason", "kept"),
    [
        # The duration of the first capture decides how many of the smallest follow.
        (1e9, {"seconds": 4.5}, "one capture takes 1.0 s, and 4.5 s are allowed for all", [*SIZES[:3], SIZES[-1]]),
        (1e9, {"most_bytes": 2 << 20}, "the graphs hold 3 MiB of 2 MiB allowed", SIZES[-3:]),
        (2, {}, "it asks for a number", SIZES[-2:]),
        (0, {}, "it asks for a number", []),
    ],
)
def test_sizes_are_captured_within_time_and_memory(
    fails_at: float, bounds: dict[str, float], reason: str, kept: list[int], load: Load
) -> None:
    model, capturer = build(load), Ticking(fails_at)
    assert isinstance(model.paged_runner, PagedRunner)
    runner = GraphRunner(model.paged_runner, block_tokens=4, vocab_size=model.loaded.vocab_size, max_sequences=3)
    bounds = {"seconds": 1e3, "most_bytes": 1 << 30, **bounds}
    found = runner.capture(capturer, SIZES, clock=capturer.clock, **bounds)  # type: ignore[arg-type]
    assert found == f"{len(kept)} of {len(SIZES)} sizes: {reason}"
    assert runner.sizes == kept


def test_the_next_step_overwrites_logits_of_forward_but_not_of_logits(load: Load) -> None:
    model = build(load)
    capture(model)
    slot = model.pool.allocate()
    kept = model.logits([Chunk(slot, [5], 0, 0)])
    lent = model.forward([Chunk(slot, [6], 1, 0)])
    before = kept.clone(), lent.clone()
    model.forward([Chunk(slot, [7], 2, 0)])
    assert torch.equal(kept, before[0])
    assert not torch.equal(lent, before[1])
