"""The drafter that guesses: tokens uniform at random, the limiting case of a draft that costs nothing [L 3.6].

A law can name 256 tokens, so a vocabulary that is larger is cut first: to a support of that many tokens at equal
distances, its beginning drawn for the place. The token is then drawn within the support, and the support is the law.
"""

from collections.abc import Sequence

import numpy as np

from draft_service.drafters.base import DraftSequence
from draft_service.drafters.guessing import Guesser, Guesses, GuessingDrafter
from kernels.rng import Domain, uniform
from kernels.sparse import SparseDistribution

# The draws of a place: they are disjoint, so the support does not depend on the token (invariant 1), nor on other
# places.
_TOKEN, _SUPPORT = 0, 1


class RandomDrafter(GuessingDrafter):
    """Drafts at random."""

    def __init__(self, *, vocab_size: int, max_support: int) -> None:
        """`vocab_size` is the target's; a law names `max_support` tokens at most."""
        super().__init__("random")
        self._vocab_size = vocab_size
        self._size = min(vocab_size, max_support)

    def guesser(self, sequence: DraftSequence, domain: Domain = Domain.DRAFT) -> Guesser:
        """Its two draws a place leave no room for another base within the round: it guesses for requests alone."""
        assert domain is Domain.DRAFT
        return _RandomGuesser(sequence, self._vocab_size, self._size)


class _RandomGuesser(Guesser):
    def __init__(self, sequence: DraftSequence, vocab_size: int, size: int) -> None:
        self._sequence = sequence
        self._vocab_size = vocab_size
        self._size = size
        self._base = 0

    def read(self, tokens: Sequence[int]) -> None:
        self._base += len(tokens)

    def guess(self, count: int, ahead: Sequence[int] = ()) -> Guesses:
        assert not ahead
        return [self._draw(place) for place in range(count)]

    def _draw(self, place: int) -> tuple[int, SparseDistribution | None]:
        seed = self._sequence.seed
        law = support(seed, self._base, place, vocab_size=self._vocab_size, size=self._size)
        token = law.token_at(uniform(seed, self._base, place, Domain.DRAFT, _TOKEN))
        return token, None if self._sequence.law.is_greedy else law


def support(seed: int, base: int, place: int, *, vocab_size: int, size: int) -> SparseDistribution:
    """Return the uniform law over `size` of `vocab_size` tokens that belongs to this place of the proposal.

    They lie `vocab_size // size` apart, from a beginning that any token may be, around the end to the start: so over
    seeds every token is drafted equally often.
    """
    begin = int(uniform(seed, base, place, Domain.DRAFT, _SUPPORT) * vocab_size)
    ids = np.sort((begin + np.arange(size) * (vocab_size // size)) % vocab_size)
    return SparseDistribution(ids, np.ones(size, dtype=np.uint16), size)
