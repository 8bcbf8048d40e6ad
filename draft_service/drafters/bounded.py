"""Guesses within a bound of time, made on a thread of their own: a guesser that hangs delays a step only once."""

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from draft_service.drafters.guessing import Guesser, Guesses

BOUND_SECONDS = 1.0
"""What the guesses of one pass may take, all together. They take some microseconds; this is a hang."""

MOST_HUNG = 4
"""Threads that may hang at once: after these nobody guesses any more."""


class LateGuesser(Guesser):
    """A guesser that is made where it works."""

    def __init__(self, make: Callable[[], Guesser]) -> None:
        self._make = make
        self._made: Guesser | None = None

    def read(self, tokens: Sequence[int]) -> None:
        self._guesser().read(tokens)

    def guess(self, count: int, ahead: Sequence[int] = ()) -> Guesses:
        return self._guesser().guess(count, ahead)

    def _guesser(self) -> Guesser:
        if self._made is None:
            self._made = self._make()
        return self._made


@dataclass(eq=False, slots=True)
class Guessing:
    """One guesser's turn: to read, and then to guess.

    Attributes:
        count: tokens to guess; 0 is to read alone.
        ahead: what follows all that was read, and may be taken back.
        guesses: what it guessed; None where it has not come to its turn.
        error: what it raised, or `TimeoutError` where the bound passed in its turn.
    """

    guesser: Guesser
    unread: Sequence[int]
    count: int
    ahead: Sequence[int]
    guesses: Guesses | None = None
    error: Exception | None = None

    def take(self) -> None:
        try:
            if self.unread:
                self.guesser.read(self.unread)
            self.guesses = self.guesser.guess(self.count, self.ahead) if self.count else []
        except Exception as error:
            self.error = error


@dataclass(eq=False, slots=True)
class _Pass:
    """The turns of one pass. Whoever waits for them may end it: then the turn under way has hung, and none follows."""

    turns: Sequence[Guessing]
    done: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _under_way: Guessing | None = None
    _is_over: bool = False

    def run(self) -> None:
        for turn in self.turns:
            with self._lock:
                if self._is_over:
                    return
                self._under_way = turn
            turn.take()
        with self._lock:
            self._under_way = None
        self.done.set()

    def end(self) -> Guessing | None:
        """Ends it; the turn that hangs, if one does."""
        with self._lock:
            self._is_over = True
            return self._under_way


class BoundedGuessers:
    """Takes guessers' turns, for one thread that waits for them.

    Attributes:
        hung: threads that hang in a guesser. They are daemons, and do not keep the process from ending.
    """

    def __init__(self, name: str, *, seconds: float = BOUND_SECONDS) -> None:
        """`name` is what the threads are called by."""
        self._name = name
        self._seconds = seconds
        self._threads: list[_Thread] = []
        self._free: _Thread | None = None

    @property
    def hung(self) -> int:
        return sum(thread.is_busy for thread in self._threads)

    def run(self, turns: Sequence[Guessing]) -> None:
        """Takes them one after the other, and returns in time. What a turn came to is in it."""
        if self._free is None:
            self._threads = [thread for thread in self._threads if thread.is_busy]
            if len(self._threads) >= MOST_HUNG:
                return
            self._free = _Thread(self._name)
        passed, thread = _Pass(turns), self._free
        thread.begin(passed.run)
        if passed.done.wait(self._seconds):
            thread.is_busy = False
            return
        hanging = passed.end()
        if hanging is None:  # it ended just now
            thread.is_busy = False
            return
        hanging.guesses, hanging.error = None, TimeoutError(f"no guess came within {self._seconds:g} s")
        thread.leave()
        self._threads.append(thread)
        self._free = None


class _Thread(threading.Thread):
    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self.is_busy = False
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.start()

    def begin(self, job: Callable[[], None]) -> None:
        self.is_busy = True
        self._jobs.put(job)

    def leave(self) -> None:
        """Nobody has another job for it."""
        self._jobs.put(None)

    def run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
        self.is_busy = False
