"""Runs paged batches: eagerly, or as CUDA graphs captured for frequent sizes.

A batch of rounds, single steps and short pieces of prompts is padded to the next captured size and replayed as one
call. A batch that fits no graph runs eagerly. A graph reads and writes the same tensors each time: `GraphRunner` copies
the batch there before each replay, and it computes the logits of all rows. Without CUDA, a "capture" is the function
itself.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kernels.attention_work import work_size
from outrider.runtime.attention import Program
from outrider.runtime.batch import HostBatch, PagedAttention, Shape, layout, on_device, to_device
from outrider.runtime.block_pool import PagedMemory


class Runner(Protocol):
    """Runs batches one after the other, on one thread."""

    def run(self, host_batch: HostBatch) -> Tensor:
        """Writes keys and values of all rows. Returns the logits of the rows that need them, `[R, V]`, in the order of
        the rows and the dtype of the model. The next run may overwrite the result.
        """


@dataclass(frozen=True, slots=True)
class EagerRunner:
    """Runs each batch eagerly.

    Attributes:
        dtype: of the logits.
        max_length: the longest sequence, in positions.
    """

    program: Program
    memory: PagedMemory
    attention: PagedAttention
    device: torch.device
    dtype: torch.dtype
    max_length: int

    @torch.inference_mode()
    def run(self, host_batch: HostBatch) -> Tensor:
        batch = to_device(host_batch, self.memory, self.attention, self.device)
        return self.program(batch.tokens, batch, None if len(host_batch.rows) == len(host_batch.tokens) else batch.rows)


MOST_PROMPT_ROWS = 256
"""The most rows of a replayed batch in which some need no logits; an estimate. The forward pass of a longer batch takes
longer than its launch, so a graph saves little, and it computes logits for all rows."""

# The first runs allocate workspaces, compile kernels and choose matmul algorithms, which a capture cannot do.
_WARM_UPS = 2


class CannotCapture(RuntimeError):
    """The function does something that a CUDA graph cannot hold, such as a host sync."""


class Capturer:
    """Captures functions on one device; as it is, on a CPU, where a replay is a plain call.

    Attributes:
        bytes: memory held by the graphs.
    """

    bytes = 0

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Runs the function some times to warm up, captures it, and returns its replay.

        Raises:
            CannotCapture: the function cannot be captured; the text gives the reason.
        """
        run()
        return run


class CudaCapturer(Capturer):
    """Captures CUDA graphs. They share one memory pool, since no two run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        before = torch.cuda.memory_reserved(self._device)
        mode = torch.cuda.get_sync_debug_mode()
        current = torch.cuda.current_stream(self._device)
        try:
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                for _ in range(_WARM_UPS):
                    run()
                torch.cuda.set_sync_debug_mode("error")  # a host sync raises here, with a clear message
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
            self._pool = torch.cuda.graph_pool_handle()  # a failed capture leaves the old pool in an unknown state
            words = (str(error).splitlines() or [""])[0]
            raise CannotCapture(f"{type(error).__name__}: {words}") from error
        finally:
            torch.cuda.set_sync_debug_mode(mode)
        self.bytes += max(0, torch.cuda.memory_reserved(self._device) - before)
        return graph.replay


def capturer_for(device: torch.device) -> Capturer:
    """The capturer of a device."""
    return CudaCapturer(device) if device.type == "cuda" else Capturer()


def buckets_for(max_sequences: int, widest: int, *, max_batch_tokens: int | None = None) -> list[int]:
    """Padded batch sizes to capture, in rows: 1, 2, 3, 4, 6, 8, 12 and so on. Padding adds at most half of a batch.

    Args:
        widest: the most rows of one sequence.
        max_batch_tokens: the most rows of a batch; None is no limit.
    """
    most = max_sequences * widest if max_batch_tokens is None else min(max_batch_tokens, max_sequences * widest)
    return sorted({size for i in range(most.bit_length()) for size in (1 << i, 3 << i >> 1) if size < most} | {most})


@dataclass(frozen=True, slots=True)
class _Captured:
    shape: Shape
    staging: Tensor
    padded: HostBatch  # views of `staging`
    buffer: Tensor
    wanted: Tensor  # the rows that need logits, a part of `buffer`
    logits: Tensor
    replay: Callable[[], None]

    @property
    def rows(self) -> int:
        return self.shape[0]

    def takes(self, host_batch: HostBatch) -> bool:
        """Whether a batch fits; one with rows that need no logits must be short."""
        T, R, S, _, _ = host_batch.shape
        return self.rows >= T and self.shape[2] >= S and (R == T or T <= MOST_PROMPT_ROWS)


class GraphRunner:
    """A `Runner` that replays CUDA graphs of frequent sizes.

    Args:
        eager: runs batches that fit no graph.
        max_sequences: of a captured batch.
    """

    def __init__(self, eager: EagerRunner, *, vocab_size: int, max_sequences: int) -> None:
        self.eager = eager
        self._max_sequences = max_sequences
        self._max_blocks = -(-eager.max_length // eager.memory.block_tokens)
        self._vocab_size = vocab_size
        self._captured: list[_Captured] = []  # the smallest first
        self._copied: torch.cuda.Event | None = None  # the last copy to the device

    @torch.inference_mode()
    def run(self, host_batch: HostBatch) -> Tensor:
        captured = self._find(host_batch)
        if captured is None:
            return self.eager.run(host_batch)
        if self._copied is not None:
            self._copied.synchronize()  # the previous copy has read the staging buffer
        host_batch.pad_into(captured.padded, null_position=self.eager.memory.null_position)
        captured.buffer.copy_(captured.staging, non_blocking=True)
        if self.eager.device.type == "cuda":
            self._copied = torch.cuda.Event()
            self._copied.record()
        captured.replay()
        T, R, *_ = host_batch.shape
        logits = captured.logits.narrow(0, 0, T)
        return logits if R == T else logits.index_select(0, captured.wanted.narrow(0, 0, R))

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
        """Captures batches of these sizes. The largest comes first, so that the others reuse its memory.

        If the time is too short for all, the smallest sizes follow: few streams gain the most.

        Args:
            seconds: the time limit; the duration of the first capture is taken for the others.
            most_bytes: the memory limit of all graphs; capturing stops at the first graph beyond it.

        Returns:
            One line for the log: how many sizes are captured, and why not all.

        Raises:
            torch.OutOfMemoryError: the device has no memory for a graph.
        """
        wanted = sorted(buckets)
        logits = torch.zeros(wanted[-1], self._vocab_size, dtype=self.eager.dtype, device=self.eager.device)
        captured: list[_Captured] = []
        left, began, why = list(wanted), clock(), ""
        while left:
            try:
                captured.append(self._capture(capturer, left.pop(), logits))
            except CannotCapture as error:
                why = str(error)
                break
            if capturer.bytes > most_bytes:
                why = f"the graphs hold {capturer.bytes >> 20} MiB of {most_bytes >> 20} MiB allowed"
                break
            each = (clock() - began) / len(captured)
            count = max(0, int((seconds - (clock() - began)) / max(each, 1e-9)))
            if count < len(left):
                why = f"one capture takes {each:.1f} s, and {seconds:g} s are allowed for all"
                left = left[:count]
        self._captured = captured[::-1]
        return f"{len(captured)} of {len(wanted)} sizes" + (f": {why}" if why else "")

    def _find(self, host_batch: HostBatch) -> _Captured | None:
        return next((each for each in self._captured if each.takes(host_batch)), None)

    def _capture(self, capturer: Capturer, rows: int, logits: Tensor) -> _Captured:
        eager, (items, partials) = self.eager, work_size(rows, self.eager.max_length)
        shape = (rows, rows, min(rows, self._max_sequences), self._max_blocks, items)
        staging = layout(shape).buffer(torch.device("cpu"), pinned=eager.device.type == "cuda")
        padded = HostBatch.view(shape, staging.zero_())
        HostBatch.empty().pad_into(padded, null_position=eager.memory.null_position)
        buffer = staging.to(eager.device)
        batch = on_device(buffer, shape, partials, eager.memory, eager.attention)
        batch.logits = own = logits.narrow(0, 0, rows)

        def run() -> None:
            if (found := eager.program(batch.tokens, batch, None)) is not own:
                own.copy_(found)

        return _Captured(shape, staging, padded, buffer, batch.rows, own, capturer.capture(run))
