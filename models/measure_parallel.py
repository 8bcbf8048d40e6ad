"""Measure a parallel draft: how often each token of one pass would be accepted in text that the target itself writes.

From every place of such texts the draft is asked for 8 tokens in one pass: α of position i is the mean of Σ min(p, q_i)
over the places, p being the target's distribution after the true text before that token; at temperature 0 it is the
share of places where both models name the same likeliest token. No mask sees a drafted token, so the figures of s
tokens a pass are the first s of these, over and over. The same at the ends of the demo's prompts alone. It prints three
tables, then one JSON document.

    python -m models.measure_parallel
"""

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from models import DEMO
from models.corpus import held_out_documents
from models.measure import (
    NEW,
    PROMPT,
    ROWS,
    accepted,
    line_starts,
    load,
    mean_over_texts,
    until_end,
    write_with_logits,
)  # fmt: skip
from models.parallel import groups_of, parallel_logits
from models.tokenizer import load_tokenizer
from models.training import ATTENTION

TEMPERATURES = (0.0, 0.3, 0.7, 1.0)
POSITIONS = 8
PER_PASS = (1, 2, 4, 8)
CONTINUATIONS = 16  # of each of the demo's prompts


def scores_by_position(
    draft: LlamaForCausalLM, mask_token: int, ids: Tensor, logits: Tensor, temperature: float
) -> Tensor:
    """`[B, N, POSITIONS]`: Σ min(p, q) of position i of a pass that begins at place n, NaN beyond the text's end.

    `ids` `[B, L]` are the target's text, `logits` `[B, N, V]` its logits for the last N tokens.
    """
    places = logits.shape[1]
    first = ids.shape[1] - places - 1  # the last token of the prompt: place 0 drafts what follows it
    sizes = [min(POSITIONS, places - place) - 1 for place in range(places)]
    groups = groups_of(range(first, first + places), sizes)
    scores = torch.full((len(ids), places, POSITIONS), float("nan"))
    for row in range(len(ids)):
        real, masked = parallel_logits(draft, ids[row : row + 1], groups, mask_token)
        scores[row, :, 0] = accepted(logits[row], real[0, first:-1], temperature)
        scores[row, groups.anchors - first, groups.offsets] = accepted(
            logits[row, groups.rows - first], masked[0], temperature
        )
    return scores


def accepted_of_proposal(scores: Tensor, per_pass: int) -> Tensor:
    """`[B, N']`: tokens accepted in a row of a proposal of `POSITIONS`, drafted with `per_pass` of them in one pass."""
    begins = scores.shape[1] - POSITIONS + 1
    columns = [scores[:, index // per_pass * per_pass :, index % per_pass][:, :begins] for index in range(POSITIONS)]
    return torch.stack(columns, dim=-1).cumprod(dim=-1).sum(dim=-1)


def at_prompts(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, mask_token: int, temperature: float, prompts: list[Tensor]
) -> list[float]:
    """α by position of the pass that begins at the end of each of `prompts` `[n]`, over `CONTINUATIONS` of each."""
    scores = []
    for prompt in prompts:
        ids, logits = write_with_logits(target, prompt.expand(CONTINUATIONS, -1), POSITIONS, temperature)
        scores.append(scores_by_position(draft, mask_token, ids, logits, temperature)[:, 0].mean(dim=0))
    return [float(alpha) for alpha in torch.stack(scores).mean(dim=0)]


@torch.no_grad()
def measure(target_folder: Path, draft_folder: Path, rows: int = ROWS) -> list[dict[str, object]]:
    """What the model card states, for each temperature, as plain data. Raises ValueError for a draft without a mask."""
    draft = load(draft_folder)
    mask_token = getattr(draft.config, "pard_token", None)
    if mask_token is None:
        raise ValueError(f"{draft_folder} names no pard_token: it drafts one token a pass")
    target = load(target_folder)
    draft.config._attn_implementation = ATTENTION
    tokenizer = load_tokenizer(target_folder)
    prompts = line_starts(held_out_documents(), tokenizer, rows, PROMPT)
    lines = (DEMO / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    ends = [torch.tensor(tokenizer.encode(json.loads(line)["text"])) for line in lines[:rows]]
    report = []
    for temperature in TEMPERATURES:
        ids, logits = write_with_logits(target, prompts, NEW, temperature)
        scores = scores_by_position(draft, mask_token, ids, logits, temperature)
        alive = until_end(ids[:, PROMPT:], tokenizer.eos_token_id)
        positions = []
        for index in range(POSITIONS):
            known = scores[:, : NEW - index, index]
            positions.append(mean_over_texts("draft", temperature, known, alive[:, index:]))
        whole = alive[:, POSITIONS - 1 :]  # a place counts where its eighth token is still text
        report.append(
            {
                "temperature": temperature,
                "alpha": [position.alpha for position in positions],
                "standard_error": [position.standard_error for position in positions],
                "accepted_of_8": {
                    per_pass: mean_over_texts("draft", temperature, accepted_of_proposal(scores, per_pass), whole).alpha
                    for per_pass in PER_PASS
                },
                "alpha_at_prompts": at_prompts(target, draft, mask_token, temperature, ends),
                "tokens": positions[0].tokens,
            }
        )
    return report


def main() -> None:
    """Print the tables, then the JSON document."""
    parser = argparse.ArgumentParser(
        description="Measure the acceptance rate of each token of a parallel draft's pass."
    )
    parser.add_argument("--target", type=Path, default=DEMO / "target")
    parser.add_argument("--draft", type=Path, default=DEMO / "parallel-draft")
    parser.add_argument("--rows", type=int, default=ROWS, help=f"texts of {NEW} new tokens each (default {ROWS})")
    arguments = parser.parse_args()
    try:
        report = measure(arguments.target, arguments.draft, arguments.rows)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    for key, title in (("alpha", "α by position"), ("alpha_at_prompts", "α by position at the ends of prompts")):
        print(f"{title}\nT   " + "".join(f"{position:>7}" for position in range(1, POSITIONS + 1)))
        for row in report:
            print(f"{row['temperature']:<4}" + "".join(f"{alpha:7.3f}" for alpha in row[key]))  # type: ignore[attr-defined]
    print("accepted of 8 drafted, by tokens a pass\nT   " + "".join(f"{per_pass:>7}" for per_pass in PER_PASS))
    for row in report:
        print(f"{row['temperature']:<4}" + "".join(f"{row['accepted_of_8'][s]:7.2f}" for s in PER_PASS))  # type: ignore[index]
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
