"""Captured steps give the logits of eager ones, whatever the padding; capture stays within its time and memory.

Without a device a replay calls the captured function again, over the same tensors as a CUDA graph would.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from outrider.runtime import batch, cuda_graph
from outrider.runtime.cuda_graph import CannotCapture, Capturer, EagerRunner, GraphRunner, buckets_for
from outrider.runtime.loader import LoadedModel
from outrider.runtime.model_runner import Chunk, ModelRunner
from outrider.runtime.torch_runner import TorchRunner
from tests.outrider.runtime.steps import MAX_LENGTH, PAGED, random_steps

Load = Callable[..., LoadedModel]
SEQUENCES, WIDEST = 3, 4
SIZES = buckets_for(SEQUENCES, WIDEST)
BOUNDS: dict[str, Any] = {"seconds": 1e3, "most_bytes": 1 << 30}


def build(load: Load, name: str = "qwen3", dtype: str = "float32") -> ModelRunner:
    return TorchRunner.build(load(name, dtype), SEQUENCES + 1, MAX_LENGTH, attention=PAGED)


def capture(model: ModelRunner) -> str:
    return model.capture(Capturer(), max_sequences=SEQUENCES, widest=WIDEST, **BOUNDS)


@pytest.mark.parametrize(
    ("name", "dtype", "allowed"),
    [
        *((name, "float32", 1e-5) for name in ("qwen3", "mistral-sliding", "gpt2", "gemma2", "gpt-oss")),
        ("qwen3", "bfloat16", 0.05),
        ("qwen2", "float16", 0.01),  # weights that are not packed: the head writes the captured logits itself
    ],
)
def test_a_captured_step_gives_the_logits_of_an_eager_one(
    name: str, dtype: str, allowed: float, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load(name, dtype)
    eager, model = (TorchRunner.build(loaded, SEQUENCES + 1, MAX_LENGTH, attention=PAGED) for _ in range(2))
    assert capture(model) == f"{len(SIZES)} of {len(SIZES)} sizes"
    assert isinstance(model.paged_runner, GraphRunner)
    find, replayed, chosen = model.paged_runner._find, list[int | None](), list[bool]()

    def record(host_batch: batch.HostBatch) -> Any:
        found = find(host_batch)
        replayed.append(None if found is None else found.rows)
        chosen.append(found is not None and len(host_batch.rows) < len(host_batch.tokens))
        return found

    monkeypatch.setattr(model.paged_runner, "_find", record)
    counts = (1, 1, 2, 3, 4, 4, 5)
    found, wanted = (random_steps(each, 5, 24, counts, unwanted=0.1)[0] for each in (model, eager))
    for one, other in zip(found, wanted, strict=True):
        assert one.shape == other.shape
        # A step of another number of rows may be rounded otherwise.
        assert torch.allclose(one.float(), other.float(), atol=allowed)
    assert len(set(replayed)) > 6, "several sizes"
    assert None in replayed, "and steps without a graph"
    assert any(chosen), "and rows that need no logits, in a graph"


def test_long_batches_with_rows_that_need_no_logits_run_eagerly(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph computes the logits of all rows."""
    monkeypatch.setattr(cuda_graph, "MOST_PROMPT_ROWS", 4)
    model = build(load)
    capture(model)
    assert isinstance(model.paged_runner, GraphRunner)
    slot = model.pool.allocate()
    for count, wanted, rows in ((4, 1, 4), (5, 1, None), (5, 5, 6)):
        found = model.paged_runner._find(batch.build_batch([Chunk(slot, [5] * count, 0, count - wanted)], model.pool))
        assert (found and found.rows) == rows


class FakeCapturer(Capturer):
    """Each graph takes a second and a MiB; from a time on none can be captured."""

    def __init__(self, fails_at: float) -> None:
        self.now, self.bytes, self._fails_at = 0.0, 0, fails_at

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        if self.now >= self._fails_at:
            raise CannotCapture("a host sync")
        run()
        self.now += 1.0
        self.bytes += 1 << 20
        return run


@pytest.mark.parametrize(
    ("fails_at", "bounds", "reason", "kept"),
    [
        # The duration of the first capture decides how many of the smallest follow.
        (1e9, {"seconds": 4.5}, "one capture takes 1.0 s, and 4.5 s are allowed for all", [*SIZES[:3], SIZES[-1]]),
        (1e9, {"most_bytes": 2 << 20}, "the graphs hold 3 MiB of 2 MiB allowed", SIZES[-3:]),
        (2, {}, "a host sync", SIZES[-2:]),
        (0, {}, "a host sync", []),
    ],
)
def test_sizes_are_captured_within_time_and_memory(
    fails_at: float, bounds: dict[str, float], reason: str, kept: list[int], load: Load
) -> None:
    model, capturer = build(load), FakeCapturer(fails_at)
    assert isinstance(model.paged_runner, EagerRunner)
    runner = GraphRunner(model.paged_runner, vocab_size=model.loaded.vocab_size, max_sequences=3)
    found = runner.capture(capturer, SIZES, clock=lambda: capturer.now, **BOUNDS | bounds)
    assert found == f"{len(kept)} of {len(SIZES)} sizes: {reason}"
    assert [each.rows for each in runner._captured] == kept


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
