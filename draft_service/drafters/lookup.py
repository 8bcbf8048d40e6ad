"""The drafter that copies what followed the longest earlier occurrence of the end of the text [L 3.6].

It draws nothing, so each token's distribution is the point mass.
"""

from collections.abc import Sequence

from draft_service.drafters.base import DraftSequence, Guesser, Guesses, GuessingDrafter
from kernels.rng import Domain

CANDIDATES = 64
"""Earlier places that are compared, the latest ones, so that a proposal's cost is bounded."""

LONGEST = 64
"""Tokens of a match beyond which none counts as longer."""

# Each holds its share of the index, so that no insertion has to move the index of a long text as a whole.
_SHARDS = 64


class LookupDrafter(GuessingDrafter):
    """Drafts by copying."""

    def __init__(self, *, min_match: int) -> None:
        """`min_match` is how many tokens at least must have occurred before.

        Raises:
            ValueError: `min_match` is below 1.
        """
        if min_match < 1:
            raise ValueError(f"min_match is {min_match}; it must be at least 1")
        self._min_match = min_match

    def guesser(self, sequence: DraftSequence, domain: Domain = Domain.DRAFT) -> Guesser:
        return Copier(self._min_match)


class Copier(Guesser):
    """One text, and where each run of `min_match` tokens ended in it before.

    Runs are known by their hash: two that share one are told apart where they are compared.
    """

    def __init__(self, min_match: int) -> None:
        self._min_match = min_match
        self._tokens: list[int] = []
        self._last: list[dict[int, int]] = [{} for _ in range(_SHARDS)]  # where a run ended last, by its hash
        self._before: list[int] = []  # for each end of a run, where a run of that hash ended before; 0 is nowhere

    def read(self, tokens: Sequence[int]) -> None:
        text, size, before = self._tokens, self._min_match, self._before
        text.extend(tokens)
        # The end of the text itself is entered once something follows it.
        for end in range(len(before) + size, len(text)):
            run = hash(tuple(text[end - size : end]))
            shard = self._last[run % _SHARDS]
            before.append(shard.get(run, 0))
            shard[run] = end

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
        source, end = self._source(), len(text)
        if not source:
            return []
        copied = text[source : source + count]
        while len(copied) < count:  # past the end of the text it goes on with what was copied: the text repeats itself
            copied.append(copied[len(copied) - (end - source)])
        return copied

    def _source(self) -> int:
        """Where the longest match ended, of equals the latest: what was written last is likelier to be repeated."""
        text, size = self._tokens, self._min_match
        run = hash(tuple(text[-size:]))
        end = self._last[run % _SHARDS].get(run, 0)
        source, matched = 0, size - 1
        for _ in range(CANDIDATES):
            if not end or matched >= LONGEST:
                break
            while matched < min(end, LONGEST) and text[end - matched - 1 : end] == text[-matched - 1 :]:
                source, matched = end, matched + 1
            end = self._before[end - size]
        return source
