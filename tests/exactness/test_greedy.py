"""Temperature 0, float32: both services write, token for token, the text of transformers' own `generate`.

10 prompts × 128 tokens on the demo pair (50 with `-m slow`), with proposals of 1 to 8 tokens. Passes of other widths
add in another order, so two logits that are equal up to rounding may change places. The test counts such ties: both
candidates' logits, from transformers at that prefix, must be within `TIE_ULPS` of each other. The comparison goes on
with the text that `generate` writes after the service's token.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from itertools import cycle

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

from outrider.client import AsyncClient, Completion, Options
from tests.cluster import MODELS

PROMPT_TOKENS = 24
NEW_TOKENS = 128
GAMMAS = (1, 2, 3, 5, 8)
TIE_ULPS = 8
"""Float32 logits differ by this much between a pass of one width and another: a few units in the last place."""

Ids = list[int]


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(MODELS / "target", dtype=torch.float32).eval()
    assert isinstance(model, PreTrainedModel)
    # Not the checkpoint's own settings: 128 tokens, whatever they are.
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0, use_cache=True)
    return model


@torch.no_grad()
def generate(model: PreTrainedModel, prompts: Sequence[Ids], new_tokens: int) -> list[Ids]:
    """Return transformers' text after each prompt, from one batch, padded on the left."""
    width = max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    written: list[Ids] = model.generate(ids, attention_mask=mask, max_new_tokens=new_tokens)[:, width:].tolist()
    return written


async def speculate(address: str, prompts: Sequence[Ids]) -> list[Completion]:
    options = Options(max_new_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    async with AsyncClient(address) as client:
        calls = [
            client.complete(prompt, **(options | Options(gamma=gamma)))
            for prompt, gamma in zip(prompts, cycle(GAMMAS), strict=False)
        ]
        return await asyncio.gather(*calls)


@torch.no_grad()
def gap_in_ulps(model: PreTrainedModel, prefix: Ids, first: int, second: int) -> float:
    """Return how far apart two candidates' logits are after a prefix, in units in the last place of the larger one."""
    logits = model(torch.tensor([prefix]), logits_to_keep=1).logits[0, -1].float().numpy()
    return float(abs(logits[first] - logits[second]) / np.spacing(np.float32(max(abs(logits[[first, second]])))))


def count_ties(model: PreTrainedModel, prompt: Ids, ours: Ids, theirs: Ids) -> int:
    """Return the number of ties at which the texts differ; fail if they differ elsewhere."""
    ties = 0
    while ours != theirs:
        at = next(i for i, (one, other) in enumerate(zip(ours, theirs, strict=True)) if one != other)
        gap = gap_in_ulps(model, [*prompt, *ours[:at]], ours[at], theirs[at])
        assert gap <= TIE_ULPS, f"after {prompt}, token {at}: {ours[at]} and {theirs[at]} are {gap:g} ulp apart"
        ties += 1
        kept, rest = ours[: at + 1], len(ours) - at - 1
        theirs = [*kept, *generate(model, [[*prompt, *kept]], rest)[0]] if rest else kept
    return ties


@pytest.mark.parametrize("count", [10, pytest.param(50, marks=pytest.mark.slow)])
def test_text_at_temperature_0_is_that_of_transformers(count: int, draft_address: str, target: PreTrainedModel) -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODELS / "target")
    lines = (MODELS / "prompts.jsonl").read_text(encoding="utf-8").splitlines()[:count]
    prompts = [tokenizer(json.loads(line)["text"]).input_ids[:PROMPT_TOKENS] for line in lines]
    expected = generate(target, prompts, NEW_TOKENS)
    completions = asyncio.run(speculate(draft_address, prompts))
    texts = [list(completion.token_ids) for completion in completions]
    assert [len(text) for text in texts] == [NEW_TOKENS] * count
    ties = sum(map(count_ties, [target] * count, prompts, texts, expected))
    drafted = sum(completion.statistics.num_draft_tokens for completion in completions)
    accepted = sum(completion.statistics.num_accepted_tokens for completion in completions)
    print(f"{ties} ties; {accepted} of {drafted} drafted tokens accepted")
    # Drafts were accepted, and drafts were rejected.
    assert count < accepted < drafted
    assert ties <= count // 10
