"""One connection through the proxy: two sides, and a flow each way between them.

It lives on the proxy's event loop, and knows nothing of faults.
"""

from __future__ import annotations

import asyncio
import socket

from tests.proxy.flow import End, Flow, abort


class Connection:
    """From who has connected, on `accepted`, to the target (HOST:PORT)."""

    def __init__(self, accepted: socket.socket, target: str, up: Flow, down: Flow) -> None:
        self._near = _Side(says=up, hears=down)
        self._far = _Side(says=down, hears=up)
        self._flows = (up, down)
        self._is_cut = False
        self._making = asyncio.get_running_loop().create_task(self._make(accepted, target))

    @property
    def is_open(self) -> bool:
        """Whether either side is there."""
        return not (self._near.gone.is_set() and self._far.gone.is_set())

    def go(self) -> None:
        """Passes on what is due: a fault has changed."""
        for flow in self._flows:
            flow.go()

    def cut(self, reset: bool) -> None:
        """Ends both sides now."""
        self._is_cut = True
        for side in (self._near, self._far):
            if side.transport is not None:
                abort(side.transport, reset=reset)

    async def ended(self) -> None:
        """Returns when a connection that was cut is gone."""
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

    def __init__(self, *, says: Flow, hears: Flow) -> None:
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
        self._says.end(End.CLOSED if error is None else End.RESET)
        self._hears.sink_lost()

    def pause_writing(self) -> None:
        self._hears.sink_full(True)

    def resume_writing(self) -> None:
        self._hears.sink_full(False)
