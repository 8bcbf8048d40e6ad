"""Fused modules compute the results of those they replace, and only equal modules are replaced."""

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from outrider.runtime import fused_decoder
from outrider.runtime.errors import CheckpointError
from outrider.runtime.fused_decoder import FusedDecoder, use_huge_pages
from outrider.runtime.fused_layers import (
    INT8_ROWS,
    RMSNormModule,
    can_multiply_int8,
    can_pack,
    doubled,
    linear,
    pack,
    to_int8,
)
from outrider.runtime.loader import LoadedModel
from outrider.runtime.model_runner import Chunk, ModelRunner
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
    """Also beyond the first table of positions, which is short here."""
    monkeypatch.setattr(fused_decoder, "_FIRST_POSITIONS", 8)
    if not packs:
        monkeypatch.setattr(fused_decoder, "can_pack", lambda dtype, device: False)
    fused, plain = (ModelRunner.build(load(name), 3, 64, fuse=fuse) for fuse in (True, False))
    assert fused.fused
    assert not plain.fused
    decoder = fused.loaded.fused
    assert isinstance(decoder, FusedDecoder) == (name in GATED)
    assert not isinstance(decoder, FusedDecoder) or isinstance(decoder._run, torch.jit.ScriptModule)
    assert close(logits(fused, 3), logits(plain, 3))


def test_a_fused_forward_that_differs_is_refused(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_decoder, "doubled", lambda weight: -doubled(weight))
    with pytest.raises(CheckpointError, match="gives other logits when fused than in transformers"):
        ModelRunner.build(load("llama"), 1, 32)


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


def test_huge_pages_change_no_weight() -> None:
    """Also where the system has none."""
    weight = torch.randn(1024, 1024)
    x = torch.randn(3, 1024)
    weights = [weight, pack(weight)] if can_pack(torch.float32, torch.device("cpu")) else [weight]
    wanted, saved = [linear(x, each, None, each.is_mkldnn) for each in weights], weight.clone()
    use_huge_pages(weights)
    assert torch.equal(weight, saved)
    assert all(torch.equal(linear(x, each, None, each.is_mkldnn), y) for each, y in zip(weights, wanted, strict=True))


needs_int8 = pytest.mark.skipif(
    not can_multiply_int8(torch.bfloat16, torch.device("cpu")), reason="no products of bfloat16 by 8 bits here"
)


def of_rows(loaded: LoadedModel, rows: int) -> Tensor:
    """Logits of the last `rows` of 20 tokens, in a pass of their own."""
    model = ModelRunner.build(loaded, 1, 64)
    slot, tokens = model.pool.allocate(), [3 + 7 * i % 90 for i in range(20)]
    model.forward([Chunk(slot, tokens[:-rows], 0, 0)])
    return model.logits([Chunk(slot, tokens[-rows:], 20 - rows, 0)]).clone()


@needs_int8
@pytest.mark.parametrize("family", GATED)
def test_a_few_rows_read_the_weights_in_8_bits(load: Load, family: str) -> None:
    plain, narrow = load(family, "bfloat16"), load(family, "bfloat16")
    narrow.int8 = True
    for rows in (1, INT8_ROWS):
        found, wanted = of_rows(narrow, rows), of_rows(plain, rows)
        assert 0 < (found - wanted).norm() < 0.05 * wanted.norm()
    assert torch.equal(of_rows(narrow, INT8_ROWS + 1), of_rows(plain, INT8_ROWS + 1))


def test_8_bits_round_to_half_a_step() -> None:
    weight = torch.randn(40, 64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    weight[3] = 0
    numbers, scale = to_int8(weight)
    assert numbers.abs().max() == 127
    # The largest number of a row may be 127.25 steps, as the step is rounded to bfloat16.
    error = (numbers.float() * scale.float()[:, None] - weight.float()).abs()
    assert (error <= 0.501 * scale.float()[:, None]).all()


@needs_int8
def test_a_weight_whose_products_differ_is_not_read_in_8_bits(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    def doubled_scale(weight: Tensor) -> tuple[Tensor, Tensor]:
        numbers, scale = to_int8(weight)
        return numbers, 2 * scale

    plain, narrow = load("llama", "bfloat16"), load("llama", "bfloat16")
    narrow.int8 = True
    monkeypatch.setattr(fused_decoder, "to_int8", doubled_scale)
    assert torch.equal(of_rows(narrow, 1), of_rows(plain, 1))
