"""Attention over packed sequences, plugged into transformers' public attention interface.

It knows the layout of a pass (`outrider.runtime.batch`, `outrider.runtime.paged`), and nothing of what model calls it.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from outrider.runtime.batch import PackedBatch
from outrider.runtime.paged import PagedBatch
from outrider.runtime.scores import Scoring, attend_scores
from outrider.runtime.sdpa import attend

NAME = "outrider_packed"
"""What our attention is called in a model's configuration (`attn_implementation`)."""

PROBE = "outrider_probe"
"""Its name while a model is looked over, when the masks it asks for are taken down too."""


class NoPass(ValueError):
    """A model with our attention was called without a pass."""


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
    packed_batch: PackedBatch | PagedBatch | None = None,
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
        softcap: bounds the scores (`outrider.runtime.scores`).
        s_aux: `[heads]`: sinks, likewise.
        packed_batch: the pass.
        features: whatever else the model asks for; looked at once, when it is loaded.

    Returns:
        `[1, T, heads, head_dim of the values]`, and no weights.

    Raises:
        NoPass: the call came from elsewhere, without a pass.
    """
    if packed_batch is None:
        raise NoPass("this model runs on packed passes only (outrider.runtime.packed), not through its own forward")
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
    scoring = Scoring(scaling, sliding_window or 0, softcap, s_aux)
    if isinstance(batch, PagedBatch):
        out = _paged(query[0], key[0], value[0], batch, layer, scoring)
    else:
        out = _packed(query[0], key[0], value[0], batch, layer, scoring)
    return out.narrow(2, 0, size).to(query.dtype).unsqueeze(0), None


def _packed(query: Tensor, key: Tensor, value: Tensor, batch: PackedBatch, layer: int, scoring: Scoring) -> Tensor:
    # query: [heads, T, head_dim]; key, value: [kv_heads, T, head_dim] -> [T, heads, head_dim]
    first = 0
    for views, count in zip(batch.views, batch.counts, strict=True):
        new = views.new[layer]
        new[0].copy_(key.narrow(1, first, count))
        new[1].copy_(value.narrow(1, first, count))
        first += count
    rows = query.transpose(0, 1).to(batch.dtype)
    keys, values = [views.keys[layer] for views in batch.views], [views.values[layer] for views in batch.views]
    if not scoring.is_plain:
        return attend_scores(rows, batch.starts, batch.counts, keys, values, scoring)
    masks = batch.masks_for(query.shape[0] // key.shape[0], scoring.window)
    return attend(rows, batch.counts, keys, values, masks, scoring.scaling, scoring.window)


def _paged(query: Tensor, key: Tensor, value: Tensor, batch: PagedBatch, layer: int, scoring: Scoring) -> Tensor:
    # the same, with keys and values in pages
    batch.write(layer, key.transpose(0, 1), value.transpose(0, 1))
    keys, values = batch.memory.keys[layer], batch.memory.values[layer]
    return batch.attention(query.transpose(0, 1).to(keys.dtype), keys, values, batch, scoring)


# No mask function goes with NAME: transformers then builds no mask, which saves a dozen tensor operations a pass.
# PROBE is the same attention with one, which only takes down what the model would have masked.
AttentionInterface.register(NAME, packed_attention)
AttentionInterface.register(PROBE, packed_attention)
