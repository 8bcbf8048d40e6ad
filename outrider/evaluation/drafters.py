"""Drafters in this process: q̂ at each position of a text, as the draft service computes it."""

from collections.abc import Callable, Iterator
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from kernels.adjustments import Adjuster
from kernels.sampling import SamplingParams, probabilities
from kernels.sparse import SparseConfig, SparseDistribution, evenly_spaced, truncate
from outrider.evaluation.target_text import Text, adjusted, adjuster_of, read_logits, refuse_bad
from outrider.runtime.batch import Chunk
from outrider.runtime.lookup import TextIndex
from outrider.runtime.model_runner import ModelRunner
from outrider.runtime.ngram import NGramCounts, back_off

Drafter: TypeAlias = Callable[[Text], Iterator[SparseDistribution | None]]
"""Yields q̂ of each token that the target wrote in a text; None where it drafts nothing. Made of one of the functions
below, whose last argument is the text, by `partial`. Their `params` are those of the draft."""


def by_model(
    runner: ModelRunner, vocab_size: int, params: SamplingParams, sparse: SparseConfig, text: Text
) -> Iterator[SparseDistribution]:
    """A draft model. Ids from `vocab_size`, the target's, on are padding, and never drafted."""
    for z in read_logits(runner, text.for_draft(), "the draft", lambda z: _of_target(z, vocab_size, runner)):
        yield from draft_distributions(z, params, sparse)


def in_parallel(
    runner: ModelRunner, vocab_size: int, params: SamplingParams, sparse: SparseConfig, tokens_per_pass: int, text: Text
) -> Iterator[SparseDistribution]:
    """A draft model with a mask token. Each pass gives q̂ of `tokens_per_pass` positions of the text, in turn."""
    # A pass runs the tokens before the first of its positions, and masks.
    mask_token = runner.loaded.mask_token
    assert mask_token is not None
    slot, adjuster = runner.pool.allocate(), adjuster_of(runner, text, vocab_size)
    try:
        for begin in range(text.begin, len(text.tokens), tokens_per_pass):
            masks = min(tokens_per_pass, len(text.tokens) - begin) - 1
            held = runner.pool.length(slot)
            tokens = [*text.tokens[held:begin], *[mask_token] * masks]
            z = runner.logits([Chunk(slot, tokens, held, begin - held - 1)])
            runner.pool.rollback(slot, begin)
            written = text.tokens[begin : begin + masks + 1]
            z = adjusted(_of_target(z, vocab_size, runner), adjuster, written, stand_in=mask_token)
            refuse_bad(z, "the draft")
            yield from draft_distributions(z, params, sparse)
    finally:
        runner.pool.free(slot)


def by_ngrams(
    corpus: NGramCounts, params: SamplingParams, sparse: SparseConfig, text: Text
) -> Iterator[SparseDistribution]:
    """Counts of a corpus, and of the text itself."""
    own = NGramCounts(corpus.order, len(corpus.singles), corpus.bound)
    adjuster = Adjuster.after(text.prompt.tokens, (), text.prompt.penalties, len(own.singles))
    own.add(text.prompt.tokens)
    for position in range(text.begin, len(text.tokens)):
        before, token = text.tokens[max(0, position - own.order) : position], text.tokens[position]
        p = back_off([corpus, own], before)
        assert p is not None  # `own` has counted a token
        z = torch.from_numpy(np.log(p)).to(torch.float32).unsqueeze(0)
        yield from draft_distributions(adjusted(z, adjuster, [token]), params, sparse)
        own.add([*before, token], len(before))


def at_random(vocab_size: int, size: int, seed: int, text: Text) -> Iterator[SparseDistribution]:
    """Draws uniformly from `size` tokens at equal distances, from a random one on: as the draft service's `random`.

    At temperature 0 the service proposes the drawn token alone; q̂ is then what it is drawn from.
    """
    generator = np.random.default_rng((seed, *text.tokens))
    for begin in generator.integers(vocab_size, size=text.written):
        yield evenly_spaced(int(begin), vocab_size, size)


def by_lookup(min_match: int, text: Text) -> Iterator[SparseDistribution | None]:
    """Copies the token after the longest earlier occurrence of the end of the text, of `min_match` tokens or more."""
    index = TextIndex(min_match)
    index.read(text.prompt.tokens)
    for token in text.tokens[text.begin :]:
        copied = index.copy(1)
        yield point_mass(copied[0]) if copied else None
        index.read([token])


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
