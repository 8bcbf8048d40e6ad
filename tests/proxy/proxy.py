"""The proxy: a port through which a service is reached, on a thread of its own, with faults to switch on and off."""

from __future__ import annotations

import asyncio
import contextlib
import random
import select
import selectors
import socket
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self, TypeVar

from tests.proxy.connection import Connection
from tests.proxy.flow import Faults, Flow, Segment, Way

Result = TypeVar("Result")

BOTH = (Way.UP, Way.DOWN)


class Proxy:
    """Passes bytes both ways between a port of its own and `target` (HOST:PORT). Any thread may call it.

    A fault holds for the connections there are and for those to come, until it is taken back; what a method has
    switched holds when it returns. Faults add up. `way` is the direction or the directions meant.

    Attributes:
        target: where new connections go; may be set at any time.

    >>> from tests.proxy import Proxy, Way
    >>> with Proxy("127.0.0.1:9") as proxy:
    ...     proxy.delay(0.025)  # a round trip of 50 ms more
    ...     proxy.stall(Way.DOWN)  # half open: requests pass, answers do not
    ...     proxy.heal()
    """

    def __init__(self, target: str, *, is_open: bool = True, seed: int = 0) -> None:
        """`seed` is of the noise. Unless `is_open`, it listens only after `open`."""
        self.target = target
        self._opens = is_open
        self._noise = random.Random(seed)
        self._faults = {way: Faults() for way in Way}
        self._records: list[list[Segment]] = []
        self._connections: list[Connection] = []
        self._count = 0
        self._listener: socket.socket | None = None
        self._loop = asyncio.SelectorEventLoop(_selector())
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port: int = probe.getsockname()[1]

    @property
    def address(self) -> str:
        """HOST:PORT where it listens while it is open, and nobody else does."""
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

    # --------------------------------------------------------------------------------------------------- its port

    def open(self) -> None:
        """Listens from now on."""
        self._call(self._listen)

    def refuse(self) -> None:
        """Listens no more: who connects is refused. What is connected stays."""
        self._call(self._stop_listening)

    def close(self) -> None:
        """Refuses, and cuts what is connected: as a service that has died."""
        self._call(self._stop_listening)
        self.cut()

    # ----------------------------------------------------------------------------------------------------- faults

    def cut(self, *, reset: bool = False) -> None:
        """Ends every connection now, both ends at once: with FIN, or with RST. New ones are taken."""
        self._call(self._cut, reset)

    def cut_after(self, count: int, way: Way, *, reset: bool = False) -> None:
        """Ends every connection as soon as `count` more bytes have passed this way, on all of them together."""
        self._set(way, bytes_left=count, reset=reset)

    def delay(self, seconds: float, *way: Way) -> None:
        """Every byte takes this much longer, in order and at any throughput. Both ways: the round trip grows by twice
        as much.
        """
        self._set(*way, delay=seconds)

    def stall(self, *way: Way) -> None:
        """Connections stay, and nothing passes, the end of a side neither. One way only: half open."""
        self._set(*way, is_stalled=True)

    def flow(self, *way: Way) -> None:
        """Undoes `stall`: what was held passes, in order."""
        self._set(*way, is_stalled=False)

    def garble(self, *way: Way) -> None:
        """Noise passes in place of the bytes, as many."""
        self._set(*way, is_garbled=True)

    def heal(self) -> None:
        """Takes every fault back, and listens."""
        self._set(delay=0.0, is_stalled=False, is_garbled=False, bytes_left=None)
        self.open()

    # ---------------------------------------------------------------------------------------------- listening in

    @contextmanager
    def recording(self) -> Iterator[list[Segment]]:
        """Notes what comes in at the proxy from either side, as it comes in."""
        record: list[Segment] = []
        self._call(self._records.append, record)
        try:
            yield record
        finally:
            self._call(self._forget, record)

    @property
    def connections(self) -> int:
        """Connections that are open."""
        return self._call(lambda: sum(each.is_open for each in self._connections))

    # ---------------------------------------------------------------------------------------- in the proxy's thread

    def _set(self, *ways: Way, **faults: float | bool | int | None) -> None:
        def switch() -> None:
            for way in ways or BOTH:
                for name, value in faults.items():
                    setattr(self._faults[way], name, value)
            for connection in list(self._connections):
                connection.go()

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
                self._connections.append(Connection(accepted, self.target, up, down))

    def _flow(self, connection: int, way: Way) -> Flow:
        def see(data: bytes) -> None:
            for record in self._records:
                record.append(Segment(self._loop.time(), way, connection, data))

        return Flow(self._faults[way], see, self._cut, self._noise)

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
