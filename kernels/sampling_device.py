"""Samples draft tokens on the device of the logits, without host syncs.

The steps are those of `sampling.sample`: truncate, round to integers, sample from the integers. All shapes are static,
so a CUDA graph can hold several steps. On a CPU distributions and tokens equal those of `sampling.sample`. On a GPU the
softmax may round differently; q̂ is still the distribution that was sampled from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.sampling import LEAST_TEMPERATURE, NO_LOGITS, Draw, Sample
from kernels.sparse import SparseConfig, SparseDistribution

_LARGEST = 65535  # the weight of the most probable token


class DeviceDraws(NamedTuple):
    """`sampling.Draw` of each of B rows, by uniforms and without filters, as tensors on one device.

    Attributes:
        temperatures: float64 `[B]`; 0 takes the largest logit, the lowest id among equals.
        bits: int64 `[B]`: the uniforms, as the integers below 2^53 that they are 2^-53 of.
    """

    temperatures: Tensor
    bits: Tensor


class DeviceSamples(NamedTuple):
    """Samples from `[B, V]` logits; K is the largest support, V at most.

    Attributes:
        tokens: int64 `[B]`; `NO_LOGITS` if the row is NaN, +inf or all -inf.
        ids: int64 `[B, K]`, ascending; V past the support.
        weights: int32 `[B, K]`, at least 1 within the support and 0 past it. At temperature 0 there is one. A row
            without a token has none.
    """

    tokens: Tensor
    ids: Tensor
    weights: Tensor


def sample(logits: Tensor, draws: DeviceDraws, config: SparseConfig | None) -> DeviceSamples:
    """Sample one token from each row of `logits` `[B, V]`; all tensors, the result included, are on one device.

    No host sync; shapes do not depend on values; rows are independent. Without a `config` tokens are drawn from p
    itself, by `sampling.inverse_cdf`, and K is 0.
    """
    V = logits.shape[1]
    z = logits.float()
    greedy = (draws.temperatures == 0).unsqueeze(1)
    p = _softmax(z, draws.temperatures)
    sound = torch.where(greedy, z.amax(dim=1, keepdim=True).isfinite(), ~p[:, :1].isnan())
    best = z.argmax(dim=1, keepdim=True)
    if config is None:
        tokens = torch.where(greedy, best, _inverse_cdf(p, draws.bits)).squeeze(1)
        ids = weights = tokens.new_empty(len(tokens), 0)
    else:
        ids, weights = _truncate(p, config)
        # At temperature 0 a point mass replaces the result.
        first = torch.arange(ids.shape[1], device=z.device) == 0
        ids = torch.where(greedy, best.expand_as(ids).masked_fill(~first, V), ids)
        weights = torch.where(greedy, first.long() * _LARGEST, weights)
        ids = ids.masked_fill(~sound, V)
        weights = weights.masked_fill(~sound, 0)
        tokens = ids.gather(1, _indices(weights, draws.bits)).squeeze(1)
    return DeviceSamples(tokens.masked_fill(~sound.squeeze(1), NO_LOGITS), ids, weights.int())


def sample_greedily(logits: Tensor) -> Tensor:
    """Return the tokens of `sample`, int64 `[B]`, if all temperatures are 0: two operations in place of some forty."""
    best, tokens = logits.max(dim=1)  # the lowest id among equals
    return tokens.masked_fill(~best.isfinite(), NO_LOGITS)


def to_samples(tokens: np.ndarray, ids: np.ndarray, weights: np.ndarray, draws: Sequence[Draw]) -> list[Sample]:
    """Return rows of `DeviceSamples`, copied to the host, as `sampling.sample` returns them, without scores."""
    return [
        Sample(int(token), None if params.is_greedy or noise else _sparse(row, integers))
        for token, row, integers, (params, _, noise, _) in zip(tokens, ids, weights, draws, strict=True)
    ]


def _sparse(ids: np.ndarray, weights: np.ndarray) -> SparseDistribution | None:
    size = int(np.count_nonzero(weights))
    if not size:
        return None
    return SparseDistribution(ids[:size].copy(), weights[:size].astype(np.uint16), int(weights.sum(dtype=np.int64)))


def _softmax(z: Tensor, temperatures: Tensor) -> Tensor:
    """Return the softmax of `z` `[B, V]`, float32, at these temperatures; at 0 it has no meaning."""
    # Below 1 the quotient can overflow, unless the largest logit is zero first; as `sampling` has it.
    t = temperatures.clamp(min=LEAST_TEMPERATURE).float().unsqueeze(1)
    shifted = torch.where(t < 1, z - z.amax(dim=1, keepdim=True), z)
    return torch.softmax(shifted / t, dim=1)


def _truncate(p: Tensor, config: SparseConfig) -> tuple[Tensor, Tensor]:
    """Return ids and weights of q̂ of each row of `p` `[B, V]`, int64 `[B, K]`; see `sparse.sparsify`."""
    V = p.shape[1]
    K = min(config.max_support, V)
    # Among tokens that equal its last, topk returns any. Their probabilities do not depend on that, so these decide how
    # many tokens are kept, and the ids follow from them.
    best = p.topk(K, dim=1)[0].double()
    scale = torch.full_like(best[:, :1], _LARGEST) / best[:, :1]
    enough = (best.cumsum(dim=1) < config.keep_mass).sum(dim=1, keepdim=True) + 1
    weighty = ((best * scale).round() > 0).sum(dim=1, keepdim=True)  # the largest first, so these are the first ones
    sizes = torch.minimum(enough, weighty).clamp(min=1, max=K)
    last = best.gather(1, sizes - 1)
    remaining = sizes - (best > last).sum(dim=1, keepdim=True)  # for tokens that equal the last: the lower ids stay
    last = last.float()
    equal = (p == last).cumsum(dim=1, dtype=torch.int32)
    kept = (p > last).cumsum(dim=1, dtype=torch.int32) + torch.minimum(equal, remaining.int())
    # The k-th kept token is the first one at which k tokens are kept.
    ranks = torch.arange(1, K + 1, dtype=torch.int32, device=p.device).expand(p.shape[0], K).contiguous()
    ids = torch.searchsorted(kept, ranks)
    weights = (p.gather(1, ids.clamp(max=V - 1)).double() * scale).round().long()
    return ids, weights.masked_fill(ids == V, 0)


def _inverse_cdf(p: Tensor, bits: Tensor) -> Tensor:
    """Return `sampling.inverse_cdf` of each row of `p` `[B, V]` at the uniforms of `bits` `[B]`, `[B, 1]`."""
    cdf = p.cumsum(dim=1, dtype=torch.float64)
    target = bits.unsqueeze(1).double() * 2.0**-53 * cdf[:, -1:]
    return torch.searchsorted(cdf, target, right=True).clamp(max=p.shape[1] - 1)


def _indices(weights: Tensor, bits: Tensor) -> Tensor:
    """Return the index in each row of `weights` `[B, K]` that `bits` `[B]` select, `[B, 1]`."""
    cumulative = weights.cumsum(dim=1)
    total = cumulative[:, -1:]
    # (bits · total) >> 53, in two halves that 64 bits hold.
    high, low = (bits >> 27).unsqueeze(1), (bits & 0x7FFFFFF).unsqueeze(1)
    target = (high * total + ((low * total) >> 27)) >> 26
    return torch.searchsorted(cumulative, target, right=True).clamp(max=weights.shape[1] - 1)
