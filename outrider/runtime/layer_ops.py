"""The fused decoder over block tables: norms, rotation and gates as torch operations or Triton kernels.

No operation waits for the device, so a CUDA graph can hold a whole step. The Triton kernels run if they agree with
the torch operations; `choose_layer_ops` checks this at the start. A batch of a few rows has its matrix products in
Triton, too, with norms, gates and residual sums inside them.
"""

from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import embedding

from outrider.runtime.batch import PagedBatch, to_device
from outrider.runtime.fused_layers import FusedLayers, linear, linear_add, rms_norm
from outrider.runtime.paged_attention import attend_eager
from outrider.runtime.sdpa import Scoring
from outrider.runtime.selfcheck import Refusal, check, operation_tolerance, random_batch

if TYPE_CHECKING:
    from kernels.triton_products import Stream


class LayerOps:
    """The decoder with operations in torch. None of them waits for the device.

    Args:
        reason: why these operations were chosen, for the log.
    """

    name = "torch"

    def __init__(self, layers: FusedLayers, reason: str) -> None:
        self.layers = layers
        self.reason = reason

    def run(self, batch: PagedBatch, rotations: Tensor, rows: Tensor | None) -> Tensor:
        """Runs a batch.

        Args:
            rotations: see `queries`.
            rows: indices of the rows that need logits, `[R]`; None is all rows.

        Returns:
            Logits `[R, V]`; of all rows in `batch.logits`, if that is given and the weights are not packed.
        """
        layers = self.layers
        x = embedding(batch.tokens, layers.embedding).unsqueeze(1)  # [T, 1, E]
        packed = layers.packed
        for i in range(len(layers.qkv)):
            normed = self.norm(x, layers.attention_norm[i])
            qkv = linear(normed, layers.qkv[i], layers.qkv_bias[i], packed)
            attended = self.attend(i, self.queries(i, qkv, rotations, batch), batch).to(x.dtype).reshape(len(x), 1, -1)
            x = _add_product(x, attended, layers.output[i], layers.output_bias[i], packed)
            normed = self.norm(x, layers.mlp_norm[i])
            gated = self.gated(linear(normed, layers.gate_up[i], layers.gate_up_bias[i], packed))
            x = _add_product(x, gated, layers.down[i], layers.down_bias[i], packed)
        x = x if rows is None else x.index_select(0, rows)
        if not len(x):
            return x.new_empty(0, layers.vocab_size)
        normed = self.norm(x, layers.norm)
        return _head(layers, normed.squeeze(1), batch.logits if rows is None else None)

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """The norm of the residual stream `[T, 1, E]`, with a weight `[2, E]` (`fused_layers.doubled`)."""
        return rms_norm(x, weight, self.layers.signs, self.layers.eps, self.layers.small)

    def queries(self, i: int, qkv: Tensor, rotations: Tensor, batch: PagedBatch) -> Tensor:
        """Norms (if the layer has head norms) and rotates queries and keys of layer i; writes keys and values.

        Args:
            qkv: `[T, 1, (H + 2 · KV) · D]`; may be overwritten.
            rotations: e^(i · angle) of all positions, `[max_length, 1, D/2]`, complex64.
            batch: keys and values are written to its `slot_mapping`.

        Returns:
            The queries, `[T, H, D]`, in the dtype of the KV cache.
        """
        layers = self.layers
        rotated = layers.rotated(i, qkv, rotations.index_select(0, batch.positions))
        heads = rotated.view(len(qkv), -1, layers.head_dim)
        query, keys, values = heads.split([layers.heads, layers.kv_heads, layers.kv_heads], 1)
        batch.write(i, keys, values)
        return query.to(batch.memory.keys[i].dtype)

    def attend(self, i: int, query: Tensor, batch: PagedBatch) -> Tensor:
        """The attention of layer i, `[T, H, D]`."""
        keys, values = batch.memory.keys[i], batch.memory.values[i]
        scoring = Scoring(self.layers.scaling[i], self.layers.windows[self.layers.mask_kind[i]])
        return batch.attention(query, keys, values, batch, scoring)

    def gated(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate) · up: `[T, 1, 2 · I]` to `[T, 1, I]`."""
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)


class TritonOps(LayerOps):
    """The operations as kernels of `kernels.triton_layers`."""

    name = "triton"

    def __init__(self, layers: FusedLayers, reason: str) -> None:
        super().__init__(layers, reason)
        from kernels import triton_layers  # triton is optional

        self._kernels = triton_layers

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._kernels.rms_norm(x, weight.select(0, 0), self.layers.eps)

    def queries(self, i: int, qkv: Tensor, rotations: Tensor, batch: PagedBatch) -> Tensor:
        layers, memory = self.layers, batch.memory
        return self._kernels.rotate_and_store(
            qkv,
            torch.view_as_real(rotations),
            batch.positions,
            batch.slot_mapping,
            memory.keys[i],
            memory.values[i],
            layers.head_norm[i],
            heads=layers.heads,
            kv_heads=layers.kv_heads,
            eps=layers.eps,
        )

    def gated(self, gate_up: Tensor) -> Tensor:
        return self._kernels.gated(gate_up)


class ProductOps(TritonOps):
    """The operations as kernels, and for a few rows the products around them (`kernels.triton_products`)."""

    def __init__(self, layers: FusedLayers, reason: str) -> None:
        super().__init__(layers, reason)
        from kernels import triton_products

        self.products = triton_products

    def run(self, batch: PagedBatch, rotations: Tensor, rows: Tensor | None) -> Tensor:
        """See `LayerOps.run`. In a batch of a few rows a row has the same bits whichever others there are."""
        if len(batch.tokens) > self.products.MOST_ROWS:
            return super().run(batch, rotations, rows)
        layers, eps = self.layers, self.layers.eps
        norms = [each.select(0, 0) for each in (*layers.attention_norm, layers.norm)]
        stream = self.products.embed(batch.tokens, layers.embedding, norms[0])
        for i in range(len(layers.qkv)):
            attended = self.attend(i, self._queries(i, stream, rotations, batch), batch).to(stream.values.dtype)
            mlp_norm = layers.mlp_norm[i].select(0, 0)
            stream = self.products.add_product(
                stream, attended.flatten(1), layers.output[i], layers.output_bias[i], mlp_norm
            )
            gated = self.products.normed_product(stream, layers.gate_up[i], layers.gate_up_bias[i], eps, gated=True)
            stream = self.products.add_product(stream, gated, layers.down[i], layers.down_bias[i], norms[i + 1])
        out = batch.logits if rows is None else None
        logits = self.products.normed_product(stream, layers.head, layers.head_bias, eps, out=out)
        return logits if rows is None else logits.index_select(0, rows)

    def _queries(self, i: int, stream: "Stream", rotations: Tensor, batch: PagedBatch) -> Tensor:
        """See `queries`, after the product."""
        layers, memory = self.layers, batch.memory
        weight, bias = layers.qkv[i], layers.qkv_bias[i]
        if layers.head_norm[i] is not None or not self.products.can_rotate(layers.head_dim):
            qkv = self.products.normed_product(stream, weight, bias, layers.eps)
            return self.queries(i, qkv, rotations, batch)
        return self.products.rotated_product(
            stream,
            weight,
            bias,
            layers.eps,
            torch.view_as_real(rotations),
            batch.positions,
            batch.slot_mapping,
            memory.keys[i],
            memory.values[i],
        )


def _add_product(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, packed: bool) -> Tensor:
    """Returns x + y Wᵀ + b, in the place of x `[T, 1, E]` unless the weight is packed."""
    if packed:
        return linear_add(x, y, weight, bias, packed)
    if bias is not None:
        return x.add_(linear(y, weight, bias, packed))
    x.squeeze(1).addmm_(y.squeeze(1), weight.t())  # out of place, torch copies x first
    return x


def _head(layers: FusedLayers, x: Tensor, out: Tensor | None) -> Tensor:
    """Returns the logits `[R, V]` of `x` `[R, E]`, in `out` if it is given."""
    if layers.packed or out is None:
        return linear(x, layers.head, layers.head_bias, layers.packed)
    if layers.head_bias is None:
        return torch.mm(x, layers.head.t(), out=out)
    return torch.addmm(layers.head_bias, x, layers.head.t(), out=out)


def choose_layer_ops(layers: FusedLayers, dtype: torch.dtype) -> LayerOps:
    """Return the operations of a decoder, for a KV cache of a dtype.

    Compiles and checks the Triton kernels with shapes and weights of the model: seconds at the first start.
    """
    why = _obstacle(layers.embedding.device) or check_layer_ops(layers, dtype)
    if why:
        return LayerOps(layers, f"the Triton kernels cannot run: {why}")
    agree = "the Triton kernels agree with torch"
    from kernels.triton_products import why_not  # triton is optional

    weights = {name: getattr(layers, name)[0] for name in ("qkv", "output", "gate_up", "down")}
    if why := why_not({**weights, "head": layers.head}, layers.embedding.device) or check_products(layers):
        return TritonOps(layers, f"{agree}; products of a few rows by torch: {why}")
    return ProductOps(layers, f"{agree}, also in products of a few rows")


def _obstacle(device: torch.device) -> str:
    if device.type != "cuda":
        return f"they need a CUDA device; the device is {device.type}"
    return "" if find_spec("triton") else "triton is not installed"


# ------------------------------------------------------------------------------------------------------------ check

_SPANS = ((0, 1), (40, 6), (15, 2))  # (positions before, rows) of each sequence
_LONGEST = 48


@torch.inference_mode()
def check_layer_ops(layers: FusedLayers, dtype: torch.dtype) -> Refusal | None:
    """Checks each Triton kernel against the torch operation, with shapes and weights of the model."""
    device = layers.embedding.device
    host_batch, memory = random_batch(_SPANS, layers.kv_heads, layers.head_dim, dtype, device)
    batch = to_device(host_batch, memory, attend_eager, device)

    def results(kind: type[LayerOps]) -> dict[str, Tensor]:
        ops, generator = kind(layers, "under check"), torch.Generator().manual_seed(layers.head_dim)

        def numbers(width: int) -> Tensor:
            random = torch.randn(len(batch.tokens), 1, width, generator=generator)
            return random.to(device, layers.embedding.dtype)

        phases = torch.randn(_LONGEST, 1, layers.head_dim // 2, generator=generator) * 3
        rotations = torch.polar(torch.ones_like(phases), phases).to(device)
        keys, values = memory.keys[0].zero_(), memory.values[0].zero_()
        width = (layers.heads + 2 * layers.kv_heads) * layers.head_dim
        return {
            "norms": ops.norm(numbers(layers.embedding.size(1)), layers.attention_norm[0]),
            "queries": ops.queries(0, numbers(width), rotations, batch),
            "gates": ops.gated(numbers(layers.gate_up[0].size(0))),
            "keys": keys.clone(),
            "values": values.clone(),
        }

    tolerance = operation_tolerance(layers.embedding.dtype)
    return check(lambda: results(TritonOps), lambda: results(LayerOps), tolerance)


@torch.inference_mode()
def check_products(layers: FusedLayers) -> Refusal | None:
    """Checks the products of a few rows against those of torch, with weights of the model."""
    from kernels import triton_products as products

    generator = torch.Generator().manual_seed(layers.vocab_size)
    norms = layers.attention_norm[0], layers.mlp_norm[0], layers.norm
    first, second, last = (each.select(0, 0) for each in norms)

    for rows in (products.MOST_ROWS, 1):
        tokens = torch.randint(layers.vocab_size, (rows,), generator=generator).to(layers.embedding.device)

        def found(tokens: Tensor = tokens) -> dict[str, Tensor]:
            stream = products.embed(tokens, layers.embedding, first)
            qkv = products.normed_product(stream, layers.qkv[0], layers.qkv_bias[0], layers.eps)
            heads = qkv[:, : layers.output[0].size(1)].contiguous()
            stream = products.add_product(stream, heads, layers.output[0], layers.output_bias[0], second)
            after = stream.values.clone()
            gated = products.normed_product(stream, layers.gate_up[0], layers.gate_up_bias[0], layers.eps, gated=True)
            stream = products.add_product(stream, gated, layers.down[0], layers.down_bias[0], last)
            logits = products.normed_product(stream, layers.head, layers.head_bias, layers.eps)
            return {"queries": qkv, "sums": after, "gates": gated, "residuals": stream.values, "logits": logits}

        def wanted(tokens: Tensor = tokens) -> dict[str, Tensor]:
            x = embedding(tokens, layers.embedding)

            def norm(weight: Tensor) -> Tensor:
                return torch.rms_norm(x, [x.size(-1)], weight, layers.eps)

            qkv = linear(norm(first), layers.qkv[0], layers.qkv_bias[0], False)
            x = after = linear_add(
                x, qkv[:, : layers.output[0].size(1)], layers.output[0], layers.output_bias[0], False
            )
            gate, up = linear(norm(second), layers.gate_up[0], layers.gate_up_bias[0], False).chunk(2, -1)
            gated = F.silu(gate).mul_(up)
            x = linear_add(x, gated, layers.down[0], layers.down_bias[0], False)
            logits = linear(norm(last), layers.head, layers.head_bias, False)
            return {"queries": qkv, "sums": after, "gates": gated, "residuals": x, "logits": logits}

        if why := check(found, wanted, operation_tolerance(layers.embedding.dtype)):
            return why
    return None
