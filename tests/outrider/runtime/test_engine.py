"""The engine where a step fails: its sequences end, or, where the model is lost, the engine; and stuck steps."""

import threading
from collections.abc import Callable, Sequence

import pytest

from outrider.runtime.engine import TIMES_THE_LONGEST, Engine, Heartbeat
from outrider.runtime.errors import ModelLost
from outrider.runtime.loader import LoadedModel
from outrider.runtime.model_runner import ModelRunner

SOON_S = 20.0


class Failing(Engine[str, str, None]):
    """Each message is a step, which fails with the error of that name."""

    def __init__(self, runner: ModelRunner, errors: dict[str, Exception]) -> None:
        super().__init__(runner, name="failing-engine")
        self.failed: list[str] = []
        self.has_failed = threading.Event()
        self._errors = errors
        self._work: list[str] = []

    def receive(self, message: str) -> None:
        self._work.append(message)

    def schedule(self) -> Sequence[str]:
        work, self._work = self._work[:1], self._work[1:]
        return work

    def forward(self, work: Sequence[str]) -> None:
        raise self._errors[work[0]]

    def process(self, work: Sequence[str], output: None) -> None:
        raise AssertionError("no step gives anything")

    def fail(self, work: str, error: Exception, *, is_own: bool) -> None:
        self.failed.append(work)
        self.has_failed.set()


@pytest.fixture
def engine(load: Callable[..., LoadedModel]) -> Failing:
    runner = ModelRunner.build(load("llama"), max_sequences=1, max_length=32)
    return Failing(runner, {"broken": RuntimeError("a step"), "lost": ModelLost("rank 1 is lost")})


def test_a_failed_step_ends_its_sequences_and_no_more(engine: Failing) -> None:
    engine.start()
    engine.post("broken")
    assert engine.has_failed.wait(SOON_S)
    assert engine.failed == ["broken"]
    assert engine.failure(60.0) == ""
    engine.stop()
    assert not engine.alive


def test_a_lost_model_ends_the_engine_and_no_sequence(engine: Failing) -> None:
    engine.start()
    for message in ("lost", "broken"):
        engine.post(message)
    engine._thread.join(SOON_S)
    assert not engine.alive
    assert engine.failed == [], "they can go on elsewhere, which an error of ours would rule out"
    assert engine.failure(60.0) == "rank 1 is lost"


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_long_steps_widen_the_bound() -> None:
    """A step that once took 30 s may take a few times as long, whatever the bound; idle time does not count."""
    clock = Clock()
    heart = Heartbeat(clock)
    heart.begin()
    clock.now += 30.0
    heart.rest()
    clock.now += 1e6
    heart.begin()
    assert heart.longest == pytest.approx(30.0)
    clock.now += TIMES_THE_LONGEST * 30.0 - 1.0
    assert not heart.is_stuck(10.0)
    clock.now += 2.0
    assert heart.is_stuck(10.0)
