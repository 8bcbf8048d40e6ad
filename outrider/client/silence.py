"""Responses of a call that must not be silent for too long."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Generic, TypeVar

Response = TypeVar("Response")


class Heard(Generic[Response]):
    """The responses of a call, none of which may let its reader wait longer than so many seconds.

    One timer for all of them; the time that the reader takes for itself does not count. `close` it.
    """

    def __init__(self, call: Any, seconds: float | None) -> None:
        """`call` is a stream of responses (`grpc.aio.UnaryStreamCall`); None waits for ever."""
        self._call = call
        self._responses: AsyncIterator[Response] = aiter(call)
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._since: float | None = None  # when the wait under way began
        self._lost = False
        self._timer = None if seconds is None else self._loop.call_later(seconds, self._look, seconds)

    def __aiter__(self) -> AsyncIterator[Response]:
        return self

    async def __anext__(self) -> Response:
        """The next.

        Raises:
            TimeoutError: it did not come in time, and the call is cancelled.
        """
        self._since = self._loop.time()
        try:
            return await anext(self._responses)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._lost and not (task is not None and task.cancelling()):  # else somebody cancels us as well
                raise TimeoutError(f"nothing came for {self._seconds:g} s") from None
            raise
        finally:
            self._since = None

    def close(self) -> None:
        """No more is read. Without effect on a call that has ended."""
        if self._timer is not None:
            self._timer.cancel()
        self._call.cancel()

    def _look(self, seconds: float) -> None:
        waited = 0.0 if self._since is None else self._loop.time() - self._since
        if waited >= seconds:
            self._lost = True
            self._call.cancel()
        else:
            self._timer = self._loop.call_later(seconds - waited, self._look, seconds)
