"""A circuit breaker: whether somebody is worth trying, judged by how the last tries went."""

import random
import time
from collections.abc import Callable
from enum import StrEnum

# The pause after the first failure, and the longest: it doubles from one failure to the next.
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 5.0
# Of each pause the last so much is left to chance, so that not all come back at once.
JITTER = 0.5
# A trial that has said nothing for so long does not keep the next from being made.
TRIAL_SECONDS = 1.0


class State(StrEnum):
    """Of a breaker."""

    CLOSED = "closed"  # all may try
    HALF_OPEN = "half_open"  # one at a time
    OPEN = "open"  # nobody


class Breaker:
    """Closed until a try fails; then open for a pause; then half-open, once a probe has gone well, until a try does.

    The failures in a row, which the pause grows with, are forgotten with the first try that goes well, and not before:
    somebody who answers probes and fails at work is tried more and more seldom. Tries that were begun before it opened
    last count for nothing: a hundred that fail at once are one failure.

    Attributes:
        state: where it stands.
        epoch: how often it has opened.
    """

    def __init__(
        self, *, clock: Callable[[], float] | None = None, chance: Callable[[], float] = random.random
    ) -> None:
        """`clock` tells seconds, and `chance` draws from [0, 1)."""
        self.state = State.CLOSED
        self.epoch = 0
        self._clock = clock or time.monotonic
        self._chance = chance
        self._failures = 0  # in a row
        self._until = 0.0  # when the pause ends, while open
        self._trial: float | None = None  # when it began, while half-open

    @property
    def pause(self) -> float:
        """Seconds until a probe is due; 0 where one is, and where it is not open."""
        return max(0.0, self._until - self._clock()) if self.state is State.OPEN else 0.0

    def admits(self) -> bool:
        """Whether a try may begin now."""
        if self.state is State.HALF_OPEN:
            return self._trial is None or self._clock() - self._trial > TRIAL_SECONDS
        return self.state is State.CLOSED

    def begin(self) -> int:
        """A try begins; returns the epoch to name with what becomes of it."""
        if self.state is State.HALF_OPEN:
            self._trial = self._clock()
        return self.epoch

    def succeeded(self, epoch: int) -> bool:
        """A try went well; says whether that closed it."""
        if epoch != self.epoch or self.state is State.OPEN:
            return False
        was, self.state, self._failures = self.state, State.CLOSED, 0
        return was is not State.CLOSED

    def failed(self, epoch: int) -> bool:
        """A try failed; says whether that opened it."""
        if epoch != self.epoch or self.state is State.OPEN:
            return False
        self._open()
        return True

    def probed(self, *, well: bool) -> None:
        """A probe was made, the pause being over."""
        if self.state is not State.OPEN:
            return
        if well:
            self.state, self._trial = State.HALF_OPEN, None
        else:
            self._open()

    def _open(self) -> None:
        pause = min(FIRST_PAUSE * 2.0 ** min(self._failures, 30), LONGEST_PAUSE)
        self._failures += 1
        self.epoch += 1
        self.state = State.OPEN
        self._until = self._clock() + pause * (1 - JITTER * self._chance())
