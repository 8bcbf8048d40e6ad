"""A sequence on the draft engine's thread: its state, its share of a step, and the engine's messages."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch

from draft_service.drafters.base import CacheUse, Draft, DraftError, DraftSequence, Guesser, Guesses
from kernels.adjustments import Adjuster
from kernels.sampling import Draw, SamplingParams
from kernels.sigmoid import DraftLogits
from kernels.sparse import SparseDistribution
from kernels.verify import Rule
from outrider.runtime.batch import Chunk
from outrider.runtime.kv_cache import KVPool

DraftDistribution = SparseDistribution | DraftLogits | None
Done = Callable[[Draft | DraftError], None]


Drawn = Sequence[tuple[int, DraftDistribution, torch.Tensor | None]]
"""Drafted tokens, each as a `kernels.sampling.Sample`, but with the draft's logits if `DraftSequence.needs_logits`."""


class Candidates(NamedTuple):
    """The likeliest tokens at one position of a proposal, or after it, best score first.

    A score is a log-probability up to a constant. If scores decide, the drafted token is the first.
    """

    tokens: Sequence[int]
    scores: Sequence[float]


@dataclass(slots=True)
class GuessingState:
    """A sequence's guesser, in staged drafting.

    Attributes:
        read: committed tokens that the guesser has read.
        silent: base of the round in which the guesser had no guess; the model drafts the rest of that round.
    """

    guesser: Guesser
    read: int = 0
    silent: int = -1


@dataclass(slots=True, eq=False)
class ModelSequence:
    """A sequence and its state. Belongs to the engine's thread.

    Invariant 5: from a `Propose` on, the KV cache holds a prefix of `tokens` without the last one. The last one runs
    when the first token is drafted.

    Attributes:
        tokens: prompt, committed tokens, and the drafted tokens of the round in progress.
        base: length of prompt and committed tokens.
        slot: in the KV pool; None before the first step and after the end.
        gamma: tokens to draft in the round in progress; 0 between rounds.
        distributions: sent with each drafted token: q̂, or the draft's logits.
        scores: of each drafted token; see `kernels.sampling.Sample`.
        done: takes the round's result; any thread may call it.
        requested: when the proposal was requested, by `time.perf_counter()`.
        guessing: in staged drafting; None if the model drafts without guesses.
        parent: for a branch of the outcome cache, the sequence that it continues; None for a sequence itself.
        sent: when the last proposal left, by `time.perf_counter()`.
        judged: tokens of the last proposal; 0 if it was the first, or if this round does not follow it directly.
        had_branches: whether the outcome cache held branches when this round began.
        cache_use: the use of the outcome cache in this round; None if it drafted nothing.
        failed: whether a round failed; the KV cache may be bad then.
    """

    opening: DraftSequence
    tokens: list[int]
    base: int
    adjuster: Adjuster | None
    slot: int | None = None
    gamma: int = 0
    distributions: list[DraftDistribution] = field(default_factory=list)
    scores: list[torch.Tensor | None] = field(default_factory=list)
    done: Done | None = None
    requested: float = 0.0
    closed: bool = False
    guessing: GuessingState | None = None
    parent: "ModelSequence | None" = None
    sent: float = 0.0
    judged: int = 0
    had_branches: bool = False
    cache_use: CacheUse | None = None
    is_looked_up: bool = False
    prefix_kept: bool = False
    failed: bool = False

    @staticmethod
    def begin(opening: DraftSequence, vocab_size: int) -> "ModelSequence":
        """A new sequence. Its KV cache is empty."""
        adjuster = Adjuster.after(opening.prompt, opening.committed, opening.logit_rules, vocab_size)
        tokens = [*opening.prompt, *opening.committed]
        return ModelSequence(opening, tokens, len(tokens), adjuster)

    @property
    def params(self) -> SamplingParams:
        return self.opening.draft_params

    @property
    def chooses_by_scores(self) -> bool:
        """Whether the token of the best score is taken: at temperature 0, and under `coupled`."""
        return self.params.is_greedy or self.opening.shares_noise

    @property
    def has_scores(self) -> bool:
        """Whether `candidates` has what it needs: captured steps keep no scores under noise."""
        return not self.chooses_by_scores or all(row is not None for row in self.scores)

    @property
    def drafted(self) -> int:
        return len(self.tokens) - self.base

    @property
    def masks(self) -> int:
        """Mask tokens of the next pass: for all tokens that it drafts but the first."""
        return max(0, min(self.opening.tokens_per_pass, self.gamma - self.drafted) - 1)

    def draw(self, index: int) -> Draw:
        """How to draw the token at `index` of the proposal."""
        return self.opening.draw(self.base, index)

    def commit(self, committed: Sequence[int]) -> int:
        """Replaces the drafted tokens by the committed ones. Returns how many drafted tokens are among those."""
        base, kept = self.base, 0
        for token, drafted in zip(committed, self.tokens[base:], strict=False):
            if token != drafted:
                break
            kept += 1
        self.tokens[base:] = committed
        self.base = len(self.tokens)
        if self.adjuster is not None:
            self.adjuster.truncate(self.adjuster.n_generated - len(self.distributions) + kept)
            for token in committed[kept:]:
                self.adjuster.push(token)
        self.distributions, self.scores = [], []
        return kept

    def add(self, token: int, distribution: DraftDistribution, scores: torch.Tensor | None) -> None:
        self.tokens.append(token)
        self.distributions.append(distribution)
        self.scores.append(scores)
        if self.adjuster is not None:
            self.adjuster.push(token)

    def chunk(self, pool: KVPool) -> Chunk:
        """The tokens to run before the next one can be drawn."""
        assert self.slot is not None
        start = pool.length(self.slot)
        return Chunk(self.slot, self.tokens[start:], start, len(self.tokens) - start - 1)

    def candidates(self, count: int) -> list[Candidates]:
        """The `count` likeliest tokens at each position of the proposal."""
        if not self.chooses_by_scores:
            return [_likeliest(each, count) for each in self.distributions]
        kept = [row for row in self.scores if row is not None]
        # Steps of the decode loop leave them on the device, in the model's dtype; other steps on the host.
        rows = torch.stack([row.to(kept[-1]) for row in kept])  # [γ, V]
        by_noise = self.opening.shares_noise  # the least score wins, and its -log is log p + g: `kernels.sampling`
        scores, tokens = rows.topk(min(count, rows.shape[-1]), largest=not by_noise)
        scores = scores.neg().log() if by_noise else scores
        return [Candidates(*each) for each in zip(tokens.tolist(), scores.tolist(), strict=True)]

    def finish(self, error: DraftError | None = None) -> None:
        """Ends the round and hands its result to `done`: also after an error the tokens sampled so far, if any."""
        is_proposal = error is None or (self.gamma > 0 and self.drafted > 0)
        done, self.done, self.gamma = self.done, None, 0
        cache_use, self.cache_use = self.cache_use, None
        if done is not None:
            distributions = [] if self.opening.rule is Rule.COUPLED else self.distributions
            seconds = time.perf_counter() - self.requested
            draft = Draft(self.tokens[self.base :], distributions, seconds, cache_use, error)
            done(draft if is_proposal or error is None else error)

    # ------------------------------------------------------------------------------------------------------- branches

    def branch(self, accepted: int, token: int) -> "ModelSequence":
        """The sequence after a verdict that accepts so many drafted tokens, followed by `token`. It has no slot yet."""
        return self._child([*self.tokens[: self.base + accepted], token], accepted, token)

    def ended(self) -> "ModelSequence":
        """The sequence with its whole proposal accepted, in the same slot.

        Its next token only shows which tokens may follow. It is no draw of any round and is never sent.
        """
        child = self._child(list(self.tokens), self.drafted, None)
        child.slot = self.slot
        if not child.chooses_by_scores:
            child.opening = replace(self.opening, rule=Rule.TOKENWISE, draft_temperature=0.0)
        return child

    def adopt(self, branch: "ModelSequence", gamma: int) -> None:
        """Takes over the first `gamma` tokens of a branch. γ was chosen without a look at them (invariant 4)."""
        drafted = zip(branch.tokens[branch.base :], branch.distributions, branch.scores, strict=True)
        for each in list(drafted)[:gamma]:
            self.add(*each)

    def _child(self, tokens: list[int], accepted: int, token: int | None) -> "ModelSequence":
        adjuster = None
        if self.adjuster is not None:
            adjuster = self.adjuster.copy()
            adjuster.truncate(adjuster.n_generated - self.drafted + accepted)
            if token is not None:
                adjuster.push(token)
        return ModelSequence(self.opening, tokens, len(tokens), adjuster, parent=self)


def _likeliest(q: DraftDistribution, count: int) -> Candidates:
    if isinstance(q, DraftLogits):
        scores, tokens = q.values.float().topk(min(count, q.values.shape[-1]))
        return Candidates(tokens.tolist(), scores.tolist())
    assert isinstance(q, SparseDistribution)
    best = np.argsort(q.weights)[: -count - 1 : -1]
    return Candidates(q.ids[best].tolist(), np.log(q.weights[best].astype(np.float64)).tolist())


@dataclass(frozen=True, slots=True)
class DraftWork:
    """One sequence's share of a step.

    Attributes:
        chunk: the tokens to run, with the guesses after them that the draft model knows, or with the masks.
        draws: False for a piece of a prompt that is not the last.
        encodes: the encoder runs first.
        guesses: in staged drafting: tokens for this step to judge.
        masks: mask tokens at the end of the chunk. Row i of its logits gives the token i after the last real one.
    """

    sequence: ModelSequence
    chunk: Chunk
    draws: bool
    guesses: Guesses = field(default_factory=list)
    encodes: bool = False
    masks: int = 0

    @property
    def rows(self) -> int:
        """Rows of logits that the step computes for this sequence."""
        return len(self.chunk.tokens) - self.chunk.logits_from

    @property
    def may_be_decoded(self) -> bool:
        """Whether the decode loop may draw the rest of the proposal: it only counts tokens, and returns no logits."""
        opening, adjuster = self.sequence.opening, self.sequence.adjuster
        is_plain = not opening.needs_logits and (adjuster is None or adjuster.is_counted(1))
        return self.draws and is_plain and not self.guesses and opening.tokens_per_pass == 1


@dataclass(frozen=True, slots=True)
class Propose:
    """Draft `gamma` tokens, after the tokens that were committed since the last round.

    `posted` is when the proposal was requested, by `time.perf_counter()`.
    """

    sequence: ModelSequence
    committed: Sequence[int]
    gamma: int
    done: Done
    posted: float = field(default_factory=time.perf_counter)


@dataclass(frozen=True, slots=True)
class Close:
    """The sequence has ended: free its slot and its branches."""

    sequence: ModelSequence
