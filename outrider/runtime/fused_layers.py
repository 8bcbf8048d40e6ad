"""A gated decoder as one function of tensors, from token ids to logits.

TorchScript compiles it where it can: a pass is then one call that runs without the interpreter and its lock, a fifth
faster for a single token, and other threads run meanwhile. So this file keeps to what TorchScript understands;
uncompiled it does the same. It knows tensors only: how weights come here is for `outrider.runtime.fused_decoder`.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.runtime.linear import linear, linear_add
from outrider.runtime.norm import SMALL, make_signs, rms_norm
from outrider.runtime.sdpa import attend


@dataclass(frozen=True, slots=True)
class Frame:
    """What surrounds the layers, and what they share.

    Attributes:
        heads: query heads, H.
        kv_heads: heads of keys and of values, KV.
        head_dim: size of each, D.
        eps: of all norms.
        packed: whether the weights of linear layers are packed (`outrider.runtime.linear`).
        embedding: `[V, E]`.
        norm: of the residual stream at its end, `[2, E]`, see `outrider.runtime.norm.doubled`.
        head: `[V, E]`, or packed.
        head_bias: `[V]`.
        vocab_size: V.
    """

    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    packed: bool
    embedding: Tensor
    norm: Tensor
    head: Tensor
    head_bias: Tensor | None
    vocab_size: int


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Weights of one layer, linear ones `[out, in]` or packed, and what its attention asks for.

    Attributes:
        attention_norm: `[2, E]`, see `outrider.runtime.norm.doubled`; likewise `mlp_norm`.
        qkv: queries, keys and values in one, `[(H + KV + KV) · D, E]`; within the heads of queries and keys the pairs
            that are rotated lie side by side.
        head_norm: `[H + KV, 1, D]`, float32: norms of each query and key head, in that order too; None has none.
        output: `[E, H · D]`.
        gate_up: `[2 · I, E]`.
        down: `[E, I]`.
        scaling: of the scores.
        window: positions a row sees; 0 is all.
    """

    attention_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    head_norm: Tensor | None
    output: Tensor
    output_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    scaling: float
    window: int


class FusedLayers(nn.Module):
    """All of a decoder. What differs by layer lies in lists, as TorchScript wants it."""

    head_bias: Tensor | None
    attention_norm: list[Tensor]
    qkv: list[Tensor]
    qkv_bias: list[Tensor | None]
    head_norm: list[Tensor | None]
    output: list[Tensor]
    output_bias: list[Tensor | None]
    mlp_norm: list[Tensor]
    gate_up: list[Tensor]
    gate_up_bias: list[Tensor | None]
    down: list[Tensor]
    down_bias: list[Tensor | None]
    scaling: list[float]
    mask_kind: list[int]
    windows: list[int]

    def __init__(self, frame: Frame, layers: Sequence[LayerWeights]) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = frame.heads, frame.kv_heads, frame.head_dim
        self.eps, self.packed = frame.eps, frame.packed
        self.embedding, self.norm = frame.embedding, frame.norm
        self.head, self.head_bias = frame.head, frame.head_bias
        self.vocab_size = frame.vocab_size
        self.attention_norm = [layer.attention_norm for layer in layers]
        self.qkv = [layer.qkv for layer in layers]
        self.qkv_bias = [layer.qkv_bias for layer in layers]
        self.head_norm = [layer.head_norm for layer in layers]
        self.output = [layer.output for layer in layers]
        self.output_bias = [layer.output_bias for layer in layers]
        self.mlp_norm = [layer.mlp_norm for layer in layers]
        self.gate_up = [layer.gate_up for layer in layers]
        self.gate_up_bias = [layer.gate_up_bias for layer in layers]
        self.down = [layer.down for layer in layers]
        self.down_bias = [layer.down_bias for layer in layers]
        self.scaling = [layer.scaling for layer in layers]
        self.windows = sorted({layer.window for layer in layers})
        self.mask_kind = [self.windows.index(layer.window) for layer in layers]
        self.small = SMALL if frame.norm.device.type == "cpu" else 0
        self.signs = make_signs(frame.norm)
        self.exact_signs = self.signs.float()
        self.ones = torch.ones(2, frame.head_dim, device=frame.norm.device)

    def forward(
        self,
        token_ids: Tensor,
        rotations: Tensor,
        starts: list[int],
        counts: list[int],
        stores: list[Tensor],
        masks: list[list[Tensor]],
        last: int,
        rows: Tensor | None,
    ) -> Tensor:
        """Runs a pass.

        Args:
            token_ids: `[T]`.
            rotations: e^(i · angle) of all positions, `[max_length, 1, D/2]`, complex64.
            starts: the position of the first row of each chunk.
            counts: rows of each.
            stores: keys and values of each up to its last row, or further, `[layers, 2, kv_heads, end, head_dim]`.
            masks: for each of `windows`, of each chunk (`CausalMasks.for_rows`).
            last: how many rows at the end need logits, where `rows` is None.
            rows: indices of those that do.

        Returns:
            Logits `[R, V]`, float32.
        """
        x = torch.embedding(self.embedding, token_ids).unsqueeze(1)  # [T, 1, E]
        T, heads, kv_heads, head_dim = x.size(0), self.heads, self.kv_heads, self.head_dim
        width = (heads + 2 * kv_heads) * head_dim
        rotation = rotations.narrow(0, starts[0], counts[0])
        if len(counts) > 1:
            rotation = torch.cat([rotations.narrow(0, start, counts[i]) for i, start in enumerate(starts)])
        pool_dtype = stores[0].dtype
        by_layer = [store.unbind(0) for store in stores]
        for i in range(len(self.qkv)):
            qkv = self.queries_keys_values(i, x, rotation)
            at = heads * head_dim
            keys: list[Tensor] = []
            values: list[Tensor] = []
            for chunk, count in enumerate(counts):
                held = by_layer[chunk][i].narrow(2, 0, starts[chunk] + count)
                kv = qkv.as_strided([2, kv_heads, count, head_dim], [kv_heads * head_dim, head_dim, width, 1], at)
                held.narrow(2, starts[chunk], count).copy_(kv)
                at += count * width
                key, value = held.unsqueeze(2).unbind(0)
                keys.append(key)
                values.append(value)
            query = qkv.as_strided([T, heads, head_dim], [width, head_dim, 1]).to(pool_dtype)
            kind = self.mask_kind[i]
            attended = attend(query, counts, keys, values, masks[kind], self.scaling[i], self.windows[kind])
            x = self.after_attention(i, x, attended)
        if rows is not None:
            x = x.index_select(0, rows)
        elif last < T:
            x = x.narrow(0, T - last, last)
        return self.logits(x).float()

    def queries_keys_values(self, i: int, x: Tensor, rotation: Tensor) -> Tensor:
        """Of layer i and the residual stream `[T, 1, E]`: queries, keys and values side by side, `[T, 1, width]`.

        Positions and norms of heads are computed in float32, and so is the result.
        """
        normed = rms_norm(x, self.attention_norm[i], self.signs, self.eps, self.small)
        return self.rotated(i, linear(normed, self.qkv[i], self.qkv_bias[i], self.packed), rotation)

    def rotated(self, i: int, qkv: Tensor, rotation: Tensor) -> Tensor:
        """Of queries, keys and values of layer i, `[T, 1, width]`: the same, queries and keys normed and rotated.

        In float32; what it was given may be written over.
        """
        T, heads, kv_heads, head_dim = qkv.size(0), self.heads, self.kv_heads, self.head_dim
        rotated = heads + kv_heads
        width = (rotated + kv_heads) * head_dim
        qkv = qkv.float()
        head_norm = self.head_norm[i]
        if head_norm is not None:
            each = qkv.as_strided([T, rotated, 1, head_dim], [width, head_dim, head_dim, 1])
            each.copy_(rms_norm(each, self.ones, self.exact_signs, self.eps, self.small) * head_norm)
        pairs = qkv.as_strided([T, rotated, head_dim // 2, 2], [width, head_dim, 2, 1])
        torch.view_as_complex(pairs).mul_(rotation)
        return qkv

    def after_attention(self, i: int, x: Tensor, attended: Tensor) -> Tensor:
        """The residual stream after layer i, of the one before it and what was attended to, `[T, heads, head_dim]`."""
        attended = attended.to(x.dtype).reshape(x.size(0), 1, self.heads * self.head_dim)
        x = linear_add(x, attended, self.output[i], self.output_bias[i], self.packed)
        normed = rms_norm(x, self.mlp_norm[i], self.signs, self.eps, self.small)
        gate, up = linear(normed, self.gate_up[i], self.gate_up_bias[i], self.packed).chunk(2, -1)
        return linear_add(x, F.silu(gate).mul_(up), self.down[i], self.down_bias[i], self.packed)

    def logits(self, x: Tensor) -> Tensor:
        """Of the residual stream `[R, 1, E]` at its end, `[R, V]`."""
        if x.size(0) == 0:
            return x.new_empty([0, self.vocab_size])
        normed = rms_norm(x, self.norm, self.signs, self.eps, self.small)
        return linear(normed, self.head, self.head_bias, self.packed).squeeze(1)


def compiled(module: nn.Module, device: torch.device) -> Callable[..., Any]:
    """The module as TorchScript compiles it for a CPU; as it is elsewhere, or where this torch cannot."""
    if device.type != "cpu":  # there TorchScript compiles kernels of its own while passes run
        return module
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # it is what this torch has; without it all is the same
        try:
            script: Callable[..., Any] = torch.jit.script(module)
        except Exception:
            return module
    return script
