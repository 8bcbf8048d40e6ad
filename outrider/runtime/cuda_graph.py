"""Runs passes over pages: as they come, or as CUDA graphs of the sizes that come often.

A pass in which every row has logits, as rounds and single steps have, is filled up to the next size that was captured,
and runs as one call; whatever fits no graph runs as it comes. Elsewhere than on CUDA a capture is the function itself.
What is captured reads and writes the same tensors each time, so what differs from pass to pass is written there before.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kernels.attention_work import work_size
from outrider.runtime.attention import Program
from outrider.runtime.batch import Layout, PagedAttention, Shape, on_device, to_device
from outrider.runtime.block_pool import PagedMemory


class Runner(Protocol):
    """Runs passes, one after the other, on one thread."""

    def run(self, layout: Layout) -> Tensor:
        """Writes keys and values of all rows, and returns logits of those that need them, `[R, V]`, in the order of the
        rows and the dtype of the model. Another run may write over them.
        """


class PagedRunner:
    """Runs each pass as it comes.

    Args:
        program: of the model.
        memory: of its keys and values.
        attention: that reads them.
        device: of all.
        dtype: of the logits.
        max_length: positions of a sequence at most.
    """

    def __init__(
        self,
        program: Program,
        memory: PagedMemory,
        attention: PagedAttention,
        device: torch.device,
        dtype: torch.dtype,
        max_length: int,
    ) -> None:
        self.program = program
        self.memory = memory
        self.attention = attention
        self.device = device
        self.dtype = dtype
        self.max_length = max_length

    @torch.inference_mode()
    def run(self, layout: Layout) -> Tensor:
        """See `Runner`."""
        batch = to_device(layout, self.memory, self.attention, self.device)
        return self.program(batch.tokens, batch, None if len(layout.rows) == len(layout.tokens) else batch.rows)


# The first runs make what later ones keep: workspaces, compiled kernels, plans of products.
_WARM_UPS = 2


class Capturer(Protocol):
    """Captures on one device."""

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Runs it some times, and returns what runs it again.

        Raises:
            CannotCapture: the device cannot hold it; the text says why.
        """

    @property
    def bytes(self) -> int:
        """Memory that the graphs hold."""


class CannotCapture(RuntimeError):
    """What was to be captured asks for something that a graph cannot hold."""


class Repeating:
    """Repeats by calling again: where there are no graphs."""

    bytes = 0

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """See `Capturer`."""
        run()
        return run


class CudaCapturer:
    """Captures CUDA graphs, which share one pool of memory: they never run at once.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)
        self._bytes = 0

    @property
    def bytes(self) -> int:
        """See `Capturer`: what the device has lost since the first capture."""
        return self._bytes

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """See `Capturer`."""
        graph = torch.cuda.CUDAGraph()
        before = torch.cuda.memory_reserved(self._device)
        mode = torch.cuda.get_sync_debug_mode()
        current = torch.cuda.current_stream(self._device)
        try:
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                for _ in range(_WARM_UPS):
                    run()
                torch.cuda.set_sync_debug_mode("error")  # what waits for the device says so here, in plain words
                run()
                torch.cuda.set_sync_debug_mode(mode)
            current.wait_stream(self._stream)
            torch.cuda.synchronize(self._device)
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                run()
            torch.cuda.synchronize(self._device)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self._pool = torch.cuda.graph_pool_handle()  # what a broken capture leaves in the other is not known
            words = (str(error).splitlines() or [""])[0]
            raise CannotCapture(f"{type(error).__name__}: {words}") from error
        finally:
            torch.cuda.set_sync_debug_mode(mode)
        self._bytes += max(0, torch.cuda.memory_reserved(self._device) - before)
        return graph.replay


def capturer_for(device: torch.device) -> Capturer:
    """What captures on a device."""
    return CudaCapturer(device) if device.type == "cuda" else Repeating()


def buckets_for(max_sequences: int, widest: int, *, pass_tokens: int | None = None) -> list[int]:
    """Numbers of rows to capture passes of, for rounds of up to so many rows each: 1, 2, 3, 4, 6, 8, 12 and so on.

    A pass is filled up by half of itself at most.

    Args:
        max_sequences: of a pass.
        widest: rows of a sequence.
        pass_tokens: rows of a pass; None is any number.
    """
    most = max_sequences * widest if pass_tokens is None else min(pass_tokens, max_sequences * widest)
    return sorted({size for i in range(most.bit_length()) for size in (1 << i, 3 << i >> 1) if size < most} | {most})


@dataclass(frozen=True, slots=True)
class _Captured:
    shape: Shape
    staging: Tensor
    room: Tensor
    logits: Tensor
    replay: Callable[[], None]

    @property
    def rows(self) -> int:
        return self.shape[0]

    def takes(self, layout: Layout) -> bool:
        """Whether a pass fits, and has logits in every row."""
        T, R, S, _, _ = layout.shape
        return T == R <= self.rows and self.shape[2] >= S


class GraphRunner:
    """A runner (`outrider.runtime.cuda_graph`) that has graphs of the sizes that come often.

    Args:
        eager: runs what has none.
        block_tokens: positions of a block.
        vocab_size: V.
        max_sequences: of a captured pass.

    Attributes:
        eager: as given.
    """

    def __init__(self, eager: PagedRunner, *, block_tokens: int, vocab_size: int, max_sequences: int) -> None:
        self.eager = eager
        self._max_sequences = max_sequences
        self._pages = -(-eager.max_length // block_tokens)
        self._vocab_size = vocab_size
        self._captured: list[_Captured] = []  # the smallest first
        self._copied: torch.cuda.Event | None = None  # when the last pass was on its device

    @property
    def sizes(self) -> list[int]:
        """Rows of the passes that are captured, the fewest first."""
        return [each.rows for each in self._captured]

    def find(self, layout: Layout) -> int | None:
        """The rows of the graph that runs a pass; None where there is none."""
        captured = self._find(layout)
        return None if captured is None else captured.rows

    @torch.inference_mode()
    def run(self, layout: Layout) -> Tensor:
        """See `outrider.runtime.cuda_graph.Runner`."""
        captured = self._find(layout)
        if captured is None:
            return self.eager.run(layout)
        padded = layout.padded(captured.shape, nowhere=self.eager.memory.null_position)
        if self._copied is not None:
            self._copied.synchronize()  # the copy before this one has left the staging room
        padded.pack_into(captured.staging.numpy())
        captured.room.copy_(captured.staging, non_blocking=True)
        if self.eager.device.type == "cuda":
            self._copied = torch.cuda.Event()
            self._copied.record()
        captured.replay()
        return captured.logits.narrow(0, 0, len(layout.tokens))

    @torch.inference_mode()
    def capture(
        self,
        capturer: Capturer,
        buckets: Iterable[int],
        *,
        seconds: float,
        most_bytes: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> str:
        """Captures passes of these sizes, the largest first: the others then lie in its memory.

        Where time will not do for all of them, the smallest are captured, as few streams gain the most.

        Args:
            capturer: of the device.
            buckets: numbers of rows.
            seconds: how long it may take, as far as the first one tells.
            most_bytes: how much memory the graphs may hold; capturing ends with the one that takes more.
            clock: seconds.

        Returns:
            In a few words what is captured, and what is not, and why.

        Raises:
            torch.OutOfMemoryError: the device has no room for a graph.
        """
        wanted = sorted(buckets)
        logits = self._logits(wanted[-1])
        captured: list[_Captured] = []
        left, began, why = list(wanted), clock(), ""
        while left:
            try:
                captured.append(self._capture(capturer, left.pop(), logits))
            except CannotCapture as error:
                why = str(error)
                break
            if capturer.bytes > most_bytes:
                why = f"they hold {capturer.bytes >> 20} MiB of {most_bytes >> 20}"
                break
            each = (clock() - began) / len(captured)
            room = max(0, int((seconds - (clock() - began)) / max(each, 1e-9)))
            if room < len(left):
                why = f"one takes {each:.1f} s, and all may take {seconds:g}"
                left = left[:room]
        self._captured = captured[::-1]
        return f"{len(captured)} of {len(wanted)} sizes" + (f": {why}" if why else "")

    def _find(self, layout: Layout) -> _Captured | None:
        return next((each for each in self._captured if each.takes(layout)), None)

    def _capture(self, capturer: Capturer, rows: int, logits: Tensor) -> _Captured:
        eager, (items, slots) = self.eager, work_size(rows, self.eager.max_length)
        shape = (rows, rows, min(rows, self._max_sequences), self._pages, items)
        staging = torch.empty(Layout.size(shape), dtype=torch.uint8, pin_memory=eager.device.type == "cuda")
        Layout.empty().padded(shape, nowhere=eager.memory.null_position).pack_into(staging.numpy())
        room = staging.to(eager.device)
        batch = on_device(room, shape, slots, eager.memory, eager.attention)
        own = logits.narrow(0, 0, rows)

        def run() -> None:
            own.copy_(eager.program(batch.tokens, batch, None))

        return _Captured(shape, staging, room, own, capturer.capture(run))

    def _logits(self, rows: int) -> Tensor:
        return torch.zeros(rows, self._vocab_size, dtype=self.eager.dtype, device=self.eager.device)
