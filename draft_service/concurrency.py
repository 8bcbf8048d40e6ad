"""The concurrency limit of the draft service: how many sequences run at once, and the queue.

The queue is first in, first out: a call of n samples waits until n sequences fit, and no later call overtakes it.
Used on the event loop only.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress

from outrider.rpc.errors import RequestError, counted, draining, idle, overloaded, yielded
from outrider.rpc.timeouts import InactivityTimer, Pace
from outrider.service.best_effort import Component

# Seconds between two updates of a call's position in the queue.
POSITION_INTERVAL = 1.0

_observer = Component("queue_metrics")


class Claim:
    """The sequences of one call: in the queue, then running.

    Attributes:
        started: when they began to run; None in the queue.
        is_preempted: whether the call is being ended for queued calls.
    """

    def __init__(self, limit: "ConcurrencyLimit", count: int, arrived: float) -> None:
        self.count = count
        self.arrived = arrived
        self.started: float | None = None
        self.ran = False  # whether `turn` has ended; a call that is refused before counts in no statistics
        self.is_preempted = False
        self.changed = asyncio.Event()
        self._limit = limit

    async def turn(self) -> AsyncIterator[int]:
        """Waits until the sequences may run. Yields the number of calls ahead in the queue when it changes.

        Raises:
            RequestError: UNAVAILABLE: the service drains.
        """
        last = None
        while self.started is None:
            if self._limit.is_draining:
                raise draining()
            if (ahead := self._limit.ahead_of(self)) != last:
                yield ahead
                last = ahead
            with suppress(TimeoutError):
                async with asyncio.timeout(POSITION_INTERVAL):
                    await self.changed.wait()
        self.ran = True
        self._limit.on_start(self.started - self.arrived)

    def inactivity_timer(self, seconds: float) -> InactivityTimer:
        """Bounds each wait for the client to `seconds`, or to `contended_idle_timeout` while calls are queued."""
        return InactivityTimer(seconds, short=self._limit.contended_idle_timeout, gives_way=self._may_preempt)

    def idle(self, behaviour: str, flag: str, timer: InactivityTimer) -> RequestError:
        """The error for a client that was idle for too long; `behaviour` says how, `flag` is the limit's."""
        seconds = f"{timer.waited:.3g}"
        if not self.is_preempted:
            return idle(f"{behaviour} for {seconds} s ({flag})", seconds=seconds)
        text = f"{behaviour} for {seconds} s while other calls wait in the queue (--contended-idle-timeout)"
        return yielded(text, retry_after=self._limit.retry_after(), seconds=seconds)

    def _may_preempt(self) -> bool:
        self.is_preempted = self.is_preempted or self._limit.shortage > 0
        return self.is_preempted


class ConcurrencyLimit:
    """At most `maximum` sequences at once, and a bounded queue for more.

    Attributes:
        contended_idle_timeout: seconds that a running call may be idle while other calls are queued.
        is_draining: whether queued calls are refused.
    """

    def __init__(
        self,
        maximum: int,
        *,
        max_waiting: int,
        contended_idle_timeout: float,
        on_start: Callable[[float], None] = lambda _: None,
    ) -> None:
        """`max_waiting` is the most sequences in the queue. `on_start` gets the seconds that a call spent there."""
        self.maximum = maximum
        self.contended_idle_timeout = contended_idle_timeout
        self.is_draining = False
        self._max_waiting = max_waiting
        self.on_start = _observer.quiet(on_start)
        self._queue: deque[Claim] = deque()
        self._running: set[Claim] = set()
        self._pace = Pace()

    @property
    def running(self) -> int:
        """Sequences that run. Any thread may read it, and `waiting`."""
        return sum(claim.count for claim in list(self._running))

    @property
    def shortage(self) -> int:
        """Queued sequences that will not fit even after all preempted calls have ended."""
        leaving = sum(claim.count for claim in self._running if claim.is_preempted)
        return self.waiting - (self.maximum - self.running + leaving)

    @property
    def waiting(self) -> int:
        return sum(claim.count for claim in list(self._queue))

    def ahead_of(self, claim: Claim) -> int:
        """Calls ahead of this one in the queue."""
        return self._queue.index(claim)

    def retry_after(self) -> float:
        """Estimated seconds until half of the queue runs."""
        return self._pace.wait(max(1, self.waiting // 2), self.maximum)

    @contextmanager
    def claim(self, count: int, *, resumed: bool = False) -> Iterator[Claim]:
        """Holds so many sequences, queued or running, while the context is open; see `Claim.turn`.

        Args:
            count: at most `maximum`.
            resumed: the call was in progress at another draft service. If that one died, up to `maximum` sequences come
                at once, so the queue takes that many more of them.

        Raises:
            RequestError: RESOURCE_EXHAUSTED with `retry_after`: the queue is full.
        """
        assert count <= self.maximum
        waiting, most = self.waiting, self._max_waiting + (self.maximum if resumed else 0)
        if (self._queue or self.running + count > self.maximum) and waiting + count > most:
            seconds = self.retry_after()
            raise overloaded(
                f"the queue is full: {counted(waiting, 'sequence')} in it, {count} more in this call, and at most "
                f"{most}; try again in about {seconds:.2g} s, or raise --max-waiting",
                retry_after=seconds,
                given=count,
                waiting=waiting,
                maximum=most,
            )
        loop = asyncio.get_running_loop()
        claim = Claim(self, count, loop.time())
        self._queue.append(claim)
        self._start_next()
        try:
            yield claim
        finally:
            if claim.started is None:
                self._queue.remove(claim)
            else:
                self._running.remove(claim)
                if claim.ran:
                    self._pace.end(loop.time() - claim.started)
            self._start_next()

    def drain(self) -> None:
        """Refuses queued calls: their clients try another service. Running calls continue."""
        self.is_draining = True
        for claim in self._queue:
            claim.changed.set()

    def _start_next(self) -> None:
        while self._queue and not self.is_draining and self.running + self._queue[0].count <= self.maximum:
            claim = self._queue.popleft()
            self._running.add(claim)
            claim.started = asyncio.get_running_loop().time()
            claim.changed.set()
