"""Who may come in: as many sequences as have places, and a queue behind them; whoever is refused learns when to return.

It knows nothing of engines: a sequence is here from its opening to the end of its stream. Used on the event loop alone.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from outrider.pace import Pace
from outrider.rpc.errors import overloaded


class Admission:
    """Places in progress, and a bounded queue for them."""

    def __init__(self, places: int, max_waiting: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._places = places
        self._max_waiting = max_waiting
        self._pace = Pace(clock)
        self._inside = 0  # in progress or waiting

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Holds a place, or one in the queue, for as long as it is open.

        Raises:
            RequestError: RESOURCE_EXHAUSTED with the time to wait, where all are taken and the queue is full.
        """
        waiting = self._inside - self._places
        if waiting >= self._max_waiting:
            seconds = self._pace.refuse()
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
            self._inside -= 1
            self._pace.end(full=self._inside >= self._places)
