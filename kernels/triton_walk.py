"""Device functions that run the acceptance tests of a proposal.

Drafts are tested in groups of a few, so that their loads overlap. Each function returns the number of accepted drafts;
the caller checks the row after them. The rule is a constant, so that each is compiled alone.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from kernels import sparse
from kernels.triton_draw import draft_sigmoid, probability, sigmoid
from kernels.triton_rows import ACCEPT, BLOCK, COUPLED, GREEDY, LOG2_E, SIGMOID, TOKENWISE, load_at, philox_uniforms
from kernels.verify_pack import DRAFT_INTS

# Columns of `Drafts.ints`.
TOKEN, SUPPORT, SUPPORT_SIZE, LOGITS_ROW = (tl.constexpr(i) for i in range(4))
DRAFT_COLUMNS = tl.constexpr(DRAFT_INTS)

_MAX_SUPPORT = tl.constexpr(sparse.MAX_SUPPORT)
_GROUP = tl.constexpr(8)
_CHUNK = tl.constexpr(64)  # tokens of each support that are read at once; larger ones take several turns


class Drafts(NamedTuple):
    """Pointers to all drafts: their numbers `[N, 4]`, q̂ of each token `[N]`, supports, and logits `[D, V]`."""

    ints: Any
    q: Any
    support_ids: Any
    support_q: Any
    logits: Any
    uniforms: Any


@triton.jit
def row_distributions(rows, stats, row, wanted, scale, RULE: tl.constexpr, TILES: tl.constexpr):
    """Combine the tile statistics of several rows `[G]`: the largest logit, Σ exp of the rest over it, the best token.

    The mass of a bad row is NaN, +inf or 0. The best token is -1 under rules that do not need it.
    """
    tiles = tl.arange(0, TILES)[None, :]
    at = row[:, None] * rows.n_tiles + tiles
    there = wanted[:, None] & (tiles < rows.n_tiles)
    peak = tl.load(stats.peaks + at, mask=there, other=-float("inf"))
    mass = tl.load(stats.masses + at, mask=there, other=0.0)
    largest = tl.max(peak, 1)
    level = tl.where(largest == -float("inf"), 0.0, largest)
    above = (peak - level[:, None]) * scale
    total = tl.sum(mass * tl.exp2(above), 1)
    best = row * 0 - 1
    if (RULE == GREEDY) | (RULE == COUPLED):
        ahead = above + tl.load(stats.leads + at, mask=there, other=0.0)
        first = tl.argmax(tl.where(ahead == ahead, ahead, -float("inf")), 1, tie_break_left=True)
        best = tl.load(stats.bests + row * rows.n_tiles + first, mask=wanted, other=-1)
    return level, total, best


@triton.jit
def is_distribution(mass):
    """Return whether rows with these masses have a distribution: a bad row has NaN, +inf or 0."""
    return (mass > 0) & (mass < float("inf"))


# -------------------------------------------------------------------------------------------------------------- groups


class Group(NamedTuple):
    """Some drafts of one proposal, `[G]` each: indices, rows, tokens, the first and the size of their supports, rows of
    `Drafts.logits`, cuts, and the result of `row_distributions`; and the largest size.
    """

    i: Any
    inside: Any
    row: Any
    draft: Any
    token: Any
    known: Any
    support: Any
    size: Any
    logits_row: Any
    cut: Any
    peak: Any
    mass: Any
    best: Any
    widest: Any


class Supports(NamedTuple):
    """`_CHUNK` tokens of the support of each draft of a group, `[G, _CHUNK]`: tokens, q̂, and the target's logits."""

    ids: Any
    q: Any
    z: Any


@triton.jit
def _group(rows, stats, terms, drafts, start, RULE: tl.constexpr, TILES: tl.constexpr):
    i = start + tl.arange(0, _GROUP)
    inside = i < terms.gamma
    row = terms.first_row + i
    draft = terms.first_draft + i
    at = drafts.ints + draft * DRAFT_COLUMNS
    token = tl.load(at + TOKEN, mask=inside, other=-1)
    support = tl.load(at + SUPPORT, mask=inside, other=0)
    size = tl.load(at + SUPPORT_SIZE, mask=inside, other=0)
    logits_row = tl.load(at + LOGITS_ROW, mask=inside, other=-1)
    cut = tl.load(rows.cuts + row, mask=inside, other=-float("inf"))
    peak, mass, best = row_distributions(rows, stats, row, inside, terms.scale, RULE, TILES)
    known = inside & (token >= 0)
    return Group(
        i, inside, row, draft, token, known, support, size, logits_row, cut, peak, mass, best, tl.max(size, 0)
    )  # fmt: skip


@triton.jit
def _supports(rows, drafts, group, first, TILE: tl.constexpr, ADJUSTED: tl.constexpr):
    """Return the tokens from `first` on of each support."""
    k = first + tl.arange(0, _CHUNK)[None, :]
    index = group.support[:, None] + k
    there = k < group.size[:, None]
    ids = tl.load(drafts.support_ids + index, mask=there, other=-1)
    q = tl.load(drafts.support_q + index, mask=there, other=0.0)
    z = load_at(rows, group.row[:, None], ids, there, group.cut[:, None], TILE, ADJUSTED)
    return Supports(ids, q, z)


@triton.jit
def _tests(drafts, terms, group):
    """Return the uniforms of a group's acceptance tests, float64."""
    if terms.given >= 0:
        u = tl.load(drafts.uniforms + terms.given + group.i, mask=group.inside, other=0.0)
    else:
        u = philox_uniforms(terms.seed, terms.base_length, group.i, ACCEPT)
    return u


@triton.jit
def _pick(values, index):
    """Return `values[index]` of a vector `[G]`."""
    return tl.sum(tl.where(tl.arange(0, _GROUP) == index, values, 0), 0)


@triton.jit
def _until_failure(passes, group, gamma):
    """Return the index of the first rejected draft of the group, or γ."""
    return tl.min(tl.where(group.inside & ~passes, group.i, gamma), 0)


@triton.jit
def _p_and_q(rows, terms, drafts, group, RULE: tl.constexpr, TILE: tl.constexpr, ADJUSTED: tl.constexpr):
    """Return p and q̂ of a group's drafted tokens, float32; or p̂ and q̂ of the rule `sigmoid`."""
    z = load_at(rows, group.row, group.token, group.known, group.cut, TILE, ADJUSTED)
    p = probability(z, group.peak, group.mass, terms.scale)
    q = tl.load(drafts.q + group.draft, mask=group.inside, other=0.0)
    if RULE == SIGMOID:
        at = drafts.logits + group.logits_row.to(tl.int64) * rows.V + group.token
        p = sigmoid(z * (terms.scale / LOG2_E), terms.lowest, terms.inverse_span)
        q = draft_sigmoid(tl.load(at, mask=group.known, other=0.0), terms.lowest, terms.inverse_span)
    return tl.where(group.known, p, 0.0), q


@triton.jit
def _overlaps_of(supports, terms, group, share, RULE: tl.constexpr):
    if RULE == GREEDY:
        acceptable = _is_acceptable(supports.z, supports.ids, group.peak[:, None], group.best[:, None], terms.lenience)
        common = tl.where(acceptable, supports.q, 0.0).to(tl.float64)
    else:
        p = probability(supports.z, group.peak[:, None], group.mass[:, None], terms.scale).to(tl.float64)
        common = tl.minimum(p * share, supports.q.to(tl.float64))
    return tl.sum(common, 1)


@triton.jit
def _rest(rows, terms, drafts, group, j, share, TILE: tl.constexpr, ADJUSTED: tl.constexpr):
    """Return Σ min(share · p, q̂), float64, over the tokens after the first `_CHUNK` for the draft at `j` of a group."""
    overlap = share * 0
    size = _pick(group.size, j)
    if size > _CHUNK:
        k = _CHUNK + tl.arange(0, _MAX_SUPPORT)
        there = k < size
        index = _pick(group.support, j) + k
        ids = tl.load(drafts.support_ids + index, mask=there, other=-1)
        q = tl.load(drafts.support_q + index, mask=there, other=0.0).to(tl.float64)
        row = terms.first_row + _pick(group.i, j)
        z = load_at(rows, row, ids, there, tl.load(rows.cuts + row), TILE, ADJUSTED)
        p = probability(z, _pick(group.peak, j), _pick(group.mass, j), terms.scale).to(tl.float64)
        overlap += tl.sum(tl.minimum(p * share, q), 0)
    return overlap


@triton.jit
def _store_beta(rows, terms, drafts, group, supports, share, beta, RULE: tl.constexpr, TILE: tl.constexpr,
                ADJUSTED: tl.constexpr):  # fmt: skip
    """Write β of a group: Σ min(share · p, q̂) over each support; at temperature 0 q̂ of acceptable tokens.

    `supports` are the first tokens; more are read again.
    """
    overlaps = _overlaps_of(supports, terms, group, share, RULE)
    for first in range(_CHUNK, group.widest, _CHUNK):
        more = _supports(rows, drafts, group, first, TILE, ADJUSTED)
        overlaps += _overlaps_of(more, terms, group, share, RULE)
    tl.store(beta + group.draft, overlaps.to(tl.float32), mask=group.inside)


# --------------------------------------------------------------------------------------------------------------- walks


@triton.jit
def walk(rows, stats, terms, drafts, beta, RULE: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
         ADJUSTED: tl.constexpr):  # fmt: skip
    """Accept up to the first failure; returns the number of accepted drafts. Writes β where q̂ is known.

    TOKENWISE: while u · l · q̂ < p [L Alg. 1, A.5]. SIGMOID: the same of p̂ and q̂ [W 3.2.2]. COUPLED: while the target,
    with the same noise as the draft, chooses the same token. GREEDY: the most probable token, or with lenience tokens
    close to it [L A.5].
    """
    accepted = tl.zeros_like(terms.gamma)
    start = tl.zeros_like(terms.gamma)
    while start < terms.gamma:
        group = _group(rows, stats, terms, drafts, start, RULE, TILES)
        share = terms.lenience * 0 + 1.0
        if RULE == COUPLED:
            passes = group.best == group.token
        elif RULE == GREEDY:
            z = load_at(rows, group.row, group.token, group.known, group.cut, TILE, ADJUSTED)
            passes = _is_acceptable(z, group.token, group.peak, group.best, terms.lenience) & group.known
        else:
            p, q = _p_and_q(rows, terms, drafts, group, RULE, TILE, ADJUSTED)
            passes = (q > 0) & (_tests(drafts, terms, group) * terms.lenience * q < p)
            share = 1.0 / terms.lenience
        accepted = _until_failure(passes & is_distribution(group.mass), group, terms.gamma)
        if (RULE == TOKENWISE) | (RULE == GREEDY):
            supports = _supports(rows, drafts, group, 0, TILE, ADJUSTED)
            _store_beta(rows, terms, drafts, group, supports, share, beta, RULE, TILE, ADJUSTED)
        start = tl.where(accepted < terms.gamma, terms.gamma, start + _GROUP)
    return accepted


@triton.jit
def walk_block(rows, stats, terms, drafts, beta, TILE: tl.constexpr, TILES: tl.constexpr, ADJUSTED: tl.constexpr):
    """Accept up to the last success (Sun et al. 2024, Alg. 2). Writes β.

    Returns:
        τ; P_τ, float64; and whether a row on the way is bad.
    """
    tau = tl.zeros_like(terms.gamma)
    bad = terms.gamma < 0
    P = terms.lenience * 0 + 1.0
    # Values of their own: Triton does not carry a variable through a loop that gives it another's value, where both
    # began as the same value.
    kept = terms.lenience * 0 + 1.0
    u_before = terms.lenience * 0 + 1.0
    start = tl.zeros_like(terms.gamma)
    while start < terms.gamma:
        group = _group(rows, stats, terms, drafts, start, BLOCK, TILES)
        p, q = _p_and_q(rows, terms, drafts, group, BLOCK, TILE, ADJUSTED)
        u = _tests(drafts, terms, group)
        supports = _supports(rows, drafts, group, 0, TILE, ADJUSTED)
        whole = terms.lenience * 0 + 1.0
        _store_beta(rows, terms, drafts, group, supports, whole, beta, BLOCK, TILE, ADJUSTED)
        for j in range(_GROUP):
            if (start + j < terms.gamma) & (P > 0) & ~bad:
                bad = ~is_distribution(_pick(group.mass, j))
                if start + j > 0:  # h of the previous token needs this row
                    Z = P - _pick(_overlaps_of(supports, terms, group, P, BLOCK), j)
                    Z -= _rest(rows, terms, drafts, group, j, P, TILE, ADJUSTED)
                    if (Z > 0) & (u_before * (Z + (1.0 - P)) < Z):
                        tau = start + j
                        kept = P
                p_j = _pick(p, j).to(tl.float64)
                q_j = _pick(q, j).to(tl.float64)
                P = tl.where(q_j > 0, tl.minimum(P * p_j / tl.where(q_j > 0, q_j, 1.0), 1.0), 0.0)
                u_before = _pick(u, j)
        start = tl.where((P > 0) & ~bad, start + _GROUP, terms.gamma)
    if u_before < P:  # h is P after the last token; where none was drafted, u_before is 1
        tau = terms.gamma
        kept = P
    return tau, kept, bad


@triton.jit
def _is_acceptable(z, ids, peak, best, lenience):
    """Return which tokens are acceptable at temperature 0: the argmax, and with l < 1 all with p(x) ≥ l · max p."""
    near = tl.exp2((z - peak) * LOG2_E).to(tl.float64) >= lenience
    return tl.where(lenience == 1, ids == best, near)
