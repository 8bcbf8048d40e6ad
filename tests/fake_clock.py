"""An event loop on a fake clock that jumps to the next timer, so that tests neither wait nor depend on the machine.

For tasks that wait for timers and for each other; threads and sockets run in real time.
"""

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec

Parameters = ParamSpec("Parameters")


class FakeClockLoop(asyncio.SelectorEventLoop):
    """Its `time()` stands still while a task can run, and then jumps to the next timer."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(_FakeSelector(self))

    def time(self) -> float:
        return self.now


class _FakeSelector(selectors.DefaultSelector):
    def __init__(self, loop: FakeClockLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and timeout > 0:
            self._loop.now += timeout
            timeout = 0
        return super().select(timeout)


def fake_clock(test: Callable[Parameters, Coroutine[Any, Any, None]]) -> Callable[Parameters, None]:
    """Run a coroutine function on such a loop, as a test."""

    @functools.wraps(test)
    def run(*arguments: Parameters.args, **named: Parameters.kwargs) -> None:
        with asyncio.Runner(loop_factory=FakeClockLoop) as runner:
            runner.run(test(*arguments, **named))

    return run
