"""A fused decoder over pages: what its layers do between their products, as torch's operations or as Triton's kernels.

Nothing in it waits for the device, or depends on numbers that lie there: a CUDA graph may hold it. Triton's kernels run
where they give what torch's operations give, which is tried at the start. It does not know the products, nor attention.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import embedding

from outrider.runtime.batch import Chunk
from outrider.runtime.fused_layers import FusedLayers
from outrider.runtime.kv_pool import BLOCK_TOKENS, KVPool
from outrider.runtime.linear import linear, linear_add
from outrider.runtime.norm import rms_norm
from outrider.runtime.paged import PagedBatch, lay_out, to_device
from outrider.runtime.paged_attention import attend_eager
from outrider.runtime.scores import Scoring
from outrider.runtime.selfcheck import Refusal, check, operation_tolerance


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
        """The norm of the residual stream `[T, 1, E]`, by a weight `[2, E]` (`outrider.runtime.norm.doubled`)."""

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
    """Torch's own operations, as `FusedLayers.forward` has them."""

    name = "torch"

    def __init__(self, layers: FusedLayers) -> None:
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

    def __init__(self, layers: FusedLayers) -> None:
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


def run_paged(layers: FusedLayers, ops: LayerOps, batch: PagedBatch, rotations: Tensor, rows: Tensor | None) -> Tensor:
    """Runs a pass.

    Args:
        layers: of the decoder.
        ops: what they do between their products.
        batch: the pass.
        rotations: e^(i · angle) of all positions there may be, `[max_length, 1, D/2]`, complex64.
        rows: indices of the rows that need logits, `[R]`; None is all.

    Returns:
        Logits `[R, V]`.
    """
    x = embedding(batch.tokens, layers.embedding).unsqueeze(1)  # [T, 1, E]
    angles, packed = ops.angles(rotations, batch.positions), layers.packed
    for i in range(len(layers.qkv)):
        normed = ops.norm(x, layers.attention_norm[i])
        query = ops.queries(i, linear(normed, layers.qkv[i], layers.qkv_bias[i], packed), angles, batch)
        pages = batch.memory.keys[i], batch.memory.values[i]
        scoring = Scoring(layers.scaling[i], layers.windows[layers.mask_kind[i]])
        attended = batch.attention(query, *pages, batch, scoring)
        attended = attended.to(x.dtype).reshape(len(x), 1, -1)
        x = linear_add(x, attended, layers.output[i], layers.output_bias[i], packed)
        normed = ops.norm(x, layers.mlp_norm[i])
        gated = ops.gated(linear(normed, layers.gate_up[i], layers.gate_up_bias[i], packed))
        x = linear_add(x, gated, layers.down[i], layers.down_bias[i], packed)
    return layers.logits(x if rows is None else x.index_select(0, rows))


# What is tried: (positions held before, rows) of each sequence.
_TRIED = ((0, 1), (40, 6), (15, 2))
_LONGEST = 48


@dataclass(frozen=True, slots=True)
class LayerChoice:
    """What lies between the products of the layers.

    Attributes:
        ops: the operations.
        reason: why these, in a few words, for the log.
    """

    ops: LayerOps
    reason: str

    @property
    def name(self) -> str:
        """In one word, for the log: `triton` or `torch`."""
        return self.ops.name


def choose_layer_ops(layers: FusedLayers, dtype: torch.dtype) -> LayerChoice:
    """The operations of a decoder's layers over pages.

    Triton's are compiled and tried here, on shapes and weights of the model, which takes seconds at the first start.

    Args:
        layers: of the decoder, on their device.
        dtype: of keys and values.
    """
    why = _obstacle(layers) or try_out(TritonOps, layers, dtype)
    if why:
        return LayerChoice(TorchOps(layers), f"no kernels of Triton: {why}")
    return LayerChoice(TritonOps(layers), "they give what torch's operations do")


def _obstacle(layers: FusedLayers) -> str:
    device = layers.embedding.device
    if device.type != "cuda":
        return f"they need a CUDA device, and this is {device.type}"
    if find_spec("triton") is None:
        return "triton is not installed"
    return ""


@torch.inference_mode()
def try_out(kind: Callable[[FusedLayers], LayerOps], layers: FusedLayers, dtype: torch.dtype) -> Refusal | None:
    """Why operations cannot be used, or None: each is held to torch's, in shapes of the model.

    Args:
        kind: makes the operations.
        layers: see `choose_layer_ops`; the first one's weights are used.
        dtype: of keys and values.
    """
    device = layers.embedding.device
    pool = KVPool(
        1, layers.kv_heads, layers.head_dim,
        blocks=sum(-(-(start + count) // BLOCK_TOKENS) for start, count in _TRIED),
        max_length=_LONGEST, dtype=dtype, device=device, paged=True,
    )  # fmt: skip
    assert pool.pages is not None
    chunks = []
    for start, count in _TRIED:
        slot = pool.allocate()
        pool.grow(slot, start + count)
        pool.extend(slot, start)
        chunks.append(Chunk(slot, [0] * count, start, 0))
    batch = to_device(lay_out(chunks, pool), pool.pages, attend_eager, device)
    return check(
        lambda: _results(kind(layers), layers, batch),
        lambda: _results(TorchOps(layers), layers, batch),
        operation_tolerance(layers.embedding.dtype),
    )


def _results(ops: LayerOps, layers: FusedLayers, batch: PagedBatch) -> dict[str, Tensor]:
    """What the operations make of random numbers, always the same: float32, on the CPU."""
    generator = torch.Generator().manual_seed(layers.head_dim)
    like = layers.embedding
    rows, width = len(batch.tokens), (layers.heads + 2 * layers.kv_heads) * layers.head_dim
    both = layers.gate_up[0].size(0)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(like.device, like.dtype)

    phases = torch.randn(_LONGEST, 1, layers.head_dim // 2, generator=generator) * 3
    rotations = torch.polar(torch.ones_like(phases), phases).to(like.device)
    pages = (batch.memory.keys[0], batch.memory.values[0])
    for each in pages:
        each.zero_()
    found = {
        "norms": ops.norm(numbers(rows, 1, like.size(1)), layers.attention_norm[0]),
        "queries": ops.queries(0, numbers(rows, 1, width), ops.angles(rotations, batch.positions), batch),
        "gates": ops.gated(numbers(rows, 1, both)),
        "keys": pages[0],
        "values": pages[1],
    }
    return {name: each.float().cpu().clone() for name, each in found.items()}
