"""A service's process is learnt of, watched and stopped; what it says last is what its failure says."""

import time

import pytest

from outrider.cli.processes import ServiceError, ServiceProcess

STAND_IN = "tests.outrider.cli.stand_in"


def test_the_address_is_read_from_the_log() -> None:
    lines: list[str] = []
    with ServiceProcess.start(
        [STAND_IN, "say=Loading.", "say={not json", "listen", "wait"], on_line=lines.append
    ) as service:
        assert service.address == "127.0.0.1:1"
        assert service.returncode is None
        service.check()
        assert service.log_lines() == lines
        assert lines[:2] == ["Loading.", "{not json"]
        assert not service.is_healthy(within=0.05)
    assert service.returncode == -15


def test_a_service_that_ends_says_why() -> None:
    with pytest.raises(ServiceError) as caught:
        ServiceProcess.start([STAND_IN, "say={}", f"say={STAND_IN}: there is no model at /nowhere", "exit=3"])
    assert str(caught.value) == f"{STAND_IN} ended with exit code 3: there is no model at /nowhere"
    assert caught.value.log_lines == ("{}", f"{STAND_IN}: there is no model at /nowhere")


def test_a_service_that_ends_later_is_noticed() -> None:
    with ServiceProcess.start([STAND_IN, "listen", "say=out of memory", "exit=1"]) as service:
        with pytest.raises(ServiceError, match="ended with exit code 1: out of memory"):
            service.wait_healthy(60)
        with pytest.raises(ServiceError, match="ended with exit code 1"):
            service.check()


def test_a_service_that_is_killed_says_by_what() -> None:
    with ServiceProcess.start([STAND_IN, "listen", "wait"]) as service:
        service.process.kill()
        service.process.wait()
        with pytest.raises(ServiceError, match="was ended by SIGKILL"):
            service.check()


def test_a_service_that_says_nothing_is_given_up_and_stopped() -> None:
    with pytest.raises(ServiceError, match=r"did not listen within 0\.3 s"):
        ServiceProcess.start([STAND_IN, "wait"], timeout=0.3)


def test_a_service_that_never_serves_is_given_up() -> None:
    with (
        ServiceProcess.start([STAND_IN, "listen", "wait"]) as service,
        pytest.raises(ServiceError, match="not healthy"),
    ):
        service.wait_healthy(0.2)


def test_a_service_deaf_to_sigterm_is_killed() -> None:
    service = ServiceProcess.start([STAND_IN, "deaf", "listen", "wait"])
    begin = time.monotonic()
    assert service.stop(timeout=0.2) == -9
    assert time.monotonic() - begin < 30
    assert service.stop() == -9
