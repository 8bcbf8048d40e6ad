"""The operations between the matrix products of a decoder layer, one kernel each: norm, rotation with KV writes, gate.

Each kernel reads its input once and writes its output once. They compute in float32 and round where torch's operations
round, so results differ by one step of the last bit at most, and rarely. Launches depend on shapes only and have no
host sync, so a CUDA graph can hold them.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 1024
_PER_THREAD = 8  # 16-bit values in a 128-bit load

# -------------------------------------------------------------------------------------------------------------- kernels


@triton.jit
def rms_norm_kernel(x, weight, out, eps, E: tl.constexpr, BLOCK: tl.constexpr):
    """Norm one row. Grid: T."""
    start = tl.program_id(0).to(tl.int64) * E
    ids = tl.arange(0, BLOCK)
    there = ids < E
    z = tl.load(x + start + ids, mask=there, other=0.0).to(tl.float32)
    w = tl.load(weight + ids, mask=there, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(z * z, 0) / E + eps)
    tl.store(out + start + ids, (z * scale * w).to(out.dtype.element_ty), mask=there)


# These arrays are parts of a larger buffer: their alignment must not cause another compilation.
@triton.jit(do_not_specialize_on_alignment=["positions", "slot_mapping"])
def rotate_and_store_kernel(
    qkv, cos_sin, positions, slot_mapping, head_norm, query, keys, values, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    """Norm and rotate GROUP heads of one row; write queries, keys and values. Grid: T · ⌈all heads / GROUP⌉."""
    ROTATED: tl.constexpr = HEADS + KV_HEADS
    ALL: tl.constexpr = ROTATED + KV_HEADS
    GROUPS: tl.constexpr = (ALL + GROUP - 1) // GROUP
    row = (tl.program_id(0) // GROUPS).to(tl.int64)
    head = (tl.program_id(0) % GROUPS) * GROUP + tl.arange(0, GROUP)[:, None]
    ids = tl.arange(0, BLOCK)
    there = (head < ALL) & (ids < D)[None, :]
    within = head * D + ids[None, :]
    x = tl.load(qkv + row * (ALL * D) + within, mask=there, other=0.0).to(tl.float32)

    turns = head < ROTATED
    if NORMED:
        w = tl.load(head_norm + within, mask=there & turns, other=0.0)
        scale = tl.rsqrt(tl.sum(x * x, 1) / D + eps)
        x = tl.where(turns, x * scale[:, None] * w, x)
    # Each head reads it again, so that it is in the registers of the threads that need it.
    angle = tl.load(cos_sin + tl.load(positions + row) * D + ids[None, :], mask=there & turns, other=0.0)
    cos, sin = tl.split(tl.reshape(angle, [GROUP, BLOCK // 2, 2]))
    real, imaginary = tl.split(tl.reshape(x, [GROUP, BLOCK // 2, 2]))
    turned = tl.join(real * cos - imaginary * sin, real * sin + imaginary * cos)
    x = tl.where(turns, tl.reshape(turned, [GROUP, BLOCK]), x).to(query.dtype.element_ty)

    tl.store(query + row * (HEADS * D) + within, x, mask=there & (head < HEADS))
    slot = tl.load(slot_mapping + row) * (KV_HEADS * D)
    tl.store(keys + slot + (within - HEADS * D), x, mask=there & (head >= HEADS) & turns)
    tl.store(values + slot + (within - ROTATED * D), x, mask=there & (head >= ROTATED))


@triton.jit
def gated_kernel(gate_up, out, INNER: tl.constexpr, TILE: tl.constexpr):
    """Gate one tile of a row. Grid: T · ⌈INNER / TILE⌉."""
    TILES: tl.constexpr = (INNER + TILE - 1) // TILE
    row = (tl.program_id(0) // TILES).to(tl.int64)
    ids = (tl.program_id(0) % TILES) * TILE + tl.arange(0, TILE)
    there = ids < INNER
    start = gate_up + row * (2 * INNER)
    gate = tl.load(start + ids, mask=there, other=0.0).to(tl.float32)
    up = tl.load(start + INNER + ids, mask=there, other=0.0).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty)  # torch rounds silu before the product
    tl.store(out + row * INNER + ids, (silu.to(tl.float32) * up).to(out.dtype.element_ty), mask=there)


# --------------------------------------------------------------------------------------------------------------- launch


@cache
def norm_sizes(E: int) -> dict[str, int]:
    """Return the constants of `rms_norm_kernel`; do not modify. One program holds a whole row."""
    return {"E": E, "BLOCK": triton.next_power_of_2(E)}


@cache
def rotation_sizes(heads: int, kv_heads: int, head_dim: int) -> dict[str, int]:
    """Return the constants of `rotate_and_store_kernel` except NORMED. One program has as many heads as fill a tile."""
    block = triton.next_power_of_2(head_dim)
    group = max(1, min(_TILE // block, triton.next_power_of_2(heads + 2 * kv_heads)))
    return {"HEADS": heads, "KV_HEADS": kv_heads, "D": head_dim, "GROUP": group, "BLOCK": block}


@cache
def gate_sizes(inner: int) -> dict[str, int]:
    """Return the constants of `gated_kernel`."""
    return {"INNER": inner, "TILE": min(_TILE, triton.next_power_of_2(inner))}


def options(numbers: int) -> dict[str, int]:
    """Return the compile options of programs with so many numbers each.

    Eight values per thread are one 128-bit load of 16-bit values; 16 warps at most.
    """
    return {"num_warps": max(1, min(16, numbers // (32 * _PER_THREAD)))}


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / √(mean(x²) + eps) · weight over the last dimension.

    Args:
        x: `[..., E]`.
        weight: `[E]`.
        eps: added to the mean square.

    Returns:
        The shape and dtype of x, rounded once.
    """
    x = x.contiguous()
    out = torch.empty_like(x)
    E = x.size(-1)
    sizes = norm_sizes(E)
    rms_norm_kernel[(x.numel() // E,)](x, weight, out, eps, **sizes, **options(sizes["BLOCK"]))
    return out


def rotate_and_store(
    qkv: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    head_norm: Tensor | None,
    *,
    heads: int,
    kv_heads: int,
    eps: float,
) -> Tensor:
    """Rotate queries and keys, after their head norms if there are any; write keys and values.

    Args:
        qkv: queries, keys and values of each row, `[T, ..., (H + 2 · KV) · D]`; the elements of a rotated pair are
            neighbours.
        cos_sin: cosine and sine of each pair's angle at each position: float32 `[P, ..., D/2, 2]`, contiguous.
        positions: int64 `[T]`, below P.
        slot_mapping: int64 `[T]`: where each row's keys and values are written: block · block_tokens + offset. If rows
            share a slot, its content is undefined.
        key_cache: `[blocks, block_tokens, KV, D]`, contiguous.
        value_cache: like `key_cache`, in the same dtype.
        head_norm: float32 `[H + KV, ..., D]`, contiguous: the norm weights of each query and key head, or None.
        heads: H.
        kv_heads: KV.
        eps: of the head norms.

    Returns:
        The rotated queries, `[T, H, D]` in the dtype of the cache, rounded once.
    """
    assert all(each.is_contiguous() for each in (key_cache, value_cache, cos_sin))
    T, head_dim = len(positions), key_cache.size(-1)
    sizes = rotation_sizes(heads, kv_heads, head_dim)
    groups = -(-(heads + 2 * kv_heads) // sizes["GROUP"])
    query = torch.empty(T, heads, head_dim, dtype=key_cache.dtype, device=qkv.device)
    rotate_and_store_kernel[(T * groups,)](
        qkv.contiguous(), cos_sin, positions, slot_mapping,
        cos_sin if head_norm is None else head_norm, query, key_cache, value_cache, eps,
        **sizes, NORMED=head_norm is not None, **options(sizes["GROUP"] * sizes["BLOCK"]),
    )  # fmt: skip
    return query


def gated(gate_up: Tensor) -> Tensor:
    """Return silu(gate) · up, rounded after each of the two, as torch does: `[..., 2 · I]` to `[..., I]`."""
    gate_up = gate_up.contiguous()
    inner = gate_up.size(-1) // 2
    out = gate_up.new_empty((*gate_up.shape[:-1], inner))
    sizes = gate_sizes(inner)
    tiles = -(-inner // sizes["TILE"])
    programs = gate_up.numel() // (2 * inner) * tiles
    gated_kernel[(programs,)](gate_up, out, **sizes, **options(sizes["TILE"]))
    return out
