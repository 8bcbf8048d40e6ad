"""The shipped pair is as its card says: sizes, dtype, one token map, exact round trips, and an acceptance rate."""

import json
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from models import train
from models.corpus import Document
from models.measure import acceptance, model_log_probabilities, write_with_logits
from models.measure_parallel import scores_by_position
from models.training import ATTENTION

DEMO = Path(__file__).parents[2] / "models" / "demo"
MEMBERS = ("target", "draft", "parallel-draft")
PROMPTS, NEW = 16, 48

Models = dict[str, LlamaForCausalLM]
Written = tuple[float, torch.Tensor, torch.Tensor]


@pytest.fixture(scope="module")
def models() -> Models:
    torch.set_num_threads(1)
    return {name: AutoModelForCausalLM.from_pretrained(DEMO / name, dtype=torch.float32) for name in MEMBERS}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(DEMO / "target")


def test_sizes_are_the_cards(models: Models) -> None:
    assert {name: model.num_parameters() for name, model in models.items()} == {
        "target": 13_934_400,
        "draft": 2_868_800,
        "parallel-draft": 2_869_120,  # and the mask's row
    }
    assert {model.config.max_position_embeddings for model in models.values()} == {1024}
    assert sum(path.stat().st_size for path in DEMO.rglob("*") if path.is_file()) < 45 * 2**20


@pytest.mark.parametrize("member", MEMBERS)
def test_weights_are_finite_bfloat16(member: str) -> None:
    with safe_open(DEMO / member / "model.safetensors", framework="pt") as weights:
        for name in weights.keys():  # noqa: SIM118 - the file is no dict
            tensor = weights.get_tensor(name)
            assert tensor.dtype == torch.bfloat16, name
            assert torch.isfinite(tensor).all(), name


def test_members_share_the_token_map(tokenizer: PreTrainedTokenizerFast) -> None:
    for member in MEMBERS:
        assert tokenizer.get_vocab() == AutoTokenizer.from_pretrained(DEMO / member).get_vocab()
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


def test_a_kill_while_tokens_are_written_leaves_nothing_that_the_next_run_takes_for_whole(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(path: Path, ids: np.ndarray) -> None:
        save(path, ids)
        if "held_out" in path.name:
            path.write_bytes(path.read_bytes()[:-8])
            raise KeyboardInterrupt

    save, modules = np.save, [Document(name, "import os\n" * 9) for name in map(str, range(99))]
    monkeypatch.setattr(train, "documents", lambda: modules)
    monkeypatch.setattr(train, "train_tokenizer", lambda _: tokenizer)
    monkeypatch.setattr(np, "save", killed)
    with pytest.raises(KeyboardInterrupt):
        train.prepare(tmp_path)
    monkeypatch.setattr(np, "save", save)
    _, training, held_out = train.prepare(tmp_path)
    assert len(training) > len(held_out) > 0


@pytest.fixture(scope="module", params=[1.0, 0.0], ids=lambda temperature: f"T={temperature:g}")
def written(request: pytest.FixtureRequest, models: Models, tokenizer: PreTrainedTokenizerFast) -> Written:
    """A temperature, texts that the target writes at it, and its logits."""
    lines = (DEMO / "prompts.jsonl").read_text(encoding="utf-8").splitlines()[:PROMPTS]
    ids = torch.tensor([tokenizer.encode(json.loads(line)["text"])[:24] for line in lines])
    with torch.no_grad():
        return request.param, *write_with_logits(models["target"], ids, NEW, request.param)


# Seen with these prompts and this seed: T=1 0.798 ± 0.012, T=0 0.895 ± 0.021 (standard errors over texts); the floors
# are four of these below. Two layers of the target as they are, untrained, are at 0.42 and 0.37.
FLOORS = {1.0: 0.74, 0.0: 0.80}


def test_acceptance_is_above_its_floor(written: Written, models: Models, tokenizer: PreTrainedTokenizerFast) -> None:
    temperature, text, logits = written
    with torch.no_grad():
        drafted = model_log_probabilities(models["draft"])
        result = acceptance("draft", drafted, text, logits, temperature, tokenizer.eos_token_id)
    assert result.tokens > PROMPTS * NEW // 2
    assert result.alpha > FLOORS[temperature]


# Seen, by position: T=1 0.791 ± 0.013, 0.418 ± 0.017, 0.301 ± 0.015; T=0 0.900 ± 0.020, 0.606 ± 0.048, 0.383 ± 0.060.
# The floors are four of these errors below, at T=0 in the third position three.
FLOORS_OF_A_PASS = {1.0: (0.74, 0.35, 0.24), 0.0: (0.82, 0.41, 0.20)}


def test_acceptance_of_each_token_of_a_pass_is_above_its_floor(written: Written, models: Models) -> None:
    temperature, text, logits = written
    draft = models["parallel-draft"]
    draft.config._attn_implementation = ATTENTION
    with torch.no_grad():
        scores = scores_by_position(draft, draft.config.pard_token, text, logits, temperature)
    for position, floor in enumerate(FLOORS_OF_A_PASS[temperature]):
        assert float(scores[..., position].nanmean()) > floor, position
