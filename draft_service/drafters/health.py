"""Whether a drafter works at all, over all its sequences: a circuit breaker that only a probe opens.

Failures of sequences raise a suspicion and no more, since a client's own parameters or prompts may cause them.
"""

import time
from collections.abc import Callable

FAILURES_IN_A_ROW = 5
"""After so many, with no proposal between them, the drafter is probed. It is off where the probe fails too."""

FIRST_PROBE_S, LATEST_PROBE_S = 1.0, 10.0
"""Seconds between two probes, at least; doubled each time one fails, up to the most."""


class Health:
    """One drafter's.

    Attributes:
        is_well: whether sequences may ask it.
    """

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self.is_well = True
        self._clock = clock or time.monotonic
        self._failures = 0
        self._pause = FIRST_PROBE_S
        self._probe_at = self._clock()

    def needs_probe(self) -> bool:
        """Whether it is to be probed now."""
        is_suspect = not self.is_well or self._failures >= FAILURES_IN_A_ROW
        return is_suspect and self._clock() >= self._probe_at

    def failed(self) -> None:
        """A sequence's proposal did not come."""
        self._failures += 1

    def proposed(self) -> None:
        """One came."""
        self._failures, self._pause, self.is_well = 0, FIRST_PROBE_S, True

    def probed(self, *, well: bool) -> None:
        """A probe has ended."""
        if well:
            self.proposed()
            self._probe_at = self._clock() + FIRST_PROBE_S
        else:
            self.is_well = False
            self._probe_at = self._clock() + self._pause
            self._pause = min(2 * self._pause, LATEST_PROBE_S)
