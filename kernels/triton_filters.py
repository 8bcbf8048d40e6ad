"""Device functions of the filter kernel: the cuts of top-k, top-p and min-p, and the statistics after them.

A cut is a logit; logits at or above it are kept, so equal logits are kept or dropped together. It is found by bisection
over floats ordered as integers, counting tokens and mass above. Only rows with filters run here.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton_rows import GUMBEL, NOTHING, load_tile, store_stats, tile_stats
from kernels.triton_walk import COUPLED

_ALL_BUT_SIGN = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _key(z):
    """Return integers in the order of the floats; equal where they are equal."""
    bits = tl.where(z == 0, 0.0, z).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & _ALL_BUT_SIGN)


@triton.jit
def _float_of(key):
    return (key ^ ((key >> 31) & _ALL_BUT_SIGN)).to(tl.float32, bitcast=True)


@triton.jit
def _above(rows, row, key, peak, scale, TILE: tl.constexpr, ADJUSTED: tl.constexpr):
    """Return the number of tokens at `key` or above, and their mass relative to the best token, float64."""
    count = tl.zeros_like(key)
    mass = tl.zeros_like(key).to(tl.float64)
    for tile in range(rows.n_tiles):
        ids = tile * TILE + tl.arange(0, TILE)
        z = load_tile(rows, row, tile, ids, TILE, ADJUSTED, False)
        inside = (_key(z) >= key) & (ids < rows.V)
        count += tl.sum(inside.to(tl.int32), 0)
        mass += tl.sum(tl.where(inside, tl.exp2((z - peak) * scale), 0.0), 0)
    return count, mass


@triton.jit
def _highest_key(rows, row, least, top, count, mass, peak, scale, TILE: tl.constexpr, ADJUSTED: tl.constexpr):
    """Return the highest key from `least` to `top` with at least `count` tokens and `mass` at it or above."""
    low = least.to(tl.int64)
    high = top.to(tl.int64)
    while low < high:
        middle = low + (high - low + 1) // 2
        counted, summed = _above(rows, row, middle.to(tl.int32), peak, scale, TILE, ADJUSTED)
        enough = (counted >= count) & (summed >= mass)
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    return low.to(tl.int32)


@triton.jit
def filter_row(rows, stats, row, terms, top_k, top_p, least_bits, TILE: tl.constexpr, TILES: tl.constexpr,
               ADJUSTED: tl.constexpr):  # fmt: skip
    """Write a row's cut, and the statistics of the tokens that it keeps. Bad rows are unchanged.

    Args:
        rows: the logits.
        stats: of the whole row.
        row: index of the row.
        terms: of its proposal.
        top_k: 0 for off.
        top_p: 1 for off, float64.
        least_bits: log2 of min-p, float32; -inf for off.
    """
    tiles = tl.arange(0, TILES)
    there = tiles < rows.n_tiles
    peak = tl.max(tl.load(stats.peaks + row * rows.n_tiles + tiles, mask=there, other=-float("inf")), 0)
    mass = tl.sum(tl.load(stats.masses + row * rows.n_tiles + tiles, mask=there, other=0.0), 0)
    if (mass > 0) & (mass < float("inf")):
        top = _key(peak)
        cut = _key(peak * 0 - float("inf"))
        if (top_k > 0) & (top_k < rows.V):
            cut = _highest_key(rows, row, cut, top, top_k, 0.0, peak, terms.scale, TILE, ADJUSTED)
        if top_p < 1:
            _, whole = _above(rows, row, cut, peak, terms.scale, TILE, ADJUSTED)
            cut = _highest_key(rows, row, cut, top, 1, whole * top_p, peak, terms.scale, TILE, ADJUSTED)
        least = tl.maximum(_float_of(cut), peak + least_bits / terms.scale)
        tl.store(rows.cuts + row, least)
        wanted = tl.where(terms.rule == COUPLED, GUMBEL, NOTHING)
        for tile in range(rows.n_tiles):
            ids = tile * TILE + tl.arange(0, TILE)
            z = load_tile(rows, row, tile, ids, TILE, ADJUSTED, False)
            z = tl.where(z < least, -float("inf"), z)
            position = terms.base_length + row - terms.first_row
            found = tile_stats(z, ids, terms.scale, wanted, terms.seed, position, True)
            store_stats(stats, row * rows.n_tiles + tile, found)
