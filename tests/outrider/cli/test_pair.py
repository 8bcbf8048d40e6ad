"""Two processes as one thing: the end of either is noticed, and a free port is one that both can be told."""

import signal

import pytest

from outrider.cli.processes import Pair, PairSettings, ServiceError, ServiceProcess, fixed, terminated_as_interrupted

STAND_IN = "tests.outrider.cli.stand_in"


def test_a_service_that_ends_ends_the_watch() -> None:
    with (
        ServiceProcess.start([STAND_IN, "listen", "wait"]) as verifier,
        ServiceProcess.start([STAND_IN, "listen", "say=out of memory", "exit=1"]) as draft,
        pytest.raises(ServiceError, match="ended with exit code 1: out of memory"),
    ):
        Pair(verifier, draft).watch()


def test_a_pair_that_never_serves_is_given_up() -> None:
    with (
        ServiceProcess.start([STAND_IN, "listen", "wait"]) as verifier,
        ServiceProcess.start([STAND_IN, "listen", "wait"]) as draft,
    ):
        pair = Pair(verifier, draft)
        pair.check()
        with pytest.raises(ServiceError, match=r"not healthy after 0\.3 s"):
            pair.wait_healthy(0.3)


def test_port_0_becomes_a_free_one_and_others_stay() -> None:
    host, _, port = fixed("127.0.0.1:0").rpartition(":")
    assert host == "127.0.0.1"
    assert 1024 <= int(port) <= 65_535
    assert fixed("0.0.0.0:50052") == "0.0.0.0:50052"


def test_flags_are_passed_on_where_given() -> None:
    assert PairSettings("t", "d").flags() == []
    flags = PairSettings("t", "d", device="cpu", dtype="float32", threads=2).flags()
    assert flags == ["--device", "cpu", "--dtype", "float32", "--threads", "2"]
    assert PairSettings("t", "d", device="cuda").flags("cuda:1") == ["--device", "cuda:1"]
    assert PairSettings("t", "d").drafting() == []
    drafting = PairSettings("t", "d", drafter="staged", staged_by="ngram", ngram_corpus="c.txt").drafting()
    assert drafting == ["--drafter", "staged", "--staged-by", "ngram", "--ngram-corpus", "c.txt"]
    assert PairSettings("t", "d", speculation="adaptive").drafting() == ["--speculation", "adaptive"]


def test_sigterm_interrupts_as_ctrl_c_does() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), terminated_as_interrupted():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before
