"""Bigram and unigram models of the training text: the cheapest drafts there are [L Table 3].

It knows ids and counts, nothing of text.
"""

from __future__ import annotations

import numpy as np

BACK_OFF = 4.0  # how many observations the unigram law counts for in each bigram law


def unigram(stream: np.ndarray, vocabulary: int) -> np.ndarray:
    """The law of a token alone, `[V]` float64; every token counts as seen once more than it was."""
    counts = np.bincount(stream, minlength=vocabulary).astype(np.float64) + 1.0
    return counts / counts.sum()


def bigram(stream: np.ndarray, vocabulary: int) -> np.ndarray:
    """The law of a token given the one before (the row of `[V, V]`), backed off to the unigram law."""
    pairs = stream[:-1].astype(np.int64) * vocabulary + stream[1:]
    counts = np.bincount(pairs, minlength=vocabulary * vocabulary).reshape(vocabulary, vocabulary)
    backed = counts + BACK_OFF * unigram(stream, vocabulary)[None]
    return backed / backed.sum(axis=1, keepdims=True)
