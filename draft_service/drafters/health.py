"""Whether a drafter works at all, over all its sequences: a circuit breaker.

It knows failures and the time; nothing of what is drafted.
"""

import time
from collections.abc import Callable

FAILURES_IN_A_ROW = 5
"""After so many, with no proposal between them, nobody is let through but a probe now and then."""

FIRST_PROBE_S, LATEST_PROBE_S = 1.0, 10.0
"""Seconds from there to the first probe, and between two at most: doubled each time one fails."""


class Health:
    """One drafter's."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures = 0
        self._pause = FIRST_PROBE_S
        self._probe_at = 0.0

    @property
    def is_well(self) -> bool:
        """Whether everybody is let through."""
        return self._failures < FAILURES_IN_A_ROW

    def admits(self) -> bool:
        """Whether the drafter may be asked now. Where it is sick, one may at a time, and asks for all."""
        if self.is_well:
            return True
        now = self._clock()
        if now < self._probe_at:
            return False
        self._pause = min(2 * self._pause, LATEST_PROBE_S)
        self._probe_at = now + self._pause
        return True

    def failed(self) -> None:
        """A proposal did not come."""
        self._failures += 1
        if self._failures == FAILURES_IN_A_ROW:
            self._probe_at = self._clock() + self._pause

    def proposed(self) -> None:
        """One came."""
        self._failures, self._pause = 0, FIRST_PROBE_S
