"""Who may come in: as many sequences as have places, and a queue behind them; whoever is refused learns when to return.

A sequence that was in progress elsewhere finds room behind a queue that is full of others: a verifier that dies leaves
as many as it had places, and each of them has more to lose than one that begins.

Used on the event loop alone.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from outrider.rpc.errors import overloaded
from outrider.rpc.timeouts import Pace


class Admission:
    """Places in progress, and a bounded queue for them."""

    def __init__(self, places: int, max_waiting: int, clock: Callable[[], float] | None = None) -> None:
        self._places = places
        self._max_waiting = max_waiting
        self._clock = clock or time.monotonic
        self._pace = Pace()
        self._inside = 0  # in progress or waiting
        self._leaving = 0  # in progress, and about to end for those that wait

    def retry_after(self) -> float:
        """Seconds until half of the queue has moved on."""
        return self._pace.wait(max(1, (self._inside - self._places) // 2), max(self._inside, 1))

    @contextmanager
    def give_way(self) -> Iterator[bool]:
        """Whether a sequence that holds a place idly is to end, since another one waits that has none of those ending.

        Open it until it has ended.
        """
        gives_way = self._inside - self._places > self._leaving
        self._leaving += gives_way
        try:
            yield gives_way
        finally:
            self._leaving -= gives_way

    @contextmanager
    def enter(self, *, resumed: bool = False) -> Iterator[None]:
        """Holds a place, or one in the queue, for as long as it is open.

        Args:
            resumed: the sequence was in progress elsewhere; there may be as many more of those in the queue as there
                are places.

        Raises:
            RequestError: RESOURCE_EXHAUSTED with the time to wait, where all are taken and the queue is full.
        """
        waiting = self._inside - self._places
        maximum = self._max_waiting + (self._places if resumed else 0)
        if waiting >= maximum:
            seconds = self.retry_after()
            raise overloaded(
                f"{waiting} sequences wait for room already, at most {maximum}; try again in about {seconds:.2g} s",
                retry_after=seconds,
                waiting=waiting,
                maximum=maximum,
            )
        self._inside += 1
        came = self._clock()
        try:
            yield
        finally:
            self._inside -= 1
            self._pace.end(self._clock() - came)
