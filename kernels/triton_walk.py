"""Device functions that walk a proposal's tests: how many drafted tokens stand, under each rule.

A few drafts are looked at together, so that their loads overlap. Knows nothing of how the next token is drawn.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from kernels.triton_draw import draft_sigmoid, probability, sigmoid
from kernels.triton_rows import LOG2_E, accept_uniforms, load_at, load_tile

TOKENWISE, BLOCK, COUPLED, SIGMOID, GREEDY = (tl.constexpr(i) for i in range(5))

# Columns of `Drafts.ints`.
TOKEN, SUPPORT, SUPPORT_SIZE, DENSE_ROW = (tl.constexpr(i) for i in range(4))
DRAFT_INTS = tl.constexpr(4)

_GROUP = tl.constexpr(8)


class Terms(NamedTuple):
    """What one proposal is judged by.

    Attributes:
        rule: TOKENWISE, BLOCK, COUPLED, SIGMOID, or GREEDY under any of them.
        first_row: the first of its rows.
        first_draft: the first of its drafts.
        gamma: how many tokens were drafted.
        seed: key of the draws.
        base_length: counter of the draws.
        given: where its given uniforms begin; -1 where it draws.
        scale: log2(e) / temperature.
        lenience: l of [L A.5], float64.
        lowest: alpha of the rule `sigmoid`.
        inverse_span: 1 / (beta - alpha).
    """

    rule: Any
    first_row: Any
    first_draft: Any
    gamma: Any
    seed: Any
    base_length: Any
    given: Any
    scale: Any
    lenience: Any
    lowest: Any
    inverse_span: Any


class Drafts(NamedTuple):
    """Pointers to all drafts: their numbers `[N, 4]`, q̂ of each token `[N]`, supports, and rows over the vocabulary."""

    ints: Any
    q: Any
    support_ids: Any
    support_q: Any
    dense: Any
    uniforms: Any


@triton.jit
def load_terms(ints, floats, b):
    """Return what proposal `b` is judged by; the columns are those of `verify_pack.Batch`."""
    i = ints + b * 6
    f = floats + b * 7
    first_row = tl.load(i).to(tl.int32)
    return Terms(
        tl.load(i + 2).to(tl.int32),
        first_row,
        first_row - b,  # each proposal before has a row more than it has drafts
        tl.load(i + 1).to(tl.int32),
        tl.load(i + 3),
        tl.load(i + 4),
        tl.load(i + 5).to(tl.int32),
        tl.load(f).to(tl.float32),
        tl.load(f + 1),
        tl.load(f + 2).to(tl.float32),
        tl.load(f + 3).to(tl.float32),
    )


@triton.jit
def load_filters(floats, b):
    """Return top-k, top-p and log2 of min-p of proposal `b`."""
    f = floats + b * 7
    return tl.load(f + 4).to(tl.int32), tl.load(f + 5), tl.load(f + 6).to(tl.float32)


@triton.jit
def row_laws(rows, stats, row, wanted, scale, TILES: tl.constexpr):
    """Put the tiles of several rows together: for each the largest logit, the mass above it, and the best token.

    `row` is `[G]`. A mass that is no positive number says that the row is no law.
    """
    tiles = tl.arange(0, TILES)[None, :]
    at = row[:, None] * rows.n_tiles + tiles
    there = wanted[:, None] & (tiles < rows.n_tiles)
    peak = tl.load(stats.peaks + at, mask=there, other=-float("inf"))
    mass = tl.load(stats.masses + at, mask=there, other=0.0)
    lead = tl.load(stats.leads + at, mask=there, other=0.0)
    largest = tl.max(peak, 1)
    level = tl.where(largest == -float("inf"), 0.0, largest)
    above = (peak - level[:, None]) * scale
    total = tl.sum(mass * tl.exp2(above), 1)
    ahead = above + lead
    first = tl.argmax(tl.where(ahead == ahead, ahead, -float("inf")), 1, tie_break_left=True)
    best = tl.load(stats.bests + row * rows.n_tiles + first, mask=wanted, other=-1)
    return level, total, best


@triton.jit
def is_law(mass):
    """Say whether rows of these masses are laws: NaN, +inf and 0 are none."""
    return (mass > 0) & (mass < float("inf"))


@triton.jit
def _tests(drafts, terms, i, wanted):
    """Return the draws that test the drafts at `i`, float64."""
    if terms.given >= 0:
        u = tl.load(drafts.uniforms + terms.given + i, mask=wanted, other=0.0)
    else:
        u = accept_uniforms(terms.seed, terms.base_length, i)
    return u


@triton.jit
def _pick(values, place):
    """Return `values[place]` of a vector `[G]`."""
    return tl.sum(tl.where(tl.arange(0, _GROUP) == place, values, 0), 0)


@triton.jit
def _dense_overlap(rows, row, q, law, share, best, lenience, GREEDILY: tl.constexpr, TILE: tl.constexpr,
                   ADJUSTED: tl.constexpr, FILTERED: tl.constexpr):  # fmt: skip
    """Return Σ min(share · p, q̂) over the vocabulary, or what q̂ gives to the tokens that stand at temperature 0."""
    overlap = tl.zeros_like(share)
    for tile in range(rows.n_tiles):
        ids = tile * TILE + tl.arange(0, TILE)
        z = load_tile(rows, row, tile, ids, TILE, ADJUSTED, FILTERED)
        here = tl.load(q + ids, mask=ids < rows.V, other=0.0).to(tl.float64)
        if GREEDILY:
            here = tl.where(_stands(z, ids, law[0], best, lenience), here, 0.0)
        else:
            here = tl.minimum(probability(z, law[0], law[1], law[2]) * share, here)
        overlap += tl.sum(here, 0)
    return overlap


@triton.jit
def _stands(z, ids, peak, best, lenience):
    """Say which tokens stand at temperature 0: the argmax, and p(x) ≥ l · max p where l < 1 [L A.5]."""
    near = tl.exp2((z - peak) * LOG2_E).to(tl.float64) >= lenience
    return tl.where(lenience == 1, ids == best, near)


@triton.jit
def walk(rows, stats, terms, drafts, beta, TILE: tl.constexpr, TILES: tl.constexpr, K: tl.constexpr,
         ADJUSTED: tl.constexpr, FILTERED: tl.constexpr, WITH_DENSE: tl.constexpr):  # fmt: skip
    """Judge the drafted tokens of one proposal, and write β of those that were looked at.

    Returns:
        How many are accepted; P there (1 under all rules but `block`), float64; and whether a row that was needed on
        the way is no law (the row after the last accepted one is the caller's to check).
    """
    gamma = terms.gamma
    accepted = tl.zeros_like(gamma)
    bad = tl.zeros_like(gamma)
    P = tl.zeros_like(terms.lenience) + 1.0
    kept = P
    u_before = P
    start = tl.zeros_like(gamma)
    while start < gamma:
        i = start + tl.arange(0, _GROUP)
        inside = i < gamma
        row = terms.first_row + i
        peak, mass, best = row_laws(rows, stats, row, inside, terms.scale, TILES)
        draft = terms.first_draft + i
        token = tl.load(drafts.ints + draft * DRAFT_INTS + TOKEN, mask=inside, other=-1)
        known = inside & (token >= 0)
        z = load_at(rows, row, token, known, TILE, ADJUSTED, FILTERED)

        if terms.rule == COUPLED:
            stands = best == token
        else:
            if WITH_DENSE:
                dense_row = tl.load(drafts.ints + draft * DRAFT_INTS + DENSE_ROW, mask=inside, other=-1)
            # [G, K]: the supports
            k = tl.arange(0, K)[None, :]
            size = tl.load(drafts.ints + draft * DRAFT_INTS + SUPPORT_SIZE, mask=inside, other=0)
            place = tl.load(drafts.ints + draft * DRAFT_INTS + SUPPORT, mask=inside, other=0)[:, None] + k
            there = k < size[:, None]
            ids = tl.load(drafts.support_ids + place, mask=there, other=-1)
            q = tl.load(drafts.support_q + place, mask=there, other=0.0)
            z_k = load_at(rows, tl.zeros_like(ids) + row[:, None], ids, there, TILE, ADJUSTED, FILTERED)
            if terms.rule == GREEDY:
                stands = _stands(z, token, peak, best, terms.lenience) & known
                overlap = tl.sum(tl.where(_stands(z_k, ids, peak[:, None], best[:, None], terms.lenience), q, 0.0), 1)
            else:
                p_k = probability(z_k, peak[:, None], mass[:, None], terms.scale)
                overlap = tl.sum(tl.minimum((p_k / terms.lenience).to(tl.float32), q), 1)
                p_x = tl.where(known, probability(z, peak, mass, terms.scale), 0.0)
                q_x = tl.load(drafts.q + draft, mask=inside, other=0.0)
                if WITH_DENSE:
                    from_row = known & (dense_row >= 0)
                    at = dense_row.to(tl.int64) * rows.V + token
                    q_x = tl.where(from_row, tl.load(drafts.dense + at, mask=from_row, other=0.0), q_x)
                if terms.rule == SIGMOID:
                    p_x = tl.where(known, sigmoid(z * (terms.scale / LOG2_E), terms.lowest, terms.inverse_span), 0.0)
                    q_x = draft_sigmoid(q_x, terms.lowest, terms.inverse_span)
                u = _tests(drafts, terms, i, inside)
                stands = (q_x > 0) & (u * terms.lenience * q_x < p_x)
            if WITH_DENSE:
                if terms.rule != SIGMOID:
                    for j in tl.static_range(_GROUP):
                        number = _pick(dense_row, j)
                        if (number >= 0) & (start + j < gamma):
                            q_row = drafts.dense + number.to(tl.int64) * rows.V
                            law = (_pick(peak, j), _pick(mass, j), terms.scale)
                            at = terms.first_row + start + j
                            if terms.rule == GREEDY:
                                more = _dense_overlap(rows, at, q_row, law, kept, _pick(best, j), terms.lenience, True,
                                                      TILE, ADJUSTED, FILTERED)  # fmt: skip
                            else:
                                more = _dense_overlap(rows, at, q_row, law, 1.0 / terms.lenience, 0, terms.lenience,
                                                      False, TILE, ADJUSTED, FILTERED)  # fmt: skip
                            overlap += tl.where(tl.arange(0, _GROUP) == j, more, 0.0).to(tl.float32)
            tl.store(beta + draft, overlap, mask=inside)

        if terms.rule == BLOCK:
            # One after the other: h needs the row after, so each is tested when that row is at hand (Sun et al. 2024).
            for j in tl.static_range(_GROUP):
                if (start + j < gamma) & (P > 0) & (bad == 0):
                    mass_j = _pick(mass, j)
                    bad = (~is_law(mass_j)).to(tl.int32)
                    if start + j > 0:
                        Z = P - _pick(tl.sum(tl.minimum(p_k * P, q.to(tl.float64)), 1), j)
                        if WITH_DENSE:
                            number = _pick(dense_row, j)
                            if number >= 0:
                                Z -= _dense_overlap(
                                    rows, terms.first_row + start + j, drafts.dense + number.to(tl.int64) * rows.V,
                                    (_pick(peak, j), mass_j, terms.scale), P, 0, terms.lenience, False,
                                    TILE, ADJUSTED, FILTERED,
                                )  # fmt: skip
                        if (Z > 0) & (u_before * (Z + (1 - P)) < Z):
                            accepted = start + j
                            kept = P
                    p_j = _pick(p_x, j).to(tl.float64)
                    q_j = _pick(q_x, j).to(tl.float64)
                    P = tl.where(q_j > 0, tl.minimum(P * p_j / tl.where(q_j > 0, q_j, 1.0), 1.0), 0.0)
                    u_before = _pick(u, j)
            start = tl.where((P > 0) & (bad == 0), start + _GROUP, gamma)
        else:
            accepted = tl.min(tl.where(inside & ~(stands & is_law(mass)), i, gamma), 0)
            start = tl.where(accepted < gamma, gamma, start + _GROUP)
    if (terms.rule == BLOCK) & (bad == 0) & (u_before < P):
        accepted = gamma
        kept = P
    return accepted, kept, bad
