"""Services that a benchmark starts end with it, whoever ends it."""

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from benchmarks.load import main
from benchmarks.services import Processes, RunningPair
from tests.cluster import MODELS
from tests.commands import Command, linux
from tests.fork_server import ForkedService, noting

LEAST = ("--quick", "--parts", "closed", "--streams", "1", "--new-tokens", "2", "--least-texts", "1")
ENDLESS = (*LEAST, "--repetitions", "10000", "--output")
INTERRUPTED = "benchmarks.load: interrupted; --resume goes on from here"


@pytest.mark.timeout(300)  # two services start, on whatever else the machine does
def test_a_benchmark_told_to_end_ends_its_services_and_can_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, which gets the signal as soon as a run is on disk."""
    output = tmp_path / "out.json"
    started: list[ForkedService] = []
    monkeypatch.setattr("benchmarks.services.ServiceProcess", noting(started))

    def interrupt() -> None:
        end = time.monotonic() + 220
        while not _runs(output) and time.monotonic() < end:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # where the benchmark has ended by itself
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        code = main([*ENDLESS, str(output)])
    finally:
        thread.join()
        signal.signal(signal.SIGTERM, before)
    assert code == 130
    assert capsys.readouterr().err.splitlines()[-1] == INTERRUPTED
    assert len(started) == 2
    assert None not in [service.returncode for service in started]
    assert _runs(output)


@linux
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_no_process_outlives_a_benchmark_that_is_told_to_end(tmp_path: Path) -> None:
    """As its user runs it: three processes, each with its own imports."""
    output = tmp_path / "out.json"
    command = Command("benchmarks.load", *ENDLESS, str(output))
    end = time.monotonic() + 220
    while not _runs(output):
        assert command.process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.1)
    assert len(command.left_behind()) == 3  # itself and the services

    command.process.send_signal(signal.SIGTERM)
    code, _, err = command.ended()
    assert code == 130
    assert err.splitlines()[-1] == INTERRUPTED
    assert command.left_behind() == []
    assert _runs(output)


def test_what_a_service_shows_is_found_however_much_it_has_logged() -> None:
    with RunningPair(MODELS / "target", MODELS / "draft", Processes()) as pair:
        for service in (pair.verifier, pair.draft):
            service._lines.clear()  # a long run pushes the first lines out
            assert pair.metrics_of(service)["process_cpu_seconds_total"] > 0


def _runs(output: Path) -> int:
    return len(json.loads(output.read_text())["runs"]) if output.is_file() else 0
