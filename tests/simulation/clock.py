"""One clock for a whole simulated world: an event loop that jumps from timer to timer, and `time` that agrees with it.

Also faults at awaits: a coroutine that is cancelled, or broken by an error, at its n-th await.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Generator, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from tests.fake_clock import FakeClockLoop

START = 1_000.0
"""What the clock shows at first: some code takes 0.0 for "never"."""


class SimulatedLoop(FakeClockLoop):
    """Its time passes a little with each turn of the loop, too: timers that just miss their time do not spin."""

    def _run_once(self) -> None:
        self.now += 1e-7
        super()._run_once()  # type: ignore[misc]  # the one method that all turns go through


@contextmanager
def simulated_time() -> Iterator[SimulatedLoop]:
    """An event loop in virtual time. Until the block ends the clocks of `time` show its time to the whole process."""
    loop = SimulatedLoop()
    loop.now = START
    with ExitStack() as stack:
        for name in ("monotonic", "perf_counter", "time"):
            stack.enter_context(patch(f"time.{name}", loop.time))
        for name in ("monotonic_ns", "perf_counter_ns", "time_ns"):
            stack.enter_context(patch(f"time.{name}", lambda: int(loop.now * 1e9)))
        try:
            yield loop
        finally:
            asyncio.set_event_loop(None)
            loop.close()


class FaultAtAwait(Awaitable[Any]):
    """Runs a coroutine; at its n-th await it is cancelled, or `error` is raised there in place of what would come.

    Attributes:
        has_struck: whether the coroutine came to that await.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, Any], n: int, error: Exception | None) -> None:
        """`error` None: the task that runs it is cancelled."""
        self.has_struck = False
        self._coroutine = coroutine
        self._left = n
        self._error = error

    def __await__(self) -> Generator[Any, Any, Any]:
        step: Any = lambda: self._coroutine.send(None)  # noqa: E731
        while True:
            try:
                waits_for = step()
                self._left -= self._error is None or self._may_fail()
                if self._left == 0 and not self.has_struck:
                    self.has_struck = True
                    task = asyncio.current_task()
                    if self._error is None and task is not None:
                        task.cancel()
                    else:
                        step = lambda: self._coroutine.throw(self._error)  # type: ignore[arg-type]  # noqa: E731
                        continue
            except StopIteration as end:
                return end.value
            try:
                yield waits_for
            except BaseException as error:  # passed on to the coroutine, whatever it is
                step = lambda error=error: self._coroutine.throw(error)  # noqa: E731
            else:
                step = lambda: self._coroutine.send(None)  # noqa: E731

    def _may_fail(self) -> bool:
        """Not where a `TaskGroup` waits for its tasks, or a status leaves: only a cancel can come there."""
        inner: Any = self._coroutine
        while hasattr(inner, "cr_code"):
            code = inner.cr_code
            if code.co_filename == asyncio.taskgroups.__file__ or code.co_name == "abort_with_status":
                return False
            inner = inner.cr_await
        return True
