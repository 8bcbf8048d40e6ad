"""Logits to a distribution (temperature, top-k, top-p, min-p, in that order [L 2.2]), and draft tokens sampled from it.

Every filter is a threshold on the logits themselves, so equal logits are kept or dropped together. Penalties are
applied before (`adjustments`). `triton_truncate` samples on a GPU.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.rng import noise_rows
from kernels.sparse import SparseConfig, SparseDistribution, truncate

NO_LOGITS, UNSURE = -1, -2
"""Values of `Sample.token` without a token: the row is bad (`bad_rows`); or its entropy is above `max_entropy`."""

LEAST_TEMPERATURE = 1.2e-38
"""The least temperature above 0 in float32: about its smallest normal number. Lower ones count as this one."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How logits become a distribution; hashable, so that rows with the same parameters can be grouped.

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
            raise ValueError(f"min_p is {self.min_p}; it must be 0 to 1 (0: off)")

    @property
    def is_greedy(self) -> bool:
        """Whether all mass is on the largest logit."""
        return self.temperature == 0

    @property
    def has_no_filters(self) -> bool:
        """Whether every token keeps its chance: top-k, top-p and min-p are off."""
        return self.top_k == 0 and self.top_p == 1 and self.min_p == 0


def probabilities(logits: Tensor, params: SamplingParams, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the distribution of each row of `logits` `[R, V]`, as `[R, V]` of `dtype`.

    A bad row (`bad_rows`) comes out as NaN throughout; its neighbours are not affected.
    """
    z = logits.to(dtype)
    if params.is_greedy:
        return _point_mass(z)
    return _softmax(_filtered(z, params))


def log_probabilities(logits: Tensor, params: SamplingParams) -> Tensor:
    """Return log p of each row of `logits` `[R, V]`, float32 `[R, V]`: -inf for excluded tokens alone.

    The log of `probabilities` has -inf for chances below 1e-45 too. A bad row comes out as NaN, as there.
    """
    z = logits.float()
    return _point_mass(z).log_() if params.is_greedy else log_softmax(_filtered(z, params))


def kept(z: Tensor, params: SamplingParams) -> Tensor:
    """Return which tokens the filters of `params` leave in each row of `z` `[R, V]`, bool `[R, V]`.

    The temperature is above 0. The result of bad rows has no meaning.
    """
    return _filtered(z.float(), params) > -math.inf


def _filtered(z: Tensor, params: SamplingParams) -> Tensor:
    # s: [R, V], scaled and filtered. Thresholds are taken on z, which division cannot merge.
    s = _scaled(z, params.temperature)
    if 0 < params.top_k < z.size(-1):
        s = s.masked_fill(z < torch.topk(z, params.top_k)[0][:, -1:], -math.inf)
    if params.top_p < 1:
        s = s.masked_fill(z < _nucleus_cuts(z, _softmax(s), params.top_p), -math.inf)
    if params.min_p > 0:
        s = s.masked_fill(s < s.amax(dim=-1, keepdim=True) + math.log(params.min_p), -math.inf)
    return s


def _softmax(s: Tensor) -> Tensor:
    # torch sums in float32, which loses improbable tokens: among 150,000 they may have one percent of the mass.
    p = torch.softmax(s, dim=-1)
    return p.div_(p.sum(dim=-1, keepdim=True, dtype=torch.float64).to(p.dtype))


def log_softmax(z: Tensor) -> Tensor:
    """Return log p of each row of logits `z` `[R, V]`, for the same reason with a sum in float64."""
    log_p = torch.log_softmax(z, dim=-1)
    return log_p.sub_(log_p.exp().sum(dim=-1, keepdim=True, dtype=torch.float64).log_().to(log_p.dtype))


def bad_rows(logits: Tensor) -> Tensor:
    """Return which rows of `logits` `[R, V]` give no distribution, bool `[R]`: with NaN or +inf, or all -inf."""
    return ~torch.isfinite(logits.amax(dim=-1))


def _point_mass(z: Tensor) -> Tensor:
    p = torch.zeros_like(z).scatter_(-1, z.argmax(dim=-1, keepdim=True), 1.0)
    return p.masked_fill_(bad_rows(z)[:, None], math.nan)


def _scaled(z: Tensor, temperature: float) -> Tensor:
    if temperature == 1:
        return z
    if temperature > 1:
        return z / temperature
    # Below 1 the quotient can overflow, unless the largest logit is zero first.
    least = 2.3e-308 if z.dtype == torch.float64 else LEAST_TEMPERATURE
    return (z - z.amax(dim=-1, keepdim=True)).div_(max(temperature, least))


def _nucleus_cuts(z: Tensor, p: Tensor, top_p: float) -> Tensor:
    """Return the smallest logit inside the nucleus of each row, `[R, 1]`; `z` and `p` are `[R, V]`.

    The cut of a bad row is NaN, which nothing is below.
    """
    rows, distributions = z.cpu(), p.cpu()
    # All tokens below this bound together have less than half of the mass that may be dropped. Only the rest is sorted.
    counts = (distributions > (1.0 - top_p) / (2 * distributions.size(1))).sum(dim=1, keepdim=True)
    K = max(1, int(counts.max())) if counts.numel() else 1
    best, at = torch.topk(rows, K)  # [R, K]
    mass = distributions.gather(1, at).double().cumsum(1)
    last = torch.minimum((mass < top_p).sum(dim=1, keepdim=True), counts - 1).clamp(min=0)
    return best.gather(1, last).to(z.device)


# -------------------------------------------------------------------------------------------------------- draft tokens


class Draw(NamedTuple):
    """How one token is drawn.

    Attributes:
        params: how logits become q.
        uniform: in [0, 1): the token is the inverse CDF of q̂ there; not used at temperature 0, nor with noise.
        noise: seed and absolute position of Gumbel noise g: the token is argmax(log q + g). None draws by `uniform`.
        max_entropy: nats; a token whose distribution has more is not drawn. At temperature 0 the softmax counts.
    """

    params: SamplingParams
    uniform: float = 0.0
    noise: tuple[int, int] | None = None
    max_entropy: float = math.inf


class Sample(NamedTuple):
    """A sampled token and its distribution.

    Attributes:
        token: its id, or `NO_LOGITS`, or `UNSURE`.
        q: q̂, which it was sampled from; None at temperature 0 and with noise.
        scores: `[V]`, if `q` is None and there is a token: logits, whose largest was taken, or with noise
            `gumbel_scores`, whose smallest was taken.
    """

    token: int
    q: SparseDistribution | None = None
    scores: Tensor | None = None


def sample(logits: Tensor, draws: Sequence[Draw], config: SparseConfig) -> list[Sample]:
    """Sample one token from each row of `logits` `[B, V]`, on the host; rows are independent.

    Args:
        logits: with penalties applied.

    Raises:
        ValueError: the number of draws is not the number of rows.
    """
    if len(draws) != len(logits):
        raise ValueError(f"draws has length {len(draws)}; it must be the number of rows, {len(logits)}")
    if len(draws) == 1:
        return _sample_alike(logits, draws, config)
    groups: dict[tuple[SamplingParams, bool], list[int]] = {}
    for row, each in enumerate(draws):
        groups.setdefault((each.params, each.noise is not None), []).append(row)
    if len(groups) == 1:
        return _sample_alike(logits, draws, config)
    samples = [Sample(NO_LOGITS)] * len(draws)
    for rows in groups.values():
        found = _sample_alike(logits[rows], [draws[row] for row in rows], config)
        for row, drawn in zip(rows, found, strict=True):
            samples[row] = drawn
    return samples


def _sample_alike(logits: Tensor, draws: Sequence[Draw], config: SparseConfig) -> list[Sample]:
    """As `sample`, for at least one draw; all have the same parameters, and noise or uniforms."""
    params = draws[0].params
    if params.is_greedy:
        return _largest(logits.float().cpu(), draws)
    p = probabilities(logits, params).cpu()
    return _inverse_cdf(p.numpy(), draws, config) if draws[0].noise is None else _gumbel_max(p, draws)


def inverse_cdf(weights: np.ndarray, u: float) -> int:
    """Return the first token whose cumulative weight is above u times the whole: never one of weight 0."""
    cdf = torch.from_numpy(weights).cumsum(0, dtype=torch.float64).numpy()
    return int(cdf.searchsorted(u * cdf[-1], side="right"))


def gumbel_scores(p: Tensor, noise: Tensor) -> Tensor:
    """Return p/(-e) of distributions `p` `[..., V]`, with their `rng.noise_rows`.

    The smallest is the largest of log p + g, since g is -log(e): one logarithm a token. One of p = 0 never is.
    """
    return p / noise.log1p()


def gumbel_max(p: Tensor, noise: Tensor) -> list[int]:
    """Return argmax(log p + g) of each row of `p` `[R, V]`, with its row of `rng.noise_rows`; any token for NaN."""
    tokens: list[int] = gumbel_scores(p, noise).numpy().argmin(-1).tolist()  # in numpy: twice as fast
    return tokens


def entropy(p: np.ndarray) -> float:
    """Return -Σ p log p of one distribution `p` `[V]`, in nats."""
    mass = p[p > 0].astype(np.float64)
    return -float((mass * np.log(mass)).sum())


def _largest(z: Tensor, draws: Sequence[Draw]) -> list[Sample]:
    # z: [B, V]
    rows = z.numpy()
    samples = []
    for row, (token, draw) in enumerate(zip(rows.argmax(axis=-1).tolist(), draws, strict=True)):
        if not math.isfinite(rows[row, token]):  # if there is a NaN, the argmax is the first one
            samples.append(Sample(NO_LOGITS))
        elif draw.max_entropy < math.inf and entropy(torch.softmax(z[row], -1).numpy()) > draw.max_entropy:
            samples.append(Sample(UNSURE))
        else:
            samples.append(Sample(token, scores=z[row]))
    return samples


def _gumbel_max(p: Tensor, draws: Sequence[Draw]) -> list[Sample]:
    # p: [B, V]
    scores = gumbel_scores(p, noise_rows([draw.noise for draw in draws if draw.noise is not None], p.shape[1]))
    samples = []
    for row, (token, draw) in enumerate(zip(scores.numpy().argmin(-1).tolist(), draws, strict=True)):
        if math.isnan(p[row, 0]):
            samples.append(Sample(NO_LOGITS))
        elif draw.max_entropy < math.inf and entropy(p[row].numpy()) > draw.max_entropy:
            samples.append(Sample(UNSURE))
        else:
            samples.append(Sample(token, scores=scores[row]))
    return samples


def _inverse_cdf(p: np.ndarray, draws: Sequence[Draw], config: SparseConfig) -> list[Sample]:
    # p: [B, V]
    samples = []
    for row, draw in zip(p, draws, strict=True):
        if math.isnan(row[0]):
            samples.append(Sample(NO_LOGITS))
            continue
        q = truncate(row, config)
        if draw.max_entropy < math.inf and entropy(q.weights / q.total) > draw.max_entropy:
            samples.append(Sample(UNSURE))
        else:
            samples.append(Sample(q.token_at(draw.uniform), q))
    return samples
