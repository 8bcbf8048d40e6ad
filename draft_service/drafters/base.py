"""The interface between a request and its drafter: `Drafter.open(DraftSequence) -> Drafting`.

Cheap drafters share a second one, `Guesser`: it computes where it is called. `GuesserDrafting` calls it on the event
loop or on a thread, and staged drafting asks it for tokens that the draft model then judges.
"""

import asyncio
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from itertools import chain, islice

from kernels.adjustments import LogitRules
from kernels.dense import DraftLogits
from kernels.rng import Domain, uniform
from kernels.sampling import Draw, SamplingParams
from kernels.sparse import SparseDistribution
from kernels.verify import Rule


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

SLICE = 128
"""Tokens that a drafter on the event loop reads before others have their turn: some 0.05 ms."""

Guesses = list[tuple[int, SparseDistribution | None]]
"""Tokens, and the distribution that each was sampled from; None is the point mass."""


class DraftError(Exception):
    """A proposal did not come; the target can write alone.

    `reason` is a name of the contract's `ErrorReason`, without its prefix.
    """

    def __init__(self, message: str, *, reason: str = "INTERNAL") -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class DraftSequence:
    """What a drafter needs to know of a sequence.

    Attributes:
        prompt: at least one token.
        committed: output that there is already.
        law: what the target's logits are sampled by.
        logit_rules: what changes those logits before.
        seed: key of the draws (invariant 2).
        rule: how proposals are judged, which says what is sent with each token; under `coupled` the drafts are chosen
            by the noise that the target has too.
        seed_is_fresh: no request has had this seed before, so no text depends on its draws yet. Only then may counts
            learned from other texts be sampled from by them.
        draft_temperature: in place of the target's, where that is above 0; None is the same.
        looks_ahead: whether the outcome cache may draft for it while a verdict is under way.
        max_entropy: a proposal ends before the token whose distribution has more, in nats, where the drafter has
            distributions; its first token comes all the same. None is no bound.
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

    @cached_property
    def draft_law(self) -> SamplingParams:
        """What the draft's logits are sampled by; any is exact [L 6], and the target's own the natural choice."""
        if self.draft_temperature is None or self.law.is_greedy:
            return self.law
        return replace(self.law, temperature=self.draft_temperature)

    @cached_property
    def shares_noise(self) -> bool:
        """Whether tokens are chosen by the noise of their positions, and not drawn by uniforms of the round."""
        return self.rule is Rule.COUPLED and not self.draft_law.is_greedy

    @cached_property
    def needs_logits(self) -> bool:
        """Whether the rule asks for the logits of each drafted token, and not for its distribution."""
        return self.rule is Rule.SIGMOID and not self.law.is_greedy

    def draw(self, base: int, place: int, domain: Domain = Domain.DRAFT, inner_base: int = 0) -> Draw:
        """How the token at a place of the proposal is drawn (invariant 2); the first one always is.

        `base` is the length that the round began with, `inner_base` how many of its tokens there were already.
        """
        bound = math.inf if self.max_entropy is None or place == 0 else self.max_entropy
        if self.shares_noise:
            return Draw(self.draft_law, noise=(self.seed, base + inner_base + place), max_entropy=bound)
        u = 0.0 if self.draft_law.is_greedy else uniform(self.seed, base, place, domain, inner_base)
        return Draw(self.draft_law, u, max_entropy=bound)


@dataclass(frozen=True, slots=True)
class Foresight:
    """What the outcome cache had drafted while the last verdict was under way.

    Attributes:
        drafted: tokens, for all outcomes.
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
        token_ids: the drafted tokens, in order.
        laws: what each was sampled from, bit for bit (invariant 1); None is the point mass. Empty under `coupled`, and
            logits under `sigmoid` above temperature 0.
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
    """One sequence of a drafter. Its methods belong to the event loop.

    Attributes:
        recoveries: how often a proposal came after a failure.
    """

    recoveries = 0

    def is_ready(self) -> bool:
        """Whether it may be asked now; after a failure it rests, and the target writes alone."""
        return True

    @abstractmethod
    def room(self) -> int:
        """How many tokens could be drafted next; 0 from where the drafter's context ends, and it stays 0."""

    @abstractmethod
    def advance(self, tokens: Sequence[int]) -> None:
        """Says what was committed since the last proposal. Costs nothing: the next `propose` carries it."""

    @abstractmethod
    def propose(self, gamma: int) -> Awaitable[Draft]:
        """Begins to draft at once, and gives the result to whoever awaits it; one proposal at a time.

        `gamma` tokens come, or `room()` of them where that is less, or fewer where the drafter knows of no more, or is
        less sure of the next than it was asked to be.

        Raises:
            DraftError: on awaiting.
        """

    @abstractmethod
    def close(self) -> None:
        """Frees what the sequence holds. A proposal under way is dropped. May be called twice."""


class Drafter(ABC):
    """Something that drafts, for many sequences at once."""

    @abstractmethod
    def open(self, sequence: DraftSequence) -> Drafting:
        """Begins a sequence. Does not wait; what it takes is taken by the first `propose`."""


class Guesser(ABC):
    """One sequence of a cheap drafter. Threads take turns with it."""

    @abstractmethod
    def read(self, tokens: Sequence[int]) -> None:
        """Takes in what was committed: the prompt first, then each verdict."""

    @abstractmethod
    def guess(self, count: int, ahead: Sequence[int] = ()) -> Guesses:
        """Up to `count` tokens after what was read and `ahead`, which may be taken back and leaves no trace."""


class GuessingDrafter(Drafter):
    """A drafter made of guessers."""

    @abstractmethod
    def guesser(self, sequence: DraftSequence, domain: Domain = Domain.DRAFT) -> Guesser:
        """One that has read nothing yet; what it draws, it draws in `domain`."""

    def open(self, sequence: DraftSequence) -> Drafting:
        return GuesserDrafting(self.guesser(sequence), sequence)


class GuesserDrafting(Drafting):
    """A guesser on the event loop, where it reads a long text in slices, between which others have their turn; or on a
    thread.
    """

    def __init__(self, guesser: Guesser, sequence: DraftSequence, thread: Executor | None = None) -> None:
        self._guesser = guesser
        self._thread = thread
        self._sends_laws = sequence.rule is not Rule.COUPLED
        self._opening = chain(sequence.prompt, sequence.committed)
        self._unread: list[int] = []  # what follows it
        self._reading: asyncio.Future[Draft] | None = None

    def room(self) -> int:
        return UNBOUNDED

    def advance(self, tokens: Sequence[int]) -> None:
        self._unread.extend(tokens)

    def propose(self, gamma: int) -> Awaitable[Draft]:
        loop, asked = asyncio.get_running_loop(), time.perf_counter()
        if self._thread is not None:
            self._reading = loop.run_in_executor(self._thread, self._read_and_draft, gamma, asked)
        elif not self._read_slice():
            self._reading = asyncio.ensure_future(self._read_on(gamma, asked))
        else:
            self._reading = loop.create_future()
            self._reading.set_result(self._draft(gamma, asked))
        return self._reading

    def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()

    def _read_slice(self) -> bool:
        """Reads `SLICE` tokens at most; whether those were all."""
        tokens = list(islice(self._opening, SLICE))
        more = self._unread[: SLICE - len(tokens)]
        del self._unread[: len(more)]
        self._guesser.read(tokens + more)
        return len(tokens) + len(more) < SLICE

    def _draft(self, gamma: int, asked: float) -> Draft:
        guesses = self._guesser.guess(gamma)
        laws = [law for _, law in guesses] if self._sends_laws else []
        return Draft([token for token, _ in guesses], [*laws], time.perf_counter() - asked)

    async def _read_on(self, gamma: int, asked: float) -> Draft:
        is_done = False
        while not is_done:
            await asyncio.sleep(0)
            is_done = self._read_slice()
        return self._draft(gamma, asked)

    def _read_and_draft(self, gamma: int, asked: float) -> Draft:
        while not self._read_slice():
            pass
        return self._draft(gamma, asked)
