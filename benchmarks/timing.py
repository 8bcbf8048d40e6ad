"""The time of work on a device: CUDA events on a GPU, `time.perf_counter` on a CPU.

Work is a function without arguments that queues operations.
"""

import ctypes
import gc
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

Work = Callable[[], Any]

LEAST_REPEATS = 5
_SECONDS = 0.15  # of one measurement, after its least repeats
_HIDING_CYCLES = 400_000  # a quarter of a millisecond, in which a graph is queued


Times = dict[str, float]
"""Microseconds of one run: the `median`, the first and the last tenth (`low`, `high`), and the number of `repeats`."""


class Timer:
    def __init__(self, device: torch.device, repeats: int) -> None:
        self.device = device
        self._repeats = repeats
        self._properties: Any = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
        # So many written bytes leave nothing else in the last-level cache.
        size = 1 << 25 if self._properties is None else max(4 * self._properties.L2_cache_size, 1 << 28)
        self._flushed = torch.zeros(size, dtype=torch.uint8, device=device)

    def describe(self) -> dict[str, Any]:
        if self._properties is None:
            return {"name": "cpu"}
        return {
            "name": self._properties.name,
            "memory_gib": round(self._properties.total_memory / 2**30, 1),
            "l2_mib": round(self._properties.L2_cache_size / 2**20, 1),
            "multiprocessors": self._properties.multi_processor_count,
            "cuda": torch.version.cuda,
        }

    def times(self, work: Work, *, cold: bool, launched: bool = True) -> Times:
        """The time of `work`, after two runs that do not count; `cold`: with caches emptied before each run.

        With `launched` the time to launch it counts, as for a caller whose device is idle; a CUDA graph is queued
        before the measurement starts.
        """
        for _ in range(2):
            work()
        self._wait()

        def one() -> float:
            if cold:
                self._flushed.zero_()
            return self._one(work, launched)

        return self._repeated(one)

    def wall(self, work: Work) -> Times:
        work()
        self._wait()

        def one() -> float:
            begin = time.perf_counter()
            work()
            self._wait()
            return 1e6 * (time.perf_counter() - begin)

        return self._repeated(one)

    def copy_bandwidth(self) -> float:
        """Bytes a second of a plain copy, read and written bytes together."""
        size = 1 << 26 if self._properties is None else 1 << 30
        source = torch.zeros(size, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        copy = self.times(lambda: target.copy_(source), cold=False, launched=False)
        return 2 * size / (copy["median"] * 1e-6)

    def captured(self, work: Work) -> Work | None:
        """The same work as a CUDA graph; None without CUDA."""
        if self._properties is None:
            return None
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
        """Memory that one run adds at its peak: allocated on a GPU, resident on a CPU. None without Linux and glibc."""
        if self._properties is None:
            return _peak_resident(work)
        self._wait()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        kept = work()  # its results live until the peak is read
        self._wait()
        peak = torch.cuda.max_memory_allocated(self.device) - before
        del kept
        return peak

    def _wait(self) -> None:
        if self._properties is not None:
            torch.cuda.synchronize(self.device)

    def _repeated(self, one: Callable[[], float]) -> Times:
        found: list[float] = []
        end = time.perf_counter() + _SECONDS
        while len(found) < LEAST_REPEATS or (len(found) < self._repeats and time.perf_counter() < end):
            found.append(one())
        tenths = quantiles(found, n=10, method="inclusive")
        return {"median": median(found), "low": tenths[0], "high": tenths[-1], "repeats": len(found)}

    def _one(self, work: Work, launched: bool) -> float:
        """Microseconds of one run, on the current stream."""
        if self._properties is None:
            begin = time.perf_counter()
            work()
            return 1e6 * (time.perf_counter() - begin)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        if launched:
            self._wait()
        else:
            torch.cuda._sleep(_HIDING_CYCLES)
        start.record()
        work()
        end.record()
        self._wait()
        return 1e3 * float(start.elapsed_time(end))


def _peak_resident(work: Work) -> int | None:
    try:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # memory that was freed is resident no more, and counts when it is used again
        before = _status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM, the peak, begins anew
        kept = work()
        peak = _status("VmHWM")
    except (AttributeError, OSError):
        return None
    del kept
    return max(0, peak - before)


def _status(name: str) -> int:
    """Bytes of this process."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return 1024 * int(line.split()[1])
