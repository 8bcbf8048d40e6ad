"""A TCP connection that may break: bytes pass through until it is cut, or until it says nothing more.

It lives on the event loop, since there are hundreds of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from types import TracebackType
from typing import Self

_PIECE = 1 << 16
_RESET = struct.pack("ii", 1, 0)  # linger for no time at all: the kernel sends RST, and drops what it holds


class Wire:
    """A port of its own, through which `target` (HOST:PORT) is reached."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._server: asyncio.Server | None = None
        self._ends: list[asyncio.StreamWriter] = []
        self._connections: list[asyncio.Task[None]] = []
        self._flows = asyncio.Event()
        self._flows.set()
        self._cut = False

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cut()
        await asyncio.gather(*self._connections, return_exceptions=True)

    @property
    def address(self) -> str:
        """HOST:PORT of its near end."""
        assert self._server is not None
        host, port = self._server.sockets[0].getsockname()
        return f"{host}:{port}"

    def cut(self, *, reset: bool = False) -> None:
        """Close both ends at once: with FIN, as a process that dies, or with RST, as a machine that has forgotten."""
        self._cut = True
        self._flows.set()
        if self._server is not None:
            self._server.close()
        for end in self._ends:
            if reset:
                with contextlib.suppress(OSError):
                    end.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            end.transport.abort()

    def hang(self) -> None:
        """Let nothing through any more, neither bytes nor the end of either side."""
        self._flows.clear()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.append(asyncio.create_task(self._connect(reader, writer)))

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._ends.append(writer)
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            return
        self._ends.append(far_writer)
        if self._cut:
            self.cut()
        await asyncio.gather(self._pump(reader, far_writer), self._pump(far_reader, writer))

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while piece := await source.read(_PIECE):
                await self._flows.wait()
                sink.write(piece)
                await sink.drain()
        await self._flows.wait()
        sink.close()
