"""Bigram and unigram models of the training text: the cheapest drafts there are [L Table 3].

They work on token ids.
"""

import numpy as np

BACK_OFF = 4.0  # weight of the unigram distribution in each bigram distribution, in counts


def unigram(stream: np.ndarray, vocabulary: int) -> np.ndarray:
    """The distribution of a token, `[V]` float64, with one added to each count."""
    counts = np.bincount(stream, minlength=vocabulary).astype(np.float64) + 1.0
    return counts / counts.sum()


def bigram(stream: np.ndarray, vocabulary: int) -> np.ndarray:
    """The distribution of a token after each token (the rows of `[V, V]`), backed off to the unigram distribution."""
    pairs = stream[:-1].astype(np.int64) * vocabulary + stream[1:]
    counts = np.bincount(pairs, minlength=vocabulary * vocabulary).reshape(vocabulary, vocabulary)
    backed = counts + BACK_OFF * unigram(stream, vocabulary)[None]
    return backed / backed.sum(axis=1, keepdims=True)
