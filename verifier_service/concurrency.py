"""The concurrency limit of the verifier service: how many sequences run or wait at once. Used on the event loop only.

The queue itself is the scheduler's (`verifier_service.scheduler`).
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from outrider.rpc.errors import counted, overloaded
from outrider.rpc.timeouts import Pace


class ConcurrencyLimit:
    """At most `maximum` sequences at once, and a bounded queue for more."""

    def __init__(self, maximum: int, max_waiting: int) -> None:
        self._maximum = maximum
        self._max_waiting = max_waiting
        self._pace = Pace()
        self._inside = 0  # running or queued
        self._leaving = 0  # running, and being ended for queued ones

    def retry_after(self) -> float:
        """Estimated seconds until half of the queue runs."""
        return self._pace.wait(max(1, (self._inside - self._maximum) // 2), max(self._inside, 1))

    @contextmanager
    def preempt(self) -> Iterator[bool]:
        """Yields whether an idle sequence must end for a queued one. Keep the context open until it has ended."""
        is_preempted = self._inside - self._maximum > self._leaving
        self._leaving += is_preempted
        try:
            yield is_preempted
        finally:
            self._leaving -= is_preempted

    @contextmanager
    def enter(self, *, resumed: bool = False) -> Iterator[None]:
        """Holds a sequence, running or queued, while the context is open.

        Args:
            resumed: the sequence was in progress at another verifier. The queue takes `maximum` more of those.

        Raises:
            RequestError: RESOURCE_EXHAUSTED with `retry_after`: the queue is full.
        """
        waiting = self._inside - self._maximum
        maximum = self._max_waiting + (self._maximum if resumed else 0)
        if waiting >= maximum:
            seconds = self.retry_after()
            raise overloaded(
                f"the queue is full: {counted(waiting, 'sequence')} in it, and at most {maximum}; try again in about "
                f"{seconds:.2g} s, or raise --max-waiting",
                retry_after=seconds,
                waiting=waiting,
                maximum=maximum,
            )
        self._inside += 1
        arrived = time.monotonic()
        try:
            yield
        finally:
            self._inside -= 1
            self._pace.end(time.monotonic() - arrived)
