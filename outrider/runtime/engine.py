"""The engine both services drive: one thread that owns a model and runs it, step after step.

A turn of its loop is receive → linger → schedule → step, and a step is forward → process. A subclass says what a
message means, what goes into a step, and what becomes of its output.
"""

import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Generic, TypeVar

import structlog
import torch

from outrider.runtime.device import is_lost, work_on
from outrider.runtime.errors import ModelLost
from outrider.runtime.model_runner import ModelRunner

# However short the bound that is set: a step may last this many times the longest one that ended.
TIMES_THE_LONGEST = 4.0


class Heartbeat:
    """Of a loop on a thread of its own, which tells when a step begins and when it rests; any thread may ask.

    Attributes:
        longest: seconds of the longest step that has ended.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """`clock` tells seconds."""
        self.longest = 0.0
        self._clock = clock
        self._since: float | None = None

    def begin(self) -> None:
        """A step begins, and with it the one before has ended."""
        now = self._clock()
        self._end(now)
        self._since = now

    def rest(self) -> None:
        """The loop waits for work; for how long does not matter."""
        self._end(self._clock())
        self._since = None

    def step_seconds(self) -> float:
        """How long the step of now has lasted; 0 while the loop rests."""
        since = self._since
        return 0.0 if since is None else max(0.0, self._clock() - since)

    def is_stuck(self, bound: float) -> bool:
        """Whether the step of now lasts longer than `bound` seconds, and much longer than any that ended."""
        return self.step_seconds() > max(bound, TIMES_THE_LONGEST * self.longest)

    def _end(self, now: float) -> None:
        if self._since is not None:
            self.longest = max(self.longest, now - self._since)


_log = structlog.get_logger()


Message = TypeVar("Message")
Work = TypeVar("Work")
Output = TypeVar("Output")

# How long `stop` waits for the pass under way: nobody waits for that one any more, and it may never end.
STOP_SECONDS = 3.0


class Engine(ABC, Generic[Message, Work, Output]):
    """A thread that runs one model. The methods below the line run on that thread alone, so none of them locks.

    Attributes:
        heartbeat: of the loop, once `prepare` is done.
        lost: done with the reason once no step will ever run again, since the loop has ended with an error.
    """

    def __init__(self, model_runner: ModelRunner, *, name: str, threads: int | None = None) -> None:
        self.model_runner = model_runner
        self.heartbeat = Heartbeat()
        self.lost: Future[str] = Future()
        self._threads = threads
        self._inbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._is_stopping = False  # `stop` was called
        self._is_over = False  # and the loop has reached that message
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.pass_started = 0.0  # time.perf_counter() at the start of the last step
        self.pass_ended = 0.0  # the same at its end
        self.forward_seconds = 0.0  # how long its forward took

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after the step it is in, and waits for it, for some seconds. Work left over is dropped."""
        self._is_stopping = True
        self._inbox.put(None)
        if self._thread.is_alive():
            self._thread.join(STOP_SECONDS)

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def trouble(self, bound: float) -> str:
        """Why no step will come any more, as far as one can tell; empty while all is well, and before `start`.

        A step may last `bound` seconds, or some times the longest so far where that is more.
        """
        if self._thread.ident is None or self._is_stopping:
            return ""
        if not self.alive:
            return self.lost.result() if self.lost.done() else "the engine's thread has ended"
        if self.heartbeat.is_stuck(bound):
            return f"the engine's step has lasted {self.heartbeat.step_seconds():.0f} s"
        return ""

    def post(self, message: Message) -> None:
        """Hands a message to the engine. Any thread may call it; it does not wait."""
        self._inbox.put(message)

    # ---------------------------------------------------------------------------------------- on the engine's thread

    def prepare(self) -> None:
        """Called once, before the first message. Does nothing where a subclass has nothing to prepare."""

    @abstractmethod
    def receive(self, message: Message) -> None:
        """Takes in one message. Must not raise for what a client sent: that was checked before."""

    def linger(self) -> float:
        """Seconds that the next step is held back for further messages; asked again after each. 0: none."""
        return 0.0

    @abstractmethod
    def schedule(self) -> Sequence[Work]:
        """What goes into the next step; empty where nothing is ready, upon which the engine waits for a message."""

    @abstractmethod
    def forward(self, work: Sequence[Work]) -> Output:
        """Runs the model. If it raises, no slot of the KV pool has changed its length."""

    @abstractmethod
    def process(self, work: Sequence[Work], output: Output) -> None:
        """Takes what `forward` made of the same work. An error with one sequence ends that sequence alone."""

    @abstractmethod
    def fail(self, work: Work, error: Exception, *, is_own: bool) -> None:
        """Ends the sequence of a work whose forward failed twice: in its step, and then alone. `is_own` says that not
        every sequence of that step failed, or that it was the only one.
        """

    def idle(self) -> float | None:
        """Called before the thread sleeps until the next message; returns for how many seconds at most, None: for ever.
        Does nothing else where a subclass has nothing to do.
        """
        return None

    # ------------------------------------------------------------------------------------------------------ the loop

    def turn(self) -> float | None:
        """One turn of the loop, which never blocks.

        Returns:
            Seconds to wait for a message before the next turn: 0 where there is more to do at once, None for as long
            as it takes.

        Raises:
            ModelLost: no step will ever run again.
        """
        work, seconds = self.next_work()
        if work:
            self.step(work)
        return seconds

    def next_work(self) -> tuple[Sequence[Work], float | None]:
        """The first half of a turn: what goes into the next step, and what `turn` returns after it."""
        self._receive_all()
        if self._is_over:
            return [], 0.0
        if (seconds := self.linger()) > 0:
            return [], seconds
        work = self.schedule()
        if not work:
            return [], self.idle()
        self.pass_started = time.perf_counter()
        return work, 0.0

    def step(self, work: Sequence[Work]) -> None:
        """The second half: runs the model over the work."""
        self._step(work)
        self.pass_ended = time.perf_counter()

    def _step(self, work: Sequence[Work]) -> None:
        try:
            output = self._forward(work)
        except ModelLost:
            raise
        except Exception:
            _log.exception("step failed; its sequences run one at a time", sequences=len(work))
            self._step_one_by_one(work)
        else:
            self.process(work, output)

    def _step_one_by_one(self, work: Sequence[Work]) -> None:
        """So that one sequence that breaks every step it is in takes no other with it."""
        failures: list[tuple[Work, Exception]] = []
        for item in work:
            try:
                output = self._forward([item])
            except ModelLost:
                raise
            except Exception as error:
                _log.exception("step failed again, with one sequence alone")
                failures.append((item, error))
            else:
                self.process([item], output)
        is_own = len(failures) < len(work) or len(work) == 1
        for item, reason in failures:
            self.fail(item, reason, is_own=is_own)

    def _forward(self, work: Sequence[Work]) -> Output:
        started = time.perf_counter()
        try:
            output = self.forward(work)
        except ModelLost:
            raise
        except Exception as error:
            if is_lost(self.model_runner.loaded.device):
                raise ModelLost(f"the device is lost: {type(error).__name__}: {error}") from error
            raise
        self.forward_seconds = time.perf_counter() - started
        return output

    def _run(self) -> None:
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        work_on(self.model_runner.loaded.device)
        with torch.inference_mode():
            try:
                self.prepare()
                while not self._is_over:
                    self.heartbeat.begin()
                    self._wait(self.turn())
            except Exception as error:  # the service ends, and its sequences go on elsewhere
                _log.exception("the engine ends")
                self.lost.set_result(str(error) if isinstance(error, ModelLost) else f"{type(error).__name__}: {error}")

    def _wait(self, seconds: float | None) -> None:
        """Waits so long for a message, and takes it in."""
        if seconds == 0:
            return
        self.heartbeat.rest()
        with suppress(queue.Empty):
            message = self._inbox.get(timeout=seconds)
            self.heartbeat.begin()
            self._receive_one(message)

    def _receive_all(self) -> None:
        while not self._inbox.empty():  # this thread alone takes from it
            self._receive_one(self._inbox.get_nowait())

    def _receive_one(self, message: Message | None) -> None:
        if message is None:
            self._is_over = True
        else:
            self.receive(message)
