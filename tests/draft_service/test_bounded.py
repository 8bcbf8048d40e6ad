"""A guesser that hangs costs its sequence the guesses, and the others a moment: the draft's engine goes on."""

import threading
from collections.abc import Iterator, Sequence

import pytest

from draft_service.drafters.base import DraftSequence
from draft_service.drafters.bounded import MOST_HUNG, BoundedGuessers, Guessing, LateGuesser
from draft_service.drafters.guessing import Guesser, Guesses, GuessingDrafter
from draft_service.drafters.lookup import LookupDrafter
from kernels.rng import Domain
from kernels.sampling import SamplingParams
from outrider.runtime.loader import LoadedModel, ModelSource, load_model
from tests.draft_service.pairs import DEMO
from tests.draft_service.test_staged import Driver, counts_of, engine_of, sequence

LONG_S = 60.0


class Hangs(Guesser):
    """Until `over`."""

    def __init__(self, over: threading.Event) -> None:
        self._over = over

    def read(self, tokens: Sequence[int]) -> None:
        self._over.wait(LONG_S)

    def guess(self, count: int, ahead: Sequence[int] = ()) -> Guesses:
        return [(7, None)]


class Knows(Guesser):
    def read(self, tokens: Sequence[int]) -> None:
        pass

    def guess(self, count: int, ahead: Sequence[int] = ()) -> Guesses:
        return [(1, None)] * count


@pytest.fixture
def over() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def turn(guesser: Guesser, count: int = 2) -> Guessing:
    return Guessing(guesser, [1, 2], count, [])


def test_turns_are_taken_and_errors_kept_apart() -> None:
    class Breaks(Knows):
        def guess(self, count: int, ahead: Sequence[int] = ()) -> Guesses:
            raise ValueError("out of order")

    guessers = BoundedGuessers("test", seconds=LONG_S)
    for _ in range(3):
        turns = [turn(Knows()), turn(Breaks()), turn(LateGuesser(Knows), 0)]
        guessers.run(turns)
        assert [each.guesses for each in turns] == [[(1, None)] * 2, None, []]
        assert [repr(each.error) for each in turns] == ["None", "ValueError('out of order')", "None"]


def test_who_hangs_is_told_from_those_whose_turn_did_not_come(over: threading.Event) -> None:
    guessers = BoundedGuessers("test", seconds=0.05)
    for number in range(MOST_HUNG):
        turns = [turn(Hangs(over)), turn(Knows())]
        guessers.run(turns)
        assert isinstance(turns[0].error, TimeoutError)
        assert (turns[1].error, turns[1].guesses) == (None, None)
        assert guessers.hung == number + 1
    last = turn(Knows())
    guessers.run([last])
    assert (last.error, last.guesses) == (None, None), "enough threads hang"
    over.set()
    while guessers.hung:
        over.wait(0.01)
    guessers.run([last])
    assert last.guesses == [(1, None)] * 2


class Hanging(GuessingDrafter):
    def __init__(self, over: threading.Event) -> None:
        super().__init__("hanging")
        self._over = over

    def guesser(self, sequence: DraftSequence, domain: Domain = Domain.DRAFT) -> Guesser:
        return Hangs(self._over)


def test_the_engine_goes_on_without_a_guesser_that_hangs(over: threading.Event) -> None:
    loaded: LoadedModel = load_model(ModelSource(str(DEMO / "draft"), dtype="float32", device="cpu"))
    engine = engine_of(loaded, vocab_size=2000)
    engine.start()
    told = sequence(law=SamplingParams(temperature=0.0))
    drivers = [
        Driver(engine, told, Hanging(over), 2000),
        Driver(engine, told, LookupDrafter(min_match=1), 2000),
        Driver(engine, told, None, 2000),
    ]
    for committed in ([], [5, 17]):
        for driver in drivers:
            driver.ask(6, committed)
        hung, guessed, alone = (driver.answer() for driver in drivers)
        assert hung.token_ids == guessed.token_ids == alone.token_ids
    engine.stop()
    assert counts_of(engine).failures == 1
    assert counts_of(engine).passes > 0, "the other one is guessed for still"
