"""The engine of both services: one thread that owns a model and runs it step by step.

The loop is receive → linger → schedule → forward → process. A subclass defines the messages, the schedule, and the use
of the output.
"""

import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Generic, TypeVar

import structlog
import torch

from outrider.runtime.device import is_lost, work_on
from outrider.runtime.errors import ModelLost
from outrider.runtime.model_runner import ModelRunner

_log = structlog.get_logger()

Message = TypeVar("Message")
Work = TypeVar("Work")
Output = TypeVar("Output")

# A step counts as stuck only if it also lasts this many times longer than the longest step so far.
TIMES_THE_LONGEST = 4.0
# How long `stop` waits for the step under way, which may never end.
STOP_SECONDS = 3.0


class Engine(ABC, Generic[Message, Work, Output]):
    """A thread that runs one model. `prepare` and the methods below it run on that thread only, so they need no locks.

    Attributes:
        leaving_seconds: how long the thread waits after a step without further work: the event loop, which needs the
            interpreter's lock, sends the replies first.
        lost: completes with the reason when the loop ends with an error: no step will run again.
    """

    leaving_seconds = 0.2e-3

    def __init__(self, model_runner: ModelRunner, *, name: str, threads: int | None = None) -> None:
        self.model_runner = model_runner
        self.lost: Future[str] = Future()
        self._threads = threads
        self._inbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._is_stopping = False  # `stop` was called
        self._is_over = False  # the loop has received that message
        self._since: float | None = None  # when the current iteration of the loop began; None while it waits
        self._longest = 0.0  # seconds of the longest iteration before
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.step_started = 0.0  # time.perf_counter() at the start of the last step
        self.step_ended = 0.0  # the same at its end
        self.forward_seconds = 0.0  # how long its forward took

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after its current step. Waits for `STOP_SECONDS` at most; remaining work is dropped."""
        self._is_stopping = True
        self._inbox.put(None)
        if self._thread.is_alive():
            self._thread.join(STOP_SECONDS)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def failure(self, bound: float) -> str:
        """Why the engine can run no more steps; empty while it can, before `start` and after `stop`.

        A step that lasts longer than `bound` seconds, and much longer than the longest before, counts as stuck.
        """
        if self._thread.ident is None or self._is_stopping:
            return ""
        if not self.alive:
            return self.lost.result() if self.lost.done() else "the engine's thread has ended"
        if (seconds := self.step_seconds()) > max(bound, TIMES_THE_LONGEST * self._longest):
            return f"the engine's step has lasted {seconds:.0f} s"
        return ""

    def step_seconds(self) -> float:
        """Seconds since the current step began; 0 while the loop waits for work. Any thread may call it."""
        since = self._since
        return 0.0 if since is None else time.perf_counter() - since

    def post(self, message: Message) -> None:
        """Queues a message for the engine. Any thread may call it; it does not block."""
        self._inbox.put(message)

    # ---------------------------------------------------------------------------------------- on the engine's thread

    def prepare(self) -> None:
        """Called once, before the first message."""

    @abstractmethod
    def receive(self, message: Message) -> None:
        """Handles one message. Must not raise for client input: services check it before."""

    def linger(self) -> float:
        """Seconds to hold back the next step for further messages; called again after each message. 0: do not wait."""
        return 0.0

    @abstractmethod
    def schedule(self) -> Sequence[Work]:
        """The work of the next step. If it is empty, the engine waits for a message."""

    @abstractmethod
    def forward(self, work: Sequence[Work]) -> Output:
        """Runs the model. If it raises, no slot of the KV pool has changed its length."""

    @abstractmethod
    def process(self, work: Sequence[Work], output: Output) -> None:
        """Handles the output of `forward` for the same work. An error of one sequence must end only that sequence."""

    @abstractmethod
    def fail(self, work: Work, error: Exception, *, is_at_fault: bool) -> None:
        """Ends the sequence of a work whose forward failed twice: in its step, and then alone.

        Args:
            work: the sequence's part of the step.
            error: of the second forward.
            is_at_fault: whether the sequence is the cause: another one of the step succeeded, or it ran alone.
        """

    def has_work(self) -> bool:
        """Whether the next step should follow at once. If not, the thread waits until replies have left."""
        return True

    def idle(self) -> float | None:
        """Called before the thread waits for a message. Returns the longest wait in seconds; None is no limit."""
        return None

    # ------------------------------------------------------------------------------------------------------ the loop

    def run_once(self) -> float | None:
        """One iteration of the loop; it never waits for a message.

        Returns:
            Seconds to wait for a message before the next iteration: 0 is not at all, None is without limit.

        Raises:
            ModelLost: no step will ever run again.
        """
        work, seconds = self.next_work()
        if not work:
            return seconds
        self.step(work)
        return 0.0 if self.has_work() else self.leaving_seconds

    def next_work(self) -> tuple[Sequence[Work], float | None]:
        """The first half of `run_once`: the work of the next step, and the result of `run_once`."""
        while not self._inbox.empty():  # only this thread reads it
            self._receive_one(self._inbox.get_nowait())
        if self._is_over:
            return [], 0.0
        if (seconds := self.linger()) > 0:
            return [], seconds
        work = self.schedule()
        if not work:
            return [], self.idle()
        self.step_started = time.perf_counter()
        return work, 0.0

    def step(self, work: Sequence[Work]) -> None:
        """The second half of `run_once`: runs the model on the work."""
        try:
            output = self._forward(work)
        except ModelLost:
            raise
        except Exception:
            _log.exception("step failed; retrying its sequences one at a time", sequences=len(work))
            self._step_one_by_one(work)
        else:
            self.process(work, output)
        self.step_ended = time.perf_counter()

    def _step_one_by_one(self, work: Sequence[Work]) -> None:
        """Retries each sequence in a step of its own, so that a sequence with a failing step ends no other."""
        failures: list[tuple[Work, Exception]] = []
        for item in work:
            try:
                output = self._forward([item])
            except ModelLost:
                raise
            except Exception as error:
                _log.exception("step of a single sequence failed; the sequence ends")
                failures.append((item, error))
            else:
                self.process([item], output)
        is_at_fault = len(failures) < len(work) or len(work) == 1
        for item, reason in failures:
            self.fail(item, reason, is_at_fault=is_at_fault)

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
                    self._mark(works=True)
                    self._wait(self.run_once())
            except Exception as error:  # the service ends, and its sequences continue on another replica
                _log.exception("engine failed; the service stops")
                self.lost.set_result(str(error) if isinstance(error, ModelLost) else f"{type(error).__name__}: {error}")

    def _wait(self, seconds: float | None) -> None:
        """Waits up to `seconds` for a message, and handles it."""
        if seconds == 0:
            return
        self._mark(works=False)
        with suppress(queue.Empty):
            message = self._inbox.get(timeout=seconds)
            self._mark(works=True)
            self._receive_one(message)

    def _mark(self, *, works: bool) -> None:
        """Notes that an iteration of the loop begins, or that the loop waits; the iteration before has ended."""
        now = time.perf_counter()
        if self._since is not None:
            self._longest = max(self._longest, now - self._since)
        self._since = now if works else None

    def _receive_one(self, message: Message | None) -> None:
        if message is None:
            self._is_over = True
        else:
            self.receive(message)
