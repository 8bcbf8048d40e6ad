"""Each step of a task is waited for so long and no longer, however many there are. The clock leaps."""

import asyncio
import gc
import weakref

import pytest

from outrider.rpc.timeouts import InactivityTimer
from tests.fake_clock import fake_clock

SHORT, LIMIT = 0.02, 0.2


@fake_clock
async def test_many_steps_may_take_longer_than_one() -> None:
    begun = asyncio.get_running_loop().time()
    with InactivityTimer(LIMIT) as timer:
        for number in range(20):
            assert await timer.wait_for(asyncio.sleep(SHORT, number)) == number
        await asyncio.sleep(1.5 * LIMIT)  # no step: nobody is waited for
        assert await timer.wait_for(asyncio.sleep(0, "after")) == "after"
    assert asyncio.get_running_loop().time() - begun == pytest.approx(20 * SHORT + 1.5 * LIMIT)


@fake_clock
async def test_a_step_that_takes_too_long_is_cancelled() -> None:
    loop = asyncio.get_running_loop()
    step = loop.create_future()
    with InactivityTimer(LIMIT) as timer:
        await timer.wait_for(asyncio.sleep(SHORT))
        with pytest.raises(TimeoutError):
            await timer.wait_for(step)
    assert step.cancelled()
    assert loop.time() == pytest.approx(SHORT + LIMIT), "counted from its own beginning"
    await asyncio.sleep(0)  # and the task lives on


@fake_clock
async def test_who_is_cancelled_from_outside_is_cancelled() -> None:
    async def waits() -> None:
        with InactivityTimer(LIMIT) as timer:
            await timer.wait_for(asyncio.sleep(10 * LIMIT))

    task = asyncio.create_task(waits())
    await asyncio.sleep(SHORT)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@fake_clock
async def test_nothing_is_left_of_it() -> None:
    """A timer that went on would hold on to the call."""
    with InactivityTimer(SHORT) as timer:
        await timer.wait_for(asyncio.sleep(3 * SHORT / 4))
    left = weakref.ref(timer)
    del timer
    await asyncio.sleep(2 * SHORT)
    gc.collect()
    assert left() is None
