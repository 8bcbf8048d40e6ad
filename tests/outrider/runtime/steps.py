"""Random steps of a model runner, and their logits by transformers."""

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.runtime.model_runner import Chunk, ModelRunner
from outrider.runtime.paged_attention import EAGER, AttentionChoice
from tests.outrider.runtime.tiny import VOCABULARY, Reference

PAGED = AttentionChoice(EAGER, "a test", block_tokens=4)
MAX_LENGTH = 32

Rows = tuple[tuple[int, ...], int]
"""A text, and how many of its last tokens have logits."""


def random_steps(
    model: ModelRunner,
    seed: int,
    steps: int = 16,
    counts: Sequence[int] = range(1, 9),
    *,
    sequences: int = 4,
    unwanted: float = 0.8,
) -> tuple[list[Tensor], list[list[Rows]]]:
    """Return the logits of each step of a few sequences, and the rows of each.

    Sequences come, go, fork, are rolled back, and share steps in any mixture. In a share `unwanted` of the chunks some
    rows need no logits.
    """
    rng = random.Random(seed)
    texts: dict[int, list[int]] = {}
    found: list[Tensor] = []
    wanted: list[list[Rows]] = []
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


def reference_logits(reference: Reference, wanted: list[list[Rows]]) -> list[Tensor]:
    """Return the logits of each step by transformers, which runs whole texts."""
    whole: list[tuple[int, ...]] = []
    for text in sorted({text for step in wanted for text, _ in step}, key=len, reverse=True):
        if not any(longer[: len(text)] == text for longer in whole):
            whole.append(text)
    logits = reference.padded(whole)

    def rows(text: tuple[int, ...], count: int) -> Tensor:
        i = next(i for i, longer in enumerate(whole) if longer[: len(text)] == text)
        return logits[i, len(text) - count : len(text)]

    return [torch.cat([rows(*each) for each in step]) for step in wanted]
