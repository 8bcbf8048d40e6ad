"""The drafter that copies what followed the longest earlier occurrence of the end of the text [L 3.6].

It draws nothing, so each of its laws is the point mass on what it copies.
"""

from collections.abc import Sequence

from draft_service.drafters.base import DraftSequence
from draft_service.drafters.guessing import Guesser, Guesses, GuessingDrafter
from kernels.rng import Domain

CANDIDATES = 64
"""Earlier places that are compared, the latest ones, so that a proposal's cost is bounded."""

LONGEST = 64
"""Tokens of a match beyond which none counts as longer."""


class LookupDrafter(GuessingDrafter):
    """Drafts by copying."""

    def __init__(self, *, min_match: int) -> None:
        """`min_match` is how many tokens at least must have occurred before.

        Raises:
            ValueError: `min_match` is below 1.
        """
        if min_match < 1:
            raise ValueError(f"min_match is {min_match}; it must be at least 1")
        super().__init__("lookup")
        self._min_match = min_match

    def guesser(self, sequence: DraftSequence, domain: Domain = Domain.DRAFT) -> Guesser:
        return Copier(self._min_match)


class Copier(Guesser):
    """One text, and what was written in it before."""

    def __init__(self, min_match: int) -> None:
        self._min_match = min_match
        self._tokens: list[int] = []
        self._ends: dict[tuple[int, ...], list[int]] = {}  # where each run of `min_match` tokens ended, oldest first

    def read(self, tokens: Sequence[int]) -> None:
        known = len(self._tokens)
        self._tokens.extend(tokens)
        # The end of the text itself is entered once something follows it.
        for end in range(max(known, self._min_match), len(self._tokens)):
            self._ends.setdefault(tuple(self._tokens[end - self._min_match : end]), []).append(end)

    def guess(self, count: int, ahead: Sequence[int] = ()) -> Guesses:
        """What is only ahead is matched, and not found as a source."""
        text = self._tokens
        text.extend(ahead)
        try:
            return [(token, None) for token in self._copy(count)]
        finally:
            del text[len(text) - len(ahead) :]

    def _copy(self, count: int) -> list[int]:
        text = self._tokens
        ends = self._ends.get(tuple(text[-self._min_match :]), [])[-CANDIDATES:]
        if not ends:
            return []
        # The latest of the longest: what was written last is likelier to be repeated.
        source, end = max(reversed(ends), key=self._matching), len(text)
        copied = text[source : source + count]
        while len(copied) < count:  # past the end of the text it goes on with what was copied: the text repeats itself
            copied.append(copied[len(copied) - (end - source)])
        return copied

    def _matching(self, end: int) -> int:
        """How many tokens before `end` are those at the text's end."""
        length, tokens = self._min_match, self._tokens
        while length < min(end, LONGEST) and tokens[end - length - 1] == tokens[-length - 1]:
            length += 1
        return length
