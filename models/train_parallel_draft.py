"""Teach the demo draft to draft several tokens in one pass, without forgetting how to draft one.

It reads lessons (text with the target's distributions; the target writes them where there are none), and goes on where
it was stopped. The budgets are CPU time of one thread, so that a busy or halted machine changes nothing.

    python -m models.train_parallel_draft --work /tmp/parallel-draft --out /tmp/parallel-draft/draft
"""

import argparse
import time
from collections import defaultdict, deque
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from models import DEMO
from models.corpus import training_documents
from models.distill import divergences
from models.parallel import Groups, groups_of, parallel_logits, with_mask_token
from models.teaching import Lessons, load_lessons, teach
from models.tokenizer import load_tokenizer, token_stream
from models.training import ATTENTION, DTYPE, Optimizer, Run, Schedule, alone, save_model

MATRIX_RATE, VECTOR_RATE = 0.004, 1e-3  # higher ones make it forget how to draft one token
WRITTEN_PER_STEP, LONG_PER_STEP = 8, 2  # windows; one step in eight is of long windows
LONG_ONE_IN = 8
AT_ONCE = 4  # windows
MASKS = 7
# Sizes of the groups of masks, repeated. The first masks are worth most, and all others count on them: so there are
# 8, 6, 4, 3, 2, 1 and 1 masks of each number.
SIZES = (7, 1, 4, 2, 3, 1, 5, 2)
REPEATED = {False: 6, True: 16}  # for written texts, for long windows
REJECTION_FROM = 0.5  # share of the time after which the masks' loss is the rejection rate
REAL_WEIGHT = 2.0  # of the rejection rate after real tokens: the draft keeps most of what the masks cost it


def some_groups(length: int, repeated: int, generator: np.random.Generator) -> Groups:
    """Groups of masks behind random places of a text of `length`, all of which predict a token that is judged."""
    sizes = SIZES * repeated
    anchors = generator.choice(length - max(SIZES), len(sizes), replace=False)
    return groups_of([int(anchor) for anchor in anchors], sizes)


def chosen(lessons: Lessons, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The lessons' parts at those rows, in the types that computing needs."""
    return lessons.ids[rows].long(), lessons.top_ids[rows].long(), lessons.top_probabilities[rows].float()


def train(
    draft: LlamaForCausalLM,
    lessons: Path,
    minutes: float,
    checkpoint: Path,
    clock: Callable[[], float] = time.process_time,
) -> Run:
    """Train `draft` for `minutes` on the lessons in that folder; goes on from `checkpoint` if it exists.

    What a step sees depends on its number alone, so a run that was stopped ends as one that was not.
    """
    draft.config._attn_implementation = ATTENTION
    mask_token = draft.config.pard_token
    shelves = {False: load_lessons(lessons, "written"), True: load_lessons(lessons, "corpus")}
    per_step = {False: WRITTEN_PER_STEP, True: LONG_PER_STEP}
    run = Run(Optimizer(draft, MATRIX_RATE, VECTOR_RATE), Schedule(decay_from=0.3), minutes, checkpoint, clock)
    run.resume()
    recent: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=60))

    def step(progress: float) -> tuple[float, int]:
        generator = np.random.default_rng([24, run.steps])
        long = run.steps % LONG_ONE_IN == LONG_ONE_IN - 1
        shelf = shelves[long]
        rows = torch.from_numpy(generator.choice(len(shelf), per_step[long], replace=False))
        groups = some_groups(shelf.ids.shape[1], REPEATED[long], generator)
        total = 0.0
        parts = rows.split(1 if long else AT_ONCE)
        for part in parts:
            ids, top_ids, top_probabilities = chosen(shelf, part)
            real, masked = parallel_logits(draft, ids, groups, mask_token)
            _, rejected = divergences(real.flatten(0, 1), top_ids.flatten(0, 1), top_probabilities.flatten(0, 1))
            kl, missed = divergences(
                masked.flatten(0, 1),
                top_ids[:, groups.rows].flatten(0, 1),
                top_probabilities[:, groups.rows].flatten(0, 1),
            )
            masks = kl if progress < REJECTION_FROM else missed
            loss = REAL_WEIGHT * rejected.mean() + masks.mean()
            (loss / len(parts)).backward()
            total += loss.item() / len(parts)
            if not long:
                recent[0].append(rejected.mean().item())
                for number in range(1, MASKS + 1):
                    at = groups.offsets == number
                    recent[number].append(missed.view(len(ids), -1)[:, at].mean().item())
        return total, len(rows) * (shelf.ids.shape[1] + len(groups.rows))

    def report() -> str:
        return "acceptance " + " ".join(f"{1 - np.mean(recent[number]):.3f}" for number in sorted(recent))

    run.train(step, report, every=120.0)
    return run


def main() -> None:
    """Make lessons where there are none, then train, then write the draft."""
    parser = argparse.ArgumentParser(description="Teach the demo draft to draft several tokens in one pass.")
    parser.add_argument("--work", type=Path, required=True, help="folder for checkpoints and lessons (about 0.5 GB)")
    parser.add_argument("--out", type=Path, required=True, help="where the draft is written")
    parser.add_argument("--target", type=Path, default=DEMO / "target")
    parser.add_argument("--draft", type=Path, default=DEMO / "draft", help="the draft to begin from")
    parser.add_argument("--lesson-minutes", type=float, default=13.0, help="of two processes (default 13)")
    parser.add_argument("--minutes", type=float, default=55.0, help="CPU time of training (default 55)")
    arguments = parser.parse_args()
    lessons = arguments.work / "lessons"
    tokenizer = load_tokenizer(arguments.draft)
    if not (lessons / "complete").exists():
        stream = token_stream(tokenizer, training_documents())
        teach(arguments.target, stream, lessons, arguments.lesson_minutes, workers=2)
        (lessons / "complete").touch()
    draft = with_mask_token(LlamaForCausalLM.from_pretrained(arguments.draft, dtype=DTYPE))
    with alone():
        run = train(draft, lessons, arguments.minutes, arguments.work / "parallel.pt")
    save_model(draft, tokenizer, arguments.out)
    print(f"{run.spent / 60:.1f} min, {run.steps} steps, {run.tokens:,} positions", flush=True)


if __name__ == "__main__":
    main()
