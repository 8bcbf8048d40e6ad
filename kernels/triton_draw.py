"""Device functions that sample one token from one row, by inverse CDF on three levels: tile, strip, cell.

The weights are p, or the residual of a rejected draft. A sparse q̂ takes mass from at most K tokens, so the masses of
the tiles follow from the statistics, and only one tile is read again.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from kernels.sigmoid import EXCLUDED
from kernels.triton_rows import LOG2_E, SIGMOID, load_at, load_tiles

_CELLS = tl.constexpr(64)  # tokens in a strip
_CHUNK = tl.constexpr(32)  # tokens of a support that are read at once; a larger one takes several turns
_ROUNDING = tl.constexpr(1e-6)  # a residual with less than this share of p is float32 rounding
_EXCLUDED = tl.constexpr(EXCLUDED)


class RowDistribution(NamedTuple):
    """p of one row: p(x) = 2^((z(x) - peak) · scale) / mass.

    Attributes:
        row: its number.
        peak: its largest logit.
        mass: the sum of 2^((z - peak) · scale).
        scale: log2(e) / temperature.
        cut: the least logit that the filters keep.
    """

    row: Any
    peak: Any
    mass: Any
    scale: Any
    cut: Any


class Draft(NamedTuple):
    """q̂ of one drafted token: pointers to its support, or to the draft's logits.

    Attributes:
        ids: of the support, ascending, `[size]`.
        q: q̂ at them.
        size: of the support.
        logits: float32 `[V]`, under the rule sigmoid.
        lowest: the lower scale of the sigmoids, alpha.
        inverse_span: 1 / (beta - alpha).
    """

    ids: Any
    q: Any
    size: Any
    logits: Any
    lowest: Any
    inverse_span: Any


@triton.jit
def probability(z, peak, mass, scale):
    """Return p of logits of one row, or of rows whose peaks and masses broadcast with them."""
    return tl.exp2((z - peak) * scale) * (1.0 / mass)


@triton.jit
def sigmoid(z, lowest, inverse_span):
    """Return p̂ = σ((z - alpha) / (beta - alpha)) [W 3.2.2]."""
    return 1.0 / (1.0 + tl.exp2((lowest - z) * inverse_span * LOG2_E))


@triton.jit
def draft_sigmoid(v, lowest, inverse_span):
    """Return q̂ of the draft's logits under the rule `sigmoid`; 0 for `EXCLUDED` tokens."""
    return tl.where(v > _EXCLUDED, sigmoid(v, lowest, inverse_span), 0.0)


@triton.jit
def _sigmoid_rest(z, v, lowest, inverse_span):
    """Return max(0, p̂ - q̂) as a product: with wide scales both are near ½, and float32 loses their difference."""
    p = sigmoid(z, lowest, inverse_span)
    d = (z - v) * inverse_span
    # 1 - exp(-d), by its series where d is small
    series = d * (1 - d * (1 / 2 - d * (1 / 6 - d * (1 / 24 - d * (1 / 120 - d / 720)))))
    grown = tl.where(tl.abs(d) < 0.1, series, 1.0 - tl.exp2(-d * LOG2_E))
    rest = p * sigmoid(-v, -lowest, inverse_span) * grown  # the second factor is 1 - q̂
    return tl.where(v > _EXCLUDED, tl.where(d > 0, rest, 0.0), p)


@triton.jit
def _weights(z, ids, V, p, draft, is_residual, kept, RULE: tl.constexpr):
    """Return the weight of each token, float64. The share of a sparse q̂ is not subtracted yet."""
    weights = probability(z, p.peak, p.mass, p.scale).to(tl.float64) * kept
    if RULE == SIGMOID:
        if is_residual:
            v = tl.load(draft.logits + ids, mask=ids < V, other=_EXCLUDED)
            inverse_temperature = p.scale * (1 / LOG2_E)
            weights = _sigmoid_rest(z * inverse_temperature, v, draft.lowest, draft.inverse_span).to(tl.float64)
            weights = tl.where(z > -float("inf"), weights, 0.0)
    return weights


class Shares(NamedTuple):
    """`_CHUNK` tokens of a support, and min(kept · p, q̂) of each, float64."""

    ids: Any
    mass: Any


@triton.jit
def _shares(rows, p, draft, kept, first, TILE: tl.constexpr, ADJUSTED: tl.constexpr):
    """Read the tokens of the support from `first` on."""
    k = first + tl.arange(0, _CHUNK)
    there = k < draft.size
    ids = tl.load(draft.ids + k, mask=there, other=-1)
    z = load_at(rows, p.row, ids, there, p.cut, TILE, ADJUSTED)
    chance = probability(z, p.peak, p.mass, p.scale).to(tl.float64)
    return Shares(ids, tl.minimum(chance * kept, tl.load(draft.q + k, mask=there, other=0.0).to(tl.float64)))


@triton.jit
def _spread(shares, origin, width, N: tl.constexpr):
    cell = (shares.ids - origin).to(tl.uint32) // width  # N or more outside of the cells, before them, too
    return tl.sum(tl.where(cell[:, None] == tl.arange(0, N)[None, :], shares.mass[:, None], 0.0), 0)


@triton.jit
def _taken(rows, p, draft, kept, shares, origin, width, N: tl.constexpr, TILE: tl.constexpr,
           ADJUSTED: tl.constexpr):  # fmt: skip
    """Return Σ min(kept · p, q̂) over the support in each of N cells of `width` tokens from `origin` on, float64.

    `shares` are those of the first tokens; more are read again each time.
    """
    taken = _spread(shares, origin, width, N)
    for first in range(_CHUNK, draft.size, _CHUNK):
        taken += _spread(_shares(rows, p, draft, kept, first, TILE, ADJUSTED), origin, width, N)
    return taken


@triton.jit
def _choose(weights, target, N: tl.constexpr):
    """Return the first index whose cumulative weight is above `target` and whose weight is not 0, and the remainder."""
    at = tl.arange(0, N)
    cumulative = tl.cumsum(weights, 0)
    # If rounding leaves no cumulative weight above the target, the last weight that is not 0 is the least here.
    order = tl.where(cumulative > target, at, 2 * N - 1 - at)
    least = tl.min(tl.where(weights > 0, order, 2 * N - 1), 0)
    index = tl.where(least < N, least, 2 * N - 1 - least)
    return index, target - tl.sum(tl.where(at == index, cumulative - weights, 0.0), 0)


@triton.jit
def draw(rows, stats, p, draft, is_residual, kept, u, RULE: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
         ADJUSTED: tl.constexpr):  # fmt: skip
    """Draw a token.

    Args:
        rows: the logits.
        stats: of the tiles.
        p: the distribution of the row.
        draft: q̂ of the rejected token.
        is_residual: whether to draw from the residual above q̂, or else from p.
        kept: P, the share of p that may be drawn (1 under all rules but `block`), float64.
        u: the draw, in [0, 1), float64.

    Returns:
        The token, and whether there was no residual up to rounding, so that it was drawn from p.
    """
    tiles = tl.arange(0, TILES)
    there = tiles < rows.n_tiles
    at = p.row * rows.n_tiles + tiles
    peak = tl.load(stats.peaks + at, mask=there, other=-float("inf"))
    mass = tl.load(stats.masses + at, mask=there, other=0.0)
    plain = (mass * probability(peak, p.peak, p.mass, p.scale)).to(tl.float64)
    weights = plain
    shares = _shares(rows, p, draft, kept, 0, TILE, ADJUSTED)
    least = kept * _ROUNDING
    if RULE == SIGMOID:
        least = kept * 0.0
        if is_residual:
            for tile in range(rows.n_tiles):
                ids = tile * TILE + tl.arange(0, TILE)
                z = load_tiles(rows, p.row, tile, ids, 1, ADJUSTED, True)
                weight = tl.sum(_weights(z, ids, rows.V, p, draft, is_residual, kept, RULE), 0)
                weights = tl.where(tiles == tile, weight, weights)
    elif is_residual:
        taken = _taken(rows, p, draft, kept, shares, 0, TILE, TILES, TILE, ADJUSTED)
        weights = tl.maximum(plain * kept - taken, 0.0)
    total = tl.sum(weights, 0)
    none = is_residual & (total <= least)
    if none:
        is_residual = is_residual & ~none
        kept = tl.zeros_like(kept) + 1.0
        weights = plain
        total = tl.sum(plain, 0)

    tile, left = _choose(weights, u * total, TILES)
    # A tile's mass may be rounding alone, without any cell of positive weight. Then try the next tile.
    strip = tl.zeros_like(tile)
    tried = tl.zeros_like(tile)
    STRIPS: tl.constexpr = TILE // _CELLS
    while tried < rows.n_tiles:
        ids = tile * TILE + tl.arange(0, STRIPS)[:, None] * _CELLS + tl.arange(0, _CELLS)[None, :]
        z = load_tiles(rows, p.row, tile, ids, 1, ADJUSTED, True)
        strips = tl.sum(_weights(z, ids, rows.V, p, draft, is_residual, kept, RULE), 1)
        if RULE != SIGMOID:
            if is_residual:
                taken = _taken(rows, p, draft, kept, shares, tile * TILE, _CELLS, STRIPS, TILE, ADJUSTED)
                strips = tl.where(taken < strips * (1 - 1e-12), strips - taken, 0.0)
        if tl.max(strips, 0) > 0:
            strip, left = _choose(strips, left, STRIPS)
            tried = tl.zeros_like(tile) + rows.n_tiles
        else:
            tile = (tile + 1) % rows.n_tiles
            left = tl.zeros_like(left)
            tried += 1

    ids = tile * TILE + strip * _CELLS + tl.arange(0, _CELLS)
    z = load_at(rows, p.row, ids, ids < rows.V, p.cut, TILE, ADJUSTED)
    cells = _weights(z, ids, rows.V, p, draft, is_residual, kept, RULE)
    if RULE != SIGMOID:
        if is_residual:
            taken = _taken(rows, p, draft, kept, shares, tile * TILE + strip * _CELLS, 1, _CELLS, TILE, ADJUSTED)
            cells = tl.maximum(cells - taken, 0.0)
    cell, _ = _choose(cells, left, _CELLS)
    return tile * TILE + strip * _CELLS + cell, none
