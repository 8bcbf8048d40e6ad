"""How long to wait: for a peer, over many steps of the same kind, and before a full service is tried again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc

Result = TypeVar("Result")

# Looks at a step in the time of the shorter bound, where there is one.
LOOKS = 4


class InactivityTimer:
    """Bounds each of many awaits of one task with a single timer, where an `asyncio.timeout` each would cost a fifth of
    what it takes to write a message.

    Made and used in one task, as a context manager; one step at a time.

    Attributes:
        waited: seconds that the last step had taken at the last look.
    """

    def __init__(
        self, seconds: float, *, short: float | None = None, gives_way: Callable[[], bool] = lambda: False
    ) -> None:
        """A step may take `seconds`. One that has taken `short` is given up once `gives_way` returns true, which is
        called `LOOKS` times in as many seconds, so it may take a little more.
        """
        task = asyncio.current_task()
        assert task is not None
        self.waited = 0.0
        self._task = task
        self._seconds = seconds
        self._short = seconds if short is None else min(short, seconds)
        self._gives_way = gives_way
        self._interval = seconds if short is None else self._short / LOOKS
        self._loop = asyncio.get_running_loop()
        self._since: float | None = None  # when the step under way began
        self._lost = False
        self._timer = self._loop.call_later(self._interval, self._look)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()

    async def wait_for(self, step: Awaitable[Result]) -> Result:
        """The result of a step.

        Raises:
            TimeoutError: it took too long, and was cancelled.
        """
        self._since = self._loop.time()
        try:
            return await step
        except asyncio.CancelledError:
            if self._lost and self._task.uncancel() == 0:  # else somebody cancels us as well
                raise TimeoutError from None
            raise
        finally:
            self._since = None

    def _look(self) -> None:
        self.waited = 0.0 if self._since is None else self._loop.time() - self._since
        if self.waited >= self._seconds or (self.waited >= self._short and self._gives_way()):
            self._lost = True
            self._task.cancel()
        else:
            left = self._seconds - self.waited
            self._timer = self._loop.call_later(min(left, self._interval), self._look)


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


# ---------------------------------------------------------------------------------------------- waiting for a full one

# Seconds, before any sequence has ended.
FIRST_GUESS = 1.0
# Share of the mean that the last sequence is.
RECENT = 0.1
LEAST_WAIT, LONGEST_WAIT = 0.1, 60.0


class Pace:
    """The mean time that a sequence is in progress. Used on one thread."""

    def __init__(self) -> None:
        self._mean: float | None = None  # seconds

    def end(self, seconds: float) -> None:
        """A sequence has ended, `seconds` after it began."""
        self._mean = seconds if self._mean is None else self._mean + RECENT * (seconds - self._mean)

    def wait(self, ends: int, running: int) -> float:
        """Seconds until about so many of `running` sequences have ended (Little's law)."""
        if self._mean is None:
            return FIRST_GUESS
        return min(max(ends * self._mean / running, LEAST_WAIT), LONGEST_WAIT)
