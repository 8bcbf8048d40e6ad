"""Our attention inside a transformers model, and programs that run a forward pass.

The attention is registered through transformers' public interface. `probe_attention` inspects a model once, when it is
loaded: the shape of each attention layer, and whether our attention supports it. A program runs a batch: the model
itself, or a fused equivalent (`outrider.runtime.fused_decoder`).
"""

import inspect
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from outrider.runtime.batch import PackedBatch, PagedBatch
from outrider.runtime.encoder_decoder import EncoderDecoder, EncoderPass, bias_of, is_cross
from outrider.runtime.errors import CheckpointError, UnsupportedModel
from outrider.runtime.sdpa import Scoring, attend_all, attend_causal, attend_scores, keys_and_values

NAME = "outrider_packed"
"""The name of our attention in a model's configuration (`attn_implementation`)."""

PROBE = "outrider_probe"
"""Its name during `probe_attention`, which records the masks that the model requests, too."""


class NoBatch(ValueError):
    """A model with our attention was called without a batch."""


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
    packed_batch: "PackedBatch | PagedBatch | EncoderPass | _Observer | None" = None,
    **features: Any,
) -> tuple[Tensor, None]:
    """The attention function of transformers, called once per layer: writes new keys and values, then attends.

    Args:
        module: the attention layer; `layer_idx` is its index.
        query: `[1, heads, T, head_dim]`.
        key: `[1, kv_heads, T, head_dim]`.
        value: like `key`; its heads may be smaller.
        attention_mask: not used; `packed_batch` defines the mask.
        scaling: of the scores; None is 1/√head_dim.
        sliding_window: how many positions a row sees, its own included.
        softcap: bound of the scores (`outrider.runtime.sdpa`).
        s_aux: `[heads]`: attention sinks (`outrider.runtime.sdpa`).
        features: other arguments of the model; checked once, by `probe_attention`.

    Returns:
        `[1, T, heads, head_dim of the values]`, and no weights.

    Raises:
        NoBatch: the model was called without a batch.
    """
    if packed_batch is None:
        raise NoBatch(
            "packed_batch is missing: this model runs through outrider.runtime.model_runner only, not by its own "
            "forward"
        )
    batch = packed_batch
    if scaling is None:
        scaling = float(query.shape[-1]) ** -0.5
    if isinstance(batch, EncoderPass):
        return batch.attend(query, key, value, scaling, features.get("position_bias")), None
    if isinstance(batch, _Observer):
        arguments = {"softcap": softcap, "s_aux": s_aux, **features}
        return batch.see(module, query, key, value, scaling, sliding_window, arguments), None
    layer: Any = module.layer_idx
    size = value.shape[3]
    if size < key.shape[3]:  # the pool stores both in one size; zero padding does not change the result
        value = F.pad(value, (0, key.shape[3] - size))
    if is_cross(module):
        assert isinstance(batch, PackedBatch)
        return _cross(query[0], batch, layer, scaling).to(query.dtype).unsqueeze(0), None
    scoring = Scoring(scaling, sliding_window or 0, softcap, s_aux, bias_of(module))
    if isinstance(batch, PagedBatch):
        out = _paged(query[0], key[0], value[0], batch, layer, scoring)
    else:
        out = _packed(query[0], key[0], value[0], batch, layer, scoring)
    return out.narrow(2, 0, size).to(query.dtype).unsqueeze(0), None


def _packed(query: Tensor, key: Tensor, value: Tensor, batch: PackedBatch, layer: int, scoring: Scoring) -> Tensor:
    # query: [heads, T, head_dim]; key, value: [kv_heads, T, head_dim] -> [T, heads, head_dim]
    memory = batch.memory(layer)
    memory.index_copy_(2, batch.slot_mapping, torch.stack((key, value)).to(memory.dtype))
    rows, size = query.transpose(0, 1).to(memory.dtype), batch.block_tokens
    if scoring.is_plain:
        masks = batch.causal_masks(query.shape[0] // key.shape[0], scoring.window)
        return attend_causal(rows, memory, batch.counts, batch.locations, masks, size, scoring.scaling, scoring.window)
    keys, values = keys_and_values(memory, batch.locations, size)
    if scoring.bias is not None:
        return attend_all(rows, batch.counts, keys, values, batch.biased_masks(scoring.bias), scoring.scaling)
    return attend_scores(rows, batch.starts, batch.counts, keys, values, scoring)


def _cross(query: Tensor, batch: PackedBatch, layer: int, scaling: float) -> Tensor:
    # query: [heads, T, head_dim] -> [T, heads, head_dim]
    memory = batch.memory(layer)
    keys, values = keys_and_values(memory, batch.encoded, batch.block_tokens)
    return attend_all(query.transpose(0, 1).to(memory.dtype), batch.counts, keys, values, [], scaling)


def _paged(query: Tensor, key: Tensor, value: Tensor, batch: PagedBatch, layer: int, scoring: Scoring) -> Tensor:
    # the same shapes
    batch.write(layer, key.transpose(0, 1), value.transpose(0, 1))
    keys, values = batch.memory.keys[layer], batch.memory.values[layer]
    return batch.attention(query.transpose(0, 1).to(keys.dtype), keys, values, batch, scoring)


# NAME has no mask function: transformers then builds no mask, which saves a dozen tensor operations per forward pass.
# PROBE is the same attention with a mask function that records the requested masks.
AttentionInterface.register(NAME, packed_attention)
AttentionInterface.register(PROBE, packed_attention)


# Arguments of an attention that change its result, and that ours does not support.
_UNSUPPORTED = {
    "logit_cap": "soft-capping of attention scores through logit_cap",
    "sinks": "attention sinks that depend on the token",
    "position_bias": "a position bias in the attention",
    "alibi": "a position bias in the attention (ALiBi)",
    "head_mask": "a mask per attention head",
    "block_sequence_ids": "bidirectional attention",
}

ELSEWHERE = "does not use transformers' attention interface, which Outrider needs"

_PROBE_TOKENS = 4


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """The attention of one layer.

    Attributes:
        heads: query heads.
        kv_heads: heads of keys and of values; divides `heads`.
        head_dim: size of each.
        scaling: of the scores.
        window: how many positions a row sees, its own included; None is all.
        softcap: bound of the scores; None is no bound.
        sinks: whether each head has an attention sink.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scaling: float
    window: int | None
    softcap: float | None = None
    sinks: bool = False


def probe_attention(
    model: Any, context_length: int, encoder: EncoderDecoder | None = None
) -> tuple[AttentionLayer, ...]:
    """Runs a few tokens through a model and returns the shapes of its attention layers.

    Args:
        model: a causal language model of transformers, its attention `outrider.runtime.attention.NAME`; or a model with
            encoder and decoder, of which the decoder's layers are returned.
        context_length: the most positions of a sequence; masks of windows that are as long change nothing.

    Raises:
        CheckpointError: it needs a feature that our attention does not support; the message names it.
    """
    observer = _Observer()
    positions = observer.position_ids(next(model.parameters()).device).unsqueeze(0)
    AttentionMaskInterface.register(PROBE, observer.see_mask)
    try:
        model.set_attn_implementation(PROBE)
        with torch.inference_mode():
            if encoder is not None:
                encoder(torch.zeros_like(positions[0]), observer, None)
            else:
                model(
                    input_ids=torch.zeros_like(positions),
                    position_ids=positions,
                    use_cache=False,
                    packed_batch=observer,
                )
    except CheckpointError:
        raise
    except Exception as error:
        kind = type(model).__name__
        if isinstance(error, NoBatch):
            raise UnsupportedModel(
                f"{kind} does not pass keyword arguments on to its attention, which Outrider needs"
            ) from error
        raise UnsupportedModel(f"{kind} fails with Outrider's attention: {type(error).__name__}: {error}") from error
    finally:
        model.set_attn_implementation(NAME)
    return observer.layers(model, context_length)


class _Observer:
    """In place of a batch, of one sequence: records each call of the attention, and computes it."""

    def __init__(self) -> None:
        self._layers: dict[int, AttentionLayer] = {}
        self._local: set[int] = set()

    def position_ids(self, device: torch.device) -> Tensor:
        return torch.arange(_PROBE_TOKENS, device=device)

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
        if is_cross(module):
            self._check_cross(module, query, key)
            return query.transpose(1, 2)
        for name, meaning in _UNSUPPORTED.items():
            if features.get(name) is not None and not (name == "position_bias" and bias_of(module) is not None):
                raise UnsupportedModel(f"the model needs {meaning}, which Outrider's attention lacks")
        if features.get("is_causal") is False or getattr(module, "is_causal", True) is False:
            raise UnsupportedModel("the model has bidirectional attention: it is not a causal language model")
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int) or layer in self._layers:
            raise UnsupportedModel(
                f"{type(module).__name__} has no layer_idx, or runs twice in a forward pass: the KV cache needs one "
                "index for each layer"
            )
        heads, kv_heads, head_dim = query.shape[1], key.shape[1], key.shape[3]
        fits = key.shape[:3] == value.shape[:3] and value.shape[3] <= head_dim == query.shape[3]
        if not fits or heads % kv_heads:
            shapes = f"queries {list(query.shape)}, keys {list(key.shape)}, values {list(value.shape)}"
            raise UnsupportedModel(f"the KV cache cannot hold the heads of layer {layer}: {shapes}")
        softcap, sinks = features.get("softcap"), features.get("s_aux")
        if sinks is not None and sinks.shape != (heads,):
            raise UnsupportedModel(
                f"layer {layer} has attention sinks of shape {list(sinks.shape)}; it must be [{heads}]"
            )
        self._layers[layer] = AttentionLayer(
            heads, kv_heads, head_dim, scaling, window or None, softcap, sinks is not None
        )
        # Only the shape of the result matters: the next layers make the same calls for any values.
        attended = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=True
        )
        return attended.transpose(1, 2)

    def _check_cross(self, module: nn.Module, query: Tensor, key: Tensor) -> None:
        """Cross-attention must have the heads of its layer's self-attention, since both use the same blocks."""
        layer: Any = module.layer_idx
        own, found = self._layers.get(layer), (query.shape[1], key.shape[1], key.shape[3])
        if own is None or found != (own.heads, own.kv_heads, own.head_dim) or own.heads != own.kv_heads:
            raise UnsupportedModel(f"the cross-attention of layer {layer} has other heads than its self-attention")

    def see_mask(self, *args: Any, **arguments: Any) -> None:
        """Called by transformers in place of a mask function."""
        local = arguments.get("local_size")
        if local:  # Qwen2-MoE sends 0 for no window
            self._local.add(local)

    def layers(self, model: Any, context_length: int) -> tuple[AttentionLayer, ...]:
        kind = type(model).__name__
        if not self._layers:
            raise UnsupportedModel(f"the attention of {kind} {ELSEWHERE}")
        config = model.config.get_text_config()
        names = ("decoder_layers", "num_decoder_layers", "num_hidden_layers")
        count = next((getattr(config, name) for name in names if getattr(config, name, None)), len(self._layers))
        if sorted(self._layers) != list(range(count)):
            raise UnsupportedModel(
                f"{kind} has attention in {len(self._layers)} of {count} layers: the KV cache cannot hold the state of "
                "the others"
            )
        windows = {layer.window for layer in self._layers.values()}
        # Gemma and others make the mask of a window also where no layer uses it.
        are_full = set(getattr(config, "layer_types", None) or ()) == {"full_attention"}
        strange = {size for size in self._local - windows if size < context_length}
        if strange and not are_full:
            sizes = ", ".join(map(str, sorted(strange)))
            raise UnsupportedModel(f"{kind} attends to chunks of {sizes} positions, which Outrider's attention cannot")
        return tuple(self._layers[layer] for layer in range(count))


Batch = PackedBatch | PagedBatch
"""A batch over contiguous keys and values, or over block tables."""

WantedRows = Tensor | int | None
"""The rows of a batch that need logits: their indices, the last n, or (None) all."""


class Program(Protocol):
    """Runs a batch."""

    def __call__(self, token_ids: Tensor, batch: Batch, rows: WantedRows) -> Tensor:
        """Writes keys and values of all rows, and returns the logits of `rows`.

        Args:
            token_ids: `[T]`.

        Returns:
            `[R, V]`, in the dtype of the model.
        """


class TransformersProgram:
    """A transformers model, run through its own forward with our attention inside.

    Args:
        model: a causal language model whose attention is `outrider.runtime.attention.NAME`.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._takes_rows = "logits_to_keep" in inspect.signature(model.forward).parameters

    def __call__(self, token_ids: Tensor, batch: Batch, rows: WantedRows) -> Tensor:
        inputs = {
            "input_ids": token_ids.unsqueeze(0),
            "position_ids": batch.position_ids(token_ids.device).unsqueeze(0),
            "use_cache": False,
            "packed_batch": batch,
        }
        if rows is None or self._takes_rows:
            kept = {} if rows is None else {"logits_to_keep": rows}
            return _tensor(self._model(**inputs, **kept).logits[0])
        # An older forward, without `logits_to_keep`. That head(base(x)) gives the same logits was checked at load time.
        hidden = self._model.base_model(**inputs).last_hidden_state[0]
        head = self._model.get_output_embeddings()
        return _tensor(head(hidden[-rows:] if isinstance(rows, int) else hidden[rows]))


def _tensor(value: Any) -> Tensor:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"the model returned {type(value).__name__}, not a tensor")
    return value
