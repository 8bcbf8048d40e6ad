"""Passes of fixed sizes, recorded once and run again for any pass that fits: what a GPU does between prompts.

A pass in which every row has logits, as rounds and single steps have, is filled up to the next size there is a record
for, and runs as one call; whatever fits no record runs as it comes. It knows layouts, and nothing of proposals.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.lm.paged import Layout, PagedBatch, on_device
from outrider.lm.recording import CannotRecord, Recorder
from outrider.lm.runner import PagedRunner


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """A size of pass.

    Attributes:
        rows: all of them.
        sequences: at most.
        widest: rows of one sequence at most.
    """

    rows: int
    sequences: int
    widest: int

    def takes(self, layout: Layout) -> bool:
        """Whether a pass fits, and has logits in every row."""
        rows, wanted, sequences, _ = layout.shape
        fits = rows == wanted and rows <= self.rows and sequences <= self.sequences
        return fits and layout.widest <= self.widest


def buckets_for(max_sequences: int, widest: int, *, pass_tokens: int | None = None) -> list[Bucket]:
    """Sizes for rounds of up to so many rows each, the smallest first: 1, 2, 3, 4, 6, 8, 12 and so on.

    A pass is filled up by half of itself at most. Sequences that a size has room for and a pass lacks cost next to
    nothing, so sizes differ by their rows alone, and few take long to capture.

    Args:
        max_sequences: of a pass.
        widest: rows of a sequence.
        pass_tokens: rows of a pass; None is any number.
    """
    most = max_sequences * widest if pass_tokens is None else min(pass_tokens, max_sequences * widest)
    sizes = {size for i in range(most.bit_length()) for size in (1 << i, 3 << i >> 1) if size < most} | {most}
    return [Bucket(rows, min(rows, max_sequences), min(rows, widest)) for rows in sorted(sizes)]


@dataclass(frozen=True, slots=True)
class _Recorded:
    bucket: Bucket
    staging: Tensor
    room: Tensor
    logits: Tensor
    replay: Callable[[], None]


class RecordedRunner:
    """A runner (`outrider.lm.runner`) that has records of the sizes that come often.

    Args:
        eager: runs what has none.
        block_tokens: positions of a block.
        vocab_size: V.

    Attributes:
        eager: as given.
    """

    def __init__(self, eager: PagedRunner, *, block_tokens: int, vocab_size: int) -> None:
        self.eager = eager
        self._pages = -(-eager.max_length // block_tokens)
        self._vocab_size = vocab_size
        self._recorded: list[_Recorded] = []  # the smallest first
        self._copied: torch.cuda.Event | None = None  # when the last pass was on its device

    @property
    def sizes(self) -> list[Bucket]:
        """Those that are recorded, the smallest first."""
        return [each.bucket for each in self._recorded]

    def find(self, layout: Layout) -> Bucket | None:
        """The size whose record runs a pass; None where there is none."""
        recorded = self._find(layout)
        return None if recorded is None else recorded.bucket

    @torch.inference_mode()
    def run(self, layout: Layout) -> Tensor:
        """See `outrider.lm.runner.Runner`."""
        recorded = self._find(layout)
        if recorded is None:
            return self.eager.run(layout)
        bucket = recorded.bucket
        padded = layout.padded(
            rows=bucket.rows,
            sequences=bucket.sequences,
            pages=self._pages,
            nowhere=self.eager.memory.nowhere,
        )
        if self._copied is not None:
            self._copied.synchronize()  # the copy before this one has left the staging room
        padded.pack_into(recorded.staging.numpy())
        recorded.room.copy_(recorded.staging, non_blocking=True)
        if self.eager.device.type == "cuda":
            self._copied = torch.cuda.Event()
            self._copied.record()
        recorded.replay()
        return recorded.logits.narrow(0, 0, len(layout.tokens))

    @torch.inference_mode()
    def record(
        self,
        recorder: Recorder,
        buckets: Iterable[Bucket],
        *,
        seconds: float,
        most_bytes: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> str:
        """Records passes of these sizes, the largest first: the others then lie in its memory.

        Where time will not do for all of them, the smallest are recorded, as few streams gain the most.

        Args:
            recorder: of the device.
            buckets: sizes.
            seconds: how long it may take, as far as the first one tells.
            most_bytes: how much memory the records may hold; recording ends with the one that takes more.
            clock: seconds.

        Returns:
            In a few words what is recorded, and what is not, and why.

        Raises:
            torch.OutOfMemoryError: the device has no room for a record.
        """
        wanted = sorted(buckets)
        logits = self._logits(wanted[-1].rows)
        recorded: list[_Recorded] = []
        left, began, why = list(wanted), clock(), ""
        while left:
            try:
                recorded.append(self._record(recorder, left.pop(), logits))
            except CannotRecord as error:
                why = str(error)
                break
            if recorder.bytes > most_bytes:
                why = f"they hold {recorder.bytes >> 20} MiB of {most_bytes >> 20}"
                break
            each = (clock() - began) / len(recorded)
            room = max(0, int((seconds - (clock() - began)) / max(each, 1e-9)))
            if room < len(left):
                why = f"one takes {each:.1f} s, and all may take {seconds:g}"
                left = left[:room]
        self._recorded = recorded[::-1]
        return f"{len(recorded)} of {len(wanted)} sizes" + (f": {why}" if why else "")

    def _find(self, layout: Layout) -> _Recorded | None:
        return next((each for each in self._recorded if each.bucket.takes(layout)), None)

    def _record(self, recorder: Recorder, bucket: Bucket, logits: Tensor) -> _Recorded:
        shape = (bucket.rows, bucket.rows, bucket.sequences, self._pages)
        on_gpu = self.eager.device.type == "cuda"
        staging = torch.empty(Layout.size(shape), dtype=torch.uint8, pin_memory=on_gpu)
        _idle(bucket, self._pages, self.eager.memory.nowhere).pack_into(staging.numpy())
        room = staging.to(self.eager.device)
        batch = on_device(
            room, shape, self.eager.memory, self.eager.attention, widest=bucket.widest, longest=self.eager.max_length
        )
        own = logits.narrow(0, 0, bucket.rows)
        return _Recorded(bucket, staging, room, own, recorder.record(lambda: self._pass(batch, own)))

    def _pass(self, batch: PagedBatch, logits: Tensor) -> None:
        batch.forget()
        logits.copy_(self.eager.program(batch.tokens, batch, None))

    def _logits(self, rows: int) -> Tensor:
        return torch.zeros(rows, self._vocab_size, dtype=self.eager.dtype, device=self.eager.device)


def _idle(bucket: Bucket, pages: int, nowhere: int) -> Layout:
    """A pass of nobody's rows."""
    return Layout.empty().padded(rows=bucket.rows, sequences=bucket.sequences, pages=pages, nowhere=nowhere)
