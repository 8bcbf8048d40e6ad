"""The drafter that runs a small model: requests go to the engine's thread, results come back to the event loop."""

import asyncio
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from dataclasses import replace

from draft_service.drafters.base import Draft, Drafter, DraftError, Drafting, DraftSequence, GuessingDrafter
from draft_service.drafters.engine import DraftEngine
from draft_service.drafters.sequence import Ask, Close, GuessingState, ModelSequence
from kernels.rng import Domain


class ModelDrafter(Drafter):
    """Drafts with a model, alone or with a cheaper drafter before it [L 6]."""

    def __init__(self, engine: DraftEngine, *, vocab_size: int, cheap: GuessingDrafter | None = None) -> None:
        """`vocab_size` is the target's; `cheap` guesses tokens for the model to judge, several in one pass."""
        self._engine = engine
        self._vocab_size = vocab_size
        self._cheap = cheap

    def open(self, sequence: DraftSequence) -> Drafting:
        return _ModelDrafting(self._engine, self.begin(sequence))

    def begin(self, sequence: DraftSequence) -> ModelSequence:
        """The engine's state of a sequence."""
        if self._cheap is None:
            return ModelSequence.begin(sequence, self._vocab_size)
        # Guesses do not end where the draft is unsure, and nothing is drafted ahead.
        begun = ModelSequence.begin(replace(sequence, max_entropy=None, looks_ahead=False), self._vocab_size)
        begun.guessing = GuessingState(self._cheap.guesser(sequence, Domain.STAGED_DRAFT))
        return begun


class _ModelDrafting(Drafting):
    def __init__(self, engine: DraftEngine, sequence: ModelSequence) -> None:
        self._engine = engine
        self._sequence = sequence
        self._room = engine.model_runner.pool.max_length + 1  # the last drafted token is never run
        self._known = engine.model_runner.loaded.vocab_size
        self._committed: list[int] = []
        self._loop = asyncio.get_running_loop()
        self._take_in(sequence.tokens)

    def room(self) -> int:
        return max(0, self._room)

    def advance(self, tokens: Sequence[int]) -> None:
        self._committed.extend(tokens)
        self._take_in(tokens)

    def propose(self, gamma: int) -> Awaitable[Draft]:
        future: asyncio.Future[Draft] = self._loop.create_future()
        gamma = min(gamma, self.room())
        if gamma == 0:
            future.set_result(Draft([], [], 0.0))
            return future
        if not self._engine.alive:
            future.set_exception(DraftError("the draft's engine has stopped"))
            return future
        committed, self._committed = self._committed, []

        def done(result: Draft | DraftError) -> None:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(_settle, future, result)

        self._engine.post(Ask(self._sequence, committed, gamma, done))
        return future

    def close(self) -> None:
        self._engine.post(Close(self._sequence))

    def _take_in(self, tokens: Sequence[int]) -> None:
        self._room -= len(tokens)
        if tokens and max(tokens) >= self._known:  # a target may know added tokens that this draft has no row for
            self._room = 0


def _settle(future: asyncio.Future[Draft], result: Draft | DraftError) -> None:
    if future.done():  # nobody waits any more
        return
    if isinstance(result, DraftError):
        future.set_exception(result)
    else:
        future.set_result(result)
