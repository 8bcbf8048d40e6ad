"""A network in memory: calls with the interface of `grpc.aio` on both sides, over links that are slow, stall and break.

Messages of one direction of one call stay in order; any others may overtake each other.
"""

import asyncio
import random
from collections import deque
from collections.abc import Awaitable, Callable, Generator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import Message

EOF = grpc.aio.EOF
KEEPALIVE_SECONDS = 15.0  # until a call ends whose peer vanished silently
Method = Callable[[Any, Any], Awaitable[Any]]


@dataclass(frozen=True)
class Status:
    """How a call ended."""

    code: grpc.StatusCode
    details: str = ""
    trailing: tuple[tuple[str, Any], ...] = ()


LOST = Status(grpc.StatusCode.UNAVAILABLE, "Socket closed")
REFUSED = Status(grpc.StatusCode.UNAVAILABLE, "failed to connect to all addresses")
VANISHED = Status(grpc.StatusCode.UNAVAILABLE, "keepalive watchdog timeout")
CANCELLED = Status(grpc.StatusCode.CANCELLED, "Locally cancelled by application!")
LATE = Status(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")


class Network:
    """Delays of messages, drawn from one generator."""

    def __init__(self, loop: asyncio.AbstractEventLoop, chance: random.Random, *, latency: float, window: int) -> None:
        """`latency` is the mean delay in seconds. A write waits while `window` messages are unread."""
        self.loop = loop
        self.window = window
        self._latency = latency
        self._chance = chance

    def delay(self) -> float:
        return self._latency * self._chance.uniform(0.1, 2.0) * (20.0 if self._chance.random() < 0.02 else 1.0)


class Host:
    """A process that serves methods.

    Attributes:
        methods: by name; other calls are refused.
        calls: in progress.
        cancel_status: of calls that it cancels; None is CANCELLED.
    """

    def __init__(self, name: str, network: Network) -> None:
        self.name = name
        self.methods: Mapping[str, Method] = {}
        self.calls: dict[Call, None] = {}
        self.cancel_status: Status | None = None
        self.network = network
        self._frozen: asyncio.Event | None = None
        self._stalled: deque[Callable[[], object]] = deque()

    def freeze(self) -> None:
        """Stop receiving and running until `thaw`."""
        self._frozen = self._frozen or asyncio.Event()

    def thaw(self) -> None:
        if self._frozen is not None:
            self._frozen.set()
            self._frozen = None
        while self._stalled and self._frozen is None:
            self._stalled.popleft()()

    async def thawed(self) -> None:
        """Wait while it is frozen."""
        while self._frozen is not None:
            await self._frozen.wait()

    def receive(self, action: Callable[[], object]) -> None:
        """Run the action of an arriving message, now or when thawed."""
        if self._frozen is not None:
            self._stalled.append(action)
        else:
            action()

    def die(self, *, silently: bool = False) -> None:
        """End every call. Callers notice soon, or by their keepalive if it vanishes `silently`."""
        self.methods = {}
        self._stalled.clear()
        self.thaw()
        for call in list(self.calls):
            call.serving.cancel()
            call.lose(VANISHED if silently else LOST, KEEPALIVE_SECONDS if silently else self.network.delay())
        self.calls.clear()

    def cut(self) -> None:
        """Break every call; both processes continue."""
        for call in list(self.calls):
            self.network.loop.call_later(self.network.delay(), call.serving.cancel)
            call.lose(LOST, self.network.delay())


class _Direction:
    """One direction of a call. Messages arrive in order, each after its own delay, then the end."""

    def __init__(self, network: Network, host: Host | None) -> None:
        """`host` is the receiver if it can freeze."""
        self._network = network
        self._host = host
        self._sent: deque[Any] = deque()
        self._arrived: deque[Any] = deque()
        self._last = 0.0
        self._changed = asyncio.Event()
        self.end: Status | None = None  # after all arrived messages
        self.on_status: Callable[[Status], None] = lambda _: None  # called when the end arrives
        self.at_end: Callable[[Status], None] = lambda _: None  # called once all messages before it are read

    def send(self, item: Any) -> None:
        self._sent.append(item)
        self._last = max(self._last, self._network.loop.time() + self._network.delay())
        receive = self._arrive if self._host is None else partial(self._host.receive, self._arrive)
        self._network.loop.call_at(self._last, receive)

    def _arrive(self) -> None:
        if self._sent:
            item = self._sent.popleft()
            if isinstance(item, Status):
                self.end = item
                self.on_status(item)
            else:
                self._arrived.append(item)
            self._wake()

    def close(self, status: Status) -> None:
        """End it now, and drop all messages that are not read."""
        self._sent.clear()
        self._arrived.clear()
        self.end = status
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        if self.end is not None and not self._arrived:
            self.at_end(self.end)

    async def wait_for_window(self) -> None:
        """Wait while too many messages are unread."""
        while self.end is None and len(self._sent) + len(self._arrived) >= self._network.window:
            await self._changed.wait()

    async def next(self) -> Any:
        """The next message, or the status at the end."""
        while not self._arrived and self.end is None:
            await self._changed.wait()
        if not self._arrived:
            return self.end
        item = self._arrived.popleft()
        self._wake()
        return item


class Call:
    """A call at its client: `grpc.aio.StreamStreamCall`, or the awaitable of a unary method.

    Attributes:
        serving: the server's task.
    """

    def __init__(
        self, network: Network, host: Host, method: str, request: Message | None = None, *, timeout: float | None = None
    ) -> None:
        """`request` is for methods with a single request."""
        self._network = network
        self._host = host
        self._status: Status | None = None
        self._ended = asyncio.Event()
        self._callbacks: list[Callable[[Call], None]] = []
        self._half_closed = False
        self.up = _Direction(network, host)
        self.down = _Direction(network, None)
        self.down.on_status, self.down.at_end = self.up.close, self._end
        loop = network.loop
        self.deadline = None if timeout is None else loop.time() + timeout
        self.serving: asyncio.Future[Any] = loop.create_future()
        self._timer = None if timeout is None else loop.call_later(max(0.0, timeout), self._end, LATE)
        host.calls[self] = None
        loop.call_later(network.delay(), host.receive, partial(self._reach, method, _copy(request)))

    def _reach(self, method: str, request: Message | None) -> None:
        served = self._host.methods.get(method)
        if served is None or self._status is not None:
            self._host.calls.pop(self, None)
            self.lose(REFUSED, self._network.delay())
            return
        self.serving = asyncio.ensure_future(Context(self._network, self._host, self).serve(served, request))
        self.serving.add_done_callback(lambda _: self._host.calls.pop(self, None))

    def lose(self, status: Status, seconds: float) -> None:
        """End the call at the client in so many seconds."""
        self._network.loop.call_later(seconds, self._end, status)

    def _end(self, status: Status) -> None:
        """End the call at the client, and a delay later at the server."""
        if self._status is not None:
            return
        self._status = status
        if self._timer is not None:
            self._timer.cancel()
        if status is not self.down.end:
            self.down.close(status)
        self.up.close(status)
        self._ended.set()
        for callback in self._callbacks:
            callback(self)
        self._network.loop.call_later(self._network.delay(), self._host.receive, lambda: self.serving.cancel())

    async def write(self, message: Message) -> None:
        if self._status is not None or self._half_closed:
            raise asyncio.InvalidStateError("RPC already finished.")
        self.up.send(_copy(message))
        try:
            await self.up.wait_for_window()
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.cancel()
            raise
        self._raise_for_status()

    async def done_writing(self) -> None:
        if self._status is None and not self._half_closed:
            self._half_closed = True
            self.up.send(EOF)

    async def read(self) -> Any:
        self._raise_for_status()
        try:
            item = await self.down.next()
        except asyncio.CancelledError:
            self.cancel()
            raise
        if not isinstance(item, Status):
            return item
        self._raise_for_status()
        return EOF

    def _raise_for_status(self) -> None:
        if self._status is CANCELLED:
            raise asyncio.CancelledError
        if self._status is not None and self._status.code is not grpc.StatusCode.OK:
            trailing = grpc.aio.Metadata(*self._status.trailing)
            raise grpc.aio.AioRpcError(self._status.code, grpc.aio.Metadata(), trailing, details=self._status.details)

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._only_response().__await__()

    async def _only_response(self) -> Any:
        response = await self.read()
        self._end(Status(grpc.StatusCode.OK))
        return response

    def cancel(self) -> bool:
        was_over = self._status is not None
        self._end(CANCELLED)
        return not was_over

    def done(self) -> bool:
        return self._status is not None

    def add_done_callback(self, callback: "Callable[[Call], None]") -> None:
        if self._status is not None:
            callback(self)
        else:
            self._callbacks.append(callback)

    async def _final(self) -> Status:
        await self._ended.wait()
        assert self._status is not None
        return self._status

    async def code(self) -> grpc.StatusCode:
        return (await self._final()).code

    async def details(self) -> str:
        return (await self._final()).details

    async def trailing_metadata(self) -> grpc.aio.Metadata:
        return grpc.aio.Metadata(*(await self._final()).trailing)


class Context:
    """The call at its servicer: `grpc.aio.ServicerContext`."""

    def __init__(self, network: Network, host: Host, call: Call) -> None:
        self._network = network
        self._host = host
        self._call = call
        self._status: Status | None = None

    async def serve(self, method: Method, request: Message | None) -> None:
        """Run the servicer's method, and send its status."""
        status = Status(grpc.StatusCode.OK)
        try:
            response = await method(request, self)
            if response is not None:
                self._call.down.send(_copy(response))
        except grpc.aio.AbortError:
            assert self._status is not None
            status = self._status
        except asyncio.CancelledError:
            status = self._host.cancel_status or Status(grpc.StatusCode.CANCELLED, "cancelled by the server")
            raise
        except Exception as error:
            status = Status(grpc.StatusCode.UNKNOWN, f"{type(error).__name__}: {error}")
        finally:
            if not self._call.done():
                self._call.down.send(status)
            self._status = status

    async def read(self) -> Any:
        item = await self._call.up.next()
        await self._host.thawed()
        if isinstance(item, Status):
            raise asyncio.CancelledError  # its task is about to be cancelled
        return item

    async def write(self, message: Message) -> None:
        await self._host.thawed()
        if self.done():
            raise asyncio.InvalidStateError("the call is over")
        self._call.down.send(_copy(message))
        await self._call.down.wait_for_window()
        await asyncio.sleep(0)

    async def abort_with_status(self, status: grpc.Status) -> None:
        await asyncio.sleep(0)
        if self.done():
            raise grpc.aio.InternalError("the call is over")
        self._status = Status(status.code, status.details, tuple(status.trailing_metadata))
        raise grpc.aio.AbortError("aborted")

    def time_remaining(self) -> float | None:
        deadline = self._call.deadline
        return None if deadline is None else max(0.0, deadline - self._network.loop.time())

    def invocation_metadata(self) -> tuple[Any, ...]:
        return ()

    def done(self) -> bool:
        return self._call.done() or self._status is not None


def _copy(message: Any) -> Any:
    """Copy, so that changes on one side do not reach the other."""
    return type(message).FromString(message.SerializeToString()) if isinstance(message, Message) else message
