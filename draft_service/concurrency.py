"""The concurrency limit of the draft service: how many sequences run at once, and the queue of those that wait.

The queue is first in, first out: a call of n samples waits until n sequences fit, and no later call overtakes it.
Used on the event loop alone.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress

from outrider.rpc.errors import RequestError, draining, idle, overloaded, yielded
from outrider.rpc.timeouts import InactivityTimer, Pace
from outrider.service.best_effort import Component

# Seconds from one look at a call's position in the queue to the next.
POSITION_INTERVAL = 1.0

_observer = Component("queue_metrics")


class Claim:
    """The sequences of one call: in the queue, then running.

    Attributes:
        count: how many.
        came: when the call joined the queue.
        started: when they began to run; None before.
        gives_way: whether the call is being ended for those that are queued.
    """

    def __init__(self, limit: "ConcurrencyLimit", count: int, came: float) -> None:
        self.count = count
        self.came = came
        self.started: float | None = None
        self.gives_way = False
        self.changed = asyncio.Event()
        self._limit = limit

    async def turn(self) -> AsyncIterator[int]:
        """Waits until the sequences may run. Yields the number of calls ahead in the queue whenever it has changed.

        Raises:
            RequestError: UNAVAILABLE, where the service drains first.
        """
        told = None
        while self.started is None:
            if self._limit.is_draining:
                raise draining()
            if (ahead := self._limit.ahead_of(self)) != told:
                yield ahead
                told = ahead
            with suppress(TimeoutError):
                async with asyncio.timeout(POSITION_INTERVAL):
                    await self.changed.wait()

    def patience(self, seconds: float) -> InactivityTimer:
        """Bounds each wait for the client: `seconds`, or `contended_idle_timeout` where queued calls need room."""
        return InactivityTimer(seconds, short=self._limit.contended_idle_timeout, gives_way=self._may_give_way)

    def idle(self, what: str, patience: InactivityTimer) -> RequestError:
        """How the call ends where its client took too long; `what` says at what."""
        seconds = f"{patience.waited:.3g}"
        if not self.gives_way:
            return idle(f"{what} for {seconds} s", seconds=seconds)
        text = f"{what} for {seconds} s while others wait in the queue"
        return yielded(text, retry_after=self._limit.retry_after(), seconds=seconds)

    def _may_give_way(self) -> bool:
        self.gives_way = self.gives_way or self._limit.shortage > 0
        return self.gives_way


class ConcurrencyLimit:
    """At most `maximum` sequences at once, and a bounded queue for more.

    Attributes:
        maximum: how many may run.
        contended_idle_timeout: seconds that a running call may wait for its client while others are queued.
        is_draining: whether no queued call begins any more.
    """

    def __init__(
        self,
        maximum: int,
        *,
        max_waiting: int,
        contended_idle_timeout: float,
        on_start: Callable[[float], None] = lambda _: None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """`max_waiting` is the most sequences in the queue; `on_start` gets the seconds that a call was queued."""
        self.maximum = maximum
        self.contended_idle_timeout = contended_idle_timeout
        self.is_draining = False
        self._max_waiting = max_waiting
        self._on_start = _observer.quiet(on_start)
        self._clock = clock or time.monotonic
        self._queue: deque[Claim] = deque()
        self._running: set[Claim] = set()
        self._pace = Pace()

    @property
    def running(self) -> int:
        """Sequences that run. Any thread may ask, and so may of `waiting`."""
        return sum(claim.count for claim in list(self._running))

    @property
    def shortage(self) -> int:
        """Sequences in the queue beyond those that may begin once the calls have ended that give way."""
        leaving = sum(claim.count for claim in self._running if claim.gives_way)
        return self.waiting - (self.maximum - self.running + leaving)

    @property
    def waiting(self) -> int:
        """Sequences in the queue."""
        return sum(claim.count for claim in list(self._queue))

    def ahead_of(self, claim: Claim) -> int:
        """How many queued calls begin before this one."""
        return self._queue.index(claim)

    def retry_after(self) -> float:
        """Seconds until half of the queue has begun to run."""
        return self._pace.wait(max(1, self.waiting // 2), self.maximum)

    @contextmanager
    def claim(self, count: int, *, resumed: bool = False) -> Iterator[Claim]:
        """Has so many sequences queued or running for as long as it is open; see `Claim.turn`.

        Args:
            count: at most `maximum`.
            resumed: the call was in progress elsewhere. A draft service that dies leaves as many as it ran, so the
                queue holds `maximum` more of those.

        Raises:
            RequestError: RESOURCE_EXHAUSTED with the time to wait, where the queue is full.
        """
        assert count <= self.maximum
        waiting, most = self.waiting, self._max_waiting + (self.maximum if resumed else 0)
        if (self._queue or self.running + count > self.maximum) and waiting + count > most:
            seconds = self.retry_after()
            raise overloaded(
                f"the queue is full: {waiting} sequences wait, at most {most}, and this call has {count}; try again in "
                f"about {seconds:.2g} s",
                retry_after=seconds,
                given=count,
                waiting=waiting,
                maximum=most,
            )
        claim = Claim(self, count, self._clock())
        self._queue.append(claim)
        self._start_next()
        try:
            yield claim
        finally:
            if claim.started is None:
                self._queue.remove(claim)
            else:
                self._running.remove(claim)
                self._pace.end(self._clock() - claim.started)
            self._start_next()

    def drain(self) -> None:
        """Refuses the queued calls, so that they go on elsewhere; those that run go on."""
        self.is_draining = True
        for claim in self._queue:
            claim.changed.set()

    def _start_next(self) -> None:
        while self._queue and not self.is_draining and self.running + self._queue[0].count <= self.maximum:
            claim = self._queue.popleft()
            self._running.add(claim)
            claim.started = self._clock()
            claim.changed.set()
            self._on_start(claim.started - claim.came)
