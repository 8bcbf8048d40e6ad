"""Samples draft tokens from their truncated distributions on a GPU, without host syncs.

The steps are those of `sampling.sample`: filter, truncate, round to integers, sample from the integers. The most
probable tokens come from torch, the normaliser from the statistics of verification, and one program for each row does
the rest. Filters see those tokens alone. Where top-k keeps more, it does nothing.
Probabilities may round otherwise than on the host, and of tokens with equal logits any may be kept; q̂ is still the
distribution that was sampled from.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.sampling import NO_LOGITS
from kernels.sparse import SparseConfig
from kernels.triton_rows import FLOAT_COLUMNS
from kernels.verify_triton import tile_statistics

_LARGEST = tl.constexpr(65535)  # the weight of the most probable token
_NO_LOGITS = tl.constexpr(NO_LOGITS)
OPTIONS = {"num_warps": 4}
"""The compile options."""


class DeviceSamples(NamedTuple):
    """Samples from `[B, V]` logits; K is the largest support, V at most.

    Attributes:
        tokens: int64 `[B]`; `NO_LOGITS` if the row is NaN, +inf or all -inf.
        ids: int64 `[B, K]`, ascending; V past the support.
        weights: int32 `[B, K]`, at least 1 within the support and 0 past it. A row without a token has none.
    """

    tokens: Tensor
    ids: Tensor
    weights: Tensor


@triton.jit
def _mass_of(count, below, k):
    return tl.sum(tl.where(k == count - 1, below, 0.0), 0)


@triton.jit(do_not_specialize=["V"])
def truncate_kernel(
    best, best_ids, peaks, masses, floats, uniforms, tokens, ids, weights, keep_mass, n_tiles, V,
    K: tl.constexpr, BLOCK_K: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Truncate and sample one row; see `sample_truncated`. Grid: B."""
    row = tl.program_id(0)
    f = floats + row * FLOAT_COLUMNS
    scale = tl.load(f).to(tl.float32)
    top_k, top_p, min_p = tl.load(f + 4).to(tl.int32), tl.load(f + 5), tl.load(f + 6).to(tl.float32)
    tile = tl.arange(0, TILES)
    at = row * n_tiles + tile
    peak = tl.load(peaks + at, mask=tile < n_tiles, other=-float("inf"))
    mass = tl.load(masses + at, mask=tile < n_tiles, other=0.0)
    highest = tl.max(peak, 0)
    level = tl.where(highest == -float("inf"), 0.0, highest)
    whole = tl.sum(mass * tl.exp2((peak - level) * scale), 0)
    is_sound = whole > 0  # not where it is NaN

    k = tl.arange(0, BLOCK_K)
    there = k < K
    z = tl.load(best + row * K + k, mask=there, other=-float("inf")).to(tl.float32)
    p = (tl.exp2((z - level) * scale) / whole).to(tl.float64)
    weight = tl.floor(p / tl.max(p, 0) * _LARGEST + 0.5).to(tl.int64)
    # The largest come first, so those that stay do, too. `mass` is that of all tokens that the filters keep.
    below = tl.cumsum(p, 0)
    stay = tl.where(top_k > 0, tl.minimum(top_k, K), K)
    mass = tl.where((top_k > 0) & (top_k <= K), _mass_of(stay, below, k), 1.0)
    nucleus = tl.sum((there & (below < top_p * mass)).to(tl.int32), 0) + 1
    stay = tl.where(top_p < 1, tl.minimum(stay, nucleus), stay)
    mass = tl.where(top_p < 1, tl.maximum(top_p * mass, _mass_of(stay, below, k)), mass)
    likely = tl.sum((there & ((z - level) * scale >= min_p)).to(tl.int32), 0)
    mass = tl.where(likely < stay, _mass_of(likely, below, k), mass)
    enough = tl.sum((there & (below < keep_mass * mass)).to(tl.int32), 0) + 1
    size = tl.minimum(enough, tl.sum((weight > 0).to(tl.int32), 0))
    kept = k < tl.where(is_sound, size, 0)
    # In ascending order of ids: weights are the low bits of what is sorted.
    token_ids = tl.load(best_ids + row * K + k, mask=there, other=0)
    pairs = tl.sort((tl.where(kept, token_ids, V) << 16) | tl.where(kept, weight, 0))
    token_ids = pairs >> 16
    weight = pairs & 0xFFFF
    cumulative = tl.cumsum(weight, 0)
    total = tl.sum(weight, 0)
    # (bits · total) >> 53, in two halves that 64 bits hold.
    bits = (tl.load(uniforms + row) * 9007199254740992.0).to(tl.int64)
    target = ((bits >> 27) * total + (((bits & 0x7FFFFFF) * total) >> 27)) >> 26
    index = tl.sum((cumulative <= target).to(tl.int32), 0)
    token = tl.sum(tl.where(k == index, token_ids, 0), 0)
    tl.store(tokens + row, tl.where(is_sound, token, _NO_LOGITS))
    tl.store(ids + row * K + k, token_ids, mask=there)
    tl.store(weights + row * K + k, weight.to(tl.int32), mask=there)


def sample_truncated(
    logits: Tensor, ints: Tensor, floats: Tensor, uniforms: Tensor, config: SparseConfig
) -> DeviceSamples:
    """Sample a token of each row above temperature 0 from its q̂; a CUDA graph can hold it.

    Args:
        logits: `[B, V]`, columns contiguous.
        ints: of B proposals without drafts, see `verify_pack.Batch`.
        uniforms: float64 `[B]`.

    Returns:
        See `DeviceSamples`. Rows at temperature 0 have no meaning.
    """
    B, V = logits.shape
    K = min(config.max_support, V)
    best, best_ids = logits.topk(K, dim=1)
    peaks, masses = tile_statistics(logits, ints, floats)
    samples = DeviceSamples(
        torch.empty(B, dtype=torch.int64, device=logits.device),
        torch.empty(B, K, dtype=torch.int64, device=logits.device),
        torch.empty(B, K, dtype=torch.int32, device=logits.device),
    )
    n_tiles = peaks.shape[1]
    with torch.cuda.device_of(logits):
        truncate_kernel[(B,)](
            best, best_ids, peaks, masses, floats, uniforms, *samples, config.keep_mass, n_tiles, V,
            K=K, BLOCK_K=max(16, triton.next_power_of_2(K)), TILES=triton.next_power_of_2(n_tiles), **OPTIONS,
        )  # fmt: skip
    return samples
