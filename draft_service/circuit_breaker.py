"""The circuit breaker of a verifier: whether sequences may try it after failures."""

import random
import time
from enum import StrEnum

# Seconds of the first pause, and of the longest: each failure doubles it.
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 5.0
# Random share of each pause, so that draft services do not return all at once.
JITTER = 0.5
# Seconds after which a half-open breaker admits another trial.
TRIAL_SECONDS = 1.0


class State(StrEnum):
    """State of a circuit breaker."""

    CLOSED = "closed"  # all sequences may try
    HALF_OPEN = "half_open"  # one trial at a time
    OPEN = "open"  # none may try


class Breaker:
    """A circuit breaker.

    A failed try opens it for a pause. A successful probe then makes it half-open, and a successful try closes it.
    The pause grows with each failure and is reset only by a successful try: a verifier that answers probes but fails at
    work is tried less and less. Tries that began before the breaker last opened do not count, so a hundred failures at
    once are one.

    Attributes:
        epoch: how often it has opened.
    """

    def __init__(self) -> None:
        self.state = State.CLOSED
        self.epoch = 0
        self._failures = 0  # in a row
        self._until = 0.0  # when the pause ends, while open
        self._trial: float | None = None  # when it began, while half-open

    @property
    def pause(self) -> float:
        """Seconds until a probe is due."""
        return max(0.0, self._until - time.monotonic()) if self.state is State.OPEN else 0.0

    def admits(self) -> bool:
        """Whether a try may begin now."""
        if self.state is State.HALF_OPEN:
            return self._trial is None or time.monotonic() - self._trial > TRIAL_SECONDS
        return self.state is State.CLOSED

    def begin(self) -> int:
        """Begins a try. Returns the epoch for `succeeded` or `failed`."""
        if self.state is State.HALF_OPEN:
            self._trial = time.monotonic()
        return self.epoch

    def succeeded(self, epoch: int) -> None:
        """Records a successful try."""
        if epoch == self.epoch and self.state is not State.OPEN:
            self.state, self._failures = State.CLOSED, 0

    def failed(self, epoch: int) -> None:
        """Records a failed try."""
        if epoch == self.epoch and self.state is not State.OPEN:
            self._open()

    def probed(self, *, well: bool) -> None:
        """Records a probe."""
        if not well:
            self._open()
        elif self.state is State.OPEN:
            self.state, self._trial = State.HALF_OPEN, None

    def _open(self) -> None:
        pause = min(FIRST_PAUSE * 2.0 ** min(self._failures, 30), LONGEST_PAUSE)
        self._failures += 1
        self.epoch += 1
        self.state = State.OPEN
        self._until = time.monotonic() + pause * (1 - JITTER * random.random())
