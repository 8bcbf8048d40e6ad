"""torch's own attention over packed sequences, each with its keys and values in one piece.

It knows tensors, and nothing of models or passes. It keeps to what TorchScript can compile: see
`outrider.runtime.fused_layers`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def attend(
    query: Tensor,
    counts: list[int],
    keys: list[Tensor],
    values: list[Tensor],
    masks: list[Tensor],
    scaling: float,
    window: int,
) -> Tensor:
    """Lets each row see its own sequence up to itself. Keys and values of all rows have been written before.

    Args:
        query: `[T, heads, head_dim]`, in the dtype of the pool.
        counts: rows of each chunk.
        keys: of each chunk, `[kv_heads, 1, end, head_dim]`.
        values: like `keys`.
        masks: of each chunk, see `CausalMasks.for_rows`.
        scaling: of the scores.
        window: how many positions a row sees, its own included; 0 is all.

    Returns:
        `[T, heads, head_dim]`, perhaps strided.
    """
    if len(counts) == 1:
        return _attend(query, keys[0], values[0], masks[0], scaling, window)
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    first = 0
    for i, count in enumerate(counts):
        rows = query.narrow(0, first, count)
        attended = _attend(rows, keys[i], values[i], masks[i], scaling, window)
        out.narrow(0, first, count).copy_(attended)
        first += count
    return out


def _attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scaling: float, window: int) -> Tensor:
    # query: [n, H, D]; keys, values: [KV, 1, end, D] -> [n, H, D]
    n, heads, head_dim = query.shape
    kv_heads, end = keys.size(0), keys.size(2)
    group = heads // kv_heads
    if n == 1:
        if 0 < window < end:
            keys, values = keys.narrow(2, end - window, window), values.narrow(2, end - window, window)
        # Query heads that share a KV head become rows of one head: no copy of keys, and one row needs no mask.
        packed = query.reshape(kv_heads, 1, group, head_dim)
        return F.scaled_dot_product_attention(packed, keys, values, scale=scaling).view(1, heads, head_dim)
    if mask.size(0) == 0:
        rows, keys, values = query.transpose(0, 1).unsqueeze(0), keys.transpose(0, 1), values.transpose(0, 1)
        out = F.scaled_dot_product_attention(rows, keys, values, is_causal=True, scale=scaling, enable_gqa=group > 1)
        return out.squeeze(0).transpose(0, 1)
    most = mask.size(0) // group
    if n <= most:
        return _attend_block(query, keys, values, mask, scaling, window)
    blocks: list[Tensor] = []
    for first in range(0, n, most):
        count = min(most, n - first)
        seen = end - n + first + count
        block = query.narrow(0, first, count)
        blocks.append(_attend_block(block, keys.narrow(2, 0, seen), values.narrow(2, 0, seen), mask, scaling, window))
    return torch.cat(blocks)


def _attend_block(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scaling: float, window: int) -> Tensor:
    """The last n positions, no more than the mask has: query `[n, H, D]`, keys and values `[KV, 1, end, D]`."""
    n, heads, head_dim = query.shape
    kv_heads, end = keys.size(0), keys.size(2)
    group = heads // kv_heads
    if window > 0 and window + n - 1 < end:
        seen = window + n - 1
        keys, values = keys.narrow(2, end - seen, seen), values.narrow(2, end - seen, seen)
        end = seen
    # The last n rows of the mask, each of which is there g times.
    mask = mask.narrow(0, mask.size(0) - n * group, n * group).narrow(1, mask.size(1) - end, end)
    if mask.is_cuda:  # the fused kernels want a mask that begins at 16 bytes, and look at its strides alone
        mask = mask.contiguous()
    # [n, KV, g, D] -> [KV, 1, n · g, D]: as for one row. With one KV head that is the query as it lies.
    grouped = query.reshape(n, kv_heads, group, head_dim)
    packed = grouped.transpose(0, 1).reshape(kv_heads, 1, n * group, head_dim)
    out = F.scaled_dot_product_attention(packed, keys, values, attn_mask=mask, scale=scaling)
    return out.view(kv_heads, n, group, head_dim).transpose(0, 1).reshape(n, heads, head_dim)
