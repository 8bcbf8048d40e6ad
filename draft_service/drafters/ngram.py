"""The drafter that counts: the law of the next token by n-grams with back-off [L 3.6, 4.2], sampled from as a model's.

Counts come from a corpus, from what the service writes, and always from the sequence's own prompt and output. A token
takes 0.4 ms at V = 2,048, and 1 to 2 ms at 151,936.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from threading import Lock

import numpy as np
import torch

from draft_service.drafters.base import DraftSequence
from draft_service.drafters.guessing import Guesser, Guesses, GuessingDrafter
from draft_service.drafters.ngram_counts import MAX_ORDER, NGramCounts, back_off
from kernels.adjustments import Adjuster, apply
from kernels.rng import Domain, uniform
from kernels.sampling import Draw, sample
from kernels.sparse import SparseConfig, SparseDistribution
from kernels.verify import Rule

_PIECE = 512  # tokens that are counted before others may look at the counts


@dataclass(frozen=True, slots=True)
class NGramConfig:
    """How to count.

    Attributes:
        order: n; 1 is the unigram, 2 the bigram.
        entries: pairs of a context and a token that the corpus and the learned texts may each come to.
        learns: count what the service writes, and draft by it.
    """

    order: int = 4
    entries: int = 1 << 20
    learns: bool = False


class NGramDrafter(GuessingDrafter):
    """Drafts by counts."""

    def __init__(
        self, corpus: Iterable[Sequence[int]], config: NGramConfig, *, vocab_size: int, sparse: SparseConfig
    ) -> None:
        """Counts the documents of `corpus`, which takes its time: about a second for 200,000 tokens at order 4.

        `vocab_size` is the target's, `sparse` how much of a law to keep.
        """
        super().__init__("ngram")
        self._config = config
        self._sparse = sparse
        self._vocab_size = vocab_size
        self._corpus = self._counts()
        for document in corpus:
            self._corpus.add(document)
        self._learned = self._counts() if config.learns else None
        self._lock = Lock()  # what is learned is counted and read by several threads

    def guesser(self, sequence: DraftSequence, domain: Domain = Domain.DRAFT) -> Guesser:
        learned = self._learned
        own = self._counts()
        # Where draws decide, the law must not depend on them. Counts learned from other texts may: from one that had
        # the same seed. So they serve where draws decide nothing about the text, and where the seed is new.
        by_draws = not (sequence.law.is_greedy or sequence.rule is Rule.COUPLED)
        known = own if learned is None or (by_draws and not sequence.seed_is_fresh) else learned
        taught = [own] if known is own else []
        if learned is not None:
            taught.append(learned)
        return _Counter(sequence, (self._corpus, known), taught, self._vocab_size, self._sparse, domain, self._lock)

    def _counts(self) -> NGramCounts:
        return NGramCounts(self._config.order, self._vocab_size, entries=self._config.entries)


class _Counter(Guesser):
    def __init__(
        self,
        sequence: DraftSequence,
        tables: Sequence[NGramCounts],
        taught: Sequence[NGramCounts],
        vocab_size: int,
        sparse: SparseConfig,
        domain: Domain,
        lock: Lock,
    ) -> None:
        self._sequence = sequence
        self._tables = tables
        self._taught = taught
        self._sparse = sparse
        self._vocab_size = vocab_size
        self._domain = domain
        self._lock = lock
        self._tokens: list[int] = []
        self._adjuster: Adjuster | None = None
        if not sequence.logit_rules.is_identity:
            self._adjuster = Adjuster(sequence.logit_rules, sequence.prompt, vocab_size)

    def read(self, tokens: Sequence[int]) -> None:
        if self._adjuster is not None:
            for token in tokens[max(0, len(self._sequence.prompt) - len(self._tokens)) :]:
                self._adjuster.push(token)
        for begin in range(0, len(tokens), _PIECE):
            with self._lock:
                self._learn(tokens[begin : begin + _PIECE])

    def guess(self, count: int, ahead: Sequence[int] = ()) -> Guesses:
        """`ahead` shifts the base of what is drawn, and is counted by the penalties alone."""
        tokens, guesses = [*self._tokens[-MAX_ORDER:], *ahead], Guesses()
        adjuster, written = self._adjuster, 0
        if adjuster is not None:
            written = adjuster.n_generated
            for token in ahead:
                adjuster.push(token)
        with torch.inference_mode():
            for place in range(count):
                token, law = self._draw(tokens, place, len(ahead))
                if token < 0:  # nothing was counted yet, all that may be written is banned, or it is too unsure
                    break
                tokens.append(token)
                guesses.append((token, law))
                if adjuster is not None:
                    adjuster.push(token)
        if adjuster is not None:
            adjuster.truncate(written)
        return guesses

    def _learn(self, tokens: Sequence[int]) -> None:
        begin = len(self._tokens)
        self._tokens.extend(tokens)
        reach = max(0, begin - max(table.order for table in self._taught)) if self._taught else 0
        for table in self._taught:
            table.add(self._tokens[reach:], begin - reach)

    def _draw(self, tokens: Sequence[int], place: int, inner_base: int) -> tuple[int, SparseDistribution | None]:
        with self._lock:
            p = back_off(self._tables, tokens)
        if p is None:
            return -1, None
        sequence, base = self._sequence, len(self._tokens)
        bound = math.inf if place == 0 or sequence.max_entropy is None else sequence.max_entropy
        z = torch.from_numpy(np.log(p)).to(torch.float32).unsqueeze(0)  # [1, V]
        if self._adjuster is not None:
            z = apply(z, [self._adjuster.row()])
        law = sequence.draft_law
        if sequence.shares_noise:
            how = Draw(law, noise=(sequence.seed, base + inner_base + place), max_entropy=bound)
        else:
            u = 0.0 if law.is_greedy else uniform(sequence.seed, base, place, self._domain, inner_base)
            how = Draw(law, u, max_entropy=bound)
        (found,) = sample(z, [how], self._sparse)
        return found.token, found.q
