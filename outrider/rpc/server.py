"""A gRPC server: its ports, its interceptors, its keepalive, and how it drains.

`grpc.aio.Server.stop(grace)` does not drain well: it also waits for health watches, which never end by themselves, and
it closes the port at once, so that probes and late callers meet a refused connection. A `DrainGate` counts the calls
instead, and refuses new ones once it is closed.
"""

import asyncio
import errno
import logging
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any
from weakref import WeakKeyDictionary

import grpc
from grpc_health.v1 import health

from outrider.rpc import errors
from outrider.rpc.channel import SOCKET, checked_address
from outrider.rpc.errors import RequestError
from outrider.rpc.health import HealthState
from outrider.rpc.interceptor import Context, Decoder, Handler, Interceptor, wrapped

LARGEST_OPTION = 2**31 - 1
"""The largest value of a gRPC option, an int in C. As a connection's age it is no limit."""

# gRPC accepts calls before their handlers begin, and a server that stops ends those. So the gate counts as idle after
# `_QUIET_CHECKS` checks in a row without a new call. After `_MOST_CHECKS` it does not wait for new calls.
_QUIET_CHECKS, _CHECK_S = 10, 0.01
_MOST_CHECKS = 200


class DrainGate(Interceptor):
    """Counts calls. Open at first."""

    exempt = ("/grpc.health.", "/grpc.reflection.")  # answered while the gate is closed, and not waited for

    def __init__(self) -> None:
        self._open = True
        self._error = errors.draining()  # of calls that come too late, or are cut
        self._arrived = 0
        self._running: list[asyncio.Task[Any] | None] = []
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def running(self) -> int:
        """Calls in progress, without health and reflection."""
        return len(self._running)

    def close(self) -> None:
        """New calls end with UNAVAILABLE, reason DRAINING or as `cut` says. Calls in progress continue."""
        self._open = False

    async def cut(self, seconds: float, error: RequestError | None = None) -> None:
        """Ends the calls in progress with `error`; None: UNAVAILABLE, reason DRAINING. A closed gate then refuses later
        calls with the same error. Returns after `seconds` at most.
        """
        self._error = error or self._error
        for task in self._running:
            if task is not None:
                task.cancel(errors.CUT)
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.wait_idle()

    async def wait_idle(self) -> None:
        """Returns once no call is in progress, and none that gRPC has accepted is yet to reach the gate."""
        quiet, arrived = 0, self._arrived
        for _ in range(_MOST_CHECKS):
            await self._idle.wait()
            if quiet == _QUIET_CHECKS:
                return
            await asyncio.sleep(_CHECK_S)
            quiet = quiet + 1 if arrived == self._arrived else 0
            arrived = self._arrived
        await self._idle.wait()

    def wrap(self, handler: Handler, details: grpc.HandlerCallDetails) -> Handler:
        self._arrived += 1
        return wrapped(handler, self._gated)

    @asynccontextmanager
    async def _gated(self, context: Context) -> AsyncIterator[None]:
        if not self._open:
            await errors.abort(context, self._error)
        task = asyncio.current_task()
        self._running.append(task)
        self._idle.clear()
        try:
            yield
        except asyncio.CancelledError as error:
            if errors.CUT in error.args and not context.done():  # the client is still connected
                await errors.abort(context, self._error)
            raise
        finally:
            self._running.remove(task)
            if not self._running:
                self._idle.set()


_logger = logging.getLogger(__name__)

# Each server's gate, made with it.
_gates: WeakKeyDictionary[grpc.aio.Server, DrainGate] = WeakKeyDictionary()

# Share of the grace time, and seconds at most, to end the calls that are cut.
CLOSING_SHARE, CLOSING_SECONDS = 0.1, 2.0
# Time to end calls that are cut without grace.
CUTTING_SECONDS = 1.0


class StartupError(Exception):
    """The server cannot start. The text is one line."""


def create_server(
    *,
    max_message_bytes: int,
    max_concurrent_streams: int | None = None,
    max_connection_age_s: float | None = None,
    first: Sequence[grpc.aio.ServerInterceptor] = (),
) -> grpc.aio.Server:
    """A server with the options below, not started and without services. Call it inside the event loop.

    Args:
        max_message_bytes: messages above it are refused with RESOURCE_EXHAUSTED.
        max_concurrent_streams: calls above it on one connection wait at the client.
        max_connection_age_s: a connection older than this accepts no new calls, so that its client opens another; gRPC
            varies it by a tenth. Calls on it continue to their end. None: no limit.
        first: the first interceptors: authentication.
    """
    options: list[tuple[str, int]] = [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        # Two servers on one port would share its connections without a warning; the second one must fail.
        ("grpc.so_reuseport", 0),
        # Clients ping every ten seconds, with or without calls; twice as often is allowed.
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        # The server pings too: a client that has vanished must not hold its KV cache for hours.
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.max_pings_without_data", 0),
    ]
    if max_concurrent_streams is not None:
        options.append(("grpc.max_concurrent_streams", max_concurrent_streams))
    if max_connection_age_s is not None:
        options.append(("grpc.max_connection_age_ms", round(min(max_connection_age_s * 1e3, LARGEST_OPTION))))
    gate = DrainGate()
    server = grpc.aio.server(interceptors=[*first, gate, Decoder()], options=options)
    _gates[server] = gate
    return server


def enable_reflection(server: grpc.aio.Server, services: Iterable[str]) -> None:
    """Registers the standard reflection service: grpcurl can then list and call `services`."""
    # Imported here: a client's installation does not have this package.
    from grpc_reflection.v1alpha import reflection

    names = (*services, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)


def bind(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None = None) -> str:
    """Listens at `HOST:PORT`, or at `unix:PATH`, and returns the address with the real port if `PORT` is 0. Without
    `credentials` in plaintext.

    Raises:
        StartupError: the address is malformed, or its port is taken.
    """
    try:
        checked_address(address, least_port=0)
    except ValueError as error:
        raise StartupError(f"cannot listen: {error}") from error
    is_socket = address.startswith(SOCKET)
    if is_socket and _is_answered(address.removeprefix(SOCKET)):
        raise StartupError(f"cannot listen at {address}: another process listens there; choose another path")
    try:
        if not is_socket:
            _check_free(address)
        if credentials is None:
            bound = server.add_insecure_port(address)
        else:
            bound = server.add_secure_port(address, credentials)
    except (OSError, RuntimeError) as error:
        raise StartupError(
            f"cannot listen at {address}: "
            + (
                "no socket can be created there; choose a path of at most 100 bytes in a writable folder"
                if is_socket
                else "the port is taken, or the host is not this machine's; choose another address"
            )
        ) from error
    return address if is_socket else f"{address.rpartition(':')[0]}:{bound}"


def _is_answered(path: str) -> bool:
    """Whether a process listens at a Unix socket. gRPC would replace it without a warning, and the other process would
    remove the new socket when it ends.
    """
    with socket.socket(socket.AF_UNIX) as probe, suppress(OSError):
        probe.settimeout(1.0)
        probe.connect(path)
        return True
    return False


def _check_free(address: str) -> None:
    """Checks that no process listens at an address of `HOST:PORT`. gRPC would listen at the other addresses of the host
    alone, without a warning, and callers could reach that process.

    Raises:
        OSError: one does.
    """
    host, _, port = address.rpartition(":")
    with suppress(socket.gaierror):  # gRPC may know the host all the same: an IPv6 address with a zone
        for family, *_, found in socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM):
            try:
                socket.create_server(found, family=family).close()
            except OSError as error:
                if error.errno == errno.EADDRINUSE:  # any other error: this machine lacks that address
                    raise


async def serve_until_signal(
    server: grpc.aio.Server,
    health: HealthState,
    *,
    grace_s: float,
    on_drain: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Serves until SIGTERM or SIGINT, then drains and returns. A second signal ends the calls in progress at once.

    Call it as soon as the server has started: an earlier signal has Python's default effect. Cancelling it stops the
    server without grace, for a service that fails to load.
    """
    first, second = asyncio.Event(), asyncio.Event()

    def signalled() -> None:
        (second if first.is_set() else first).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled)
    try:
        await first.wait()
        draining = asyncio.ensure_future(_drain(server, health, grace_s, on_drain))
        hurry = asyncio.ensure_future(second.wait())
        await asyncio.wait((draining, hurry), return_when=asyncio.FIRST_COMPLETED)
        for task in (draining, hurry):
            task.cancel()
        await asyncio.gather(draining, hurry, return_exceptions=True)
        if second.is_set():
            await cut_off(server)
    finally:
        # Remaining calls are cancelled, and the port closes.
        await server.stop(None)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


async def cut_off(server: grpc.aio.Server, error: RequestError | None = None) -> None:
    """Ends calls in progress and new calls within `CUTTING_SECONDS`, so that clients continue at another server. For a
    service that can never answer again, or must end at once.

    Args:
        error: of the calls; None: UNAVAILABLE, reason DRAINING.
    """
    gate = _gates[server]
    gate.close()
    await gate.cut(CUTTING_SECONDS, error)


async def _drain(
    server: grpc.aio.Server, health: HealthState, grace_s: float, on_drain: Callable[[], Awaitable[None]] | None
) -> None:
    gate = _gates[server]
    # 1. Health first: clients that check it send no more work, before any is refused.
    await health.drain()
    # 2. Then the gate: new calls get DRAINING and go elsewhere. The port stays open for that and for probes; a closed
    #    port would look like a crash.
    gate.close()
    running = errors.counted(gate.running, "call")
    _logger.info("shutting down: %s in progress may finish within %g s (--grace)", running, grace_s)
    closing_s = min(CLOSING_SHARE * grace_s, CLOSING_SECONDS)
    try:
        async with asyncio.timeout(grace_s - closing_s):
            # 3. Notify the calls in progress; no new call can miss it now.
            if on_drain is not None:
                await on_drain()
            # 4. Wait for them. Health watches end with the server.
            await gate.wait_idle()
    except TimeoutError:
        # 5. The rest get DRAINING: a broken connection would not name the reason.
        left = errors.counted(gate.running, "call")
        _logger.warning("--grace is over: %s in progress ended with UNAVAILABLE; raise it if calls take longer", left)
        await gate.cut(closing_s)
