"""Fused modules compute the results of those they replace, and only equal modules are replaced."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from outrider.runtime import fused_decoder
from outrider.runtime.errors import CheckpointError
from outrider.runtime.fused_decoder import FusedDecoder, use_huge_pages
from outrider.runtime.fused_layers import RMSNormModule, can_pack, doubled, linear, pack
from outrider.runtime.loader import LoadedModel
from outrider.runtime.model_runner import Chunk, ModelRunner
from outrider.runtime.torch_runner import TorchRunner
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


@pytest.mark.usefixtures("layers_by_torch")
@pytest.mark.parametrize(
    ("name", "packs"),
    [*((name, True) for name in CONFIGS), *((name, False) for name in ("llama-biased", "qwen3", "gemma3", "gpt2"))],
)
def test_fused_and_unfused_agree_in_float32(
    name: str, packs: bool, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also beyond the first table of positions, which is short here."""
    monkeypatch.setattr(fused_decoder, "_FIRST_POSITIONS", 8)
    if not packs:
        monkeypatch.setattr(fused_decoder, "can_pack", lambda dtype, device: False)
    loaded = load(name)
    plain = TorchRunner.build(loaded, 3, 64, fuse=False)
    wanted = logits(plain, 3)
    assert plain.loaded.fused is None
    fused = TorchRunner.build(loaded, 3, 64)
    decoder = loaded.fused
    assert fused.program is decoder
    assert isinstance(decoder, FusedDecoder) == (name in GATED)
    assert not isinstance(decoder, FusedDecoder) or isinstance(decoder._run, torch.jit.ScriptModule)
    assert close(logits(fused, 3), wanted)


def test_a_fused_forward_that_differs_is_refused(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_decoder, "doubled", lambda weight: -doubled(weight))
    with pytest.raises(CheckpointError, match="gives other logits when fused than in transformers"):
        TorchRunner.build(load("llama"), 1, 32)


class CentredRMSNorm(LlamaRMSNorm):
    """An RMS norm by its name alone."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        found: Tensor = super().forward(hidden_states - hidden_states.mean(-1, keepdim=True))
        return found


@pytest.mark.parametrize(("kind", "is_replaced"), [(LlamaRMSNorm, True), (CentredRMSNorm, False)])
def test_only_modules_that_compute_an_rms_norm_are_replaced(kind: type[LlamaRMSNorm], is_replaced: bool) -> None:
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


@pytest.mark.parametrize(
    ("kind", "dtype", "is_replaced"),
    [
        (LlamaRMSNorm, torch.bfloat16, True),
        (Gemma2RMSNorm, torch.bfloat16, False),
        (Gemma2RMSNorm, torch.float32, True),
    ],
)
def test_a_norm_whose_weight_would_be_rounded_is_not_replaced(
    kind: type[nn.Module], dtype: torch.dtype, is_replaced: bool
) -> None:
    """Gemma's norms multiply by 1 + w in float32."""
    module: Any = kind(32, eps=1e-6)
    with torch.no_grad():
        module.weight.copy_(0.01 * torch.randn(32, generator=torch.Generator().manual_seed(1)))
        parent = nn.Sequential(module.to(dtype))
        fused_decoder._replace_modules(parent, set(parent.modules()), dtype)
    assert isinstance(parent[0], RMSNormModule) == is_replaced


def test_huge_pages_change_no_weight() -> None:
    """Also where the system has none."""
    weight = torch.randn(1024, 1024)
    x = torch.randn(3, 1024)
    weights = [weight, pack(weight)] if can_pack(torch.float32, torch.device("cpu")) else [weight]
    wanted, saved = [linear(x, each, None, each.is_mkldnn) for each in weights], weight.clone()
    use_huge_pages(weights)
    assert torch.equal(weight, saved)
    assert all(torch.equal(linear(x, each, None, each.is_mkldnn), y) for each, y in zip(weights, wanted, strict=True))
