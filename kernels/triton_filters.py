"""Device functions of the filters: the cuts of top-k, top-p and min-p, and the statistics after them.

A cut is a logit; logits at or above it are kept, so equal logits are kept or dropped together. It is searched for as an
integer in the order of the floats, four bits a step, the highest first: each tile counts the tokens, or adds up their
mass, at or above each of 16 candidates, and the next step takes the highest candidate with enough. So the tiles of a
row run at the same time, and the steps are launches without host syncs. Top-p counts the mass that top-k leaves.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kernels.triton_rows import FLOAT_COLUMNS, PART, load_tiles, store_stats, tile_stats

CANDIDATES = tl.constexpr(16)
_BITS = tl.constexpr(4)  # log2 of the candidates
_LOWEST = tl.constexpr(-(1 << 31))
_ALL_BUT_SIGN = tl.constexpr(0x7FFFFFFF)


def steps_of(dtype: torch.dtype, *, adjusted: bool) -> int:
    """Return the steps of one search: bfloat16 logits differ in their upper 16 bits only."""
    return 4 if dtype == torch.bfloat16 and not adjusted else 8


class Search(NamedTuple):
    """The state of the searches of F rows. A search takes STEPS steps; that of top-p follows that of top-k.

    Attributes:
        keys: int32 `[2 · STEPS, F]`: the bits of the cut that are known before each step, and the lowest integer before
            the first.
        targets: float64 `[F]`: the least mass of top-p.
        sums: float32 `[2, F, n_tiles, CANDIDATES]`: what each tile has at or above each candidate, of this step and of
            the one before.
        F: number of rows.
    """

    keys: Any
    targets: Any
    sums: Any
    F: Any


class Filters(NamedTuple):
    """Filters of a row: top-k (0: off), top-p (1: off; float64), log2 of min-p (-inf: off), and its best logit."""

    top_k: Any
    top_p: Any
    least_bits: Any
    peak: Any


@triton.jit
def load_filters(floats, b, V, peak):
    """Return the filters of proposal `b`, for a row with this best logit."""
    f = floats + b * FLOAT_COLUMNS
    top_k = tl.load(f + 4).to(tl.int32)
    return Filters(tl.where(top_k < V, top_k, 0), tl.load(f + 5), tl.load(f + 6).to(tl.float32), peak)


@triton.jit
def _key(z):
    """Return integers in the order of the floats; equal where they are equal."""
    bits = tl.where(z == 0, 0.0, z).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & _ALL_BUT_SIGN)


@triton.jit
def _float_of(key):
    return (key ^ ((key >> 31) & _ALL_BUT_SIGN)).to(tl.float32, bitcast=True)


@triton.jit
def _unit(step, STEPS: tl.constexpr):
    """Return the distance of the candidates of a step."""
    return tl.full([], 1, tl.int32) << (32 - _BITS - _BITS * (step % STEPS))


@triton.jit
def _candidates(known, step, STEPS: tl.constexpr):
    return known + tl.arange(0, CANDIDATES) * _unit(step, STEPS)


@triton.jit
def _is_searched(filters, step, STEPS: tl.constexpr):
    return tl.where(step < STEPS, filters.top_k > 0, filters.top_p < 1)


@triton.jit
def _found(search, n, filters, n_tiles, step, TILES: tl.constexpr, STEPS: tl.constexpr):
    """Return the bits of row `n` that are known after a step, and the target of top-p.

    `n` counts the rows with filters.
    """
    tiles = tl.arange(0, TILES)
    at = (((step % 2) * search.F + n).to(tl.int64) * n_tiles + tiles)[:, None] * CANDIDATES
    at += tl.arange(0, CANDIDATES)[None, :]
    sums = tl.sum(tl.load(search.sums + at, mask=(tiles < n_tiles)[:, None], other=0.0).to(tl.float64), 0)
    is_first = step % STEPS == 0
    target = filters.top_k.to(tl.float64)
    if step >= STEPS:
        whole = tl.sum(tl.where(tl.arange(0, CANDIDATES) == 0, sums, 0.0), 0)
        target = tl.where(is_first, whole * filters.top_p, tl.load(search.targets + n))
    known = tl.where(is_first, _LOWEST, tl.load(search.keys + step * search.F + n))
    key = tl.max(tl.where(sums >= target, _candidates(known, step, STEPS), known), 0)
    return tl.where(_is_searched(filters, step, STEPS), key, _LOWEST), target


@triton.jit
def search_tile(rows, stats, search, n, row, tile, filters, scale, step, begin, TILE: tl.constexpr,
                TILES: tl.constexpr, STEPS: tl.constexpr, ADJUSTED: tl.constexpr):  # fmt: skip
    """Run a step of the search on one tile.

    Args:
        rows: the logits.
        stats: of the tiles.
        search: the state.
        n: number of the row among those with filters.
        row: its index.
        tile: the tile.
        filters: of the row.
        scale: log2(e) / temperature.
        step: of top-k below STEPS, of top-p from there on.
        begin: the first step of this batch.
    """
    known = tl.full([], _LOWEST, tl.int32)
    floor = known
    if step > begin:
        known, target = _found(search, n, filters, rows.n_tiles, step - 1, TILES, STEPS)
        if (tile == 0) & (step == STEPS + 1):
            tl.store(search.targets + n, target)
    if tile == 0:
        tl.store(search.keys + step * search.F + n, known)
    if step == STEPS:
        floor = known  # the cut of top-k
        known = tl.full([], _LOWEST, tl.int32)
    elif step > STEPS:
        floor = tl.load(search.keys + STEPS * search.F + n)
    candidates = _candidates(known, step, STEPS)
    # Skip a tile whose best token is below all candidates but the lowest. That one counts in the first step of top-p
    # only, whose next candidate is below -1e29: such tokens have no mass.
    best = _key(tl.load(stats.peaks + row * rows.n_tiles + tile))
    sums = tl.zeros([CANDIDATES], tl.float32)
    if _is_searched(filters, step, STEPS) & (best >= known + _unit(step, STEPS)):
        candidates = tl.maximum(candidates, floor)
        for start in range(0, TILE, PART):
            ids = tile * TILE + start + tl.arange(0, PART)
            z = load_tiles(rows, row, tile, ids, 1, ADJUSTED, False)
            weights = tl.where(step < STEPS, 1.0, tl.exp2((z - filters.peak) * scale))
            sums += tl.sum(tl.where(_key(z)[None, :] >= candidates[:, None], weights[None, :], 0.0), 1)
    at = (((step % 2) * search.F + n).to(tl.int64) * rows.n_tiles + tile) * CANDIDATES
    tl.store(search.sums + at + tl.arange(0, CANDIDATES), sums)


@triton.jit
def filter_tile(rows, stats, search, n, row, tile, filters, terms, step, TILE: tl.constexpr, TILES: tl.constexpr,
                STEPS: tl.constexpr, ADJUSTED: tl.constexpr):  # fmt: skip
    """Write the cut of a row, and the statistics of the tokens that it keeps in one tile; see `search_tile`.

    `step` is the last one of the search; -1 if the batch has neither top-k nor top-p.
    """
    cut = _key(filters.peak * 0 - float("inf"))
    if step >= 0:
        key, _ = _found(search, n, filters, rows.n_tiles, step, TILES, STEPS)
        cut = tl.maximum(cut, key)
        if step >= STEPS:
            cut = tl.maximum(cut, tl.load(search.keys + STEPS * search.F + n))
    least = tl.maximum(_float_of(cut), filters.peak + filters.least_bits / terms.scale)
    if tile == 0:
        tl.store(rows.cuts + row, least)
    found = tile_stats(rows, row, tile, terms, least, 1, TILE, ADJUSTED, True, True)
    there = tile + tl.arange(0, 1)
    store_stats(stats, row * rows.n_tiles + there, there < rows.n_tiles, found, True)
