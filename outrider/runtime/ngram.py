"""Counts of n-grams, and the next-token distribution by them, with back-off [L 3.6, 4.2]."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np


class NGramCounts:
    """Counts of each token after each context of up to `order` - 1 tokens, in bounded memory.

    Above `bound` pairs of a context and a token, the least frequent contexts are dropped, oldest first, until three
    quarters of the pairs are left. Counts of single tokens stay.
    """

    def __init__(self, order: int, vocab_size: int, bound: int) -> None:
        self.order, self.bound = order, bound
        self.singles = np.zeros(vocab_size)  # counts of single tokens
        self.followers: dict[tuple[int, ...], dict[int, int]] = {}  # by context: counts of the next token
        self.entries = 0  # pairs of a context and a token

    def add(self, tokens: Sequence[int], begin: int = 0) -> None:
        """Counts `tokens[begin:]`, each after those before it. Skips ids outside the vocabulary."""
        for at in range(begin, len(tokens)):
            if not 0 <= (token := tokens[at]) < len(self.singles):
                continue
            self.singles[token] += 1
            for length in range(1, min(self.order, at + 1)):
                found = self.followers.setdefault(tuple(tokens[at - length : at]), {})
                self.entries += token not in found
                found[token] = found.get(token, 0) + 1
        if self.entries > self.bound:
            rarest = iter(sorted(self.followers, key=lambda context: sum(self.followers[context].values())))
            while self.entries > 0.75 * self.bound:
                self.entries -= len(self.followers.pop(next(rarest)))


def back_off(tables: Sequence[NGramCounts], tokens: Sequence[int]) -> np.ndarray | None:
    """Return the distribution of the token after `tokens` by the counts of all `tables` together, float64 `[V]`.

    A context with c occurrences and t different next tokens gives weight c / (c + t) to their frequencies, and the rest
    to the context one token shorter (Witten and Bell, 1991), the shortest to all tokens alike. None without counts.
    """
    singles = np.add.reduce([table.singles for table in tables])
    if not (seen := singles.sum()):
        return None
    kinds = int(np.count_nonzero(singles))
    p = (singles + kinds / len(singles)) / (seen + kinds)
    for length in range(1, min(tables[0].order, len(tokens) + 1)):
        pairs = [pair for table in tables for pair in table.followers.get(tuple(tokens[-length:]), {}).items()]
        if pairs:  # a token of two tables appears twice
            ids, counts = np.array(pairs, dtype=np.int64).T
            kinds = len(np.unique(ids))
            p *= kinds / (counts.sum() + kinds)
            np.add.at(p, ids, counts / (counts.sum() + kinds))
    return p


def read_documents(corpus: Path, *, by_line: bool) -> Iterator[str]:
    """Yield the texts of a corpus, which no n-gram crosses: its lines that are not empty, or the whole file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not UTF-8.
    """
    text = corpus.read_text(encoding="utf-8")
    if by_line:
        yield from filter(None, text.splitlines())
    elif text:
        yield text
