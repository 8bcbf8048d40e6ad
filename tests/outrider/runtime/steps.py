"""Random steps of a model runner, and what stands for graphs where there is no device."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from outrider.runtime.cuda_graph import CannotCapture
from outrider.runtime.model_runner import Chunk, ModelRunner
from outrider.runtime.paged_attention import EAGER, AttentionChoice
from tests.outrider.runtime.tiny import VOCABULARY, Truth

PAGED = AttentionChoice(EAGER, "a test", block_tokens=4)
MAX_LENGTH = 32

Wanted = tuple[tuple[int, ...], int]
"""A text, and of how many of its last tokens there are logits."""


def random_steps(
    model: ModelRunner,
    seed: int,
    steps: int = 16,
    counts: Sequence[int] = range(1, 9),
    *,
    sequences: int = 4,
    unwanted: float = 0.8,
) -> tuple[list[Tensor], list[list[Wanted]]]:
    """Return the logits of each step of a few sequences, and what they are of.

    Sequences come, go, fork, are rolled back, and share steps in any mixture. Of a share of the chunks some rows are
    `unwanted`.
    """
    rng = random.Random(seed)
    texts: dict[int, list[int]] = {}
    found: list[Tensor] = []
    wanted: list[list[Wanted]] = []
    while len(found) < steps:
        if len(texts) < 2 or (len(texts) < sequences and rng.random() < 0.3):
            if texts and rng.random() < 0.5:
                source = rng.choice(list(texts))
                texts[model.pool.fork(source)] = list(texts[source])
            else:
                texts[model.pool.allocate()] = []
        if rng.random() < 0.2:
            slot = rng.choice(list(texts))
            model.pool.free(slot)
            del texts[slot]
        chunks, rows = [], []
        for slot in rng.sample(list(texts), rng.randint(1, len(texts)) if texts else 0):
            text, count = texts[slot], rng.choice(counts)
            if rng.random() < 0.3 or len(text) + count > MAX_LENGTH:
                del text[rng.randint(0, min(len(text), MAX_LENGTH - count)) :]
                model.pool.rollback(slot, len(text))
            new = rng.choices(range(VOCABULARY), k=count)
            logits_from = rng.randint(0, count) if rng.random() < unwanted else 0
            chunks.append(Chunk(slot, new, len(text), logits_from))
            text += new
            rows.append((tuple(text), count - logits_from))
        if chunks:
            found.append(model.forward(chunks).clone())
            wanted.append(rows)
    model.pool.check_integrity()
    for slot in texts:
        model.pool.free(slot)
    return found, wanted


def logits_by(truth: Truth, wanted: list[list[Wanted]]) -> list[Tensor]:
    """Return the logits of each step by transformers, which reads whole texts."""
    whole: dict[tuple[int, ...], Tensor] = {}
    for text in sorted({text for step in wanted for text, _ in step}, key=len, reverse=True):
        longer = next((each for each in whole if each[: len(text)] == text), None)
        whole[text] = truth(list(text)) if longer is None else whole[longer][: len(text)]
    return [torch.cat([whole[text][len(text) - count :] for text, count in step]) for step in wanted]


class Ticking:
    """A capturer whose graphs take a second each and hold a MiB, and fail from a time on."""

    def __init__(self, fails_at: float = float("inf")) -> None:
        self.now, self.bytes, self._fails_at = 0.0, 0, fails_at

    def clock(self) -> float:
        return self.now

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        if self.now >= self._fails_at:
            raise CannotCapture("it asks for a number")
        run()
        self.now += 1.0
        self.bytes += 1 << 20
        return run
