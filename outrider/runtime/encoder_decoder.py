"""Encoder–decoder models: the encoder runs once per sequence, the decoder in packed batches.

A sequence has two slots of one KV pool (`KVPool.add_encoder`). The encoder's slot holds the keys and values that
cross-attention computes from the encoder's output, one position per row of that output, in the layers of the decoder.
It is filled by one pass and never grows. The decoder's slot is that of any sequence. Each decoder pass gets an encoder
output of one zero row, which stands for it; the attention reads the encoder's slot in its place.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from outrider.runtime.errors import CheckpointError, UnsupportedModel
from outrider.runtime.kv_cache import KVPool

TEXT, SPEECH = "text", "speech"

_DISTANCE = "outrider_bias_by_distance"  # on attention modules of T5: `[heads, positions]`
_CROSS = "outrider_is_cross"


@dataclass(frozen=True, slots=True)
class EncoderInfo:
    """The encoder of a model.

    Attributes:
        kind: `text` (token ids) or `speech` (log-Mel features).
        max_length: the most positions of its output.
        mels: rows of the features; 0 for text.
        frames: columns of the features, always as many; 0 for text.
        start_token: the first token of the decoder.
    """

    kind: str
    max_length: int
    start_token: int
    mels: int = 0
    frames: int = 0


class EncoderPass:
    """In place of a batch while an encoder runs."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float, bias: Tensor | None) -> Tensor:
        """Bidirectional attention. Shapes are those of `outrider.runtime.attention.packed_attention`."""
        return F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scaling).transpose(1, 2)


def encoder_length(inputs: Tensor | None) -> int:
    """Positions of the encoder's output for token ids `[S]`, features `[mels, frames]`, or no input: 0."""
    if inputs is None:
        return 0
    return len(inputs) if inputs.dim() == 1 else inputs.shape[1] // 2  # Whisper's second convolution has stride 2


def is_cross(module: Any) -> bool:
    """Whether an attention module is cross-attention, by `patch_model`."""
    return bool(getattr(module, _CROSS, False))


def bias_of(module: Any) -> Tensor | None:
    """`[heads, positions]`: the bias of the scores by distance of T5's decoder; None for other models."""
    found: Tensor | None = getattr(module, _DISTANCE, None)
    return found


class _Positions(nn.Module):
    """A decoder's position embedding that takes the positions of a packed batch: its own counts rows from 0."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.embedding = embedding
        self.offset = int(getattr(embedding, "offset", 0))  # BART's first two rows are no positions
        self.ids = torch.zeros(1, dtype=torch.int64)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return F.embedding(self.ids + self.offset, self.embedding.weight)


class _Projection(nn.Module):
    """Keys or values of cross-attention. For the zero row that stands for the encoder's output it computes nothing."""

    def __init__(self, projection: nn.Linear) -> None:
        super().__init__()
        self.projection = projection
        self.zero_row: Tensor | None = None
        self.nothing = torch.zeros(1, 1, projection.out_features, dtype=projection.weight.dtype)

    def forward(self, encoded: Tensor) -> Tensor:
        if encoded is self.zero_row:
            return self.nothing
        projected: Tensor = self.projection(encoded)
        return projected


class EncoderDecoder:
    """A transformers model with encoder and decoder, its attention `outrider.runtime.attention.NAME`.

    Its call is a `Program` over the decoder.

    Attributes:
        info: of the encoder.
        decoder: runs in place of the model's own decoder, if set.

    Raises:
        CheckpointError: the model has an embedding of positions that is not known.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self.decoder: Callable[[Tensor, Any, Tensor | int | None], Tensor] | None = None
        decoder = model.get_decoder()
        weight = next(decoder.parameters())
        self._no_output = BaseModelOutput(
            last_hidden_state=torch.zeros(1, 1, model.config.d_model, dtype=weight.dtype, device=weight.device)
        )
        self._projections: list[tuple[int, list[_Projection]]] = []  # of keys and of values, by layer
        for module in decoder.modules():
            if isinstance(module, _Projection):
                module.zero_row = self._no_output.last_hidden_state
                module.nothing = module.nothing.to(weight.device)
            elif is_cross(module):
                self._projections.append((module.layer_idx, [getattr(module, name) for name in _projections(module)]))
        self._positions: _Positions | None = None
        embedding = getattr(decoder, "embed_positions", None)
        if isinstance(embedding, _Positions):
            self._positions = embedding
        elif embedding is not None:
            if not isinstance(embedding, nn.Embedding):
                raise UnsupportedModel(
                    f"{type(model).__name__} embeds positions by {type(embedding).__name__}, not by a table"
                )
            self._positions = decoder.embed_positions = _Positions(embedding)
        self.info = _info(model.config)

    @torch.inference_mode()
    def encode(self, inputs: Tensor) -> Tensor:
        """Runs the encoder on token ids `[S]`, or on features `[mels, frames]`. Returns `[1, S, hidden]`."""
        encoder = self._model.get_encoder()
        batch = {"packed_batch": EncoderPass()}
        device = self._no_output.last_hidden_state.device
        if self.info.kind == SPEECH:
            inputs = inputs.to(device, self._no_output.last_hidden_state.dtype)
        output = encoder(inputs.to(device).unsqueeze(0), **batch).last_hidden_state
        assert isinstance(output, Tensor)
        return output

    def smallest(self) -> Tensor:
        """An input of the encoder for trials: one token, or silence."""
        info = self.info
        return torch.zeros(1, dtype=torch.int64) if info.kind == TEXT else torch.zeros(info.mels, info.frames)

    @torch.inference_mode()
    def fill(self, pool: KVPool, slot: int, inputs: Tensor) -> None:
        """Runs the encoder, and fills an empty encoder slot with the projections of cross-attention.

        Raises:
            PoolExhausted: the pool has too few free blocks; the slot is still empty.
        """
        encoded = self.encode(inputs)[0]  # [S, hidden]
        pool.grow(slot, len(encoded))
        assert pool.by_head is not None
        places = torch.tensor(pool.slot_mapping(slot, 0, len(encoded)), device=encoded.device)
        for layer, projections in self._projections:
            for held, projection in zip(pool.by_head.layers[layer], projections, strict=True):
                new = projection(encoded).unflatten(1, (len(held), -1)).transpose(0, 1)  # [heads, S, head_dim]
                held.index_copy_(1, places, new.to(held.dtype))
        pool.extend(slot, len(encoded))

    def __call__(self, token_ids: Tensor, batch: Any, rows: Tensor | int | None) -> Tensor:
        if self.decoder is not None:
            return self.decoder(token_ids, batch, rows)
        if self._positions is not None:
            self._positions.ids = batch.position_ids(token_ids.device)
        output = self._model(
            decoder_input_ids=token_ids.unsqueeze(0),
            encoder_outputs=self._no_output,
            use_cache=False,
            packed_batch=batch,
        )
        logits: Tensor = output.logits[0]
        if rows is None:
            return logits
        return logits[len(logits) - rows :] if isinstance(rows, int) else logits[rows]


def patch_model(model: Any, context_length: int) -> EncoderDecoder:
    """Makes the decoder of a model take packed batches. The model's own forward no longer works.

    It marks cross-attention, and computes T5's bias by distance for `context_length` positions.
    """
    for name, module in model.get_decoder().named_modules():
        if name.endswith((".encoder_attn", ".EncDecAttention")):
            setattr(module, _CROSS, True)
            for projection in _projections(module):
                setattr(module, projection, _Projection(getattr(module, projection)))
    table: Tensor | None = None  # of the first layer; the others share it
    for module in model.get_decoder().modules():
        if hasattr(module, "relative_attention_bias"):
            table = _bias_by_distance(module, context_length)
            nothing = torch.zeros(1, 1, 1, 1, dtype=table.dtype, device=table.device)
            module.compute_bias = lambda *args, **kwargs: nothing  # noqa: B023 - it would count rows over all sequences
        if hasattr(module, "has_relative_attention_bias") and not is_cross(module):
            setattr(module, _DISTANCE, table)
    return EncoderDecoder(model)


def _projections(cross_attention: Any) -> tuple[str, str]:
    """The names of the projections of keys and of values."""
    return ("k_proj", "v_proj") if hasattr(cross_attention, "k_proj") else ("k", "v")


def _bias_by_distance(module: Any, positions: int) -> Tensor:
    """`[heads, positions]`: T5's addition to a score, by the distance of the key before the row."""
    weight = module.relative_attention_bias.weight
    buckets = module._relative_position_bucket(
        -torch.arange(positions, device=weight.device),
        bidirectional=False,
        num_buckets=module.relative_attention_num_buckets,
        max_distance=module.relative_attention_max_distance,
    )
    return F.embedding(buckets, weight).T.float().contiguous()


def _info(config: Any) -> EncoderInfo:
    start = getattr(config, "decoder_start_token_id", None)
    if start is None:
        raise CheckpointError(f"config.json of this '{config.model_type}' model has no decoder_start_token_id; add it")
    if hasattr(config, "num_mel_bins"):
        positions = config.max_source_positions
        return EncoderInfo(SPEECH, positions, start, mels=config.num_mel_bins, frames=2 * positions)
    names = ("max_position_embeddings", "n_positions")
    longest = next((int(getattr(config, name)) for name in names if getattr(config, name, None)), LONGEST)
    return EncoderInfo(TEXT, longest, start)


LONGEST = 2048
"""Positions of encoder and decoder where a model has only relative ones and names no limit (T5)."""
