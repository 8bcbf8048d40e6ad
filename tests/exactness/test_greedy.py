"""Temperature 0, float32: each token that both services write has the highest logit of transformers' own forward pass
after the tokens before it, so that the text is that of `generate`.

10 prompts × 128 tokens on the demo pair (50 with `-m slow`), with proposals of 1 to 8 tokens. Passes of other widths
add in another order, so two logits that are equal up to rounding may change places. The test counts such ties: the
token's logit must be within `TIE_ULPS` of the highest one.
"""

import asyncio
import json
from collections.abc import Sequence
from itertools import cycle

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from outrider.client import AsyncClient, Completion, Options
from tests.cluster import MODELS

PROMPT_TOKENS = 24
NEW_TOKENS = 128
GAMMAS = (1, 2, 3, 5, 8)
TIE_ULPS = 8
"""Float32 logits differ by this much between a pass of one width and another: a few units in the last place."""

Ids = list[int]


async def speculate(address: str, prompts: Sequence[Ids]) -> list[Completion]:
    options = Options(max_new_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    async with AsyncClient(address) as client:
        calls = [
            client.complete(prompt, **(options | Options(gamma=gamma)))
            for prompt, gamma in zip(prompts, cycle(GAMMAS), strict=False)
        ]
        return await asyncio.gather(*calls)


@torch.no_grad()
def count_ties(model: PreTrainedModel, prompt: Ids, text: Ids) -> int:
    """Return the number of tokens that tie with the one of the highest logit; fail if another one is no tie."""
    logits = model(torch.tensor([[*prompt, *text[:-1]]]), logits_to_keep=len(text)).logits[0].float().numpy()
    own, best = logits[np.arange(len(text)), text], logits.max(-1)
    gaps = (best - own) / np.spacing(np.maximum(abs(best), abs(own)))
    at = int(gaps.argmax())
    assert gaps[at] <= TIE_ULPS, f"after {prompt}, token {at}: {text[at]} is {gaps[at]:g} ulp below the highest"
    return int((logits.argmax(-1) != text).sum())


@pytest.mark.parametrize("count", [10, pytest.param(50, marks=pytest.mark.slow)])
def test_text_at_temperature_0_is_that_of_transformers(count: int, draft_address: str) -> None:
    target = AutoModelForCausalLM.from_pretrained(MODELS / "target", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(MODELS / "target")
    lines = (MODELS / "prompts.jsonl").read_text(encoding="utf-8").splitlines()[:count]
    prompts = [tokenizer(json.loads(line)["text"]).input_ids[:PROMPT_TOKENS] for line in lines]
    completions = asyncio.run(speculate(draft_address, prompts))
    texts = [list(completion.token_ids) for completion in completions]
    assert [len(text) for text in texts] == [NEW_TOKENS] * count
    ties = sum(map(count_ties, [target] * count, prompts, texts))
    drafted = sum(completion.statistics.num_draft_tokens for completion in completions)
    accepted = sum(completion.statistics.num_accepted_tokens for completion in completions)
    print(f"{ties} ties; {accepted} of {drafted} drafted tokens accepted")
    # Drafts were accepted, and drafts were rejected.
    assert count < accepted < drafted
    assert ties <= count // 10
