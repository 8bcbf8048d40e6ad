"""q̂: the draft's law, cut to its best tokens and rounded to integers, both sampled from and sent.

Truncate, round, then sample from the integers: what is sent is then exactly what was used. Knows nothing of targets,
of the wire, or of where the uniforms come from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.distribution import SamplingLaw, probabilities
from kernels.entropy import UNSURE, entropy_of_greedy, entropy_of_weights

MAX_SUPPORT = 256
"""The largest K. With 16-bit weights Σw stays below 2^24, which float32 holds exactly."""

# What TorchScript compiles sees no constants of a module: below they stand as numbers.


@dataclass(frozen=True, slots=True, eq=False)
class SparseLaw:
    """A law with integer weights: q̂(ids[k]) = weights[k] / total.

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
        slot = int(np.searchsorted(self.ids, token)) if token >= 0 else len(self.ids)
        if slot == len(self.ids) or int(self.ids[slot]) != token:
            return 0.0
        return int(self.weights[slot]) / self.total


@dataclass(frozen=True, slots=True)
class SparseConfig:
    """How much of a law to keep: the fewest best tokens with `keep_mass`, but `max_support` at most.

    Raises:
        ValueError: `keep_mass` is outside (0, 1] or `max_support` outside 1..256.
    """

    keep_mass: float = 0.99
    max_support: int = MAX_SUPPORT

    def __post_init__(self) -> None:
        if not 0 < self.keep_mass <= 1:
            raise ValueError(f"keep_mass is {self.keep_mass}; it must be above 0 and at most 1")
        if not 1 <= self.max_support <= MAX_SUPPORT:
            raise ValueError(f"max_support is {self.max_support}, outside 1..{MAX_SUPPORT}")


def draw(
    logits: Tensor,
    law: SamplingLaw | Sequence[SamplingLaw],
    config: SparseConfig,
    uniforms: Sequence[float],
    bounds: Sequence[float] | None = None,
) -> tuple[list[int], list[SparseLaw | None]]:
    """Draw one token from each row of `logits` `[B, V]`.

    Args:
        logits: the draft's logits, adjustments made.
        law: how they become q; one for all rows, or one each.
        config: how much of q to keep.
        uniforms: one in [0, 1) for each row; not used at temperature 0.
        bounds: the entropy in nats above which a row is not sampled from, one for each; None is no bound.

    Returns:
        tokens: drawn from q̂; -1 for a row that is no law (`distribution.bad_rows`), `entropy.UNSURE` for one whose q̂
            (at temperature 0: whose logits) is above its bound.
        laws: the q̂ that was sampled from; None is a point mass on the token (temperature 0), or a row without one.

    Raises:
        ValueError: the number of uniforms, laws or bounds is not B.
    """
    B = logits.shape[0]
    laws = [law] * B if isinstance(law, SamplingLaw) else list(law)
    if len(uniforms) != B or len(laws) != B:
        raise ValueError(f"{len(uniforms)} uniforms and {len(laws)} laws for {B} rows")
    bounds = [math.inf] * B if bounds is None else bounds
    if len(bounds) != B:
        raise ValueError(f"{len(bounds)} bounds for {B} rows")
    tokens: list[int] = [-1] * B
    drawn: list[SparseLaw | None] = [None] * B
    for shared in dict.fromkeys(laws):
        rows = [row for row in range(B) if laws[row] == shared]
        z = logits if len(rows) == B else logits[rows]
        if shared.is_greedy:
            for row, token in zip(rows, _argmax(z), strict=True):
                bounded = token >= 0 and bounds[row] < math.inf
                tokens[row] = UNSURE if bounded and entropy_of_greedy(logits[row]) > bounds[row] else token
            continue
        for row, sparse in zip(rows, _sparsify_rows(probabilities(z, shared), config), strict=True):
            if sparse is None:
                continue
            if bounds[row] < math.inf and _entropy(sparse) > bounds[row]:  # before anything is sampled
                tokens[row] = UNSURE
            else:
                tokens[row], drawn[row] = sample(sparse, uniforms[row]), sparse
    return tokens, drawn


def sparsify(probs: Tensor, config: SparseConfig) -> list[SparseLaw]:
    """Return q̂ of each row of `probs` `[B, V]`.

    The fewest most probable tokens with `keep_mass` are kept (lower ids first among equals), `max_support` at most.
    Weights are in proportion to the largest, which gets 65535; tokens that round to zero are dropped.

    Raises:
        ValueError: a row holds NaN.
    """
    laws = []
    for row, law in enumerate(_sparsify_rows(probs, config)):
        if law is None:
            raise ValueError(f"row {row} of the probabilities is no law")
        laws.append(law)
    return laws


def sample(law: SparseLaw, u: float) -> int:
    """Return the token of the inverse CDF of `law` at `u` in [0, 1), in integers.

    A uniform of 53 bits gives every token its exact probability up to 2^-53, and never one outside the support.
    """
    target = (int(u * 2.0**53) * law.total) >> 53
    return int(law.ids[law.weights.cumsum(dtype=np.int64).searchsorted(target, side="right")])


def place(weights: Tensor, total: int, u: float) -> int:
    """Return the place in `weights` `[K]` (int64, of sum `total`) that `sample` takes. TorchScript can compile it."""
    bits = int(u * 2.0**53)
    # (bits · total) >> 53, in two halves that 64 bits hold.
    high, low = bits >> 27, bits & 0x7FFFFFF
    target = (high * total + ((low * total) >> 27)) >> 26
    return int(torch.searchsorted(weights.cumsum(0), target, right=True))


def validate(ids: np.ndarray, weights: np.ndarray, vocab_size: int) -> SparseLaw:
    """Return the law of ids and weights from elsewhere, once they are known to make one.

    Raises:
        ValueError: lengths differ, K is 0 or above 256, ids are not strictly ascending or not below `vocab_size`, or a
            weight is 0; names the offending numbers.
    """
    K = len(ids)
    if len(weights) != K:
        raise ValueError(f"{K} token ids for {len(weights)} weights")
    if not 1 <= K <= MAX_SUPPORT:
        raise ValueError(f"the support holds {K} tokens; 1 to {MAX_SUPPORT} are allowed")
    _refuse_disorder(ids)
    if int(ids[0]) < 0 or int(ids[-1]) >= vocab_size:
        bad = int(ids[0]) if int(ids[0]) < 0 else int(ids[-1])
        raise ValueError(f"token id {bad} is outside the vocabulary of {vocab_size}")
    total = int(weights.sum(dtype=np.int64))
    if total == 0:
        raise ValueError(f"all {K} weights are 0")
    if not weights.all():
        raise ValueError(f"the weight of token {int(ids[int(weights.argmin())])} is 0; weights are at least 1")
    return SparseLaw(ids, weights, total)


def _refuse_disorder(ids: np.ndarray) -> None:
    rising = ids[1:] > ids[:-1]
    if rising.all():
        return
    at = int(rising.argmin())
    first, second = int(ids[at]), int(ids[at + 1])
    if first == second:
        raise ValueError(f"token id {first} is repeated at places {at} and {at + 1} of the support")
    raise ValueError(f"token ids must ascend: {first} at place {at} comes before {second}")


def _entropy(law: SparseLaw) -> float:
    return entropy_of_weights(torch.from_numpy(law.weights.astype(np.int64)))


def _argmax(logits: Tensor) -> list[int]:
    z = logits.to(torch.float32).cpu().numpy()
    best = z.argmax(axis=-1)  # the first NaN, where there is one
    fine = np.isfinite(z[np.arange(len(z)), best])
    return [int(token) for token in np.where(fine, best, -1)]


def _sparsify_rows(probs: Tensor, config: SparseConfig) -> list[SparseLaw | None]:
    p = probs.cpu().numpy()
    sound = ~np.isnan(p[:, 0])
    if sound.all():
        return list(_truncate_rows(p, config))
    laws = iter(_truncate_rows(p[sound], config))
    return [next(laws) if fine else None for fine in sound]


def _truncate_rows(p: np.ndarray, config: SparseConfig) -> list[SparseLaw]:
    """The laws that `truncate` finds in each row of `p` `[B, V]`, number for number, in a few calls for all rows."""
    B, V = p.shape
    if B == 0:
        return []
    K = min(config.max_support, V)
    best = np.sort(np.partition(p, V - K, axis=1)[:, V - K :], axis=1)[:, ::-1].astype(np.float64)
    sizes = np.minimum((best.cumsum(axis=1) < config.keep_mass).sum(axis=1) + 1, K)
    last = best[np.arange(B), sizes - 1].astype(p.dtype)
    kept = p >= last[:, None]
    surplus = kept.sum(axis=1) - sizes
    for row in np.flatnonzero(surplus):  # more tokens equal to the last than there is room for: the lower ids stay
        kept[row, np.flatnonzero(p[row] == last[row])[-surplus[row] :]] = False
    at = np.flatnonzero(kept)
    rows = np.arange(B).repeat(sizes)
    ids = at - rows * V
    weights = np.rint(p.reshape(-1)[at].astype(np.float64) * (65535.0 / best[:, 0])[rows]).astype(np.uint16)
    if not weights.all():
        full = weights > 0
        rows, ids, weights = rows[full], ids[full], weights[full]
    ends = np.searchsorted(rows, np.arange(B + 1)).tolist()
    totals = np.add.reduceat(weights, ends[:-1], dtype=np.int64).tolist()
    return [
        SparseLaw(ids[begin:end], weights[begin:end], total)
        for begin, end, total in zip(ends, ends[1:], totals, strict=False)
    ]


def as_law(ids: Tensor, weights: Tensor) -> SparseLaw:
    """Return what `truncate` found as a law."""
    integers = weights.numpy()
    return SparseLaw(ids.numpy(), integers.astype(np.uint16), int(integers.sum()))


def truncate(p: Tensor, keep_mass: float, max_support: int) -> tuple[Tensor, Tensor]:
    """Return ids (ascending) and weights, int64 `[K]`, of q̂ for one law `p` `[V]`. TorchScript can compile it.

    See `SparseConfig` and `sparsify`.
    """
    ids = torch.nonzero(p >= _least_candidate(p, keep_mass, max_support)).squeeze(1)
    kept = p[ids]
    best = kept.sort(descending=True)[0][:max_support].double()
    size = min(int(torch.searchsorted(best.cumsum(0), keep_mass)) + 1, best.size(0))
    last = best[size - 1]
    inside = torch.nonzero(kept >= last).squeeze(1)
    if inside.size(0) > size:  # more tokens equal to the last than there is room for: the lower ids stay
        above = torch.nonzero(kept > last).squeeze(1)
        equal = torch.nonzero(kept == last).squeeze(1)[: size - above.size(0)]
        inside = torch.cat([above, equal]).sort()[0]
    weights = (kept[inside].double() * (65535.0 / best[0])).round().long()
    ids = ids[inside]
    if int(weights.min()) == 0:
        full = torch.nonzero(weights).squeeze(1)
        ids, weights = ids[full], weights[full]
    return ids, weights


def _least_candidate(p: Tensor, keep_mass: float, max_support: int) -> float:
    """Return a probability below which no token of `p` `[V]` can be kept; it spares sorting the vocabulary."""
    V = p.size(0)
    # All tokens below the first bound together are less than half of what may go; those below the second have weight 0,
    # since the largest probability is at least 1/V.
    least = max((1.0 - keep_mass) / 2, 0.25 / 65535) / V
    stride = 512  # twice MAX_SUPPORT
    if 2 * stride > V:
        return least
    # Each column of this table holds a token as probable as its maximum, so `max_support` tokens are at least as
    # probable as the maximum of that rank.
    peaks = p[: V - V % stride].view(-1, stride).amax(0)
    return max(least, float(torch.topk(peaks, max_support, sorted=False)[0].min()))
