"""Layers by Triton's kernels give the logits of torch's operations, or are not chosen.

Captured on a device: `test_gpu`.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from outrider.runtime import fused_decoder, layer_ops
from outrider.runtime.batch import PagedBatch
from outrider.runtime.fused_decoder import FusedDecoder, fuse_model
from outrider.runtime.fused_layers import FusedLayers
from outrider.runtime.layer_ops import LayerOps, ProductOps, TritonOps, choose_layer_ops
from outrider.runtime.loader import LoadedModel, ModelSource, load_model
from outrider.runtime.model_runner import Chunk, ModelRunner
from outrider.runtime.torch_runner import TorchRunner
from tests.kernels.paths import DEVICE, IS_INTERPRETED, TRITON
from tests.outrider.runtime import tiny
from tests.outrider.runtime.steps import PAGED
from tests.outrider.runtime.tiny import SHAPE, VOCABULARY

Load = Callable[..., LoadedModel]


def logits_of(model: ModelRunner) -> Tensor:
    """Logits of a few steps of two sequences, over several blocks and past the window."""
    slots = model.pool.allocate(), model.pool.allocate()
    tokens = torch.randint(VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(1)).tolist()
    found = []
    for spans in ([(0, 0, 7)], [(1, 0, 3), (0, 7, 2)], [(0, 9, 1), (1, 3, 4)]):
        found.append(model.forward([Chunk(slots[i], tokens[i][at : at + n], at, 0) for i, at, n in spans]).clone())
    return torch.cat(found)


@pytest.mark.parametrize("path", [TRITON])
@pytest.mark.parametrize(
    ("name", "dtype", "allowed"),
    [
        ("llama-scaled-rope", "float32", 1e-5),  # heads of 12
        ("qwen2", "float32", 1e-5),  # queries, keys and values with biases
        ("qwen3", "float32", 1e-5),  # norms of heads
        ("qwen3", "float16", 0.01),
        ("qwen2", "bfloat16", 0.1),  # the interpreter truncates instead of rounding
    ],
)
def test_triton_gives_the_logits_that_torch_gives(
    name: str, dtype: str, allowed: float, path: str, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = []
    for kind in (LayerOps, TritonOps):
        monkeypatch.setattr(fused_decoder, "choose_layer_ops", lambda layers, dtype, kind=kind: kind(layers, "a test"))
        loaded = load_model(ModelSource(str(checkpoint(name)), dtype=dtype, device=DEVICE))
        model = TorchRunner.build(loaded, 2, 16, attention=PAGED)
        assert model.layer_choice is not None
        assert model.layer_choice.name == {LayerOps: "torch", TritonOps: path}[kind]
        logits.append(logits_of(model))
    wanted, found = logits
    assert float((found - wanted).abs().max()) <= allowed * float(wanted.abs().max())


WIDE = SHAPE | {
    "vocab_size": 112, "hidden_size": 128, "intermediate_size": 128, "num_key_value_heads": 2, "num_hidden_layers": 2,
}  # fmt: skip
"""Sizes that the products of a few rows can take."""
DTYPE, ALLOWED = (torch.float32, 1e-5) if IS_INTERPRETED else (torch.bfloat16, 0.05)
"""The interpreter multiplies no matrices of bfloat16; a device rounds those of float32."""


@pytest.mark.parametrize("path", [TRITON])
@pytest.mark.parametrize(
    "config",
    [
        pytest.param(lambda: transformers.Qwen2Config(**WIDE), id="qwen2"),  # with biases
        pytest.param(lambda: transformers.Qwen3Config(**WIDE, head_dim=32), id="qwen3"),  # with norms of heads
    ],
)
def test_products_of_a_few_rows_give_the_logits_of_torch(
    config: Callable[[], transformers.PreTrainedConfig], path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the same bits for a row alone as for one among others; a batch of more rows goes the usual way."""
    monkeypatch.setattr(fused_decoder, "can_pack", lambda dtype, device: False)  # as on a GPU
    folder = tiny.save(config(), tmp_path)
    logits = []
    for kind in (LayerOps, ProductOps):
        monkeypatch.setattr(fused_decoder, "choose_layer_ops", lambda layers, dtype, kind=kind: kind(layers, "a test"))
        loaded = load_model(ModelSource(str(folder), dtype=str(DTYPE).removeprefix("torch."), device=DEVICE))
        model = TorchRunner.build(loaded, 2, 40, attention=PAGED)
        assert type(model.layer_choice) is kind
        one, other = model.pool.allocate(), model.pool.allocate()
        many = model.forward([Chunk(one, list(range(20)), 0, 0)]).clone()
        few = model.forward([Chunk(other, list(range(7)), 0, 0)]).clone()
        both = model.forward([Chunk(one, [5, 7], 20, 0), Chunk(other, [9], 7, 0)]).clone()
        logits.append(torch.cat([many, few, both]))
    wanted, found = logits
    assert float((found - wanted).abs().max()) <= ALLOWED * float(wanted.abs().max())
    model.pool.rollback(one, 20)
    assert torch.equal(model.forward([Chunk(one, [5, 7], 20, 0)]), both[:2])


@pytest.fixture(scope="module")
def layers(load: Load) -> FusedLayers:
    program = fuse_model(load("qwen3"), paged=True)
    assert isinstance(program, FusedDecoder)
    return program._layers


class RotatedBack(LayerOps):
    def queries(self, i: int, qkv: Tensor, rotations: Tensor, batch: PagedBatch) -> Tensor:
        return super().queries(i, qkv, rotations.conj().resolve_conj(), batch)


class NextSlot(LayerOps):
    def queries(self, i: int, qkv: Tensor, rotations: Tensor, batch: PagedBatch) -> Tensor:
        return super().queries(i, qkv, rotations, replace(batch, slot_mapping=batch.slot_mapping + 1))


class Nan(LayerOps):
    def gated(self, gate_up: Tensor) -> Tensor:
        return super().gated(gate_up) * torch.nan


class Uncompiled(LayerOps):
    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        raise RuntimeError("ptxas is not there\nand more of that")


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (RotatedBack, "queries differ by"),
        (NextSlot, "keys differ by"),
        (Nan, "gates differ by nan"),
        (Uncompiled, "RuntimeError: ptxas is not there"),
    ],
)
def test_wrong_operations_are_not_chosen(
    kind: type[LayerOps], reason: str, layers: FusedLayers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device that could run them."""
    monkeypatch.setattr(layer_ops, "_obstacle", lambda device: "")
    monkeypatch.setattr(layer_ops, "TritonOps", kind)
    choice = choose_layer_ops(layers, torch.float32)
    assert type(choice) is LayerOps
    assert choice.reason.startswith(f"the Triton kernels cannot run: {reason}")
    monkeypatch.setattr(layer_ops, "TritonOps", type("Good", (LayerOps,), {}))
    reason = choose_layer_ops(layers, torch.float32).reason
    assert reason.startswith("the Triton kernels agree with torch; products of a few rows by torch: it needs a CUDA")


@pytest.mark.parametrize("path", [TRITON])
def test_wrong_products_are_not_chosen(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device that could run them."""
    from kernels import triton_products

    monkeypatch.setattr(layer_ops, "_obstacle", lambda device: "")
    monkeypatch.setattr(triton_products, "why_not", lambda weights, device: "")
    monkeypatch.setattr(fused_decoder, "can_pack", lambda dtype, device: False)
    folder = tiny.save(transformers.LlamaConfig(**WIDE), tmp_path)
    program = fuse_model(
        load_model(ModelSource(str(folder), dtype=str(DTYPE).removeprefix("torch."), device=DEVICE)), paged=True
    )
    assert isinstance(program, FusedDecoder)
    choice = choose_layer_ops(program._layers, DTYPE)
    assert type(choice) is ProductOps
    assert choice.reason == "the Triton kernels agree with torch, also in products of a few rows"

    embed = triton_products.embed

    def without_norm(tokens: Tensor, embedding: Tensor, norm: Tensor) -> Any:
        return embed(tokens, embedding, norm * 0.5)

    monkeypatch.setattr(triton_products, "embed", without_norm)
    choice = choose_layer_ops(program._layers, DTYPE)
    assert type(choice) is TritonOps
    assert "products of a few rows by torch: queries differ by 0.5" in choice.reason
