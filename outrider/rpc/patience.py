"""How long a task waits for its peer, over many steps of the same kind. It knows nothing of what the steps are."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from types import TracebackType
from typing import Self, TypeVar

Result = TypeVar("Result")


class Patience:
    """Bounds each of many awaits of one task with a single timer, where an `asyncio.timeout` each would cost a fifth of
    what it takes to write a message.

    Made and used in one task, as a context manager; one step at a time.
    """

    def __init__(self, seconds: float) -> None:
        """`seconds` is how long a step may take."""
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._since: float | None = None  # when the step under way began
        self._lost = False
        self._timer = self._loop.call_later(seconds, self._look)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()

    async def bear(self, step: Awaitable[Result]) -> Result:
        """The result of a step.

        Raises:
            TimeoutError: it took longer than `seconds`, and was cancelled.
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
        waited = 0.0 if self._since is None else self._loop.time() - self._since
        if waited >= self._seconds:
            self._lost = True
            self._task.cancel()
        else:
            self._timer = self._loop.call_later(self._seconds - waited, self._look)
