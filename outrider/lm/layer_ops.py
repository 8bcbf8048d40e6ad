"""What a decoder over pages does between its products, as torch's operations or as one Triton kernel for each step.

It knows the weights of a layer and the tensors of a pass (`outrider.lm.paged`). It does not know the products, nor
attention, nor which of the two is to run: that is for `outrider.lm.layer_choice`.
"""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.lm.gated_layers import GatedLayers
from outrider.lm.norm import rms_norm
from outrider.lm.paged import PagedBatch


class LayerOps(Protocol):
    """The steps of one decoder's layers. None of them waits for the device or asks it for a number."""

    name: str

    def angles(self, rotations: Tensor, positions: Tensor) -> Tensor:
        """What `queries` needs of a pass's positions, made once for all layers.

        Args:
            rotations: e^(i · angle) of all positions there may be, `[max_length, 1, D/2]`, complex64.
            positions: int64 `[T]`.
        """

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """The norm of the residual stream `[T, 1, E]`, by a weight `[2, E]` (`outrider.lm.norm.doubled`)."""

    def queries(self, i: int, qkv: Tensor, angles: Tensor, batch: PagedBatch) -> Tensor:
        """Rotates queries and keys of layer i, after their norms where it has any, and writes keys and values.

        Args:
            i: the layer.
            qkv: its product, `[T, 1, (H + 2 · KV) · D]`; it may be written over.
            angles: see `angles`.
            batch: the pass, whose pages are written.

        Returns:
            The queries, `[T, H, D]`, in the dtype of the pages.
        """

    def gated(self, gate_up: Tensor) -> Tensor:
        """The product silu(gate) · up, element by element: `[T, 1, 2 · I]` to `[T, 1, I]`."""


class TorchOps:
    """Torch's own operations, as `GatedLayers.forward` has them."""

    name = "torch"

    def __init__(self, layers: GatedLayers) -> None:
        self._layers = layers

    def angles(self, rotations: Tensor, positions: Tensor) -> Tensor:
        """See `LayerOps`: those of each row."""
        return rotations.index_select(0, positions)

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """See `LayerOps`."""
        layers = self._layers
        return rms_norm(x, weight, layers.signs, layers.eps, layers.small)

    def queries(self, i: int, qkv: Tensor, angles: Tensor, batch: PagedBatch) -> Tensor:
        """See `LayerOps`."""
        layers = self._layers
        turned = layers.rotated(i, qkv, angles).view(len(qkv), -1, layers.head_dim)
        query, keys, values = turned.split([layers.heads, layers.kv_heads, layers.kv_heads], 1)
        batch.write(i, keys, values)
        return query.to(batch.memory.keys[i].dtype)

    def gated(self, gate_up: Tensor) -> Tensor:
        """See `LayerOps`."""
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)


class TritonOps:
    """The kernels of `kernels.triton_layers`.

    Raises:
        ImportError: triton is not installed.
    """

    name = "triton"

    def __init__(self, layers: GatedLayers) -> None:
        from kernels import triton_layers  # triton need not be installed, nor be imported where it does not run

        self._layers = layers
        self._kernels = triton_layers

    def angles(self, rotations: Tensor, positions: Tensor) -> Tensor:
        """See `LayerOps`: those of all positions, as the kernel finds a row's itself."""
        return torch.view_as_real(rotations)

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """See `LayerOps`."""
        return self._kernels.rms_norm(x, weight.select(0, 0), self._layers.eps)

    def queries(self, i: int, qkv: Tensor, angles: Tensor, batch: PagedBatch) -> Tensor:
        """See `LayerOps`."""
        layers = self._layers
        return self._kernels.rotate_and_store(
            qkv,
            angles,
            batch.positions,
            batch.places,
            batch.memory.keys[i],
            batch.memory.values[i],
            layers.head_norm[i],
            heads=layers.heads,
            kv_heads=layers.kv_heads,
            eps=layers.eps,
        )

    def gated(self, gate_up: Tensor) -> Tensor:
        """See `LayerOps`."""
        return self._kernels.gated(gate_up)
