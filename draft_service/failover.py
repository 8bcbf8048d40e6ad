"""A sequence that outlives its verifiers: where one is lost it is opened at the next, and its round is sent again.

Nothing is lost and nothing is drawn anew: what was committed goes along with the prompt, and a round that is sent again
has the base it had, hence the same draws (invariant 2). Where no verdict came, nothing was emitted (invariant 3).
"""

import asyncio
import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum

import grpc
import structlog

from draft_service.metrics import FailoverMetrics
from draft_service.replicas import Lease, Replica, Replicas
from draft_service.sequence import Sequence
from draft_service.verify_stream import SILENT
from outrider.rpc.errors import RequestError, unavailable
from protos.outrider.v1 import speculation_pb2, verifier_service_pb2

_log = structlog.get_logger()

# Verifiers that a sequence may lose in one round.
MOST_LOST_IN_A_ROUND = 4
# Verifiers whose step may fail with a round, or whose process may end while it runs it: then the round is refused.
MOST_FAILED_IN_A_ROUND = 2
# A sequence that begins waits no longer than this for a verifier: its client has waited for nothing yet, and may ask
# elsewhere.
OPENING_PATIENCE = 5.0
# A sequence leaves a draining verifier only if the next one answers so soon; else it does not ask that one for a while.
MOVING_PATIENCE, UNRESPONSIVE_SECONDS = 2.0, 10.0
# Seconds of a wait where the client has set no deadline, nor anybody else.
LONGEST = 3600.0
# What is left of a deadline to tell the client of a failure in: a share, and so many seconds at most.
MARGIN_SHARE, MARGIN_SECONDS = 0.1, 0.5


class FailureKind(StrEnum):
    """Why a sequence goes to another verifier. Its values are a metric's labels."""

    DIED = "died"  # or cannot be reached: nobody can tell the two apart
    SILENT = "silent"
    DRAINING = "draining"
    REFUSED = "refused"  # it has no room, or others need that of a sequence which was idle
    STEP_FAILED = "step_failed"  # with this sequence, in a batch and alone
    MISMATCHED = "mismatched"  # it runs another model by now


def kind_of(error: RequestError) -> FailureKind | None:
    """What an error of a stream means; None where it is the request's own, which any verifier would answer alike."""
    match error.code, error.reason:
        case grpc.StatusCode.UNAVAILABLE, "DRAINING":
            return FailureKind.DRAINING
        case grpc.StatusCode.UNAVAILABLE, _:
            return FailureKind.SILENT if SILENT in error.metadata else FailureKind.DIED
        case (grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED" | "IDLE") | (grpc.StatusCode.DEADLINE_EXCEEDED, "IDLE"):
            return FailureKind.REFUSED
        case grpc.StatusCode.INTERNAL, "STEP_FAILED":
            return FailureKind.STEP_FAILED
        case grpc.StatusCode.FAILED_PRECONDITION, "PAIR_MISMATCH":
            return FailureKind.MISMATCHED
        case _:
            return None


PER_ROUND = 0.1
PER_SECOND = 1.0


class FailoverBudget:
    """A token bucket that bounds how many sequences are opened again: work that is done twice must not become a storm.

    Each such opening runs the whole text once more. Where a verifier dies because it has too much to do, those that it
    leaves are too much for the next, and so on. The bucket is full at the start, so that all survive one death at once.
    It fills by a tenth of a token with each verdict, so that in the long run at most a tenth of the rounds are followed
    by an opening; and by one token a second, since where all wait there are no rounds. Waiters are served in order.
    """

    def __init__(self, burst: int, clock: Callable[[], float] | None = None) -> None:
        """`burst` is what it holds at most, and at the start; at least 1."""
        if burst < 1:
            raise ValueError(f"burst is {burst}; at least 1")
        self._burst = float(burst)
        self._clock = clock or time.monotonic
        self._tokens = self._burst
        self._looked = self._clock()
        self._turn = asyncio.Lock()  # first come, first served
        self._more = asyncio.Event()

    @property
    def tokens(self) -> float:
        """What is in it. Any thread may ask."""
        return min(self._burst, self._tokens + PER_SECOND * max(0.0, self._clock() - self._looked))

    def earn(self) -> None:
        """A round was judged."""
        self._add(PER_ROUND)

    def give_back(self) -> None:
        """What was taken was not needed: no verifier has run anything for it."""
        self._add(1.0)

    def take_now(self) -> bool:
        """Takes a token if there is one and nobody waits for it."""
        if self.tokens < 1.0 or self._turn.locked():
            return False
        self._add(-1.0)
        return True

    async def take(self, until: float) -> bool:
        """Takes a token, waiting for one until the clock shows `until`; says whether it did."""
        try:
            async with asyncio.timeout(max(0.0, until - self._clock())), self._turn:
                while self.tokens < 1.0:
                    self._more.clear()
                    with suppress(TimeoutError):
                        async with asyncio.timeout((1.0 - self.tokens) / PER_SECOND):
                            await self._more.wait()
                self._add(-1.0)
                return True
        except TimeoutError:
            return False

    def _add(self, tokens: float) -> None:
        self._tokens, self._looked = min(self._burst, self.tokens + tokens), self._clock()
        if tokens > 0:
            self._more.set()


@dataclass(frozen=True, slots=True)
class Verifiers:
    """What all sequences of a service share.

    Attributes:
        patience: how long a sequence may be without a verifier, in seconds.
    """

    replicas: Replicas
    budget: FailoverBudget
    patience: float
    metrics: FailoverMetrics


@dataclass(slots=True)
class _Failures:
    """What a sequence has met with since its last verdict.

    Attributes:
        last: the last error; None where there was none.
        kind: what it means.
        lost: verifiers that had taken the sequence, and were lost.
        suspected: those among them whose step failed with it, or whose process ended while running it.
        step_error: what a verifier has said of a step that failed.
        avoid: replicas that have refused it, and until when, by `time.monotonic()`.
    """

    last: RequestError | None = None
    kind: FailureKind = FailureKind.DIED
    lost: int = 0
    suspected: list[Replica] = field(default_factory=list)
    step_error: RequestError | None = None
    avoid: dict[Replica, float] = field(default_factory=dict)

    def add(self, lease: Lease, kind: FailureKind, error: RequestError, *, was_running: bool) -> None:
        """Takes in one more; `was_running` is whether the verifier may have run the sequence's prompt or round.

        Raises:
            RequestError: where no other verifier is to be tried: the error, or INTERNAL (STEP_FAILED).
        """
        self.last, self.kind = error, kind
        if kind is FailureKind.STEP_FAILED:
            self.step_error = error
            self.avoid[lease.replica] = math.inf
        if kind is FailureKind.STEP_FAILED or (kind is FailureKind.DIED and was_running):
            self.suspected.append(lease.replica)
        if len(self.suspected) >= MOST_FAILED_IN_A_ROUND:
            names = " and ".join(each.address for each in self.suspected)
            raise RequestError(
                grpc.StatusCode.INTERNAL,
                "STEP_FAILED",
                f"a round of this request failed at {len(self.suspected)} verifiers, {names}; it is "
                f"not sent to another one: {error.message}",
            )
        if kind is FailureKind.REFUSED and error.retry_after is not None:
            self.avoid[lease.replica] = time.monotonic() + error.retry_after
        if lease.stream.is_open:
            self.lost += 1
            if self.lost >= MOST_LOST_IN_A_ROUND:
                raise error

    def no_verifier(self, names: str, why: str = "") -> RequestError:
        """What the client is told where none of `names` takes the sequence."""
        if self.step_error is not None:
            return self.step_error
        if self.last is not None and self.kind not in (FailureKind.DIED, FailureKind.SILENT):
            return self.last
        last = "" if self.last is None else f": {self.last.message}"
        return unavailable("NO_VERIFIER", f"no verifier answers at {names}{why}{last}")


class FailoverStream:
    """A `VerifyStream` that goes on at another verifier where one is lost.

    Attributes:
        is_open: whether a verifier has taken the sequence, be it lost by now.
        pause: seconds of the wait for the last verdict that were lost to failover.
    """

    def __init__(self, verifiers: Verifiers, sequence: Sequence, *, timeout: float | None) -> None:
        """`timeout` is what is left of the client's deadline, in seconds."""
        self.is_open = False
        self.pause = 0.0
        self._verifiers = verifiers
        self._sequence = sequence
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._margin = 0.0 if timeout is None else min(MARGIN_SHARE * timeout, MARGIN_SECONDS)
        self._lease: Lease | None = None
        self._failures = _Failures()
        self._unresponsive: dict[Replica, float] = {}  # until when they are not asked to take it from a draining one

    async def open(self) -> verifier_service_pb2.Opened:
        """Opens the sequence at a verifier, and returns the answer.

        Raises:
            RequestError: none has taken it in time, or one has refused what all would.
        """
        opened = await self._open(OPENING_PATIENCE)
        self.is_open = True
        return opened

    async def send(self) -> None:
        """Sends the sequence's round. Where that fails, or the verifier drains, `verdict` finds another one: the client
        is not to wait for that with what it may be told already.
        """
        if self._lease is None or self._lease.stream.draining:
            return
        try:
            await self._lease.stream.send()
        except RequestError as error:
            self._lose(error)

    async def verdict(self) -> speculation_pb2.Verdict:
        """The next verdict of the round. Commit it before anything else.

        Raises:
            RequestError: the verifier refused the round, or is gone, and no other one has taken it in time.
        """
        self.pause = 0.0
        if self._lease is not None and self._lease.stream.draining:
            await self._move(self._lease)
        while True:
            try:
                if self._lease is None:
                    await self._reopen()
                assert self._lease is not None
                if not self._lease.stream.has_round:
                    await self._lease.stream.send()
                verdict = await self._lease.stream.verdict()
                break
            except RequestError as error:
                self._lose(error)
        self._lease.succeeded(verdict.load)
        self._verifiers.budget.earn()
        if self._failures.last is not None:
            self._failures = _Failures()
        return verdict

    async def close(self) -> None:
        """Ends the stream, well where nothing is owed."""
        if self._lease is not None:
            await self._lease.close()

    def cancel(self) -> None:
        """Ends the stream here and now, whatever it owes. May be called twice."""
        if self._lease is not None:
            self._lease.cancel()

    # ------------------------------------------------------------------------------------------------------- failover

    def _lose(self, error: RequestError) -> None:
        """Leaves a verifier that has failed the sequence.

        Raises:
            RequestError: the error, where another verifier would answer the same, or too many were lost already.
        """
        lease, kind = self._lease, kind_of(error)
        if kind is FailureKind.MISMATCHED and self._needs_other_weights():
            kind = None
        if lease is None:
            raise error
        was_running = lease.stream.is_running
        self._lease = None
        lease.cancel()
        if kind is None:
            raise error
        _report(lease, kind, error)
        if lease.stream.is_open:
            _log.warning(
                "a sequence has lost its verifier",
                request_id=self._sequence.request.request_id,
                verifier=lease.replica.address,
                loss=kind.value,
                reason=error.message,
                tokens=len(self._sequence.tokens),
            )
        self._failures.add(lease, kind, error, was_running=was_running)

    async def _reopen(self) -> None:
        """Opens the sequence at another verifier; raises as `_open`."""
        started, kind = time.monotonic(), self._failures.kind
        try:
            await self._open(self._verifiers.patience)
        finally:
            self._add_pause(time.monotonic() - started)
        self._note_switch(kind)

    async def _open(self, patience: float) -> verifier_service_pb2.Opened:
        """Opens the sequence at one verifier after the other, until one takes it.

        Raises:
            RequestError: none does in so many seconds, or one has refused what all would.
        """
        replicas, budget, failures = self._verifiers.replicas, self._verifiers.budget, self._failures
        latest = time.monotonic() + LONGEST if self._deadline is None else self._deadline - self._margin
        left = min(patience, self._verifiers.patience)  # a wait for the budget is no wait for a verifier
        while True:
            # A verifier is to run once more what another one has run.
            if self.is_open and not await budget.take(latest):
                raise failures.no_verifier(replicas.names, ", and the failover budget is used up")
            started = time.monotonic()
            try:
                replica = await replicas.wait(min(latest, started + left), failures.avoid, failed=failures.suspected)
                if replica is None:
                    raise failures.no_verifier(replicas.names)
                self._lease = self._lease_at(replica)
                return await self._lease.stream.open(reopened=self.is_open, isolated=bool(failures.suspected))
            except BaseException as error:
                if self.is_open:
                    budget.give_back()
                if self._lease is None or not isinstance(error, RequestError):
                    raise
                left -= time.monotonic() - started
                self._lose(error)

    async def _move(self, old: Lease) -> None:
        """Leaves a verifier that drains, where another one is at hand; it may go on in the grace where none is."""
        replica = self._verifiers.replicas.choose(self._unresponsive, proven=True)
        if replica is None or not self._verifiers.budget.take_now():
            return
        started = time.monotonic()
        new = self._lease_at(replica)
        try:
            async with asyncio.timeout(MOVING_PATIENCE):
                await new.stream.open(reopened=True)
        except (RequestError, TimeoutError) as error:
            new.cancel()
            self._verifiers.budget.give_back()
            if isinstance(error, TimeoutError):
                self._unresponsive[replica] = time.monotonic() + UNRESPONSIVE_SECONDS
            elif (kind := kind_of(error)) is not None:
                _report(new, kind, error)
            return
        except BaseException:
            new.cancel()
            raise
        finally:
            self._add_pause(time.monotonic() - started)
        self._lease = new
        old.cancel()
        self._sequence.counts.failovers.moves += 1
        self._note_switch(FailureKind.DRAINING)

    def _lease_at(self, replica: Replica) -> Lease:
        timeout = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
        return replica.open(self._sequence, timeout=timeout)

    def _needs_other_weights(self) -> bool:
        target, needed = self._verifiers.replicas.target, self._sequence.request.weights_fingerprint
        return bool(needed) and target is not None and needed != target.weights_fingerprint

    def _add_pause(self, seconds: float) -> None:
        self.pause += seconds
        self._sequence.counts.failovers.seconds += seconds
        self._verifiers.metrics.paused(seconds)

    def _note_switch(self, kind: FailureKind) -> None:
        assert self._lease is not None
        sequence = self._sequence
        sequence.counts.failovers.count += 1
        sequence.counts.failovers.tokens += len(sequence.tokens)
        self._verifiers.metrics.switched(kind)
        _log.info(
            "a sequence goes on at another verifier",
            request_id=sequence.request.request_id,
            verifier=self._lease.replica.address,
            loss=kind.value,
            tokens=len(sequence.tokens),
            seconds=round(self.pause, 3),
        )


def _report(lease: Lease, kind: FailureKind, error: RequestError) -> None:
    """Has the replica learn from a failure."""
    match kind:
        case FailureKind.REFUSED:
            lease.refused(error.retry_after)
        case FailureKind.MISMATCHED:
            lease.mismatched(error.message)
        case FailureKind.DIED | FailureKind.SILENT | FailureKind.DRAINING:
            lease.failed(error.message)
        case FailureKind.STEP_FAILED:  # it has served the others
            pass
