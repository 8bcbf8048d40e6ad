"""Drafters in this process: q̂ at each position of a text, as the draft service computes it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from kernels.adjustments import Adjuster
from kernels.sampling import SamplingParams, probabilities
from kernels.sparse import SparseConfig, SparseDistribution, evenly_spaced, truncate
from outrider.evaluation.target_text import Text, adjusted, adjuster_of, blocks, read_logits, refuse_bad
from outrider.runtime.batch import Chunk
from outrider.runtime.lookup import TextIndex
from outrider.runtime.model_runner import ModelRunner
from outrider.runtime.ngram import NGramCounts, back_off


class Drafter(Protocol):
    """A drafter. Its `params` are those of the draft."""

    def read(self, text: Text, rows: int) -> Iterator[Sequence[SparseDistribution | None]]:
        """Yields q̂ at the positions of each block of `text`; None where it drafts nothing."""


@dataclass(frozen=True, slots=True)
class ModelDrafter:
    """A draft model. Ids from `vocab_size`, the target's, on are padding, and never drafted."""

    runner: ModelRunner
    vocab_size: int
    params: SamplingParams
    sparse: SparseConfig

    def read(self, text: Text, rows: int) -> Iterator[Sequence[SparseDistribution | None]]:
        for z in read_logits(
            self.runner, text.for_draft(), rows, "the draft", lambda z: _of_target(z, self.vocab_size, self.runner)
        ):
            yield draft_distributions(z, self.params, self.sparse)


@dataclass(frozen=True, slots=True)
class ParallelDrafter:
    """A draft model with a mask token. Each pass gives q̂ of `tokens_per_pass` positions of the text, in turn."""

    runner: ModelRunner
    vocab_size: int
    params: SamplingParams
    sparse: SparseConfig
    tokens_per_pass: int

    def read(self, text: Text, rows: int) -> Iterator[Sequence[SparseDistribution | None]]:
        drafted = self._drafted(text)
        for block in blocks(text, rows):
            yield list(islice(drafted, block.end - block.start - block.first))

    def _drafted(self, text: Text) -> Iterator[SparseDistribution]:
        """Yields q̂ of each written token. A pass runs the tokens before the first of its positions, and masks."""
        runner, mask_token = self.runner, self.runner.loaded.mask_token
        assert mask_token is not None
        slot, adjuster = runner.pool.allocate(), adjuster_of(runner, text, self.vocab_size)
        try:
            for begin in range(text.begin, len(text.tokens), self.tokens_per_pass):
                masks = min(self.tokens_per_pass, len(text.tokens) - begin) - 1
                held = runner.pool.length(slot)
                tokens = [*text.tokens[held:begin], *[mask_token] * masks]
                z = runner.logits([Chunk(slot, tokens, held, begin - held - 1)])
                runner.pool.rollback(slot, begin)
                written = text.tokens[begin : begin + masks + 1]
                z = adjusted(_of_target(z, self.vocab_size, runner), adjuster, written, stand_in=mask_token)
                refuse_bad(z, "the draft")
                yield from draft_distributions(z, self.params, self.sparse)
        finally:
            runner.pool.free(slot)


@dataclass(frozen=True, slots=True)
class NGramDrafter:
    """Counts of a corpus, and of the text itself."""

    corpus: NGramCounts
    params: SamplingParams
    sparse: SparseConfig

    def read(self, text: Text, rows: int) -> Iterator[Sequence[SparseDistribution | None]]:
        own = NGramCounts(self.corpus.order, len(self.corpus.singles), self.corpus.bound)
        adjuster = Adjuster.after(text.prompt.tokens, (), text.prompt.penalties, len(own.singles))
        for block in blocks(text, rows):
            drafted: list[SparseDistribution | None] = []
            for position in range(block.start, block.end):
                before = text.tokens[max(0, position + 1 - own.order) : position + 1]
                own.add(before, len(before) - 1)
                if position - block.start >= block.first:
                    p = back_off([self.corpus, own], before)
                    assert p is not None  # `own` has counted a token
                    z = torch.from_numpy(np.log(p)).to(torch.float32).unsqueeze(0)
                    z = adjusted(z, adjuster, text.tokens[position + 1 : position + 2])
                    drafted += draft_distributions(z, self.params, self.sparse)
            yield drafted


@dataclass(frozen=True, slots=True)
class RandomDrafter:
    """Draws uniformly from `size` tokens at equal distances, from a random one on: as the draft service's `random`.

    At temperature 0 the service proposes the drawn token alone; q̂ is then what it is drawn from.
    """

    vocab_size: int
    size: int
    seed: int

    def read(self, text: Text, rows: int) -> Iterator[Sequence[SparseDistribution | None]]:
        """See `Drafter`."""
        generator = np.random.default_rng((self.seed, *text.tokens))
        for block in blocks(text, rows):
            begins = generator.integers(self.vocab_size, size=block.end - block.start - block.first)
            yield [evenly_spaced(int(begin), self.vocab_size, self.size) for begin in begins]


@dataclass(frozen=True, slots=True)
class LookupDrafter:
    """Copies the token after the longest earlier occurrence of the end of the text, of `min_match` tokens or more."""

    min_match: int

    def read(self, text: Text, rows: int) -> Iterator[Sequence[SparseDistribution | None]]:
        index = TextIndex(self.min_match)
        for block in blocks(text, rows):
            drafted: list[SparseDistribution | None] = []
            for position in range(block.start, block.end):
                index.read(text.tokens[position : position + 1])
                if position - block.start >= block.first:
                    copied = index.copy(1)
                    drafted.append(point_mass(copied[0]) if copied else None)
            yield drafted


def _of_target(z: Tensor, vocab_size: int, runner: ModelRunner) -> Tensor:
    """The logits `[n, V]` of tokens that the target has, in place. The mask token is never drafted."""
    z, mask_token = z[:, :vocab_size], runner.loaded.mask_token
    if mask_token is not None and mask_token < vocab_size:
        z[:, mask_token] = -torch.inf
    return z


def draft_distributions(z: Tensor, params: SamplingParams, sparse: SparseConfig) -> list[SparseDistribution]:
    """Return q̂ of each row of a draft's logits `[n, V]`, as `kernels.sampling.sample` draws from it."""
    if params.is_greedy:
        return [point_mass(token) for token in z.float().argmax(-1).tolist()]
    return [truncate(row, sparse) for row in probabilities(z, params).cpu().numpy()]


def point_mass(token: int) -> SparseDistribution:
    """A distribution with one token."""
    return SparseDistribution(np.array([token], np.int64), np.ones(1, np.uint16), 1)
