"""The guard around every drafter: timeout, validation and backoff. A request gets a valid proposal or a `DraftError`.

A proposal fails if the drafter raises, is late, or returns a proposal that the verifier would refuse. One that an error
ends after its first token counts as failed, too, but is sent. After a failure the sequence waits, and opens the drafter
again with all committed tokens. After several failures in a row, over all sequences, the guard sends a probe: a
proposal of its own. If the probe fails too, the drafter is down for all sequences until a later probe succeeds.
Failures of requests alone never take it down: a client's prompt or parameters may cause them.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import structlog

from draft_service.drafters.base import Draft, Drafter, DraftError, Drafting, DraftSequence
from kernels.adjustments import LogitRules
from kernels.sampling import SamplingParams
from kernels.sigmoid import EXCLUDED, DraftLogits
from kernels.sparse import SparseDistribution, validate
from kernels.verify import Rule
from kernels.verify_c import valid_supports
from outrider.service.best_effort import Component

FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 1.0, 10.0
"""Seconds of backoff after a failure: doubled by each further one, up to the second number."""

SOUND_AFTER = 8
"""Proposals in a row that reset the backoff."""

FAILURES_IN_A_ROW = 5
"""Failures over all sequences, without a proposal between them, that start a probe."""

PROBE = DraftSequence(
    prompt=[0, 0], committed=[], params=SamplingParams(), logit_rules=LogitRules(), seed=0, uses_outcome_cache=False
)
"""The sequence of a probe. No client chooses any of it."""

PROBE_GAMMA = 4

DRAFT_COST = Component("draft_cost")

Result = TypeVar("Result")

_log = structlog.get_logger()


class Backoff:
    """Exponential backoff after failures, by the event loop's clock."""

    def __init__(self) -> None:
        self._until = 0.0
        self._next = FIRST_BACKOFF_S
        self._sound = 0  # proposals in a row

    def is_over(self) -> bool:
        return asyncio.get_running_loop().time() >= self._until

    def begin(self) -> None:
        """Starts a pause after a failure, and doubles the next one."""
        self._until = asyncio.get_running_loop().time() + self._next
        self._next, self._sound = min(2 * self._next, LONGEST_BACKOFF_S), 0

    def proposed(self) -> None:
        self._sound += 1
        if self._sound >= SOUND_AFTER:
            self._next = FIRST_BACKOFF_S


@dataclass(slots=True)
class Cost:
    """Totals of a drafter over all its sequences.

    Attributes:
        proposals: those that did not fail.
        tokens: drafted tokens in them.
        seconds: from request to proposal, summed, with waits for other sequences.
        failures: missing, late and invalid proposals, and those that an error ended.
        cache_queries: proposals whose last verdict the outcome cache had drafted for.
        cache_hits, cache_drafted, cache_used, cache_saved_seconds: sums of `CacheUse`.
    """

    proposals: int = 0
    tokens: int = 0
    seconds: float = 0.0
    failures: int = 0
    cache_queries: int = 0
    cache_hits: int = 0
    cache_drafted: int = 0
    cache_used: int = 0
    cache_saved_seconds: float = 0.0

    @DRAFT_COST.quiet
    def add(self, draft: Draft) -> None:
        self.proposals += 1
        self.tokens += len(draft.token_ids)
        self.seconds += draft.seconds
        if (use := draft.cache_use) is not None:
            self.cache_queries += 1
            self.cache_hits += use.hit
            self.cache_drafted += use.drafted
            self.cache_used += use.used
            self.cache_saved_seconds += use.saved_seconds


class GuardedDrafter(Drafter):
    """A drafter whose sequences raise only `DraftError`, and only from their proposals.

    Attributes:
        is_up: False after a failed probe; then no sequence is ready.
        timeout: seconds that a proposal may take.
    """

    def __init__(
        self,
        drafter: Drafter,
        *,
        timeout: float,
        vocab_size: int,
        max_support: int,
        name: str = "drafter",
        probe: DraftSequence = PROBE,
    ) -> None:
        """`vocab_size` and `max_support` are the target's; `name` is for the log; `probe` is the probes' sequence."""
        self.cost = Cost()
        self.is_up = True
        self.timeout = timeout
        self.drafter = drafter
        self._name = name
        self._probe_sequence = probe
        self._vocab_size = vocab_size
        self._max_support = max_support
        self._failures = 0  # in a row
        self._backoff = Backoff()  # between probes
        self._probing: asyncio.Task[None] | None = None

    def open(self, sequence: DraftSequence) -> Drafting:
        return GuardedDrafting(self, sequence)

    def is_available(self) -> bool:
        """Whether the drafter is up. If not, starts a probe when one is due."""
        if not self.is_up:
            self._begin_probe()
        return self.is_up

    def proposed(self, draft: Draft) -> None:
        self._failures = 0
        self._turn(is_up=True)
        self.cost.add(draft)

    def failed(self) -> None:
        self._failures += 1
        self.cost.failures += 1
        if self._failures >= FAILURES_IN_A_ROW:
            self._begin_probe()

    async def checked(
        self, proposal: "asyncio.Future[Draft]", gamma: int, sequence: DraftSequence, requested: float
    ) -> Draft:
        """Waits for a proposal, and validates it. `requested` is the time of the request, by the loop's clock.

        Raises:
            TimeoutError: it is late; it may still come.
            DraftError: it is invalid.
            Exception: from the drafter.
        """
        if not proposal.done():
            await asyncio.wait((proposal,), timeout=requested + self.timeout - asyncio.get_running_loop().time())
        if not proposal.done():
            raise TimeoutError(f"no proposal within {self.timeout:g} s (--draft-timeout)")
        if proposal.cancelled():  # by the drafter; a `CancelledError` here would cancel the request
            raise DraftError("the drafter cancelled the proposal")
        draft = proposal.result()
        try:
            _check(draft, gamma, sequence, self._vocab_size, self._max_support)
        except Exception as error:
            text = str(error) if isinstance(error, _Invalid) else f"{type(error).__name__}: {error}"
            raise DraftError(f"the drafter returned an invalid proposal: {text}") from None
        return draft

    def _begin_probe(self) -> None:
        if self._probing is None and self._backoff.is_over():
            self._probing = asyncio.ensure_future(self._probe())

    async def _probe(self) -> None:
        drafting: Drafting | None = None
        try:
            requested = asyncio.get_running_loop().time()
            drafting = self.drafter.open(self._probe_sequence)
            proposal = begun(drafting.propose(PROBE_GAMMA))
            if error := (await self.checked(proposal, PROBE_GAMMA, self._probe_sequence, requested)).error:
                raise error
        except Exception as error:
            self._backoff.begin()
            self._turn(is_up=False, reason=f"{type(error).__name__}: {error}")
        else:
            self._backoff = Backoff()
            self._backoff.begin()  # at most one probe a second
            self._failures = 0
            self._turn(is_up=True)
        finally:
            if drafting is not None:
                with suppress(Exception):
                    drafting.close()
            self._probing = None

    def _turn(self, *, is_up: bool, reason: str = "") -> None:
        if is_up is self.is_up:
            return
        self.is_up = is_up
        if is_up:
            _log.info("drafter up", drafter=self._name)
        else:
            _log.error("drafter down", drafter=self._name, reason=reason, effect="the target writes without a draft")


class GuardedDrafting(Drafting):
    """One sequence. After a failure it opens the drafter's sequence again."""

    def __init__(self, guard: GuardedDrafter, sequence: DraftSequence) -> None:
        self._guard = guard
        self._sequence = sequence
        self._written: list[int] = []
        self._inner: Drafting | None = None
        self._error: Exception | None = None  # for the next proposal to raise
        self._late: asyncio.Future[Draft] | None = None  # a proposal that may still come
        self._backoff = Backoff()
        self._has_failed = False  # since the last proposal
        self._attempt(self._open, None)

    def is_ready(self) -> bool:
        """False, too, while a late proposal is still in progress."""
        if self._late is not None and not self._late.done():
            return False
        return self._backoff.is_over() and self._guard.is_available()

    def capacity(self) -> int:
        return self._attempt(lambda: self._open().capacity(), 1)  # if it fails, `propose` raises

    def advance(self, tokens: Sequence[int]) -> None:
        self._written.extend(tokens)
        if (inner := self._inner) is not None:
            self._attempt(lambda: inner.advance(tokens), None)

    def propose(self, gamma: int) -> Awaitable[Draft]:
        requested, proposal = asyncio.get_running_loop().time(), None
        is_ready = self.is_ready()
        if is_ready and self._error is None:
            late, self._late = self._late, None
            if late is not None and (late.cancelled() or late.exception() or late.result().error):
                self.close()  # its KV cache may be spoiled
            proposal = self._attempt(lambda: begun(self._open().propose(gamma)), None)
        return _Answer(lambda: self._answer(proposal, gamma, requested, is_ready=is_ready))

    def close(self) -> None:
        late, self._late = self._late, None
        if late is not None:
            late.cancel()
        inner, self._inner = self._inner, None
        if inner is not None:
            with suppress(Exception):
                inner.close()

    async def _answer(
        self, proposal: "asyncio.Future[Draft] | None", gamma: int, requested: float, *, is_ready: bool
    ) -> Draft:
        if not is_ready:
            raise DraftError("the drafter is in backoff after a failure", reason="OVERLOADED")
        try:
            if proposal is None:
                assert self._error is not None
                raise self._error
            draft = await self._guard.checked(proposal, gamma, self._sequence, requested)
        except Exception as error:
            self._error = None
            if isinstance(error, TimeoutError) and proposal is not None and not proposal.done():
                self._late = proposal  # its KV cache stays useful
            else:
                self.close()
            self._fail()
            if isinstance(error, DraftError | TimeoutError):
                raise error if isinstance(error, DraftError) else DraftError(str(error), reason="OVERLOADED") from None
            raise DraftError(f"the drafter failed: {type(error).__name__}: {error}") from None
        if draft.error is not None:
            self.close()
            self._fail()
            return draft
        self._backoff.proposed()
        self.recoveries += self._has_failed
        self._has_failed = False
        self._guard.proposed(draft)
        return draft

    def _fail(self) -> None:
        self._backoff.begin()
        self._has_failed = True
        self._guard.failed()

    def _open(self) -> Drafting:
        if self._inner is None:
            self._inner = self._guard.drafter.open(self._sequence.after(self._written))
        return self._inner

    def _attempt(self, action: Callable[[], Result], default: Result) -> Result:
        """The result of `action`. If it raises, returns `default`, and the next proposal raises the error."""
        try:
            return action()
        except Exception as error:
            self._error = self._error or error
            return default


class _Answer(Awaitable[Draft]):
    """A proposal in progress. It need not be awaited."""

    def __init__(self, answer: Callable[[], Coroutine[Any, Any, Draft]]) -> None:
        self._answer = answer

    def __await__(self) -> Generator[Any, None, Draft]:
        return self._answer().__await__()


def begun(proposal: Awaitable[Draft]) -> "asyncio.Future[Draft]":
    """The proposal as a future whose error need not be retrieved."""
    future = asyncio.ensure_future(proposal)
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    return future


class _Invalid(Exception):
    pass


def _check(draft: Draft, gamma: int, sequence: DraftSequence, vocab_size: int, max_support: int) -> None:
    """Checks a proposal as the verifier will: an invalid one would end the sequence there."""
    tokens, distributions = draft.token_ids, draft.distributions
    if len(tokens) > gamma:
        raise _Invalid(f"{len(tokens)} tokens; at most {gamma} were requested")
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise _Invalid(f"token {token!r} is outside 0..{vocab_size - 1}")
    if sequence.rule is Rule.COUPLED:
        if distributions:
            raise _Invalid(f"{len(distributions)} distributions; the rule coupled takes none")
        return
    if len(distributions) != len(tokens):
        raise _Invalid(f"{len(distributions)} distributions for {len(tokens)} tokens")
    if sequence.needs_logits:
        for token, logits in zip(tokens, distributions, strict=True):
            _check_logits(token, logits, vocab_size)
    elif not _are_valid(tokens, distributions, vocab_size, max_support):
        for token, q in zip(tokens, distributions, strict=True):
            _check_distribution(token, q, vocab_size, max_support)


def _are_valid(tokens: Sequence[int], distributions: Sequence[object], vocab_size: int, max_support: int) -> bool:
    """Whether all distributions are valid, in one go. If not, a check of each says why."""
    drawn = [(token, q) for token, q in zip(tokens, distributions, strict=True) if q is not None]
    if not drawn:
        return True
    qs = [q for _, q in drawn if isinstance(q, SparseDistribution)]
    sizes = [len(q.ids) for q in qs]
    if len(qs) != len(drawn) or max(sizes) > max_support or sizes != [len(q.weights) for q in qs]:
        return False
    ids, weights = np.concatenate([q.ids for q in qs]), np.concatenate([q.weights for q in qs])
    if ids.dtype != np.uint32:
        if ids.min() < 0 or ids.max() >= vocab_size:
            return False
        ids = ids.astype(np.uint32)
    numbers = ids.tobytes(), weights.astype(np.uint16, copy=False).tobytes()
    return valid_supports(*numbers, sizes, [token for token, _ in drawn], vocab_size) is not None


def _check_distribution(token: int, q: object, vocab_size: int, max_support: int) -> None:
    if q is None:  # the point mass
        return
    if not isinstance(q, SparseDistribution):
        raise _Invalid(f"token {token} has logits; only the rule sigmoid takes them")
    validate(q.ids, q.weights, vocab_size)
    if len(q.ids) > max_support:
        raise _Invalid(f"a distribution has {len(q.ids)} tokens; at most {max_support}")
    if q.probability(token) <= 0:
        raise _Invalid(f"token {token} has probability 0 in its own distribution")


def _check_logits(token: int, logits: object, vocab_size: int) -> None:
    if not isinstance(logits, DraftLogits):
        raise _Invalid(f"token {token} has no logits; the rule sigmoid takes them")
    values = logits.values.cpu().numpy()
    if values.shape != (vocab_size,):
        raise _Invalid(f"the logits have shape {values.shape}; it must be ({vocab_size},)")
    if not np.isfinite(values).all():
        raise _Invalid("the logits are NaN or infinite")
    if float(values[token]) == EXCLUDED:
        raise _Invalid(f"the logits exclude the drafted token {token}")
