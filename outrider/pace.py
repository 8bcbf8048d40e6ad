"""How long to wait before trying a full service again, by how long sequences have been in progress of late."""

# Seconds, before any sequence has ended.
FIRST_GUESS = 1.0
# Share of the mean that the last sequence is.
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
        """Seconds until about so many of `running` sequences have ended (Little's law)."""
        if self._mean is None:
            return FIRST_GUESS
        return min(max(ends * self._mean / running, LEAST_WAIT), LONGEST_WAIT)
