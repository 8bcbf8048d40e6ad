"""Channels of clients: options, name resolution, and a channel that is replaced when its certificates change.

gRPC reads the certificates of a channel once; calls on the old channel continue to their end.
"""

import asyncio
import ipaddress
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.rpc.auth import OwnToken
from outrider.rpc.tls import ChannelTLS

_logger = logging.getLogger(__name__)

Metadata = tuple[tuple[str, str], ...]

SOCKET = "unix:"
"""Prefix of the address of a Unix socket; its absolute path follows."""


def checked_host_and_port(address: str, least_port: int = 1) -> str:
    """The address, which is `HOST:PORT`. `least_port` is 0 for listeners: they then take a free port.

    Raises:
        ValueError: it is not. gRPC would take a port that is too large modulo 65,536.
    """
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()):
        raise ValueError(f"{address!r} is not HOST:PORT, for example 127.0.0.1:50051")
    if not least_port <= int(port) <= 65_535:
        raise ValueError(f"the port of {address!r} is {port}; it must be {least_port} to 65535")
    return address


def checked_address(address: str, least_port: int = 1) -> str:
    """As `checked_host_and_port`; it may also be `unix:PATH`."""
    if not address.startswith(SOCKET):
        return checked_host_and_port(address, least_port)
    if not address.startswith(f"{SOCKET}/"):
        raise ValueError(f"{address!r} is not unix:PATH with an absolute path, for example unix:/run/outrider.sock")
    return address


def ip_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The IP address of a host without brackets, which may have a zone; None: it is a name."""
    try:
        return ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None


def is_local(address: str) -> bool:
    """Whether `HOST:PORT` or `unix:PATH` is on this machine. Of names only `localhost` is."""
    host = address.rpartition(":")[0].strip("[]")
    ip = ip_address(host)
    return address.startswith(SOCKET) or host == "localhost" or (ip is not None and ip.is_loopback)


def check_plaintext(address: str, instead: str) -> None:
    """Checks that plaintext stays on this machine. `instead` is the advice in the message.

    Raises:
        ValueError: the address is not on this machine.
    """
    if not is_local(address):
        raise ValueError(
            f"{address} is not a loopback address, and plaintext can be read on the network: {instead} if the "
            "network is trusted"
        )


def is_ipv6(address: str) -> bool:
    """Whether `IP:PORT` has an IPv6 address, which is in brackets."""
    return address.startswith("[")


def of_one_family(addresses: Sequence[str], before: Collection[str] = ()) -> list[str]:
    """The addresses `IP:PORT` of one family, without duplicates, in their order: a host with both would count twice.

    The family with more addresses is chosen, so that few hosts with only one family are left out. A tie goes to the
    family of `before`, the last choice; at first to that of the first address, which resolvers prefer (RFC 6724).
    """
    found = list(dict.fromkeys(addresses))
    families = [[each for each in found if is_ipv6(each) is wanted] for wanted in (False, True)]
    if not all(families):
        return found
    kept = next(iter(before), found[0])
    return max(families, key=lambda family: (len(family), is_ipv6(family[0]) is is_ipv6(kept)))


Lookup = Callable[[str, int], Awaitable[list[str]]]
"""Host and port to addresses `IP:PORT`; raises `OSError` on failure."""


async def look_up(host: str, port: int) -> list[str]:
    """Resolves a name by the system's resolver, without families that this machine has no address of.

    Raises:
        OSError: the name does not exist, or DNS does not answer.
    """
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)
    ips = [str(address[0]) for *_, address in found]
    return [f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}" for ip in ips]


class Resolver:
    """Resolves a list of `HOST:PORT` or `unix:PATH`: each DNS name to all its addresses of one family.

    Attributes:
        may_change: whether a host is a DNS name.
    """

    def __init__(self, names: Collection[str], lookup: Lookup = look_up) -> None:
        self.names = tuple(names)
        self.may_change = not all(map(_is_address, names))
        self._lookup = lookup
        self._last: dict[str, list[str]] = {}

    async def resolve(self) -> dict[str, str]:
        """The addresses, in the order of the names, each with its name.

        A name that cannot be resolved keeps its last addresses: a failure of DNS is not a failure of the hosts.
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
        except (OSError, UnicodeError) as error:  # UnicodeError: a label of more than 63 characters
            _logger.warning("cannot resolve %s; its last addresses stay in use: %s", name, error)
        return self._last.get(name, [])


def _is_address(name: str) -> bool:
    """Whether it needs no resolution: an IP address or a Unix socket."""
    return name.startswith(SOCKET) or ip_address(name.rpartition(":")[0].strip("[]")) is not None


DEFAULT_MAX_MESSAGE_BYTES = 4 * 1024 * 1024

# Timeout of one probe.
_PROBE_TIMEOUT_S = 2.0
# Backoff after a refused connection: a service that starts is up within seconds.
_RECONNECT_MS = 200
_RECONNECT_MAX_MS = 2_000
# Timeout of connecting: four round trips with TLS, at a peer that may be busy.
_CONNECT_MS = 2_000

Options = list[tuple[str, Any]]


def channel_options(*, max_message_bytes: int) -> Options:
    """The options of every channel."""
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        # A peer that has vanished is noticed within fifteen seconds, also without calls. Servers allow a ping every
        # five.
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", _RECONNECT_MS),
        ("grpc.min_reconnect_backoff_ms", _CONNECT_MS),  # the timeout of connecting, in gRPC's core
        ("grpc.max_reconnect_backoff_ms", _RECONNECT_MAX_MS),
    ]


def open_channel(
    address: str,
    *,
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
    options: Options | None = None,
    credentials: grpc.ChannelCredentials | None = None,
) -> grpc.aio.Channel:
    """A channel to `HOST:PORT`, which connects with the first call. `options` are added to `channel_options`. Without
    `credentials` in plaintext.
    """
    together = channel_options(max_message_bytes=max_message_bytes) + (options or [])
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=together)
    return grpc.aio.secure_channel(address, credentials, options=together)


def wait_for_health(address: str, service: str, timeout_s: float) -> None:
    """Waits, without an event loop, until `service` ("" for the server as a whole) is SERVING.

    Raises:
        TimeoutError: it is not after `timeout_s` seconds; with the last answer.
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
    """A channel that opens with the first call and is replaced when its certificates change. For one event loop."""

    def __init__(
        self,
        address: str,
        stub: Callable[[grpc.aio.Channel], Stub],
        *,
        max_message_bytes: int,
        options: Sequence[tuple[str, Any]] = (),
        tls: ChannelTLS | None = None,
        token: OwnToken | None = None,
        name: str = "",
    ) -> None:
        """
        Args:
            max_message_bytes: limit in both directions.
            options: added to `channel_options`.
            tls: None is plaintext.
            token: in the metadata that `begin` passes on.
            name: `HOST:PORT` that resolved to the address, if any: proxies and the server's certificate use that name,
                unless `tls` has another.
        """
        self._address = address
        self._stub = stub
        self._max_message_bytes = max_message_bytes
        self._tls = tls
        self._token = token
        expected = (tls.name if tls is not None else None) or name
        # Without it the certificate must have the IP address.
        authority = [("grpc.default_authority", expected)] if expected and expected != address else []
        self._options = [*options, *authority]
        self._current: _Open[Stub] | None = None
        self._open: set[_Open[Stub]] = set()
        self._closing: set[asyncio.Task[None]] = set()

    def begin(self, start: Callable[[Stub, Metadata], Call]) -> Call:
        """Begins a call with the current certificates and token: `start` gets the token as metadata. If certificates
        have changed, it opens a new connection; the old one closes after its last call.
        """
        metadata = () if self._token is None else self._token.metadata()
        version, credentials = (0, None) if self._tls is None else self._tls.look()
        if self._current is None or self._current.version != version:
            old = self._current
            channel = open_channel(
                self._address, max_message_bytes=self._max_message_bytes, options=self._options, credentials=credentials
            )
            self._current = _Open(channel, self._stub(channel), version)
            self._open.add(self._current)
            if old is not None and not old.calls:
                self._close(old)
        channel_in_use = self._current
        call = start(channel_in_use.stub, metadata)
        channel_in_use.calls += 1
        call.add_done_callback(lambda _: self._ended(channel_in_use))
        return call

    @property
    def is_idle(self) -> bool:
        return not any(each.calls for each in self._open)

    async def close(self) -> None:
        """Closes the channels; calls in progress are cancelled."""
        await asyncio.gather(*(each.channel.close() for each in self._open), *self._closing)
        self._open.clear()

    def _ended(self, channel: "_Open[Stub]") -> None:
        channel.calls -= 1
        if not channel.calls and channel is not self._current:
            self._close(channel)

    def _close(self, channel: "_Open[Stub]") -> None:
        if channel in self._open:
            self._open.discard(channel)
            task = asyncio.ensure_future(channel.channel.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)


@dataclass(eq=False)
class _Open(Generic[Stub]):
    """One channel, and its number of calls in progress."""

    channel: grpc.aio.Channel
    stub: Stub
    version: int
    calls: int = 0
