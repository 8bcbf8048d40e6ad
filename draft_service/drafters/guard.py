"""Between a request and its drafter: whatever a drafter does, a request sees a proposal that makes sense, or an error.

An exception, a proposal that does not come in time, and one that the verifier would refuse all become a `DraftError`. A
circuit breaker that only a probe opens says whether a drafter works at all: failures of sequences raise a suspicion and
no more, since a client's own parameters or prompts may cause them.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import structlog

from draft_service.drafters.base import (
    Cost,
    Draft,
    Drafter,
    DrafterOff,
    DraftError,
    Drafting,
    DraftLate,
    DraftSequence,
)
from kernels.adjustments import LogitRules
from kernels.dense import EXCLUDED, DraftLogits
from kernels.sampling import SamplingParams
from kernels.sparse import SparseDistribution, validate
from kernels.verify import Rule

FAILURES_IN_A_ROW = 5
"""After so many, with no proposal between them, the drafter is probed. It is off where the probe fails too."""

FIRST_PROBE_S, LATEST_PROBE_S = 1.0, 10.0
"""Seconds between two probes, at least; doubled each time one fails, up to the most."""


class Health:
    """One drafter's.

    Attributes:
        is_well: whether sequences may ask it.
    """

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self.is_well = True
        self._clock = clock or time.monotonic
        self._failures = 0
        self._pause = FIRST_PROBE_S
        self._probe_at = self._clock()

    def needs_probe(self) -> bool:
        """Whether it is to be probed now."""
        is_suspect = not self.is_well or self._failures >= FAILURES_IN_A_ROW
        return is_suspect and self._clock() >= self._probe_at

    def failed(self) -> None:
        """A sequence's proposal did not come."""
        self._failures += 1

    def proposed(self) -> None:
        """One came."""
        self._failures, self._pause, self.is_well = 0, FIRST_PROBE_S, True

    def probed(self, *, well: bool) -> None:
        """A probe has ended."""
        if well:
            self.proposed()
            self._probe_at = self._clock() + FIRST_PROBE_S
        else:
            self.is_well = False
            self._probe_at = self._clock() + self._pause
            self._pause = min(2 * self._pause, LATEST_PROBE_S)


_log = structlog.get_logger()

LATE_IN_A_ROW = 3
"""Proposals that may be late one after the other; then a sequence asks no more."""

PROBE = DraftSequence(
    prompt=[0, 0], committed=[], law=SamplingParams(), logit_rules=LogitRules(), seed=0, looks_ahead=False
)
"""What the service asks a drafter itself. No client has a say in it."""

PROBE_GAMMA = 4


class GuardedDrafter(Drafter):
    """A drafter that only ever raises `DraftError`, and that only from its proposals.

    Attributes:
        cost: what drafting has cost so far, over all sequences.
        health: whether it works at all; while it does not, a sequence is refused without its being asked. What a
            request's own parameters cause is no sign of that, so it is the service's own probe that tells.
        timeout: what a proposal may take, in seconds.
    """

    def __init__(self, drafter: Drafter, *, timeout: float, vocab_size: int, max_support: int) -> None:
        """`vocab_size` and `max_support` are what the target takes."""
        self.cost = Cost()
        self.health = Health()
        self._drafter = drafter
        self.timeout = timeout
        self._vocab_size = vocab_size
        self._max_support = max_support
        self._probing: asyncio.Task[None] | None = None

    def open(self, sequence: DraftSequence) -> Drafting:
        return _GuardedDrafting(lambda: self._drafter.open(sequence), sequence, self)

    def failed(self) -> None:
        """A proposal did not come."""
        self.health.failed()
        self.look()

    def look(self) -> None:
        """Probes the drafter where that is due."""
        if self.health.needs_probe() and self._probing is None:
            self._probing = asyncio.ensure_future(self._probe())

    async def _probe(self) -> None:
        drafting: Drafting | None = None
        well = False
        try:
            drafting = self._drafter.open(PROBE)
            proposal = asyncio.ensure_future(drafting.propose(PROBE_GAMMA))
            proposal.add_done_callback(_retrieve)
            await asyncio.wait((proposal,), timeout=self.timeout)
            if proposal.done() and not proposal.cancelled():
                self.check(proposal.result(), PROBE_GAMMA, PROBE)
                well = True
        except Exception as error:
            _log.warning("a probe of the drafter failed", reason=f"{type(error).__name__}: {error}")
        finally:
            if drafting is not None:
                with suppress(Exception):
                    drafting.close()
            self.health.probed(well=well)
            self._probing = None

    def check(self, draft: Draft, gamma: int, sequence: DraftSequence) -> None:
        """Checks a proposal as the verifier will: it ends a sequence whose proposal makes no sense.

        Raises:
            DraftError: it makes none.
        """
        try:
            _check_tokens(draft, gamma, self._vocab_size)
            if sequence.rule is Rule.COUPLED:
                _require(not draft.laws, f"{len(draft.laws)} laws came under the rule coupled, which takes none")
                return
            given, drafted = len(draft.laws), len(draft.token_ids)
            _require(given == drafted, f"{given} laws came for {drafted} tokens")
            for token, law in zip(draft.token_ids, draft.laws, strict=True):
                self._check_law(token, law, sequence)
        except DraftError:
            raise
        except Exception as error:  # so far from a proposal that it cannot be looked at
            raise DraftError(f"the drafter answered nonsense: {type(error).__name__}: {error}") from None

    def _check_law(self, token: int, law: SparseDistribution | DraftLogits | None, sequence: DraftSequence) -> None:
        if sequence.needs_logits:
            _require(isinstance(law, DraftLogits), f"no logits came with token {token}, which the rule sigmoid needs")
            assert isinstance(law, DraftLogits)
            values = law.values.cpu().numpy()
            _require(values.shape == (self._vocab_size,), f"{values.shape} logits came; V is {self._vocab_size}")
            _require(bool(np.isfinite(values).all()), "the logits are not finite")
            _require(float(values[token]) != EXCLUDED, f"the logits exclude token {token}, which was drafted")
        elif law is not None:
            _require(isinstance(law, SparseDistribution), f"logits came with token {token}, where its law is needed")
            assert isinstance(law, SparseDistribution)
            validate(law.ids, law.weights, self._vocab_size)
            size = len(law.ids)
            _require(size <= self._max_support, f"a law has {size} tokens; at most {self._max_support}")
            _require(law.probability(token) > 0, f"token {token} is outside of the law that came with it")


def _check_tokens(draft: Draft, gamma: int, vocab_size: int) -> None:
    given = len(draft.token_ids)
    _require(given <= gamma, f"{given} tokens came; {gamma} were asked for")
    for token in draft.token_ids:
        _require(0 <= token < vocab_size, f"token {token!r} is outside 0..{vocab_size - 1}")


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise DraftError(f"the drafter answered nonsense: {otherwise}")


class _GuardedDrafting(Drafting):
    """Holds the first error, and gives it to every later proposal."""

    def __init__(self, begin: Callable[[], Drafting], sequence: DraftSequence, guard: GuardedDrafter) -> None:
        self._sequence = sequence
        self._guard = guard
        self._error: DraftError | None = None
        self._inner: Drafting | None = None
        self._under_way: asyncio.Future[Draft] | None = None  # one that was late, and may still come
        self._late = 0  # one after the other
        self._inner = self._attempt(begin)

    def room(self) -> int:
        inner = self._inner
        room = None if inner is None else self._attempt(inner.room)
        return 1 if room is None else room  # where it failed there is something to be told by `propose`

    def advance(self, tokens: Sequence[int]) -> None:
        inner = self._inner
        if inner is not None and self._error is None:
            self._attempt(lambda: inner.advance(tokens))

    def propose(self, gamma: int) -> Awaitable[Draft]:
        asked = time.monotonic()
        if self._under_way is not None:
            if not self._under_way.done():
                return _Answer(self, None, gamma, asked)
            self._under_way = None
        inner, future = self._inner, None
        if inner is not None and self._error is None and self._admitted():
            future = self._attempt(lambda: asyncio.ensure_future(inner.propose(gamma)))
        if future is not None:
            future.add_done_callback(_retrieve)
        return _Answer(self, future, gamma, asked)

    def close(self) -> None:
        inner, self._inner = self._inner, None
        if self._under_way is not None:
            self._under_way.cancel()
        if inner is not None:
            with suppress(Exception):  # whoever is here has what was wanted, or has given it up
                inner.close()

    async def answer(self, future: "asyncio.Future[Draft] | None", gamma: int, asked: float) -> Draft:
        """The proposal that was asked for at `asked` (`time.monotonic()`), as it comes; see `Drafting.propose`."""
        cost = self._guard.cost
        try:
            if self._error is not None:
                raise self._error
            if future is None:
                raise DraftLate("the drafter is still at an earlier proposal")
            draft = await self._in_time(future, asked)
            self._guard.check(draft, gamma, self._sequence)
        except DraftError as error:
            cost.failures += not isinstance(error, DrafterOff)
            if not isinstance(error, DraftLate):
                self._fail(error)
            raise
        self._late = 0
        self._guard.health.proposed()
        cost.add(draft)
        return draft

    async def _in_time(self, future: "asyncio.Future[Draft]", asked: float) -> Draft:
        timeout = self._guard.timeout
        if not future.done():
            await asyncio.wait((future,), timeout=max(0.0, asked + timeout - time.monotonic()))
        if not future.done():
            self._under_way = future
            self._late += 1
            if self._late < LATE_IN_A_ROW:
                self._guard.failed()
            text = f"no proposal came within {timeout:g} s, {self._late} times in a row"
            raise DraftLate(text) if self._late < LATE_IN_A_ROW else DraftError(text)
        if future.cancelled():  # by the drafter: its `CancelledError` is not the request's
            raise DraftError("the drafter gave the proposal up")
        try:
            return future.result()
        except DraftError:
            raise
        except Exception as error:
            raise _broken(error) from None

    def _attempt(self, action: Callable[[], Any]) -> Any:
        """What `action` returns; None where it raises, upon which the next proposal tells."""
        try:
            return action()
        except Exception as error:
            self._fail(error if isinstance(error, DraftError) else _broken(error))
            return None

    def _admitted(self) -> bool:
        if self._guard.health.is_well:
            return True
        self._guard.look()
        self._error = DrafterOff("the drafter has failed for everybody of late, and is not asked")
        return False

    def _fail(self, error: DraftError) -> None:
        """Keeps the first error; it counts once."""
        if self._error is None:
            self._error = error
            self._guard.failed()


class _Answer(Awaitable[Draft]):
    """A proposal under way, which may be dropped without having been awaited."""

    def __init__(
        self, drafting: _GuardedDrafting, future: "asyncio.Future[Draft] | None", gamma: int, asked: float
    ) -> None:
        self._arguments = (future, gamma, asked)
        self._drafting = drafting

    def __await__(self) -> Generator[Any, None, Draft]:
        return self._drafting.answer(*self._arguments).__await__()


def _retrieve(future: "asyncio.Future[Draft]") -> None:
    if not future.cancelled():
        future.exception()  # whoever awaits it is told; nobody need


def _broken(error: Exception) -> DraftError:
    return DraftError(f"the drafter failed: {type(error).__name__}: {error}")
