"""What opening sequences again may cost: bounds that hold whatever happens, and that nobody waits for ever."""

from __future__ import annotations

import asyncio
import random

import pytest

from draft_service.failover import PER_ROUND, PER_SECOND, FailoverBudget
from tests.fake_clock import fake_clock


class Clock:
    """Seconds that are moved by hand."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def take_all(budget: FailoverBudget) -> int:
    taken = 0
    while budget.take_now():
        taken += 1
    return taken


def test_it_is_full_at_the_start_and_never_holds_more() -> None:
    """So that one death is survived by all at once."""
    budget = FailoverBudget(64, Clock())
    budget.give_back()
    assert budget.tokens == 64
    assert take_all(budget) == 64
    budget.give_back()
    assert take_all(budget) == 1
    with pytest.raises(ValueError, match="burst is 0; at least 1"):
        FailoverBudget(0)


def test_a_tenth_of_the_rounds_and_no_more() -> None:
    budget, taken = FailoverBudget(8, Clock()), 0
    take_all(budget)
    for _ in range(1000):
        budget.earn()
        taken += budget.take_now()
    assert taken in (99, 100)


def test_in_any_stretch_no_more_than_the_burst_a_tenth_of_the_rounds_and_one_a_second() -> None:
    """Random rounds, waits and takers: the bound holds between any two moments, not only from the start."""
    chance, clock, burst = random.Random(5), Clock(), 12
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


async def test_who_finds_it_empty_waits_for_rounds_in_order_and_nobody_takes_past_those_who_wait() -> None:
    budget, got = FailoverBudget(2, Clock()), list[int]()
    take_all(budget)

    async def wait(number: int) -> None:
        assert await budget.take(100.0)
        got.append(number)

    waiting = [asyncio.create_task(wait(number)) for number in range(4)]
    await asyncio.sleep(0)
    budget.give_back()
    assert not budget.take_now()
    for _ in range(31):
        await asyncio.sleep(0)
        budget.earn()
    await asyncio.gather(*waiting)
    assert got == [0, 1, 2, 3]


@fake_clock
async def test_without_any_round_one_a_second_gets_on() -> None:
    """Where all wait there are no rounds: nobody may wait for ever. Who cannot have one in time takes none."""
    clock = asyncio.get_running_loop().time
    budget = FailoverBudget(1, clock)
    assert budget.take_now()
    for second in (1.0, 2.0, 3.0):
        assert await budget.take(clock() + 5.0)
        assert clock() == pytest.approx(second)
    assert not await budget.take(clock() + 0.05)
    assert clock() == pytest.approx(3.05)
    await asyncio.sleep(0.95)
    assert budget.take_now()
