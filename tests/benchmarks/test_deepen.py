"""A deepened or widened model has the logits of the original, and its added layers or units do all their work."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from benchmarks.harness import WEIGHTS
from benchmarks.services import deepened, widened


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A Llama of two layers, with biases, random throughout."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=64, attention_bias=True, mlp_bias=True,
        )
    )  # fmt: skip
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(tmp_path / "small")
    return tmp_path / "small"


def test_logits_are_the_same_with_layers_that_do_all_their_work(small: Path, tmp_path: Path) -> None:
    deep = deepened(small, 3, tmp_path)
    tokens = torch.randint(50, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        logits = [AutoModelForCausalLM.from_pretrained(folder).eval()(tokens).logits for folder in (small, deep)]
    assert torch.equal(*logits)
    assert json.loads((deep / "config.json").read_text())["num_hidden_layers"] == 6
    weights = load_file(deep / WEIGHTS)
    for layer in range(6):
        own = {name: value for name, value in weights.items() if f"layers.{layer}." in name}
        silent = {name for name, value in own.items() if not value.any()}
        assert silent == ({name for name in own if "o_proj" in name or "down_proj" in name} if layer % 3 else set())


def test_logits_are_the_same_with_units_that_do_all_their_work(small: Path, tmp_path: Path) -> None:
    wide = widened(small, 3, tmp_path)
    tokens = torch.randint(50, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        models = [AutoModelForCausalLM.from_pretrained(folder).eval() for folder in (small, wide)]
        logits = [model(tokens).logits for model in models]
    torch.testing.assert_close(logits[1], logits[0], rtol=0, atol=1e-5 * float(logits[0].abs().max()))
    config = models[1].config  # 12 heads do not divide the hidden size
    assert (config.num_attention_heads, config.num_key_value_heads, config.intermediate_size) == (8, 4, 144)
    for layer in models[1].model.layers:
        for units in (layer.self_attn.q_proj, layer.self_attn.v_proj, layer.mlp.gate_proj, layer.mlp.up_proj):
            assert units.weight.any(1).all()
        assert not layer.self_attn.o_proj.weight[:, 32:].any()
        assert not layer.mlp.down_proj.weight[:, 48:].any()


def test_what_cannot_be_deepened_is_refused(small: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="factor is 0"):
        deepened(small, 0, tmp_path)
    GPT2LMHeadModel(GPT2Config(vocab_size=20, n_embd=8, n_layer=2, n_head=2)).save_pretrained(tmp_path / "gpt2")
    with pytest.raises(ValueError, match="o_proj"):
        deepened(tmp_path / "gpt2", 2, tmp_path)


def test_a_model_is_deepened_once_and_anew_when_trained_anew(small: Path, tmp_path: Path) -> None:
    first = deepened(small, 2, tmp_path)
    made = (first / WEIGHTS).stat().st_mtime_ns
    assert deepened(small, 2, tmp_path) == first
    assert (first / WEIGHTS).stat().st_mtime_ns == made
    save_file({k: v + 1 for k, v in load_file(small / WEIGHTS).items()}, small / WEIGHTS, metadata={"format": "pt"})
    assert deepened(small, 2, tmp_path) != first
