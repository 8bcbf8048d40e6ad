"""Channels of clients: their settings, and one that is replaced when its certificates are.

gRPC reads a channel's certificates once, so calls on the old channel go on to their end. Plaintext needs no flag where
no network is. A host with addresses of both families is one host.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any, Generic, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.rpc.tls import ChannelTLS

_logger = logging.getLogger(__name__)

SOCKET = "unix:"
"""What the address of a socket in the file system begins with; its absolute path follows."""


def is_local(address: str) -> bool:
    """Whether `HOST:PORT` or `unix:PATH` is reached from this machine alone. A name but `localhost` may be anywhere."""
    if address.startswith(SOCKET):
        return True
    host = address.rpartition(":")[0].strip("[]").partition("%")[0]
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_plaintext(address: str, instead: str) -> None:
    """Checks that plaintext stays on this machine; `instead` says what to give where it does not.

    Raises:
        ValueError: it leaves it.
    """
    if not is_local(address):
        raise ValueError(
            f"{address} is not a loopback address, and plaintext can be read on the way there: {instead} where the "
            "network is trusted"
        )


def is_ipv6(address: str) -> bool:
    """Whether `IP:PORT` has an IPv6 address, which stands in brackets."""
    return address.startswith("[")


def of_one_family(addresses: Sequence[str], before: Collection[str] = ()) -> list[str]:
    """Of the addresses `IP:PORT` that a name stands for those of one family, each once and in their order.

    A host that has both would count twice otherwise. The family with more of them is taken, so that hosts that have
    only one are left out as seldom as may be; where there are as many of both, that of `before`, which were taken last;
    and at first that of the first one, since resolvers name first what is best reached (RFC 6724).
    """
    found = list(dict.fromkeys(addresses))
    families = [[each for each in found if is_ipv6(each) is wanted] for wanted in (False, True)]
    if not all(families):
        return found
    kept = next(iter(before), found[0])
    return max(families, key=lambda family: (len(family), is_ipv6(family[0]) is is_ipv6(kept)))


Lookup = Callable[[str, int], Awaitable[list[str]]]
"""Host and port to addresses `IP:PORT`; raises `OSError` where that fails."""


async def look_up(host: str, port: int) -> list[str]:
    """Asks the system's resolver, which asks DNS. Families that this machine has no address of are left out.

    Raises:
        OSError: the name is not known, or DNS does not answer.
    """
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)
    ips = [str(address[0]) for *_, address in found]
    return [f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}" for ip in ips]


class Resolver:
    """What a list of `HOST:PORT` or `unix:PATH` stands for: each DNS name for all its addresses of one family.

    Attributes:
        names: the list.
        may_change: whether some host is a name.
    """

    def __init__(self, names: Collection[str], lookup: Lookup = look_up) -> None:
        self.names = tuple(names)
        self.may_change = not all(map(_is_address, names))
        self._lookup = lookup
        self._last: dict[str, list[str]] = {}

    async def resolve(self) -> dict[str, str]:
        """The addresses, in the order of the names, each with the name it was found by.

        A name that cannot be resolved keeps the addresses it had: that DNS is away says nothing of those behind it.
        """
        found: dict[str, str] = {}
        for name in self.names:
            for address in [name] if _is_address(name) else await self._addresses(name):
                found.setdefault(address, name)
        return found

    async def _addresses(self, name: str) -> list[str]:
        host, _, port = name.rpartition(":")
        before = self._last.get(name, [])
        try:
            self._last[name] = of_one_family(await self._lookup(host.strip("[]"), int(port)), before) or before
        except OSError as error:
            _logger.warning("%s cannot be resolved: %s", name, error)
        return self._last.get(name, [])


def _is_address(name: str) -> bool:
    """Whether `HOST:PORT` or `unix:PATH` stands for itself alone; so does what is neither."""
    host, _, port = name.rpartition(":")
    if name.startswith(SOCKET) or not port.isdigit():
        return True
    try:
        ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return False
    return True


DEFAULT_MAX_MESSAGE_BYTES = 4 * 1024 * 1024

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

    Without `credentials` it speaks plaintext.
    """
    together = channel_options(max_message_bytes=max_message_bytes) + (options or [])
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=together)
    return grpc.aio.secure_channel(address, credentials, options=together)


def wait_for_health(address: str, service: str, timeout_s: float) -> None:
    """Waits, without an event loop, until `service` ("" for the server as a whole) is SERVING.

    Raises:
        TimeoutError: it is not after `timeout_s` seconds; says what the last answer was.
    """
    last, pause_s, end = "no answer", 0.02, time.monotonic() + timeout_s
    with grpc.insecure_channel(
        address, options=channel_options(max_message_bytes=DEFAULT_MAX_MESSAGE_BYTES)
    ) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)  # its stubs forget its methods
        request = health_pb2.HealthCheckRequest(service=service)
        while (left_s := end - time.monotonic()) > 0:
            try:
                status = stub.Check(request, timeout=min(_PROBE_TIMEOUT_S, left_s)).status
            except grpc.RpcError as error:
                last = f"{error.code().name}: {error.details()}"
            else:
                if status == health_pb2.HealthCheckResponse.SERVING:
                    return
                last = health_pb2.HealthCheckResponse.ServingStatus.Name(status)
            time.sleep(min(pause_s, left_s))
            pause_s = min(pause_s * 1.5, 0.25)
    raise TimeoutError(f"{service or 'the server'} at {address} is not serving after {timeout_s:g} s: {last}")


Stub = TypeVar("Stub")
Call = TypeVar("Call", bound=Any)


class RenewedChannel(Generic[Stub]):
    """Opens with the first call. Made and used on one event loop."""

    def __init__(
        self,
        address: str,
        stub: Callable[[grpc.aio.Channel], Stub],
        *,
        max_message_bytes: int,
        options: Sequence[tuple[str, Any]] = (),
        tls: ChannelTLS | None = None,
        name: str = "",
    ) -> None:
        """
        Args:
            address: `HOST:PORT`.
            stub: what makes calls on a channel.
            max_message_bytes: of either direction.
            options: beside those that all our channels have.
            tls: None is plaintext.
            name: `HOST:PORT` that was resolved to the address, where it was: whoever stands in front of the server
                knows it by that name, and so does its certificate, where `tls` expects no other.
        """
        self._address = address
        self._stub = stub
        self._max_message_bytes = max_message_bytes
        self._tls = tls
        expected = (tls.name if tls is not None else None) or name
        # Without it the certificate would have to name the address.
        authority = [("grpc.default_authority", expected)] if expected and expected != address else []
        self._options = [*options, *authority]
        self._current: _Open[Stub] | None = None
        self._open: set[_Open[Stub]] = set()
        self._closing: set[asyncio.Task[None]] = set()

    def begin(self, start: Callable[[Stub], Call]) -> Call:
        """Begins a call, with the certificates of now. Where they have changed since the last one it makes a connection
        of its own; the last one closes with its last call.
        """
        version, credentials = (0, None) if self._tls is None else self._tls.look()
        if self._current is None or self._current.version != version:
            old = self._current
            channel = open_channel(
                self._address,
                max_message_bytes=self._max_message_bytes,
                options=self._options,
                credentials=credentials,
            )
            self._current = _Open(channel, self._stub(channel), version)
            self._open.add(self._current)
            if old is not None and not old.calls:
                self._close(old)
        channel_in_use = self._current
        call = start(channel_in_use.stub)
        channel_in_use.calls += 1
        call.add_done_callback(lambda _: self._ended(channel_in_use))
        return call

    async def close(self) -> None:
        """Ends all that is under way."""
        await asyncio.gather(*(each.channel.close() for each in self._open), *self._closing)
        self._open.clear()

    def _ended(self, channel: _Open[Stub]) -> None:
        channel.calls -= 1
        if not channel.calls and channel is not self._current:
            self._close(channel)

    def _close(self, channel: _Open[Stub]) -> None:
        if channel in self._open:
            self._open.discard(channel)
            task = asyncio.ensure_future(channel.channel.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)


class _Open(Generic[Stub]):
    """One channel, and how many calls are in progress on it."""

    def __init__(self, channel: grpc.aio.Channel, stub: Stub, version: int) -> None:
        self.channel = channel
        self.stub = stub
        self.version = version
        self.calls = 0
