"""The interface between a request and its drafter: `Drafter.open(DraftSequence) -> Drafting`.

Cheap drafters share a second interface, `Guesser`, which computes in the caller's thread. `CheapDrafting` calls it on
the event loop or on a thread of its own. Staged drafting calls it for tokens that the draft model then judges.
"""

import asyncio
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property

from torch import Tensor

from kernels.adjustments import LogitRules
from kernels.rng import Domain, uniform
from kernels.sampling import Draw, SamplingParams
from kernels.sigmoid import DraftLogits
from kernels.sparse import SparseDistribution
from kernels.verify import Rule


class DrafterKind(StrEnum):
    """The kinds of drafter."""

    MODEL = "model"
    PARALLEL = "parallel"
    STAGED = "staged"
    NGRAM = "ngram"
    LOOKUP = "lookup"
    RANDOM = "random"
    NONE = "none"


RUN_A_MODEL = frozenset({DrafterKind.MODEL, DrafterKind.PARALLEL, DrafterKind.STAGED})
"""Drafters that need a draft model."""

UNBOUNDED = 1 << 30
"""The `capacity` of a drafter without a context limit."""

SLICE = 128
"""Tokens that a drafter reads on the event loop before it yields: about 0.05 ms."""

Guesses = list[tuple[int, SparseDistribution | None]]
"""Tokens, each with the distribution that it was sampled from; None is the point mass."""


class DraftError(Exception):
    """Drafting failed. The target can write without a draft.

    `reason` is a name of the contract's `ErrorReason`, without its prefix.
    """

    def __init__(self, message: str, *, reason: str = "INTERNAL") -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class DraftSequence:
    """A sequence as a drafter opens it.

    Attributes:
        prompt: at least one token.
        params: how the target's logits become p.
        logit_rules: penalties, biases and bans, applied to logits first.
        seed: key of the draws (invariant 2).
        rule: the acceptance rule. Each token is sent with its q̂; under `coupled`, where the draft uses the target's
            noise, without; under `sigmoid` with its logits.
        seed_is_fresh: this service has just drawn the seed, so no other text depends on its draws.
        draft_temperature: replaces the target's temperature if that is above 0; None uses the target's.
        uses_outcome_cache: whether the drafter may draft while a verdict is on its way.
        max_entropy: nats. A proposal ends before a token whose q has a higher entropy, but has at least one token.
            Drafters without distributions ignore it. None is no bound.
        tokens_per_pass: s, tokens that one pass of the draft model drafts. Only the drafter `parallel` reads it.
        cache_salt: only sequences with an equal salt share the KV cache of a common prefix; None shares with nobody.
        encoder_input: of an encoder–decoder draft: token ids `[S]`, or log-Mel features `[mels, frames]`; `prompt` is
            then that of the decoder.
    """

    prompt: Sequence[int]
    committed: Sequence[int]
    params: SamplingParams
    logit_rules: LogitRules
    seed: int
    rule: Rule = Rule.TOKENWISE
    seed_is_fresh: bool = False
    draft_temperature: float | None = None
    uses_outcome_cache: bool = True
    max_entropy: float | None = None
    tokens_per_pass: int = 1
    cache_salt: str | None = None
    encoder_input: Tensor | None = field(default=None, repr=False, compare=False)

    def after(self, written: Sequence[int]) -> "DraftSequence":
        """The same sequence with more committed tokens."""
        return replace(self, committed=[*self.committed, *written])

    @cached_property
    def draft_params(self) -> SamplingParams:
        """How the draft's logits become q. Any choice is exact [L 6]; the default is the target's parameters."""
        if self.draft_temperature is None or self.params.is_greedy:
            return self.params
        return replace(self.params, temperature=self.draft_temperature)

    @cached_property
    def shares_noise(self) -> bool:
        """Whether tokens are chosen with the noise of their positions (`coupled`), not with uniforms of the round."""
        return self.rule is Rule.COUPLED and not self.draft_params.is_greedy

    @cached_property
    def needs_logits(self) -> bool:
        """Whether the rule takes the logits of each drafted token instead of q̂."""
        return self.rule is Rule.SIGMOID and not self.params.is_greedy

    @cached_property
    def owns_draws(self) -> bool:
        """Whether no other text depends on the draws that decide this one. If one may, neither learns from the other:
        q and γ must not depend on draws that are still to come.
        """
        return self.seed_is_fresh or self.params.is_greedy or self.rule is Rule.COUPLED

    def draw(self, base: int, index: int, domain: Domain = Domain.DRAFT, inner_base: int = 0) -> Draw:
        """How to draw one token of the proposal (invariant 2). `max_entropy` never refuses the first one.

        Args:
            base: length of the sequence at the start of the round.
            index: of the token in the proposal, counted from `inner_base`.
            inner_base: tokens of the round that are drafted already; only staged drafting sets it.
        """
        bound = math.inf if self.max_entropy is None or index == 0 else self.max_entropy
        if self.shares_noise:
            return Draw(self.draft_params, noise=(self.seed, base + inner_base + index), max_entropy=bound)
        u = 0.0 if self.draft_params.is_greedy else uniform(self.seed, base, index, domain, inner_base)
        return Draw(self.draft_params, u, max_entropy=bound)


@dataclass(frozen=True, slots=True)
class CacheUse:
    """The use of the outcome cache in one round: tokens drafted while the last verdict was on its way.

    Attributes:
        drafted: tokens, in all branches.
        used: of them, tokens in this proposal; 0 without a hit.
        hit: whether a branch matched the verdict.
        saved_seconds: time that drafting the used tokens after the verdict would have taken.
    """

    drafted: int
    used: int
    hit: bool
    saved_seconds: float


@dataclass(frozen=True, slots=True)
class Draft:
    """A proposal.

    Attributes:
        distributions: q̂ of each token, bit for bit as it was sampled from (invariant 1); None is the point mass. Empty
            under `coupled`, and logits under `sigmoid` above temperature 0.
        seconds: from the request to the proposal, with waits for other sequences.
        cache_use: the use of the outcome cache; None if it drafted nothing.
        error: of the pass after the last token, if that failed. The tokens before it are sent (invariant 4).
    """

    token_ids: list[int]
    distributions: list[SparseDistribution | DraftLogits | None]
    seconds: float
    cache_use: CacheUse | None = None
    error: DraftError | None = None


class Drafting(ABC):
    """One sequence of a drafter. Call its methods on the event loop.

    Attributes:
        recoveries: proposals that followed a failure.
    """

    recoveries = 0

    def is_ready(self) -> bool:
        """Whether `propose` may be called now. False for a while after a failure: the target writes without a draft."""
        return True

    @abstractmethod
    def capacity(self) -> int:
        """The most tokens that can be drafted next. Once the drafter's context is full it is 0, and stays 0."""

    @abstractmethod
    def advance(self, tokens: Sequence[int]) -> None:
        """Adds tokens that were committed since the last proposal. Cheap: the next `propose` processes them."""

    @abstractmethod
    def propose(self, gamma: int) -> Awaitable[Draft]:
        """Begins to draft at once; await the result. One proposal at a time.

        The proposal has min(`gamma`, `capacity()`) tokens, or fewer if the drafter finds no more, or if `max_entropy`
        or an error ends it.

        Raises:
            DraftError: when awaited.
        """

    @abstractmethod
    def close(self) -> None:
        """Frees the sequence's memory and drops a proposal in progress. May be called twice."""


class Drafter(ABC):
    """Drafts for many sequences at once."""

    @abstractmethod
    def open(self, sequence: DraftSequence) -> Drafting:
        """Begins a sequence. Returns at once: the first `propose` does the work."""


class Guesser(ABC):
    """One sequence of a cheap drafter. Several threads may use it, one at a time."""

    @abstractmethod
    def read(self, tokens: Sequence[int]) -> None:
        """Appends committed tokens: first the prompt, then those of each verdict."""

    @abstractmethod
    def guess(self, count: int, ahead: Sequence[int] = ()) -> Guesses:
        """Up to `count` tokens after those read and `ahead`. `ahead` is not kept: its tokens may be rejected."""


class CheapDrafter(Drafter):
    """A drafter with one guesser a sequence.

    Attributes:
        thread: guessers run there; None is the event loop.
    """

    thread: Executor | None = None

    @abstractmethod
    def guesser(self, sequence: DraftSequence, domain: Domain = Domain.DRAFT) -> Guesser:
        """A guesser for a new sequence. Its uniforms come from `domain`."""

    def open(self, sequence: DraftSequence) -> Drafting:
        return CheapDrafting(self.guesser(sequence), sequence, self.thread)


class CheapDrafting(Drafting):
    """Runs a guesser on a thread, or on the event loop. There it reads a long text in slices of `SLICE` tokens."""

    def __init__(self, guesser: Guesser, sequence: DraftSequence, thread: Executor | None = None) -> None:
        self._guesser = guesser
        self._thread = thread
        self._sends_distributions = sequence.rule is not Rule.COUPLED
        self._text = [*sequence.prompt, *sequence.committed]
        self._read = 0  # tokens of the text that the guesser has read
        self._reading: asyncio.Future[Draft] | None = None

    def capacity(self) -> int:
        return UNBOUNDED

    def advance(self, tokens: Sequence[int]) -> None:
        self._text.extend(tokens)

    def propose(self, gamma: int) -> Awaitable[Draft]:
        loop, requested = asyncio.get_running_loop(), time.perf_counter()
        if self._thread is not None:
            self._reading = loop.run_in_executor(self._thread, self._draft, gamma, requested)
        elif len(self._text) - self._read > SLICE:
            self._reading = asyncio.ensure_future(self._read_and_draft(gamma, requested))
        else:
            self._reading = loop.create_future()
            self._reading.set_result(self._draft(gamma, requested))
        return self._reading

    def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()

    def _read_slice(self) -> None:
        tokens = self._text[self._read : self._read + SLICE]
        self._guesser.read(tokens)
        self._read += len(tokens)

    async def _read_and_draft(self, gamma: int, requested: float) -> Draft:
        while self._read < len(self._text):
            self._read_slice()
            await asyncio.sleep(0)
        return self._draft(gamma, requested)

    def _draft(self, gamma: int, requested: float) -> Draft:
        while self._read < len(self._text):
            self._read_slice()
        guesses = self._guesser.guess(gamma)
        distributions = [q for _, q in guesses] if self._sends_distributions else []
        return Draft([token for token, _ in guesses], [*distributions], time.perf_counter() - requested)
