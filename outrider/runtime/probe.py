"""Looks a loaded model over: the shape of its attention layer by layer, and whether the packed attention can do it.

It knows transformers' attention interface, and nothing of pools or passes.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionMaskInterface

from outrider.runtime.attention import NAME, PROBE, NoPass
from outrider.runtime.batch import CausalMasks, PackedBatch
from outrider.runtime.errors import CheckpointError

# What models hand to their attention that changes its result, and that ours does not do.
_UNSUPPORTED = {
    "logit_cap": "soft-capping of attention scores by another name",
    "sinks": "attention sinks that follow the token",
    "position_bias": "a bias by position in the attention",
    "alibi": "a bias by position in the attention (ALiBi)",
    "head_mask": "a mask by attention head",
    "block_sequence_ids": "attention in both directions",
}

ELSEWHERE = "does not go through transformers' attention interface, so it cannot run packed sequences"

_PROBE_TOKENS = 4


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """What one layer asks of the attention.

    Attributes:
        heads: query heads.
        kv_heads: heads of keys and of values; divides `heads`.
        head_dim: size of each.
        scaling: of the scores.
        window: how many positions a row sees, its own included; None is all.
        softcap: what bounds the scores; None bounds nothing.
        sinks: whether each head has a sink.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scaling: float
    window: int | None
    softcap: float | None = None
    sinks: bool = False

    @property
    def scores_alone(self) -> bool:
        """Whether the softmax is over the scaled scores of the positions, and nothing else."""
        return self.softcap is None and not self.sinks


def probe_attention(model: Any) -> tuple[AttentionLayer, ...]:
    """Runs a few tokens through a model and returns what its attention layers asked for.

    Args:
        model: a causal language model of transformers, its attention `outrider.runtime.attention.NAME`.

    Raises:
        CheckpointError: it asks for something the packed attention does not do; the text names it.
    """
    observer = _Observer()
    device = next(model.parameters()).device
    masks = CausalMasks(_PROBE_TOKENS, torch.float32, device)
    positions = torch.arange(_PROBE_TOKENS, device=device).unsqueeze(0)
    AttentionMaskInterface.register(PROBE, observer.see_mask)
    try:
        model.set_attn_implementation(PROBE)
        with torch.inference_mode():
            model(
                input_ids=torch.zeros_like(positions),
                position_ids=positions,
                use_cache=False,
                packed_batch=PackedBatch([], [], 0, [], torch.float32, masks, observer=observer),
            )
    except CheckpointError:
        raise
    except Exception as error:
        kind = type(model).__name__
        if isinstance(error, NoPass):
            raise CheckpointError(f"{kind} does not hand keyword arguments down to its attention") from error
        raise CheckpointError(f"{kind} cannot run packed sequences: {type(error).__name__}: {error}") from error
    finally:
        model.set_attn_implementation(NAME)
    return observer.layers(model)


class _Observer:
    """Takes down each call of the attention, and answers it for one sequence."""

    def __init__(self) -> None:
        self._layers: dict[int, AttentionLayer] = {}
        self._local: set[int] = set()

    def see(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        window: int | None,
        features: dict[str, Any],
    ) -> Tensor:
        for name, meaning in _UNSUPPORTED.items():
            if features.get(name) is not None:
                raise CheckpointError(f"the model asks for {meaning}, which the packed attention does not do")
        if features.get("is_causal") is False or getattr(module, "is_causal", True) is False:
            raise CheckpointError("the model attends in both directions: it is not a causal language model")
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int) or layer in self._layers:
            raise CheckpointError(
                f"{type(module).__name__} has no layer number of its own, or calls its attention twice"
            )
        heads, kv_heads, head_dim = query.shape[1], key.shape[1], key.shape[3]
        fits = key.shape[:3] == value.shape[:3] and value.shape[3] <= head_dim == query.shape[3]
        if not fits or heads % kv_heads:
            shapes = f"queries {list(query.shape)}, keys {list(key.shape)}, values {list(value.shape)}"
            raise CheckpointError(f"the heads of layer {layer} do not fit the KV pool: {shapes}")
        softcap, sinks = features.get("softcap"), features.get("s_aux")
        if sinks is not None and sinks.shape != (heads,):
            raise CheckpointError(f"the attention sinks of layer {layer} are {list(sinks.shape)}, not one per head")
        self._layers[layer] = AttentionLayer(
            heads, kv_heads, head_dim, scaling, window or None, softcap, sinks is not None
        )
        # What comes of it only has to be of the right shape: the next layers ask for the same whatever they are given.
        attended = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=True
        )
        return attended.transpose(1, 2)

    def see_mask(self, *args: Any, **asked: Any) -> None:
        """Stands where transformers would build a mask."""
        local = asked.get("local_size")
        if local:  # 0 is how Qwen2-MoE says that it has no window
            self._local.add(local)

    def layers(self, model: Any) -> tuple[AttentionLayer, ...]:
        kind = type(model).__name__
        if not self._layers:
            raise CheckpointError(f"the attention of {kind} {ELSEWHERE}")
        count = getattr(model.config.get_text_config(), "num_hidden_layers", len(self._layers))
        if sorted(self._layers) != list(range(count)):
            raise CheckpointError(
                f"{kind} has attention in {len(self._layers)} of {count} layers: what the others remember is not "
                "in the KV pool"
            )
        windows = {layer.window for layer in self._layers.values()}
        if not self._local <= windows:
            sizes = ", ".join(str(size) for size in sorted(self._local - windows))
            raise CheckpointError(
                f"{kind} masks all but {sizes} positions, and no layer names that as its sliding window (chunked "
                "attention, for one): the packed attention does not do that"
            )
        return tuple(self._layers[layer] for layer in range(count))
