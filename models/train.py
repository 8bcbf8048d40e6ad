"""Make the demo pair from nothing: corpus, tokenizer, target, lessons, draft; goes on where it was stopped.

python -m models.train --work /tmp/demo-pair
"""

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
from torch import distributed
from transformers import LlamaForCausalLM

from models import DEMO
from models.corpus import documents
from models.distill import distill
from models.measure import WINDOW, bits_per_token, model_log_probabilities
from models.teaching import teach
from models.tokenizer import load_tokenizer, token_stream, train_tokenizer
from models.train_target import train_target
from models.training import DTYPE, Run, in_processes, is_made, save_model


def prepare(work: Path) -> tuple[Any, np.ndarray, np.ndarray]:
    """The tokenizer, the training ids and the held-out ids; made once, then read from `work`."""
    if not (work / "held_out.npy").exists():
        modules = documents()
        training = [module for module in modules if not module.held_out]
        tokenizer = train_tokenizer(module.text for module in training)
        tokenizer.save_pretrained(work / "tokenizer")
        np.save(work / "training.npy", token_stream(tokenizer, training))
        fresh = work / "held_out.new.npy"
        np.save(fresh, token_stream(tokenizer, [module for module in modules if module.held_out]))
        fresh.replace(work / "held_out.npy")  # a kill before leaves none, and all are made again
    return load_tokenizer(work / "tokenizer"), np.load(work / "training.npy"), np.load(work / "held_out.npy")


def make_target(work: Path, out: Path, minutes: float) -> None:
    """Train the target and write it to `out`; runs in every process of the run."""
    tokenizer, training, held_out = prepare(work)
    target, first, second = train_target(training, held_out, minutes, work, tokenizer.eos_token_id)
    if distributed.get_rank() > 0:
        return
    bits = bits_per_token(model_log_probabilities(target), held_out[: 1000 * WINDOW])
    print(f"target: {bits:.3f} held-out bits per token", flush=True)
    save_model(target, tokenizer, out / "target")
    _note(work / "target.json", shallow=first, deep=second)


def make_lessons(work: Path, out: Path, minutes: float, workers: int) -> None:
    """Let the target in `out` write the draft's lessons."""
    _, training, _ = prepare(work)
    teach(out / "target", training, work / "lessons", minutes, workers)
    (work / "lessons" / "complete").touch()


def make_draft(work: Path, out: Path, minutes: float) -> None:
    """Distil the draft from the lessons and write it to `out`; runs in every process of the run."""
    tokenizer, _, _ = prepare(work)
    target = LlamaForCausalLM.from_pretrained(out / "target", dtype=DTYPE)
    draft, run = distill(target, work / "lessons", minutes, work / "draft.pt", tokenizer.eos_token_id)
    if distributed.get_rank() > 0:
        return
    save_model(draft, tokenizer, out / "draft")
    _note(work / "draft.json", draft=run)


def _note(path: Path, **runs: Run) -> None:
    rows = {name: {"tokens": run.tokens, "steps": run.steps, "minutes": run.spent / 60} for name, run in runs.items()}
    path.write_text(json.dumps(rows, indent=2) + "\n")


def main() -> None:
    """Run the stages that are not done yet."""
    parser = argparse.ArgumentParser(description="Train the demo pair. Each stage ends with its time, in minutes.")
    parser.add_argument("--work", type=Path, required=True, help="folder for checkpoints and lessons (about 2 GB)")
    parser.add_argument("--out", type=Path, default=DEMO, help="where target/ and draft/ are written")
    parser.add_argument("--target-minutes", type=float, default=42.0)
    parser.add_argument("--lesson-minutes", type=float, default=26.0)
    parser.add_argument("--draft-minutes", type=float, default=42.0)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes, of one thread each")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    prepare(arguments.work)
    if not is_made("target", arguments.work, arguments.out):
        in_processes(make_target, arguments.workers, arguments.work, arguments.out, arguments.target_minutes)
    if not (arguments.work / "lessons" / "complete").exists():
        make_lessons(arguments.work, arguments.out, arguments.lesson_minutes, arguments.workers)
    if not is_made("draft", arguments.work, arguments.out):
        in_processes(make_draft, arguments.workers, arguments.work, arguments.out, arguments.draft_minutes)
    print(f"done in {(time.monotonic() - begun) / 60:.1f} min; now: python -m models.measure", flush=True)


if __name__ == "__main__":
    main()
