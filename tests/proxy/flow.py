"""The bytes of one connection in one direction: late, held, spoilt or counted, as the direction's faults say.

It lives on an event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

MAX_BACKLOG_BYTES = 8 << 20
"""Bytes on their way at most: far more than a line of ours carries within its delay."""

_RESET = struct.pack("ii", 1, 0)  # linger for no time at all: the kernel sends RST, and drops what it holds


class Way(StrEnum):
    """A direction."""

    UP = "up"  # from who connects to the target
    DOWN = "down"


@dataclass(frozen=True, slots=True)
class Segment:
    """What came in at one time, as an eavesdropper at the proxy sees it.

    Attributes:
        seconds: when, as `time.monotonic()` has it.
        way: which way it goes.
        connection: the number of its connection, from 0.
        data: the bytes, before any fault.
    """

    seconds: float
    way: Way
    connection: int
    data: bytes

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.data)


@dataclass(slots=True)
class Faults:
    """What is wrong with one direction, for all connections.

    Attributes:
        delay: seconds that every byte takes.
        is_stalled: nothing passes, neither bytes nor the end.
        is_garbled: noise passes in place of the bytes.
        bytes_left: what may still pass before everything is cut; None: any number.
        reset: whether that cut is with RST.
    """

    delay: float = 0.0
    is_stalled: bool = False
    is_garbled: bool = False
    bytes_left: int | None = None
    reset: bool = False


class End(StrEnum):
    """How a side ended."""

    CLOSED = "closed"
    RESET = "reset"


class Flow:
    """One direction of one connection. `source` and `sink` are its ends, once they are known."""

    def __init__(
        self, faults: Faults, see: Callable[[bytes], None], cut: Callable[[bool], None], noise: random.Random
    ) -> None:
        """`see` is shown what comes in; `cut` is called, with whether by RST, when the faults' bytes are used up."""
        self.source: asyncio.Transport | None = None
        self.sink: asyncio.Transport | None = None
        self._faults = faults
        self._see = see
        self._cut = cut
        self._noise = noise
        self._loop = asyncio.get_running_loop()
        self._under_way: deque[tuple[float, bytes | End]] = deque()  # with the time at which each is due
        self._backlog = 0
        self._timer: asyncio.TimerHandle | None = None
        self._sink_is_full = False
        self._has_sink = True

    def take(self, data: bytes) -> None:
        """Takes in what the source has sent."""
        self._see(data)
        self._backlog += len(data)
        self._push(data)

    def end(self, how: End) -> None:
        """The source has ended."""
        self._push(how)

    def sink_full(self, is_full: bool) -> None:
        """The sink takes no more for now, or does again."""
        self._sink_is_full = is_full
        self.go()

    def sink_lost(self) -> None:
        """Nobody is there any more to pass bytes to."""
        self._has_sink = False
        self._under_way.clear()
        self._backlog = 0
        self.go()

    def go(self) -> None:
        """Passes on what is due. Called when anything has changed."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._under_way and self.sink is not None and not (self._faults.is_stalled or self._sink_is_full):
            due, piece = self._under_way[0]
            if due > self._loop.time():
                self._timer = self._loop.call_at(due, self.go)
                break
            self._under_way.popleft()
            self._deliver(self.sink, piece)
        self._hold()

    def _push(self, piece: bytes | End) -> None:
        if not self._has_sink:
            return
        due = self._loop.time() + self._faults.delay
        if self._under_way:  # a shorter delay overtakes nothing
            due = max(due, self._under_way[-1][0])
        self._under_way.append((due, piece))
        self.go()

    def _deliver(self, sink: asyncio.Transport, piece: bytes | End) -> None:
        if isinstance(piece, End):
            if piece is End.RESET:
                abort(sink, reset=True)
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

    def _hold(self) -> None:
        """Reads on or not. While nothing passes nothing is read, so that the source's own buffers fill."""
        if self.source is None or self.source.is_closing():
            return
        holds = self._faults.is_stalled or self.sink is None or self._backlog >= MAX_BACKLOG_BYTES
        if holds == self.source.is_reading():
            self.source.pause_reading() if holds else self.source.resume_reading()


def abort(transport: asyncio.Transport, *, reset: bool) -> None:
    """Closes an end at once: with FIN, as a process that ends, or with RST, as a machine that has forgotten."""
    connection: socket.socket | None = transport.get_extra_info("socket")
    if connection is not None:
        with contextlib.suppress(OSError):
            if reset:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            else:
                connection.shutdown(socket.SHUT_RDWR)
    transport.abort()
