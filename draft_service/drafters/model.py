"""The drafter that runs a small model on the engine's thread."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from draft_service.drafters.base import CheapDrafter, Draft, Drafter, DraftError, Drafting, DraftSequence
from draft_service.drafters.engine import DraftEngine
from draft_service.drafters.sequence import Close, GuessingState, ModelSequence, Propose
from kernels.rng import Domain


class ModelDrafter(Drafter):
    """Drafts with a model: alone, several tokens a pass (`parallel`), or with a cheaper drafter that guesses for it
    (staged drafting, [L 6]).
    """

    def __init__(self, engine: DraftEngine, *, cheap: CheapDrafter | None = None, parallel: bool = False) -> None:
        """`cheap` guesses tokens, which the model judges several at a time. `parallel` drafts
        `DraftSequence.tokens_per_pass` tokens a pass; it needs a model with a mask token.
        """
        assert not parallel or engine.mask_token is not None
        self._engine = engine
        self._cheap = cheap
        self._parallel = parallel

    def open(self, sequence: DraftSequence) -> Drafting:
        return _ModelDrafting(self._engine, sequence, self.begin)

    def begin(self, sequence: DraftSequence) -> ModelSequence:
        """The engine's state of a sequence."""
        vocab_size = self._engine.vocab_size
        if self._parallel and sequence.tokens_per_pass > 1:
            return ModelSequence.begin(replace(sequence, uses_outcome_cache=False), vocab_size)
        sequence = replace(sequence, tokens_per_pass=1)
        if self._cheap is None:
            return ModelSequence.begin(sequence, vocab_size)
        # Staged drafting has neither the entropy bound nor the outcome cache.
        begun = ModelSequence.begin(replace(sequence, max_entropy=None, uses_outcome_cache=False), vocab_size)
        begun.guessing = GuessingState(self._cheap.guesser(sequence, Domain.STAGED_DRAFT))
        return begun


class _ModelDrafting(Drafting):
    """Until a proposal is requested the engine has nothing of the sequence: the target may write the whole text."""

    def __init__(
        self, engine: DraftEngine, opening: DraftSequence, begin: Callable[[DraftSequence], ModelSequence]
    ) -> None:
        self._engine = engine
        self._opening = opening
        self._begin = begin
        self._sequence: ModelSequence | None = None
        self._capacity = engine.model_runner.max_length + 1  # the last drafted token never runs
        self._vocab_size = engine.model_runner.loaded.vocab_size
        self._committed: list[int] = []
        self._loop = asyncio.get_running_loop()
        self._count(opening.prompt)
        self._count(opening.committed)

    def capacity(self) -> int:
        return max(0, self._capacity)

    def advance(self, tokens: Sequence[int]) -> None:
        self._committed.extend(tokens)
        self._count(tokens)

    def propose(self, gamma: int) -> Awaitable[Draft]:
        future: asyncio.Future[Draft] = self._loop.create_future()
        gamma = min(gamma, self.capacity())
        if gamma == 0:
            future.set_result(Draft([], [], 0.0))
            return future
        if not self._engine.alive:
            future.set_exception(DraftError("the draft engine has stopped"))
            return future
        if self._sequence is None:
            self._sequence = self._begin(self._opening)
        committed, self._committed = self._committed, []

        def done(result: Draft | DraftError) -> None:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(_settle, future, result)

        self._engine.post(Propose(self._sequence, committed, gamma, done))
        return future

    def close(self) -> None:
        # An engine that has ended reads no messages, and a message holds the sequence.
        if self._sequence is not None and self._engine.alive:
            self._engine.post(Close(self._sequence))

    def _count(self, tokens: Sequence[int]) -> None:
        self._capacity -= len(tokens)
        if tokens and max(tokens) >= self._vocab_size:  # an added token of the target that the draft lacks
            self._capacity = 0


def _settle(future: asyncio.Future[Draft], result: Draft | DraftError) -> None:
    if future.done():  # the request was cancelled
        return
    if isinstance(result, DraftError):
        future.set_exception(result)
    else:
        future.set_result(result)
