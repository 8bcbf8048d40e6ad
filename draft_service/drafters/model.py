"""The drafter that runs a small model: it carries requests to the engine's thread and results back to the event loop.

It knows nothing of passes.
"""

import asyncio
from collections.abc import Awaitable, Sequence
from contextlib import suppress

from draft_service.drafters.base import Draft, Drafter, DraftError, Drafting, DraftSequence
from draft_service.drafters.engine import DraftEngine
from draft_service.drafters.sequence import Ask, Close, ModelSequence


class ModelDrafter(Drafter):
    """Drafts with a model."""

    def __init__(self, engine: DraftEngine, *, vocab_size: int) -> None:
        """`vocab_size` is the target's."""
        self._engine = engine
        self._vocab_size = vocab_size

    def open(self, sequence: DraftSequence) -> Drafting:
        return _ModelDrafting(self._engine, self.begin(sequence))

    def begin(self, sequence: DraftSequence) -> ModelSequence:
        """What the engine is to keep of a sequence."""
        return ModelSequence.begin(sequence, self._vocab_size)


class _ModelDrafting(Drafting):
    def __init__(self, engine: DraftEngine, sequence: ModelSequence) -> None:
        self._engine = engine
        self._sequence = sequence
        self._room = engine.packed.pool.max_length + 1  # the last drafted token is never run, so it needs no place
        self._known = engine.packed.loaded.vocab_size
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
        loop = self._loop

        def done(result: Draft | DraftError) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(_settle, future, result)

        self._engine.post(Ask(self._sequence, committed, gamma, done))
        return future

    def _take_in(self, tokens: Sequence[int]) -> None:
        self._room -= len(tokens)
        if tokens and max(tokens) >= self._known:  # a target may know added tokens that this draft has no row for
            self._room = 0

    def close(self) -> None:
        self._engine.post(Close(self._sequence))


def _settle(future: asyncio.Future[Draft], result: Draft | DraftError) -> None:
    if future.done():  # nobody waits any more
        return
    if isinstance(result, DraftError):
        future.set_exception(result)
    else:
        future.set_result(result)
