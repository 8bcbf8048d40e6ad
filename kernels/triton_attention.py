"""Attention over pages of keys and values: rows of many sequences at once, each to its own pages up to itself.

A program takes a few rows of one sequence, all query heads of one key head, and a stretch of `SPLIT` positions. Where
there are several stretches a second launch puts them together. Their borders are those of positions: sums are in an
order that neither company nor the place of blocks changes. Only the size of the tile (single rows, or more) and of the
pass (`FEW_ROWS`) may round otherwise.

Nothing waits for the host, and no shape depends on what tensors hold: a CUDA graph may hold it. It knows no models.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

SPLIT = 512
"""Positions of a stretch."""

FEW_ROWS = 128
"""Rows of a pass up to which positions are split: more of them keep a device busy without, and would take much room."""


def options(block_m: int) -> dict[str, int]:
    """Return how `attend_kernel` is compiled for so many query rows."""
    return {"num_warps": 4 if block_m == 16 else 8, "num_stages": 2}


COMBINE_OPTIONS = {"num_warps": 4}
"""How `combine_kernel` is compiled."""

_LOG2E = tl.constexpr(1.4426950408889634)


# Numbers that differ from pass to pass: a kernel is compiled once for all of them.
_ANY = ["window", "row_blocks", "pages", "splits", "sequences"]
# And what lies behind others of the pass, 4 bytes a sequence.
_ANYWHERE = ["row_starts", "lengths", "tables"]


@triton.jit(do_not_specialize=_ANY, do_not_specialize_on_alignment=_ANYWHERE)
def attend_kernel(
    query, keys, values, row_starts, lengths, tables, sinks,
    out, partial, peaks, masses,
    scaling, softcap, window, row_blocks, pages, splits,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STRETCH: tl.constexpr, SPLIT_UP: tl.constexpr, CAPPED: tl.constexpr, WITH_SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend with some rows of a sequence to a stretch of it. Grid: sequences · row_blocks, KV heads, splits."""
    s = tl.program_id(0) // row_blocks
    kv = tl.program_id(1)
    split = tl.program_id(2)
    ROWS: tl.constexpr = BLOCK_M // GROUP
    first = tl.load(row_starts + s)
    last = tl.load(row_starts + s + 1)
    begin = first + (tl.program_id(0) % row_blocks) * ROWS
    if begin >= last:
        return
    length = tl.load(lengths + s)
    m = tl.arange(0, BLOCK_M)
    row = begin + m // GROUP
    head = kv * GROUP + m % GROUP
    own = (m < ROWS * GROUP) & (row < last)
    position = length - last + row  # of each row in its sequence
    d = tl.arange(0, BLOCK_D)
    at = row.to(tl.int64) * (KV_HEADS * GROUP) + head
    q = tl.load(query + at[:, None] * D + d[None, :], mask=own[:, None] & (d < D)[None, :], other=0.0)

    peak = tl.full([BLOCK_M], -float("inf"), tl.float32)
    mass = tl.zeros([BLOCK_M], tl.float32)
    found = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    start = split * STRETCH
    stop = tl.minimum(start + STRETCH, tl.minimum(length, length - last + begin + ROWS))
    if window > 0:  # what no row sees is left out by whole blocks, which changes no sum
        start = tl.maximum(start, tl.maximum(length - last + begin - window + 1, 0) // BLOCK_N * BLOCK_N)
    for n0 in range(start, stop, BLOCK_N):
        n = n0 + tl.arange(0, BLOCK_N)
        page = tl.load(tables + s.to(tl.int64) * pages + n // PAGE, mask=n < stop, other=0)
        place = page.to(tl.int64) * PAGE + n % PAGE
        there = (place * KV_HEADS + kv)[:, None] * D + d[None, :]
        known = (n < stop)[:, None] & (d < D)[None, :]
        k = tl.load(keys + there, mask=known, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scaling
        if CAPPED:
            scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
        seen = (n[None, :] <= position[:, None]) & (n < stop)[None, :]
        if window > 0:
            seen = seen & (n[None, :] > position[:, None] - window)
        scores = tl.where(seen, scores * _LOG2E, -float("inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        base = tl.where(higher == -float("inf"), 0.0, higher)
        weights = tl.exp2(scores - base[:, None])
        kept = tl.exp2(peak - base)
        mass = mass * kept + tl.sum(weights, 1)
        v = tl.load(values + there, mask=known, other=0.0)
        found = found * kept[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        peak = higher

    if not SPLIT_UP:
        if WITH_SINKS:
            mass += tl.exp2(tl.load(sinks + head).to(tl.float32) * _LOG2E - peak)
        found = found / mass[:, None]
        tl.store(
            out + at[:, None] * D + d[None, :], found.to(out.dtype.element_ty), mask=own[:, None] & (d < D)[None, :]
        )
    else:
        at = at * splits + split
        tl.store(partial + at[:, None] * D + d[None, :], found, mask=own[:, None] & (d < D)[None, :])
        tl.store(peaks + at, peak, mask=own)
        tl.store(masses + at, mass, mask=own)


@triton.jit(do_not_specialize=_ANY, do_not_specialize_on_alignment=_ANYWHERE)
def combine_kernel(
    partial, peaks, masses, sinks, row_starts, out, sequences, splits,
    HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr, WITH_SINKS: tl.constexpr,
):  # fmt: skip
    """Put the stretches of one row and head together. Grid: rows · heads."""
    at = tl.program_id(0).to(tl.int64)
    if tl.program_id(0) // HEADS >= tl.load(row_starts + sequences):  # a row of no sequence
        return
    i = tl.arange(0, BLOCK_S)
    d = tl.arange(0, BLOCK_D)
    peak = tl.load(peaks + at * splits + i, mask=i < splits, other=-float("inf"))
    highest = tl.max(peak, 0)
    shares = tl.exp2(peak - highest)
    mass = tl.sum(shares * tl.load(masses + at * splits + i, mask=i < splits, other=0.0), 0)
    if WITH_SINKS:
        mass += tl.exp2(tl.load(sinks + tl.program_id(0) % HEADS).to(tl.float32) * _LOG2E - highest)
    there = (at * splits + i)[:, None] * D + d[None, :]
    parts = tl.load(partial + there, mask=(i < splits)[:, None] & (d < D)[None, :], other=0.0)
    found = tl.sum(parts * shares[:, None], 0) / mass
    tl.store(out + at * D + d, found.to(out.dtype.element_ty), mask=d < D)


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    row_starts: Tensor,
    lengths: Tensor,
    tables: Tensor,
    *,
    widest: int,
    longest: int,
    scaling: float,
    window: int = 0,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Let each row see its own sequence up to itself, whose keys and values have been written before.

    Args:
        query: `[T, heads, D]`, heads and their numbers side by side; the rows of sequences, one after the other.
        keys: `[blocks, block_tokens, kv_heads, D]`, of the dtype of the query.
        values: like `keys`.
        row_starts: int32 `[S + 1]`: the first row of each sequence, and where the last one's end; rows behind that are
            nobody's, and what is returned of them is not set.
        lengths: int32 `[S]`: positions of each, its rows included.
        tables: int32 `[S, P]`: the blocks of each.
        widest: rows of a sequence at most.
        longest: positions of a sequence at most.
        scaling: of the scores.
        window: how many positions a row sees, its own included; 0 is all.
        softcap: c, which bounds the scaled scores s to c · tanh(s / c); None bounds nothing.
        sinks: `[heads]`: a score of each head that takes its share, and has no value; None is none.

    Returns:
        `[T, heads, D]`.
    """
    T, heads, D = query.shape
    _, page, kv_heads, _ = keys.shape
    group = heads // kv_heads
    # Two sizes, so that few variants are compiled: single rows of few heads, and all else.
    block_m = 16 if widest * group <= 16 else max(64, triton.next_power_of_2(group))
    row_blocks = -(-widest // (block_m // group))
    splits = -(-longest // SPLIT) if T <= FEW_ROWS else 1
    query = query.contiguous()
    out = torch.empty_like(query)
    partial, peaks, masses = out, out, out
    if splits > 1:
        partial = torch.empty((T, heads, splits, D), dtype=torch.float32, device=query.device)
        peaks, masses = torch.empty((2, T, heads, splits), dtype=torch.float32, device=query.device).unbind(0)
    sequences, told = len(lengths), out if sinks is None else sinks
    block_d = max(16, triton.next_power_of_2(D))
    attend_kernel[(sequences * row_blocks, kv_heads, splits)](
        query, keys, values, row_starts, lengths, tables, told, out, partial, peaks, masses,
        scaling, softcap or 0.0, window, row_blocks, tables.shape[1], splits,
        KV_HEADS=kv_heads, GROUP=group, D=D, BLOCK_D=block_d, PAGE=page, BLOCK_M=block_m,
        BLOCK_N=64 if D <= 128 else 32, STRETCH=SPLIT if splits > 1 else 1 << 30, SPLIT_UP=splits > 1,
        CAPPED=softcap is not None, WITH_SINKS=sinks is not None,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32", **options(block_m),
    )  # fmt: skip
    if splits > 1:
        combine_kernel[(T * heads,)](
            partial, peaks, masses, told, row_starts, out, sequences, splits,
            HEADS=heads, D=D, BLOCK_D=block_d, BLOCK_S=triton.next_power_of_2(splits),
            WITH_SINKS=sinks is not None, **COMBINE_OPTIONS,
        )  # fmt: skip
    return out
