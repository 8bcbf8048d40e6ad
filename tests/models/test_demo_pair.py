"""The shipped pair is as its card says: sizes, dtype, one token map, exact round trips, and an acceptance rate."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from models.measure import acceptance, model_log_probabilities, write_with_logits

DEMO = Path(__file__).parents[2] / "models" / "demo"
PROMPTS, NEW = 16, 48

Models = dict[str, LlamaForCausalLM]


@pytest.fixture(scope="module")
def models() -> Models:
    torch.set_num_threads(1)
    return {
        name: AutoModelForCausalLM.from_pretrained(DEMO / name, dtype=torch.float32) for name in ("target", "draft")
    }


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(DEMO / "target")


def test_sizes_are_the_cards(models: Models) -> None:
    assert {name: model.num_parameters() for name, model in models.items()} == {
        "target": 13_934_400,
        "draft": 2_868_800,
    }
    assert {model.config.max_position_embeddings for model in models.values()} == {1024}
    assert sum(path.stat().st_size for path in DEMO.rglob("*") if path.is_file()) < 45 * 2**20


@pytest.mark.parametrize("member", ["target", "draft"])
def test_weights_are_finite_bfloat16(member: str) -> None:
    with safe_open(DEMO / member / "model.safetensors", framework="pt") as weights:
        for name in weights.keys():  # noqa: SIM118 - the file is no dict
            tensor = weights.get_tensor(name)
            assert tensor.dtype == torch.bfloat16, name
            assert torch.isfinite(tensor).all(), name


def test_members_share_the_token_map(tokenizer: PreTrainedTokenizerFast) -> None:
    other = AutoTokenizer.from_pretrained(DEMO / "draft")
    assert tokenizer.get_vocab() == other.get_vocab()
    assert len(tokenizer) == 2048
    assert tokenizer.chat_template is None


def test_tokenizer_round_trips_any_text(tokenizer: PreTrainedTokenizerFast) -> None:
    chance = random.Random(7)
    alphabets: list[Sequence[int]] = [
        range(0x20, 0x7F),
        range(0x1F600, 0x1F650),
        range(0xD800),
        range(0xE000, 0x110000),
    ]
    texts = ["".join(chr(chance.choice(alphabet)) for _ in range(40)) for alphabet in alphabets for _ in range(40)]
    for text in [*texts, "", " ", "\n\n  \n", "  def f( x ) :", "don't . , !", "<|endoftext|>", "e\u0301 \ufeff\u200d"]:
        assert tokenizer.decode(tokenizer.encode(text)) == text


# Seen with these prompts and this seed: T=1 0.798 ± 0.012, T=0 0.895 ± 0.021 (standard errors over texts); the floors
# are four of these below. Two layers of the target as they are, untrained, are at 0.42 and 0.37.
@pytest.mark.parametrize(("temperature", "floor"), [(1.0, 0.74), (0.0, 0.80)])
def test_acceptance_is_above_its_floor(
    temperature: float, floor: float, models: Models, tokenizer: PreTrainedTokenizerFast
) -> None:
    lines = (DEMO / "prompts.jsonl").read_text(encoding="utf-8").splitlines()[:PROMPTS]
    ids = torch.tensor([tokenizer.encode(json.loads(line)["text"])[:24] for line in lines])
    with torch.no_grad():
        text, logits = write_with_logits(models["target"], ids, NEW, temperature)
        drafted = model_log_probabilities(models["draft"])
        result = acceptance("draft", drafted, text, logits, temperature, tokenizer.eos_token_id)
    assert result.tokens > PROMPTS * NEW // 2
    assert result.alpha > floor
