"""The drafter that guesses: tokens uniform at random, the limiting case of a draft that costs nothing [L 3.6].

A law can name 256 tokens, so a vocabulary that is larger is cut first: to a support of that many tokens at equal
distances, its beginning drawn for the place. The token is then drawn within the support, and the support is the law.
"""

import asyncio
import time
from collections.abc import Awaitable, Sequence

import numpy as np

from draft_service.drafters.base import UNBOUNDED, Draft, Drafter, Drafting, DraftSequence
from kernels.philox import Domain, uniform
from kernels.sparse import SparseLaw, sample
from kernels.verify import Rule

# The draws of a place: they are disjoint, so the support does not depend on the token (Law 1), nor on other places.
_TOKEN, _SUPPORT = 0, 1


class RandomDrafter(Drafter):
    """Drafts at random."""

    def __init__(self, *, vocab_size: int, max_support: int) -> None:
        """`vocab_size` is the target's; a law names `max_support` tokens at most."""
        self._vocab_size = vocab_size
        self._size = min(vocab_size, max_support)

    def open(self, sequence: DraftSequence) -> Drafting:
        return _RandomDrafting(sequence, self._vocab_size, self._size)


class _RandomDrafting(Drafting):
    def __init__(self, sequence: DraftSequence, vocab_size: int, size: int) -> None:
        self._sequence = sequence
        self._vocab_size = vocab_size
        self._size = size
        self._base = len(sequence.prompt) + len(sequence.committed)

    def room(self) -> int:
        return UNBOUNDED

    def advance(self, tokens: Sequence[int]) -> None:
        self._base += len(tokens)

    def propose(self, gamma: int) -> Awaitable[Draft]:
        begun = time.perf_counter()
        sequence = self._sequence
        drafted, laws = list[int](), list[SparseLaw | None]()
        for place in range(gamma):
            law = support(sequence.seed, self._base, place, vocab_size=self._vocab_size, size=self._size)
            drafted.append(sample(law, uniform(sequence.seed, self._base, place, Domain.DRAFT, _TOKEN)))
            laws.append(None if sequence.law.is_greedy else law)
        told = [] if sequence.rule is Rule.COUPLED else laws
        future: asyncio.Future[Draft] = asyncio.get_running_loop().create_future()
        future.set_result(Draft(drafted, list(told), time.perf_counter() - begun))
        return future

    def close(self) -> None:
        """Nothing is held."""


def support(seed: int, base: int, place: int, *, vocab_size: int, size: int) -> SparseLaw:
    """Return the uniform law over `size` of `vocab_size` tokens that belongs to this place of the proposal.

    They lie `vocab_size // size` apart, from a beginning that any token may be, around the end to the start: so over
    seeds every token is drafted equally often.
    """
    begin = int(uniform(seed, base, place, Domain.DRAFT, _SUPPORT) * vocab_size)
    ids = np.sort((begin + np.arange(size) * (vocab_size // size)) % vocab_size)
    return SparseLaw(ids, np.ones(size, dtype=np.uint16), size)
