"""A channel to one address that is replaced when its certificates are, while calls on the old one go on to their end.

gRPC reads a channel's certificates once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import grpc

from outrider.rpc.channel import open_channel
from outrider.rpc.tls import ChannelTLS

Stub = TypeVar("Stub")
Call = TypeVar("Call", bound=Any)


class RenewedChannel(Generic[Stub]):
    """Opens with the first call. Made and used on one event loop."""

    def __init__(
        self,
        address: str,
        stub: Callable[[grpc.aio.Channel], Stub],
        *,
        max_message_bytes: int,
        options: Sequence[tuple[str, Any]] = (),
        tls: ChannelTLS | None = None,
        name: str = "",
    ) -> None:
        """
        Args:
            address: `HOST:PORT`.
            stub: what makes calls on a channel.
            max_message_bytes: of either direction.
            options: beside those that all our channels have.
            tls: None is plaintext.
            name: `HOST:PORT` that was resolved to the address, where it was: whoever stands in front of the server
                knows it by that name, and so does its certificate, where `tls` expects no other.
        """
        self._address = address
        self._stub = stub
        self._max_message_bytes = max_message_bytes
        self._tls = tls
        expected = (tls.name if tls is not None else None) or name
        # Without it the certificate would have to name the address.
        authority = [("grpc.default_authority", expected)] if expected and expected != address else []
        self._options = [*options, *authority]
        self._current: _Open[Stub] | None = None
        self._open: set[_Open[Stub]] = set()
        self._closing: set[asyncio.Task[None]] = set()

    def begin(self, start: Callable[[Stub], Call]) -> Call:
        """Begins a call, with the certificates of now. Where they have changed since the last one it makes a connection
        of its own; the last one closes with its last call.
        """
        version, credentials = (0, None) if self._tls is None else self._tls.look()
        if self._current is None or self._current.version != version:
            old = self._current
            channel = open_channel(
                self._address,
                max_message_bytes=self._max_message_bytes,
                options=self._options,
                credentials=credentials,
            )
            self._current = _Open(channel, self._stub(channel), version)
            self._open.add(self._current)
            if old is not None and not old.calls:
                self._close(old)
        channel_in_use = self._current
        call = start(channel_in_use.stub)
        channel_in_use.calls += 1
        call.add_done_callback(lambda _: self._ended(channel_in_use))
        return call

    async def close(self) -> None:
        """Ends all that is under way."""
        await asyncio.gather(*(each.channel.close() for each in self._open), *self._closing)
        self._open.clear()

    def _ended(self, channel: _Open[Stub]) -> None:
        channel.calls -= 1
        if not channel.calls and channel is not self._current:
            self._close(channel)

    def _close(self, channel: _Open[Stub]) -> None:
        if channel in self._open:
            self._open.discard(channel)
            task = asyncio.ensure_future(channel.channel.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)


class _Open(Generic[Stub]):
    """One channel, and how many calls are in progress on it."""

    def __init__(self, channel: grpc.aio.Channel, stub: Stub, version: int) -> None:
        self.channel = channel
        self.stub = stub
        self.version = version
        self.calls = 0
