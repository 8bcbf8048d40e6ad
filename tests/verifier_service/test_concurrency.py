"""The concurrency limit of the verifier, and the `retry_after` of its refusals, on a fake clock."""

from contextlib import ExitStack

import pytest

from outrider.rpc.errors import RequestError
from outrider.rpc.timeouts import FIRST_GUESS
from verifier_service.service import ConcurrencyLimit

MAXIMUM, WAITING = 2, 1


class Driver:
    """A limit, and sequences that `leave` ends, oldest first."""

    def __init__(self) -> None:
        self.now = 0.0
        self.limit = ConcurrencyLimit(MAXIMUM, WAITING, clock=lambda: self.now)
        self._inside: list[ExitStack] = []

    def enter(self, *, resumed: bool = False) -> None:
        holder = ExitStack()
        holder.enter_context(self.limit.enter(resumed=resumed))
        self._inside.append(holder)

    def fill(self) -> None:
        for _ in range(MAXIMUM + WAITING):
            self.enter()

    def leave(self) -> None:
        self._inside.pop(0).close()

    def retry_after(self) -> float:
        with pytest.raises(RequestError) as caught:
            self.enter()
        assert caught.value.retry_after is not None
        return caught.value.retry_after


def test_sequences_beyond_the_queue_are_refused() -> None:
    driver = Driver()
    driver.fill()
    with pytest.raises(RequestError, match="the queue is full: 1 sequences wait, at most 1") as caught:
        driver.enter()
    assert (caught.value.reason, caught.value.metadata) == ("OVERLOADED", {"waiting": "1", "maximum": "1"})
    driver.leave()
    driver.enter()


@pytest.mark.parametrize("refused", [1, 200])
def test_retry_after_depends_on_the_pace_and_not_on_refusals(refused: int) -> None:
    driver = Driver()
    driver.fill()
    assert {driver.retry_after() for _ in range(refused)} == {FIRST_GUESS}
    for pace in (3.0, 0.5):
        for _ in range(60):
            driver.now += pace
            driver.leave()
            driver.enter()
        (seconds,) = {driver.retry_after() for _ in range(refused)}
        assert seconds == pytest.approx(pace, rel=0.02)


def test_no_more_sequences_are_preempted_than_are_queued() -> None:
    driver = Driver()
    with driver.limit.preempt() as is_preempted:
        assert not is_preempted, "none is queued"
    driver.fill()
    driver.enter(resumed=True)  # two wait now
    with ExitStack() as ending:
        preempted = [ending.enter_context(driver.limit.preempt()) for _ in range(4)]
    assert preempted == [True, True, False, False]
    with driver.limit.preempt() as is_preempted:
        assert is_preempted, "those before have ended"
