"""Fused modules compute what they replace, and what only resembles one is left alone."""

import random
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.pytorch_utils import Conv1D

from outrider.runtime import fused_decoder
from outrider.runtime.attention import Batch, Rows
from outrider.runtime.errors import CheckpointError
from outrider.runtime.fused_decoder import FusedDecoder
from outrider.runtime.fused_layers import (
    PackedModule,
    RMSNormModule,
    can_pack,
    compiled,
    doubled,
    linear,
    linear_add,
    make_signs,
    pack,
    rms_norm,
)
from outrider.runtime.loader import LoadedModel
from outrider.runtime.model_runner import Chunk, ModelRunner
from outrider.runtime.selfcheck import check_program
from tests.outrider.runtime.tiny import CONFIGS, GATED, VOCABULARY

Load = Callable[..., LoadedModel]
CLOSE = 1e-6  # relative; each of the two lies half as far from the result in float64


def close(found: Tensor, wanted: Tensor) -> bool:
    return bool((found - wanted).norm() <= CLOSE * wanted.norm())


def logits(model: ModelRunner, seed: int) -> Tensor:
    rng = random.Random(seed)
    slots = [model.pool.allocate() for _ in range(3)]
    rows = []
    for counts in ([3, 1, 9], [1, 1, 1], [6, 2, 1], [1, 8, 4]):
        chunks = [
            Chunk(slot, rng.choices(range(VOCABULARY), k=n), model.pool.length(slot), 0)
            for slot, n in zip(slots, counts, strict=True)
        ]
        rows.append(model.forward(chunks))
        rows.append(model.forward([Chunk(slots[0], [rng.randrange(VOCABULARY)], model.pool.length(slots[0]), 0)]))
    return torch.cat(rows)


@pytest.mark.parametrize(
    ("name", "packs"),
    [*((name, True) for name in CONFIGS), *((name, False) for name in ("llama-biased", "qwen3", "gemma3", "gpt2"))],
)
def test_fused_and_unfused_agree_in_float32(
    name: str, packs: bool, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not packs:
        monkeypatch.setattr(fused_decoder, "can_pack", lambda dtype, device: False)
    fused, plain = (ModelRunner.build(load(name), 3, 64, fuse=fuse) for fuse in (True, False))
    assert fused.fused
    assert not plain.fused
    assert isinstance(fused.loaded.fused, FusedDecoder) == (name in GATED)
    assert close(logits(fused, 3), logits(plain, 3))


def test_a_sequence_beyond_the_first_table_of_positions(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.runtime.fused_decoder._FIRST_POSITIONS", 16)
    models = [ModelRunner.build(load("llama-scaled-rope"), 1, 64, fuse=fuse) for fuse in (True, False)]
    tokens = [i % VOCABULARY for i in range(40)]
    found, wanted = (
        torch.cat([model.forward([Chunk(slot, tokens[:20], 0, 0)]), model.forward([Chunk(slot, tokens[20:], 20, 0)])])
        for model, slot in ((model, model.pool.allocate()) for model in models)
    )
    assert close(found, wanted)


def test_a_table_of_positions_stays_when_a_longer_one_is_made(load: Load) -> None:
    """CUDA graphs of an earlier pool read it where it lies."""
    loaded = load("llama")
    ModelRunner.build(loaded, 1, 32)
    assert isinstance(loaded.fused, FusedDecoder)
    first = weakref.ref(loaded.fused._rotations_to(32))
    longer = loaded.fused._rotations_to(5000)
    assert len(longer) >= 5000
    assert first() is not None


def test_two_pools_share_one_fused_model(load: Load) -> None:
    loaded = load("llama")
    first, second = ModelRunner.build(loaded, 1, 32), ModelRunner.build(loaded, 2, 16)
    chunk = Chunk(0, [5, 6, 7], 0, 0)
    assert first.pool.allocate() == second.pool.allocate() == 0
    assert torch.equal(first.forward([chunk]), second.forward([chunk]))
    with pytest.raises(ValueError, match="has been fused"):
        ModelRunner.build(loaded, 1, 32, fuse=False)


def test_a_fused_forward_that_differs_is_refused(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_decoder, "doubled", lambda weight: -doubled(weight))
    with pytest.raises(CheckpointError, match="gives other logits than its own"):
        ModelRunner.build(load("llama"), 1, 32)


def test_the_self_check_notices_differences(load: Load) -> None:
    loaded = load("llama")
    program = ModelRunner.build(loaded, 1, 32).program

    def passes(change: Callable[[Tensor], Tensor], tolerance: float) -> bool:
        def changed(token_ids: Tensor, batch: Batch, rows: Rows) -> Tensor:
            return change(program(token_ids, batch, rows))

        return check_program(changed, loaded.layers, loaded.reference, loaded.dtype, loaded.device, tolerance) is None

    assert passes(lambda rows: rows, 1e-5)
    assert passes(lambda rows: rows + 3, 1e-5), "a constant added to all logits changes no distribution"
    assert not passes(lambda rows: rows * 1.01, 5e-3)
    assert not passes(lambda rows: rows.roll(1, 0), 0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("biased", [False, True])
def test_linear_layers_multiply_and_add(dtype: torch.dtype, rows: int, biased: bool) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(24, 16).to(dtype), torch.randn(24).to(dtype) if biased else None
    x, residual = torch.randn(rows, 1, 16).to(dtype), torch.randn(rows, 1, 24).to(dtype)
    wanted = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    tolerance = 1e-5 if dtype == torch.float32 else 0.1
    packs = can_pack(dtype, weight.device)
    for packed, held in [(False, weight), *([(True, pack(weight))] if packs else [])]:
        found = linear(x, held, bias, packed)
        assert found.dtype == dtype
        assert torch.allclose(found.double(), wanted, atol=tolerance)
        kept = residual.clone()
        summed = linear_add(residual, x, held, bias, packed)
        assert torch.allclose(summed.double(), wanted + residual.double(), atol=tolerance)
        assert torch.equal(residual, kept)


@pytest.mark.parametrize("small", [0, 1 << 20], ids=["torch's own", "doubled"])
def test_both_forms_of_the_norm_are_the_norm(small: int) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(7, 1, 64) * 3, torch.randn(64)
    wanted = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    found = rms_norm(x, doubled(weight), make_signs(weight), 1e-5, small)
    assert found.shape == x.shape
    assert torch.allclose(found.double(), wanted, atol=1e-5)


@pytest.mark.parametrize("name", ["llama-biased", "qwen3", "mistral-sliding"])
def test_layers_give_the_same_compiled_or_not(name: str, load: Load) -> None:
    model = ModelRunner.build(load(name), 3, 64)
    program = model.loaded.fused
    assert isinstance(program, FusedDecoder)
    assert isinstance(program._run, torch.jit.ScriptModule)
    found = logits(model, 5)
    for slot in range(3):
        model.pool.free(slot)
    program._run = program._layers
    assert torch.equal(logits(model, 5), found)


def test_layers_are_compiled_on_a_cpu_alone() -> None:
    """On a GPU TorchScript would compile kernels of its own during steps."""
    module = nn.Linear(2, 2)
    assert compiled(module, torch.device("cuda", 0)) is module
    assert isinstance(compiled(module, torch.device("cpu")), torch.jit.ScriptModule)


def test_layers_run_where_nothing_compiles(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise RuntimeError("no TorchScript here")

    monkeypatch.setattr(torch.jit, "script", refuse)
    model = ModelRunner.build(load("llama"), 1, 32)
    assert isinstance(model.loaded.fused, FusedDecoder)
    assert model.loaded.fused._run is model.loaded.fused._layers


class ShiftedRMSNorm(LlamaRMSNorm):
    """As Gemma's: the weight is what is added to 1."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        normed = torch.rms_norm(hidden_states.float(), (hidden_states.shape[-1],), None, self.variance_epsilon)
        return (normed * (1 + self.weight.float())).to(hidden_states.dtype)


class CentredRMSNorm(LlamaRMSNorm):
    """Has the name, and is something else."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        found: Tensor = super().forward(hidden_states - hidden_states.mean(-1, keepdim=True))
        return found


@pytest.mark.parametrize(
    ("kind", "is_replaced"), [(LlamaRMSNorm, True), (ShiftedRMSNorm, True), (CentredRMSNorm, False)]
)
def test_only_norms_that_prove_to_be_one_are_replaced(kind: type[LlamaRMSNorm], is_replaced: bool) -> None:
    torch.manual_seed(0)
    module = kind(32, eps=1e-6)
    with torch.no_grad():
        module.weight.copy_(torch.randn(32))
        x = torch.randn(1, 5, 32)
        parent = nn.Sequential(module)
        wanted = parent(x)
        fused_decoder._replace_modules(parent, set(parent.modules()), torch.float32)
        assert isinstance(parent[0], RMSNormModule) == is_replaced
        assert close(parent(x), wanted)


@pytest.mark.skipif(not can_pack(torch.float32, torch.device("cpu")), reason="this torch packs no weights")
def test_packed_modules_keep_shape_and_dtype_without_a_copy() -> None:
    torch.manual_seed(0)
    parent = nn.Sequential(nn.Linear(16, 24), Conv1D(8, 24), nn.LayerNorm(8))
    with torch.no_grad():
        x = torch.randn(1, 5, 16)
        wanted = parent(x)
        fused_decoder._replace_modules(parent, set(parent.modules()), torch.float32)
        assert close(parent(x), wanted)
    assert [type(module) for module in parent] == [PackedModule, PackedModule, nn.LayerNorm]
    weight = parent[0].weight
    assert isinstance(weight, Tensor)
    assert weight.shape == (24, 16)
    assert weight.untyped_storage().nbytes() == 4
    assert weight.isnan().all(), "using it must not go unnoticed"
