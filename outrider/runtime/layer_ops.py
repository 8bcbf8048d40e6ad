"""A fused decoder over pages: its layers' steps between their products, as torch's operations or as Triton's kernels.

Nothing in it waits for the device, or depends on numbers that lie there: a CUDA graph may hold it. A model runs by
Triton's kernels where these give what torch's operations give, which is checked at the start.
"""

from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import embedding

from outrider.runtime.batch import PagedBatch, to_device
from outrider.runtime.fused_layers import FusedLayers, linear, linear_add, rms_norm
from outrider.runtime.paged_attention import attend_eager
from outrider.runtime.sdpa import Scoring
from outrider.runtime.selfcheck import Refusal, check, operation_tolerance, random_pass


class LayerOps:
    """The steps, as torch's own operations. None of them waits for the device or asks it for a number.

    Args:
        layers: of the decoder, on their device.
        reason: why they run so, in a few words, for the log.
    """

    name = "torch"

    def __init__(self, layers: FusedLayers, reason: str) -> None:
        self.layers = layers
        self.reason = reason

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """The norm of the residual stream `[T, 1, E]`, by a weight `[2, E]` (`fused_layers.doubled`)."""
        return rms_norm(x, weight, self.layers.signs, self.layers.eps, self.layers.small)

    def queries(self, i: int, qkv: Tensor, rotations: Tensor, batch: PagedBatch) -> Tensor:
        """Rotates queries and keys of layer i, after their norms where it has any, and writes keys and values.

        Args:
            i: the layer.
            qkv: its product, `[T, 1, (H + 2 · KV) · D]`; it may be written over.
            rotations: e^(i · angle) of all positions there may be, `[max_length, 1, D/2]`, complex64.
            batch: the pass, whose pages are written.

        Returns:
            The queries, `[T, H, D]`, in the dtype of the pages.
        """
        layers = self.layers
        rotated = layers.rotated(i, qkv, rotations.index_select(0, batch.positions))
        heads = rotated.view(len(qkv), -1, layers.head_dim)
        query, keys, values = heads.split([layers.heads, layers.kv_heads, layers.kv_heads], 1)
        batch.write(i, keys, values)
        return query.to(batch.memory.keys[i].dtype)

    def gated(self, gate_up: Tensor) -> Tensor:
        """The product silu(gate) · up, element by element: `[T, 1, 2 · I]` to `[T, 1, I]`."""
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)


class TritonOps(LayerOps):
    """The same as the kernels of `kernels.triton_layers`."""

    name = "triton"

    def __init__(self, layers: FusedLayers, reason: str) -> None:
        super().__init__(layers, reason)
        from kernels import triton_layers  # triton need not be installed, nor be imported where it does not run

        self._kernels = triton_layers

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._kernels.rms_norm(x, weight.select(0, 0), self.layers.eps)

    def queries(self, i: int, qkv: Tensor, rotations: Tensor, batch: PagedBatch) -> Tensor:
        layers, memory = self.layers, batch.memory
        return self._kernels.rotate_and_store(
            qkv,
            torch.view_as_real(rotations),
            batch.positions,
            batch.places,
            memory.keys[i],
            memory.values[i],
            layers.head_norm[i],
            heads=layers.heads,
            kv_heads=layers.kv_heads,
            eps=layers.eps,
        )

    def gated(self, gate_up: Tensor) -> Tensor:
        return self._kernels.gated(gate_up)


def run_paged(ops: LayerOps, batch: PagedBatch, rotations: Tensor, rows: Tensor | None) -> Tensor:
    """Runs a pass.

    Args:
        ops: of the decoder.
        batch: the pass.
        rotations: see `LayerOps.queries`.
        rows: indices of the rows that need logits, `[R]`; None is all.

    Returns:
        Logits `[R, V]`.
    """
    layers = ops.layers
    x = embedding(batch.tokens, layers.embedding).unsqueeze(1)  # [T, 1, E]
    packed = layers.packed
    for i in range(len(layers.qkv)):
        normed = ops.norm(x, layers.attention_norm[i])
        query = ops.queries(i, linear(normed, layers.qkv[i], layers.qkv_bias[i], packed), rotations, batch)
        pages = batch.memory.keys[i], batch.memory.values[i]
        scoring = Scoring(layers.scaling[i], layers.windows[layers.mask_kind[i]])
        attended = batch.attention(query, *pages, batch, scoring).to(x.dtype).reshape(len(x), 1, -1)
        x = linear_add(x, attended, layers.output[i], layers.output_bias[i], packed)
        normed = ops.norm(x, layers.mlp_norm[i])
        gated = ops.gated(linear(normed, layers.gate_up[i], layers.gate_up_bias[i], packed))
        x = linear_add(x, gated, layers.down[i], layers.down_bias[i], packed)
    return layers.logits(x if rows is None else x.index_select(0, rows))


def choose_layer_ops(layers: FusedLayers, dtype: torch.dtype) -> LayerOps:
    """What a decoder's layers run by over pages of a dtype.

    Triton's kernels are compiled and checked here, on shapes and weights of the model, which takes seconds at the first
    start.
    """
    why = _obstacle(layers.embedding.device) or check_layer_ops(layers, dtype)
    if why:
        return LayerOps(layers, f"no kernels of Triton: {why}")
    return TritonOps(layers, "Triton's kernels give what torch's operations do")


def _obstacle(device: torch.device) -> str:
    if device.type != "cuda":
        return f"they need a CUDA device, and this is {device.type}"
    return "" if find_spec("triton") else "triton is not installed"


# ------------------------------------------------------------------------------------------------------------ trial

_SPANS = ((0, 1), (40, 6), (15, 2))  # (positions held before, rows) of each sequence
_LONGEST = 48


@torch.inference_mode()
def check_layer_ops(layers: FusedLayers, dtype: torch.dtype) -> Refusal | None:
    """Holds each of Triton's kernels to torch's operations, in shapes of the model, over pages of a dtype."""
    device = layers.embedding.device
    layout, memory = random_pass(_SPANS, layers.kv_heads, layers.head_dim, dtype, device)
    batch = to_device(layout, memory, attend_eager, device)

    def results(kind: type[LayerOps]) -> dict[str, Tensor]:
        ops, generator = kind(layers, "on trial"), torch.Generator().manual_seed(layers.head_dim)

        def numbers(width: int) -> Tensor:
            random = torch.randn(len(batch.tokens), 1, width, generator=generator)
            return random.to(device, layers.embedding.dtype)

        phases = torch.randn(_LONGEST, 1, layers.head_dim // 2, generator=generator) * 3
        rotations = torch.polar(torch.ones_like(phases), phases).to(device)
        pages = (memory.keys[0].zero_(), memory.values[0].zero_())
        width = (layers.heads + 2 * layers.kv_heads) * layers.head_dim
        return {
            "norms": ops.norm(numbers(layers.embedding.size(1)), layers.attention_norm[0]),
            "queries": ops.queries(0, numbers(width), rotations, batch),
            "gates": ops.gated(numbers(layers.gate_up[0].size(0))),
            "keys": pages[0].clone(),
            "values": pages[1].clone(),
        }

    tolerance = operation_tolerance(layers.embedding.dtype)
    return check(lambda: results(TritonOps), lambda: results(LayerOps), tolerance)
