"""The engine core where a pass breaks: the sequences in it end, or where the model is lost, nothing more is said."""

import threading
from collections.abc import Callable, Sequence

import pytest

from outrider.runtime.engine import Engine
from outrider.runtime.errors import ModelLost
from outrider.runtime.loader import LoadedModel
from outrider.runtime.model_runner import ModelRunner

SOON_S = 20.0


class Breaking(Engine[str, str, None]):
    """Each message is a pass, which breaks as it is told."""

    def __init__(self, packed: ModelRunner, errors: dict[str, Exception]) -> None:
        super().__init__(packed, name="breaking-engine")
        self.failed: list[str] = []
        self.told = threading.Event()
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
        raise AssertionError("no pass gives anything")

    def fail(self, work: str, error: Exception, *, is_own: bool) -> None:
        self.failed.append(work)
        self.told.set()


@pytest.fixture
def engine(load: Callable[..., LoadedModel]) -> Breaking:
    packed = ModelRunner.build(load("llama"), max_sequences=1, max_length=32)
    return Breaking(packed, {"broken": RuntimeError("a pass"), "lost": ModelLost("rank 1 has gone")})


def test_a_broken_pass_ends_its_sequences_and_no_more(engine: Breaking) -> None:
    engine.start()
    engine.post("broken")
    assert engine.told.wait(SOON_S)
    assert engine.failed == ["broken"]
    assert engine.trouble(60.0) == ""
    engine.stop()
    assert not engine.alive


def test_a_lost_model_ends_the_engine_and_no_sequence(engine: Breaking) -> None:
    engine.start()
    for message in ("lost", "broken"):
        engine.post(message)
    engine._thread.join(SOON_S)
    assert not engine.alive
    assert engine.failed == [], "they can go on elsewhere, which an error of ours would rule out"
    assert engine.trouble(60.0) == "rank 1 has gone"
