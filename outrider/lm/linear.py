"""Linear layers for few rows at a time: weights packed once into oneDNN's own layout where torch can, plain elsewhere.

On a CPU torch's `linear` in bfloat16 lays the weights out anew at every call; with a handful of rows that costs as much
as the product. It knows nothing of models.
"""

import platform
from typing import Protocol

import torch
from torch import Tensor, nn

_NO_SCALARS: list[float] = []


class Linear(Protocol):
    """x Wᵀ + b."""

    def __call__(self, x: Tensor) -> Tensor:
        """`[..., in]` to `[..., out]`."""

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """`residual + x Wᵀ + b` in one operation: `[..., out]`."""


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this torch packs weights of such a kind."""
    if device.type != "cpu" or platform.machine().lower() not in ("x86_64", "amd64"):
        return False
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def make_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """A linear layer of `weight` `[out, in]` and `bias` `[out]`."""
    if can_pack(weight.dtype, weight.device):
        return PackedLinear(weight, bias)
    return PlainLinear(weight, bias)


class PlainLinear:
    """As torch does it."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight
        self._transposed = weight.t()
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return torch._C._nn.linear(x, self._weight, self._bias)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        if self._bias is not None:
            return residual + torch._C._nn.linear(x, self._weight, self._bias)
        flat = torch.addmm(residual.flatten(0, -2), x.flatten(0, -2), self._transposed)
        return flat.view(residual.shape)


class PackedLinear:
    """oneDNN's inner product over weights in its own layout, with the residual added before rounding."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous())
        self._bias = None if bias is None else bias.detach()
        # Bound here once: looking the overload up costs a microsecond a call.
        self._linear = torch.ops.mkldnn._linear_pointwise.default._op
        self._linear_add = torch.ops.mkldnn._linear_pointwise.binary._op

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = self._linear(x, self._weight, self._bias, "none", _NO_SCALARS, "")
        return out

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        out: Tensor = self._linear_add(x, residual, self._weight, self._bias, "add")
        return out


class PackedModule(nn.Module):
    """A packed linear layer in the place of a module that held `weight` and `bias`.

    `weight` keeps the shape and dtype that other code may ask for, and no memory.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self._packed = PackedLinear(weight, bias)
        self.weight = nn.Buffer(weight.new_zeros(1, 1).expand(weight.shape), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self._packed(x)
