"""Failover: when a sequence loses its verifier, it is opened at another one, and its current round is sent again.

The opening carries prompt and committed tokens. A round that is sent again has the same base, hence the same draws
(invariant 2). Without a verdict nothing was emitted (invariant 3).
"""

import asyncio
import math
import time
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum

import grpc
import structlog

from draft_service.metrics import FailoverMetrics
from draft_service.replicas import BUSY_SECONDS, Replica, Replicas
from draft_service.sequence import Sequence
from draft_service.verify_stream import SILENT, VerifyStream
from outrider.rpc.errors import RequestError, unavailable
from protos.outrider.v1 import speculation_pb2, verifier_service_pb2

_log = structlog.get_logger()

# Verifiers that a sequence may lose in one round, before it fails.
MOST_LOST_IN_A_ROUND = 4
# Verifiers that may fail in a step with one round, or die while they run it, before the sequence fails.
MOST_FAILED_IN_A_ROUND = 2
# Seconds that a new sequence waits for a verifier: its client can try another draft service.
OPENING_TIMEOUT = 5.0
# Seconds that a sequence on a draining verifier waits for another one to open it, and seconds until it tries that one
# again.
MOVING_TIMEOUT, UNRESPONSIVE_SECONDS = 2.0, 10.0
# The longest timeout of a call, in seconds: gRPC takes one of some centuries for a deadline that has passed.
LONGEST_CALL = 1e9
# Time before the deadline at which a failure is reported: a share of the deadline, and at most so many seconds.
MARGIN_SHARE, MARGIN_SECONDS = 0.1, 0.5


class FailureKind(StrEnum):
    """Why a sequence left its verifier. The values are labels of a metric."""

    DIED = "died"  # or is unreachable
    SILENT = "silent"
    DRAINING = "draining"
    REFUSED = "refused"  # full, or it ended an idle sequence to run queued ones
    STEP_FAILED = "step_failed"  # with this sequence alone, too
    MISMATCHED = "mismatched"  # it runs another model now


def kind_of(error: RequestError) -> FailureKind | None:
    """The kind of failure of a stream; None if every verifier would refuse the request."""
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
    """A token bucket that limits failovers, so that repeated work cannot overload the remaining verifiers.

    Each failover runs a whole text again. The bucket is full at the start: all sequences survive the death of one
    verifier. Each verdict adds a tenth of a token, so in the long run at most a tenth of the rounds lead to a failover.
    Each second adds a token, for the case that all sequences wait. Waiting sequences are served in order.
    """

    def __init__(self, burst: int) -> None:
        """`burst` is its size, in tokens; at least 1. It starts full."""
        if burst < 1:
            raise ValueError(f"burst is {burst}; at least 1")
        self._burst = float(burst)
        self._tokens = self._burst
        self._looked = time.monotonic()
        self._turn = asyncio.Lock()  # held by the first in the queue
        self._more = asyncio.Event()

    @property
    def tokens(self) -> float:
        """Tokens in the bucket. Any thread may read it."""
        return min(self._burst, self._tokens + PER_SECOND * max(0.0, time.monotonic() - self._looked))

    def earn(self) -> None:
        """Adds the share of one verdict."""
        self._add(PER_ROUND)

    def give_back(self) -> None:
        """Returns a token that was not used: no verifier ran the sequence."""
        self._add(1.0)

    async def take(self, until: float = 0.0) -> bool:
        """Takes a token, or waits for one until `until`, by `time.monotonic()`. Returns whether it took one."""
        try:
            async with asyncio.timeout(max(0.0, until - time.monotonic())), self._turn:
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
        self._tokens, self._looked = min(self._burst, self.tokens + tokens), time.monotonic()
        if tokens > 0:
            self._more.set()


@dataclass(frozen=True, slots=True)
class Verifiers:
    """The verifiers, and the budget and metrics of failover, of one service.

    Attributes:
        timeout: seconds that a sequence may be without a verifier (`--failover-timeout`).
    """

    replicas: Replicas
    budget: FailoverBudget
    timeout: float
    metrics: FailoverMetrics


@dataclass(slots=True)
class _Failures:
    """Failures of a sequence since its last verdict.

    Attributes:
        last: the last error; None without failures.
        kind: of the last error.
        lost: verifiers that had opened the sequence and were lost.
        suspected: of them, verifiers that failed in a step with the sequence, or died while they ran it.
        avoid: replicas that refused the sequence, and until when, by `time.monotonic()`.
    """

    last: RequestError | None = None
    kind: FailureKind = FailureKind.DIED
    lost: int = 0
    suspected: list[Replica] = field(default_factory=list)
    step_error: RequestError | None = None
    avoid: dict[Replica, float] = field(default_factory=dict)

    def add(self, stream: VerifyStream, kind: FailureKind, error: RequestError, *, was_running: bool) -> None:
        """Records a failure. `was_running` is whether the verifier may have been running the sequence.

        Raises:
            RequestError: no other verifier will be tried: the error itself, or INTERNAL (STEP_FAILED).
        """
        self.last, self.kind = error, kind
        if kind is FailureKind.STEP_FAILED:
            self.step_error = error
            self.avoid[stream.replica] = math.inf
        if kind is FailureKind.STEP_FAILED or (kind is FailureKind.DIED and was_running):
            self.suspected.append(stream.replica)
        if len(self.suspected) >= MOST_FAILED_IN_A_ROUND:
            names = " and ".join(each.address for each in self.suspected)
            raise RequestError(
                grpc.StatusCode.INTERNAL,
                "STEP_FAILED",
                f"a round of this request failed at {len(self.suspected)} verifiers, {names}, and is not sent to "
                f"another one: {error.message}; see the verifiers' logs",
            )
        if kind is FailureKind.REFUSED:
            pause = BUSY_SECONDS if error.retry_after is None else error.retry_after
            self.avoid[stream.replica] = time.monotonic() + pause
        if stream.is_open:
            self.lost += 1
            if self.lost >= MOST_LOST_IN_A_ROUND:
                raise error

    def no_verifier(self, replicas: Replicas, why: str = "") -> RequestError:
        """The error for the client if none of the replicas opens the sequence."""
        if self.step_error is not None:
            return self.step_error
        if self.last is not None and self.kind in (FailureKind.DRAINING, FailureKind.REFUSED):
            return self.last
        if self.last is not None:
            reasons = [self.last.message]
        else:
            reasons = [f"{each.address} is not used: {each.mismatch}" for each in replicas.all() if each.mismatch]
        text = f"no verifier at {replicas.names} opened the sequence{why}"
        return unavailable("NO_VERIFIER", ": ".join([text, *reasons[:1]]))


class FailoverStream:
    """A `VerifyStream` with failover.

    Attributes:
        was_opened: whether a verifier has opened the sequence; it may have been lost since.
        pause: seconds of failover in the wait for the last verdict.
    """

    def __init__(self, verifiers: Verifiers, sequence: Sequence, *, timeout: float) -> None:
        """`timeout` is the time left of the client's deadline, in seconds."""
        self.was_opened = False
        self.pause = 0.0
        self._verifiers = verifiers
        self._sequence = sequence
        self._deadline = time.monotonic() + timeout
        self._margin = min(MARGIN_SHARE * timeout, MARGIN_SECONDS)
        self._stream: VerifyStream | None = None
        self._failures = _Failures()
        self._avoided: dict[Replica, float] = {}  # draining: replicas not to try, and until when

    async def open(self) -> verifier_service_pb2.Opened:
        """Opens the sequence at a verifier.

        Raises:
            RequestError: no verifier opened it in time, or one refused it for a reason that holds for all.
        """
        opened = await self._open(OPENING_TIMEOUT)
        self.was_opened = True
        return opened

    async def send(self) -> None:
        """Sends the sequence's round, unless the opening carried it.

        If this fails, or the verifier drains, `verdict` does the failover, so that committed tokens are sent to the
        client first.
        """
        if self._stream is None or self._stream.draining or self._stream.has_round:
            return
        try:
            await self._stream.send()
        except RequestError as error:
            self._lose(error)

    async def verdict(self) -> speculation_pb2.Verdict:
        """The next verdict of the round. Commit it before the next call.

        Raises:
            RequestError: the verifier refused the round; or it failed, and no other one took over in time.
        """
        self.pause = 0.0
        if self._stream is not None and self._stream.draining:
            await self._move(self._stream)
        while True:
            try:
                if self._stream is None:
                    await self._reopen()
                assert self._stream is not None
                if not self._stream.has_round:
                    await self._stream.send()
                verdict = await self._stream.verdict()
                break
            except RequestError as error:
                self._lose(error)
        self._stream.replica.succeeded(self._stream.epoch, verdict.load, draining=self._stream.draining)
        self._verifiers.budget.earn()
        if self._failures.last is not None:
            self._failures = _Failures()
        return verdict

    async def close(self) -> None:
        """Ends the stream, in order if no verdict is owed."""
        if self._stream is not None:
            await self._stream.close()

    def cancel(self) -> None:
        """Ends the stream at once. May be called twice."""
        if self._stream is not None:
            self._stream.cancel()

    # ------------------------------------------------------------------------------------------------------- failover

    def _lose(self, error: RequestError) -> None:
        """Leaves a verifier after a failure.

        Raises:
            RequestError: the error itself, if every verifier would refuse the request, or too many were lost.
        """
        stream, kind = self._stream, kind_of(error)
        if stream is None:
            raise error
        was_running = stream.is_running
        self._stream = None
        stream.cancel()
        if kind is None:
            raise error
        _report(stream, kind, error)
        if stream.is_open:
            _log.warning(
                "verifier lost",
                request_id=self._sequence.request.request_id,
                verifier=stream.replica.address,
                failure=kind.value,
                reason=error.message,
                tokens=len(self._sequence.tokens),
            )
        self._failures.add(stream, kind, error, was_running=was_running)

    async def _reopen(self) -> None:
        """Opens the sequence at another verifier; raises as `_open`."""
        started, kind = time.monotonic(), self._failures.kind
        try:
            await self._open(self._verifiers.timeout)
        finally:
            self._add_pause(time.monotonic() - started)
        self._note_switch(kind)

    async def _open(self, timeout: float) -> verifier_service_pb2.Opened:
        """Opens the sequence at one verifier after the other, until one accepts.

        Raises:
            RequestError: none did within `timeout` seconds, or one refused it for a reason that holds for all.
        """
        replicas, budget, failures = self._verifiers.replicas, self._verifiers.budget, self._failures
        latest = self._deadline - self._margin
        left = min(timeout, self._verifiers.timeout)  # waits for the budget do not count
        while True:
            # A failover: the text runs again.
            if self.was_opened and not await budget.take(latest):
                raise failures.no_verifier(replicas, ", and the failover budget is used up")
            started = time.monotonic()
            try:
                # Out of time, a replica that has refused is not tried again: many full ones would go on for ever.
                avoid = failures.avoid if left > 0 else dict.fromkeys(failures.avoid, math.inf)
                replica = await replicas.wait(min(latest, started + left), avoid, suspected=failures.suspected)
                if replica is None:
                    raise failures.no_verifier(replicas)
                self._stream = self._begin_at(replica)
                return await self._stream.open(reopened=self.was_opened, isolated=bool(failures.suspected))
            except BaseException as error:
                if self.was_opened:
                    budget.give_back()
                if self._stream is None or not isinstance(error, RequestError):
                    raise
                left -= time.monotonic() - started
                self._lose(error)

    async def _move(self, old: VerifyStream) -> None:
        """Moves from a draining verifier to another one, if there is one now. Otherwise the old one continues."""
        if self._failures.suspected:  # the old one runs the round alone
            return
        replica = self._verifiers.replicas.choose(self._avoided, proven=True)
        if replica is None or not await self._verifiers.budget.take():
            return
        started = time.monotonic()
        new = self._begin_at(replica)
        try:
            async with asyncio.timeout(MOVING_TIMEOUT):
                await new.open(reopened=True)
        except BaseException as error:
            new.cancel()
            self._verifiers.budget.give_back()
            if not isinstance(error, RequestError | TimeoutError):
                raise
            kind = None if isinstance(error, TimeoutError) else kind_of(error)
            if kind is None or kind is FailureKind.STEP_FAILED:
                # `_report` leaves it usable, and each round would try it again.
                self._avoided[replica] = time.monotonic() + UNRESPONSIVE_SECONDS
            elif isinstance(error, RequestError):
                _report(new, kind, error)
            return
        finally:
            self._add_pause(time.monotonic() - started)
        self._stream = new
        old.cancel()
        self._sequence.counts.message.num_drain_moves += 1
        self._note_switch(FailureKind.DRAINING)

    def _begin_at(self, replica: Replica) -> VerifyStream:
        timeout = min(max(0.0, self._deadline - time.monotonic()), LONGEST_CALL)
        target = self._verifiers.replicas.target
        assert target is not None
        return VerifyStream(replica, self._sequence, target=target, timeout=timeout)

    def _add_pause(self, seconds: float) -> None:
        self.pause += seconds
        self._sequence.timings.failover += seconds
        self._verifiers.metrics.paused(seconds)

    def _note_switch(self, kind: FailureKind) -> None:
        assert self._stream is not None
        sequence = self._sequence
        sequence.counts.message.num_failovers += 1
        sequence.counts.message.num_reopened_tokens += len(sequence.tokens)
        self._verifiers.metrics.switched(kind)
        _log.info(
            "failover",
            request_id=sequence.request.request_id,
            verifier=self._stream.replica.address,
            failure=kind.value,
            tokens=len(sequence.tokens),
            seconds=round(self.pause, 3),
        )


def _report(stream: VerifyStream, kind: FailureKind, error: RequestError) -> None:
    """Updates the replica after a failure of the stream."""
    if kind is FailureKind.REFUSED:
        stream.replica.refused(error.retry_after)
    elif kind is FailureKind.MISMATCHED:
        stream.replica.mismatched(error.message)
    elif kind is not FailureKind.STEP_FAILED:  # then the verifier itself is healthy
        stream.replica.failed(stream.epoch, error.message)
