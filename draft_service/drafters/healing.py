"""Drafting outlives failures of its drafter: the target writes alone for a while, then the drafter is tried again."""

from collections.abc import Awaitable, Generator, Sequence
from typing import Any

from draft_service.drafters.base import Draft, Drafter, DraftError, Drafting, DraftLate, DraftSequence

FIRST_REST, LONGEST_REST = 32, 512
"""Tokens that the target writes alone after a failure: the fewest, and as many as it comes to, doubled each time."""

SOUND_AFTER = 8
"""Proposals in a row after which a failure counts as the first."""


class HealingDrafting(Drafting):
    """One sequence, of one drafter after the other.

    Attributes:
        rest: tokens that are to be committed before it may be asked again; 0: it may.
        recoveries: how often a proposal came after a failure.
    """

    def __init__(self, drafter: Drafter, sequence: DraftSequence) -> None:
        self.rest = 0
        self.recoveries = 0
        self._drafter = drafter
        self._sequence = sequence
        self._written: list[int] = []
        self._inner: Drafting | None = drafter.open(sequence)
        self._next_rest = FIRST_REST
        self._failed = False  # and has not proposed since
        self._sound = 0  # proposals in a row

    def room(self) -> int:
        return self._opened().room()

    def advance(self, tokens: Sequence[int]) -> None:
        self._written.extend(tokens)
        self.rest = max(0, self.rest - len(tokens))
        if self._inner is not None:
            self._inner.advance(tokens)

    def propose(self, gamma: int) -> Awaitable[Draft]:
        """See `Drafting.propose`; here an error is not the end, unless `close` was called."""
        return _Answer(self, self._opened().propose(gamma))

    def close(self) -> None:
        inner, self._inner = self._inner, None
        if inner is not None:
            inner.close()

    async def answer(self, proposal: Awaitable[Draft]) -> Draft:
        """The proposal; what it comes to is noted.

        Raises:
            DraftError: none came. But for a late one, `rest` tokens are to be written first.
        """
        try:
            draft = await proposal
        except DraftLate:
            raise
        except DraftError:
            self.close()
            self.rest, self._next_rest = self._next_rest, min(2 * self._next_rest, LONGEST_REST)
            self._failed, self._sound = True, 0
            raise
        self.recoveries += self._failed
        self._failed = False
        self._sound += 1
        if self._sound == SOUND_AFTER:
            self._next_rest = FIRST_REST
        return draft

    def _opened(self) -> Drafting:
        if self._inner is None:
            self._inner = self._drafter.open(self._sequence.after(self._written))
        return self._inner


class _Answer(Awaitable[Draft]):
    """A proposal under way, which may be dropped without having been awaited."""

    def __init__(self, drafting: HealingDrafting, proposal: Awaitable[Draft]) -> None:
        self._drafting = drafting
        self._proposal = proposal

    def __await__(self) -> Generator[Any, None, Draft]:
        return self._drafting.answer(self._proposal).__await__()
