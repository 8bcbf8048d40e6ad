"""The seam between a request and whatever drafts for it."""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from kernels.adjustments import LogitRules
from kernels.dense import DraftLogits
from kernels.sampling import SamplingParams
from kernels.sparse import SparseDistribution
from kernels.verify import Rule
from outrider.service.best_effort import Component

DRAFT_COST = Component("draft_cost")


class Kind(StrEnum):
    """The drafters there are."""

    MODEL = "model"
    STAGED = "staged"
    NGRAM = "ngram"
    LOOKUP = "lookup"
    RANDOM = "random"
    NONE = "none"


HAVE_LOGITS = frozenset({Kind.MODEL, Kind.STAGED, Kind.NONE})
"""Those that the rule `sigmoid` goes with: it asks for a draft's logits, or for no draft at all."""


RUN_A_MODEL = frozenset({Kind.MODEL, Kind.STAGED})
"""Those that a service offers where it has loaded a draft model."""


UNBOUNDED = 1 << 30
"""The `room` of a drafter that has no context to fill."""


class DraftError(Exception):
    """A drafter cannot go on with one sequence; the target can, alone.

    `reason` is a name of the contract's `ErrorReason`, without its prefix.
    """

    def __init__(self, message: str, *, reason: str = "INTERNAL") -> None:
        super().__init__(message)
        self.reason = reason


class DraftLate(DraftError):
    """A proposal did not come in time. The sequence may go on here: ask again after the next verdict."""


class DrafterOff(DraftError):
    """The drafter was not asked: it has failed for everybody of late."""


@dataclass(slots=True)
class Cost:
    """What a drafter has cost so far, over all its sequences.

    Attributes:
        proposals: those that came.
        tokens: drafted tokens in them.
        seconds: from asking to having them, summed; waiting for other sequences included.
        failures: proposals that did not come: the drafter failed, was late, or answered nonsense.
    """

    proposals: int = 0
    tokens: int = 0
    seconds: float = 0.0
    failures: int = 0

    @DRAFT_COST.quiet
    def add(self, draft: "Draft") -> None:
        """A proposal came."""
        self.proposals += 1
        self.tokens += len(draft.token_ids)
        self.seconds += draft.seconds

    @property
    def seconds_per_token(self) -> float:
        """Mean over drafted tokens: t_q, of which c is the ratio to the target's step [L 3.7]; 0 before the first."""
        return self.seconds / self.tokens if self.tokens else 0.0


@dataclass(frozen=True, slots=True)
class DraftSequence:
    """What a drafter is told of a sequence.

    Attributes:
        prompt: at least one token.
        committed: output that there is already.
        law: what the target's logits are sampled by.
        logit_rules: what changes those logits before.
        seed: key of the draws (invariant 2).
        rule: how proposals are judged, which says what is to be told of each token; under `coupled` the drafts are
            chosen by the noise that the target has too.
        seed_is_fresh: nobody has had this seed before, so nothing that was ever written depends on its draws. Only then
            may a law learned from other texts be sampled from by them.
        draft_temperature: in place of the target's, where that is above 0; None is the same.
        looks_ahead: whether a drafter may draft while a verdict is under way, for the verdicts it thinks likely.
        max_entropy: a proposal ends before the token whose law has more, in nats, where the drafter has laws; its
            first token comes all the same. None is no bound.
    """

    prompt: Sequence[int]
    committed: Sequence[int]
    law: SamplingParams
    logit_rules: LogitRules
    seed: int
    rule: Rule = Rule.TOKENWISE
    seed_is_fresh: bool = False
    draft_temperature: float | None = None
    looks_ahead: bool = True
    max_entropy: float | None = None

    def after(self, written: Sequence[int]) -> "DraftSequence":
        """The same with more of it committed."""
        return replace(self, committed=[*self.committed, *written])

    @property
    def draft_law(self) -> SamplingParams:
        """What a drafter that has logits draws by; any is exact [L 6], and the target's own the natural choice."""
        if self.draft_temperature is None or self.law.is_greedy:
            return self.law
        return replace(self.law, temperature=self.draft_temperature)

    @property
    def shares_noise(self) -> bool:
        """Whether tokens are chosen by the noise of their positions, and not drawn by uniforms of the round."""
        return self.rule is Rule.COUPLED and not self.draft_law.is_greedy

    @property
    def needs_logits(self) -> bool:
        """Whether the rule asks for the logits of each drafted token, and not for its law."""
        return self.rule is Rule.SIGMOID and not self.law.is_greedy


@dataclass(frozen=True, slots=True)
class Foresight:
    """What a drafter had drafted while the last verdict was under way.

    Attributes:
        drafted: tokens, for all outcomes that were thought of.
        used: those that are in this proposal; 0 where the outcome was none of them.
        hit: whether it was one of them.
        saved_seconds: what drafting the used ones would have taken.
    """

    drafted: int
    used: int
    hit: bool
    saved_seconds: float


@dataclass(frozen=True, slots=True)
class Draft:
    """A proposal.

    Attributes:
        token_ids: the drafted tokens, in order. laws: what each was sampled from, bit for bit (invariant 1); None is
        the point mass. Empty under `coupled`. Under the
            rule `sigmoid` the logits, above temperature 0: that rule asks for them, and not for the law.
        seconds: what it took, waiting for other sequences included.
        foresight: what was drafted of it beforehand; None where nothing was for any outcome.
    """

    token_ids: list[int]
    laws: list[SparseDistribution | DraftLogits | None]
    seconds: float
    foresight: Foresight | None = None

    @property
    def foreseen(self) -> int:
        """How many of its tokens were there when it was asked for."""
        return 0 if self.foresight is None else min(self.foresight.used, len(self.token_ids))


class Drafting(ABC):
    """One sequence of a drafter. Its methods belong to the event loop."""

    @abstractmethod
    def room(self) -> int:
        """How many tokens could be drafted next; 0 from where the drafter's context ends, and it stays 0."""

    @abstractmethod
    def advance(self, tokens: Sequence[int]) -> None:
        """Tells what was committed since the last proposal. Costs nothing: the next `propose` carries it."""

    @abstractmethod
    def propose(self, gamma: int) -> Awaitable[Draft]:
        """Begins to draft at once, and gives the result to whoever awaits it; one proposal at a time.

        `gamma` tokens come, or `room()` of them where that is less, or fewer where the drafter knows of no more, or is
        less sure of the next than it was asked to be.

        Raises:
            DraftError: on awaiting; the sequence cannot go on here.
        """

    @abstractmethod
    def close(self) -> None:
        """Frees what the sequence holds. A proposal under way is dropped. May be called twice."""


class Drafter(ABC):
    """Something that drafts, for many sequences at once."""

    @abstractmethod
    def open(self, sequence: DraftSequence) -> Drafting:
        """Begins a sequence. Does not wait; what it takes is taken by the first `propose`."""
