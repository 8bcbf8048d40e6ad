"""An inactivity timer bounds each step, and a drain answers calls that no handler has seen."""

import asyncio
import os
import signal
import time
from collections import Counter
from contextlib import suppress
from typing import Any

import grpc
import pytest

from outrider.rpc.health import HealthState
from outrider.rpc.server import bind, create_server, serve_until_signal
from outrider.rpc.timeouts import InactivityTimer
from tests.fake_clock import fake_clock
from tests.outrider.rpc.probe import Probe, once

SHORT, LIMIT = 0.02, 0.2


@fake_clock
async def test_the_timer_bounds_each_step_and_not_the_time_between_steps() -> None:
    loop = asyncio.get_running_loop()
    stuck = loop.create_future()
    with InactivityTimer(LIMIT) as timer:
        for number in range(20):
            assert await timer.wait_for(asyncio.sleep(SHORT, number)) == number
        await asyncio.sleep(1.5 * LIMIT)
        assert await timer.wait_for(asyncio.sleep(0, "after")) == "after"
        with pytest.raises(TimeoutError):
            await timer.wait_for(stuck)
    assert stuck.cancelled()
    assert loop.time() == pytest.approx(20 * SHORT + 2.5 * LIMIT)
    await asyncio.sleep(0)  # and the task lives on


@fake_clock
async def test_the_timer_works_in_a_task_that_survived_a_cancellation() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    with suppress(asyncio.CancelledError):
        await asyncio.sleep(0)
    with InactivityTimer(LIMIT) as timer, pytest.raises(TimeoutError):
        await timer.wait_for(asyncio.get_running_loop().create_future())
    assert task.uncancel() == 0


async def test_a_draining_server_refuses_calls_that_no_handler_has_seen() -> None:
    """The server does not count them yet, though gRPC has accepted them; cut, they would end as if cancelled."""
    server = create_server(max_message_bytes=1 << 20)
    Probe().register(server)
    health = HealthState(server, [])
    address = bind(server, "127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(address) as channel:

        async def status(call: Any) -> Any:
            return (await call.code()).name

        assert await status(once(channel)(b"")) == "OK"
        calls = [asyncio.ensure_future(status(once(channel)(b""))) for _ in range(32)]
        serving = asyncio.create_task(serve_until_signal(server, health, grace_s=20.0))
        for _ in range(3):  # they are sent, and nothing of the server's runs in between
            await asyncio.sleep(0)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.2)  # noqa: ASYNC251  # the loop is busy
        await serving
        ends = Counter(await asyncio.gather(*calls))
    assert ends.keys() <= {"OK", "UNAVAILABLE"}, ends
    assert ends["UNAVAILABLE"], "none was late"
