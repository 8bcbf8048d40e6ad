"""What opening sequences again may cost: bounds that hold whatever happens, and that nobody waits for ever."""

from __future__ import annotations

import asyncio
import random

import pytest

from draft_service.failover import PER_ROUND, PER_SECOND, FailoverBudget
from tests.fake_clock import fake_clock


class Clock:
    """Seconds that are moved by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_it_is_full_at_the_start_so_that_one_death_is_survived_by_all() -> None:
    budget = FailoverBudget(64, Clock())
    assert sum(budget.take_now() for _ in range(100)) == 64


def test_a_tenth_of_the_rounds_and_no_more() -> None:
    budget = FailoverBudget(8, Clock())
    while budget.take_now():
        pass
    taken = 0
    for _ in range(1000):
        budget.earn()
        taken += budget.take_now()
    assert taken in (99, 100)


def test_in_any_stretch_no_more_than_the_burst_a_tenth_of_the_rounds_and_one_a_second() -> None:
    """Random rounds, waits and takers: the bound holds between any two moments, not only from the start."""
    chance = random.Random(5)
    clock = Clock()
    burst = 12
    budget = FailoverBudget(burst, clock)
    history: list[tuple[float, int, int]] = []
    rounds = taken = 0
    for _ in range(3000):
        match chance.randrange(3):
            case 0:
                rounds += 1
                budget.earn()
            case 1:
                taken += budget.take_now()
            case _:
                clock.now += chance.expovariate(2.0)
        history.append((clock.now, rounds, taken))
    for _ in range(20_000):
        (t0, r0, n0), (t1, r1, n1) = sorted(chance.sample(history, 2))
        assert n1 - n0 <= burst + PER_ROUND * (r1 - r0) + PER_SECOND * (t1 - t0) + 1e-6
    assert taken > 300


def test_what_is_given_back_is_there_again_and_never_more_than_it_holds() -> None:
    budget = FailoverBudget(3, Clock())
    budget.give_back()
    assert budget.tokens == 3
    assert budget.take_now()
    budget.give_back()
    assert sum(budget.take_now() for _ in range(9)) == 3


async def test_who_finds_it_empty_waits_for_rounds_in_order() -> None:
    budget = FailoverBudget(2, Clock())
    while budget.take_now():
        pass
    got: list[int] = []

    async def wait(number: int) -> None:
        assert await budget.take(100.0)
        got.append(number)

    waiting = [asyncio.create_task(wait(number)) for number in range(4)]
    for _ in range(41):
        await asyncio.sleep(0)
        budget.earn()
    await asyncio.gather(*waiting)
    assert got == [0, 1, 2, 3]


@fake_clock
async def test_without_any_round_one_a_second_gets_on() -> None:
    """Where all wait there are no rounds: nobody may wait for ever."""
    clock = asyncio.get_running_loop().time
    budget = FailoverBudget(1, clock)
    assert budget.take_now()
    for second in (1.0, 2.0, 3.0):
        assert await budget.take(clock() + 5.0)
        assert clock() == pytest.approx(second)


@fake_clock
async def test_who_cannot_have_one_in_time_is_told_so_in_time_and_takes_none() -> None:
    clock = asyncio.get_running_loop().time
    budget = FailoverBudget(1, clock)
    assert budget.take_now()
    assert not await budget.take(0.05)
    assert clock() == pytest.approx(0.05)
    await asyncio.sleep(0.95)
    assert budget.take_now(), "the one that gave up has taken nothing"


async def test_nobody_takes_past_those_who_wait() -> None:
    budget = FailoverBudget(1, Clock())
    assert budget.take_now()
    waiting = asyncio.create_task(budget.take(100.0))
    await asyncio.sleep(0)
    budget.give_back()
    assert not budget.take_now()
    assert await waiting


def test_a_budget_for_nobody_is_refused() -> None:
    with pytest.raises(ValueError, match="burst is 0; at least 1"):
        FailoverBudget(0)
