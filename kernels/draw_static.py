"""One token for each row of the draft's logits, on whatever device they are, with no word to the host.

The law drawn from is that of `sparse`, step for step: truncate, round to integers, then sample from the integers. All
shapes are known beforehand and nothing is read back, so a CUDA graph may hold the draws of several single-token steps,
each of which feeds the next. On a CPU laws and tokens are those of `sparse.draw`; on a GPU the softmax may round
otherwise, and the law returned is still the one that was sampled from. Knows nothing of models and of graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.distribution import SamplingLaw
from kernels.sparse import SparseConfig, SparseLaw

_LARGEST = 65535  # the weight of the most probable token
_TINY = 1.2e-38  # as in `distribution`: a temperature that float32 would round to zero


class Drawn(NamedTuple):
    """What was drawn from `[B, V]` logits, and the laws it was drawn from; K is the largest support, V at most.

    Attributes:
        tokens: int64 `[B]`; -1 for a row that is no law (`distribution.bad_rows`).
        ids: int64 `[B, K]`, ascending; V past the support.
        weights: int32 `[B, K]`, at least 1 within the support and 0 past it. At temperature 0 there is one. A row that
            is no law has none.
    """

    tokens: Tensor
    ids: Tensor
    weights: Tensor


def is_drawable(law: SamplingLaw) -> bool:
    """Say whether `draw` draws by this law: greedy, or with top-k, top-p and min-p off."""
    return law.is_greedy or law.has_no_filters


def bits_of(uniforms: Tensor) -> Tensor:
    """Return uniforms of 53 bits in [0, 1), float64 of any shape, as the integers that they are 2^-53 of, int64."""
    return (uniforms * 2.0**53).long()


def draw(logits: Tensor, temperatures: Tensor, bits: Tensor, config: SparseConfig) -> Drawn:
    """Draw one token from each row of `logits` `[B, V]`; all tensors are on one device, and so is what comes out.

    Nothing waits for the host, and no shape depends on what the tensors hold. No row sees another. `sparse.draw` does
    the same for laws of every form, on the host.

    Args:
        logits: the draft's logits, of any floating type, adjustments made.
        temperatures: of each row, float64 `[B]`; 0 takes the largest logit, the lowest id among equals.
        bits: of each row's uniform (`bits_of`), int64 `[B]`, below 2^53; not used at temperature 0.
        config: how much of q to keep.
    """
    V = logits.shape[1]
    z = logits.float()
    greedy = (temperatures == 0).unsqueeze(1)
    p = _laws(z, temperatures)
    sound = torch.where(greedy, z.amax(dim=1, keepdim=True).isfinite(), ~p[:, :1].isnan())
    ids, weights = _truncate(p, config)
    # A point mass takes the place of what was found at temperature 0.
    first = torch.arange(ids.shape[1], device=z.device) == 0
    best = z.argmax(dim=1, keepdim=True)
    ids = torch.where(greedy, best.expand_as(ids).masked_fill(~first, V), ids)
    weights = torch.where(greedy, first.long() * _LARGEST, weights)
    ids = ids.masked_fill(~sound, V)
    weights = weights.masked_fill(~sound, 0)
    places = _places(weights, bits)
    tokens = ids.gather(1, places).masked_fill(~sound, -1).squeeze(1)
    return Drawn(tokens, ids, weights.int())


def laws_of(drawn: Drawn, laws: Sequence[SamplingLaw]) -> tuple[list[int], list[SparseLaw | None]]:
    """Return tokens and laws as `sparse.draw` does, after a copy from the device.

    Args:
        drawn: by `draw`, on any device.
        laws: how each row's logits became its law, `[B]`: at temperature 0 it is a point mass, None.
    """
    tokens = drawn.tokens.tolist()
    ids, weights = drawn.ids.cpu().numpy(), drawn.weights.cpu().numpy().astype(np.uint16)
    sizes = (weights > 0).sum(axis=1).tolist()
    totals = weights.sum(axis=1, dtype=np.int64).tolist()
    found = [
        None if size == 0 or law.is_greedy else SparseLaw(ids[row, :size], weights[row, :size], totals[row])
        for row, (size, law) in enumerate(zip(sizes, laws, strict=True))
    ]
    return tokens, found


def _laws(z: Tensor, temperatures: Tensor) -> Tensor:
    """Return the softmax of `z` `[B, V]`, float32, at these temperatures; at 0 it has no meaning."""
    # Below 1 the quotient can overflow, unless the largest logit is zero first; as `distribution` has it.
    t = temperatures.clamp(min=_TINY).float().unsqueeze(1)
    shifted = torch.where(t < 1, z - z.amax(dim=1, keepdim=True), z)
    return torch.softmax(shifted / t, dim=1)


def _truncate(p: Tensor, config: SparseConfig) -> tuple[Tensor, Tensor]:
    """Return ids and weights of q̂ of each law `p` `[B, V]`, int64 `[B, K]`; see `sparse.truncate` and `Drawn`."""
    V = p.shape[1]
    K = min(config.max_support, V)
    # topk names any of the tokens that equal its last. Their probabilities are certain, so these decide how many stay,
    # and the ids are looked for afterwards.
    best = p.topk(K, dim=1)[0].double()
    scale = torch.full_like(best[:, :1], _LARGEST) / best[:, :1]
    enough = (best.cumsum(dim=1) < config.keep_mass).sum(dim=1, keepdim=True) + 1
    weighty = ((best * scale).round() > 0).sum(dim=1, keepdim=True)  # the largest first, so these are the first ones
    sizes = torch.minimum(enough, weighty).clamp(min=1, max=K)
    last = best.gather(1, sizes - 1)
    room = sizes - (best > last).sum(dim=1, keepdim=True)  # for tokens that equal the last: the lower ids stay
    last = last.float()
    equal = (p == last).cumsum(dim=1, dtype=torch.int32)
    kept = (p > last).cumsum(dim=1, dtype=torch.int32) + torch.minimum(equal, room.int())
    # The k-th token kept is the first up to which k are.
    ranks = torch.arange(1, K + 1, dtype=torch.int32, device=p.device).expand(p.shape[0], K).contiguous()
    ids = torch.searchsorted(kept, ranks)
    weights = (p.gather(1, ids.clamp(max=V - 1)).double() * scale).round().long()
    return ids, weights.masked_fill(ids == V, 0)


def _places(weights: Tensor, bits: Tensor) -> Tensor:
    """Return the place in each row of `weights` `[B, K]` that its `bits` `[B]` draw, `[B, 1]`; see `sparse.place`."""
    cumulative = weights.cumsum(dim=1)
    total = cumulative[:, -1:]
    # (bits · total) >> 53, in two halves that 64 bits hold.
    high, low = (bits >> 27).unsqueeze(1), (bits & 0x7FFFFFF).unsqueeze(1)
    target = (high * total + ((low * total) >> 27)) >> 26
    return torch.searchsorted(cumulative, target, right=True).clamp(max=weights.shape[1] - 1)
