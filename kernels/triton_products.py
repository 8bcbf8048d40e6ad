"""Matrix products of a few rows, with the work between them in the same kernels: norms, gates and residual sums.

A forward pass over a few rows takes as long as its weights take to be read, so each program reads its part of a weight
once, in long pieces, for all rows. The warps of a program divide the inputs K among them, and their sums are added in
order. So the order of every sum depends on the shape of the weight only: a row has the same bits in every batch of up
to `MOST_ROWS` rows.

An RMS norm needs the mean square of its whole row, which no program has. It is split: the kernel that writes the
residual stream also writes the stream times the norm's weight, and the sums of squares of its columns; the product
after it multiplies its result by 1 / √(mean square + eps).
"""

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_ROWS = 16

_WARPS = 4
_COLUMNS = 16  # of a program: the fewest that tensor cores take
_DEPTHS = (512, 256, 128)  # inputs that a program reads at a time
_FEW_PROGRAMS = 132  # the multiprocessors of a large GPU: so many programs run alone, and read further ahead


NOT_ROTATED = {"HEADS": 0, "KV_HEADS": 0, "D": 1, "ROTATED": False}
"""The constants of `product_kernel` for other products than those of queries, keys and values."""


class Stream(NamedTuple):
    """The residual stream of T rows, before a norm.

    Attributes:
        values: `[T, E]`.
        scaled: the values times the norm's weight, `[T, E]`.
        squares: float32 `[T, E / 16]`: the sums of squares of every 16 values.
    """

    values: Tensor
    scaled: Tensor
    squares: Tensor


# -------------------------------------------------------------------------------------------------------------- kernels


@triton.jit
def embed_kernel(
    tokens, embedding, norm, values, scaled, squares,
    E: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Begin the residual stream of one row. Grid: T."""
    row = tl.program_id(0).to(tl.int64)
    ids = tl.arange(0, BLOCK)
    there = ids < E
    exact = tl.load(embedding + tl.load(tokens + row) * E + ids, mask=there, other=0.0)
    x = exact.to(tl.float32)
    w = tl.load(norm + ids, mask=there, other=0.0).to(tl.float32)
    tl.store(values + row * E + ids, exact, mask=there)
    tl.store(scaled + row * E + ids, (x * w).to(scaled.dtype.element_ty), mask=there)
    part = tl.arange(0, BLOCK // COLUMNS)
    sums = tl.sum(tl.reshape(x * x, [BLOCK // COLUMNS, COLUMNS]), 1)
    tl.store(squares + row * (E // COLUMNS) + part, sums, mask=part < E // COLUMNS)


@triton.jit
def _rotate_and_store(
    result, first, t, there, query, keys, values, cos_sin, positions, slot_mapping,
    COLUMNS: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Rotate columns of queries or keys, `[COLUMNS, 8]` from `first` on, and write those of queries, keys or values.

    They belong to one head, in which the elements of a rotated pair are neighbours.
    """
    head = first // D
    column = (first + tl.arange(0, COLUMNS))[:, None]
    if head < HEADS + KV_HEADS:
        position = tl.load(positions + t, mask=there, other=0)[None, :]
        pair = (first % D + 2 * tl.arange(0, COLUMNS // 2))[:, None]
        cos = tl.load(cos_sin + position * D + pair, mask=there[None, :], other=0.0)
        sin = tl.load(cos_sin + position * D + pair + 1, mask=there[None, :], other=0.0)
        pairs = tl.permute(tl.reshape(result, [COLUMNS // 2, 2, 8]), (0, 2, 1))
        real, imaginary = tl.split(pairs)
        turned = tl.join(real * cos - imaginary * sin, real * sin + imaginary * cos)
        result = tl.reshape(tl.permute(turned, (0, 2, 1)), [COLUMNS, 8])
    rounded = result.to(query.dtype.element_ty)
    if head < HEADS:
        tl.store(query + t[None, :] * (HEADS * D) + column, rounded, mask=there[None, :])
    else:
        slot = tl.load(slot_mapping + t, mask=there, other=0)[None, :] * (KV_HEADS * D)
        if head < HEADS + KV_HEADS:
            tl.store(keys + slot + (column - HEADS * D), rounded, mask=there[None, :])
        else:
            tl.store(values + slot + (column - (HEADS + KV_HEADS) * D), rounded, mask=there[None, :])


@triton.jit
def _squares_of(squares, t, there, K, COLUMNS: tl.constexpr, BLOCK_P: tl.constexpr):
    p = tl.arange(0, BLOCK_P)
    P = K // COLUMNS
    return tl.load(squares + t[:, None] * P + p[None, :], mask=there[:, None] & (p < P)[None, :], other=0.0)


@triton.jit
def _finish(
    found, other, own_squares, first, t, there,
    bias, out, stream, norm, squares, keys, values, cos_sin, positions, slot_mapping, eps, N, K,
    COLUMNS: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr,
    NORMED: tl.constexpr, GATED: tl.constexpr, ADDED: tl.constexpr, ROTATED: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    """Do what follows the product of 8 rows, whose sums are `[WARPS, COLUMNS, 8]`."""
    result = tl.sum(found, 0)  # [COLUMNS, 8]
    second = tl.sum(other, 0)
    if NORMED:
        scale = tl.rsqrt(tl.sum(own_squares, 1) / K + eps)[None, :]
        result *= scale
        second *= scale
    column = first + tl.arange(0, COLUMNS)
    if BIASED:
        result += tl.load(bias + column).to(tl.float32)[:, None]
        if GATED:
            second += tl.load(bias + N + column).to(tl.float32)[:, None]
    if GATED:
        gate = result.to(out.dtype.element_ty).to(tl.float32)
        silu = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty)  # torch rounds silu before the product
        result = silu.to(tl.float32) * second.to(out.dtype.element_ty).to(tl.float32)
    at = t[None, :] * N + column[:, None]
    if ADDED:
        result += tl.load(stream + at, mask=there[None, :], other=0.0).to(tl.float32)
        rounded = result.to(stream.dtype.element_ty)
        tl.store(stream + at, rounded, mask=there[None, :])
        exact = rounded.to(tl.float32)
        tl.store(squares + t * (N // COLUMNS) + first // COLUMNS, tl.sum(exact * exact, 0), mask=there)
        result = exact * tl.load(norm + column).to(tl.float32)[:, None]
    if ROTATED:
        _rotate_and_store(
            result, first, t, there, out, keys, values, cos_sin, positions, slot_mapping, COLUMNS, HEADS, KV_HEADS, D
        )  # fmt: skip
    else:
        tl.store(out + at, result.to(out.dtype.element_ty), mask=there[None, :])


# These arrays are parts of a larger buffer: their alignment must not cause another compilation.
@triton.jit(do_not_specialize=["T"], do_not_specialize_on_alignment=["positions", "slot_mapping"])
def product_kernel(
    x, weight, bias, out, stream, norm, squares, keys, values, cos_sin, positions, slot_mapping, eps, T, N, K,
    OVER_8: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, WARPS: tl.constexpr, BLOCK_P: tl.constexpr,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr,
    NORMED: tl.constexpr, GATED: tl.constexpr, ADDED: tl.constexpr, ROTATED: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    """Write COLUMNS columns of x Wᵀ + b, and what follows it. Grid: N / COLUMNS.

    NORMED: x is `Stream.scaled`, and `squares` belongs to it. GATED: the rows of the weight are gates, then ups. ADDED:
    the result is added to `stream`; `out` and `squares` become those of the next norm, whose weight is `norm`. ROTATED:
    the columns are queries, keys and values; `out` gets the queries, rotated. OVER_8: T is more than 8; the second 8
    rows are computed just as the first.
    """
    first = tl.program_id(0) * COLUMNS
    own = weight + first.to(tl.int64) * K
    ups = N.to(tl.int64) * K
    PART: tl.constexpr = DEPTH // WARPS
    part = tl.arange(0, WARPS)[:, None, None] * PART
    k = tl.arange(0, PART)
    t = tl.arange(0, 8)
    there = t < T
    more = t + 8 < T
    weights = own + tl.arange(0, COLUMNS)[None, :, None] * K + (part + k[None, None, :])
    inputs = x + t[None, None, :] * K + (part + k[None, :, None])
    found = tl.zeros([WARPS, COLUMNS, 8], tl.float32)
    other = tl.zeros([WARPS, COLUMNS, 8], tl.float32)
    found_more = tl.zeros([WARPS, COLUMNS, 8], tl.float32)
    other_more = tl.zeros([WARPS, COLUMNS, 8], tl.float32)
    own_squares = tl.zeros([8, 1], tl.float32)
    squares_more = tl.zeros([8, 1], tl.float32)
    if NORMED:  # read before the loop, used after it
        own_squares = _squares_of(squares, t, there, K, COLUMNS, BLOCK_P)
        if OVER_8:
            squares_more = _squares_of(squares, t + 8, more, K, COLUMNS, BLOCK_P)
    for start in range(0, K, DEPTH):
        w = tl.load(weights + start)
        z = tl.load(inputs + start, mask=there[None, None, :], other=0.0)
        found = tl.dot(w, z, found)
        if OVER_8:
            z_more = tl.load(inputs + (8 * K + start), mask=more[None, None, :], other=0.0)
            found_more = tl.dot(w, z_more, found_more)
        if GATED:
            up = tl.load(weights + (ups + start))
            other = tl.dot(up, z, other)
            if OVER_8:
                other_more = tl.dot(up, z_more, other_more)
    _finish(
        found, other, own_squares, first, t, there,
        bias, out, stream, norm, squares, keys, values, cos_sin, positions, slot_mapping, eps, N, K,
        COLUMNS, HEADS, KV_HEADS, D, NORMED, GATED, ADDED, ROTATED, BIASED,
    )  # fmt: skip
    if OVER_8:
        _finish(
            found_more, other_more, squares_more, first, t + 8, more,
            bias, out, stream, norm, squares, keys, values, cos_sin, positions, slot_mapping, eps, N, K,
            COLUMNS, HEADS, KV_HEADS, D, NORMED, GATED, ADDED, ROTATED, BIASED,
        )  # fmt: skip


# --------------------------------------------------------------------------------------------------------------- launch


def why_not(weights: dict[str, Tensor], device: torch.device) -> str:
    """Return why `product_kernel` cannot run with these weights `[N, K]`; empty if it can."""
    if device.type != "cuda":
        return f"it needs a CUDA device; the device is {device.type}"
    for name, weight in weights.items():
        N, K = weight.shape
        if weight.dtype != torch.bfloat16:
            return f"it needs bfloat16; {name} has {weight.dtype}"
        if N % _COLUMNS or K % _DEPTHS[-1]:
            return f"it needs multiples of {_COLUMNS} and {_DEPTHS[-1]}; {name} has the shape {[N, K]}"
    return ""


@cache
def embed_sizes(E: int) -> dict[str, int]:
    """Return the constants of `embed_kernel`; do not modify."""
    return {"E": E, "BLOCK": triton.next_power_of_2(E), "COLUMNS": _COLUMNS}


@cache
def product_sizes(rows: int, K: int, *, normed: bool) -> dict[str, int]:
    """Return the constants of `product_kernel` except its kind, for so many rows and inputs; do not modify."""
    return {
        "OVER_8": rows > 8,
        "COLUMNS": _COLUMNS,
        "DEPTH": next(depth for depth in _DEPTHS if K % depth == 0),
        "WARPS": _WARPS,
        "BLOCK_P": triton.next_power_of_2(K // _COLUMNS) if normed else 1,
    }


@cache
def product_options(N: int, depth: int, *, gated: bool) -> dict[str, int]:
    """Return the compile options of `product_kernel`. The stages, reads in flight, were the fastest on an H200."""
    stages = 3 if gated else 6 if N <= _FEW_PROGRAMS * _COLUMNS else 4
    return {"num_warps": _WARPS, "num_stages": min(8, stages * _DEPTHS[0] // depth)}


def embed(tokens: Tensor, embedding: Tensor, norm: Tensor) -> Stream:
    """Begin the residual stream of some rows.

    Args:
        tokens: int64 `[T]`.
        embedding: `[V, E]`.
        norm: the weight of the first norm, `[E]`.
    """
    T, E = len(tokens), embedding.shape[1]
    stream = Stream(
        embedding.new_empty(T, E),
        embedding.new_empty(T, E),
        torch.empty(T, E // _COLUMNS, dtype=torch.float32, device=embedding.device),
    )
    embed_kernel[(T,)](tokens, embedding, norm, *stream, **embed_sizes(E), num_warps=8)
    return stream


def normed_product(
    stream: Stream, weight: Tensor, bias: Tensor | None, eps: float, *, gated: bool = False, out: Tensor | None = None
) -> Tensor:
    """Return norm(stream) Wᵀ + b, rounded once: `[T, N]`; with `gated` silu(gate) · up of it, `[T, N / 2]`.

    Args:
        stream: of T rows, `MOST_ROWS` at most.
        weight: `[N, E]`; with `gated` the gates first, then the ups.
        bias: `[N]`.
        gated: rounds after gate, up, silu and product, as torch does.
        out: where to write the result, contiguous.
    """
    N = len(weight) // 2 if gated else len(weight)
    if out is None:
        out = stream.scaled.new_empty(len(stream.scaled), N)
    _product(stream.scaled, weight, bias, out, stream, weight, eps, N, NORMED=True, GATED=gated, ADDED=False)
    return out


def rotated_product(
    stream: Stream,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    cos_sin: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
) -> Tensor:
    """Return the rotated queries of norm(stream) Wᵀ + b, `[T, H, D]`, and write the rotated keys and the values.

    Args:
        stream: of T rows, `MOST_ROWS` at most.
        weight: of queries, keys and values, `[(H + 2 · KV) · D, E]`; D is a multiple of 16.
        bias: `[(H + 2 · KV) · D]`.
        cos_sin: see `triton_layers.rotate_and_store`; so are the others.
    """
    _, _, kv_heads, D = key_cache.shape
    T, heads = len(stream.scaled), len(weight) // D - 2 * kv_heads
    query = torch.empty(T, heads, D, dtype=key_cache.dtype, device=weight.device)
    _product(
        stream.scaled, weight, bias, query, stream, weight, eps, len(weight),
        rotation=(key_cache, value_cache, cos_sin, positions, slot_mapping), HEADS=heads, KV_HEADS=kv_heads, D=D,
        NORMED=True, GATED=False, ADDED=False, ROTATED=True,
    )  # fmt: skip
    return query


def can_rotate(head_dim: int) -> bool:
    """Return whether `rotated_product` supports heads of this size."""
    return head_dim % _COLUMNS == 0


def add_product(stream: Stream, x: Tensor, weight: Tensor, bias: Tensor | None, norm: Tensor) -> Stream:
    """Return the stream plus x Wᵀ + b, before the norm with weight `norm`; `stream` is overwritten.

    Args:
        stream: of T rows, `MOST_ROWS` at most.
        x: `[T, K]`, contiguous.
        weight: `[E, K]`.
        bias: `[E]`.
        norm: `[E]`.
    """
    _product(x, weight, bias, stream.scaled, stream, norm, 0.0, len(weight), NORMED=False, GATED=False, ADDED=True)
    return stream


def _product(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, stream: Stream, norm: Tensor, eps: float, N: int,
    rotation: tuple[Tensor, ...] = (), **kind: int,
) -> None:  # fmt: skip
    T, K = x.shape
    sizes: dict[str, Any] = product_sizes(T, K, normed=bool(kind["NORMED"]))
    product_kernel[(N // _COLUMNS,)](
        x, weight, weight if bias is None else bias, out, stream.values, norm, stream.squares,
        *(rotation or (x,) * 5), eps, T, N, K,
        **sizes, **NOT_ROTATED | kind, BIASED=bias is not None,
        **product_options(N, sizes["DEPTH"], gated=bool(kind["GATED"])),
    )  # fmt: skip
