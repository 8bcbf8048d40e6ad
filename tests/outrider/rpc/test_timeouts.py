"""No await is borne for longer than it may take, and how a call ended is known whatever was being written to it."""

import asyncio
import gc
import os
import signal
import time
import weakref
from collections import Counter
from typing import Any

import grpc
import pytest

from outrider.rpc.errors import overloaded, to_status
from outrider.rpc.health import HealthState
from outrider.rpc.server import bind, create_server, serve_until_signal
from outrider.rpc.timeouts import Ending, InactivityTimer
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


async def _greet_and_refuse(_: Any, context: Any) -> None:
    await context.read()
    await context.write(b"hello")
    await context.abort_with_status(to_status(overloaded("no room")))


async def _take_all(_: Any, context: Any) -> None:
    while await context.read() is not grpc.aio.EOF:
        pass


async def _stay(_: Any, context: Any) -> None:
    await context.read()
    await asyncio.sleep(60)


HANDLERS = {"Refuse": _greet_and_refuse, "Take": _take_all, "Stay": _stay}


@pytest.fixture
async def channel() -> Any:
    server = create_server(max_message_bytes=1 << 20)
    methods: Any = {name: grpc.stream_stream_rpc_method_handler(handler) for name, handler in HANDLERS.items()}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", methods),))
    address = bind(server, "127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(address) as channel:
        yield channel
    await server.stop(None)


async def _refused(channel: grpc.aio.Channel, turns: int) -> tuple[str, str | None, str | None]:
    """The status as it was noted, and what the call itself says in the end."""
    call: Any = channel.stream_stream("/test/Refuse")()
    ending = Ending(call)
    await call.write(b"open")
    await call.read()
    for _ in range(turns):  # of the event loop
        await asyncio.sleep(0)
    try:
        await call.write(b"more")
        await call.read()
    except (grpc.RpcError, asyncio.InvalidStateError):
        pass
    status = await ending.status()
    return status.code().name, status.details(), await call.details()


async def test_a_write_that_fails_hides_no_status(channel: grpc.aio.Channel) -> None:
    ends = [
        end for _ in range(5) for end in await asyncio.gather(*(_refused(channel, number % 7) for number in range(40)))
    ]
    assert {(code, details) for code, details, _ in ends} == {("RESOURCE_EXHAUSTED", "no room")}
    assert any(own != "no room" for _, _, own in ends), "gRPC no longer hides it: there is nothing left to note"


async def test_a_good_end_is_a_status_too(channel: grpc.aio.Channel) -> None:
    call: Any = channel.stream_stream("/test/Take")()
    ending = Ending(call)
    await call.done_writing()
    assert (await ending.status()).code() is grpc.StatusCode.OK


async def test_so_is_our_own_cancel(channel: grpc.aio.Channel) -> None:
    call: Any = channel.stream_stream("/test/Stay")()
    ending = Ending(call)
    await call.write(b"open")
    call.cancel()
    assert (await ending.status()).code() is grpc.StatusCode.CANCELLED


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
