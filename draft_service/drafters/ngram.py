"""The drafter that samples from n-gram counts with back-off [L 3.6, 4.2].

Counts come from the sequence's own prompt and output, from a corpus (`--ngram-corpus`), and from served texts
(`--ngram-learn`). A token takes 0.4 ms at V = 2,048, and 1 to 2 ms at 151,936, so drafting runs on a thread of its own.
"""

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from threading import Lock

import numpy as np
import torch

from draft_service.drafters.base import CheapDrafter, DraftSequence, Guesser, Guesses
from kernels.adjustments import Adjuster, apply
from kernels.rng import Domain
from kernels.sampling import sample
from kernels.sparse import SparseConfig
from outrider.runtime.ngram import NGramCounts, back_off


class NGramDrafter(CheapDrafter):
    """Drafts from counts."""

    def __init__(
        self,
        corpus: Iterable[Sequence[int]],
        *,
        vocab_size: int,
        sparse: SparseConfig,
        order: int = 4,
        entries: int = 1 << 20,
        learns: bool = False,
    ) -> None:
        """Counts `corpus`, about a second for 200,000 tokens at order 4; served texts too if it `learns`.

        `vocab_size` is the target's, `order` is n, `entries` bounds corpus and served texts each (`NGramCounts`).
        """
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="ngram")
        self.sparse, self.lock = sparse, Lock()  # this thread counts served texts; in staged drafting, the engine's
        self._counts = partial(NGramCounts, order, vocab_size, entries)
        self._corpus, self._learned = self._counts(), [self._counts()] if learns else []
        for document in corpus:
            self._corpus.add(document)

    def guesser(self, sequence: DraftSequence, domain: Domain = Domain.DRAFT) -> Guesser:
        own, others = self._counts(), self._learned if sequence.owns_draws else []
        return _Counter(self, sequence, domain, [self._corpus, own, *others], [own, *others])


@dataclass
class _Counter(Guesser):
    """Drafts from `tables`, and counts the tokens that it reads in `counted`."""

    drafter: NGramDrafter
    sequence: DraftSequence
    domain: Domain
    tables: "list[NGramCounts]"
    counted: "list[NGramCounts]"
    tokens: list[int] = field(default_factory=list)

    @cached_property
    def adjuster(self) -> Adjuster:
        return Adjuster(self.sequence.logit_rules, self.sequence.prompt, len(self.tables[0].singles))

    def read(self, tokens: Sequence[int]) -> None:
        begin = len(self.tokens)
        self.tokens.extend(tokens)
        for token in self.tokens[max(begin, len(self.sequence.prompt)) :]:
            self.adjuster.push(token)
        with self.drafter.lock:
            for table in self.counted:
                table.add(self.tokens, begin)

    @torch.inference_mode()
    def guess(self, count: int, ahead: Sequence[int] = ()) -> Guesses:
        """`ahead` shifts the base of the draws. Penalties count it; `tables` do not."""
        context, guesses, adjuster = [*self.tokens[-self.tables[0].order :], *ahead], Guesses(), self.adjuster.copy()
        for token in ahead:
            adjuster.push(token)
        for index in range(count):
            with self.drafter.lock:
                p = back_off(self.tables, context)
            if p is None:  # no counts yet
                break
            z = torch.from_numpy(np.log(p)).to(torch.float32).unsqueeze(0)  # [1, V]
            how = self.sequence.draw(len(self.tokens), index, self.domain, len(ahead))
            (found,) = sample(apply(z, [adjuster.row()]), [how], self.drafter.sparse)
            if found.token < 0:  # every token is banned, or the entropy is above the bound
                break
            guesses.append((found.token, found.q))
            context.append(found.token)
            adjuster.push(found.token)
        return guesses
