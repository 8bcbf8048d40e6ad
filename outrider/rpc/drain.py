"""A gate in front of a server's methods: counts the calls in progress, and once closed lets none in.

`grpc.aio.Server.stop(grace)` has no such count to ask: it also waits for health watches, which never end by themselves,
and it closes the port at once, so that probes and late callers meet a refused connection in place of an answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import grpc

from outrider.rpc import errors
from outrider.rpc.wrapping import Context, Handler, wrapped

# gRPC takes calls in before their handlers begin, and a server that stops cuts those: the gate is idle once so many
# looks, so many seconds apart, have found no call that came meanwhile. Who keeps on calling is not waited for.
_QUIET_LOOKS, _LOOK_S = 10, 0.01
_MOST_LOOKS = 200

# Asked about the server, not of it: they pass a closed gate, and nobody waits for them to end.
_ABOUT_THE_SERVER = ("/grpc.health.", "/grpc.reflection.")


class DrainGate(grpc.aio.ServerInterceptor):
    """Server interceptor. Open from birth. Handlers must be asynchronous, as all of ours are."""

    def __init__(self) -> None:
        self._open = True
        self._is_cut = False
        self._arrived = 0
        self._running: list[asyncio.Task[Any] | None] = []
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def running(self) -> int:
        """Calls in progress, those about the server itself left out."""
        return len(self._running)

    def close(self) -> None:
        """From now on new calls end with UNAVAILABLE, reason DRAINING. Those inside go on."""
        self._open = False

    def cut(self) -> None:
        """Ends the calls in progress, as `close` does those that come: with UNAVAILABLE, reason DRAINING."""
        self._is_cut = True
        for task in self._running:
            if task is not None:
                task.cancel()

    async def wait_idle(self) -> None:
        """Returns once no call is in progress, and those that gRPC had taken in have met the gate."""
        quiet, arrived = 0, self._arrived
        for _ in range(_MOST_LOOKS):
            await self._idle.wait()
            if quiet == _QUIET_LOOKS:
                return
            await asyncio.sleep(_LOOK_S)
            quiet = quiet + 1 if arrived == self._arrived else 0
            arrived = self._arrived
        await self._idle.wait()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(_ABOUT_THE_SERVER):
            return handler
        self._arrived += 1
        return wrapped(handler, self._gated)

    @asynccontextmanager
    async def _gated(self, context: Context) -> AsyncIterator[None]:
        await self._admit(context)
        with self._counted():
            try:
                yield
            except asyncio.CancelledError:
                await self._explain(context)
                raise

    async def _admit(self, context: Context) -> None:
        if not self._open:
            await errors.abort(context, errors.draining())

    async def _explain(self, context: Context) -> None:
        """Says why a call is cut, where it was cut here, and its client is still there."""
        if self._is_cut and not context.done():
            await errors.abort(context, errors.draining())

    @contextmanager
    def _counted(self) -> Iterator[None]:
        task = asyncio.current_task()
        self._running.append(task)
        self._idle.clear()
        try:
            yield
        finally:
            self._running.remove(task)
            if not self._running:
                self._idle.set()
