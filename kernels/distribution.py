"""Logits to the law that is sampled from: temperature, top-k, top-p, min-p, in that order [L 2.2].

Knows nothing of penalties (`adjustments`), of drafts, or of who asks. Every filter is a threshold on the logits
themselves, so equal logits always share their fate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SamplingLaw:
    """How logits become a law; hashable, so rows of the same law can be grouped.

    Attributes:
        temperature: divides the logits; 0 puts all mass on the largest (the lowest id among equals).
        top_k: keeps the k largest logits and all equal to the k-th; 0 keeps all.
        top_p: keeps the smallest set of most probable tokens with at least this mass, and all equal to its last.
        min_p: keeps tokens at least this probable, relative to the most probable.

    Raises:
        ValueError: a field is NaN, infinite or outside its range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature is {self.temperature}; it must be finite and at least 0")
        if self.top_k != int(self.top_k) or self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}; it must be an integer, at least 0 (0: off)")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it must be above 0 and at most 1 (1: off)")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p is {self.min_p}; it must lie in [0, 1] (0: off)")

    @property
    def is_greedy(self) -> bool:
        """Whether the law is a point mass on the largest logit."""
        return self.temperature == 0

    @property
    def is_plain(self) -> bool:
        """Whether the law is a softmax with nothing filtered out."""
        return self.temperature > 0 and self.has_no_filters

    @property
    def has_no_filters(self) -> bool:
        """Whether every token keeps its chance: top-k, top-p and min-p are off."""
        return self.top_k == 0 and self.top_p == 1 and self.min_p == 0


def probabilities(logits: Tensor, law: SamplingLaw, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the law of each row of `logits` `[R, V]` as `[R, V]` of `dtype`.

    A row that is no law (see `bad_rows`) comes out as NaN throughout; its neighbours are not affected.
    """
    z = logits.to(dtype)
    if law.is_greedy:
        return _point_mass(z)
    return sampled_law(z, law.temperature, law.top_k, law.top_p, law.min_p)


def sampled_law(z: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """`probabilities` at a temperature above 0, in the dtype of `z` `[R, V]`. TorchScript can compile it."""
    return torch.softmax(_filtered(z, temperature, top_k, top_p, min_p), dim=-1)


def kept(z: Tensor, law: SamplingLaw) -> Tensor:
    """Return which tokens the filters of `law` leave in each row of `z` `[R, V]`, bool `[R, V]`.

    The temperature is above 0. What stands in bad rows has no meaning.
    """
    return _filtered(z.float(), law.temperature, law.top_k, law.top_p, law.min_p) > -math.inf


def _filtered(z: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    # s: [R, V], scaled and filtered. Thresholds are taken on z, which division cannot merge.
    s = _scaled(z, temperature)
    if 0 < top_k < z.size(-1):
        s = s.masked_fill(z < torch.topk(z, top_k)[0][:, -1:], -math.inf)
    if top_p < 1:
        s = s.masked_fill(z < _nucleus_cuts(z, torch.softmax(s, dim=-1), top_p), -math.inf)
    if min_p > 0:
        s = s.masked_fill(s < s.amax(dim=-1, keepdim=True) + math.log(min_p), -math.inf)
    return s


def bad_rows(logits: Tensor) -> Tensor:
    """Return which rows of `logits` `[R, V]` are no law, as bool `[R]`: a NaN or +inf anywhere, or nothing but -inf."""
    return ~torch.isfinite(logits.amax(dim=-1))


def _point_mass(z: Tensor) -> Tensor:
    p = torch.zeros_like(z).scatter_(-1, z.argmax(dim=-1, keepdim=True), 1.0)
    return p.masked_fill_(bad_rows(z)[:, None], math.nan)


def _scaled(z: Tensor, temperature: float) -> Tensor:
    if temperature == 1:
        return z
    if temperature > 1:
        return z / temperature
    # Below 1 the quotient can overflow, unless the largest logit is zero first. A temperature that the dtype would
    # round to zero counts as about its smallest normal number.
    tiny = 2.3e-308 if z.dtype == torch.float64 else 1.2e-38
    return (z - z.amax(dim=-1, keepdim=True)).div_(max(temperature, tiny))


def _nucleus_cuts(z: Tensor, p: Tensor, top_p: float) -> Tensor:
    """Return the smallest logit inside the nucleus of each row, `[R, 1]`; `z` and `p` are `[R, V]`.

    The cut of a bad row is NaN, which nothing is below.
    """
    rows, laws = z.cpu(), p.cpu()
    # All tokens below this bound together are less than half of what may go, so only the rest need sorting.
    counts = (laws > (1.0 - top_p) / (2 * laws.size(1))).sum(dim=1, keepdim=True)
    K = max(1, int(counts.max())) if counts.numel() else 1
    best, at = torch.topk(rows, K)  # [R, K]
    mass = laws.gather(1, at).double().cumsum(1)
    last = torch.minimum((mass < top_p).sum(dim=1, keepdim=True), counts - 1).clamp(min=0)
    return best.gather(1, last).to(z.device)
