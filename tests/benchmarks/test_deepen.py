"""A deepened model says what the original says, bit for bit, and its added layers are real ones."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from benchmarks.deepen import WEIGHTS, CannotDeepen, cached, deepen

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A Llama of two layers, with biases, random throughout."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        attention_bias=True,
        mlp_bias=True,
    )
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(tmp_path / "small")
    return tmp_path / "small"


def logits(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    with torch.inference_mode():
        found: torch.Tensor = model(tokens).logits
    return found


def test_logits_are_those_of_the_original(small: Path, tmp_path: Path) -> None:
    deepen(small, tmp_path / "deep", 3)
    tokens = torch.randint(50, (2, 40), generator=torch.Generator().manual_seed(1))
    assert torch.equal(logits(tmp_path / "deep", tokens), logits(small, tokens))


def test_logits_of_the_demo_target_are_those_of_the_original(tmp_path: Path) -> None:
    deepen(DEMO / "target", tmp_path / "deep", 2)
    tokens = torch.randint(2000, (1, 48), generator=torch.Generator().manual_seed(1))
    assert torch.equal(logits(tmp_path / "deep", tokens), logits(DEMO / "target", tokens))


def test_added_layers_do_all_the_work_of_a_layer(small: Path, tmp_path: Path) -> None:
    deepen(small, tmp_path / "deep", 3)
    config = json.loads((tmp_path / "deep" / "config.json").read_text())
    weights = load_file(tmp_path / "deep" / WEIGHTS)
    assert config["num_hidden_layers"] == 6
    for layer in range(6):
        own = {name: value for name, value in weights.items() if f"layers.{layer}." in name}
        silent = {name for name, value in own.items() if not value.any()}
        outputs = {name for name in own if "o_proj" in name or "down_proj" in name}
        assert silent == (outputs if layer % 3 else set())
        assert len(own) == len(weights_of_layer(load_file(small / WEIGHTS), 0))


def weights_of_layer(weights: dict[str, torch.Tensor], layer: int) -> list[str]:
    return [name for name in weights if f"layers.{layer}." in name]


def test_once_is_the_model_itself(small: Path, tmp_path: Path) -> None:
    deepen(small, tmp_path / "same", 1)
    before, after = load_file(small / WEIGHTS), load_file(tmp_path / "same" / WEIGHTS)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_what_cannot_be_deepened_is_refused(small: Path, tmp_path: Path) -> None:
    with pytest.raises(CannotDeepen, match="factor is 0"):
        deepen(small, tmp_path / "deep", 0)
    with pytest.raises(CannotDeepen, match=r"no model\.safetensors"):
        deepen(tmp_path, tmp_path / "deep", 2)
    GPT2LMHeadModel(GPT2Config(vocab_size=20, n_embd=8, n_layer=2, n_head=2)).save_pretrained(tmp_path / "gpt2")
    with pytest.raises(CannotDeepen, match=r"o_proj|num_hidden_layers"):
        deepen(tmp_path / "gpt2", tmp_path / "deep", 2)


def test_a_model_trained_anew_is_deepened_anew(small: Path, tmp_path: Path) -> None:
    first = cached(small, 2, tmp_path / "cache")
    made = (first / WEIGHTS).stat().st_mtime_ns
    assert cached(small, 2, tmp_path / "cache") == first
    assert (first / WEIGHTS).stat().st_mtime_ns == made
    weights = load_file(small / WEIGHTS)
    save_file({name: value + 1 for name, value in weights.items()}, small / WEIGHTS, metadata={"format": "pt"})
    second = cached(small, 2, tmp_path / "cache")
    assert second != first
    assert not torch.equal(
        load_file(first / WEIGHTS)["model.norm.weight"], load_file(second / WEIGHTS)["model.norm.weight"]
    )
