"""Whether to do something that ought to make rounds shorter: told by how long they take with it and without.

It looks at times alone, so its choice tells nothing of any token. It does not know what is being tried.
"""

import math
import random
import statistics

# Rounds of a trial, with and without in random order; rounds until the first, and between two at most.
TRIAL_ROUNDS = 48
FIRST_PAUSE, LONGEST_PAUSE = 64, 2048

# Of what a trial has shown, this much is left after the next.
_MEMORY = 0.7

# Standard errors that a difference has to be, for the way to change.
_CERTAIN = 2.0

# A round that took so many times the median was held up by something else.
_OUTLIER = 3.0


class _Sums:
    """Count, mean and variance of what one way has shown, older trials counting less."""

    def __init__(self) -> None:
        self._n = self._sum = self._squares = 0.0

    def add(self, values: list[float]) -> None:
        self._n = _MEMORY * self._n + len(values)
        self._sum = _MEMORY * self._sum + sum(values)
        self._squares = _MEMORY * self._squares + sum(value * value for value in values)

    @property
    def mean(self) -> float:
        return self._sum / self._n

    @property
    def variance_of_mean(self) -> float:
        return max(0.0, self._squares / self._n - self.mean**2) / self._n


class Trial:
    """Goes the way that has been faster, and tries both now and then, side by side.

    Only what differs by more than twice its standard error changes the way, so noise seldom does; while nothing
    changes, trials become rare.
    """

    def __init__(self) -> None:
        self._best = True
        self._shown = {True: _Sums(), False: _Sums()}
        self._seconds: dict[bool, list[float]] | None = None  # of the trial under way
        self._pause = self._until = FIRST_PAUSE
        self._coin = random.Random(0)

    @property
    def best(self) -> bool:
        """Whether it has been found to pay; True before anything was found."""
        return self._best

    def choose(self) -> bool:
        """Whether to do it in a round that begins now."""
        return self._best if self._seconds is None else self._coin.random() < 0.5

    def add(self, seconds: float, *, on: bool) -> None:
        """A round took so long, with it or without."""
        if not 0 <= seconds < math.inf:
            return
        if self._seconds is None:
            self._until -= 1
            if self._until <= 0:
                self._seconds = {True: [], False: []}
            return
        self._seconds[on].append(seconds)
        if min(map(len, self._seconds.values())) >= TRIAL_ROUNDS // 2:
            self._decide(self._seconds)
            self._seconds = None

    def _decide(self, seconds: dict[bool, list[float]]) -> None:
        # In medians of this trial: the machine may be another speed today.
        median = statistics.median(seconds[True] + seconds[False])
        if not median > 0:  # the clock stands still
            self._until = self._pause
            return
        for way, values in seconds.items():
            self._shown[way].add([min(value / median, _OUTLIER) for value in values])
        with_it, without = self._shown[True], self._shown[False]
        gain = without.mean - with_it.mean
        error = math.sqrt(with_it.variance_of_mean + without.variance_of_mean)
        if abs(gain) > _CERTAIN * error and (gain > 0) is not self._best:
            self._best = not self._best
            self._pause = FIRST_PAUSE
        else:
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
        self._until = self._pause
