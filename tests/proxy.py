"""A TCP proxy that misbehaves on demand, and listens in: for tests, and for benchmarks of distance."""

from __future__ import annotations

import asyncio
import contextlib
import random
import select
import selectors
import socket
import struct
import sys
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from types import TracebackType
from typing import Any, Self, TypeVar

Result = TypeVar("Result")

_MAX_BACKLOG_BYTES = 8 << 20  # far more than a connection of ours carries within its delay
_RESET = struct.pack("ii", 1, 0)  # linger for no time at all: the kernel sends RST, and drops what it holds


class Way(StrEnum):
    """A direction."""

    UP = "up"  # from the one who connects to the target
    DOWN = "down"


BOTH = (Way.UP, Way.DOWN)


@dataclass(frozen=True, slots=True)
class Segment:
    """Bytes as they came in at `seconds` of `time.monotonic()`, before any fault; `connection` counts from 0."""

    seconds: float
    way: Way
    connection: int
    data: bytes


@dataclass(slots=True)
class Faults:
    """What is wrong with one direction of all connections.

    Attributes:
        bytes_left: what may still pass before everything is cut; None: any number.
        reset: whether that cut is with RST.
    """

    delay: float = 0.0
    is_stalled: bool = False
    is_garbled: bool = False
    bytes_left: int | None = None
    reset: bool = False


class Proxy:
    """Passes bytes both ways between a port of its own and `target` (HOST:PORT). Any thread may call it.

    A fault holds for all connections, those to come too, from when its method returns until it is taken back. Without
    a `way` it is in both.

    >>> with Proxy("127.0.0.1:9") as proxy:
    ...     proxy.delay(0.025)  # a round trip of 50 ms more
    ...     proxy.stall(Way.DOWN)  # half open: requests pass, answers do not
    ...     proxy.heal()
    """

    def __init__(self, target: str, *, is_open: bool = True, seed: int = 0) -> None:
        """`seed` is of the noise. Unless `is_open`, it listens only after `open`."""
        self._target = target
        self._opens = is_open
        self._noise = random.Random(seed)
        self._faults = {way: Faults() for way in Way}
        self._records: list[list[Segment]] = []
        self._connections: list[_Connection] = []
        self._count = 0
        self._listener: socket.socket | None = None
        self._loop = asyncio.SelectorEventLoop(_selector())
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port: int = probe.getsockname()[1]

    @property
    def address(self) -> str:
        """HOST:PORT where it listens while it is open."""
        return f"127.0.0.1:{self._port}"

    def __enter__(self) -> Self:
        self._thread.start()
        if self._opens:
            self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._run(self._shut())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def open(self) -> None:
        """Listen from now on."""
        self._call(self._listen)

    def refuse(self) -> None:
        """Listen no more: new connections are refused, and the others stay."""
        self._call(self._stop_listening)

    def close(self) -> None:
        """Refuse new connections and cut the others, as a service that has died."""
        self._call(self._stop_listening)
        self.cut()

    def cut(self, *, reset: bool = False) -> None:
        """End every connection at both ends, with FIN or with RST. New ones are taken."""
        self._call(self._cut, reset)

    def cut_after(self, count: int, way: Way, *, reset: bool = False) -> None:
        """End every connection once `count` more bytes have passed this way, on all of them together."""
        self._set(way, bytes_left=count, reset=reset)

    def delay(self, seconds: float, *way: Way) -> None:
        """Delay every byte, in order and at any throughput."""
        self._set(*way, delay=seconds)

    def stall(self, *way: Way) -> None:
        """Keep connections, and let nothing pass, the end of a side neither."""
        self._set(*way, is_stalled=True)

    def flow(self, *way: Way) -> None:
        """Undo `stall`: what was held passes, in order."""
        self._set(*way, is_stalled=False)

    def garble(self, *way: Way) -> None:
        """Let noise pass in place of the bytes, as many."""
        self._set(*way, is_garbled=True)

    def heal(self) -> None:
        """Take every fault back, and listen."""
        self._set(delay=0.0, is_stalled=False, is_garbled=False, bytes_left=None)
        self.open()

    @contextmanager
    def recording(self) -> Iterator[list[Segment]]:
        """Note what comes in at the proxy from either side."""
        record: list[Segment] = []
        self._call(self._records.append, record)
        try:
            yield record
        finally:
            self._call(self._forget, record)

    @property
    def connections(self) -> int:
        """How many are open."""
        return self._call(lambda: sum(each.is_open for each in self._connections))

    # ---------------------------------------------------------------------------------------- in the proxy's thread

    def _set(self, *ways: Way, **faults: float | bool | int | None) -> None:
        def switch() -> None:
            for way in ways or BOTH:
                for name, value in faults.items():
                    setattr(self._faults[way], name, value)
            for connection in list(self._connections):
                for flow in connection.flows:
                    flow.go()

        self._call(switch)

    def _cut(self, reset: bool) -> None:
        connections, self._connections = self._connections, []
        for connection in connections:
            connection.cut(reset)

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._accept(self._listener)  # those who are connected already, as they see it
            self._loop.remove_reader(self._listener)
            self._listener.close()
            self._listener = None

    def _listen(self) -> None:
        if self._listener is None:
            self._listener = socket.create_server(("127.0.0.1", self._port), backlog=1024)
            self._listener.setblocking(False)
            self._loop.add_reader(self._listener, self._accept, self._listener)

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                accepted, _ = listener.accept()
                accepted.setblocking(False)
                number, self._count = self._count, self._count + 1
                up, down = self._flow(number, Way.UP), self._flow(number, Way.DOWN)
                self._connections = [each for each in self._connections if each.is_open]
                self._connections.append(_Connection(accepted, self._target, up, down))

    def _flow(self, connection: int, way: Way) -> _Flow:
        def see(data: bytes) -> None:
            for record in self._records:
                record.append(Segment(self._loop.time(), way, connection, data))

        return _Flow(self._faults[way], see, self._cut, self._noise)

    def _forget(self, record: list[Segment]) -> None:
        self._records = [each for each in self._records if each is not record]

    async def _shut(self) -> None:
        self._stop_listening()
        connections = self._connections
        self._cut(False)
        for connection in connections:
            await connection.ended()

    def _call(self, work: Callable[..., Result], *arguments: Any) -> Result:
        async def run() -> Result:
            return work(*arguments)

        return self._run(run())

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


class _Connection:
    """Two sides, and a flow each way between them."""

    def __init__(self, accepted: socket.socket, target: str, up: _Flow, down: _Flow) -> None:
        self.flows = (up, down)
        self._near, self._far = _Side(says=up, hears=down), _Side(says=down, hears=up)
        self._is_cut = False
        self._making = asyncio.get_running_loop().create_task(self._make(accepted, target))

    @property
    def is_open(self) -> bool:
        return not (self._near.gone.is_set() and self._far.gone.is_set())

    def cut(self, reset: bool) -> None:
        self._is_cut = True
        for side in (self._near, self._far):
            if side.transport is not None:
                _abort(side.transport, reset=reset)

    async def ended(self) -> None:
        """Return when a connection that was cut is gone."""
        await self._making
        for side in (self._near, self._far):
            await side.gone.wait()

    async def _make(self, accepted: socket.socket, target: str) -> None:
        loop = asyncio.get_running_loop()
        await loop.connect_accepted_socket(lambda: self._near, accepted)
        host, _, port = target.rpartition(":")
        try:
            await loop.create_connection(lambda: self._far, host, int(port))
        except OSError:  # nobody is there yet, or any more
            self._far.gone.set()
            self._is_cut = True
        if self._is_cut:
            self.cut(False)


class _Side(asyncio.Protocol):
    """One end: `says` takes what it sends, `hears` brings what it receives."""

    def __init__(self, *, says: _Flow, hears: _Flow) -> None:
        self.transport: asyncio.Transport | None = None
        self.gone = asyncio.Event()
        self._says, self._hears = says, hears

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = self._says.source = self._hears.sink = transport
        self._says.go()
        self._hears.go()

    def data_received(self, data: bytes) -> None:
        self._says.take(data)

    def connection_lost(self, error: Exception | None) -> None:
        self.gone.set()
        self._says.push(_End(reset=error is not None))
        self._hears.lose_sink()

    def pause_writing(self) -> None:
        self._hears.sink_is_full = True

    def resume_writing(self) -> None:
        self._hears.sink_is_full = False
        self._hears.go()


@dataclass(frozen=True, slots=True)
class _End:
    """The end of a side."""

    reset: bool


class _Flow:
    """One direction of one connection. `source` and `sink` are its ends, once they are known."""

    def __init__(
        self, faults: Faults, see: Callable[[bytes], None], cut: Callable[[bool], None], noise: random.Random
    ) -> None:
        """`see` is shown what comes in; `cut` is called, with whether by RST, when the faults' bytes are used up."""
        self.source: asyncio.Transport | None = None
        self.sink: asyncio.Transport | None = None
        self.sink_is_full = False
        self._faults, self._see, self._cut, self._noise = faults, see, cut, noise
        self._loop = asyncio.get_running_loop()
        self._under_way: deque[tuple[float, bytes | _End]] = deque()  # with the time at which each is due
        self._backlog = 0
        self._timer: asyncio.TimerHandle | None = None
        self._has_sink = True

    def take(self, data: bytes) -> None:
        """Take in what the source has sent."""
        self._see(data)
        self._backlog += len(data)
        self.push(data)

    def push(self, piece: bytes | _End) -> None:
        if not self._has_sink:
            return
        due = self._loop.time() + self._faults.delay
        if self._under_way:  # a shorter delay overtakes nothing
            due = max(due, self._under_way[-1][0])
        self._under_way.append((due, piece))
        self.go()

    def lose_sink(self) -> None:
        self._has_sink = False
        self._under_way.clear()
        self._backlog = 0
        self.go()

    def go(self) -> None:
        """Pass on what is due. Called when anything has changed."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._under_way and self.sink is not None and not (self._faults.is_stalled or self.sink_is_full):
            due, piece = self._under_way[0]
            if due > self._loop.time():
                self._timer = self._loop.call_at(due, self.go)
                break
            self._under_way.popleft()
            self._deliver(self.sink, piece)
        # While nothing passes nothing is read, so that the source's own buffers fill.
        if self.source is not None and not self.source.is_closing():
            holds = self._faults.is_stalled or self.sink is None or self._backlog >= _MAX_BACKLOG_BYTES
            if holds == self.source.is_reading():
                self.source.pause_reading() if holds else self.source.resume_reading()

    def _deliver(self, sink: asyncio.Transport, piece: bytes | _End) -> None:
        if isinstance(piece, _End):
            if piece.reset:
                _abort(sink, reset=True)
            else:
                sink.close()
            return
        self._backlog -= len(piece)
        left = self._faults.bytes_left
        if left is not None:
            piece = piece[:left]
            self._faults.bytes_left = left - len(piece)
        sink.write(self._noise.randbytes(len(piece)) if self._faults.is_garbled else piece)
        if self._faults.bytes_left == 0:
            self._faults.bytes_left = None
            self._cut(self._faults.reset)


def _abort(transport: asyncio.Transport, *, reset: bool) -> None:
    """Close an end at once: with FIN, as a process that ends, or with RST, as a machine that has forgotten."""
    connection: socket.socket | None = transport.get_extra_info("socket")
    if connection is not None:
        with contextlib.suppress(OSError):
            if reset:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            else:
                connection.shutdown(socket.SHUT_RDWR)
    transport.abort()


def _selector() -> selectors.BaseSelector:
    """A selector that wakes up on time: epoll alone counts whole milliseconds, and rounds up."""
    return _PreciseEpoll() if sys.platform == "linux" else selectors.DefaultSelector()


if sys.platform == "linux":

    class _PreciseEpoll(selectors.EpollSelector):
        """epoll, which is waited for in microseconds."""

        def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
            if timeout is not None and timeout > 0:
                with contextlib.suppress(InterruptedError):
                    select.select([self.fileno()], [], [], timeout)
                timeout = 0
            return super().select(timeout)


# ------------------------------------------------------------------------------------------------- what can be read off


@dataclass(frozen=True, slots=True)
class DataFrame:
    """An HTTP/2 DATA frame with something in it: the size of its payload, and when its last byte came."""

    seconds: float
    size: int


_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def data_frames(segments: Iterable[Segment], way: Way) -> list[DataFrame]:
    """Return the DATA frames of one direction, of connections that were silent before; TLS records say the same."""
    header, data = 9, 0
    buffers: dict[int, bytes] = defaultdict(bytes)
    frames = []
    for segment in segments:
        if segment.way is not way:
            continue
        buffer = (buffers[segment.connection] + segment.data).removeprefix(_PREFACE)
        while len(buffer) >= header:
            length, kind = int.from_bytes(buffer[:3], "big"), buffer[3]
            if len(buffer) < header + length:
                break
            if kind == data and length:
                frames.append(DataFrame(segment.seconds, length))
            buffer = buffer[header + length :]
        buffers[segment.connection] = buffer
    return frames
