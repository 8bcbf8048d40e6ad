"""Services that a benchmark starts end with it, whoever ends it."""

import json
import signal
import time
from pathlib import Path

import pytest

from benchmarks.services import Processes, RunningPair
from tests.commands import Command, linux
from tests.services import HEALTHY_WITHIN_S, MODELS


@linux
@pytest.mark.timeout(300)  # two services start, on whatever else the machine does
def test_a_benchmark_told_to_end_leaves_nothing_and_can_be_resumed(tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    least = ("--quick", "--parts", "closed", "--streams", "1", "--new-tokens", "2", "--least-texts", "1")
    asked = (*least, "--repetitions", "10000", "--output", str(output))
    command = Command("benchmarks.load", *asked)
    end = time.monotonic() + 2 * HEALTHY_WITHIN_S
    while not _runs(output):
        assert command.process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.1)
    assert len(command.left_behind()) == 3  # itself and the services

    command.process.send_signal(signal.SIGTERM)
    code, _, err = command.ended()
    assert code == 130
    assert err.splitlines()[-1] == "benchmarks.load: interrupted; --resume goes on from here"
    assert command.left_behind() == []
    assert _runs(output)


def test_what_a_service_shows_is_found_however_much_it_has_logged() -> None:
    with RunningPair(MODELS / "target", MODELS / "draft", Processes()) as pair:
        for service in (pair.verifier, pair.draft):
            service._lines.clear()  # a long run pushes the first lines out
            assert pair.metrics_of(service)["process_cpu_seconds_total"] > 0


def _runs(output: Path) -> int:
    return len(json.loads(output.read_text())["runs"]) if output.is_file() else 0
