"""How a call ended is known, whatever was being written to it: a status of the server's is never lost to a write's."""

import asyncio
from typing import Any

import grpc
import pytest

from outrider.rpc.ending import Ending
from outrider.rpc.errors import overloaded, to_status
from outrider.rpc.server import bind, create_server


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
