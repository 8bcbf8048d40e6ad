"""The decoder that Llama, Mistral, Qwen2 and Qwen3 share, in about twenty operations a layer instead of forty-five.

Pre-norm attention with rotary positions, then a gated MLP; both add to a residual stream. What is fused: queries, keys
and values into one product, gate and up into one, each residual sum into the product before it; rotary positions become
one complex product, for which the pairs (i, i + D/2) that they rotate are laid side by side in the weights.

It knows transformers' modules by name and the layout of a pass. It does not know how its weights were loaded.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM

from outrider.lm.attention import attend
from outrider.lm.batch import PackedBatch
from outrider.lm.linear import Linear, make_linear
from outrider.lm.norm import RMSNorm
from outrider.lm.probe import AttentionLayer
from outrider.lm.program import Rows

FAMILIES = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)

# Kinds of rotary embedding whose angles depend on the position alone.
_FIXED_ROTARY = frozenset({"default", "linear", "llama3", "yarn"})

_FIRST_POSITIONS = 2048


def is_gated_decoder(model: Any, layers: Sequence[AttentionLayer]) -> bool:
    """Whether a model is one this decoder computes: its class says so, and its configuration has no exception."""
    config = model.config
    rope = getattr(config, "rope_parameters", None) or {}
    return (
        type(model) in FAMILIES
        and config.hidden_act in ("silu", "swish")
        and rope.get("rope_type", "default") in _FIXED_ROTARY
        and rope.get("partial_rotary_factor", 1.0) == 1.0
        and len({(layer.heads, layer.kv_heads, layer.head_dim) for layer in layers}) == 1
        and layers[0].head_dim % 2 == 0
    )


@dataclass(slots=True)
class _Layer:
    """Weights of one layer, and what its attention asks for."""

    attention_norm: RMSNorm
    qkv: Linear
    head_norm: Tensor | None  # [H + KV, 1, D], float32: the norms of query and key heads (Qwen3)
    output: Linear
    mlp_norm: RMSNorm
    gate_up: Linear
    down: Linear
    scaling: float
    window: int | None


class GatedDecoder:
    """A program (`outrider.lm.program`) equal to the model's own forward up to rounding.

    Positions, and on a CPU attention too, are computed in float32 whatever the dtype. The weights of the model's layers
    move into the program one by one: its own forward runs no more.

    Args:
        model: one for which `is_gated_decoder` holds.
        layers: what its attention layers ask for.
    """

    def __init__(self, model: Any, layers: Sequence[AttentionLayer]) -> None:
        self._heads, self._kv_heads, self._head_dim = layers[0].heads, layers[0].kv_heads, layers[0].head_dim
        self._embedding: Tensor = model.model.embed_tokens.weight.detach()
        self._vocab_size: int = model.lm_head.weight.shape[0]
        self._rotary = model.model.rotary_emb
        self._rotations = self._make_rotations(_FIRST_POSITIONS)
        self._layers = [self._take(module, ask) for module, ask in zip(model.model.layers, layers, strict=True)]
        self._norm = _norm(model.model.norm)
        self._head = _linear(model.lm_head)
        eps = getattr(model.config, "rms_norm_eps", 0.0)
        self._head_norm = RMSNorm(torch.ones(self._head_dim, device=self._embedding.device), eps)

    def __call__(self, token_ids: Tensor, batch: PackedBatch, rows: Rows) -> Tensor:
        T, heads, kv_heads, head_dim = batch.rows, self._heads, self._kv_heads, self._head_dim
        width = (heads + 2 * kv_heads) * head_dim  # of a row of queries, keys and values
        pairs_shape, pairs_stride = (T, heads + kv_heads, head_dim // 2, 2), (width, head_dim, 2, 1)
        query_shape, query_stride = (T, heads, head_dim), (width, head_dim, 1)
        new_stride = (kv_heads * head_dim, head_dim, width, 1)
        writes = [
            (segment, (2, kv_heads, segment.count, head_dim), heads * head_dim + segment.first * width)
            for segment in batch.segments
        ]
        rotation = self._rotation(batch)  # [T, 1, D/2], complex
        x = torch.embedding(self._embedding, token_ids).unsqueeze(1)  # [T, 1, E]
        for index, layer in enumerate(self._layers):
            qkv = layer.qkv(layer.attention_norm(x)).float()  # [T, 1, (H + KV + KV) · D]
            if layer.head_norm is not None:
                self._norm_heads(qkv, layer.head_norm)
            torch.view_as_complex(qkv.as_strided(pairs_shape, pairs_stride)).mul_(rotation)
            for segment, new_shape, offset in writes:
                segment.new[index].copy_(qkv.as_strided(new_shape, new_stride, offset))
            query = qkv.as_strided(query_shape, query_stride).to(batch.dtype)
            attended = attend(query, index, batch, layer.scaling, layer.window)
            x = layer.output.add_to(x, attended.to(x.dtype).reshape(T, 1, -1))
            gate, up = layer.gate_up(layer.mlp_norm(x)).chunk(2, -1)
            x = layer.down.add_to(x, torch._C._nn.silu(gate).mul_(up))
        return self._logits(x, rows)

    def _logits(self, x: Tensor, rows: Rows) -> Tensor:
        # x: [T, 1, E]
        if isinstance(rows, int):
            x = x.narrow(0, x.shape[0] - rows, rows)
        elif rows is not None:
            x = x.index_select(0, rows)
        if not x.shape[0]:
            return x.new_empty(0, self._vocab_size)
        return self._head(self._norm(x)).squeeze(1)

    def _norm_heads(self, qkv: Tensor, weight: Tensor) -> None:
        T, normed, head_dim = qkv.shape[0], self._heads + self._kv_heads, self._head_dim
        heads = qkv.as_strided((T, normed, 1, head_dim), (qkv.shape[-1], head_dim, head_dim, 1))
        torch.mul(self._head_norm(heads), weight, out=heads)

    # ------------------------------------------------------------------------------------------------------- positions

    def _rotation(self, batch: PackedBatch) -> Tensor:
        """e^(i · angle) of each row, `[T, 1, D/2]`."""
        last = max(segment.end for segment in batch.segments)
        if last > len(self._rotations):
            self._rotations = self._make_rotations(max(last, 2 * len(self._rotations)))
        if len(batch.segments) == 1:
            return self._rotations.narrow(0, batch.segments[0].start, batch.rows)
        return self._rotations.index_select(0, batch.position_ids(self._rotations.device))

    def _make_rotations(self, length: int) -> Tensor:
        device = self._embedding.device
        probe = torch.zeros(1, device=device)  # its dtype says in which the angles are wanted
        cos, sin = self._rotary(probe, position_ids=torch.arange(length, device=device).unsqueeze(0))
        half = self._head_dim // 2
        return torch.complex(cos[0, :, :half], sin[0, :, :half]).unsqueeze(1)

    # --------------------------------------------------------------------------------------------------------- weights

    def _take(self, module: Any, ask: AttentionLayer) -> _Layer:
        attention, mlp = module.self_attn, module.mlp
        pairs = torch.arange(self._head_dim).view(2, -1).t().reshape(-1)  # 0, D/2, 1, D/2 + 1, …
        head_norm = None
        if hasattr(attention, "q_norm"):
            weights = [attention.q_norm.weight] * self._heads + [attention.k_norm.weight] * self._kv_heads
            head_norm = torch.stack([weight.detach().float()[pairs] for weight in weights]).unsqueeze(1)
        taken = _Layer(
            attention_norm=_norm(module.input_layernorm),
            qkv=_linear(attention.q_proj, attention.k_proj, attention.v_proj, pairs=(pairs, pairs, None)),
            head_norm=head_norm,
            output=_linear(attention.o_proj),
            mlp_norm=_norm(module.post_attention_layernorm),
            gate_up=_linear(mlp.gate_proj, mlp.up_proj),
            down=_linear(mlp.down_proj),
            scaling=ask.scaling,
            window=ask.window,
        )
        return taken


def _norm(module: Any) -> RMSNorm:
    return RMSNorm(module.weight.detach(), module.variance_epsilon)


def _linear(*modules: nn.Linear, pairs: Sequence[Tensor | None] = (None, None, None)) -> Linear:
    """One product for several; rows of each head in the order `pairs`. The modules give up their weights."""
    weights, biases = [], []
    for module, order in zip(modules, pairs, strict=False):
        weights.append(_reorder(module.weight.detach(), order))
        if module.bias is not None:
            biases.append(_reorder(module.bias.detach(), order))
        module.register_parameter("weight", None)
        module.register_parameter("bias", None)
    if biases and len(biases) < len(weights):
        raise ValueError("layers with and without bias cannot be one product")
    return make_linear(_cat(weights), _cat(biases) if biases else None)


def _cat(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _reorder(tensor: Tensor, order: Tensor | None) -> Tensor:
    """Reorders the first dimension within each head."""
    if order is None:
        return tensor
    heads = tensor.unflatten(0, (-1, len(order)))
    return heads.index_select(1, order.to(tensor.device)).flatten(0, 1)
