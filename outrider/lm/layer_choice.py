"""What the layers of a decoder over pages run as, and why: Triton's kernels where they give what torch's operations do.

It knows what a device can run, and nothing of pools' sizes or of passes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor

from outrider.lm.chunk import Chunk
from outrider.lm.gated_layers import GatedLayers
from outrider.lm.kv_pool import BLOCK_TOKENS, KVPool
from outrider.lm.layer_ops import LayerOps, TorchOps, TritonOps
from outrider.lm.paged import PagedBatch, lay_out, to_device
from outrider.lm.paged_attention import GatheredAttention

# What is tried: (positions held before, rows) of each sequence.
_TRIED = ((0, 1), (40, 6), (15, 2))
_LONGEST = 48

# How far a result may lie from torch's, in sizes of the largest number there. A step of rounding in bfloat16 is 2^-8.
_CLOSE = {torch.float32: 1e-4}
_CLOSE_HALF = 0.02


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


def choose_layer_ops(layers: GatedLayers, dtype: torch.dtype) -> LayerChoice:
    """The operations of a decoder's layers over pages.

    Triton's are compiled and tried here, on shapes and weights of the model, which takes seconds at the first start.

    Args:
        layers: of the decoder, on their device.
        dtype: of keys and values.
    """
    why = _obstacle(layers)
    if not why:
        why = try_out(TritonOps, layers, dtype)
    if why:
        return LayerChoice(TorchOps(layers), f"no kernels of Triton: {why}")
    return LayerChoice(TritonOps(layers), "they give what torch's operations do")


def _obstacle(layers: GatedLayers) -> str:
    device = layers.embedding.device
    if device.type != "cuda":
        return f"they need a CUDA device, and this is {device.type}"
    if find_spec("triton") is None:
        return "triton is not installed"
    return ""


@torch.inference_mode()
def try_out(kind: Callable[[GatedLayers], LayerOps], layers: GatedLayers, dtype: torch.dtype) -> str:
    """Why operations cannot be used, or nothing: each is held to torch's, in shapes of the model.

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
    batch = to_device(lay_out(chunks, pool), pool.pages, GatheredAttention(_LONGEST, dtype, device), device)
    try:
        found = _results(kind(layers), layers, batch)
    except Exception as error:
        words = (str(error).splitlines() or [""])[0]
        return f"tried, {type(error).__name__}: {words}"
    allowed = _CLOSE.get(layers.embedding.dtype, _CLOSE_HALF)
    for name, wanted in _results(TorchOps(layers), layers, batch).items():
        distance = float((found[name] - wanted).abs().max() / wanted.abs().max())
        if not distance <= allowed:
            return f"tried, {name} differ by {distance:.2g} of their size from torch's, {allowed} allowed"
    return ""


def _results(ops: LayerOps, layers: GatedLayers, batch: PagedBatch) -> dict[str, Tensor]:
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
