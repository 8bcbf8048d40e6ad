"""A TCP proxy that misbehaves on demand, and listens in: for tests, and for benchmarks of distance."""

import asyncio
import random
import selectors
import socket
import struct
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, Self, TypeVar

Result = TypeVar("Result")
Pieces = asyncio.Queue[tuple[float, bytes | None]]
"""When each is due, and its bytes; none at the end of a side, and None at its end by RST."""

_PIECE_BYTES = 1 << 16
_MAX_PIECES = 128  # on their way in one direction of one connection; while there are so many, nothing is read
_RESET = struct.pack("ii", 1, 0)  # linger for no time at all: the kernel sends RST, and drops its buffers


class Way(StrEnum):
    """A direction."""

    UP = "up"  # from the client to the target
    DOWN = "down"


BOTH = (Way.UP, Way.DOWN)


@dataclass(frozen=True, slots=True)
class Segment:
    """Bytes as they came in, before any fault; `connection` counts from 0."""

    way: Way
    connection: int
    data: bytes


@dataclass(slots=True)
class Faults:
    """The faults in one direction of all connections.

    Attributes:
        flowing: cleared while nothing passes.
        bytes_left: how many bytes may still pass before the fault that `then` names; None: any number.
        then: ends all connections, without or with an end of listening, or lets nothing more pass this way.
    """

    delay: float = 0.0
    flowing: asyncio.Event = field(default_factory=asyncio.Event)
    is_garbled: bool = False
    bytes_left: int | None = None
    then: Literal["cut", "close", "stall"] = "cut"


class Proxy:
    """Passes bytes both ways between a port of its own and `target` (HOST:PORT). Any thread may call it.

    A fault holds for all connections, later ones too, from when its method returns until it is undone. Without a `way`
    it is in both directions.

    >>> with Proxy("127.0.0.1:9") as proxy:
    ...     proxy.delay(0.025)  # a round trip of 50 ms more
    ...     proxy.stall(Way.DOWN)  # half open: requests pass, responses do not
    ...     proxy.heal()
    """

    def __init__(self, target: str, *, is_open: bool = True, seed: int = 0) -> None:
        """`seed` is of the noise. Unless `is_open`, it listens only after `open`."""
        host, _, port = target.rpartition(":")
        self._target = host, int(port)
        self._opens = is_open
        self._noise = random.Random(seed)
        self._faults = {way: Faults() for way in Way}
        self._records: list[list[Segment]] = []
        self._connections: dict[asyncio.Task[None], tuple[socket.socket, socket.socket]] = {}
        self._count = 0
        self._listener: socket.socket | None = None
        # `select` waits for microseconds; epoll rounds up to whole milliseconds.
        self._loop = asyncio.SelectorEventLoop(selectors.SelectSelector())
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port: int = probe.getsockname()[1]

    @property
    def address(self) -> str:
        """HOST:PORT where it listens while it is open."""
        return f"127.0.0.1:{self._port}"

    @property
    def is_open(self) -> bool:
        return self._listener is not None

    def __enter__(self) -> Self:
        self._thread.start()
        self.flow()
        if self._opens:
            self.open()
        return self

    def __exit__(self, *error: object) -> None:
        asyncio.run_coroutine_threadsafe(self._shut(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def open(self) -> None:
        """Listen from now on."""
        self._call(self._listen)

    def refuse(self) -> None:
        """Stop listening: new connections are refused, and the others stay."""
        self._call(self._stop_listening)

    def close(self) -> None:
        """Refuse new connections and cut the others, as a service that has died."""
        self.refuse()
        self.cut()

    def cut(self, *, reset: bool = False) -> None:
        """End every connection at both ends, with FIN or with RST. New ones are accepted."""
        self._call(self._cut, reset)

    def cut_after(self, count: int, way: Way) -> None:
        """End every connection once `count` more bytes have passed this way, on all of them together."""
        self._set(way, bytes_left=count, then="cut")

    def close_after(self, count: int, way: Way) -> None:
        """As `cut_after`, and refuse new connections from then on."""
        self._set(way, bytes_left=count, then="close")

    def stall_after(self, count: int, way: Way) -> None:
        """Let nothing pass this way once `count` more bytes have, on all connections together."""
        self._set(way, bytes_left=count, then="stall")

    def delay(self, seconds: float, *way: Way) -> None:
        """Delay every byte, in order and at any throughput."""
        self._set(*way, delay=seconds)

    def stall(self, *way: Way) -> None:
        """Keep connections, and let nothing pass, not even the end of a side."""
        self._call(self._switch, way or BOTH, False)

    def flow(self, *way: Way) -> None:
        """Undo `stall`: all that was held passes, in order."""
        self._call(self._switch, way or BOTH, True)

    def garble(self, *way: Way) -> None:
        """Replace the bytes by as much noise."""
        self._set(*way, is_garbled=True)

    def heal(self) -> None:
        """Undo every fault, and listen."""
        self._set(delay=0.0, is_garbled=False, bytes_left=None)
        self.flow()
        self.open()

    @contextmanager
    def recording(self) -> Iterator[list[Segment]]:
        """Record the bytes that come in at the proxy from either side."""
        record: list[Segment] = []
        self._call(self._records.append, record)
        try:
            yield record
        finally:
            self._call(self._records.remove, record)

    # ---------------------------------------------------------------------------------------- in the proxy's thread

    def _call(self, work: Callable[..., Result], *arguments: Any) -> Result:
        async def run() -> Result:
            return work(*arguments)

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result()

    def _set(self, *ways: Way, **faults: float | bool | int | str | None) -> None:
        def switch() -> None:
            for way in ways or BOTH:
                for name, value in faults.items():
                    setattr(self._faults[way], name, value)

        self._call(switch)

    def _switch(self, ways: Iterable[Way], flows: bool) -> None:
        for way in ways:
            event = self._faults[way].flowing
            event.set() if flows else event.clear()

    def _listen(self) -> None:
        if self._listener is None:
            self._listener = socket.create_server(("127.0.0.1", self._port), backlog=1024)
            self._listener.setblocking(False)
            self._loop.add_reader(self._listener, self._accept, self._listener)

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._accept(self._listener)  # their clients see them as connected already
            self._loop.remove_reader(self._listener)
            self._listener.close()
            self._listener = None

    def _accept(self, listener: socket.socket) -> None:
        with suppress(BlockingIOError):
            while True:
                near, _ = listener.accept()
                far = socket.socket()
                task = self._loop.create_task(self._connect(self._count, near, far))
                self._connections[task] = near, far
                task.add_done_callback(self._ended)
                self._count += 1

    def _ended(self, task: asyncio.Task[None]) -> None:
        for side in self._connections.pop(task):
            side.close()

    def _cut(self, reset: bool) -> None:
        for task, sides in self._connections.items():
            for side in sides:
                with suppress(OSError):  # it is not connected yet, or no longer
                    if reset:
                        side.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                    else:
                        side.shutdown(socket.SHUT_RDWR)
            task.cancel()

    async def _shut(self) -> None:
        self._stop_listening()
        self._cut(reset=False)
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _connect(self, number: int, near: socket.socket, far: socket.socket) -> None:
        for side in (near, far):
            side.setblocking(False)
            side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with suppress(OSError):  # nothing listens there
            await self._loop.sock_connect(far, self._target)
            try:
                async with asyncio.TaskGroup() as group:
                    for way, source, sink in ((Way.UP, near, far), (Way.DOWN, far, near)):
                        pieces: Pieces = asyncio.Queue(_MAX_PIECES)
                        group.create_task(self._read(way, number, source, pieces))
                        group.create_task(self._write(way, pieces, sink))
            except* ConnectionError:  # one side has sent RST
                pass

    async def _read(self, way: Way, number: int, source: socket.socket, pieces: Pieces) -> None:
        piece: bytes | None = b"-"
        while piece:
            try:
                piece = await self._loop.sock_recv(source, _PIECE_BYTES)
            except OSError:
                piece = None
            if piece:
                for record in self._records:
                    record.append(Segment(way, number, piece))
            await pieces.put((self._loop.time() + self._faults[way].delay, piece))

    async def _write(self, way: Way, pieces: Pieces, sink: socket.socket) -> None:
        faults = self._faults[way]
        while True:
            due, piece = await pieces.get()
            await asyncio.sleep(due - self._loop.time())
            await faults.flowing.wait()
            if piece is None:
                sink.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                raise ConnectionResetError
            if not piece:
                with suppress(OSError):  # it has gone
                    sink.shutdown(socket.SHUT_RDWR)
                return
            rest = b""
            if faults.bytes_left is not None:
                piece, rest = piece[: faults.bytes_left], piece[faults.bytes_left :]
                faults.bytes_left -= len(piece)
            await self._pass(faults, sink, piece)
            if faults.bytes_left == 0:
                faults.bytes_left = None
                if faults.then == "stall":
                    faults.flowing.clear()
                    await faults.flowing.wait()
                    await self._pass(faults, sink, rest)
                    continue
                if faults.then == "close":
                    self._stop_listening()
                self._cut(reset=False)
                return

    async def _pass(self, faults: Faults, sink: socket.socket, piece: bytes) -> None:
        with suppress(OSError):  # its end comes from the other direction
            await self._loop.sock_sendall(sink, self._noise.randbytes(len(piece)) if faults.is_garbled else piece)


@dataclass(frozen=True, slots=True)
class DataFrame:
    """An HTTP/2 DATA frame with a payload of `size` bytes."""

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
                frames.append(DataFrame(length))
            buffer = buffer[header + length :]
        buffers[segment.connection] = buffer
    return frames
