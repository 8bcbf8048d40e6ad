"""The decoder of T5, Whisper, BART and Marian as one function of tensors, from token ids to logits.

The same is done in `outrider.runtime.fused_layers` for Llama-like models, and here TorchScript compiles it, too. So
`CrossLayers` uses only features of TorchScript.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    BartForConditionalGeneration,
    MarianMTModel,
    T5ForConditionalGeneration,
    WhisperForConditionalGeneration,
)

from outrider.runtime.batch import PackedBatch
from outrider.runtime.encoder_decoder import bias_of
from outrider.runtime.fused_layers import (
    SMALL,
    Linear,
    can_pack,
    compiled,
    doubled,
    is_plain,
    is_plain_tensor,
    linear,
    linear_add,
    make_signs,
    merge,
    pack,
    rms_norm,
)
from outrider.runtime.sdpa import Location, attend_all, attend_causal, keys_and_values

_LIKE_BART = (BartForConditionalGeneration, MarianMTModel, WhisperForConditionalGeneration)
_ACTIVATIONS = {"relu": 0, "gelu": 1, "gelu_new": 2, "gelu_pytorch_tanh": 2, "silu": 3, "swish": 3}


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer: self-attention, cross-attention and MLP, each with its norm (RMS norm without a bias)."""

    norms: list[Linear]
    qkv: Linear
    output: Linear
    query: Linear
    cross_output: Linear
    up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class _Shared:
    """What all layers share, and the weights outside of them.

    Attributes:
        heads: H, of queries, keys and values.
        scaling: of the scores.
        eps: of the norms.
        rms: whether norms are RMS norms, with weights `[2, E]` (`fused_layers.doubled`).
        norm_first: whether a norm is before attention and MLP, or after the sum with the residual stream.
        biased: whether scores get a bias by distance (T5).
        gated: whether `up` holds the gate, too.
        activation: of the MLP, a value of `_ACTIVATIONS`.
        packed: whether linear weights are packed.
        embedding: `[V, E]`.
        embedding_scale: factor of the embedding.
        positions: `[P, E]`, the embedding of positions; None: they are in the bias.
        first_norm: of the embedding, or None.
        last_norm: of the residual stream after all layers, or None.
        output_scale: factor of the residual stream before the head.
        head: `[V, E]`.
    """

    heads: int
    scaling: float
    eps: float
    rms: bool
    norm_first: bool
    biased: bool
    gated: bool
    activation: int
    packed: bool
    embedding: Tensor
    embedding_scale: float
    positions: Tensor | None
    first_norm: Linear | None
    last_norm: Linear | None
    output_scale: float
    head: Linear


class CrossLayers(nn.Module):
    """The whole decoder. Values of the layers are in lists, which TorchScript supports."""

    positions: Tensor | None
    first_norm: Linear | None
    last_norm: Linear | None
    head: Linear
    norms: list[Linear]
    qkv: list[Linear]
    output: list[Linear]
    query: list[Linear]
    cross_output: list[Linear]
    up: list[Linear]
    down: list[Linear]

    def __init__(self, shared: _Shared, layers: Sequence[_Layer]) -> None:
        super().__init__()
        self.heads, self.scaling, self.eps, self.packed = shared.heads, shared.scaling, shared.eps, shared.packed
        self.rms, self.norm_first, self.biased = shared.rms, shared.norm_first, shared.biased
        self.gated, self.activation = shared.gated, shared.activation
        self.embedding, self.embedding_scale = shared.embedding, shared.embedding_scale
        self.positions, self.output_scale = shared.positions, shared.output_scale
        self.first_norm, self.last_norm, self.head = shared.first_norm, shared.last_norm, shared.head
        self.norms = [norm for layer in layers for norm in layer.norms]
        for name in ("qkv", "output", "query", "cross_output", "up", "down"):
            setattr(self, name, [getattr(layer, name) for layer in layers])
        self.small = SMALL if shared.embedding.device.type == "cpu" else 0
        self.signs = make_signs(shared.embedding)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        memory: Tensor,
        block_tokens: int,
        counts: list[int],
        locations: list[Location],
        masks: list[Tensor],
        encoded: list[Location],
        last: int,
        rows: Tensor | None,
    ) -> Tensor:
        """Runs a batch.

        Args:
            token_ids: `[T]`.
            positions: `[T]`; not used without an embedding of positions.
            slots: `[T]`: the position in memory of each row.
            memory: keys and values of all blocks, `[layers, 2, H, positions, head_dim]`.
            counts: the number of rows of each chunk.
            locations: of each chunk.
            masks: of each chunk (`sdpa.attend_causal`); if scores are biased, `sdpa.biased_mask`.
            encoded: the location of each chunk's encoder output.
            last: how many rows at the end need logits, if `rows` is None.

        Returns:
            Logits `[R, V]`, float32.
        """
        x = torch.embedding(self.embedding, token_ids)
        if self.embedding_scale != 1.0:
            x = x * self.embedding_scale
        table = self.positions
        if table is not None:
            x = x + table.index_select(0, positions)
        x = x.unsqueeze(1)  # [T, 1, E]
        first_norm = self.first_norm
        if first_norm is not None:
            x = self.normed(x, first_norm)
        T, heads, head_dim = x.size(0), self.heads, memory.size(4)
        width = 3 * heads * head_dim
        none: list[Tensor] = []
        for i, layer in enumerate(memory.unbind(0)):
            qkv = self.product(self.before(3 * i, x), self.qkv[i]).to(memory.dtype)
            kv = qkv.as_strided([2, heads, T, head_dim], [heads * head_dim, head_dim, width, 1], heads * head_dim)
            layer.index_copy_(2, slots, kv)
            query = qkv.as_strided([T, heads, head_dim], [width, head_dim, 1])
            if self.biased:
                keys, values = keys_and_values(layer, locations, block_tokens)
                attended = attend_all(query, counts, keys, values, masks, self.scaling)
            else:
                attended = attend_causal(query, layer, counts, locations, masks, block_tokens, self.scaling, 0)
            attended = attended.to(x.dtype).reshape(T, 1, heads * head_dim)
            x = self.after(3 * i, self.added(x, attended, self.output[i]))

            rows_of = self.product(self.before(3 * i + 1, x), self.query[i])
            query = rows_of.view(T, heads, head_dim).to(memory.dtype)
            keys, values = keys_and_values(layer, encoded, block_tokens)
            attended = attend_all(query, counts, keys, values, none, self.scaling)
            attended = attended.to(x.dtype).reshape(T, 1, heads * head_dim)
            x = self.after(3 * i + 1, self.added(x, attended, self.cross_output[i]))

            inner = self.activated(self.product(self.before(3 * i + 2, x), self.up[i]))
            x = self.after(3 * i + 2, self.added(x, inner, self.down[i]))
        if rows is not None:
            x = x.index_select(0, rows)
        elif last < T:
            x = x.narrow(0, T - last, last)
        if x.size(0) == 0:
            return torch.empty([0, self.embedding.size(0)], device=x.device)
        last_norm = self.last_norm
        if last_norm is not None:
            x = self.normed(x, last_norm)
        if self.output_scale != 1.0:
            x = x * self.output_scale
        return self.product(x, self.head).squeeze(1).float()

    def before(self, at: int, x: Tensor) -> Tensor:
        """The input of an attention or MLP, from the residual stream."""
        return self.normed(x, self.norms[at]) if self.norm_first else x

    def after(self, at: int, x: Tensor) -> Tensor:
        """The residual stream, from its sum with the output of an attention or MLP."""
        return x if self.norm_first else self.normed(x, self.norms[at])

    def normed(self, x: Tensor, norm: Linear) -> Tensor:
        if self.rms:
            return rms_norm(x, norm.weight, self.signs, self.eps, self.small)
        return F.layer_norm(x, [x.size(-1)], norm.weight, norm.bias, self.eps)

    def product(self, x: Tensor, layer: Linear) -> Tensor:
        return linear(x, layer.weight, layer.bias, self.packed)

    def added(self, residual: Tensor, x: Tensor, layer: Linear) -> Tensor:
        return linear_add(residual, x, layer.weight, layer.bias, self.packed)

    def activated(self, x: Tensor) -> Tensor:
        gate, rest = x, x
        if self.gated:
            gate, rest = x.chunk(2, -1)
        if self.activation == 0:
            gate = F.relu(gate)
        elif self.activation == 1:
            gate = F.gelu(gate)
        elif self.activation == 2:
            gate = F.gelu(gate, approximate="tanh")
        else:
            gate = F.silu(gate)
        return gate * rest if self.gated else gate


class FusedCrossDecoder:
    """A program (`outrider.runtime.attention`) equal to `EncoderDecoder` up to rounding.

    The weights of the decoder move into it, so the model's own forward no longer works.

    Args:
        model: `has_fused_cross_decoder` must be true for it; patched (`encoder_decoder.patch_model`).
    """

    def __init__(self, model: Any) -> None:
        weight: Tensor = model.get_output_embeddings().weight
        self._device = weight.device
        self._packed = can_pack(weight.dtype, weight.device)
        if isinstance(model, T5ForConditionalGeneration):
            shared, layers, self._bias = self._take_t5(model)
        else:
            shared, layers, self._bias = *self._take_like_bart(model), None
        self._layers = CrossLayers(shared, layers)
        self._run: Callable[..., Tensor] = compiled(self._layers, self._device)

    def __call__(self, token_ids: Tensor, batch: Any, rows: Tensor | int | None) -> Tensor:
        assert isinstance(batch, PackedBatch)
        masks = batch.causal_masks(1, 0) if self._bias is None else batch.biased_masks(self._bias)
        last, chosen = (batch.rows, rows) if rows is None or isinstance(rows, Tensor) else (rows, None)
        positions = batch.masks.no_rows if self._layers.positions is None else batch.position_ids(self._device)
        return self._run(
            token_ids, positions, batch.slot_mapping, batch.store, batch.block_tokens, batch.counts, batch.locations,
            masks, batch.encoded, last, chosen,
        )  # fmt: skip

    # --------------------------------------------------------------------------------------------------------- weights

    def _take_t5(self, model: Any) -> tuple[_Shared, list[_Layer], Tensor | None]:
        config, decoder = model.config, model.decoder
        layers = []
        for block in decoder.block:
            own, cross, mlp = (
                block.layer[0].SelfAttention,
                block.layer[1].EncDecAttention,
                block.layer[2].DenseReluDense,
            )
            up = (mlp.wi_0, mlp.wi_1) if config.is_gated_act else (mlp.wi,)
            layers.append(
                _Layer(
                    norms=[Linear(doubled(each.layer_norm.weight), None) for each in block.layer],
                    qkv=self._merge(own.q, own.k, own.v),
                    output=self._merge(own.o),
                    query=self._merge(cross.q),
                    cross_output=self._merge(cross.o),
                    up=self._merge(*up),
                    down=self._merge(mlp.wo),
                )
            )
        shared = _Shared(
            heads=config.num_heads,
            scaling=decoder.block[0].layer[0].SelfAttention.scaling,
            eps=config.layer_norm_epsilon,
            rms=True,
            norm_first=True,
            biased=True,
            gated=config.is_gated_act,
            activation=_ACTIVATIONS[config.dense_act_fn],
            packed=self._packed,
            embedding=decoder.embed_tokens.weight.detach(),
            embedding_scale=1.0,
            positions=None,
            first_norm=None,
            last_norm=Linear(doubled(decoder.final_layer_norm.weight), None),
            output_scale=config.d_model**-0.5 if config.scale_decoder_outputs else 1.0,
            head=self._merge(model.lm_head),
        )
        return shared, layers, bias_of(decoder.block[0].layer[0].SelfAttention)

    def _take_like_bart(self, model: Any) -> tuple[_Shared, list[_Layer]]:
        config, decoder = model.config, model.get_decoder()
        layers = []
        for layer in decoder.layers:
            own, cross = layer.self_attn, layer.encoder_attn
            norms = layer.self_attn_layer_norm, layer.encoder_attn_layer_norm, layer.final_layer_norm
            layers.append(
                _Layer(
                    norms=list(map(_norm, norms)),
                    qkv=self._merge(own.q_proj, own.k_proj, own.v_proj),
                    output=self._merge(own.out_proj),
                    query=self._merge(cross.q_proj),
                    cross_output=self._merge(cross.out_proj),
                    up=self._merge(layer.fc1),
                    down=self._merge(layer.fc2),
                )
            )
        head, bias = model.get_output_embeddings(), getattr(model, "final_logits_bias", None)
        dtype = head.weight.dtype
        positions, first_norm = decoder.embed_positions, getattr(decoder, "layernorm_embedding", None)
        is_whisper = isinstance(model, WhisperForConditionalGeneration)
        embed_scale = getattr(decoder.embed_tokens, "embed_scale", getattr(decoder, "embed_scale", 1.0))
        shared = _Shared(
            heads=config.decoder_attention_heads,
            scaling=decoder.layers[0].self_attn.scaling,
            eps=decoder.layers[0].final_layer_norm.eps,
            rms=False,
            norm_first=is_whisper,
            biased=False,
            gated=False,
            activation=_ACTIVATIONS[config.activation_function],
            packed=self._packed,
            embedding=decoder.embed_tokens.weight.detach(),
            embedding_scale=1.0 if is_whisper else embed_scale,  # Whisper's is not used by transformers
            positions=positions.embedding.weight.detach()[positions.offset :],
            first_norm=None if first_norm is None else _norm(first_norm),
            last_norm=_norm(decoder.layer_norm) if is_whisper else None,
            output_scale=1.0,
            head=self._merge(head) if bias is None else self._merge(head)._replace(bias=bias[0].to(dtype)),
        )
        return shared, layers

    def _merge(self, *modules: Any) -> Linear:
        merged = merge(*modules)
        return merged._replace(weight=pack(merged.weight)) if self._packed else merged


def has_fused_cross_decoder(model: Any, dtype: torch.dtype) -> bool:
    """Whether `FusedCrossDecoder` supports a model of a dtype, by its class, its configuration and its weights."""
    if type(model) not in (T5ForConditionalGeneration, *_LIKE_BART):
        return False
    config, decoder = model.config, model.get_decoder()
    activation = config.dense_act_fn if isinstance(model, T5ForConditionalGeneration) else config.activation_function
    head = model.get_output_embeddings()
    linear_layers = [module for module in decoder.modules() if isinstance(module, nn.Linear)]
    parameters = [*decoder.parameters(), *head.parameters()]
    return (
        activation in _ACTIVATIONS
        and all(is_plain(module, nn.Linear) for module in (*linear_layers, head))
        and all(is_plain_tensor(each) and each.dtype == dtype for each in parameters)
    )


def _norm(module: nn.LayerNorm) -> Linear:
    return Linear(module.weight.detach(), module.bias.detach())
