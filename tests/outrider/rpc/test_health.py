"""What each name of the health service means, asked over real gRPC."""

import asyncio
from collections.abc import AsyncIterator
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
    stub: Any = health_pb2_grpc.HealthStub(channel)  # its stubs forget its methods
    found = set()
    for name in (*READY, LIVENESS, STARTUP):
        status = (await stub.Check(health_pb2.HealthCheckRequest(service=name))).status
        assert status in (health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING)
        if status == health_pb2.HealthCheckResponse.SERVING:
            found.add(name)
    return found


async def test_each_name_has_its_meaning() -> None:
    async with healthy() as (health, channel, address):
        assert await serving(channel) == {LIVENESS}, "from birth"
        with pytest.raises(TimeoutError, match="NOT_SERVING"):
            await asyncio.to_thread(wait_for_health, address, NAME, 0.2)
        await health.warm()
        assert await serving(channel) == {LIVENESS, STARTUP}, "warm, and a verifier is missing, say"
        await health.serving()
        assert await serving(channel) == {LIVENESS, STARTUP, *READY}
        await asyncio.to_thread(wait_for_health, address, NAME, 5)
        await health.not_serving()
        assert await serving(channel) == {LIVENESS, STARTUP}


async def test_who_is_stuck_is_neither_alive_nor_ready_until_it_goes_on() -> None:
    async with healthy() as (health, channel, _):
        await health.serving()
        await health.alive(False)
        assert await serving(channel) == {STARTUP}
        await health.alive(True)
        assert await serving(channel) == {LIVENESS, STARTUP, *READY}


async def test_who_drains_is_alive_and_never_ready_again() -> None:
    async with healthy() as (health, channel, _):
        await health.serving()
        await health.drain()
        assert await serving(channel) == {LIVENESS, STARTUP}
        await health.serving()
        assert await serving(channel) == {LIVENESS, STARTUP}
        assert [health.says(probe) for probe in PROBES] == [False, True, True]


async def test_a_service_that_serves_has_started() -> None:
    async with healthy() as (health, channel, _):
        await health.serving()
        assert STARTUP in await serving(channel)


async def test_another_server_says_the_same() -> None:
    """As a port for probes does, beside the one for requests."""
    async with healthy() as (health, channel, _):
        beside = create_server(max_message_bytes=1 << 20)
        health.register(beside)
        address = bind(beside, "127.0.0.1:0")
        await beside.start()
        async with open_channel(address) as other:
            for change in (health.warm, health.serving, health.drain):
                await change()
                assert await serving(other) == await serving(channel)
        await beside.stop(None)
