"""Services as processes: how they start and end, and how two of them are watched as one."""

import signal

import pytest

from outrider.cli import processes
from outrider.cli.processes import (
    DRAFT_SPINS,
    TARGET_SPINS,
    Pair,
    ServiceError,
    ServiceProcess,
    service_environment,
    terminated_as_interrupted,
    threads_of_pair,
)

STAND_IN = "tests.outrider.cli.stand_in"
NEVER_SERVES = [STAND_IN, "listen", "wait"]
FAILS = [STAND_IN, "listen", "say=out of memory", "exit=1"]


def test_the_address_is_read_from_the_log() -> None:
    lines: list[str] = []
    arguments = [STAND_IN, "say=Loading.", "say={not json", "listen", "wait"]
    with ServiceProcess.launch(arguments, on_line=lines.append) as service:
        assert service.wait_listening() == service.address == "127.0.0.1:1"
        assert service.returncode is None
        service.check()
        assert service.log_lines() == lines
        assert lines[:2] == ["Loading.", "{not json"]
        with pytest.raises(ServiceError, match="not healthy"):
            service.wait_healthy(0.2)
    assert service.returncode == -signal.SIGTERM


@pytest.mark.parametrize(("count", "expected"), [(1, (1, 1)), (2, (2, 1)), (3, (3, 1)), (4, (2, 2)), (9, (4, 4))])
def test_threads_of_a_pair_follow_the_processors(
    count: int, expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "processors", lambda: frozenset(range(count)))
    assert threads_of_pair(5) == (5, 5)
    for value in ("3", "3,2"):  # a number for each level of nesting
        monkeypatch.setenv("OMP_NUM_THREADS", value)
        assert threads_of_pair() == (3, 3)
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert threads_of_pair() == expected


def test_threads_of_the_target_spin_longer_unless_the_user_says_how_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    draft, target = (int(service_environment(spins=each)["GOMP_SPINCOUNT"]) for each in (DRAFT_SPINS, TARGET_SPINS))
    assert 0 < draft < target
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    assert service_environment(spins=TARGET_SPINS)["GOMP_SPINCOUNT"] == "7"


def test_a_service_that_ends_early_gives_its_reason() -> None:
    arguments = [STAND_IN, "say={}", f"say={STAND_IN}: there is no model at /nowhere", "exit=3"]
    with ServiceProcess.launch(arguments) as service, pytest.raises(ServiceError) as caught:
        service.wait_listening()
    assert str(caught.value) == f"{STAND_IN} ended with exit code 3: there is no model at /nowhere"
    assert caught.value.log_lines == ("{}", f"{STAND_IN}: there is no model at /nowhere")


def test_a_service_that_ends_later_or_is_killed_is_noticed() -> None:
    with ServiceProcess.launch(FAILS) as service:
        for check in (lambda: service.wait_healthy(60), service.check):
            with pytest.raises(ServiceError, match="ended with exit code 1: out of memory"):
                check()
    with ServiceProcess.launch(NEVER_SERVES) as service:
        service.process.kill()
        service.process.wait()
        with pytest.raises(ServiceError, match="was ended by SIGKILL"):
            service.check()


def test_a_service_that_ignores_sigterm_is_killed() -> None:
    service = ServiceProcess.launch([STAND_IN, "deaf", "listen", "wait"])
    service.wait_listening()
    assert service.stop(timeout=0.2) == -signal.SIGKILL


@pytest.mark.parametrize(("listen", "timeout"), [("listen", 35), ("listen=120", 125), ("listen=0", 5)])
def test_a_service_gets_its_grace_before_it_is_killed(listen: str, timeout: float) -> None:
    with ServiceProcess.launch([STAND_IN, listen, "wait"]) as service:
        service.wait_listening()
        assert service.stop_timeout == timeout


def test_the_end_of_either_service_of_a_pair_is_noticed() -> None:
    with ServiceProcess.launch(NEVER_SERVES) as verifier:
        with ServiceProcess.launch(NEVER_SERVES) as draft:
            pair = Pair(verifier, draft)
            pair.check()
            with pytest.raises(ServiceError, match=r"not healthy after 0\.3 s"):
                pair.wait_healthy(0.3)
        with ServiceProcess.launch(FAILS) as draft, pytest.raises(ServiceError, match="exit code 1: out of memory"):
            Pair(verifier, draft).watch()


def test_sigterm_interrupts_as_ctrl_c_does() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), terminated_as_interrupted():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before
