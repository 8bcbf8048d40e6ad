"""Attention over packed sequences, plugged into transformers' public attention interface.

It knows the layout of a pass (`outrider.lm.batch`), and nothing of what model calls it.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from outrider.lm.batch import PackedBatch, Segment

NAME = "outrider_packed"
"""What our attention is called in a model's configuration (`attn_implementation`)."""

PROBE = "outrider_probe"
"""Its name while a model is looked over, when the masks it asks for are taken down too."""

_BLOCK = 256  # rows of scores that share one mask: bounds it, and skips what the first of them cannot see

_attention = torch.nn.functional.scaled_dot_product_attention


class NoPass(ValueError):
    """A model with our attention was called without a pass."""


def attend(query: Tensor, layer: int, batch: PackedBatch, scaling: float, window: int | None) -> Tensor:
    """Lets each row see its own sequence up to itself.

    Args:
        query: `[T, heads, head_dim]`, in the dtype of the pool.
        layer: whose keys and values, already written.
        batch: the pass.
        scaling: of the scores.
        window: how many positions a row sees, its own included; None is all.

    Returns:
        `[T, heads, head_dim]`, in the dtype of the pool.
    """
    segments = batch.segments
    if len(segments) == 1:
        return _attend(query, segments[0], layer, batch, scaling, window)
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    for segment in segments:
        rows = query.narrow(0, segment.first, segment.count)
        out.narrow(0, segment.first, segment.count).copy_(_attend(rows, segment, layer, batch, scaling, window))
    return out


def _attend(
    query: Tensor, segment: Segment, layer: int, batch: PackedBatch, scaling: float, window: int | None
) -> Tensor:
    # query: [n, H, D] -> [n, H, D], perhaps strided
    keys, values = segment.keys[layer], segment.values[layer]  # [KV, 1, end, D]
    n, heads, head_dim = query.shape
    kv_heads = keys.shape[0]
    group = heads // kv_heads
    if window is not None and segment.end <= window:
        window = None
    if n == 1:
        if window is not None:
            keys, values = _last(keys, window), _last(values, window)
        # Query heads that share a KV head become rows of one head: no copy of keys, and one row needs no mask.
        packed = query.reshape(kv_heads, 1, group, head_dim)
        return _attention(packed, keys, values, scale=scaling).view(1, heads, head_dim)
    if segment.start == 0 and window is None:
        rows, keys, values = query.transpose(0, 1).unsqueeze(0), keys.transpose(0, 1), values.transpose(0, 1)
        out = _attention(rows, keys, values, is_causal=True, scale=scaling, enable_gqa=group > 1)
        return out.squeeze(0).transpose(0, 1)
    if n * group <= _BLOCK:
        return _attend_block(query, keys, values, batch, scaling, window)
    attended, end = [], segment.start
    for block in query.split(max(1, _BLOCK // group)):
        end += block.shape[0]
        attended.append(_attend_block(block, keys.narrow(2, 0, end), values.narrow(2, 0, end), batch, scaling, window))
    return torch.cat(attended)


def _attend_block(
    query: Tensor, keys: Tensor, values: Tensor, batch: PackedBatch, scaling: float, window: int | None
) -> Tensor:
    """The last n positions: query `[n, H, D]`, keys and values `[KV, 1, end, D]`."""
    n, heads, head_dim = query.shape
    kv_heads = keys.shape[0]
    group = heads // kv_heads
    if window is not None:
        seen = min(keys.shape[2], window + n - 1)
        keys, values = _last(keys, seen), _last(values, seen)
    mask = batch.masks.get(n, keys.shape[2], group, window)
    # [n, KV, g, D] -> [KV, 1, g·n, D]: as for one row; the mask is repeated g times.
    packed = query.reshape(n, kv_heads, group, head_dim).permute(1, 2, 0, 3).reshape(kv_heads, 1, group * n, head_dim)
    out = _attention(packed, keys, values, attn_mask=mask, scale=scaling)
    return out.reshape(heads, n, head_dim).transpose(0, 1)


def _last(tensor: Tensor, length: int) -> Tensor:
    return tensor.narrow(2, tensor.shape[2] - length, length) if tensor.shape[2] > length else tensor


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    packed_batch: PackedBatch | None = None,
    **features: Any,
) -> tuple[Tensor, None]:
    """What transformers calls once per layer: writes the new keys and values, then attends.

    Args:
        module: the attention layer; its `layer_idx` says which keys and values are meant.
        query: `[1, heads, T, head_dim]`.
        key: `[1, kv_heads, T, head_dim]`.
        value: like `key`.
        attention_mask: not used: `packed_batch` says who sees whom.
        scaling: of the scores; None is 1/√head_dim.
        sliding_window: how many positions a row sees, its own included.
        packed_batch: the pass.
        features: whatever else the model asks for; looked at once, when it is loaded.

    Returns:
        `[1, T, heads, head_dim]`, and no weights.

    Raises:
        NoPass: the call came from elsewhere, without a pass.
    """
    if packed_batch is None:
        raise NoPass("this model runs on packed passes only (outrider.lm.packed), not through its own forward")
    batch = packed_batch
    if scaling is None:
        scaling = float(query.shape[-1]) ** -0.5
    if batch.observer is not None:
        return batch.observer.see(module, query, key, value, scaling, sliding_window, features), None
    layer: Any = module.layer_idx
    for segment in batch.segments:
        new_key, new_value = segment.new[layer].unbind(0)
        if len(batch.segments) == 1:
            new_key.copy_(key[0])
            new_value.copy_(value[0])
        else:
            new_key.copy_(key[0].narrow(1, segment.first, segment.count))
            new_value.copy_(value[0].narrow(1, segment.first, segment.count))
    rows = query[0].transpose(0, 1).to(batch.dtype)
    out = attend(rows, layer, batch, scaling, sliding_window)
    return out.to(query.dtype).unsqueeze(0), None


# No mask function goes with NAME: transformers then builds no mask, which saves a dozen tensor operations a pass.
# PROBE is the same attention with one, which only takes down what the model would have masked.
AttentionInterface.register(NAME, packed_attention)
AttentionInterface.register(PROBE, packed_attention)
