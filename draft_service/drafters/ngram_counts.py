"""Counts of n-grams in bounded memory, and the law they make: Witten-Bell back-off, down to the single tokens."""

from collections.abc import Iterable, Sequence

import numpy as np

Context = tuple[int, ...]

MAX_ORDER = 8
_KEPT_SHARE = 0.75  # of the bound, when it was passed


class NGramCounts:
    """How often each token followed each context of up to `order` - 1 tokens.

    Where more than `entries` pairs of a context and a token are known, the contexts seen least go, older ones first,
    until three quarters are left. Single tokens (the empty context) are never forgotten: there are V at most.

    Attributes:
        order: n; 1 counts single tokens alone, 2 pairs, and so on.
        singles: how often each token was seen, float64 `[V]`.
        entries: pairs of a context and a token that are known now.
    """

    def __init__(self, order: int, vocab_size: int, *, entries: int) -> None:
        """`entries` is how many pairs may be known.

        Raises:
            ValueError: `order` is outside 1..8, or another number below 1.
        """
        if not 1 <= order <= MAX_ORDER:
            raise ValueError(f"order is {order}, outside 1..{MAX_ORDER}")
        if entries < 1 or vocab_size < 1:
            raise ValueError(f"entries is {entries} and vocab_size is {vocab_size}; both must be at least 1")
        self.order = order
        self.singles = np.zeros(vocab_size)
        self.entries = 0
        self._bound = entries
        self._followers: dict[Context, dict[int, int]] = {}

    def add(self, tokens: Sequence[int], begin: int = 0) -> None:
        """Counts `tokens[begin:]`, each after those before it. Ids outside the vocabulary are passed over."""
        V = len(self.singles)
        for at in range(begin, len(tokens)):
            token = tokens[at]
            if not 0 <= token < V:
                continue
            self.singles[token] += 1
            for length in range(1, min(self.order, at + 1)):
                self._count(tuple(tokens[at - length : at]), token)
        if self.entries > self._bound:
            self._forget()

    def followers(self, context: Context) -> dict[int, int]:
        """What followed a context that is not empty, and how often; empty where it was never seen."""
        return self._followers.get(context, {})

    def _count(self, context: Context, token: int) -> None:
        found = self._followers.setdefault(context, {})
        if token not in found:
            self.entries += 1
        found[token] = found.get(token, 0) + 1

    def _forget(self) -> None:
        keep = int(_KEPT_SHARE * self._bound)
        for context in sorted(self._followers, key=lambda context: sum(self._followers[context].values())):
            if self.entries <= keep:
                return
            self.entries -= len(self._followers.pop(context))


def back_off(tables: Sequence[NGramCounts], tokens: Sequence[int]) -> np.ndarray | None:
    """Return the law of the token after `tokens` by the counts of all `tables` together, float64 `[V]`.

    A context that was seen c times with t different followers gives c / (c + t) to their frequencies and leaves the
    rest to the context one token shorter (Witten and Bell, 1991); single tokens leave theirs to the uniform law. So
    every token has a chance, and what was never seen after two tokens is judged by the last one, and so on.

    None where no token was counted at all.
    """
    singles = np.add.reduce([table.singles for table in tables])
    seen = singles.sum()
    if not seen:
        return None
    left, parts = 1.0, []
    for length in range(min(max(table.order for table in tables) - 1, len(tokens)), 0, -1):
        context = tuple(tokens[-length:])
        ids, counts = _together(table.followers(context) for table in tables)
        if len(ids):
            rest = len(np.unique(ids))
            share = left / (counts.sum() + rest)
            parts.append((ids, counts * share))
            left = share * rest
    kinds = np.count_nonzero(singles)
    p = (singles + kinds / len(singles)) * (left / (seen + kinds))
    for ids, mass in parts:
        np.add.at(p, ids, mass)
    return p


def _together(found: Iterable[dict[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and their counts of several tables; a token of two tables stands twice."""
    pairs = [pair for followers in found for pair in followers.items()]
    table = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    return table[:, 0], table[:, 1].astype(np.float64)
