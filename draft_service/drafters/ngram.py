"""The drafter that counts: it samples from the distribution of the next token by n-grams with back-off [L 3.6, 4.2].

Counts come from a corpus, from what the service writes, and always from the sequence's own prompt and output. A token
takes 0.4 ms at V = 2,048, and 1 to 2 ms at 151,936, so all of it happens on one thread beside the event loop.
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
    """Drafts by counts."""

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

        `vocab_size` is the target's, `order` is n; corpus and learned texts may each come to `entries` pairs of a
        context and a token. `learns`: count what the service writes, and draft by it.
        """
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ngram")
        self.lock = Lock()  # what is learned is counted by this thread, and in staged drafting by the engine's
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
        # Where draws decide, the distribution must not depend on them. Counts learned from other texts may: from one
        # that had the same seed. So they serve where draws decide nothing about the text, and where the seed is new.
        by_draws = not (sequence.law.is_greedy or sequence.rule is Rule.COUPLED)
        if learned is None or (by_draws and not sequence.seed_is_fresh):
            return _Counter(self, sequence, domain, [self._corpus, own], [own, learned] if learned else [own])
        return _Counter(self, sequence, domain, [self._corpus, learned], [learned])


@dataclass
class _Counter(Guesser):
    """Drafts by `tables`, and counts what it reads in `taught`."""

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
        """`ahead` shifts the base of what is drawn, and is counted by the penalties alone."""
        context, guesses, written = [*self.tokens[-MAX_ORDER:], *ahead], Guesses(), self.adjuster.n_generated
        for token in ahead:
            self.adjuster.push(token)
        for place in range(count):
            with self.drafter.lock:
                p = back_off(self.tables, context)
            if p is None:  # nothing was counted yet
                break
            z = torch.from_numpy(np.log(p)).to(torch.float32).unsqueeze(0)  # [1, V]
            how = self.sequence.draw(len(self.tokens), place, self.domain, len(ahead))
            (found,) = sample(apply(z, [self.adjuster.row()]), [how], self.drafter.sparse)
            if found.token < 0:  # all that may be written is banned, or it is too unsure
                break
            guesses.append((found.token, found.q))
            context.append(found.token)
            self.adjuster.push(found.token)
        self.adjuster.truncate(written)
        return guesses


class NGramCounts:
    """How often each token followed each context of up to `order` - 1 tokens, in bounded memory.

    Where more than `bound` pairs of a context and a token are known, the contexts seen least go, older ones first,
    until three quarters are left. Single tokens (the empty context) are never forgotten: there are V at most.
    """

    def __init__(self, order: int, vocab_size: int, bound: int) -> None:
        self.order = order
        self.singles = np.zeros(vocab_size)  # how often each token was seen
        self.followers: dict[tuple[int, ...], dict[int, int]] = {}  # by context, what followed it and how often
        self.entries = 0  # pairs of a context and a token that are known now
        self._bound = bound

    def add(self, tokens: Sequence[int], begin: int = 0) -> None:
        """Counts `tokens[begin:]`, each after those before it. Ids outside the vocabulary are passed over."""
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

    A context that was seen c times with t different followers gives c / (c + t) to their frequencies and leaves the
    rest to the context one token shorter (Witten and Bell, 1991); single tokens leave theirs to the uniform
    distribution. So every token has a chance. None where no token was counted at all.
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
        if pairs:  # a token of two tables stands twice
            ids, counts = np.array(pairs, dtype=np.int64).T
            kinds = len(np.unique(ids))
            p *= kinds / (counts.sum() + kinds)
            np.add.at(p, ids, counts / (counts.sum() + kinds))
    return p
