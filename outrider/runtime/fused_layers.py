"""The layers of the fused decoder as one function of tensors, from token ids to logits, with its products and norms.

On a CPU TorchScript compiles it: a forward pass is then one call without the Python interpreter and its lock, which
makes the whole service 1.3 to 1.5 times as fast. So this file uses only features of TorchScript. Results are the same
without compilation.
"""

import platform
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.runtime.sdpa import Location, attend_causal


@dataclass(frozen=True, slots=True)
class SharedWeights:
    """Sizes that all layers share, and the weights outside the layers.

    Attributes:
        heads: query heads, H.
        kv_heads: heads of keys and of values, KV.
        head_dim: size of each, D.
        eps: of all norms.
        packed: whether the weights of linear layers are packed, see `pack`.
        embedding: `[V, E]`.
        norm: the final norm, `[2, E]`, see `doubled`.
        head: `[V, E]`, in the form of the weights of `LayerWeights`.
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
    """Weights and attention parameters of one layer. Linear weights are `[out, in]`, or packed (see `pack`), or for
    the decoder in C `kernels.cpu_decoder.panels`.

    Attributes:
        attention_norm: `[2, E]`, see `doubled`; likewise `mlp_norm`.
        qkv: queries, keys and values in one, `[(H + KV + KV) · D, E]`; in the heads of queries and keys the elements of
            a rotated pair are neighbours.
        head_norm: `[H + KV, 1, D]`, float32: norm weights of each query and key head, in the same order; None: no head
            norms.
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
    """The whole decoder. Values of the layers are in lists, which TorchScript supports."""

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

    def __init__(self, shared: SharedWeights, layers: Sequence[LayerWeights]) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = shared.heads, shared.kv_heads, shared.head_dim
        self.eps, self.packed = shared.eps, shared.packed
        self.embedding, self.norm = shared.embedding, shared.norm
        self.head, self.head_bias = shared.head, shared.head_bias
        self.vocab_size = shared.vocab_size
        for each in fields(LayerWeights):
            if each.name != "window":
                setattr(self, each.name, [getattr(layer, each.name) for layer in layers])
        self.windows = sorted({layer.window for layer in layers})
        self.mask_kind = [self.windows.index(layer.window) for layer in layers]
        self.small = SMALL if shared.norm.device.type == "cpu" else 0
        self.signs = make_signs(shared.norm)
        self.exact_signs = self.signs.float()
        self.ones = torch.ones(2, shared.head_dim, device=shared.norm.device)

    def forward(
        self,
        token_ids: Tensor,
        rotations: Tensor,
        positions: Tensor,
        slots: Tensor,
        memory: Tensor,
        block_tokens: int,
        counts: list[int],
        locations: list[Location],
        masks: list[list[Tensor]],
        last: int,
        rows: Tensor | None,
    ) -> Tensor:
        """Runs a batch.

        Args:
            token_ids: `[T]`.
            rotations: e^(i · angle) of all positions, `[max_length, 1, D/2]`, complex64.
            positions: `[T]`, of each row in its sequence.
            slots: `[T]`: the position in memory of each row.
            memory: keys and values of all blocks, `[layers, 2, kv_heads, positions, head_dim]`.
            counts: rows of each chunk.
            locations: of each chunk.
            masks: per window in `windows`, the mask of each chunk (`sdpa.attend_causal`).
            last: how many rows at the end need logits, if `rows` is None.

        Returns:
            Logits `[R, V]`, float32.
        """
        x = torch.embedding(self.embedding, token_ids)  # [T, E]; oneDNN reshapes more dimensions in each call
        T, heads, kv_heads, head_dim = x.size(0), self.heads, self.kv_heads, self.head_dim
        width = (heads + 2 * kv_heads) * head_dim
        rotation = rotations.index_select(0, positions)
        for i, layer in enumerate(memory.unbind(0)):
            normed = rms_norm(x.unsqueeze(1), self.attention_norm[i], self.signs, self.eps, self.small).squeeze(1)
            qkv = linear(normed, self.qkv[i], self.qkv_bias[i], self.packed)
            qkv = self.rotated(i, qkv, rotation).to(memory.dtype)
            kv = qkv.as_strided([2, kv_heads, T, head_dim], [kv_heads * head_dim, head_dim, width, 1], heads * head_dim)
            layer.index_copy_(2, slots, kv)
            query = qkv.as_strided([T, heads, head_dim], [width, head_dim, 1])
            kind = self.mask_kind[i]
            attended = attend_causal(
                query, layer, counts, locations, masks[kind], block_tokens, self.scaling[i], self.windows[kind]
            )
            x = self.after_attention(i, x, attended)
        if rows is not None:
            x = x.index_select(0, rows)
        elif last < T:
            x = x.narrow(0, T - last, last)
        return self.logits(x.unsqueeze(1)).float()

    def rotated(self, i: int, qkv: Tensor, rotation: Tensor) -> Tensor:
        """Norms and rotates queries and keys of layer i; `qkv` is `[T, …, width]`, and so is the result, in float32.

        `qkv` may be overwritten.
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
        """The residual stream after layer i; `x` is the stream before it, `attended` is `[T, heads, head_dim]`."""
        attended = attended.to(x.dtype).reshape(x.size(0), self.heads * self.head_dim)
        x = linear_add(x, attended, self.output[i], self.output_bias[i], self.packed)
        normed = rms_norm(x.unsqueeze(1), self.mlp_norm[i], self.signs, self.eps, self.small).squeeze(1)
        gate, up = linear(normed, self.gate_up[i], self.gate_up_bias[i], self.packed).chunk(2, -1)
        return linear_add(x, F.silu(gate).mul_(up), self.down[i], self.down_bias[i], self.packed)

    def logits(self, x: Tensor) -> Tensor:
        """The logits `[R, V]` from the final residual stream `[R, 1, E]`."""
        if x.size(0) == 0:
            return x.new_empty([0, self.vocab_size])
        normed = rms_norm(x, self.norm, self.signs, self.eps, self.small).squeeze(1)
        return linear(normed, self.head, self.head_bias, self.packed)


def compiled(module: nn.Module, device: torch.device) -> Callable[..., Any]:
    """Compiles the module with TorchScript on a CPU. Returns it unchanged on other devices, and if that fails."""
    if device.type != "cpu":  # there TorchScript would compile kernels at run time
        return module
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a torch without TorchScript runs the module itself
        try:
            script: Callable[..., Any] = torch.jit.script(module)
        except Exception:
            return module
    return script


_PLAIN = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the installed torch can pack weights of this dtype on this device."""
    if device.type != "cpu" or platform.machine().lower() not in ("x86_64", "amd64"):
        return False
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def is_plain(module: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Whether a module is exactly of one of these classes, and neither quantised nor changed.

    Quantisation may appear as a subclass, as a weight that is not a plain tensor, as integers, as a hook, or as another
    `forward` of the module.
    """
    return type(module) in kinds and is_plain_tensor(getattr(module, "weight", None)) and not is_changed(module)


def is_plain_tensor(value: object) -> bool:
    """Whether a value is a tensor of floating-point numbers of 16 bits or more, not of a subclass of `Tensor`."""
    return type(value) in (Tensor, nn.Parameter) and value.dtype in _PLAIN  # type: ignore[attr-defined]


def is_changed(module: nn.Module) -> bool:
    """Whether a module has hooks, or a `forward` that is not that of its class."""
    return "forward" in vars(module) or bool(module._forward_hooks or module._forward_pre_hooks)


class Linear(NamedTuple):
    """A linear layer, or several in one: `[out, in]` and `[out]`; or the weight and bias of a norm."""

    weight: Tensor
    bias: Tensor | None


def merge(*modules: Any, order: Sequence[Tensor | None] = (None, None, None)) -> Linear:
    """Concatenates weights and biases of modules, 0 for a missing one, and removes them from the modules.

    The rows of each head are reordered by `order`, an entry for each module.
    """
    weights, biases = [], []
    for module, rows in zip(modules, order, strict=False):
        weight = module.weight.detach()
        weights.append(_reordered(weight, rows))
        biases.append(None if module.bias is None else _reordered(module.bias.detach(), rows))
        module.register_parameter("weight", None)
        module.register_parameter("bias", None)
    bias: Tensor | None = None
    if any(each is not None for each in biases):
        pairs = zip(weights, biases, strict=True)
        bias = torch.cat([weight.new_zeros(len(weight)) if own is None else own for weight, own in pairs])
    return Linear(weights[0] if len(weights) == 1 else torch.cat(weights), bias)


def _reordered(tensor: Tensor, order: Tensor | None) -> Tensor:
    """The first dimension, reordered within each head."""
    if order is None:
        return tensor
    heads = tensor.unflatten(0, (-1, len(order)))
    return heads.index_select(1, order.to(tensor.device)).flatten(0, 1)


def pack(weight: Tensor) -> Tensor:
    """A weight `[out, in]` in oneDNN's own layout, for `linear` and `linear_add` only."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous())
    return packed


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, packed: bool) -> Tensor:
    """Returns x Wᵀ + b: `[..., in]` to `[..., out]`. `packed` is whether `weight` is packed."""
    if packed:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


def linear_add(residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, packed: bool) -> Tensor:
    """Returns residual + x Wᵀ + b, `[..., out]`; with one operation, rounded once, if possible."""
    if packed:
        return torch.ops.mkldnn._linear_pointwise(x, residual, weight, bias, "add")
    if bias is None:
        return torch.addmm(residual.flatten(0, -2), x.flatten(0, -2), weight.t()).view_as(residual)
    return residual + F.linear(x, weight, bias)


class PackedModule(nn.Module):
    """A packed linear layer. Replaces a module with `weight` and `bias`.

    `weight` keeps shape and dtype for other code, but uses no memory. Its values are NaN: if other code multiplies by
    it, the self-check fails (`outrider.runtime.fused_decoder`).
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self._packed = pack(weight)
        self._bias = None if bias is None else bias.detach()
        self.weight = nn.Buffer(weight.new_full((1, 1), torch.nan).expand(weight.shape), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self._packed, self._bias, True)


SMALL = 16384
"""Elements up to which layer norm of the doubled input is faster on a CPU (measured)."""


def doubled(weight: Tensor) -> Tensor:
    """The weight `[2, n]` of `rms_norm`, from a weight `[n]`."""
    return weight.detach().expand(2, -1).contiguous()


def make_signs(like: Tensor) -> Tensor:
    """1 and -1, `[2, 1]`, in the dtype and on the device of `like`."""
    return torch.tensor([[1.0], [-1.0]], dtype=like.dtype, device=like.device)


def rms_norm(x: Tensor, weight: Tensor, signs: Tensor, eps: float, small: int) -> Tensor:
    """Returns x / √(mean(x²) + eps) · weight over the last dimension.

    On a CPU, torch runs eight operations for this, and one for layer norm. The pair (x, -x) has mean 0 and variance
    mean(x²), so its layer norm is the RMS norm of x.

    Args:
        x: `[..., 1, n]`.
        weight: `[2, n]`, see `doubled`.
        signs: see `make_signs`.
        small: the most elements of x for layer norm; above, torch's RMS norm is used.
    """
    n = x.size(-1)
    if x.numel() <= small:
        return F.layer_norm(x * signs, [2, n], weight, None, eps).narrow(-2, 0, 1)
    return torch.rms_norm(x, [n], weight.select(0, 0), eps)


class RMSNormModule(nn.Module):
    """`rms_norm` as a module."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight = nn.Buffer(weight.detach(), persistent=False)
        self._doubled = doubled(weight)
        self._signs = make_signs(weight)
        self._eps = eps
        self._small = SMALL if weight.device.type == "cpu" else 0

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x.unsqueeze(-2), self._doubled, self._signs, self._eps, self._small).squeeze(-2)
