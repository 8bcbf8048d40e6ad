"""Encoder–decoder models: the encoder runs once per sequence, the decoder in packed batches.

A sequence has two slots of one KV pool (`KVPool.add_encoder`). The encoder's slot holds the keys and values that
cross-attention computes from the encoder's output, one position per row of that output, in the layers of the decoder.
It is filled by one pass and never grows. The decoder's slot is that of any sequence. Each decoder pass gets an encoder
output of one zero row, which stands for it; the attention reads the encoder's slot in its place.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from outrider.runtime.block_pool import SlotViews
from outrider.runtime.errors import CheckpointError
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
    """In place of a batch while an encoder runs, and while cross-attention projects its output.

    Args:
        views: the encoder's slot, to be written by cross-attention; None while the encoder runs.
    """

    observer = None

    def __init__(self, views: SlotViews | None = None) -> None:
        self._views = views

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, scaling: float, position_bias: Tensor | None
    ) -> Tensor:
        """Bidirectional attention of an encoder layer; for a decoder layer, any values.

        Shapes are those of `outrider.runtime.attention.packed_attention`.
        """
        if self._views is None:
            rows = F.scaled_dot_product_attention(query, key, value, attn_mask=position_bias, scale=scaling)
            return rows.transpose(1, 2)
        if is_cross(module):
            new = self._views.new[module.layer_idx]
            new[0].copy_(key[0])
            new[1].copy_(value[0])
        return query.transpose(1, 2)


def encoder_length(inputs: Tensor | None) -> int:
    """Positions of the encoder's output for token ids `[S]`, features `[mels, frames]`, or no input: 0."""
    if inputs is None:
        return 0
    return len(inputs) if inputs.dim() == 1 else inputs.shape[1] // 2  # Whisper's second convolution has stride 2


def is_cross(module: Any) -> bool:
    """Whether an attention module is cross-attention, by `prepare`."""
    return bool(getattr(module, _CROSS, False))


def bias_of(module: Any) -> Tensor | None:
    """`[heads, positions]`: the bias of the scores by distance of T5's decoder; None for other models."""
    found: Tensor | None = getattr(module, _DISTANCE, None)
    return found


def attend_encoder(query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
    """Cross-attention of one sequence: each row sees all positions.

    Args:
        query: `[n, heads, head_dim]`.
        keys: `[heads, 1, positions, head_dim]`.
        values: like `keys`.
        scaling: of the scores.

    Returns:
        `[n, heads, head_dim]`.
    """
    rows = query.transpose(0, 1).unsqueeze(1)
    return F.scaled_dot_product_attention(rows, keys, values, scale=scaling).squeeze(1).transpose(0, 1)


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

    Raises:
        CheckpointError: the model has an embedding of positions that is not known.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        decoder = model.get_decoder()
        weight = next(decoder.parameters())
        self._no_output = BaseModelOutput(
            last_hidden_state=torch.zeros(1, 1, model.config.d_model, dtype=weight.dtype, device=weight.device)
        )
        for module in decoder.modules():
            if isinstance(module, _Projection):
                module.zero_row = self._no_output.last_hidden_state
                module.nothing = module.nothing.to(weight.device)
        self._positions: _Positions | None = None
        embedding = getattr(decoder, "embed_positions", None)
        if isinstance(embedding, _Positions):
            self._positions = embedding
        elif embedding is not None:
            if not isinstance(embedding, nn.Embedding):
                raise CheckpointError(f"{type(model).__name__} embeds positions by {type(embedding).__name__}")
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
        """Fills an empty encoder slot: runs the encoder, and the projections of cross-attention.

        Raises:
            PoolExhausted: the pool has too few free blocks; the slot is still empty.
        """
        encoded = self.encode(inputs)
        length = encoded.shape[1]
        views = pool.views(slot, 0, length)
        if self._positions is not None:
            self._positions.ids = torch.zeros(1, dtype=torch.int64, device=encoded.device)
        start = torch.full((1, 1), self.info.start_token, device=encoded.device)
        self._model.get_decoder()(
            input_ids=start, encoder_hidden_states=encoded, use_cache=False, packed_batch=EncoderPass(views)
        )
        pool.extend(slot, length)

    def __call__(self, token_ids: Tensor, batch: Any, rows: Tensor | int | None) -> Tensor:
        """See `outrider.runtime.attention.Program`."""
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


def prepare(model: Any, context_length: int) -> EncoderDecoder:
    """Marks the cross-attention of a model, and computes T5's bias by distance for `context_length` positions."""
    for name, module in model.get_decoder().named_modules():
        if name.endswith((".encoder_attn", ".EncDecAttention")):
            setattr(module, _CROSS, True)
            for projection in ("k", "v", "k_proj", "v_proj"):
                if isinstance(linear := getattr(module, projection, None), nn.Linear):
                    setattr(module, projection, _Projection(linear))
    table: Tensor | None = None  # of the first layer; the others share it
    for module in model.get_decoder().modules():
        if hasattr(module, "relative_attention_bias"):
            table = _bias_by_distance(module, context_length)
            nothing = torch.zeros(1, 1, 1, 1, dtype=table.dtype, device=table.device)
            module.compute_bias = lambda *args, **kwargs: nothing  # noqa: B023 - it would count rows over all sequences
        if hasattr(module, "has_relative_attention_bias") and not is_cross(module):
            setattr(module, _DISTANCE, table)
    return EncoderDecoder(model)


def _bias_by_distance(module: Any, positions: int) -> Tensor:
    """`[heads, positions]`: what T5 adds to a score, by the distance of the key before the row."""
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
        raise CheckpointError(f"the configuration of '{config.model_type}' names no decoder_start_token_id")
    if hasattr(config, "num_mel_bins"):
        positions = config.max_source_positions
        return EncoderInfo(SPEECH, positions, start, mels=config.num_mel_bins, frames=2 * positions)
    names = ("max_position_embeddings", "n_positions")
    longest = next((int(getattr(config, name)) for name in names if getattr(config, name, None)), LONGEST)
    return EncoderInfo(TEXT, longest, start)


LONGEST = 2048
"""Positions of encoder and decoder where a model has only relative ones and names no limit (T5)."""
