"""The one guard around a drafter: a request sees a proposal that makes sense, or a `DraftError` that it survives.

A proposal fails where the drafter raises, is late, or answers what the verifier would refuse. The sequence then rests,
and begins anew behind all that was written meanwhile. After some failures in a row the guard asks the drafter itself
for a proposal, the probe; where that fails too the drafter is off for everybody, and rests between one probe and the
next. Sequences alone never turn it off, since a client's own parameters or prompts may be what breaks them.
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
from kernels.dense import EXCLUDED, DraftLogits
from kernels.sampling import SamplingParams
from kernels.sparse import SparseDistribution, validate
from kernels.verify import Rule
from outrider.service.best_effort import Component

FIRST_REST_S, LONGEST_REST_S = 1.0, 10.0
"""Seconds of rest after a failure: doubled with each one, up to the most."""

SOUND_AFTER = 8
"""Proposals in a row after which a failure counts as the first."""

FAILURES_IN_A_ROW = 5
"""Over all sequences, with no proposal between them: then the drafter is probed."""

PROBE = DraftSequence(
    prompt=[0, 0], committed=[], law=SamplingParams(), logit_rules=LogitRules(), seed=0, looks_ahead=False
)
"""What the service asks a drafter itself. No client has a say in it."""

PROBE_GAMMA = 4

DRAFT_COST = Component("draft_cost")

Result = TypeVar("Result")

_log = structlog.get_logger()


class Rest:
    """How long something that has failed is left alone. Times are those of the event loop."""

    def __init__(self) -> None:
        self._until = 0.0
        self._next = FIRST_REST_S
        self._sound = 0  # proposals in a row

    def is_over(self) -> bool:
        return asyncio.get_running_loop().time() >= self._until

    def begin(self) -> None:
        """It has failed."""
        self._until = asyncio.get_running_loop().time() + self._next
        self._next, self._sound = min(2 * self._next, LONGEST_REST_S), 0

    def proposed(self) -> None:
        self._sound += 1
        if self._sound >= SOUND_AFTER:
            self._next = FIRST_REST_S


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
    def add(self, draft: Draft) -> None:
        """A proposal came."""
        self.proposals += 1
        self.tokens += len(draft.token_ids)
        self.seconds += draft.seconds


class GuardedDrafter(Drafter):
    """A drafter whose sequences raise nothing but `DraftError`, and that only from their proposals.

    Attributes:
        cost: what drafting has cost so far, over all sequences.
        is_up: False while it fails for everybody; then no sequence is ready.
        timeout: what a proposal may take, in seconds.
    """

    def __init__(
        self, drafter: Drafter, *, timeout: float, vocab_size: int, max_support: int, name: str = "drafter"
    ) -> None:
        """`vocab_size` and `max_support` are what the target takes; `name` is for the log."""
        self.cost = Cost()
        self.is_up = True
        self.timeout = timeout
        self.drafter = drafter
        self._name = name
        self._vocab_size = vocab_size
        self._max_support = max_support
        self._failures = 0  # in a row
        self._rest = Rest()  # between probes
        self._probing: asyncio.Task[None] | None = None

    def open(self, sequence: DraftSequence) -> Drafting:
        return GuardedDrafting(self, sequence)

    def may_be_asked(self) -> bool:
        """Whether it is up. Where it is not, a probe begins, if one is due."""
        if not self.is_up:
            self._begin_probe()
        return self.is_up

    def proposed(self, draft: Draft) -> None:
        """A sequence has a proposal."""
        self._failures = 0
        self._turn(is_up=True)
        self.cost.add(draft)

    def failed(self) -> None:
        """A sequence's proposal did not come."""
        self._failures += 1
        self.cost.failures += 1
        if self._failures >= FAILURES_IN_A_ROW:
            self._begin_probe()

    async def checked(
        self, proposal: "asyncio.Future[Draft]", gamma: int, sequence: DraftSequence, asked: float
    ) -> Draft:
        """The proposal that was asked for at `asked`, by the loop's time.

        Raises:
            TimeoutError: it did not come in time; it may still come.
            DraftError: it makes no sense.
            Exception: whatever the drafter raised.
        """
        if not proposal.done():
            left = asked + self.timeout - asyncio.get_running_loop().time()
            await asyncio.wait((proposal,), timeout=max(0.0, left))
        if not proposal.done():
            raise TimeoutError(f"no proposal came within {self.timeout:g} s")
        if proposal.cancelled():  # by the drafter: its `CancelledError` is not the request's
            raise DraftError("the drafter gave the proposal up")
        draft = proposal.result()
        try:
            _check(draft, gamma, sequence, self._vocab_size, self._max_support)
        except Exception as error:
            text = str(error) if isinstance(error, _Nonsense) else f"{type(error).__name__}: {error}"
            raise DraftError(f"the drafter answered nonsense: {text}") from None
        return draft

    def _begin_probe(self) -> None:
        if self._probing is None and self._rest.is_over():
            self._probing = asyncio.ensure_future(self._probe())

    async def _probe(self) -> None:
        drafting: Drafting | None = None
        try:
            asked = asyncio.get_running_loop().time()
            drafting = self.drafter.open(PROBE)
            await self.checked(begun(drafting.propose(PROBE_GAMMA)), PROBE_GAMMA, PROBE, asked)
        except Exception as error:
            self._rest.begin()
            self._turn(is_up=False, reason=f"{type(error).__name__}: {error}")
        else:
            self._rest = Rest()
            self._rest.begin()  # suspicions that clients raise cost a probe a second
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
            _log.info("the drafter works again", drafter=self._name)
        else:
            _log.error("the drafter is off: its probe failed too", drafter=self._name, reason=reason)


class GuardedDrafting(Drafting):
    """One sequence, of one of the drafter's sequences after the other."""

    def __init__(self, guard: GuardedDrafter, sequence: DraftSequence) -> None:
        self._guard = guard
        self._sequence = sequence
        self._written: list[int] = []
        self._inner: Drafting | None = None
        self._error: Exception | None = None  # the next proposal raises it
        self._late: asyncio.Future[Draft] | None = None  # a proposal that may still come
        self._rest = Rest()
        self._has_failed = False  # and has not proposed since
        self._attempt(self._open, None)

    def is_ready(self) -> bool:
        """A drafter that is still at a late proposal is not asked for another."""
        if self._late is not None and not self._late.done():
            return False
        return self._rest.is_over() and self._guard.may_be_asked()

    def room(self) -> int:
        return self._attempt(lambda: self._open().room(), 1)  # where it fails, `propose` says so

    def advance(self, tokens: Sequence[int]) -> None:
        self._written.extend(tokens)
        if (inner := self._inner) is not None:
            self._attempt(lambda: inner.advance(tokens), None)

    def propose(self, gamma: int) -> Awaitable[Draft]:
        asked, proposal = asyncio.get_running_loop().time(), None
        is_ready = self.is_ready()
        if is_ready and self._error is None:
            self._late = None
            proposal = self._attempt(lambda: begun(self._open().propose(gamma)), None)
        return _Answer(lambda: self._answer(proposal, gamma, asked, is_ready=is_ready))

    def close(self) -> None:
        late, self._late = self._late, None
        if late is not None:
            late.cancel()
        inner, self._inner = self._inner, None
        if inner is not None:
            with suppress(Exception):
                inner.close()

    async def _answer(
        self, proposal: "asyncio.Future[Draft] | None", gamma: int, asked: float, *, is_ready: bool
    ) -> Draft:
        if not is_ready:
            raise DraftError("the drafter rests after a failure")
        try:
            if proposal is None:
                assert self._error is not None
                raise self._error
            draft = await self._guard.checked(proposal, gamma, self._sequence, asked)
        except Exception as error:
            self._error = None
            if isinstance(error, TimeoutError) and proposal is not None and not proposal.done():
                self._late = proposal  # all that it has read stays
            else:
                self.close()
            self._rest.begin()
            self._has_failed = True
            self._guard.failed()
            if isinstance(error, DraftError | TimeoutError):
                raise error if isinstance(error, DraftError) else DraftError(str(error)) from None
            raise DraftError(f"the drafter failed: {type(error).__name__}: {error}") from None
        self._rest.proposed()
        self.recoveries += self._has_failed
        self._has_failed = False
        self._guard.proposed(draft)
        return draft

    def _open(self) -> Drafting:
        if self._inner is None:
            self._inner = self._guard.drafter.open(self._sequence.after(self._written))
        return self._inner

    def _attempt(self, action: Callable[[], Result], default: Result) -> Result:
        """What `action` returns; `default` where it raises, upon which the next proposal does."""
        try:
            return action()
        except Exception as error:
            self._error = self._error or error
            return default


class _Answer(Awaitable[Draft]):
    """A proposal under way, which may be dropped without having been awaited."""

    def __init__(self, answer: Callable[[], Coroutine[Any, Any, Draft]]) -> None:
        self._answer = answer

    def __await__(self) -> Generator[Any, None, Draft]:
        return self._answer().__await__()


def begun(proposal: Awaitable[Draft]) -> "asyncio.Future[Draft]":
    """The proposal as a future, of whose error nobody need hear."""
    future = asyncio.ensure_future(proposal)
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    return future


class _Nonsense(Exception):
    pass


def _check(draft: Draft, gamma: int, sequence: DraftSequence, vocab_size: int, max_support: int) -> None:
    """Checks a proposal as the verifier will: one that makes no sense would end the sequence there."""
    tokens, laws = draft.token_ids, draft.laws
    _require(len(tokens) <= gamma, f"{len(tokens)} tokens came; {gamma} were asked for")
    for token in tokens:
        _require(0 <= token < vocab_size, f"token {token!r} is outside 0..{vocab_size - 1}")
    if sequence.rule is Rule.COUPLED:
        _require(not laws, f"{len(laws)} distributions came under the rule coupled, which takes none")
        return
    _require(len(laws) == len(tokens), f"{len(laws)} distributions came for {len(tokens)} tokens")
    for token, law in zip(tokens, laws, strict=True):
        if sequence.needs_logits:
            _check_logits(token, law, vocab_size)
        elif law is not None:
            if not isinstance(law, SparseDistribution):
                raise _Nonsense(f"logits came with token {token}, where its distribution is needed")
            validate(law.ids, law.weights, vocab_size)
            _require(len(law.ids) <= max_support, f"a distribution has {len(law.ids)} tokens; at most {max_support}")
            _require(law.probability(token) > 0, f"token {token} is outside of the distribution that came with it")


def _check_logits(token: int, logits: object, vocab_size: int) -> None:
    if not isinstance(logits, DraftLogits):
        raise _Nonsense(f"no logits came with token {token}, which the rule sigmoid needs")
    values = logits.values.cpu().numpy()
    _require(values.shape == (vocab_size,), f"{values.shape} logits came; V is {vocab_size}")
    _require(bool(np.isfinite(values).all()), "the logits are not finite")
    _require(float(values[token]) != EXCLUDED, f"the logits exclude token {token}, which was drafted")


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise _Nonsense(otherwise)
