"""q̂: the draft probabilities, truncated to the best tokens and rounded to integers, both sampled from and sent.

Truncate, round, then sample from the integers: the message then holds exactly the distribution that was sampled from
(invariant 1).
"""

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np
import torch

MAX_SUPPORT = 256
"""The largest K. With 16-bit weights Σw stays below 2^24, which float32 holds exactly."""


@dataclass(frozen=True, slots=True, eq=False)
class SparseDistribution:
    """A distribution with integer weights: q̂(ids[k]) = weights[k] / total.

    Attributes:
        ids: ascending token ids, `[K]`, int64 or uint32.
        weights: each at least 1, `[K]`, uint16.
        total: Σ weights, below 2^24.
    """

    ids: np.ndarray
    weights: np.ndarray
    total: int

    def __post_init__(self) -> None:
        if self.total <= 0:
            raise ValueError(f"total is {self.total}; weights must sum to at least 1")

    def probability(self, token: int) -> float:
        """Return q̂(token); 0 outside the support."""
        slot = bisect_left(self.ids, token)  # numpy's search gives up the GIL, and waits for it, once for each token
        if slot == len(self.ids) or int(self.ids[slot]) != token:
            return 0.0
        return int(self.weights[slot]) / self.total

    def token_at(self, u: float) -> int:
        """Return the token of the inverse CDF at `u` in [0, 1), in integers.

        A uniform of 53 bits gives every token its exact probability up to 2^-53, and never one outside the support.
        """
        target = (int(u * 2.0**53) * self.total) >> 53
        return int(self.ids[self.weights.cumsum(dtype=np.int64).searchsorted(target, side="right")])


def evenly_spaced(begin: int, vocab_size: int, size: int) -> SparseDistribution:
    """Return equal weights of `size` of V tokens, V // size apart; they wrap around from `begin`."""
    ids = np.sort((begin + np.arange(size) * (vocab_size // size)) % vocab_size)
    return SparseDistribution(ids, np.ones(size, dtype=np.uint16), size)


@dataclass(frozen=True, slots=True)
class SparseConfig:
    """How much of a distribution to keep: the fewest best tokens with `keep_mass`, but `max_support` at most.

    Raises:
        ValueError: `keep_mass` is outside (0, 1] or `max_support` outside 1..256.
    """

    keep_mass: float = 0.99
    max_support: int = MAX_SUPPORT

    def __post_init__(self) -> None:
        if not 0 < self.keep_mass <= 1:
            raise ValueError(f"keep_mass is {self.keep_mass}; it must be above 0 and at most 1")
        if not 1 <= self.max_support <= MAX_SUPPORT:
            raise ValueError(f"max_support is {self.max_support}; it must be 1 to {MAX_SUPPORT}")


def truncate(p: np.ndarray, config: SparseConfig) -> SparseDistribution:
    """Return q̂ of one distribution `p` `[V]`.

    The fewest most probable tokens with `keep_mass` are kept (lower ids first among equals), `max_support` at most.
    Weights are in proportion to the largest, which gets 65535; tokens that round to zero are dropped.
    """
    V, K = len(p), config.max_support
    # All tokens below the first bound together have less than half of the mass that may be dropped. Tokens below the
    # second bound have weight 0, since the largest probability is at least 1/V. So only the rest is sorted.
    least = max((1.0 - config.keep_mass) / 2, 0.25 / 65535) / V
    if V > 16 * K:
        least = max(least, float(torch.topk(torch.from_numpy(p), K, sorted=False)[0].min()))
    ids = (p >= least).nonzero()[0]
    kept = p[ids]
    best = np.sort(kept)  # ascending
    held = best[: -K - 1 : -1].cumsum(dtype=np.float64)
    size = min(int(held.searchsorted(config.keep_mass)) + 1, len(held))
    last, scale = best[-size], 65535.0 / float(best[-1])
    if size < len(ids):
        inside = kept >= last
        ids, kept = ids[inside], kept[inside]
        if len(ids) > size:  # more tokens equal the last one than fit: the lower ids are kept
            surplus = (kept == last).nonzero()[0][size - len(ids) :]
            ids, kept = np.delete(ids, surplus), np.delete(kept, surplus)
    weights = np.multiply(kept, scale, dtype=np.float64)
    np.rint(weights, out=weights)
    total = int(weights.sum())
    weights = weights.astype(np.uint16)
    if float(last) * scale <= 0.5:  # the least probable tokens have the weight 0
        ids, weights = ids[weights > 0], weights[weights > 0]
    return SparseDistribution(ids, weights, total)


def validate(ids: np.ndarray, weights: np.ndarray, vocab_size: int) -> SparseDistribution:
    """Check ids and weights from outside, and return their distribution.

    Raises:
        ValueError: lengths differ, K is 0 or above 256, ids are not strictly ascending or not below `vocab_size`, or a
            weight is 0; names the numbers.
    """
    K = len(ids)
    if len(weights) != K:
        raise ValueError(f"token_ids has length {K} and weights {len(weights)}; they must be equal")
    if not 1 <= K <= MAX_SUPPORT:
        raise ValueError(f"token_ids has length {K}; it must be 1 to {MAX_SUPPORT}")
    _refuse_disorder(ids)
    if int(ids[0]) < 0 or int(ids[-1]) >= vocab_size:
        bad = int(ids[0]) if int(ids[0]) < 0 else int(ids[-1])
        raise ValueError(f"token_ids has {bad}; ids must be below {vocab_size}, the size of the vocabulary")
    total = int(weights.sum(dtype=np.int64))
    if total == 0:
        raise ValueError(f"all {K} weights are 0; each must be at least 1")
    if not weights.all():
        raise ValueError(f"the weight of token {int(ids[int(weights.argmin())])} is 0; it must be at least 1")
    return SparseDistribution(ids, weights, total)


def _refuse_disorder(ids: np.ndarray) -> None:
    rising = ids[1:] > ids[:-1]
    if rising.all():
        return
    at = int(rising.argmin())
    first, second = int(ids[at]), int(ids[at + 1])
    if first == second:
        raise ValueError(f"token_ids has {first} twice, at indices {at} and {at + 1}; give each id once")
    raise ValueError(f"token_ids must ascend; {first} at index {at} is followed by {second}")
