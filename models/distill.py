"""Distil the demo draft from the demo target's distributions [L 6]: by KL divergence, then by the rejection rate.

It reads lessons (text with the target's distributions) and never runs the target.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, distributed
from transformers import LlamaForCausalLM

from models.teaching import Lessons, load_lessons
from models.train_target import hidden_states, llama_config
from models.training import ATTENTION, DTYPE, Optimizer, Run, Schedule

MATRIX_RATE, VECTOR_RATE = 0.015, 3e-3
WRITTEN_PER_STEP, LONG_PER_STEP = 8, 2  # windows per process; one step in six is of long windows
LONG_ONE_IN = 6
REJECTION_FROM = 0.55  # share of the time after which the loss is the rejection rate
LAYERS_TAKEN = (0, 3)  # of the target, to begin from: two of those it had before it was deepened
AT_ONCE = 2048


def draft_from(target: LlamaForCausalLM, end: int) -> LlamaForCausalLM:
    """A draft that begins as the target with all but `LAYERS_TAKEN` left out."""
    draft = LlamaForCausalLM(llama_config(len(LAYERS_TAKEN), end)).to(DTYPE)
    draft.model.embed_tokens.load_state_dict(target.model.embed_tokens.state_dict())
    draft.model.norm.load_state_dict(target.model.norm.state_dict())
    for layer, taken in zip(draft.model.layers, LAYERS_TAKEN, strict=True):
        layer.load_state_dict(target.model.layers[taken].state_dict())
    return draft


def divergences(logits: Tensor, top_ids: Tensor, top_probabilities: Tensor) -> tuple[Tensor, Tensor]:
    """KL(p‖q) in nats and the rejection rate 1 - Σ min(p, q) of each row, `[N]` both.

    `logits` `[N, V]` are the draft's; `top_ids`, `top_probabilities` `[N, K]` the target's largest entries. The tokens
    outside the K count as one bucket, which makes both a little smaller than they are.
    """
    log_q = logits.log_softmax(dim=-1).gather(1, top_ids)
    q = log_q.exp()
    rest_p = (1.0 - top_probabilities.sum(dim=1)).clamp_min(1e-6)
    rest_q = (1.0 - q.sum(dim=1)).clamp_min(1e-6)
    entropy_like = torch.xlogy(top_probabilities, top_probabilities).sum(dim=1)
    kl = entropy_like - (top_probabilities * log_q).sum(dim=1) + rest_p * (rest_p.log() - rest_q.log())
    accepted = torch.minimum(top_probabilities, q).sum(dim=1) + torch.minimum(rest_p, rest_q)
    return kl, 1.0 - accepted


def batches(lessons: Lessons, count: int, generator: np.random.Generator) -> Iterator[Tensor]:
    """For ever: indices `[count]` of lessons, each epoch in a new order."""
    while True:
        order = torch.from_numpy(generator.permutation(len(lessons)))
        yield from order[: len(order) // count * count].view(-1, count)


def distill(
    target: LlamaForCausalLM, lessons: Path, minutes: float, checkpoint: Path, end: int
) -> tuple[LlamaForCausalLM, Run]:
    """Train a draft for `minutes` on the lessons in that folder; goes on from `checkpoint` if it exists."""
    torch.manual_seed(2)
    draft = draft_from(target, end)
    draft.config._attn_implementation = ATTENTION
    written, long = load_lessons(lessons, "written"), load_lessons(lessons, "corpus")
    if distributed.get_rank() == 0:
        print(
            f"draft: {draft.num_parameters():,} parameters; lessons: {written.tokens:,} + {long.tokens:,}", flush=True
        )
    run = Run(Optimizer(draft, MATRIX_RATE, VECTOR_RATE), Schedule(decay_from=0.35), minutes, checkpoint)
    run.resume()
    generator = np.random.default_rng([5, run.steps, distributed.get_rank()])
    shelves = {
        False: (written, batches(written, WRITTEN_PER_STEP, generator)),
        True: (long, batches(long, LONG_PER_STEP, generator)),
    }
    recent: list[tuple[float, float]] = []

    def step(progress: float) -> tuple[float, int]:
        lesson, order = shelves[run.steps % LONG_ONE_IN == 0]
        rows = next(order)
        ids = lesson.ids[rows].long()
        parts = max(1, ids.numel() // AT_ONCE)
        total, means = 0.0, torch.zeros(2)
        for part, chosen in zip(ids.chunk(parts), rows.chunk(parts), strict=True):
            logits = draft.lm_head(hidden_states(draft, part)).float().flatten(0, 1)
            kl, rejected = divergences(
                logits,
                lesson.top_ids[chosen].flatten(0, 1).long(),
                lesson.top_probabilities[chosen].flatten(0, 1).float(),
            )
            loss = (kl if progress < REJECTION_FROM else rejected).mean()
            (loss * len(part) / len(ids)).backward()
            total += loss.item() * len(part) / len(ids)
            means += torch.tensor([kl.mean().item(), rejected.mean().item()]) * len(part) / len(ids)
        if lesson is written:
            recent.append((float(means[0]), float(means[1])))
        return total, ids.numel()

    def report() -> str:
        last = np.array(recent[-30:]).mean(axis=0)
        return f"on lessons: KL {last[0]:.4f}, acceptance {1 - last[1]:.4f}"

    run.train(step, report, every=60.0)
    return draft, run
