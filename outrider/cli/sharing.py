"""How two services share one machine: processors, threads, and how threads wait for each other."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from pathlib import Path


def service_environment(threads: int | None = None) -> dict[str, str]:
    """What a service that shares its machine with one other needs in its environment.

    Each gets `threads`, or half of the processors where neither that nor OMP_NUM_THREADS is given: two OpenMP pools of
    full size that wait by spinning take turns at slowing each other down. Waiting passively does not, but makes two
    threads slower than one: a pool sleeps at the end of every operation, and a pass is hundreds of them. So they spin
    for a moment, which bridges the gap from one operation to the next and no more.
    """
    environment = {
        "PYTHONUNBUFFERED": "1",
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE"),
        "GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", "2000"),
        "OMP_NUM_THREADS": str(threads or os.environ.get("OMP_NUM_THREADS") or max(1, len(processors()) // 2)),
    }
    root = Path(__file__).resolve().parents[2]
    if (root / "pyproject.toml").is_file():  # a source tree, which need not be installed
        paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    return environment


def halves(threads: int) -> tuple[frozenset[int], frozenset[int]] | None:
    """Half of the processors for each of two services of so many threads; None where there are too few.

    A round goes back and forth between them. Where either may run anywhere, each wakes on the other's processor, whose
    caches hold the other's weights (measured on two processors: a third of a round's hand-offs).
    """
    ours = sorted(processors())
    half = len(ours) // 2
    if threads > half:
        return None
    return frozenset(ours[:half]), frozenset(ours[half:])


def processors() -> frozenset[int]:
    """Those that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def keep_on(process_id: int, cores: Collection[int]) -> None:
    """Keeps a process that has just begun, and whatever threads it makes, on those processors.

    Does nothing where the system cannot or must not do it, or the process has ended: it runs as well elsewhere.
    """
    if hasattr(os, "sched_setaffinity"):
        with contextlib.suppress(OSError):
            os.sched_setaffinity(process_id, cores)
