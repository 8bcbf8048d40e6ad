"""The drafter that finds the longest earlier occurrence of the end of the text, and copies the tokens after it [L 3.6].

It draws nothing: q̂ is the point mass.
"""

from collections.abc import Sequence

from draft_service.drafters.base import DraftSequence, Guesser, Guesses, GuessingDrafter
from kernels.rng import Domain
from outrider.runtime.lookup import TextIndex


class LookupDrafter(GuessingDrafter):
    """Drafts by copying."""

    def __init__(self, *, min_match: int) -> None:
        """`min_match` is the shortest match, in tokens.

        Raises:
            ValueError: `min_match` is below 1.
        """
        if min_match < 1:
            raise ValueError(f"min_match is {min_match}; it must be at least 1")
        self._min_match = min_match

    def guesser(self, sequence: DraftSequence, domain: Domain = Domain.DRAFT) -> Guesser:
        return Copier(self._min_match)


class Copier(Guesser):
    """Copies in one text."""

    def __init__(self, min_match: int) -> None:
        self._index = TextIndex(min_match)

    def read(self, tokens: Sequence[int]) -> None:
        self._index.read(tokens)

    def guess(self, count: int, ahead: Sequence[int] = ()) -> Guesses:
        return [(token, None) for token in self._index.copy(count, ahead)]
