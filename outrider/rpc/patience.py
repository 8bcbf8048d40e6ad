"""How long a task waits for its peer, over many steps of the same kind."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self, TypeVar

Result = TypeVar("Result")

# Looks at a step in the time of the shorter bound, where there is one.
LOOKS = 4


class Patience:
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

    async def bear(self, step: Awaitable[Result]) -> Result:
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
