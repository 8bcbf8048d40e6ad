"""Attention over packed sequences, plugged into transformers' public attention interface.

It knows the layout of a pass (`outrider.lm.batch`), and nothing of what model calls it. `attend` and what it calls keep
to what TorchScript can compile: see `outrider.lm.gated_layers`.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from outrider.lm.batch import PackedBatch
from outrider.lm.scores import attend_scores

NAME = "outrider_packed"
"""What our attention is called in a model's configuration (`attn_implementation`)."""

PROBE = "outrider_probe"
"""Its name while a model is looked over, when the masks it asks for are taken down too."""


class NoPass(ValueError):
    """A model with our attention was called without a pass."""


def attend(
    query: Tensor,
    counts: list[int],
    keys: list[list[Tensor]],
    values: list[list[Tensor]],
    masks: list[Tensor],
    layer: int,
    scaling: float,
    window: int,
) -> Tensor:
    """Lets each row see its own sequence up to itself. Keys and values of all rows have been written before.

    Args:
        query: `[T, heads, head_dim]`, in the dtype of the pool.
        counts: rows of each chunk.
        keys: of each chunk and layer, `[kv_heads, 1, end, head_dim]`.
        values: like `keys`.
        masks: of each chunk, see `CausalMasks.for_rows`.
        layer: which.
        scaling: of the scores.
        window: how many positions a row sees, its own included; 0 is all.

    Returns:
        `[T, heads, head_dim]`, perhaps strided.
    """
    if len(counts) == 1:
        return _attend(query, keys[0][layer], values[0][layer], masks[0], scaling, window)
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    first = 0
    for i, count in enumerate(counts):
        rows = query.narrow(0, first, count)
        attended = _attend(rows, keys[i][layer], values[i][layer], masks[i], scaling, window)
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
    # [n, KV, g, D] -> [KV, 1, n · g, D]: as for one row. With one KV head that is the query as it lies.
    grouped = query.reshape(n, kv_heads, group, head_dim)
    packed = grouped.transpose(0, 1).reshape(kv_heads, 1, n * group, head_dim)
    out = F.scaled_dot_product_attention(packed, keys, values, attn_mask=mask, scale=scaling)
    return out.view(kv_heads, n, group, head_dim).transpose(0, 1).reshape(n, heads, head_dim)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    packed_batch: PackedBatch | None = None,
    **features: Any,
) -> tuple[Tensor, None]:
    """What transformers calls once per layer: writes the new keys and values, then attends.

    Args:
        module: the attention layer; its `layer_idx` says which keys and values are meant.
        query: `[1, heads, T, head_dim]`.
        key: `[1, kv_heads, T, head_dim]`.
        value: like `key`; its heads may be smaller.
        attention_mask: not used: `packed_batch` says who sees whom.
        scaling: of the scores; None is 1/√head_dim.
        sliding_window: how many positions a row sees, its own included.
        softcap: bounds the scores (`outrider.lm.scores`).
        s_aux: `[heads]`: sinks, likewise.
        packed_batch: the pass.
        features: whatever else the model asks for; looked at once, when it is loaded.

    Returns:
        `[1, T, heads, head_dim of the values]`, and no weights.

    Raises:
        NoPass: the call came from elsewhere, without a pass.
    """
    if packed_batch is None:
        raise NoPass("this model runs on packed passes only (outrider.lm.packed), not through its own forward")
    batch = packed_batch
    if scaling is None:
        scaling = float(query.shape[-1]) ** -0.5
    if batch.observer is not None:
        asked = {"softcap": softcap, "s_aux": s_aux, **features}
        return batch.observer.see(module, query, key, value, scaling, sliding_window, asked), None
    layer: Any = module.layer_idx
    size = value.shape[3]
    if size < key.shape[3]:  # the pool keeps both in one size; what is added to the values adds nothing to the result
        value = F.pad(value, (0, key.shape[3] - size))
    first = 0
    for new, count in zip(batch.new, batch.counts, strict=True):
        new[layer][0].copy_(key[0].narrow(1, first, count))
        new[layer][1].copy_(value[0].narrow(1, first, count))
        first += count
    window = sliding_window or 0
    rows = query[0].transpose(0, 1).to(batch.dtype)
    if softcap is not None or s_aux is not None:
        keys, values = [held[layer] for held in batch.keys], [held[layer] for held in batch.values]
        out = attend_scores(
            rows,
            batch.starts,
            batch.counts,
            keys,
            values,
            scaling=scaling,
            window=window,
            softcap=softcap,
            sinks=s_aux,
        )
    else:
        masks = batch.masks_for(query.shape[1] // key.shape[1], window)
        out = attend(rows, batch.counts, batch.keys, batch.values, masks, layer, scaling, window)
    return out.narrow(2, 0, size).to(query.dtype).unsqueeze(0), None


# No mask function goes with NAME: transformers then builds no mask, which saves a dozen tensor operations a pass.
# PROBE is the same attention with one, which only takes down what the model would have masked.
AttentionInterface.register(NAME, packed_attention)
AttentionInterface.register(PROBE, packed_attention)
