"""One sequence of the draft model: its state on the engine's thread, its work in a step, and the engine's messages."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch

from draft_service.drafters.base import Draft, DraftError, DraftSequence, Foresight, Guesser, Guesses
from kernels.adjustments import Adjuster
from kernels.dense import DraftLogits
from kernels.sampling import Draw, SamplingParams
from kernels.sparse import SparseDistribution
from kernels.verify import Rule
from outrider.runtime.batch import Chunk
from outrider.runtime.kv_cache import KVPool

TokenLaw = SparseDistribution | DraftLogits | None
Done = Callable[[Draft | DraftError], None]


class DrawnToken(NamedTuple):
    """A drafted token.

    Attributes:
        token: its id, or `kernels.sampling.NO_LOGITS`, or `kernels.sampling.UNSURE`, which ends the proposal.
        law: what is sent with it: q̂, or the draft's logits (`DraftSequence.needs_logits`).
        scores: what it was chosen by where it was not drawn from q̂, see `kernels.sampling.Sample`.
    """

    token: int
    law: TokenLaw
    scores: torch.Tensor | None


Drawn = list[DrawnToken]


class Place(NamedTuple):
    """What may stand at a place of a proposal, or behind it: tokens in falling order of their scores.

    A difference of 1 is a factor of e in chance. Where tokens are chosen by scores the drafted one comes first.
    """

    tokens: Sequence[int]
    scores: Sequence[float]


@dataclass(slots=True)
class GuessingState:
    """What a sequence has of its guesser, in staged drafting.

    Attributes:
        read: committed tokens that it has read.
        silent: the base of a round in which it had no guess; the model drafts the rest of that round alone.
    """

    guesser: Guesser
    read: int = 0
    silent: int = -1


@dataclass(slots=True, eq=False)
class ModelSequence:
    """A sequence and its state. Belongs to the engine's thread.

    Invariant 5: from an `Ask` on the cache holds a prefix of `tokens` without the last, which is run to draft the first
    one.

    Attributes:
        told: how to draft for it.
        tokens: prompt, committed tokens, and those drafted in the round under way.
        base: how many of them are committed.
        slot: its place in the KV pool; None before its first pass and after its end.
        gamma: how many to draft in the round under way; 0 between rounds.
        laws: what is sent with the drafted ones: what they were sampled from, or the logits.
        scores: what they were chosen by where there is no distribution, see `kernels.sampling.Sample`.
        done: takes the round's result; any thread may call it.
        asked: when the round was asked for.
        guessing: in staged drafting; None where the model drafts alone.
        trunk: for a branch of the outcome cache the sequence that it would go on; None for a sequence itself.
        left: when the last proposal left.
        was_ahead: whether it had branches when this round was asked for; None where that round was not the next.
        foresight: what they came to; None where nothing was drafted for them.
    """

    told: DraftSequence
    tokens: list[int]
    base: int
    adjuster: Adjuster | None
    slot: int | None = None
    gamma: int = 0
    laws: list[TokenLaw] = field(default_factory=list)
    scores: list[torch.Tensor | None] = field(default_factory=list)
    done: Done | None = None
    asked: float = 0.0
    closed: bool = False
    guessing: GuessingState | None = None
    trunk: "ModelSequence | None" = None
    left: float = 0.0
    was_ahead: bool | None = None
    foresight: Foresight | None = None

    @staticmethod
    def begin(told: DraftSequence, vocab_size: int) -> "ModelSequence":
        """A sequence at its opening, with nothing in the cache."""
        adjuster = None
        if not told.logit_rules.is_identity:
            adjuster = Adjuster(told.logit_rules, told.prompt, vocab_size)
            for token in told.committed:
                adjuster.push(token)
        tokens = [*told.prompt, *told.committed]
        return ModelSequence(told, tokens, len(tokens), adjuster)

    @property
    def law(self) -> SamplingParams:
        """What its logits are sampled by."""
        return self.told.draft_law

    @property
    def chooses_by_scores(self) -> bool:
        """Whether each token is the one of best score, and no draw decides."""
        return self.law.is_greedy or self.told.shares_noise

    @property
    def may_be_decoded(self) -> bool:
        """Whether its tokens can be drawn in one call: there, logits are neither adjusted nor kept."""
        return self.adjuster is None and not self.told.needs_logits

    @property
    def drafted(self) -> int:
        """Tokens drafted in this round."""
        return len(self.tokens) - self.base

    def draw(self, place: int) -> Draw:
        """How the token at a place of the proposal is drawn."""
        return self.told.draw(self.base, place)

    def commit(self, committed: Sequence[int]) -> int:
        """Puts what was committed in place of what was drafted; how many of its tokens had been drafted."""
        base, kept = self.base, 0
        for token, drafted in zip(committed, self.tokens[base:], strict=False):
            if token != drafted:
                break
            kept += 1
        self.tokens[base:] = committed
        self.base = len(self.tokens)
        if self.adjuster is not None:
            self.adjuster.truncate(self.adjuster.n_generated - len(self.laws) + kept)
            for token in committed[kept:]:
                self.adjuster.push(token)
        self.laws, self.scores = [], []
        return kept

    def add(self, token: int, law: TokenLaw, scores: torch.Tensor | None) -> None:
        """Takes in a drafted token."""
        self.tokens.append(token)
        self.laws.append(law)
        self.scores.append(scores)
        if self.adjuster is not None:
            self.adjuster.push(token)

    def chunk(self, pool: KVPool) -> Chunk:
        """What is still to run before the next token can be drawn."""
        assert self.slot is not None
        start = pool.length(self.slot)
        return Chunk(self.slot, self.tokens[start:], start, len(self.tokens) - start - 1)

    def candidates(self, count: int) -> list[Place]:
        """What may stand at each place that it has drafted."""
        if not self.chooses_by_scores:
            return [_likeliest(law, count) for law in self.laws]
        rows = torch.stack([row for row in self.scores if row is not None])  # [γ, V]
        is_race = self.told.shares_noise  # then the least wins, and -log of it is log p + g, see `kernels.sampling`
        scores, tokens = rows.topk(min(count, rows.shape[-1]), largest=not is_race)
        scores = scores.neg().log() if is_race else scores
        return [Place(*each) for each in zip(tokens.tolist(), scores.tolist(), strict=True)]

    def finish(self, error: DraftError | None = None) -> None:
        """Ends the round and hands out its result."""
        done, self.done, self.gamma = self.done, None, 0
        foresight, self.foresight = self.foresight, None
        if done is not None:
            laws = [] if self.told.rule is Rule.COUPLED else self.laws
            done(error or Draft(self.tokens[self.base :], laws, time.perf_counter() - self.asked, foresight))

    # ------------------------------------------------------------------------------------------------------- branches

    def branch(self, accepted: int, token: int) -> "ModelSequence":
        """The sequence as it will be where so many drafted tokens are accepted and `token` follows; without a slot."""
        return self._child([*self.tokens[: self.base + accepted], token], accepted, token)

    def ended(self) -> "ModelSequence":
        """The sequence where all is accepted, in the same slot: its next token is a guess, and no draw of any round."""
        child = self._child(list(self.tokens), self.drafted, None)
        child.slot = self.slot
        if not child.chooses_by_scores:
            child.told = replace(self.told, rule=Rule.TOKENWISE, draft_temperature=0.0)
        return child

    def adopt(self, branch: "ModelSequence", gamma: int) -> None:
        """Takes over what a branch of it has drafted, `gamma` tokens at most: a length that looked at none of them."""
        for each in list(zip(branch.tokens[branch.base :], branch.laws, branch.scores, strict=True))[:gamma]:
            self.add(*each)

    def _child(self, tokens: list[int], accepted: int, token: int | None) -> "ModelSequence":
        adjuster = None
        if self.adjuster is not None:
            adjuster = self.adjuster.copy()
            adjuster.truncate(adjuster.n_generated - self.drafted + accepted)
            if token is not None:
                adjuster.push(token)
        return ModelSequence(self.told, tokens, len(tokens), adjuster, trunk=self)


def _likeliest(law: TokenLaw, count: int) -> Place:
    if isinstance(law, DraftLogits):
        scores, tokens = law.values.float().topk(min(count, law.values.shape[-1]))
        return Place(tokens.tolist(), scores.tolist())
    assert isinstance(law, SparseDistribution)
    best = np.argsort(law.weights)[: -count - 1 : -1]
    return Place(law.ids[best].tolist(), np.log(law.weights[best].astype(np.float64)).tolist())


@dataclass(frozen=True, slots=True)
class DraftWork:
    """One sequence's share of a step.

    Attributes:
        chunk: the tokens to run, with the guesses behind them that the model knows.
        draws: False where it is prompt alone, with more to come.
        guesses: in staged drafting: tokens for this step to judge.
    """

    sequence: ModelSequence
    chunk: Chunk
    draws: bool
    guesses: Guesses = field(default_factory=list)

    @property
    def rows(self) -> int:
        """Rows of logits of the pass that are its own."""
        return len(self.chunk.tokens) - self.chunk.logits_from


@dataclass(frozen=True, slots=True)
class Ask:
    """What was committed since the last round, and how many tokens to draft behind it.

    `posted` is when it was asked, by `time.perf_counter()`.
    """

    sequence: ModelSequence
    committed: Sequence[int]
    gamma: int
    done: Done
    posted: float = field(default_factory=time.perf_counter)


@dataclass(frozen=True, slots=True)
class Close:
    """The sequence is gone: free what it held."""

    sequence: ModelSequence
