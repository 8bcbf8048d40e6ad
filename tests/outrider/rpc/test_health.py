"""The names of the health service over real gRPC, in each state of a server."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.rpc.channel import open_channel, wait_for_health
from outrider.rpc.health import LIVENESS, PROBES, READINESS, STARTUP, HealthState
from outrider.rpc.server import bind, create_server
from tests.outrider.rpc.probe import NAME

READY = ("", READINESS, NAME)


@asynccontextmanager
async def healthy() -> AsyncIterator[tuple[HealthState, grpc.aio.Channel, str]]:
    """The health of a server on a free port, a channel to it, and its address."""
    server = create_server(max_message_bytes=1 << 20)
    health = HealthState(server, [NAME])
    address = bind(server, "127.0.0.1:0")
    await server.start()
    async with open_channel(address) as channel:
        yield health, channel, address
    await server.stop(None)


async def serving(channel: grpc.aio.Channel) -> set[str]:
    """The names that are SERVING now; all others are NOT_SERVING."""
    stub: Any = health_pb2_grpc.HealthStub(channel)  # its stubs have no types
    found = set()
    for name in (*READY, LIVENESS, STARTUP):
        status = (await stub.Check(health_pb2.HealthCheckRequest(service=name))).status
        assert status in (health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING)
        if status == health_pb2.HealthCheckResponse.SERVING:
            found.add(name)
    return found


STATES: dict[str, tuple[list[Callable[[HealthState], Awaitable[None]]], set[str]]] = {
    "new": ([], {LIVENESS}),
    "warm": ([HealthState.warm], {LIVENESS, STARTUP}),
    "serving": ([HealthState.serving], {LIVENESS, STARTUP, *READY}),
    "stuck": ([HealthState.serving, lambda health: health.alive(False)], {STARTUP}),
    "draining, never to serve again": (
        [HealthState.serving, HealthState.drain, HealthState.serving],
        {LIVENESS, STARTUP},
    ),
}


@pytest.mark.parametrize(("changes", "names"), STATES.values(), ids=STATES.keys())
async def test_each_name_follows_the_state(
    changes: list[Callable[[HealthState], Awaitable[None]]], names: set[str]
) -> None:
    async with healthy() as (health, channel, address):
        for change in changes:
            await change(health)
        assert await serving(channel) == names
        assert {probe for probe in PROBES if health.is_serving(probe)} == names & set(PROBES)
        if NAME in names:
            await asyncio.to_thread(wait_for_health, address, NAME, 5)
        else:
            with pytest.raises(TimeoutError, match="is not serving after"):
                await asyncio.to_thread(wait_for_health, address, NAME, 0.1)
