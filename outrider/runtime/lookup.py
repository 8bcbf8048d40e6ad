"""Finds the longest earlier occurrence of the end of a text, and copies the tokens after it [L 3.6]."""

from collections.abc import Sequence

CANDIDATES = 64
"""Earlier occurrences that are compared, latest first: this bounds the cost of a proposal."""

LONGEST = 64
"""The longest match, in tokens, that is looked for."""

# Dictionaries that share the index: growing one copies only its share.
_SHARDS = 64


class TextIndex:
    """One text, with an index of where each run of `min_match` tokens ended.

    The index is by hash. Runs with the same hash are distinguished when tokens are compared.
    """

    def __init__(self, min_match: int) -> None:
        self._min_match = min_match
        self._tokens: list[int] = []
        self._last: list[dict[int, int]] = [{} for _ in range(_SHARDS)]  # by hash of a run: where it ended last
        self._before: list[int] = []  # for each end of a run: where that hash ended before; 0: nowhere

    def read(self, tokens: Sequence[int]) -> None:
        text, size, before = self._tokens, self._min_match, self._before
        text.extend(tokens)
        # A run is entered once a token follows it.
        for end in range(len(before) + size, len(text)):
            run = hash(tuple(text[end - size : end]))
            shard = self._last[run % _SHARDS]
            before.append(shard.get(run, 0))
            shard[run] = end

    def copy(self, count: int, ahead: Sequence[int] = ()) -> list[int]:
        """Return the `count` tokens after the longest match; none without a match.

        `ahead` is part of the match, but not of the text that is searched.
        """
        text = self._tokens
        text.extend(ahead)
        source, end = self._source(), len(text)
        copied = text[source : source + count] if source else []
        del text[end - len(ahead) :]
        while source and len(copied) < count:  # past the end of the text the copy repeats itself
            copied.append(copied[len(copied) - (end - source)])
        return copied

    def _source(self) -> int:
        """Where the longest match ended; of equal ones the latest, which is likelier to be repeated."""
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
