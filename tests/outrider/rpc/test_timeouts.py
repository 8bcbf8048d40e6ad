"""Each await ends within its timeout; a failed write keeps the status of its call; and the wait for a full service."""

import asyncio
import os
import signal
import time
from collections import Counter
from typing import Any

import grpc
import pytest

from outrider.rpc.health import HealthState
from outrider.rpc.server import bind, create_server, serve_until_signal
from outrider.rpc.timeouts import InactivityTimer
from tests.fake_clock import fake_clock

SHORT, LIMIT = 0.02, 0.2


@fake_clock
async def test_many_steps_may_take_longer_than_one() -> None:
    begun = asyncio.get_running_loop().time()
    with InactivityTimer(LIMIT) as timer:
        for number in range(20):
            assert await timer.wait_for(asyncio.sleep(SHORT, number)) == number
        await asyncio.sleep(1.5 * LIMIT)  # between steps no timer runs
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


async def test_calls_that_no_handler_has_seen_when_a_server_drains_are_told_so() -> None:
    """The server counts none of them yet, though gRPC has taken them in; cut, they would end as if by their client."""
    server = create_server(max_message_bytes=1 << 20)
    methods: Any = {"Greet": grpc.unary_unary_rpc_method_handler(_greet)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", methods),))
    health = HealthState(server, [])
    address = bind(server, "127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(address) as channel:
        greet: Any = channel.unary_unary("/test/Greet")
        assert await greet(b"") == b"hello"
        calls = [asyncio.ensure_future(_status(greet(b""))) for _ in range(32)]
        serving = asyncio.create_task(serve_until_signal(server, health, grace_s=20.0))
        for _ in range(3):  # they leave, and nothing of the server's runs in between
            await asyncio.sleep(0)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.2)  # noqa: ASYNC251  # the loop is busy
        await serving
        ends = Counter(await asyncio.gather(*calls))
    assert ends.keys() <= {"OK", "UNAVAILABLE"}, ends
    assert ends["UNAVAILABLE"], "none was late"


async def _greet(_: Any, context: Any) -> bytes:
    return b"hello"


async def _status(call: Any) -> str:
    name: str = (await call.code()).name
    return name
