"""Staged drafting [L 6]: a cheap drafter guesses tokens, and one step of the draft model judges several of them.

The draft model acts as the target of the guesses. It judges them with q̂, truncated and quantised, so the proposal has
the same distribution as without guesses. All tests and draws use integers, so this is exact. Draws have three domains
of their own, keyed by the base of the round and by the inner base, the number of tokens already drafted in the round
(invariant 2).
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from draft_service.drafters.base import Guesses
from draft_service.drafters.sequence import DraftWork, ModelSequence
from kernels.rng import Domain, uniform
from kernels.sampling import Draw, Sample
from kernels.sparse import SparseDistribution
from outrider.runtime.batch import Chunk
from outrider.runtime.kv_cache import KVPool
from outrider.service.best_effort import Component

GUESSES = Component("staged_guesses")

_BITS = 53


class Staging:
    """Adds guesses to the engine's work, and judges them with the draft model's samples.

    Attributes:
        steps: of the draft model that judged guesses, counted once for each sequence.
        guessed: tokens in those steps.
        accepted: guessed tokens that the draft model accepted.
        failures: guessers that failed; the model drafts for their sequences without guesses.
    """

    def __init__(self, guesses: int, known: int) -> None:
        """`guesses` is the most tokens guessed at once; `known` is the draft model's vocabulary size."""
        self.steps = self.guessed = self.accepted = self.failures = 0
        self._guesses = guesses
        self._known = known

    def judge(self, work: DraftWork, samples: Sequence[Sample], pool: KVPool) -> list[Sample]:
        """Returns the accepted guesses and the token after them, and rolls the KV cache back to them.

        `samples` are the model's, after the sequence's tokens and after each guess that ran.
        """
        kept = _walk(work.sequence, work.guesses, samples)
        accepted = len(kept) - 1
        pool.rollback(work.chunk.slot, len(work.sequence.tokens) + accepted)
        self.steps += 1
        self.guessed += len(work.guesses)
        self.accepted += accepted
        return kept

    def with_guesses(self, item: DraftWork) -> DraftWork:
        """Returns the work with guesses, if its sequence has a guesser."""
        if item.sequence.guessing is None:
            return item
        guessed = GUESSES.run(lambda: self._with_guesses(item), None)
        if guessed is not None:
            return guessed
        self.failures += 1
        item.sequence.guessing = None  # its state is unknown
        return item

    def _with_guesses(self, item: DraftWork) -> DraftWork:
        """The guesser reads as far as the step does, so it reads a long prompt in pieces too; then it guesses.

        Without a guess, the model drafts the rest of the round. Only the text decides this, so a round has the
        same tokens in any batch.
        """
        sequence, chunk, guessing = item.sequence, item.chunk, item.sequence.guessing
        assert guessing is not None
        unread = sequence.tokens[guessing.read : min(chunk.start + len(chunk.tokens), sequence.base)]
        if unread:
            guessing.guesser.read(unread)
            guessing.read += len(unread)
        count = min(self._guesses, sequence.gamma - sequence.drafted - 1)
        if not item.draws or count < 1 or guessing.silent == sequence.base:
            return item
        guesses = guessing.guesser.guess(count, sequence.tokens[sequence.base :])
        if not guesses:
            guessing.silent = sequence.base
            return item
        tokens = [token for token, _ in guesses]
        unknown = next((index for index, token in enumerate(tokens) if token >= self._known), len(tokens))
        # A guess that the draft model lacks stays in the round (invariant 4). q̂ rejects it, so it need not run.
        longer = Chunk(chunk.slot, [*chunk.tokens, *tokens[:unknown]], chunk.start, chunk.logits_from)
        return replace(item, chunk=longer, guesses=guesses[: unknown + 1])


def row_draws(sequence: ModelSequence, guesses: Guesses, rows: int) -> list[Draw]:
    """How the model samples the rows after the sequence's tokens and after each guess or mask that ran, `rows` in all.

    With guesses, only the last row draws a token, and only if no guess is left that it judges.
    """
    if not guesses or sequence.opening.shares_noise:
        return [sequence.draw(sequence.drafted + index) for index in range(rows)]
    last = rows - 1
    is_drawn = not sequence.params.is_greedy and rows > len(guesses)
    u = _uniform(sequence, last, Domain.STAGED_RESAMPLE) if is_drawn else 0.0
    return [Draw(sequence.params, u if index == last else 0.0) for index in range(rows)]


def _walk(sequence: ModelSequence, guesses: Guesses, samples: Sequence[Sample]) -> list[Sample]:
    # [L Alg. 1]
    kept = list[Sample]()
    for index, (token, guessed) in enumerate(guesses):
        own = samples[index]
        if own.q is None:  # chosen by scores, or the logits are bad
            if own.token != token:
                return [*kept, own]
        elif not accepts(_uniform(sequence, index, Domain.STAGED_ACCEPT), guessed, own.q, token):
            u = _uniform(sequence, index, Domain.STAGED_RESAMPLE)
            return [*kept, own._replace(token=resample(u, guessed, own.q, token))]
        kept.append(own._replace(token=token))
    return [*kept, samples[len(kept)]]


def _uniform(sequence: ModelSequence, index: int, domain: Domain) -> float:
    return uniform(sequence.opening.seed, sequence.base, index, domain, sequence.drafted)


def accepts(u: float, guessed: SparseDistribution | None, q: SparseDistribution, token: int) -> bool:
    """Whether a guess is accepted: u · r(x) < q̂(x). Strict, so that q̂(x) = 0 is never accepted.

    Args:
        u: uniform of 53 bits in [0, 1).
        guessed: r, the distribution that the guess was sampled from; None is the point mass.
        token: x; never accepted if r(x) = 0.
    """
    r, total = (1, 1) if guessed is None else (_weight(guessed, token), guessed.total)
    return r > 0 and int(u * 2.0**_BITS) * r * q.total < (_weight(q, token) * total) << _BITS


def resample(u: float, guessed: SparseDistribution | None, q: SparseDistribution, token: int) -> int:
    """The token of the inverse CDF of norm(max(0, q̂ - r)) at `u`, after `token` was rejected.

    After a rejection the residual has mass: q̂(x) < r(x), so q̂ is larger at other tokens.

    Raises:
        ValueError: the residual has no mass, so `token` cannot have been rejected.
    """
    ids = q.ids.astype(np.int64)
    if guessed is None:
        rest = np.where(ids == token, 0, q.weights.astype(np.int64))
    else:
        # q̂ - r over the common denominator: 16-bit weights times 24-bit totals.
        r = np.zeros(len(ids), dtype=np.int64)
        slots = np.searchsorted(guessed.ids, ids).clip(max=len(guessed.ids) - 1)
        same = guessed.ids[slots] == ids
        r[same] = guessed.weights[slots[same]]
        rest = np.maximum(0, q.weights.astype(np.int64) * guessed.total - r * q.total)
    cdf = rest.cumsum()
    total = int(cdf[-1])
    if not total:
        raise ValueError(f"token {token} was rejected, but q̂ has no other token")
    return int(ids[cdf.searchsorted((int(u * 2.0**_BITS) * total) >> _BITS, side="right")])


def _weight(q: SparseDistribution, token: int) -> int:
    slot = int(np.searchsorted(q.ids, token)) if token >= 0 else len(q.ids)
    return int(q.weights[slot]) if slot < len(q.ids) and int(q.ids[slot]) == token else 0
