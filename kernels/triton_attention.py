"""Paged attention: causal attention of the rows of many sequences over their block tables.

A program takes one item of the work list (`kernels.attention_work`): a tile of rows of one sequence, query heads of one
KV head, and either one stretch of positions or all of them. Each stretch is computed separately, and stretches are
merged in order: in the same program, or by a second launch with the same arithmetic. Stretches begin at fixed
positions. So the result of a row has the same bits in every batch and for every split of its sequence.

There is no host sync, and shapes do not depend on values: a CUDA graph can hold both launches.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention_work import ITEM, STRETCH, TILE_ROWS

_LARGEST_TILE = 64
"""The most query rows of a program: rows of the tile times heads."""

MERGE_OPTIONS = {"num_warps": 4}
"""The compile options of `merge_kernel`."""


def sizes(heads: int, kv_heads: int, head_dim: int) -> dict[str, int]:
    """Return the constants that both kernels share; they depend on the layer only."""
    group = heads // kv_heads
    part = min(group, _LARGEST_TILE // TILE_ROWS)
    block_m = max(16, triton.next_power_of_2(TILE_ROWS * part))
    block_d = max(16, triton.next_power_of_2(head_dim))
    return {
        "KV_HEADS": kv_heads, "GROUP": group, "PART": part, "D": head_dim, "BLOCK_D": block_d, "BLOCK_M": block_m,
        "STRETCH": STRETCH,
    }  # fmt: skip


def attend_sizes(head_dim: int, block_tokens: int, dtype: torch.dtype) -> dict[str, int | str]:
    """Return the other constants of `attend_kernel`. BLOCK_N, the positions per iteration, is bounded by registers."""
    if dtype == torch.float32:
        return {"BLOCK_TOKENS": block_tokens, "ITEM": ITEM, "BLOCK_N": 16, "PRECISION": "ieee"}
    return {"BLOCK_TOKENS": block_tokens, "ITEM": ITEM, "BLOCK_N": 64 if head_dim <= 128 else 32, "PRECISION": "tf32"}


def merge_sizes(shared: dict[str, int]) -> dict[str, int]:
    """Return the other constants of `merge_kernel`."""
    return {"ROWS": TILE_ROWS, "BLOCK_P": triton.next_power_of_2(shared["PART"])}


def options(shared: dict[str, int]) -> dict[str, int]:
    """Return the compile options of `attend_kernel`."""
    is_small = shared["BLOCK_M"] <= 32 and shared["BLOCK_M"] * shared["BLOCK_D"] <= 4096
    return {"num_warps": 4 if is_small else 8, "num_stages": 2}


_LOG2E = tl.constexpr(1.4426950408889634)
_NEVER = tl.constexpr(float("-inf"))


@triton.jit
def _merge(peak, mass, found, more_peak, more_mass, more_found):
    """Merge two parts of a softmax. Explicit fused multiply-adds make both kernels round the same way."""
    higher = tl.maximum(peak, more_peak)
    base = tl.where(higher == _NEVER, 0.0, higher)
    kept, added = tl.exp2(peak - base), tl.exp2(more_peak - base)
    mass = tl.fma(mass, kept, more_mass * added)
    return higher, mass, tl.fma(found, tl.broadcast_to(kept[:, None], found.shape), more_found * added[:, None])


@triton.jit
def _finish(peak, mass, found, sink, WITH_SINKS: tl.constexpr):
    """Divide by the whole mass, sinks included."""
    if WITH_SINKS:
        mass += tl.exp2(sink.to(tl.float32) * _LOG2E - peak)
    return found / mass[:, None]


# Arguments that vary between batches: the kernel is compiled once for all values, and for arrays at any address.
_ANY = ["window", "max_blocks"]
_ANYWHERE = ["positions", "row_starts", "lengths", "block_tables", "items", "row_partials"]


@triton.jit(do_not_specialize=_ANY, do_not_specialize_on_alignment=_ANYWHERE)
def attend_kernel(
    query, keys, values, row_starts, lengths, block_tables, items, sinks,
    out, partial, peaks, masses,
    scaling, softcap, window, max_blocks,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, PART: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, STRETCH: tl.constexpr, BLOCK_TOKENS: tl.constexpr, ITEM: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr, CAPPED: tl.constexpr, WITH_SINKS: tl.constexpr,
):  # fmt: skip
    """Run one item for PART of the GROUP query heads of a KV head. Grid: items, KV heads · parts of a group."""
    item = items + tl.program_id(0) * ITEM
    rows = tl.load(item + 2)
    if rows == 0:
        return
    s = tl.load(item)
    begin = tl.load(item + 1)
    stretch = tl.load(item + 3)
    last = tl.load(row_starts + s + 1)
    length = tl.load(lengths + s)
    before = length - last  # position of a row minus its index in the batch
    end = before + begin + rows
    lowest = 0  # positions that no row of the tile sees are skipped in whole blocks and stretches, which changes no sum
    if window > 0:
        lowest = tl.maximum(before + begin - window + 1, 0)
    low = lowest // STRETCH
    high = (end + STRETCH - 1) // STRETCH
    if stretch >= 0:
        low = tl.maximum(low, stretch)
        high = tl.minimum(high, stretch + 1)
    if low >= high:
        return

    PARTS: tl.constexpr = (GROUP + PART - 1) // PART
    kv = tl.program_id(1) // PARTS
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    row = begin + m // PART
    within = (tl.program_id(1) % PARTS) * PART + m % PART
    head = kv * GROUP + within
    own = (row < begin + rows) & (within < GROUP)
    position = before + row
    at = row.to(tl.int64) * (KV_HEADS * GROUP) + head
    q = tl.load(query + at[:, None] * D + d[None, :], mask=own[:, None] & (d < D)[None, :], other=0.0)

    peak = tl.full([BLOCK_M], _NEVER, tl.float32)
    mass = tl.zeros([BLOCK_M], tl.float32)
    found = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for each in range(low, high):
        own_peak = tl.full([BLOCK_M], _NEVER, tl.float32)
        own_mass = tl.zeros([BLOCK_M], tl.float32)
        own_found = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        start = tl.maximum(each * STRETCH, lowest // BLOCK_N * BLOCK_N)
        stop = tl.minimum(each * STRETCH + STRETCH, end)
        for n0 in range(start, stop, BLOCK_N):
            n = n0 + tl.arange(0, BLOCK_N)
            block = tl.load(block_tables + s.to(tl.int64) * max_blocks + n // BLOCK_TOKENS, mask=n < stop, other=0)
            slot = block.to(tl.int64) * BLOCK_TOKENS + n % BLOCK_TOKENS
            there = (slot * KV_HEADS + kv)[:, None] * D + d[None, :]
            known = (n < stop)[:, None] & (d < D)[None, :]
            k = tl.load(keys + there, mask=known, other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scaling
            if CAPPED:
                scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
            seen = (n[None, :] <= position[:, None]) & (n < stop)[None, :]
            if window > 0:
                seen = seen & (n[None, :] > position[:, None] - window)
            scores = tl.where(seen, scores * _LOG2E, _NEVER)
            higher = tl.maximum(own_peak, tl.max(scores, 1))
            base = tl.where(higher == _NEVER, 0.0, higher)
            weights = tl.exp2(scores - base[:, None])
            kept = tl.exp2(own_peak - base)
            own_mass = own_mass * kept + tl.sum(weights, 1)
            v = tl.load(values + there, mask=known, other=0.0)
            own_found = own_found * kept[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
            own_peak = higher
        peak, mass, found = _merge(peak, mass, found, own_peak, own_mass, own_found)

    if stretch < 0:
        sink = tl.load(sinks + head, mask=own, other=0.0) if WITH_SINKS else 0.0
        found = _finish(peak, mass, found, sink, WITH_SINKS)
        there = out + at[:, None] * D + d[None, :]
        tl.store(there, found.to(out.dtype.element_ty), mask=own[:, None] & (d < D)[None, :])
    else:
        index = (tl.load(item + 4).to(tl.int64) * (KV_HEADS * PARTS) + tl.program_id(1)) * BLOCK_M + m
        tl.store(partial + index[:, None] * D + d[None, :], found, mask=own[:, None] & (d < D)[None, :])
        tl.store(peaks + index, peak, mask=own)
        tl.store(masses + index, mass, mask=own)


@triton.jit(do_not_specialize=_ANY, do_not_specialize_on_alignment=_ANYWHERE)
def merge_kernel(
    partial, peaks, masses, sinks, positions, row_partials, out, window,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, PART: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, STRETCH: tl.constexpr, ROWS: tl.constexpr, BLOCK_P: tl.constexpr, WITH_SINKS: tl.constexpr,
):  # fmt: skip
    """Merge the stretches of one row, for PART heads. Grid: rows, KV heads · parts of a group."""
    row = tl.program_id(0)
    first = tl.load(row_partials + row)
    if first < 0:
        return
    PARTS: tl.constexpr = (GROUP + PART - 1) // PART
    position = tl.load(positions + row).to(tl.int32)
    low = 0
    if window > 0:
        low = tl.maximum(position - window + 1, 0) // STRETCH
    p = tl.arange(0, BLOCK_P)
    d = tl.arange(0, BLOCK_D)
    within = (tl.program_id(1) % PARTS) * PART + p
    own = (p < PART) & (within < GROUP)
    known = own[:, None] & (d < D)[None, :]
    peak = tl.full([BLOCK_P], _NEVER, tl.float32)
    mass = tl.zeros([BLOCK_P], tl.float32)
    found = tl.zeros([BLOCK_P, BLOCK_D], tl.float32)
    for each in tl.range(low, position // STRETCH + 1, loop_unroll_factor=4):
        index = (first // ROWS + each).to(tl.int64) * (KV_HEADS * PARTS) + tl.program_id(1)
        at = index * BLOCK_M + (first % ROWS) * PART + p
        own_peak = tl.load(peaks + at, mask=own, other=0.0)
        own_mass = tl.load(masses + at, mask=own, other=1.0)
        own_found = tl.load(partial + at[:, None] * D + d[None, :], mask=known, other=0.0)
        peak, mass, found = _merge(peak, mass, found, own_peak, own_mass, own_found)
    head = (tl.program_id(1) // PARTS) * GROUP + within
    sink = tl.load(sinks + head, mask=own, other=0.0) if WITH_SINKS else 0.0
    found = _finish(peak, mass, found, sink, WITH_SINKS)
    at = row.to(tl.int64) * (KV_HEADS * GROUP) + head
    tl.store(out + at[:, None] * D + d[None, :], found.to(out.dtype.element_ty), mask=known)


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    row_starts: Tensor,
    lengths: Tensor,
    block_tables: Tensor,
    items: Tensor,
    row_partials: Tensor,
    *,
    partials: int,
    scaling: float,
    window: int = 0,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of each row over its own sequence. Keys and values of all rows are written before.

    Args:
        query: `[T, heads, D]`, the rows of one sequence after the other.
        keys: `[blocks, block_tokens, kv_heads, D]`, of the dtype of the query.
        values: like `keys`.
        positions: int64 `[T]`, of each row in its sequence.
        row_starts: int32 `[S + 1]`: the first row of each sequence, and T.
        lengths: int32 `[S]`: positions of each sequence, its rows included.
        block_tables: int32 `[S, P]`: the blocks of each sequence.
        items: see `kernels.attention_work.Work`. The result of rows without an item is undefined.
        row_partials: see `kernels.attention_work.Work`.
        partials: the number of partial results; 0 if no tile is split.
        scaling: of the scores.
        window: how many positions a row sees, its own included; 0 is all.
        softcap: c, which bounds the scaled scores s to c · tanh(s / c); None is no bound.
        sinks: `[heads]`: one score per head that takes part in the softmax and has no value; None is no sinks.

    Returns:
        `[T, heads, D]`.
    """
    T, heads, D = query.shape
    _, block_tokens, kv_heads, _ = keys.shape
    shared = sizes(heads, kv_heads, D)
    programs = kv_heads * -(-shared["GROUP"] // shared["PART"])
    query = query.contiguous()
    out = torch.empty_like(query)
    partial, peaks, masses, sink_scores = out, out, out, out if sinks is None else sinks
    if partials:
        results = partials * programs * shared["BLOCK_M"]
        partial = torch.empty((results, D), dtype=torch.float32, device=query.device)
        peaks, masses = torch.empty((2, results), dtype=torch.float32, device=query.device).unbind(0)
    attend_kernel[(len(items), programs)](
        query, keys, values, row_starts, lengths, block_tables, items, sink_scores, out, partial, peaks, masses,
        scaling, softcap or 0.0, window, block_tables.shape[1],
        **shared, **attend_sizes(D, block_tokens, query.dtype),
        CAPPED=softcap is not None, WITH_SINKS=sinks is not None,
        **options(shared),
    )  # fmt: skip
    if partials:
        merge_kernel[(T, programs)](
            partial, peaks, masses, sink_scores, positions, row_partials, out, window,
            **shared, **merge_sizes(shared), WITH_SINKS=sinks is not None, **MERGE_OPTIONS,
        )  # fmt: skip
    return out
