"""Measure the pair: how often drafted tokens would be accepted in text that the target itself writes.

At temperature 1 the acceptance rate is the mean of Σ min(p, q) over the positions of sampled text [L 3.1, 3.2]; at
temperature 0 it is the share of positions of greedy text where both models name the same likeliest token. Everything
runs in float32 on the shipped bfloat16 weights. It prints a table, then one JSON document.

    python -m models.measure
"""

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from models import DEMO, ngram
from models.corpus import Document, held_out_documents, training_documents
from models.generation import Writer, steps
from models.tokenizer import load_tokenizer, token_stream

PROMPT, NEW, ROWS = 48, 128, 96
WINDOW = 512

# A drafter: from ids [B, L] to the log-probabilities after each position, [B, L, V].
LogProbabilities = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Acceptance:
    """One drafter's acceptance rate at one temperature, with the standard error over texts."""

    drafter: str
    temperature: float
    alpha: float
    standard_error: float
    tokens: int


def load(folder: Path) -> LlamaForCausalLM:
    """The shipped weights, as they are, in float32."""
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def line_starts(documents: list[Document], tokenizer: PreTrainedTokenizerFast, count: int, length: int) -> Tensor:
    """`[count, length]` ids: snippets that begin at a line's start, spread evenly over the documents."""
    line_ends = {
        id_ for token, id_ in tokenizer.get_vocab().items() if set(token) == {"Ċ"}
    }  # byte 10, as BPE writes it
    snippets = []
    for document in documents:
        ids = tokenizer.backend_tokenizer.encode(document.text).ids
        begins = [0] + [index + 1 for index, id_ in enumerate(ids) if id_ in line_ends]
        snippets += [ids[begin : begin + length] for begin in begins if begin + length <= len(ids)]
    if len(snippets) < count:
        raise ValueError(f"documents hold {len(snippets)} snippets of {length} tokens; {count} are needed")
    chosen = np.linspace(0, len(snippets) - 1, count).astype(int)
    return torch.tensor([snippets[index] for index in chosen])


def write_with_logits(
    target: LlamaForCausalLM, prompts: Tensor, new_tokens: int, temperature: float
) -> tuple[Tensor, Tensor]:
    """Let the target continue the prompts: ids `[B, n + new_tokens]`, and the logits `[B, new_tokens, V]`."""
    generator = torch.Generator().manual_seed(20)
    temperatures = torch.full((len(prompts),), temperature)
    ids, logits = zip(*steps(target, prompts, new_tokens, temperatures, generator), strict=True)
    return torch.cat(ids, dim=1), torch.cat([logits[0][:, -1:], *logits[1:-1]], dim=1)


def model_log_probabilities(model: LlamaForCausalLM) -> LogProbabilities:
    """Log-probabilities of a language model, without the mask token of a parallel draft, which is never drafted."""
    end = getattr(model.config, "pard_token", None)
    return lambda ids: Writer(model, *ids.shape).extend(ids)[..., :end].log_softmax(dim=-1)


def table_log_probabilities(table: np.ndarray) -> LogProbabilities:
    """Log-probabilities from a table: `[V, V]`, by the previous token; or `[V]`, the same everywhere."""
    logs = torch.from_numpy(np.log(table)).float()
    return lambda ids: logs[ids] if logs.ndim == 2 else logs.expand(*ids.shape, -1)


def until_end(new: Tensor, end: int) -> Tensor:
    """Whether each position of texts `[B, L]` is not behind the first token `end`."""
    ends = new == end
    return ends.cumsum(dim=1) - ends.long() == 0


def accepted(p_logits: Tensor, q_logits: Tensor, temperature: float) -> Tensor:
    """Σ min(p, q) of each row of two `[..., V]`; at temperature 0, whether the likeliest tokens agree."""
    if temperature == 0:
        return (p_logits.argmax(dim=-1) == q_logits.argmax(dim=-1)).float()
    p, q = (p_logits / temperature).softmax(dim=-1), (q_logits / temperature).softmax(dim=-1)
    return torch.minimum(p, q).sum(dim=-1)


def acceptance(
    name: str, log_probabilities: LogProbabilities, ids: Tensor, logits: Tensor, temperature: float, end: int
) -> Acceptance:
    """The acceptance rate of one drafter on the target's text; tokens after an end of text are left out."""
    begin = ids.shape[1] - logits.shape[1]
    alive = until_end(ids[:, begin:], end)
    scores = []
    for row_ids, row_logits in zip(ids.split(8), logits.split(8), strict=True):
        log_q = log_probabilities(row_ids)[:, begin - 1 : -1]
        scores.append(accepted(row_logits, log_q, temperature))
    return mean_over_texts(name, temperature, torch.cat(scores), alive)


def mean_over_texts(name: str, temperature: float, scores: Tensor, alive: Tensor) -> Acceptance:
    """The acceptance rate from `scores` `[B, L]` of positions, where `alive` `[B, L]` says which of them count."""
    score = scores * alive
    alpha = float(score.sum() / alive.sum())
    spread = (score.sum(dim=1) - alpha * alive.sum(dim=1)).square().sum().sqrt() / alive.sum()
    return Acceptance(name, temperature, alpha, float(spread), int(alive.sum()))


def bits_per_token(log_probabilities: LogProbabilities, stream: np.ndarray) -> float:
    """Mean loss in bits on `stream`, in windows of `WINDOW` ids without overlap."""
    count = len(stream) // WINDOW
    windows = torch.from_numpy(stream[: count * WINDOW].astype(np.int64)).view(count, WINDOW)
    losses = [
        functional.nll_loss(
            log_probabilities(rows)[:, :-1].flatten(0, 1), rows[:, 1:].flatten(), reduction="sum"
        ).item()
        for rows in windows.split(8)
    ]
    return sum(losses) / (count * (WINDOW - 1)) / math.log(2)


@torch.no_grad()
def measure(target_folder: Path, draft_folder: Path, rows: int = ROWS) -> dict[str, object]:
    """Measure everything the model card states; returns it as plain data."""
    tokenizer = load_tokenizer(target_folder)
    target, draft = load(target_folder), load(draft_folder)
    held_out, training = held_out_documents(), training_documents()
    stream, held_out_stream = token_stream(tokenizer, training), token_stream(tokenizer, held_out)
    vocabulary = target.config.vocab_size
    drafters: dict[str, LogProbabilities] = {
        "draft": model_log_probabilities(draft),
        "bigram": table_log_probabilities(ngram.bigram(stream, vocabulary)),
        "unigram": table_log_probabilities(ngram.unigram(stream, vocabulary)),
    }
    prompts = line_starts(held_out, tokenizer, rows, PROMPT)
    results = []
    for temperature in (1.0, 0.0):
        ids, logits = write_with_logits(target, prompts, NEW, temperature)
        for name, log_probabilities in drafters.items():
            results.append(acceptance(name, log_probabilities, ids, logits, temperature, tokenizer.eos_token_id))
    loss = {
        name: bits_per_token(log_probabilities, held_out_stream)
        for name, log_probabilities in {"target": model_log_probabilities(target), **drafters}.items()
    }
    return {
        "parameters": {"target": target.num_parameters(), "draft": draft.num_parameters()},
        "training_tokens": len(stream),
        "held_out_tokens": len(held_out_stream),
        "held_out_bytes_per_token": sum(len(d.text.encode()) for d in held_out) / len(held_out_stream),
        "held_out_bits_per_token": loss,
        "acceptance": [asdict(result) for result in results],
    }


def main() -> None:
    """Print the table, then the JSON document."""
    parser = argparse.ArgumentParser(description="Measure the acceptance rate of the demo pair.")
    parser.add_argument("--target", type=Path, default=DEMO / "target")
    parser.add_argument("--draft", type=Path, default=DEMO / "draft")
    parser.add_argument("--rows", type=int, default=ROWS, help=f"texts of {NEW} new tokens each (default {ROWS})")
    arguments = parser.parse_args()
    report = measure(arguments.target, arguments.draft, arguments.rows)
    print(f"{'drafter':<10}{'T':>4}{'α':>8}{'±':>8}{'tokens':>9}")
    for row in report["acceptance"]:  # type: ignore[attr-defined]
        print(
            f"{row['drafter']:<10}{row['temperature']:>4g}{row['alpha']:>8.3f}{row['standard_error']:>8.3f}{row['tokens']:>9,}"
        )
    for name, bits in report["held_out_bits_per_token"].items():  # type: ignore[attr-defined]
        print(f"{name:<10}{bits:8.3f} bits per held-out token")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
