"""A circuit breaker: who may try, when, and how long the pauses are. The clock and the chance are the test's."""

from __future__ import annotations

import random

import pytest

from draft_service.replicas import FIRST_PAUSE, JITTER, LONGEST_PAUSE, TRIAL_SECONDS, Breaker, State


class House:
    """A breaker on a clock that is moved by hand."""

    def __init__(self, chance: float | None = 0.0) -> None:
        self.now = 0.0
        draws = random.Random(1)
        self.breaker = Breaker(clock=lambda: self.now, chance=draws.random if chance is None else lambda: chance)

    def fail(self) -> float:
        """A try that fails; returns the pause."""
        assert self.breaker.failed(self.breaker.begin())
        return self.breaker.pause

    def probe(self, *, well: bool) -> None:
        """A probe when it is due."""
        self.now += self.breaker.pause
        self.breaker.probed(well=well)


def test_closed_all_may_try_and_open_nobody() -> None:
    house = House()
    assert all(house.breaker.admits() for _ in range(10))
    house.fail()
    assert not house.breaker.admits()
    house.now += 1000.0
    assert not house.breaker.admits(), "time alone does not mend it: a probe has to go well"


def test_pauses_double_up_to_the_longest_and_a_success_forgets_them() -> None:
    house = House()
    pauses = [house.fail()]
    for _ in range(8):
        house.probe(well=False)
        pauses.append(house.breaker.pause)
    assert pauses[:3] == pytest.approx([FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE])
    assert pauses[-1] == LONGEST_PAUSE
    house.probe(well=True)
    assert house.breaker.succeeded(house.breaker.begin())
    assert house.fail() == pytest.approx(FIRST_PAUSE)


def test_who_answers_probes_and_fails_at_work_is_tried_more_and_more_seldom() -> None:
    house = House()
    pauses = []
    for _ in range(6):
        pauses.append(house.fail())
        house.probe(well=True)
    assert pauses == sorted(pauses)
    assert pauses[-1] > 10 * pauses[0]


def test_jitter_takes_at_most_its_share_and_spreads() -> None:
    pauses = [House(chance=None).fail() for _ in range(1)]
    draws = random.Random(7)
    for _ in range(200):
        breaker = Breaker(clock=lambda: 0.0, chance=draws.random)
        breaker.failed(breaker.begin())
        pauses.append(breaker.pause)
    assert min(pauses) >= FIRST_PAUSE * (1 - JITTER)
    assert max(pauses) <= FIRST_PAUSE
    assert max(pauses) - min(pauses) > 0.8 * JITTER * FIRST_PAUSE


def test_half_open_admits_one_trial_at_a_time() -> None:
    house = House()
    house.fail()
    house.probe(well=True)
    assert house.breaker.state is State.HALF_OPEN
    assert house.breaker.admits()
    trial = house.breaker.begin()
    assert not house.breaker.admits()
    house.now += TRIAL_SECONDS * 1.01
    assert house.breaker.admits(), "a trial that says nothing keeps nobody out for long"
    assert house.breaker.succeeded(trial)
    assert all(house.breaker.admits() for _ in range(10))


def test_many_that_fail_at_once_are_one_failure() -> None:
    house = House()
    epochs = [house.breaker.begin() for _ in range(50)]
    assert [house.breaker.failed(epoch) for epoch in epochs] == [True] + [False] * 49
    assert house.breaker.pause == pytest.approx(FIRST_PAUSE)


def test_what_was_begun_before_it_opened_says_nothing_of_it_after() -> None:
    house = House()
    old = house.breaker.begin()
    house.fail()
    house.probe(well=True)
    assert not house.breaker.succeeded(old), "a verdict that was on its way is no proof"
    assert not house.breaker.failed(old), "and its end is none either"
    assert house.breaker.state is State.HALF_OPEN


def test_whatever_happens_an_open_breaker_admits_nobody_and_pauses_end() -> None:
    """Two thousand random events: the state is one that the last events allow."""
    chance = random.Random(3)
    house = House(chance=None)
    epochs = [0]
    for _ in range(2000):
        match chance.randrange(5):
            case 0 if house.breaker.admits():
                epochs.append(house.breaker.begin())
            case 1:
                house.breaker.failed(chance.choice(epochs))
            case 2:
                house.breaker.succeeded(chance.choice(epochs))
            case 3 if not house.breaker.pause:
                house.breaker.probed(well=chance.random() < 0.5)
            case _:
                house.now += chance.random()
        assert house.breaker.pause <= LONGEST_PAUSE
        assert not (house.breaker.state is State.OPEN and house.breaker.admits())
        assert house.breaker.state is not State.CLOSED or house.breaker.admits()
        epochs = epochs[-20:]
