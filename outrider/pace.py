"""How soon a place will be free: the pace at which places are given back while all are taken.

It knows nothing of what a place is, or of who is refused one. Used on one thread.
"""

import time
from collections.abc import Callable

# Seconds between two ends, before two were seen while all places were taken.
FIRST_GUESS = 1.0
# Share of the mean that the last interval is.
RECENT = 0.2
LEAST_WAIT, LONGEST_WAIT = 0.1, 60.0


class Pace:
    """The mean time between two ends, and how many wait for one elsewhere."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._interval = FIRST_GUESS  # mean seconds between two ends while all places are taken
        self._last_end: float | None = None  # None where places have been free since
        self._refused = 0  # places, since the last end

    def end(self, *, full: bool) -> None:
        """A place was given back; `full` is whether all are taken still, by those who waited."""
        now = self._clock()
        if self._last_end is not None:
            self._interval += RECENT * (now - self._last_end - self._interval)
        self._refused = max(0, self._refused - 1)
        self._last_end = now if full else None  # an idle place says nothing of the pace

    def refuse(self, places: int = 1) -> float:
        """How many seconds whoever is refused so many places should wait: until those before it have had theirs."""
        self._refused += places
        since = 0.0 if self._last_end is None else self._clock() - self._last_end
        pace = max(self._interval, since)  # slower than the mean by now
        return min(max(self._refused * pace, LEAST_WAIT), LONGEST_WAIT)
