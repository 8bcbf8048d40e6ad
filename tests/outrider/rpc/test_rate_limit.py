"""How much one client may ask for, and what it is told beyond. The clock is the test's."""

from contextlib import suppress

import grpc
import pytest

from outrider.rpc import auth as module
from outrider.rpc.auth import LONGEST_WAIT, ClientLimits, count_sequences
from outrider.rpc.errors import RequestError


class Clients:
    """Limits with a clock of their own."""

    def __init__(self, rate: float | None = None, burst: int | None = None, max_sequences: int | None = None) -> None:
        self.now = 100.0
        self.limits = ClientLimits(rate=rate, burst=burst, max_sequences=max_sequences, clock=lambda: self.now)

    def call(self, name: str = "a") -> None:
        with self.limits.enter(name):
            pass

    def refused(self, name: str = "a") -> RequestError:
        with pytest.raises(RequestError) as caught:
            self.call(name)
        assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED")
        return caught.value

    def wait_told(self, name: str = "a") -> float:
        seconds = self.refused(name).retry_after
        assert seconds is not None
        return seconds


def test_a_burst_passes_and_then_calls_at_the_rate() -> None:
    clients = Clients(rate=4, burst=3)
    for _ in range(3):
        clients.call()
    for _ in range(20):
        clients.refused()
        clients.now += 0.25
        clients.call()
    clients.now += 1000.0  # a long pause saves up one burst, and no more
    for _ in range(3):
        clients.call()
    clients.refused()


def test_whoever_waits_as_long_as_it_is_told_comes_in() -> None:
    clients = Clients(rate=0.5, burst=1)
    clients.call()
    for _ in range(5):
        seconds = clients.wait_told()
        clients.now += seconds - 0.01
        clients.refused()
        clients.now += 4.01
        clients.call()


def test_each_that_is_turned_away_is_told_an_interval_more_up_to_a_bound() -> None:
    clients = Clients(rate=0.1)
    clients.call()
    told = [clients.wait_told() for _ in range(10)]
    assert told[:3] == [pytest.approx(10), pytest.approx(20), pytest.approx(30)]
    assert told[-1] == LONGEST_WAIT


def test_clients_do_not_share() -> None:
    clients = Clients(rate=1, burst=1, max_sequences=1)
    for name in "abc":
        clients.call(name)
    for name in "abc":
        clients.refused(name)
    with clients.limits.enter("d"):
        clients.refused("d")
        clients.call("e")


def test_calls_at_once_are_bounded_and_given_back_however_they_end() -> None:
    clients = Clients(max_sequences=2)
    for _ in range(3):
        with suppress(ZeroDivisionError), clients.limits.enter("a"), clients.limits.enter("a"):
            error = clients.refused()
            assert error.message == "this client has 2 sequences in progress and asks for 1 more; at most 2"
            assert error.metadata == {"limit": "max-client-sequences", "given": "3", "maximum": "2"}
            raise ZeroDivisionError
    clients.call()


def test_each_sample_of_a_call_counts_as_a_sequence_until_the_call_ends() -> None:
    clients = Clients(max_sequences=4)
    with clients.limits.enter("a"):
        count_sequences("n", 3)
        clients.call()
        with clients.limits.enter("a"):
            clients.refused()
            with pytest.raises(RequestError) as caught:
                count_sequences("n", 2)
            assert caught.value.metadata == {"limit": "max-client-sequences", "given": "5", "maximum": "4"}
    with clients.limits.enter("a"):
        count_sequences("n", 4)
        clients.refused()
    with clients.limits.enter("a"), pytest.raises(RequestError) as caught:
        count_sequences("n", 5)  # which a client never has: trying again would not help
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.metadata == {"field": "n", "given": "5", "maximum": "4"}


def test_each_sample_of_a_call_is_paid_for_at_the_rate() -> None:
    """Also where they are more than a burst: then the calls that follow wait the longer."""
    clients = Clients(rate=2, burst=2)
    with clients.limits.enter("a"):
        count_sequences("n", 9)
    assert clients.wait_told() == pytest.approx(4.0)  # 2 - 9 = -7, and 1 is needed
    clients.now += 4.5
    clients.call()


def test_without_limits_samples_are_not_counted() -> None:
    clients = Clients()
    for _ in range(2000):
        with clients.limits.enter("a"):
            count_sequences("n", 16)


def test_the_refusal_names_the_numbers_and_without_a_burst_it_is_the_calls_of_a_second() -> None:
    clients = Clients(rate=2.5)
    for _ in range(2):
        clients.call()
    error = clients.refused()
    assert error.message == (
        "this client's sequences come faster than 2.5 a second, and 2 at once; try again in about 0.4 s"
    )
    assert error.metadata == {"limit": "client-rate", "rate": "2.5", "burst": "2"}
    assert error.retry_after == pytest.approx(0.4)


def test_clients_that_came_once_are_forgotten_and_those_that_owe_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many addresses call, memory is bounded by those that called lately."""
    monkeypatch.setattr(module, "_KEPT", 8)
    clients = Clients(rate=1, burst=1)
    with clients.limits.enter("inside"):
        for number in range(50):
            clients.now += 0.9
            clients.call(f"client {number}")
        clients.refused("client 49")
        assert len(clients.limits._clients) <= 9
        clients.now += 1.0
        clients.call("client 49")
        assert clients.limits._clients["inside"].sequences == 1
