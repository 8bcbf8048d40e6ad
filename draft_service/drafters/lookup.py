"""The drafter that copies what followed the longest earlier occurrence of the end of the text [L 3.6].

It draws nothing, so each of its laws is the point mass on what it copies. It knows no vocabulary and no model.
"""

import asyncio
import time
from collections.abc import Awaitable, Sequence

from draft_service.drafters.base import UNBOUNDED, Draft, Drafter, Drafting, DraftSequence
from kernels.verify import Rule

CANDIDATES = 64
"""Earlier places that are compared, the latest ones, so that a proposal's cost is bounded."""

LONGEST = 64
"""Tokens of a match beyond which none counts as longer."""


class LookupDrafter(Drafter):
    """Drafts by copying."""

    def __init__(self, *, min_match: int) -> None:
        """`min_match` is how many tokens at least must have occurred before.

        Raises:
            ValueError: `min_match` is below 1.
        """
        if min_match < 1:
            raise ValueError(f"min_match is {min_match}; it must be at least 1")
        self._min_match = min_match

    def open(self, sequence: DraftSequence) -> Drafting:
        return _LookupDrafting(sequence, self._min_match)


class _LookupDrafting(Drafting):
    def __init__(self, sequence: DraftSequence, min_match: int) -> None:
        self._tells_laws = sequence.rule is not Rule.COUPLED
        self._min_match = min_match
        self._tokens: list[int] = []
        self._ends: dict[tuple[int, ...], list[int]] = {}  # where each run of `min_match` tokens ended, oldest first
        self.advance([*sequence.prompt, *sequence.committed])

    def room(self) -> int:
        return UNBOUNDED

    def advance(self, tokens: Sequence[int]) -> None:
        known = len(self._tokens)
        self._tokens.extend(tokens)
        # The end of the text itself is entered once something follows it.
        for end in range(max(known, self._min_match), len(self._tokens)):
            self._ends.setdefault(tuple(self._tokens[end - self._min_match : end]), []).append(end)

    def propose(self, gamma: int) -> Awaitable[Draft]:
        begun = time.perf_counter()
        drafted = self._copy(gamma)
        laws: list[None] = [None] * len(drafted) if self._tells_laws else []
        future: asyncio.Future[Draft] = asyncio.get_running_loop().create_future()
        future.set_result(Draft(drafted, list(laws), time.perf_counter() - begun))
        return future

    def close(self) -> None:
        """Nothing is held."""

    def _copy(self, gamma: int) -> list[int]:
        ends = self._ends.get(tuple(self._tokens[-self._min_match :]), [])[-CANDIDATES:]
        if not ends:
            return []
        # The latest of the longest: what was written last is likelier to be repeated.
        source = max(reversed(ends), key=self._matching)
        text = list(self._tokens)
        for place in range(gamma):  # past the end of the text it goes on with what was copied: the text repeats itself
            text.append(text[source + place])
        return text[len(self._tokens) :]

    def _matching(self, end: int) -> int:
        """How many tokens before `end` are those at the text's end."""
        length, tokens = self._min_match, self._tokens
        while length < min(end, LONGEST) and tokens[end - length - 1] == tokens[-length - 1]:
            length += 1
        return length
