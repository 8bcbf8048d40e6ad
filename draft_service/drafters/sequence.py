"""One sequence of the draft model: its state on the engine's thread, its work in a step, and the engine's messages."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from draft_service.drafters.base import Draft, DraftError, DraftSequence, Foresight
from draft_service.drafters.guessing import Guesser, Guesses
from kernels.adjustments import Adjuster
from kernels.dense import DraftLogits
from kernels.rng import Domain, uniform
from kernels.sampling import Draw, SamplingParams
from kernels.sparse import SparseDistribution
from kernels.verify import Rule
from outrider.runtime.batch import Chunk

TokenLaw = SparseDistribution | DraftLogits | None
Done = Callable[[Draft | DraftError], None]


class DrawnToken(NamedTuple):
    """A drafted token.

    Attributes:
        token: its id, or `kernels.sampling.NO_LOGITS`, or `kernels.sampling.UNSURE`, which ends the proposal.
        law: what is sent with it: q̂, or the draft's logits (`ModelSequence.tells_logits`).
        scores: what it was chosen by where it was not drawn from q̂, see `kernels.sampling.Sample`.
    """

    token: int
    law: TokenLaw
    scores: torch.Tensor | None


Drawn = list[DrawnToken]


@dataclass(slots=True)
class GuessingState:
    """What a sequence has of its guesser, in staged drafting.

    Attributes:
        guesser: None once it has failed.
        read: committed tokens that it has read.
        silent: the base of a round in which it had no guess; the model drafts the rest of that round alone.
    """

    guesser: Guesser | None
    read: int = 0
    silent: int = -1


@dataclass(slots=True, eq=False)
class ModelSequence:
    """A sequence and its state. Belongs to the engine's thread.

    Invariant 5: from an `Ask` on the cache holds a prefix of `tokens` without the last, which is run to draft the first
    one.

    Attributes:
        rule: how the proposals are judged.
        tokens: prompt, committed tokens, and those drafted in the round under way.
        base: how many of them are committed.
        tells_logits: whether the logits of each drafted token are told, and not its law.
        max_entropy: of a law in nats; a proposal ends before a token of more. None is no bound.
        gamma: how many to draft in the round under way; 0 between rounds.
        laws: what is told of the drafted ones: what they were sampled from, or the logits (`tells_logits`).
        scores: what they were chosen by where there is no law, see `kernels.sampling.Sample`.
        left: when the last proposal left.
        was_ahead: whether it had branches when this round was asked for; None where that round was not the next.
        looks_ahead: whether the outcome cache is to serve it.
        guessing: in staged drafting; None where the model drafts alone.
        trunk: for a branch of the outcome cache the sequence that it would go on; None for a sequence itself.
        done: takes the round's result; any thread may call it.
        slot: its place in the KV pool; None before its first pass and after its end.
    """

    law: SamplingParams
    seed: int
    rule: Rule
    tokens: list[int]
    base: int
    adjuster: Adjuster | None
    tells_logits: bool = False
    max_entropy: float | None = None
    slot: int | None = None
    gamma: int = 0
    laws: list[TokenLaw] = field(default_factory=list)
    scores: list[torch.Tensor | None] = field(default_factory=list)
    done: Done | None = None
    asked: float = 0.0
    closed: bool = False
    left: float = 0.0
    was_ahead: bool | None = None
    looks_ahead: bool = False
    guessing: GuessingState | None = None
    trunk: "ModelSequence | None" = None

    @staticmethod
    def begin(sequence: DraftSequence, vocab_size: int) -> "ModelSequence":
        """A sequence at its opening, with nothing in the cache."""
        adjuster = None
        if not sequence.logit_rules.is_identity:
            adjuster = Adjuster(sequence.logit_rules, sequence.prompt, vocab_size)
            for token in sequence.committed:
                adjuster.push(token)
        tokens = [*sequence.prompt, *sequence.committed]
        return ModelSequence(
            sequence.draft_law,
            sequence.seed,
            sequence.rule,
            tokens,
            len(tokens),
            adjuster,
            sequence.needs_logits,
            max_entropy=sequence.max_entropy,
            looks_ahead=sequence.looks_ahead,
        )

    @property
    def shares_noise(self) -> bool:
        """Whether its tokens are chosen by the noise of their positions, and not drawn by uniforms of the round."""
        return self.rule is Rule.COUPLED and not self.law.is_greedy

    @property
    def chooses_by_scores(self) -> bool:
        """Whether each token is the one of best score, and no draw decides."""
        return self.law.is_greedy or self.shares_noise

    @property
    def may_be_decoded(self) -> bool:
        """Whether its tokens can be drawn in one call: there, logits are neither adjusted nor kept."""
        return self.adjuster is None and not self.tells_logits

    @property
    def drafted(self) -> int:
        """Tokens drafted in this round."""
        return len(self.tokens) - self.base

    def draw(self, place: int) -> Draw:
        """How the token at a place of the proposal is drawn (invariant 2); the first one always is."""
        bound = math.inf if self.max_entropy is None or place == 0 else self.max_entropy
        if self.shares_noise:
            return Draw(self.law, noise=(self.seed, self.base + place), max_entropy=bound)
        u = 0.0 if self.law.is_greedy else uniform(self.seed, self.base, place, Domain.DRAFT)
        return Draw(self.law, u, max_entropy=bound)

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

    def finish(self, error: DraftError | None = None, foresight: Foresight | None = None) -> None:
        """Ends the round and hands out its result."""
        done, self.done, self.gamma = self.done, None, 0
        if done is not None:
            laws = [] if self.rule is Rule.COUPLED else self.laws
            done(error or Draft(self.tokens[self.base :], laws, time.perf_counter() - self.asked, foresight))

    # ------------------------------------------------------------------------------------------------------- branches

    def branch(self, accepted: int, token: int) -> "ModelSequence":
        """The sequence as it will be where so many drafted tokens are accepted and `token` follows; without a slot."""
        return self._child([*self.tokens[: self.base + accepted], token], accepted, token)

    def ended(self) -> "ModelSequence":
        """The sequence where all is accepted, in the same slot: its next token is a guess, and no draw of any round."""
        child = self._child(list(self.tokens), self.drafted, None)
        child.slot = self.slot
        child.tells_logits = False
        if not child.chooses_by_scores:
            child.law = SamplingParams(temperature=0)
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
        return replace(
            self,
            tokens=tokens,
            base=len(tokens),
            adjuster=adjuster,
            slot=None,
            gamma=0,
            laws=[],
            scores=[],
            done=None,
            trunk=self,
        )


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
