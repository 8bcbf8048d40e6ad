"""A failed step ends its sequences, a lost model the engine; and a stuck step is noticed."""

import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from outrider.runtime.engine import TIMES_THE_LONGEST, Engine
from outrider.runtime.errors import ModelLost
from outrider.runtime.loader import LoadedModel
from outrider.runtime.model_runner import ModelRunner
from outrider.runtime.torch_runner import TorchRunner

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
        raise AssertionError("no step succeeds")

    def fail(self, work: str, error: Exception, *, is_at_fault: bool) -> None:
        self.failed.append(work)
        self.has_failed.set()


def test_a_lost_model_ends_the_engine_and_a_failed_step_only_its_sequences(load: Callable[..., LoadedModel]) -> None:
    runner = TorchRunner.build(load("llama"), max_sequences=1, max_length=32)
    engine = Failing(runner, {"broken": RuntimeError("a step"), "lost": ModelLost("rank 1 is lost")})
    engine.start()
    engine.post("broken")
    assert engine.has_failed.wait(SOON_S)
    assert engine.failure(60.0) == ""
    for message in ("lost", "broken"):
        engine.post(message)
    engine._thread.join(SOON_S)
    assert not engine.alive
    assert engine.failed == ["broken"], "the sequences of a lost model are not failed: they continue elsewhere"
    assert engine.failure(60.0) == "rank 1 is lost"


def test_long_steps_widen_the_bound_and_idle_time_does_not(
    load: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Failing(TorchRunner.build(load("llama"), max_sequences=1, max_length=32), {})
    engine._thread = Mock()  # alive
    now = 100.0
    monkeypatch.setattr("outrider.runtime.engine.time", SimpleNamespace(perf_counter=lambda: now))
    engine._mark(works=True)
    now += 30.0
    assert engine.step_seconds() == pytest.approx(30.0)
    engine._mark(works=False)
    now += 1e6
    assert engine.step_seconds() == 0.0
    engine._mark(works=True)
    now += TIMES_THE_LONGEST * 30.0 - 1.0
    assert engine.failure(10.0) == ""
    now += 2.0
    assert engine.failure(10.0) == "the engine's step has lasted 121 s"
