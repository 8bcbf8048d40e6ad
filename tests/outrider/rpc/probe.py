"""A service of raw bytes on a real server, for tests of statuses, drains and cancels. Also a process: see `main`."""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from outrider.rpc import errors
from outrider.rpc.health import HealthState
from outrider.rpc.server import bind, create_server, enable_reflection, serve_until_signal

NAME = "probe.v1.Probe"

BAD = b"\xff"

Fault = Callable[[], Exception]


class Probe:
    """Echoes, or raises the exception of `fault`. A request that begins with `BAD` cannot be decoded."""

    def __init__(self, fault: Fault | None = None) -> None:
        self.fault = fault
        self.started = self.decoded = 0

    def _maybe_fail(self) -> None:
        if self.fault is not None:
            raise self.fault()

    def _decode(self, raw: bytes) -> bytes:
        self.decoded += 1
        if raw.startswith(BAD):
            raise DecodeError("Error parsing message")
        return raw

    @errors.guarded
    async def Once(self, request: bytes, context: Any) -> bytes:
        self.started += 1
        self._maybe_fail()
        return request

    @errors.guarded
    async def Many(self, request: bytes, context: Any) -> None:
        """Two responses, the second after as many seconds as the request names."""
        self.started += 1
        await errors.write(context, b"first")
        self._maybe_fail()
        await asyncio.sleep(float(request))
        await errors.write(context, b"last")

    @errors.guarded
    async def Both(self, requests: AsyncIterator[bytes], context: Any) -> None:
        async for request in requests:
            self._maybe_fail()
            await errors.write(context, request)

    def register(self, server: grpc.aio.Server) -> None:
        handlers: dict[str, Any] = {
            "Once": grpc.unary_unary_rpc_method_handler(self.Once, self._decode),
            "Many": grpc.unary_stream_rpc_method_handler(self.Many, self._decode),
            "Both": grpc.stream_stream_rpc_method_handler(self.Both, self._decode),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(NAME, handlers),))


@asynccontextmanager
async def serving(
    probe: Probe,
    *,
    credentials: grpc.ServerCredentials | None = None,
    address: str = "127.0.0.1:0",
    max_message_bytes: int = 1 << 20,
    **options: Any,
) -> AsyncIterator[str]:
    """The probe with health and reflection, on a server with these options; its address."""
    server = create_server(max_message_bytes=max_message_bytes, **options)
    probe.register(server)
    await HealthState(server, [NAME]).serving()
    enable_reflection(server, [NAME])
    bound = bind(server, address, credentials)
    await server.start()
    try:
        yield bound
    finally:
        await server.stop(None)


def once(channel: Any) -> Any:
    return channel.unary_unary(f"/{NAME}/Once")


def many(channel: Any) -> Any:
    return channel.unary_stream(f"/{NAME}/Many")


def both(channel: Any) -> Any:
    return channel.stream_stream(f"/{NAME}/Both")


async def main(grace_s: float) -> None:
    """Serve until a signal, and print each state."""

    async def on_drain() -> None:
        print("draining", flush=True)

    server = create_server(max_message_bytes=1 << 20)
    Probe().register(server)
    health = HealthState(server, [NAME])
    enable_reflection(server, [NAME])
    print(bind(server, "127.0.0.1:0"), flush=True)
    await server.start()
    await health.serving()
    await serve_until_signal(server, health, grace_s=grace_s, on_drain=on_drain)
    print("stopped", flush=True)


if __name__ == "__main__":
    asyncio.run(main(float(sys.argv[1])))
