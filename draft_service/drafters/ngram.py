"""The drafter that samples from n-gram counts with back-off [L 3.6, 4.2].

Counts come from the sequence's own prompt and output, from a corpus (`--ngram-corpus`), and from served texts
(`--ngram-learn`). A token takes 0.4 ms at V = 2,048, and 1 to 2 ms at 151,936, so drafting runs on a thread of its own.
"""

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from threading import Lock

import numpy as np
import torch

from draft_service.drafters.base import Drafting, DraftSequence, Guesser, GuesserDrafting, Guesses, GuessingDrafter
from kernels.adjustments import Adjuster, apply
from kernels.rng import Domain
from kernels.sampling import sample
from kernels.sparse import SparseConfig
from kernels.verify import Rule

MAX_ORDER = 8


class NGramDrafter(GuessingDrafter):
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
        """Counts `corpus`, about a second for 200,000 tokens at order 4.

        `vocab_size` is the target's, and `order` is n. Corpus and served texts may each hold `entries` pairs of a
        context and a token. `learns`: count served texts, and draft from those counts.
        """
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ngram")
        self.lock = Lock()  # this thread counts served texts; in staged drafting, the engine's does
        self.vocab_size, self.sparse = vocab_size, sparse
        self._size = order, vocab_size, entries
        self._corpus = NGramCounts(*self._size)
        for document in corpus:
            self._corpus.add(document)
        self._learned = NGramCounts(*self._size) if learns else None

    def open(self, sequence: DraftSequence) -> Drafting:
        return GuesserDrafting(self.guesser(sequence), sequence, self._thread)

    def guesser(self, sequence: DraftSequence, domain: Domain = Domain.DRAFT) -> Guesser:
        own, learned = NGramCounts(*self._size), self._learned
        # Where draws decide the text, q must not depend on them. Counts of other texts may: one may have the same seed.
        # So they are used only where no draw decides the text, or where the seed is fresh.
        by_draws = not (sequence.params.is_greedy or sequence.rule is Rule.COUPLED)
        if learned is None or (by_draws and not sequence.seed_is_fresh):
            return _Counter(self, sequence, domain, [self._corpus, own], [own, learned] if learned else [own])
        return _Counter(self, sequence, domain, [self._corpus, learned], [learned])


@dataclass
class _Counter(Guesser):
    """Drafts from `tables`, and counts the tokens that it reads in `taught`."""

    drafter: NGramDrafter
    sequence: DraftSequence
    domain: Domain
    tables: "list[NGramCounts]"
    taught: "list[NGramCounts]"
    tokens: list[int] = field(default_factory=list)

    @cached_property
    def adjuster(self) -> Adjuster:
        return Adjuster(self.sequence.logit_rules, self.sequence.prompt, self.drafter.vocab_size)

    def read(self, tokens: Sequence[int]) -> None:
        begin = len(self.tokens)
        for token in tokens[max(0, len(self.sequence.prompt) - begin) :]:
            self.adjuster.push(token)
        self.tokens.extend(tokens)
        reach = max(0, begin - MAX_ORDER)
        with self.drafter.lock:
            for table in self.taught:
                table.add(self.tokens[reach:], begin - reach)

    @torch.inference_mode()
    def guess(self, count: int, ahead: Sequence[int] = ()) -> Guesses:
        """`ahead` shifts the base of the draws. Penalties count it; `tables` do not."""
        context, guesses, written = [*self.tokens[-MAX_ORDER:], *ahead], Guesses(), self.adjuster.n_generated
        for token in ahead:
            self.adjuster.push(token)
        for index in range(count):
            with self.drafter.lock:
                p = back_off(self.tables, context)
            if p is None:  # no counts yet
                break
            z = torch.from_numpy(np.log(p)).to(torch.float32).unsqueeze(0)  # [1, V]
            how = self.sequence.draw(len(self.tokens), index, self.domain, len(ahead))
            (found,) = sample(apply(z, [self.adjuster.row()]), [how], self.drafter.sparse)
            if found.token < 0:  # every token is banned, or the entropy is above the bound
                break
            guesses.append((found.token, found.q))
            context.append(found.token)
            self.adjuster.push(found.token)
        self.adjuster.truncate(written)
        return guesses


class NGramCounts:
    """Counts of each token after each context of up to `order` - 1 tokens, in bounded memory.

    Above `bound` pairs of a context and a token, the least frequent contexts are dropped, oldest first, until three
    quarters of the pairs are left. Counts of single tokens (the empty context) stay: there are at most V.
    """

    def __init__(self, order: int, vocab_size: int, bound: int) -> None:
        self.order = order
        self.singles = np.zeros(vocab_size)  # counts of single tokens
        self.followers: dict[tuple[int, ...], dict[int, int]] = {}  # by context: counts of the next token
        self.entries = 0  # pairs of a context and a token
        self._bound = bound

    def add(self, tokens: Sequence[int], begin: int = 0) -> None:
        """Counts `tokens[begin:]`, each after those before it. Skips ids outside the vocabulary."""
        for at in range(begin, len(tokens)):
            token = tokens[at]
            if not 0 <= token < len(self.singles):
                continue
            self.singles[token] += 1
            for length in range(1, min(self.order, at + 1)):
                found = self.followers.setdefault(tuple(tokens[at - length : at]), {})
                self.entries += token not in found
                found[token] = found.get(token, 0) + 1
        if self.entries > self._bound:
            self._forget()

    def _forget(self) -> None:
        for context in sorted(self.followers, key=lambda context: sum(self.followers[context].values())):
            if self.entries <= 0.75 * self._bound:
                return
            self.entries -= len(self.followers.pop(context))


def back_off(tables: Sequence[NGramCounts], tokens: Sequence[int]) -> np.ndarray | None:
    """Return the distribution of the token after `tokens` by the counts of all `tables` together, float64 `[V]`.

    A context with c occurrences and t different next tokens gives weight c / (c + t) to their frequencies, and the rest
    to the context one token shorter (Witten and Bell, 1991). Below single tokens comes the uniform distribution, so
    every token has a probability above 0. None without counts.
    """
    singles = np.add.reduce([table.singles for table in tables])
    seen = singles.sum()
    if not seen:
        return None
    kinds = int(np.count_nonzero(singles))
    p = (singles + kinds / len(singles)) / (seen + kinds)
    for length in range(1, min(tables[0].order, len(tokens) + 1)):
        context = tuple(tokens[-length:])
        pairs = [pair for table in tables for pair in table.followers.get(context, {}).items()]
        if pairs:  # a token of two tables appears twice
            ids, counts = np.array(pairs, dtype=np.int64).T
            kinds = len(np.unique(ids))
            p *= kinds / (counts.sum() + kinds)
            np.add.at(p, ids, counts / (counts.sum() + kinds))
    return p
