"""The drafters that neither run a model nor count: by copying, at random, and none."""

from collections.abc import Sequence
from dataclasses import dataclass

from draft_service.drafters.base import CheapDrafter, DraftSequence, Guesser, Guesses
from kernels.rng import Domain, uniform
from kernels.sparse import SparseDistribution, evenly_spaced
from outrider.runtime.lookup import TextIndex

# Draw numbers of one index: disjoint, so the support does not depend on any token (invariant 1).
_TOKEN, _SUPPORT = 0, 1


class LookupDrafter(CheapDrafter):
    """Finds the longest earlier occurrence of the end of the text, and copies the tokens after it [L 3.6].

    It draws nothing: q̂ is the point mass.
    """

    def __init__(self, *, min_match: int) -> None:
        """`min_match` is the shortest match, in tokens; at least 1."""
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


class RandomDrafter(CheapDrafter):
    """Draws tokens uniformly at random: the limiting case of a draft that costs nothing [L 3.6].

    A sparse distribution holds at most 256 tokens. For a larger vocabulary each round first draws a support of that
    many tokens, at equal distances from a random start. The tokens are then drawn from the support.
    """

    def __init__(self, *, vocab_size: int, max_support: int) -> None:
        """`vocab_size` is the target's; a distribution holds at most `max_support` tokens."""
        self._vocab_size = vocab_size
        self._size = min(vocab_size, max_support)

    def guesser(self, sequence: DraftSequence, domain: Domain = Domain.DRAFT) -> Guesser:
        """Not for staged drafting: the draw of the support has no inner base."""
        assert domain is Domain.DRAFT
        return _RandomGuesser(sequence, self._vocab_size, self._size)


@dataclass
class _RandomGuesser(Guesser):
    sequence: DraftSequence
    vocab_size: int
    size: int
    base: int = 0

    def read(self, tokens: Sequence[int]) -> None:
        self.base += len(tokens)

    def guess(self, count: int, ahead: Sequence[int] = ()) -> Guesses:
        assert not ahead
        seed, base = self.sequence.seed, self.base
        q = support(seed, base, vocab_size=self.vocab_size, size=self.size)
        tokens = [q.token_at(uniform(seed, base, index, Domain.DRAFT, _TOKEN)) for index in range(count)]
        return [(token, None if self.sequence.params.is_greedy else q) for token in tokens]


def support(seed: int, base: int, *, vocab_size: int, size: int) -> SparseDistribution:
    """The uniform distribution over `size` of `vocab_size` tokens that belongs to this round.

    The tokens are `vocab_size // size` apart, and wrap around from a random start. Over seeds every token is drafted
    equally often.
    """
    return evenly_spaced(int(uniform(seed, base, 0, Domain.DRAFT, _SUPPORT) * vocab_size), vocab_size, size)


class NoDrafter(CheapDrafter, Guesser):
    """Never drafts. `Propose` returns proposals without tokens; `Generate` sends `Decode` and opens no drafter."""

    def guesser(self, sequence: DraftSequence, domain: Domain = Domain.DRAFT) -> Guesser:
        return self

    def read(self, tokens: Sequence[int]) -> None:
        """Does nothing."""

    def guess(self, count: int, ahead: Sequence[int] = ()) -> Guesses:
        return []
