"""Who may come in: as many sequences as have places, and a queue behind them; whoever is refused learns when to return.

It knows nothing of engines: a sequence is here from its opening to the end of its stream. Used on the event loop alone.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from outrider.rpc.errors import overloaded

# Seconds between two ends, before two were seen while all places were taken.
FIRST_GUESS = 1.0
# Share of the mean that the last interval is.
RECENT = 0.2
LEAST_WAIT, LONGEST_WAIT = 0.1, 60.0


class Admission:
    """Places in progress, and a bounded queue for them."""

    def __init__(self, places: int, max_waiting: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._places = places
        self._max_waiting = max_waiting
        self._clock = clock
        self._inside = 0  # in progress or waiting
        self._interval = FIRST_GUESS  # mean seconds between two ends while all places are taken
        self._last_end: float | None = None  # None where places have been free since
        self._refused = 0  # since the last end

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Holds a place, or one in the queue, for as long as it is open.

        Raises:
            RequestError: RESOURCE_EXHAUSTED with the time to wait, where all are taken and the queue is full.
        """
        waiting = self._inside - self._places
        if waiting >= self._max_waiting:
            self._refused += 1
            seconds = self._wait()
            raise overloaded(
                f"{waiting} sequences wait for room already, at most {self._max_waiting}; "
                f"try again in about {seconds:.2g} s",
                retry_after=seconds,
                waiting=waiting,
                maximum=self._max_waiting,
            )
        self._inside += 1
        try:
            yield
        finally:
            self._leave()

    def _leave(self) -> None:
        now = self._clock()
        if self._last_end is not None:
            self._interval += RECENT * (now - self._last_end - self._interval)
        self._inside -= 1
        self._refused = max(0, self._refused - 1)
        self._last_end = now if self._inside >= self._places else None  # an idle place says nothing of the pace

    def _wait(self) -> float:
        """Until one place in the queue is free for each that was turned away since, at the pace of late."""
        since = 0.0 if self._last_end is None else self._clock() - self._last_end
        pace = max(self._interval, since)  # slower than the mean by now
        return min(max(self._refused * pace, LEAST_WAIT), LONGEST_WAIT)
