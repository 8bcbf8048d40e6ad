"""The time that a draft has while verdicts are under way: how much of it is left."""

from collections.abc import Hashable

from outrider.service.cost_model import LONGEST_PASS, FittedCost

# Weight of the newest of what is measured again and again.
_NEWEST = 0.2

# A wait of so many times the mean is another kind of wait: a slow client, a pause of the machine.
_OUTLIER = 4.0


# Seconds: no step takes less, so it was the clock that stood still.
LEAST_STEP = 1e-9

# Steps that are planned at once at most.
MOST_STEPS = 1024


class _Mean:
    """A mean that forgets, and the mean distance from it."""

    def __init__(self) -> None:
        self.value: float | None = None
        self.spread = 0.0

    def add(self, value: float) -> None:
        if self.value is None:
            self.value, self.spread = value, value / 2
            return
        self.spread += _NEWEST * (abs(value - self.value) - self.spread)
        self.value += _NEWEST * (value - self.value)


class SpareTime:
    """Says how many steps of drafting are done before somebody is likely to ask for a proposal.

    Whoever asks while something else is drafted has to wait for it, so what is begun has to be done by then.
    """

    def __init__(self) -> None:
        self._wait = _Mean()  # from a proposal's leaving to the next asking
        self._step: FittedCost | None = None  # seconds that a step takes, by the sequences that take it together
        self._left: dict[Hashable, float] = {}  # who is expected to ask, and since when

    def step_seconds(self, width: int) -> float:
        """What a step takes that so many sequences take together; 0 before the first."""
        return 0.0 if self._step is None else self._step.line.seconds(width)

    def spent(self, width: int, steps: int, seconds: float) -> None:
        """So many steps of so many sequences took so long."""
        if steps < 1 or width < 1:
            return
        each = seconds / steps
        if not LEAST_STEP <= each <= LONGEST_PASS:
            return
        if self._step is None:  # until other widths tell, two take twice as long as one
            self._step = FittedCost([(width, each), (2 * width, 2 * each)])
        else:
            self._step.add(width, each)

    def left(self, who: Hashable, now: float) -> None:
        """A proposal has left; its sequence will ask for another."""
        self._left[who] = now

    def asked(self, who: Hashable, now: float) -> None:
        """It asks."""
        since = self._left.pop(who, None)
        if since is None:
            return
        wait = max(0.0, now - since)
        if not self._wait.value or wait < _OUTLIER * self._wait.value:
            self._wait.add(wait)

    def gone(self, who: Hashable) -> None:
        """It will ask no more."""
        self._left.pop(who, None)

    def steps(self, now: float, width: int) -> int:
        """How many steps of `width` are done before the first is likely to ask; 0 while nothing is known."""
        step = self.step_seconds(width)
        if self._wait.value is None or not step > 0:
            return 0
        wait = self._wait.value - self._wait.spread / 2
        rest = min((since + wait - now for since in self._left.values() if now - since < _OUTLIER * wait), default=0.0)
        return max(0, int(min(rest / step, MOST_STEPS)))
