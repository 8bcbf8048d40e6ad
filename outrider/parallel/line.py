"""A connection between two ranks: frames both ways, and within seconds the knowledge that the other one is gone.

Each side sends a beat every second. A process that dies closes its sockets, which is seen at once; one that stands
still or cannot be reached is seen by its silence. Both hold while a pass or a load is under way, as no thread that
computes takes part. It knows no message by its meaning.
"""

import contextlib
import socket
import struct
import threading
from collections.abc import Callable

_HEAD = struct.Struct("!BI")  # kind, bytes that follow
_BEAT = 0
_BEAT_SECONDS = 1.0
_BEATS_IN_SILENCE = 4  # at least as many may be lost or late
_CLOSED = "it closed its connection"


class LineBroken(Exception):
    """The other side is gone; the text says what is known of how."""


class Line:
    """One connection. Any thread may send; `on_frame` and `on_broken` are called on a thread of its own.

    Args:
        connection: a connected stream socket; it is the line's from now on.
        silence: seconds without a beat after which the other side counts as gone.
        on_frame: takes each frame, its kind (1 to 255) and its bytes, in order.
        on_broken: told once how the line broke, by either side's end, but not by `close`.
    """

    def __init__(
        self,
        connection: socket.socket,
        *,
        silence: float,
        on_frame: Callable[[int, bytes], None],
        on_broken: Callable[[str], None],
    ) -> None:
        connection.settimeout(silence)
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._silence = silence
        self._on_frame = on_frame
        self._on_broken = on_broken
        self._sending = threading.Lock()
        self._closed = threading.Event()
        self._ended = threading.Event()

    def start(self) -> None:
        """Begins to listen and to beat."""
        for work in (self._listen, self._beat):
            threading.Thread(target=work, name=f"rank-line-{work.__name__.strip('_')}", daemon=True).start()

    def send(self, kind: int, *parts: bytes) -> None:
        """Sends a frame of these bytes together.

        Raises:
            LineBroken: the other side is gone, or takes nothing in for as long as it may be silent.
        """
        frame = b"".join((_HEAD.pack(kind, sum(map(len, parts))), *parts))
        try:
            with self._sending:
                self._socket.sendall(frame)
        except OSError as error:
            raise LineBroken(self._described(error)) from error

    def close(self) -> None:
        """Ends the line from this side."""
        self._closed.set()
        with contextlib.suppress(OSError):  # where the other side was faster
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def wait_ended(self, timeout: float) -> bool:
        """Whether the other side has ended its line within so many seconds."""
        return self._ended.wait(timeout)

    def _listen(self) -> None:
        try:
            while True:
                kind, size = _HEAD.unpack(receive(self._socket, _HEAD.size))
                payload = receive(self._socket, size)
                if kind != _BEAT:
                    self._on_frame(kind, payload)
        except (OSError, LineBroken) as error:
            self._ended.set()
            if not self._closed.is_set():
                self._on_broken(self._described(error))

    def _beat(self) -> None:
        while not self._closed.wait(min(_BEAT_SECONDS, self._silence / _BEATS_IN_SILENCE)):
            try:
                self.send(_BEAT)
            except LineBroken:
                return  # whoever listens hears of it too

    def _described(self, error: Exception) -> str:
        if isinstance(error, TimeoutError):
            return f"it has been silent for {self._silence:g} s"
        # A process that is killed before it has read all resets its connections.
        return _CLOSED if isinstance(error, ConnectionError) else str(error)


def receive(connection: socket.socket, size: int) -> bytes:
    """So many bytes, however they arrive.

    Raises:
        LineBroken: the other side ends before.
        OSError: the connection breaks, or nothing comes for as long as it may be silent.
    """
    data = bytearray(size)
    view, at = memoryview(data), 0
    while at < size:
        count = connection.recv_into(view[at:])
        if not count:
            raise LineBroken(_CLOSED)
        at += count
    return bytes(data)
