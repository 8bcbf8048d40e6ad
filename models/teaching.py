"""The draft's lessons: text with the target's distributions, written once so that no epoch runs the target again.

Most of it the target wrote itself (acceptance is measured on such text), going on from snippets of the corpus; the rest
is corpus text in long windows. It does not depend on the draft.
"""

import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from models.generation import write
from models.tokenizer import CONTEXT
from models.training import DTYPE, batch_of, windows

KEPT = 64  # largest probabilities of each distribution; the rest is one bucket
PROMPT, NEW = 32, 224
ROWS = 256
# Of eight texts, six are drawn at temperature 1, one at 0.7, and one is greedy.
TEMPERATURES = (1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.7, 0.0)
LONG_SHARE = 0.15  # of the teaching time goes to corpus windows of the full context


@dataclass(frozen=True)
class Lessons:
    """Windows of text with distributions: `ids` `[N, L]`, `top_ids` and `top_probabilities` `[N, L, K]`."""

    ids: Tensor
    top_ids: Tensor
    top_probabilities: Tensor

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def tokens(self) -> int:
        """Positions with a distribution."""
        return self.ids.numel()


def teach(target: Path, stream: np.ndarray, folder: Path, minutes: float, workers: int) -> None:
    """Fill `folder` with lessons for `minutes`, on `workers` processes of one thread each."""
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "stream.npy", stream)
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        jobs = [pool.submit(_teach_alone, target, folder, seed, minutes) for seed in range(workers)]
        for job in jobs:
            job.result()


def load_lessons(folder: Path, kind: str) -> Lessons:
    """All lessons of one kind (`written` or `corpus`) in `folder`. Raises FileNotFoundError where there are none."""
    shards = [torch.load(path, weights_only=True) for path in sorted(folder.glob(f"{kind}-*.pt"))]
    if not shards:
        raise FileNotFoundError(f"no lessons of kind {kind!r} in {folder}")
    return Lessons(*(torch.cat([shard[part] for shard in shards]) for part in ("ids", "top_ids", "top_probabilities")))


def _teach_alone(target: Path, folder: Path, seed: int, minutes: float) -> None:
    torch.set_num_threads(1)
    model = LlamaForCausalLM.from_pretrained(target, dtype=DTYPE)
    stream = np.load(folder / "stream.npy")
    begun = time.monotonic()

    def spent() -> float:
        return (time.monotonic() - begun) / (60.0 * minutes)

    number, written = 0, 0
    long = windows(stream, CONTEXT, np.random.default_rng(1000 + seed))
    while spent() < LONG_SHARE:
        _save(folder / f"corpus-{seed}-{number:04d}.pt", model, batch_of(long, 8), 0, torch.Generator())
        number += 1
    snippets = windows(stream, PROMPT, np.random.default_rng(2000 + seed))
    generator = torch.Generator().manual_seed(3000 + seed)
    while spent() < 1.0:
        _save(folder / f"written-{seed}-{number:04d}.pt", model, batch_of(snippets, ROWS), NEW, generator)
        number, written = number + 1, written + ROWS * NEW
        print(f"teacher {seed}: {100 * spent():3.0f} %  {written:,} tokens written", flush=True)


def _save(path: Path, model: LlamaForCausalLM, prompts: Tensor, new_tokens: int, generator: torch.Generator) -> None:
    temperatures = torch.tensor(TEMPERATURES).repeat(len(prompts) // len(TEMPERATURES) + 1)[: len(prompts)]
    text = write(model, prompts, new_tokens, temperatures, generator, KEPT)
    parts = {"ids": text.ids.to(torch.int16), "top_ids": text.top_ids, "top_probabilities": text.top_probabilities}
    fresh = path.with_suffix(".new")
    torch.save(parts, fresh)
    fresh.replace(path)
