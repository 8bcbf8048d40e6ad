"""Services as processes: how they start and end, how two of them are watched as one and share the processors."""

import signal
import time

import pytest

from outrider.cli import processes
from outrider.cli.processes import (
    Pair,
    ServiceError,
    ServiceProcess,
    fixed,
    halves,
    terminated_as_interrupted,
)

STAND_IN = "tests.outrider.cli.stand_in"
SERVES_NEVER = [STAND_IN, "listen", "wait"]
BREAKS = [STAND_IN, "listen", "say=out of memory", "exit=1"]


# -------------------------------------------------------------------------------------------------------- one service


def test_the_address_is_read_from_the_log() -> None:
    lines: list[str] = []
    arguments = [STAND_IN, "say=Loading.", "say={not json", "listen", "wait"]
    with ServiceProcess.start(arguments, on_line=lines.append) as service:
        assert service.address == "127.0.0.1:1"
        assert service.returncode is None
        service.check()
        assert service.log_lines() == lines
        assert lines[:2] == ["Loading.", "{not json"]
        assert not service.is_healthy(within=0.05)
        with pytest.raises(ServiceError, match="not healthy"):
            service.wait_healthy(0.2)
    assert service.returncode == -signal.SIGTERM


def test_a_service_that_ends_says_why() -> None:
    with pytest.raises(ServiceError) as caught:
        ServiceProcess.start([STAND_IN, "say={}", f"say={STAND_IN}: there is no model at /nowhere", "exit=3"])
    assert str(caught.value) == f"{STAND_IN} ended with exit code 3: there is no model at /nowhere"
    assert caught.value.log_lines == ("{}", f"{STAND_IN}: there is no model at /nowhere")


def test_a_service_that_ends_later_or_is_killed_is_noticed() -> None:
    with ServiceProcess.start(BREAKS) as service:
        for check in (lambda: service.wait_healthy(60), service.check):
            with pytest.raises(ServiceError, match="ended with exit code 1: out of memory"):
                check()
    with ServiceProcess.start(SERVES_NEVER) as service:
        service.process.kill()
        service.process.wait()
        with pytest.raises(ServiceError, match="was ended by SIGKILL"):
            service.check()


def test_a_service_deaf_to_sigterm_is_killed() -> None:
    service = ServiceProcess.start([STAND_IN, "deaf", "listen", "wait"])
    begin = time.monotonic()
    assert service.stop(timeout=0.2) == -9
    assert time.monotonic() - begin < 30
    assert service.stop() == -9


# ------------------------------------------------------------------------------------------------------------- a pair


def test_the_end_of_either_service_is_noticed() -> None:
    with ServiceProcess.start(SERVES_NEVER) as verifier:
        with ServiceProcess.start(SERVES_NEVER) as draft:
            pair = Pair(verifier, draft)
            pair.check()
            with pytest.raises(ServiceError, match=r"not healthy after 0\.3 s"):
                pair.wait_healthy(0.3)
        with ServiceProcess.start(BREAKS) as draft, pytest.raises(ServiceError, match="exit code 1: out of memory"):
            Pair(verifier, draft).watch()


def test_port_0_becomes_a_free_one_and_others_stay() -> None:
    host, _, port = fixed("127.0.0.1:0").rpartition(":")
    assert host == "127.0.0.1"
    assert 1024 <= int(port) <= 65_535
    assert fixed("0.0.0.0:50052") == "0.0.0.0:50052"


def test_sigterm_interrupts_as_ctrl_c_does() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), terminated_as_interrupted():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


# --------------------------------------------------------------------------------------------------------- processors


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
    assert found is None if expected is None else found == tuple(map(frozenset, expected))
