"""Device functions of the verification kernels: adjusted and filtered logits, tile statistics, random numbers.

The tile size is a function of V only, so that no result depends on the batch.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from kernels.rng import FIRST_MULTIPLIER, SECOND_MULTIPLIER, SPREAD, Domain
from kernels.verify import Rule
from kernels.verify_pack import FLOATS, GREEDY_NUMBER, INTS, RULE_NUMBERS

LOG2_E = tl.constexpr(1.4426950408889634)

TOKENWISE, BLOCK, COUPLED, SIGMOID = (
    tl.constexpr(RULE_NUMBERS[rule]) for rule in (Rule.TOKENWISE, Rule.BLOCK, Rule.COUPLED, Rule.SIGMOID)
)
GREEDY = tl.constexpr(GREEDY_NUMBER)
INT_COLUMNS, FLOAT_COLUMNS = tl.constexpr(INTS), tl.constexpr(FLOATS)

ACCEPT = tl.constexpr(int(Domain.ACCEPT))
RESAMPLE = tl.constexpr(int(Domain.RESAMPLE))
_COUPLED = tl.constexpr(int(Domain.COUPLED))
_SPREAD = tl.constexpr(SPREAD)
_FIRST = tl.constexpr(FIRST_MULTIPLIER)
_SECOND = tl.constexpr(SECOND_MULTIPLIER)


PART = tl.constexpr(512)
"""Logits of a tile that a warp reads at once, 16 a lane: two reads of 8 neighbours."""
_LANES, _NEIGHBOURS = tl.constexpr(32), tl.constexpr(8)
_READ = tl.constexpr(256)
_NO_TOKEN = tl.constexpr(2**31 - 1)
_SLACK = tl.constexpr(1e-3)  # bits, more than rounding


def tile_size(V: int) -> int:
    """Return the number of logits per tile; a row of up to 2^18 logits has 64 tiles at most."""
    return 2048 if V <= 1 << 17 else 4096


class Rows(NamedTuple):
    """The target's logits, their adjustments and cuts: pointers and sizes for a kernel.

    Attributes:
        logits: `[R, V]` with any row stride.
        stride: of the rows, in elements.
        V: tokens in a row.
        n_tiles: tiles in a row.
        adjusted: index of each row's list of changes, -1 for none, `[R]`.
        tile_starts: where each tile's changes begin, `[lists, n_tiles + 1]`.
        change_ids: ascending within a row; with the divisors and biases of `adjustments.RowAdjustment`.
        change_divisors: see `change_ids`.
        change_biases: see `change_ids`.
        cuts: the least logit that the filters keep, per row `[R]`.
    """

    logits: Any
    stride: Any
    V: Any
    n_tiles: Any
    adjusted: Any
    tile_starts: Any
    change_ids: Any
    change_divisors: Any
    change_biases: Any
    cuts: Any


class TileStats(NamedTuple):
    """Pointers to the statistics of each tile, `[R, n_tiles]`; see `tile_stats`."""

    peaks: Any
    masses: Any
    bests: Any
    leads: Any


class Terms(NamedTuple):
    """The parameters of one proposal.

    Attributes:
        rule: TOKENWISE, BLOCK, COUPLED, SIGMOID, or GREEDY under any of them.
        first_row: the first of its rows.
        first_draft: the first of its drafts.
        gamma: how many tokens were drafted.
        seed: key of the random numbers.
        base_length: counter of the random numbers.
        given: index of its first given uniform; -1 if it uses Philox.
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


@triton.jit
def load_terms(ints, floats, b):
    """Return the parameters of proposal `b`; `verify_pack.Batch` has the columns."""
    i = ints + b * INT_COLUMNS
    f = floats + b * FLOAT_COLUMNS
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


# ------------------------------------------------------------------------------------------------------------- logits


@triton.jit
def _changed(z, divisor, bias):
    return tl.where(z > 0, z / divisor, z * divisor) + bias


@triton.jit
def load_tiles(rows, row, tile, ids, OWN_TILES: tl.constexpr, ADJUSTED: tl.constexpr, CUT: tl.constexpr):
    """Return adjusted logits of OWN_TILES tiles from `tile` on, or of a part of them, float32, in the shape of `ids`.

    `ids` are token ids within the tiles; past the row's end logits are -inf. The row's filters are applied only with
    CUT. Where V is a multiple of 16, Triton reads 128 bits at a time.
    """
    start = rows.logits + row.to(tl.int64) * rows.stride
    z = tl.load(start + ids, mask=ids < rows.V, other=-float("inf")).to(tl.float32)
    if ADJUSTED:
        changes = tl.load(rows.adjusted + row)
        if changes >= 0:
            at = rows.tile_starts + changes * (rows.n_tiles + 1)
            for n in range(tl.load(at + tile), tl.load(at + tl.minimum(tile + OWN_TILES, rows.n_tiles))):
                changed = _changed(z, tl.load(rows.change_divisors + n), tl.load(rows.change_biases + n))
                z = tl.where(ids == tl.load(rows.change_ids + n), changed, z)
    if CUT:
        z = tl.where(z < tl.load(rows.cuts + row), -float("inf"), z)
    return z


@triton.jit
def load_at(rows, row, ids, wanted, cut, TILE: tl.constexpr, ADJUSTED: tl.constexpr):
    """Return adjusted logits of single tokens, float32, in the shape of `ids`; -inf where not `wanted` or below `cut`.

    `row` and `cut` broadcast with `ids`.
    """
    z = tl.load(rows.logits + row.to(tl.int64) * rows.stride + ids, mask=wanted, other=-float("inf")).to(tl.float32)
    if ADJUSTED:
        changes = tl.load(rows.adjusted + row + tl.zeros_like(ids), mask=wanted, other=-1)
        there = changes >= 0
        at = rows.tile_starts + changes * (rows.n_tiles + 1) + ids // TILE
        low = tl.load(at, mask=there, other=0)
        end = tl.load(at + 1, mask=there, other=0)
        high = end
        for _ in range(13):  # a tile holds 4,096 changes at most
            open_ = low < high
            middle = (low + high) // 2
            above = open_ & (tl.load(rows.change_ids + middle, mask=open_, other=0) < ids)
            low = tl.where(above, middle + 1, low)
            high = tl.where(above, high, middle)
        found = low < end
        found = found & (tl.load(rows.change_ids + low, mask=found, other=-1) == ids)
        divisor = tl.load(rows.change_divisors + low, mask=found, other=1.0)
        bias = tl.load(rows.change_biases + low, mask=found, other=0.0)
        z = tl.where(found, _changed(z, divisor, bias), z)
    return tl.where(z < cut, -float("inf"), z)


# ------------------------------------------------------------------------------------------------------ random numbers


@triton.jit
def philox_uniforms(seed, base_length, index, domain: tl.constexpr):
    """Return `kernels.rng.uniform` of these, float64, in the shape of `index`."""
    index = index.to(tl.uint32)
    zero = index ^ index
    high, low, _, _ = tl.philox(seed, zero + base_length.to(tl.uint32), index, zero + domain, zero)
    bits = (high.to(tl.int64) << 21) | (low.to(tl.int64) >> 11)
    return bits.to(tl.float64) * (1.0 / 9007199254740992.0)


class NoiseKeys(NamedTuple):
    """The keys of the noise at one position, uint32, the second times its multiplier; see `kernels.rng`."""

    first: Any
    second: Any
    third: Any


@triton.jit
def noise_keys(seed, position):
    """Return the keys of the noise at `position`."""
    position = position.to(tl.uint32)
    zero = position ^ position
    key0, key1, key2, _ = tl.philox(seed, position, zero, zero + _COUPLED, zero)
    return NoiseKeys(key0, key1 * _SECOND, key2)


@triton.jit
def _noise(keys, ids):
    """Return the random bits of each token, uint32, in the shape of `ids`."""
    x = ids.to(tl.uint32) * _SPREAD + keys.first
    x = (x ^ (x >> 16)) * _FIRST
    x = (x ^ (x >> 15)) * _SECOND + keys.second
    return (x ^ (x >> 15)) ^ keys.third


@triton.jit
def exponentials(keys, ids):
    """Return the exponential variables of `kernels.rng`, float32, in the shape of `ids`."""
    x = _noise(keys, ids)
    v = tl.minimum((x.to(tl.float32) + 0.5) * (1.0 / 4294967296.0), 1.0 - 1.0 / 16777216.0)
    # -log(1 - v). For small v, 1 - v loses the bits that decide, so the series is used.
    series = v * (1 + v * (1 / 2 + v * (1 / 3 + v * (1 / 4 + v * (1 / 5 + v * (1 / 6 + v / 7))))))
    return tl.where(v < 0.1, series, -tl.log(1.0 - v))


@triton.jit
def most_noise(keys, ids):
    """Return no less than -log2 of `exponentials`, and 0.09 more at most where it is large, by fewer instructions.

    -log(1 - v) is at least v; and the bits of a float32 2^k (1 + f), as an integer, are 2^23 (127 + k + f), where k + f
    is at most its log2.
    """
    bits = _noise(keys, ids).to(tl.float32).to(tl.int32, bitcast=True)
    return (127.0 + 32.0) - bits.to(tl.float32) * (1.0 / 8388608.0)


# -------------------------------------------------------------------------------------------------------- statistics


@triton.jit
def _by_lane(one, two, OWN_TILES: tl.constexpr):
    """Return two reads `[OWN_TILES, _READ]` by lane, `[OWN_TILES, _LANES, 16]`.

    A read has a row for each warp and a lane reads neighbours, so every version of Triton gives a warp a tile. Of reads
    with more dimensions Triton 3.6 divides a tile among the warps, and sums cross lanes.
    """
    return tl.reshape(tl.join(one, two), [OWN_TILES, _LANES, 2 * _NEIGHBOURS])


@triton.jit
def tile_stats(rows, row, tile, terms, least, OWN_TILES: tl.constexpr, TILE: tl.constexpr, ADJUSTED: tl.constexpr,
               WITH_BEST: tl.constexpr, WITH_NOISE: tl.constexpr):  # fmt: skip
    """Return the statistics of OWN_TILES tiles, `[OWN_TILES]` each; a warp reads a tile.

    Each lane adds up what it reads; lanes are put together at the end, so that reads do not wait for each other.

    Args:
        rows: the logits.
        row: of the tiles.
        tile: the index of the first in the row.
        terms: of the row's proposal.
        least: logits below it count as -inf.
        WITH_BEST: whether the best token is wanted: the rule is `coupled`, or the temperature is 0.
        WITH_NOISE: whether a proposal of the batch is `coupled`.

    Returns:
        The largest logit; the sum of exp((z - largest) / temperature), NaN where a logit is NaN or +inf; the best token
        at temperature 0, or under `coupled` the one that wins with the noise; and by how many bits its score exceeds
        the largest logit.
    """
    first = (tile + tl.arange(0, OWN_TILES)) * TILE
    keys = noise_keys(terms.seed, terms.base_length + row - terms.first_row)
    offsets = first[:, None] + tl.arange(0, _READ)[None, :]
    peak = tl.full([OWN_TILES, _LANES], -float("inf"), tl.float32)
    mass = tl.zeros([OWN_TILES, _LANES], tl.float32)
    bound = tl.zeros([OWN_TILES, _LANES], tl.float32)  # no score of the lane exceeds its peak by more bits
    for start in range(0, TILE, PART):
        ids = start + offsets
        one = load_tiles(rows, row, tile, ids, OWN_TILES, ADJUSTED, False)
        two = load_tiles(rows, row, tile, ids + _READ, OWN_TILES, ADJUSTED, False)
        z = _by_lane(one, two, OWN_TILES)
        z = tl.where(z < least, -float("inf"), z)
        own_peak = tl.max(z, 2)
        level = tl.where(own_peak == -float("inf"), 0.0, own_peak)
        bits = (z - level[:, :, None]) * terms.scale
        own_mass = tl.sum(tl.exp2(bits), 2)
        own_bound = tl.zeros_like(own_peak)
        if WITH_NOISE:
            if terms.rule == COUPLED:
                noise = _by_lane(most_noise(keys, ids), most_noise(keys, ids + _READ), OWN_TILES)
                own_bound = tl.max(bits + noise, 2)
        higher = tl.maximum(peak, own_peak)
        level = tl.where(higher == -float("inf"), 0.0, higher)
        before = (peak - level) * terms.scale
        own = (own_peak - level) * terms.scale
        mass = mass * tl.exp2(before) + own_mass * tl.exp2(own)
        bound = tl.maximum(bound + before, own_bound + own)
        peak = higher
    largest = tl.max(peak, 1)
    level = tl.where(largest == -float("inf"), 0.0, largest)
    above = (peak - level[:, None]) * terms.scale
    total = tl.sum(mass * tl.exp2(above), 1)
    best = first
    lead = total * 0
    if WITH_BEST:
        if (terms.rule == GREEDY) | (terms.rule == COUPLED):
            best, lead = _best_of_tiles(
                rows, row, first, terms, keys, least, level, above + bound, TILE, ADJUSTED, WITH_NOISE
            )
    return largest, total, best, lead


@triton.jit
def _best_of_tiles(rows, row, first, terms, keys, least, level, bounds, TILE: tl.constexpr, ADJUSTED: tl.constexpr,
                   WITH_NOISE: tl.constexpr):  # fmt: skip
    """Return the token of each tile with the highest score, and the score in bits above `level`, `[tiles]`.

    `bounds` are no less than the scores of each lane's tokens, `[tiles, lanes]`. A warp computes the scores of one
    lane's tokens after another, from the highest bound down to the best score: seldom of more than two.
    """
    lanes = tl.arange(0, _LANES)[None, :]
    reads = tl.arange(0, TILE // (_LANES * _NEIGHBOURS))[None, :, None] * (_LANES * _NEIGHBOURS)
    offsets = reads + tl.arange(0, _NEIGHBOURS)[None, None, :]
    best = first
    lead = level * 0 - float("inf")
    highest = tl.max(bounds, 1)
    is_open = (highest > -float("inf")) & (highest + _SLACK >= lead)
    while tl.max(is_open.to(tl.int32), 0) > 0:
        lane = tl.min(tl.where(bounds == highest[:, None], lanes, _LANES), 1)
        ids = (first + lane * _NEIGHBOURS)[:, None, None] + offsets
        z = load_at(rows, row, ids, is_open[:, None, None] & (ids < rows.V), least, TILE, ADJUSTED)
        score = (z - level[:, None, None]) * terms.scale
        if WITH_NOISE:
            if terms.rule == COUPLED:
                score -= tl.log2(exponentials(keys, ids))
        top = tl.max(tl.max(score, 2), 1)
        token = tl.min(tl.min(tl.where(score == top[:, None, None], ids, _NO_TOKEN), 2), 1)
        is_better = (top > lead) | ((top == lead) & (token < best))
        best = tl.where(is_better, token, best)
        lead = tl.where(is_better, top, lead)
        bounds = tl.where(lanes == lane[:, None], -float("inf"), bounds)
        highest = tl.max(bounds, 1)
        is_open = (highest > -float("inf")) & (highest + _SLACK >= lead)
    return best, lead


@triton.jit
def store_stats(stats, at, wanted, found, WITH_BEST: tl.constexpr):
    """Write the result of `tile_stats`."""
    tl.store(stats.peaks + at, found[0], mask=wanted)
    tl.store(stats.masses + at, found[1], mask=wanted)
    if WITH_BEST:
        tl.store(stats.bests + at, found[2], mask=wanted)
        tl.store(stats.leads + at, found[3], mask=wanted)
