"""Linear layers for few rows at a time: weights packed once into oneDNN's own layout where torch can, plain elsewhere.

On a CPU torch's `linear` in bfloat16 lays the weights out anew at every call; with a handful of rows that costs as much
as the product. It knows nothing of models. `linear` and `linear_add` keep to what TorchScript can compile.
"""

import platform

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
    which multiplies by it shows in the self-check (`outrider.runtime.fusion`).
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self._packed = pack(weight)
        self._bias = None if bias is None else bias.detach()
        self.weight = nn.Buffer(weight.new_full((1, 1), torch.nan).expand(weight.shape), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self._packed, self._bias, True)
