"""How long a piece of work takes on a device: events on a GPU, the processor's clock elsewhere.

Work is a function without arguments that queues what it does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

import torch

Work = Callable[[], Any]

LEAST_REPEATS = 5
_SECONDS = 0.15  # of one measurement, once it has its least repeats
_HIDING_CYCLES = 400_000  # about a quarter of a millisecond: what it takes to queue a graph behind it


@dataclass(frozen=True, slots=True)
class Times:
    """Microseconds of one run, over `repeats` runs: the median, and where the middle four fifths lie."""

    median: float
    low: float
    high: float
    repeats: int

    @classmethod
    def of(cls, microseconds: list[float]) -> Times:
        tenths = quantiles(microseconds, n=10, method="inclusive")
        return cls(median(microseconds), tenths[0], tenths[-1], len(microseconds))


class Clock:
    """The processor's own clock; `CudaClock` does the same by events."""

    copy_bytes = 1 << 26

    def __init__(self, device: torch.device, repeats: int) -> None:
        self.device = device
        self._repeats = repeats
        self._flushed = torch.zeros(self.cache_bytes(), dtype=torch.uint8, device=device)

    def times(self, work: Work, *, cold: bool, launched: bool = True) -> Times:
        """How long `work` takes, after two runs that do not count; `cold`: with caches emptied before each run.

        With `launched` the time to launch it counts, as it does for a caller whose device is idle. A graph that was
        captured has none of its own worth the name; without, it is queued before the clock starts.
        """
        for _ in range(2):
            work()
        self.wait()

        def one() -> float:
            if cold:
                self._flushed.zero_()
            return self._one(work, launched)

        return self._repeated(one)

    def wall(self, work: Work) -> Times:
        """How long a caller waits for `work` and its results."""
        work()
        self.wait()

        def one() -> float:
            begin = time.perf_counter()
            work()
            self.wait()
            return 1e6 * (time.perf_counter() - begin)

        return self._repeated(one)

    def copy_bandwidth(self) -> float:
        """Bytes a second that a plain copy moves, read and written bytes together."""
        source = torch.zeros(self.copy_bytes, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        best = self.times(lambda: target.copy_(source), cold=False, launched=False)
        return 2 * self.copy_bytes / (best.median * 1e-6)

    def _repeated(self, one: Callable[[], float]) -> Times:
        found: list[float] = []
        end = time.perf_counter() + _SECONDS
        while len(found) < LEAST_REPEATS or (len(found) < self._repeats and time.perf_counter() < end):
            found.append(one())
        return Times.of(found)

    def cache_bytes(self) -> int:
        """What is to be written so that nothing is left in the last cache."""
        return 1 << 25

    def wait(self) -> None:
        """Waits until the device has done what is queued."""

    def captured(self, work: Work) -> Work | None:
        """The same work as a CUDA graph; None where the device has none."""
        return None

    def peak_bytes(self, work: Work) -> int | None:
        """The most memory that one run takes beside what is there already; None where the device does not tell."""
        return None

    def describe(self) -> dict[str, Any]:
        return {"name": "cpu"}

    def _one(self, work: Work, launched: bool) -> float:
        begin = time.perf_counter()
        work()
        return 1e6 * (time.perf_counter() - begin)


class CudaClock(Clock):
    """Events on the current stream."""

    copy_bytes = 1 << 30

    def cache_bytes(self) -> int:
        return max(4 * torch.cuda.get_device_properties(self.device).L2_cache_size, 1 << 28)

    def wait(self) -> None:
        torch.cuda.synchronize(self.device)

    def captured(self, work: Work) -> Work | None:
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            work()
        torch.cuda.current_stream(self.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        return graph.replay

    def peak_bytes(self, work: Work) -> int | None:
        self.wait()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        kept = work()  # what it returns lives until the peak is read
        self.wait()
        peak = torch.cuda.max_memory_allocated(self.device) - before
        del kept
        return peak

    def describe(self) -> dict[str, Any]:
        found = torch.cuda.get_device_properties(self.device)
        return {
            "name": found.name,
            "memory_gib": round(found.total_memory / 2**30, 1),
            "l2_mib": round(found.L2_cache_size / 2**20, 1),
            "multiprocessors": found.multi_processor_count,
            "cuda": torch.version.cuda,
        }

    def _one(self, work: Work, launched: bool) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        if launched:
            self.wait()
        else:
            torch.cuda._sleep(_HIDING_CYCLES)
        start.record()
        work()
        end.record()
        self.wait()
        return 1e3 * float(start.elapsed_time(end))


def clock_of(device: torch.device, repeats: int) -> Clock:
    return CudaClock(device, repeats) if device.type == "cuda" else Clock(device, repeats)
