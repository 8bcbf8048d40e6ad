"""Shared by both encoder–decoder pairs: one training run, how models write, acceptance rates, errors, saving.

It works on tensors and ids, for translation and for speech.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import GenerationConfig, PreTrainedModel

from models.measure import Acceptance, accepted, mean_over_texts, until_end
from models.training import Optimizer, Run, Schedule, alone

IGNORED = -100  # in labels

SHALLOW_SHARE = 0.6  # of the time of a target; the draft is trained in one piece
WHOLE = Schedule(warmup=0.03, decay_from=0.3)


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy of `logits` `[B, L, V]` at the `labels` `[B, L]` that are not ignored."""
    return functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def train(
    module: nn.Module,
    minutes: float,
    checkpoint: Path,
    step: Callable[[int, float], tuple[Tensor, int]],
    evaluate: Callable[[], str],
    schedule: Schedule = WHOLE,
) -> None:
    """Train `module` for `minutes` of one core, on from `checkpoint` where there is one.

    `step(number, progress)` returns a loss and its count of tokens; the number alone decides which data it takes, so
    that a run that was stopped goes on with new data.
    """
    with alone():
        run = Run(Optimizer(module, 0.02, 3e-3), schedule, minutes, checkpoint, clock=time.process_time)
        run.resume()

        def forward_and_backward(progress: float) -> tuple[float, int]:
            loss, tokens = step(run.steps, progress)
            loss.backward()
            return loss.item(), tokens

        module.train()
        run.train(forward_and_backward, evaluate, every=120.0)
        module.eval()


def save(model: PreTrainedModel, tokenizer: Any, generation: GenerationConfig, folder: Path) -> None:
    """Write weights (bfloat16 safetensors), config, generation config and tokenizer to `folder`."""
    model.config.use_cache = True
    model.generation_config = generation
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@dataclass(frozen=True)
class Written:
    """A target's texts: `ids` `[B, prompt + n]`, the logits `[B, n, V]` they were drawn from, and which count.

    Tokens after an `end` do not count; the end itself does.
    """

    ids: Tensor
    logits: Tensor
    alive: Tensor
    end: int

    def texts(self) -> list[list[int]]:
        """The new ids of each row, its end left out."""
        new = self.ids[:, -self.logits.shape[1] :]
        return [row[alive & (row != self.end)].tolist() for row, alive in zip(new, self.alive, strict=True)]


@torch.no_grad()
def write(
    model: PreTrainedModel, inputs: dict[str, Tensor], prompt: Tensor, new_tokens: int, temperature: float, end: int
) -> Written:
    """Let `model` go on from the decoder's `prompt` `[B, n]`, each row until `end` or for `new_tokens`."""
    generator = torch.Generator().manual_seed(20)
    encoded = model.get_encoder()(**inputs)
    mask = {"attention_mask": inputs["attention_mask"]} if "attention_mask" in inputs else {}
    ids, fresh, cache = prompt, prompt, None
    logits: list[Tensor] = []
    while len(logits) < new_tokens and not bool((ids[:, prompt.shape[1] :] == end).any(dim=1).all()):
        out = model(encoder_outputs=encoded, decoder_input_ids=fresh, past_key_values=cache, use_cache=True, **mask)
        cache, row = out.past_key_values, out.logits[:, -1].float()
        if temperature == 0:
            fresh = row.argmax(dim=-1, keepdim=True)
        else:
            fresh = torch.multinomial((row / temperature).softmax(dim=-1), 1, generator=generator)
        ids = torch.cat([ids, fresh], dim=1)
        logits.append(row)
    return Written(ids, torch.stack(logits, dim=1), until_end(ids[:, prompt.shape[1] :], end), end)


@torch.no_grad()
def acceptance(draft: PreTrainedModel, inputs: dict[str, Tensor], written: Written, temperature: float) -> Acceptance:
    """α of `draft` on a target's texts: the mean of Σ min(p, q); at temperature 0 the share of equal choices."""
    logits = draft(**inputs, decoder_input_ids=written.ids[:, :-1]).logits.float()[:, -written.logits.shape[1] :]
    scores = accepted(written.logits, logits, temperature)
    return mean_over_texts("draft", temperature, scores, written.alive)


def edits(written: Sequence[object], right: Sequence[object]) -> int:
    """The fewest insertions, deletions and replacements that turn one sequence into the other."""
    row = list(range(len(right) + 1))
    for index, item in enumerate(written, start=1):
        before, row[0] = row[0], index
        for column, other in enumerate(right, start=1):
            before, row[column] = row[column], min(row[column] + 1, row[column - 1] + 1, before + (item != other))
    return row[-1]


def report(rows: list[Acceptance]) -> str:
    """A table of acceptance rates."""
    lines = [f"{'T':>4}{'α':>8}{'±':>8}{'tokens':>9}"]
    lines += [f"{row.temperature:>4g}{row.alpha:>8.3f}{row.standard_error:>8.3f}{row.tokens:>9,}" for row in rows]
    return "\n".join(lines)
