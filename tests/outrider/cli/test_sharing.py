"""Two services on one machine: each gets its share of the processors."""

import os
import subprocess
import sys

import pytest

from outrider.cli import processes
from outrider.cli.processes import halves, keep_on, processors, service_environment


def test_two_services_share_the_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    assert service_environment()["OMP_NUM_THREADS"] == str(max(1, len(processors()) // 2))
    assert service_environment()["OMP_WAIT_POLICY"] == "PASSIVE"
    assert service_environment(threads=7)["OMP_NUM_THREADS"] == "7"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert service_environment()["OMP_NUM_THREADS"] == "3"
    assert service_environment(threads=7)["OMP_NUM_THREADS"] == "7"


@pytest.mark.parametrize(
    ("ours", "threads", "expected"),
    [
        ({0, 1}, 1, ({0}, {1})),
        ({0, 1}, 2, None),
        ({2, 5, 7, 11}, 2, ({2, 5}, {7, 11})),
        ({2, 5, 7}, 1, ({2}, {5, 7})),
        ({3}, 1, None),
    ],
)
def test_each_gets_its_own_half_where_it_is_large_enough(
    ours: set[int], threads: int, expected: tuple[set[int], set[int]] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "processors", lambda: frozenset(ours))
    found = halves(threads)
    assert (None if found is None else [set(half) for half in found]) == (None if expected is None else list(expected))


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system does not place processes")
def test_a_process_stays_where_it_is_put() -> None:
    core = max(processors())
    program = "import os; input(); print(os.sched_getaffinity(0))"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        keep_on(process.pid, {core})
        said, _ = process.communicate(b"go\n", timeout=20)
    assert said.decode().strip() == str({core})


def test_a_process_that_has_ended_is_left_alone() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait(timeout=20)
        keep_on(process.pid, processors())
