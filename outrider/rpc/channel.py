"""Channels to a service, and waiting until it serves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

DEFAULT_MAX_MESSAGE_BYTES = 4 * 1024 * 1024

_SERVING = health_pb2.HealthCheckResponse.SERVING
# One probe answers within this, or the next one asks again.
_PROBE_TIMEOUT_S = 2.0
# An address that refuses is tried again this soon: a service that starts is seldom more than seconds away.
_RECONNECT_MS = 200
_RECONNECT_MAX_MS = 2_000
# What connecting may take at least before it counts as failed: four round trips with TLS, at a peer that may be busy.
_CONNECT_MS = 2_000

Options = list[tuple[str, Any]]


def channel_options(*, max_message_bytes: int) -> Options:
    """Options that every channel of ours has."""
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        # A peer that died without a word is noticed within fifteen seconds, also while nothing is said. Our servers
        # allow a ping every five.
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", _RECONNECT_MS),
        ("grpc.min_reconnect_backoff_ms", _CONNECT_MS),  # which is what it means in gRPC's core
        ("grpc.max_reconnect_backoff_ms", _RECONNECT_MAX_MS),
    ]


def open_channel(
    address: str,
    *,
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
    options: Options | None = None,
    credentials: grpc.ChannelCredentials | None = None,
) -> grpc.aio.Channel:
    """A channel to `HOST:PORT`. It connects with the first call. `options` come on top of ours.

    Without `credentials` it speaks plaintext: who opens it knows that this is meant.
    """
    together = channel_options(max_message_bytes=max_message_bytes) + (options or [])
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=together)
    return grpc.aio.secure_channel(address, credentials, options=together)


async def wait_for_health(channel: grpc.aio.Channel | str, service: str, timeout_s: float) -> None:
    """Waits until `service` ("" for the server as a whole) is SERVING. An address gets a channel of its own.

    Raises:
        TimeoutError: it is not after `timeout_s` seconds; says what the last answer was.
    """
    if isinstance(channel, str):
        async with open_channel(channel) as own:
            return await wait_for_health(own, service, timeout_s)
    stub: Any = health_pb2_grpc.HealthStub(channel)  # its stubs forget its methods
    request = health_pb2.HealthCheckRequest(service=service)
    for pause_s, probe in (probes := _Probes(service, timeout_s)):
        try:
            status = (await stub.Check(request, timeout=probe)).status
        except grpc.aio.AioRpcError as error:
            probes.last = _describe(error)
        else:
            if status == _SERVING:
                return
            probes.last = health_pb2.HealthCheckResponse.ServingStatus.Name(status)
        await asyncio.sleep(pause_s)
    raise probes.timed_out()


def wait_for_health_blocking(address: str, service: str, timeout_s: float) -> None:
    """`wait_for_health` for callers without an event loop.

    Raises:
        TimeoutError: it is not SERVING after `timeout_s` seconds; says what the last answer was.
    """
    with grpc.insecure_channel(
        address, options=channel_options(max_message_bytes=DEFAULT_MAX_MESSAGE_BYTES)
    ) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service=service)
        for pause_s, probe in (probes := _Probes(service, timeout_s, address)):
            try:
                status = stub.Check(request, timeout=probe).status
            except grpc.RpcError as error:
                probes.last = _describe(error)
            else:
                if status == _SERVING:
                    return
                probes.last = health_pb2.HealthCheckResponse.ServingStatus.Name(status)
            time.sleep(pause_s)
    raise probes.timed_out()


class _Probes:
    """When to ask, and what was answered. Yields (seconds to wait after a probe, seconds it may take)."""

    def __init__(self, service: str, timeout_s: float, address: str = ""):
        self.last = "no answer"
        self._what = " at ".join(part for part in (service or "the server", address) if part)
        self._timeout_s = timeout_s
        self._end = time.monotonic() + timeout_s

    def __iter__(self) -> Iterator[tuple[float, float]]:
        pause_s = 0.02
        while (left_s := self._end - time.monotonic()) > 0:
            yield min(pause_s, left_s), min(_PROBE_TIMEOUT_S, left_s)
            pause_s = min(pause_s * 1.5, 0.25)

    def timed_out(self) -> TimeoutError:
        return TimeoutError(f"{self._what} is not serving after {self._timeout_s:g} s: {self.last}")


def _describe(error: grpc.RpcError) -> str:
    return f"{error.code().name}: {error.details()}"
