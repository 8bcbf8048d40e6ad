"""Whether a loop goes round: how long its step of now has lasted, and how long is too long. It knows no clock but the
one of the machine, and nothing of what a step does.
"""

import time
from collections.abc import Callable

# However short the bound that is set: a step may last this many times the longest one that ended.
TIMES_THE_LONGEST = 4.0


class Heartbeat:
    """Of a loop on a thread of its own, which tells when a step begins and when it rests; any thread may ask.

    Attributes:
        longest: seconds of the longest step that has ended.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """`clock` tells seconds."""
        self.longest = 0.0
        self._clock = clock
        self._since: float | None = None

    def begin(self) -> None:
        """A step begins, and with it the one before has ended."""
        now = self._clock()
        self._end(now)
        self._since = now

    def rest(self) -> None:
        """The loop waits for work; for how long does not matter."""
        self._end(self._clock())
        self._since = None

    def step_seconds(self) -> float:
        """How long the step of now has lasted; 0 while the loop rests."""
        since = self._since
        return 0.0 if since is None else max(0.0, self._clock() - since)

    def is_stuck(self, bound: float) -> bool:
        """Whether the step of now lasts longer than `bound` seconds, and much longer than any that ended."""
        return self.step_seconds() > max(bound, TIMES_THE_LONGEST * self.longest)

    def _end(self, now: float) -> None:
        if self._since is not None:
            self.longest = max(self.longest, now - self._since)
