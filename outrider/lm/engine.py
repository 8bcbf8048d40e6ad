"""The engine core both services drive: one thread that owns a model and runs it, pass after pass.

A pass is receive → linger → schedule → forward → process. The core takes messages in and keeps the thread alive. It
knows nothing of proposals, verdicts or drafts: a subclass says what a message means, what goes into a pass, and what
becomes of its output.
"""

import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

import structlog
import torch

from outrider.lm.device import work_on
from outrider.lm.errors import ModelLost
from outrider.lm.heartbeat import Heartbeat
from outrider.lm.packed import PackedModel

_log = structlog.get_logger()


Message = TypeVar("Message")
Work = TypeVar("Work")
Output = TypeVar("Output")

# How long `stop` waits for the pass under way: nobody waits for that one any more, and it may never end.
STOP_SECONDS = 3.0


class Engine(ABC, Generic[Message, Work, Output]):
    """A thread that runs one model. All methods below the line run on that thread alone, so none of them locks.

    Attributes:
        heartbeat: of the thread's loop, once `prepare` is done.
    """

    def __init__(self, packed: PackedModel, *, name: str, threads: int | None = None) -> None:
        self.packed = packed
        self.heartbeat = Heartbeat()
        self._threads = threads
        self._inbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.pass_started = 0.0  # time.perf_counter() at the start of the last pass
        self.pass_ended = 0.0  # the same at its end
        self.forward_seconds = 0.0  # how long its forward took

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after the pass it is in, and waits for it, for some seconds. Work left over is dropped."""
        self._is_stopped = True
        self._inbox.put(None)
        if self._thread.is_alive():
            self._thread.join(STOP_SECONDS)

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def trouble(self, bound: float) -> str:
        """Why no pass will come any more, as far as one can tell; empty while all is well, and before `start`.

        A step of the loop may last `bound` seconds, or some times the longest so far where that is more.
        """
        if self._thread.ident is None or self._is_stopped:
            return ""
        if not self.alive:
            return "the engine's thread has ended"
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
        """Seconds that the next pass is held back for further messages; asked again after each. 0: none."""
        return 0.0

    @abstractmethod
    def schedule(self) -> Sequence[Work]:
        """What goes into the next pass; empty where nothing is ready, upon which the engine sleeps until a message."""

    @abstractmethod
    def forward(self, work: Sequence[Work]) -> Output:
        """Runs the model."""

    @abstractmethod
    def process(self, work: Sequence[Work], output: Output) -> None:
        """Takes what `forward` made of the same work."""

    def idle(self) -> float | None:
        """Called before the thread sleeps until the next message; returns for how many seconds at most, None: for ever.
        Does nothing else where a subclass has nothing to do.
        """
        return None

    @abstractmethod
    def fail(self, work: Sequence[Work], error: Exception) -> None:
        """The pass broke: ends the sequences in it. The others live on."""

    def _run(self) -> None:
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        work_on(self.packed.loaded.device)
        with torch.inference_mode():
            self.prepare()
            while self._step():
                pass

    def _step(self) -> bool:
        self.heartbeat.begin()
        if not self._receive_all(wait=0):
            return False
        while (seconds := self.linger()) > 0:
            if not self._receive_all(wait=seconds):
                return False
        work = self.schedule()
        if not work:
            return self._receive_all(wait=self.idle())
        try:
            self.pass_started = time.perf_counter()
            output = self.forward(work)
            self.forward_seconds = time.perf_counter() - self.pass_started
            self.process(work, output)
        except ModelLost as error:  # the sequences can go on elsewhere, and whoever ends the service tells them so
            _log.error("the model is lost", reason=str(error))
            return False
        except Exception as error:  # a broken pass must not take the other sequences with it
            _log.exception("pass failed", sequences=len(work))
            self.fail(work, error)
        self.pass_ended = time.perf_counter()
        return True

    def _receive_all(self, *, wait: float | None) -> bool:
        """Takes in all messages at hand, waiting up to `wait` seconds for a first one; None: for ever. False when told
        to stop.
        """
        while True:
            if wait != 0:
                self.heartbeat.rest()
            try:
                message = self._inbox.get(block=wait != 0, timeout=wait)
            except queue.Empty:
                return True
            finally:
                if wait != 0:
                    self.heartbeat.begin()
            if message is None:
                return False
            self.receive(message)
            wait = 0
