"""The messages of a stream and their timeouts, timeouts of many awaits in a row, and when to retry a full service."""

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Any, Self, TypeVar

from outrider.rpc.errors import idle, invalid_field, out_of_order

Result = TypeVar("Result")
Message = TypeVar("Message", bound=Any)

# Seconds between two notices to a sequence that waits at a verifier, as the contract has it (`Notice`).
NOTICE_SECONDS = 5.0
# Checks of a step within the shorter timeout.
CHECKS = 4


async def first_message(read: Callable[[], Awaitable[Message | None]], name: str, limit: float) -> Message:
    """The first message of a stream, which opens its sequence; `name` is the type of such a message.

    Raises:
        RequestError: another message came, or none in `limit` seconds.
    """
    try:
        async with asyncio.timeout(limit):
            message = await read()
    except TimeoutError:
        text = f"the client sent no message for {limit:g} s (--idle-timeout); the first one must be {name}"
        raise idle(text, seconds=limit) from None
    if message is None:
        raise out_of_order(f"the stream ended without a message; the first one must be {name}")
    if message.WhichOneof("kind") != "open":
        raise out_of_order(f"the first message is {message.WhichOneof('kind') or 'empty'}; it must be {name}")
    return message


def kind_of_next(message: Any, sequence_id: str, opening: str, kinds: str) -> str:
    """The kind of a message after the first one, which was an `opening`. `kinds` are those that the contract has.

    Raises:
        RequestError: INVALID_ARGUMENT: another sequence, a second opening, or none of the kinds.
    """
    if message.sequence_id != sequence_id:
        raise invalid_field(
            "sequence_id",
            f"sequence_id is {message.sequence_id!r}; it must be that of the stream's {opening}, {sequence_id!r}",
        )
    kind: str | None = message.WhichOneof("kind")
    if kind == "open":
        raise out_of_order(f"a second {opening} was sent; open a stream for each sequence")
    if kind is None:
        raise invalid_field("kind", f"kind is not set; it must be {kinds}")
    return kind


class InactivityTimer:
    """A timeout for each of many awaits, with one timer: an `asyncio.timeout` each costs a fifth of writing a message.

    A context manager, used on one event loop; one step at a time. Time between steps does not count.

    Attributes:
        waited: seconds that the step had taken at the last check.
    """

    def __init__(
        self, seconds: float | None, *, short: float | None = None, gives_way: Callable[[], bool] = lambda: False
    ) -> None:
        """A step may take `seconds`; None is no limit. After `short` seconds a step also ends once `gives_way` returns
        True; it is called `CHECKS` times in `short` seconds.
        """
        self.seconds = math.inf if seconds is None else seconds
        self.waited = 0.0
        self._short = self.seconds if short is None else min(short, self.seconds)
        self._gives_way = gives_way
        self._interval = self.seconds if short is None else self._short / CHECKS
        self._loop = asyncio.get_running_loop()
        self._since: float | None = None  # when the step under way began
        self._task: asyncio.Task[Any] | None = None  # whose step it is
        self._expired = False
        self._timer = None if seconds is None else self._loop.call_later(self._interval, self._check)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Removes the timeout. May be called twice."""
        if self._timer is not None:
            self._timer.cancel()

    async def wait_for(self, step: Awaitable[Result]) -> Result:
        """The result of a step.

        Raises:
            TimeoutError: it took too long, and was cancelled. Do not use the timer again.
        """
        self._since, self._task = self._loop.time(), asyncio.current_task(self._loop)
        cancelled = 0 if self._task is None else self._task.cancelling()
        try:
            return await step
        except asyncio.CancelledError:
            # Else another task cancelled it too.
            if self._expired and self._task is not None and self._task.uncancel() <= cancelled:
                raise TimeoutError from None
            raise
        finally:
            self._since = self._task = None

    def _check(self) -> None:
        self.waited = 0.0 if self._since is None else self._loop.time() - self._since
        if self._task is not None and (
            self.waited >= self.seconds or (self.waited >= self._short and self._gives_way())
        ):
            self._expired = True
            self._task.cancel()  # cancelling the call alone would not end a write without a connection
        else:
            self._timer = self._loop.call_later(min(self.seconds - self.waited, self._interval), self._check)


# ---------------------------------------------------------------------------------------------- waiting for capacity

# Seconds, before any sequence has ended.
FIRST_GUESS = 1.0
# Weight of the last sequence in the mean.
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
        """Estimates the seconds until `ends` of `running` sequences have ended."""
        if self._mean is None:
            return FIRST_GUESS
        return min(max(ends * self._mean / running, LEAST_WAIT), LONGEST_WAIT)
