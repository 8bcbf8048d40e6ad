"""Who may come in, and how long who may not is told to wait. The clock is the test's."""

from contextlib import ExitStack

import pytest

from outrider.rpc.errors import RequestError
from outrider.rpc.timeouts import FIRST_GUESS
from verifier_service.service import Admission

PLACES, WAITING = 2, 1


class Driver:
    """An admission with sequences in it that end when told to, oldest first."""

    def __init__(self) -> None:
        self.now = 0.0
        self.admission = Admission(PLACES, WAITING, clock=lambda: self.now)
        self._inside: list[ExitStack] = []

    def enter(self, *, resumed: bool = False) -> None:
        holder = ExitStack()
        holder.enter_context(self.admission.enter(resumed=resumed))
        self._inside.append(holder)

    def fill(self) -> None:
        for _ in range(PLACES + WAITING):
            self.enter()

    def leave(self) -> None:
        self._inside.pop(0).close()

    def wait_told(self) -> float:
        with pytest.raises(RequestError) as caught:
            self.enter()
        assert caught.value.retry_after is not None
        return caught.value.retry_after


def test_places_and_the_queue_are_filled_and_no_more() -> None:
    driver = Driver()
    driver.fill()
    with pytest.raises(RequestError, match="the queue is full: 1 sequences wait, at most 1") as caught:
        driver.enter()
    assert (caught.value.reason, caught.value.metadata) == ("OVERLOADED", {"waiting": "1", "maximum": "1"})
    driver.leave()
    driver.enter()


@pytest.mark.parametrize("refused", [1, 200])
def test_the_wait_follows_how_fast_sequences_end_and_not_how_many_are_refused(refused: int) -> None:
    driver = Driver()
    driver.fill()
    assert {driver.wait_told() for _ in range(refused)} == {FIRST_GUESS}
    for pace in (3.0, 0.5):
        for _ in range(60):
            driver.now += pace
            driver.leave()
            driver.enter()
        (told,) = {driver.wait_told() for _ in range(refused)}
        assert told == pytest.approx(pace, rel=0.02)


def test_no_more_sequences_give_way_than_others_wait() -> None:
    driver = Driver()
    with driver.admission.give_way() as gives_way:
        assert not gives_way, "nobody waits"
    driver.fill()
    driver.enter(resumed=True)  # two wait now
    with ExitStack() as ending:
        asked = [ending.enter_context(driver.admission.give_way()) for _ in range(4)]
    assert asked == [True, True, False, False]
    with driver.admission.give_way() as gives_way:
        assert gives_way, "those before have ended"
