"""Beam search with drafts finds the beams of transformers, and a pass of the target serves all steps drafted right."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.beams import Bigram, Draft, DraftedBeams, Text, Tree, search
from benchmarks.contenders import load_model, tokenised
from benchmarks.harness import DEMO

PROMPTS = ("def mean(values):\n", "import os\n\nclass Path:\n    def __init__(self")
NEW_TOKENS = 24
LINE_END, BLANK_LINE = (tokenised(DEMO / "target", [text])[0][-1] for text in ("a\n", "a\n\n"))


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    """The demo draft as a target, and itself with noise as a draft that is often wrong."""
    target = load_model(DEMO / "draft", torch.float32)
    draft = copy.deepcopy(target)
    torch.manual_seed(1)
    for parameter in draft.parameters():
        parameter.data += 0.2 * parameter.data.std() * torch.randn_like(parameter)
    return {"target": target, "draft": draft}


@pytest.fixture(scope="module", params=PROMPTS, ids=["short", "long"])
def prompt(request: pytest.FixtureRequest) -> Text:
    return tokenised(DEMO / "target", [request.param])[0]


def noise(V: int) -> Tensor:
    return torch.randn(V, V, generator=torch.Generator().manual_seed(1)).log_softmax(-1)


@pytest.mark.parametrize(
    ("name", "beams", "wider", "options"),
    [
        ("noise", 3, 2, {"eos_token_id": [LINE_END]}),
        ("model", 2, 1, {}),
        ("model", 3, 2, {"eos_token_id": [BLANK_LINE], "early_stopping": True, "length_penalty": 2.0}),
        ("model", 4, 2, {"eos_token_id": [LINE_END, BLANK_LINE]}),
        ("model", 5, 1, {"eos_token_id": [BLANK_LINE], "early_stopping": "never", "length_penalty": -1.0}),
        ("model", 8, 4, {"length_penalty": 0.0}),
    ],
    ids=str,
)
def test_the_text_is_that_of_transformers_beam_search(
    models: dict[str, Any], prompt: Text, name: str, beams: int, wider: int, options: dict[str, Any]
) -> None:
    ends = options.get("eos_token_id", [])
    target = models["target"]
    draft: Draft = Tree(models["draft"]) if name == "model" else Bigram(noise(target.config.vocab_size))
    model = DraftedBeams(target, draft, width=wider * beams, gamma=3).eval()
    found = search(model, prompt, beams, NEW_TOKENS, use_cache=False, **options)
    assert found == search(target, prompt, beams, NEW_TOKENS, **options)
    assert len(found) == NEW_TOKENS or found[-1] in ends
    saved = model.steps - model.target.passes
    assert saved > 0 if name == "model" else saved <= 1


def test_a_draft_that_is_the_target_saves_all_it_can(models: dict[str, Any], prompt: Text) -> None:
    """As many beams suffice: γ + 1 steps a pass, and w(γ + 1) tokens read in each."""
    beams, gamma = 3, 4
    model = DraftedBeams(models["target"], Tree(models["target"]), width=beams, gamma=gamma).eval()
    search(model, prompt, beams, NEW_TOKENS, use_cache=False)
    assert model.target.passes == -(-model.steps // (gamma + 1))
    assert model.target.read_tokens == len(prompt) + beams * gamma + (model.target.passes - 1) * beams * (gamma + 1)
