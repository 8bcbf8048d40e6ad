"""How long a pass is held back for sequences that are about to answer.

Sequences that miss a pass get one of their own, so that without this many streams settle into two half-batches that
alternate, and each round pays the fixed cost of a pass twice. Held back for no longer than that fixed cost, a pass
never loses more than the pass that it may save. Only times are looked at, never a token (invariant 4).
"""

from collections.abc import Iterable
from dataclasses import dataclass

# Share of a running mean that the last turnaround is.
RECENT = 0.125
# A sequence is late when it takes longer than its mean by so many mean deviations; nobody waits for the late.
LATE = 2.0
# Turnarounds beyond so many seconds say nothing of the next one.
LONGEST = 3600.0


@dataclass(slots=True)
class Turnaround:
    """From a verdict to the next round of the same sequence, in seconds: the running mean, and the mean deviation."""

    mean: float = 0.0
    deviation: float = 0.0
    count: int = 0

    def add(self, seconds: float) -> None:
        """Takes in one more; what is no time is left out."""
        if not 0 <= seconds < LONGEST:
            return
        if self.count == 0:
            self.mean, self.deviation = seconds, seconds / 2
        else:
            self.deviation += RECENT * (abs(seconds - self.mean) - self.deviation)
            self.mean += RECENT * (seconds - self.mean)
        self.count += 1

    def latest(self) -> float | None:
        """The longest that is no surprise; None where nothing is known."""
        return self.mean + LATE * self.deviation if self.count else None


def seconds_to_linger(now: float, since: float, due: Iterable[float], bound: float) -> float:
    """How much longer to hold back a pass.

    Args:
        now: the time, in seconds, as all times here.
        since: from when on the pass could have begun.
        due: by when each sequence that owes an answer should have given it.
        bound: how long after `since` is the longest that pays.

    Returns:
        Until the last of those that are due within the bound; 0 where there is none.
    """
    return min(max((time - now for time in due if now < time <= since + bound), default=0.0), bound)
