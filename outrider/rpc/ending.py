"""How a call of `grpc.aio` ended, whatever was being written to it at that moment."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import grpc

# What `grpc.aio` says of a write that met the end of its call. It stands in the place of the call's own status: for a
# moment where that was still on its way, and for good where it was there already.
_WRITE_FAILED = "Internal error from Core"
# How often, and how far apart, a status that is on its way is looked for.
_LOOKS, _SECONDS_PER_LOOK = 50, 0.01


class Ending:
    """Notes the status of a call when it ends. Make it with the call, before anything is written."""

    def __init__(self, call: Any) -> None:
        """`call` is a call of `grpc.aio`, of any kind."""
        self._call = call
        self._noted: grpc.aio.AioRpcError | None = None
        call.add_done_callback(self._note)

    async def status(self) -> grpc.aio.AioRpcError:
        """The status of a call that has ended, or is about to: waits until it is there. It may be OK."""
        for _ in range(_LOOKS):
            if self._noted is not None:
                return self._noted
            if (details := await self._call.details()) != _WRITE_FAILED:
                break
            await asyncio.sleep(_SECONDS_PER_LOOK)
        details = await self._call.details()
        return _error(await self._call.code(), await self._call.trailing_metadata(), details)

    def _note(self, call: Any) -> None:
        """Called while the status is being set: a moment later a failed write may have put its own in its place."""
        if self._noted is not None:
            return
        code, details, trailing = (_at_once(ask()) for ask in (call.code, call.details, call.trailing_metadata))
        if code is not None and trailing is not None and details != _WRITE_FAILED:
            self._noted = _error(code, trailing, details)


def _error(code: grpc.StatusCode, trailing: grpc.aio.Metadata, details: str | None) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details=details)


def _at_once(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine that need not wait; None of one that would."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    coroutine.close()
    return None
