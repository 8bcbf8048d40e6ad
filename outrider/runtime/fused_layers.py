"""A gated decoder as one function of tensors, from token ids to logits, with its products and norms.

TorchScript compiles it on a CPU: a pass is then one call without the interpreter and its lock, and the whole service
writes 1.3 to 1.5 times as fast. So this file keeps to what TorchScript understands; uncompiled it does the same.
"""

import platform
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.runtime.sdpa import attend


@dataclass(frozen=True, slots=True)
class Frame:
    """What surrounds the layers, and what they share.

    Attributes:
        heads: query heads, H.
        kv_heads: heads of keys and of values, KV.
        head_dim: size of each, D.
        eps: of all norms.
        packed: whether the weights of linear layers are packed (`outrider.runtime.fused_layers`).
        embedding: `[V, E]`.
        norm: of the residual stream at its end, `[2, E]`, see `outrider.runtime.fused_layers.doubled`.
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
        attention_norm: `[2, E]`, see `outrider.runtime.fused_layers.doubled`; likewise `mlp_norm`.
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


_PLAIN = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this torch packs weights of such a kind."""
    if device.type != "cpu" or platform.machine().lower() not in ("x86_64", "amd64"):
        return False
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def is_plain(module: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Whether a module is of just that kind, its weight plain numbers: neither quantised nor changed from outside.

    Quantisation comes as a subclass, as a weight that is no plain tensor inside an ordinary module, as integers, as a
    hook, or as another `forward` on the module itself.
    """
    return type(module) in kinds and is_plain_tensor(getattr(module, "weight", None)) and not is_changed(module)


def is_plain_tensor(value: object) -> bool:
    """Whether it is a tensor of floating-point numbers of 16 bits or more, and no subclass of one."""
    return type(value) in (Tensor, nn.Parameter) and value.dtype in _PLAIN  # type: ignore[attr-defined]


def is_changed(module: nn.Module) -> bool:
    """Whether someone put a hook on a module, or a `forward` of its own."""
    return "forward" in vars(module) or bool(module._forward_hooks or module._forward_pre_hooks)


def pack(weight: Tensor) -> Tensor:
    """A weight `[out, in]` in oneDNN's layout: opaque, for `linear` and `linear_add` alone."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous())
    return packed


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, packed: bool) -> Tensor:
    """The product x Wᵀ + b: `[..., in]` to `[..., out]`. `packed` says what `weight` is."""
    if packed:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


def linear_add(residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, packed: bool) -> Tensor:
    """The sum residual + x Wᵀ + b, rounded once where one operation can: `[T, 1, out]`."""
    if packed:
        return torch.ops.mkldnn._linear_pointwise(x, residual, weight, bias, "add")
    if bias is None:
        return torch.addmm(residual.flatten(0, 1), x.flatten(0, 1), weight.t()).view_as(residual)
    return residual + F.linear(x, weight, bias)


class PackedModule(nn.Module):
    """A packed linear layer in the place of a module that held `weight` and `bias`.

    `weight` keeps the shape and dtype that other code may ask for, and no memory. Its numbers are none, so that code
    which multiplies by it shows in the self-check (`outrider.runtime.fused_decoder`).
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self._packed = pack(weight)
        self._bias = None if bias is None else bias.detach()
        self.weight = nn.Buffer(weight.new_full((1, 1), torch.nan).expand(weight.shape), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self._packed, self._bias, True)


SMALL = 16384
"""Elements up to which the doubled form of the norm is the faster one on a CPU (measured)."""


def doubled(weight: Tensor) -> Tensor:
    """A weight `[n]` as `rms_norm` takes it: `[2, n]`."""
    return weight.detach().expand(2, -1).contiguous()


def make_signs(like: Tensor) -> Tensor:
    """1 and -1, `[2, 1]`, in the dtype and on the device of `like`."""
    return torch.tensor([[1.0], [-1.0]], dtype=like.dtype, device=like.device)


def rms_norm(x: Tensor, weight: Tensor, signs: Tensor, eps: float, small: int) -> Tensor:
    """The norm x / √(mean(x²) + eps) · weight over the last dimension.

    torch's CPU build composes this of eight operations, but has layer norm in one. Over x beside -x the mean is 0 and
    the variance is mean(x²), so layer norm of that pair is the norm we want.

    Args:
        x: `[..., 1, n]`.
        weight: `[2, n]`, see `doubled`.
        signs: see `make_signs`.
        eps: added to the mean square.
        small: elements of x up to which to do so; beyond, torch's own norm.
    """
    n = x.size(-1)
    if x.numel() <= small:
        return F.layer_norm(x * signs, [2, n], weight, None, eps).narrow(-2, 0, 1)
    return torch.rms_norm(x, [n], weight.select(0, 0), eps)


class RMSNormModule(nn.Module):
    """An `rms_norm` in the place of a module.

    Args:
        weight: `[n]`.
        eps: added to the mean square.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight = nn.Buffer(weight.detach(), persistent=False)
        self._doubled = doubled(weight)
        self._signs = make_signs(weight)
        self._eps = eps
        self._small = SMALL if weight.device.type == "cpu" else 0

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x.unsqueeze(-2), self._doubled, self._signs, self._eps, self._small).squeeze(-2)
