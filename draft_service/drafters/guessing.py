"""Drafters that are plain Python: the seam, and the way to them off the event loop.

A guesser computes where it is called; drafted for a request, that is a worker's thread.
"""

import asyncio
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence

from draft_service.drafters.base import UNBOUNDED, Draft, Drafter, Drafting, DraftSequence
from kernels.rng import Domain
from kernels.sparse import SparseDistribution
from kernels.verify import Rule

Guesses = list[tuple[int, SparseDistribution | None]]
"""Tokens, and the law that each was sampled from; None is the point mass."""

STALLED_AFTER_S = 0.05
"""A job that takes longer does not hold up the others."""

MAX_WORKERS = 4
"""Threads of one drafter at most: so many of its jobs may hang before the others wait."""


class Guesser(ABC):
    """One sequence of a drafter that computes where it is called. Threads take turns with it."""

    @abstractmethod
    def read(self, tokens: Sequence[int]) -> None:
        """Takes in what was committed: the prompt first, then each verdict."""

    @abstractmethod
    def guess(self, count: int, ahead: Sequence[int] = ()) -> Guesses:
        """Up to `count` tokens after what was read and `ahead`, which may be taken back and leaves no trace."""


class GuessingDrafter(Drafter):
    """A drafter made of guessers, which work on threads of their own."""

    def __init__(self, name: str) -> None:
        """`name` is what its threads are called by."""
        self._workers = Workers(name)

    @abstractmethod
    def guesser(self, sequence: DraftSequence, domain: Domain = Domain.DRAFT) -> Guesser:
        """One that has read nothing yet; what it draws, it draws in `domain`. Any thread may call it."""

    def open(self, sequence: DraftSequence) -> Drafting:
        return _Guessing(lambda: self.guesser(sequence), sequence, self._workers)


class Workers:
    """Jobs one after the other on a thread; where one stalls, another thread takes over what waits behind it.

    Belongs to the event loop. The threads are daemons: one that hangs does not keep the process from ending.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._threads: list[_Worker] = []  # the last is in charge, the others stalled and end with their job
        self._watches = False

    def post(self, job: Callable[[], None]) -> None:
        """Hands over a job, which must not raise."""
        self._jobs.put(job)
        if not self._threads:
            self._begin()
        if not self._watches:
            self._watch()

    def _begin(self) -> None:
        self._threads.append(_Worker(self._name, self._jobs))
        self._threads[-1].start()

    def _watch(self) -> None:
        self._watches = True
        asyncio.get_running_loop().call_later(STALLED_AFTER_S, self._look, self._threads[-1].jobs)

    def _look(self, before: int) -> None:
        self._watches = False
        self._threads = [each for each in self._threads if each.is_alive()]
        if self._jobs.empty():
            return
        if self._threads[-1].jobs == before and len(self._threads) < MAX_WORKERS:
            self._threads[-1].relieved = True
            self._begin()
        self._watch()


class _Worker(threading.Thread):
    """Attributes: `jobs` begun, and whether another thread has taken over."""

    def __init__(self, name: str, queued: "queue.SimpleQueue[Callable[[], None]]") -> None:
        super().__init__(name=name, daemon=True)
        self.jobs = 0
        self.relieved = False
        self._queued = queued

    def run(self) -> None:
        while not self.relieved:
            job = self._queued.get()
            self.jobs += 1
            job()


class _Guessing(Drafting):
    def __init__(self, begin: Callable[[], Guesser], sequence: DraftSequence, workers: Workers) -> None:
        self._begin = begin
        self._guesser: Guesser | None = None  # made where it works, since to read a long prompt takes its time
        self._tells_laws = sequence.rule is not Rule.COUPLED
        self._workers = workers
        self._unread = [*sequence.prompt, *sequence.committed]
        self._loop = asyncio.get_running_loop()

    def room(self) -> int:
        return UNBOUNDED

    def advance(self, tokens: Sequence[int]) -> None:
        self._unread.extend(tokens)

    def propose(self, gamma: int) -> Awaitable[Draft]:
        future: asyncio.Future[Draft] = self._loop.create_future()
        unread, self._unread = self._unread, []
        asked = time.perf_counter()

        def job() -> None:
            if future.cancelled():  # whoever asked has left meanwhile
                return
            result: Draft | Exception
            try:
                guesses = self._work(unread, gamma)
                laws = [law for _, law in guesses] if self._tells_laws else []
                result = Draft([token for token, _ in guesses], [*laws], time.perf_counter() - asked)
            except Exception as error:
                result = error
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(settle, future, result)

        self._workers.post(job)
        return future

    def close(self) -> None:
        """Nothing is held."""

    def _work(self, unread: Sequence[int], gamma: int) -> Guesses:
        if self._guesser is None:
            self._guesser = self._begin()
        self._guesser.read(unread)
        return self._guesser.guess(gamma)


def settle(future: "asyncio.Future[Draft]", result: Draft | Exception) -> None:
    """Gives a proposal, or what became of it, to whoever awaits it. On the event loop."""
    if future.done():  # nobody waits any more
        return
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)
