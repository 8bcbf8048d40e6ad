"""A sequence that outlives its verifiers: where one is lost it is opened at the next, and its round is sent again.

Nothing is lost and nothing is drawn anew: what was committed goes along with the prompt, and a round that is sent again
has the base it had, hence the same draws (invariant 2). Where no verdict came, nothing was emitted (invariant 3).

It has the interface of a `VerifySequence`, and wraps one after the other.
"""

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import grpc
import structlog

from draft_service.failover_budget import FailoverBudget
from draft_service.losses import Loss, loss_of
from draft_service.replica import Replica, ReplicaSeat
from draft_service.replicas import Replicas
from draft_service.statistics import Failovers
from draft_service.verify_sequence import VerifySequence
from outrider.rpc.errors import RequestError, unavailable
from protos.outrider.v1 import speculation_pb2, verifier_service_pb2

# Verifiers that a sequence may lose in one round.
MOST_LOST_IN_A_ROUND = 4
# Verifiers whose step may fail with a round, or whose process may end while it runs it: then the round is refused.
MOST_FAILED_IN_A_ROUND = 2
# One that did not answer a sequence in good time, which could stay where it was, is not asked by it again for so long.
MUTE_SECONDS = 10.0


@dataclass(slots=True)
class Trouble:
    """From the loss of a verifier until the next verdict.

    Attributes:
        error: the last one; None where there is no trouble.
        loss: what it means.
        lost: verifiers that had taken the sequence, and were lost.
        failed: those among them whose step failed with it, or whose process ended while running it.
        step_error: what a verifier has said of a step that failed.
        avoid: replicas that have refused it, and until when, by `time.monotonic()`.
        mute: replicas that it would have moved to, and until when they are left alone. They are no trouble yet, and
            outlast it.
    """

    error: RequestError | None = None
    loss: Loss = Loss.DIED
    lost: int = 0
    failed: list[Replica] = field(default_factory=list)
    step_error: RequestError | None = None
    avoid: dict[Replica, float] = field(default_factory=dict)
    mute: dict[Replica, float] = field(default_factory=dict)

    def met(self, replica: Replica, loss: Loss, error: RequestError, *, had_taken: bool, was_running: bool) -> None:
        """A verifier has failed the sequence; `had_taken` is whether it had opened it, and `was_running` whether it was
        running its prompt or its round.

        Raises:
            RequestError: where one more is not to be tried: the error, or INTERNAL (STEP_FAILED).
        """
        self.error, self.loss = error, loss
        if loss is Loss.STEP_FAILED:
            self.step_error = error
            self.avoid[replica] = math.inf
        if loss is Loss.STEP_FAILED or (loss is Loss.DIED and was_running):
            self.failed.append(replica)
        if len(self.failed) >= MOST_FAILED_IN_A_ROUND:
            names = " and ".join(each.address for each in self.failed)
            raise RequestError(
                grpc.StatusCode.INTERNAL,
                "STEP_FAILED",
                f"a round of this request failed at {len(self.failed)} verifiers, {names}, and is "
                f"not sent to another one: {error.message}",
            )
        if loss is Loss.REFUSED and error.retry_after is not None:
            self.avoid[replica] = time.monotonic() + error.retry_after
        self.lost += had_taken
        if had_taken and self.lost >= MOST_LOST_IN_A_ROUND:
            raise error

    def did_not_answer(self, replica: Replica) -> None:
        """A verifier that the sequence would have moved to was silent for too long."""
        self.mute[replica] = time.monotonic() + MUTE_SECONDS

    def over(self) -> "Trouble":
        """What is left of it after a verdict."""
        return Trouble(mute=self.mute)

    @property
    def is_suspect(self) -> bool:
        """Whether the sequence may be what its verifier failed at."""
        return bool(self.failed)

    def given_up(self, names: str, why: str = "") -> RequestError:
        """What the client is told where none of `names` takes the sequence."""
        if self.step_error is not None:
            return self.step_error
        if self.error is not None and self.loss not in (Loss.DIED, Loss.SILENT):
            return self.error
        last = "" if self.error is None else f": {self.error.message}"
        return unavailable("NO_VERIFIER", f"no verifier answers at {names}{why}{last}")


_log = structlog.get_logger()

# A sequence that begins waits no longer than this for a verifier: its client has waited for nothing yet, and may ask
# elsewhere.
OPENING_PATIENCE = 5.0
# As long one that would leave a verifier in good time waits for the next one to answer.
MOVING_PATIENCE = 2.0
# Seconds of a wait where the client has set no deadline, nor anybody else.
LONGEST = 3600.0
# What is left of a deadline to tell the client of a failure in: a share, and so many seconds at most.
MARGIN_SHARE, MARGIN_SECONDS = 0.1, 0.5


class Observer(Protocol):
    """Who is told of failovers."""

    def switched(self, loss: Loss) -> None:
        """A sequence has another verifier, since it has lost the one before."""

    def paused(self, seconds: float) -> None:
        """It was without one for so long."""


@dataclass(frozen=True, slots=True)
class Means:
    """What failover works with.

    Attributes:
        patience: how long a sequence may be without a verifier, in seconds.
    """

    replicas: Replicas
    budget: FailoverBudget
    patience: float
    observer: Observer


@dataclass(slots=True)
class _Round:
    """What was asked: the proposal, or so many tokens of the target's own."""

    number: int
    token_ids: Sequence[int] = ()
    distributions: Sequence[speculation_pb2.TokenDistribution] = ()
    is_decode: bool = False
    left: int = 1  # verdicts that are owed
    is_sent: bool = False


class ResumingSequence:
    """A sequence at one verifier, and at another one where that is lost.

    Attributes:
        length: tokens of the sequence: prompt, and everything committed.
        pause: seconds of the wait for the last verdict that were lost to failover.
    """

    def __init__(
        self,
        means: Means,
        opening: verifier_service_pb2.OpenSequence,
        *,
        sequence_id: str,
        timeout: float | None,
        tally: Failovers,
    ) -> None:
        """`timeout` is what is left of the client's deadline, in seconds; `tally` counts what it costs."""
        self.length = len(opening.prompt_token_ids) + len(opening.committed_token_ids)
        self.pause = 0.0
        self._means = means
        self._opening = opening
        self._sequence_id = sequence_id
        self._tally = tally
        now = time.monotonic()
        self._deadline = None if timeout is None else now + timeout
        self._margin = 0.0 if timeout is None else min(MARGIN_SHARE * timeout, MARGIN_SECONDS)
        self._opened: verifier_service_pb2.Opened | None = None
        self._current: VerifySequence | None = None
        self._seat: ReplicaSeat | None = None
        self._load: speculation_pb2.VerifierLoad | None = None
        self._round = _Round(0)
        self._trouble = Trouble()
        replica = means.replicas.choose()
        if replica is not None:
            self._sit(replica)

    @property
    def is_open(self) -> bool:
        """Whether a verifier has taken the sequence, be it lost by now."""
        return self._opened is not None

    @property
    def load(self) -> speculation_pb2.VerifierLoad | None:
        """How busy the verifier of the last verdict was, and what its passes cost; None before the first."""
        return self._load

    async def begin(self) -> verifier_service_pb2.Opened:
        """Opens the sequence, and returns what the verifier says to it.

        Raises:
            RequestError: none has taken it in time, or one has refused what all would.
        """
        self._opened = await self._open(OPENING_PATIENCE)
        self._trouble = Trouble()
        return self._opened

    async def propose(
        self, token_ids: Sequence[int], distributions: Sequence[speculation_pb2.TokenDistribution]
    ) -> None:
        """Sends a proposal; one verdict answers it. A verifier that is lost meanwhile is the verdict's affair."""
        await self._begin_round(_Round(self._round.number + 1, token_ids, distributions))

    async def decode(self, tokens: int) -> None:
        """Asks for `tokens` of the target's own; one verdict comes for each. As for `propose`."""
        await self._begin_round(_Round(self._round.number + 1, is_decode=True, left=tokens))

    async def verdict(self) -> speculation_pb2.Verdict:
        """The next verdict. Its tokens count as committed from here on.

        Raises:
            RequestError: the verifier refused the round, or is gone, and no other one has taken it in time.
        """
        self.pause = 0.0
        if self._current is not None and self._current.draining:
            await self._move()
        while True:
            try:
                if self._current is None:
                    await self._resume()
                assert self._current is not None
                if not self._round.is_sent:
                    await self._send(self._current)
                verdict = await self._current.verdict()
                break
            except RequestError as error:
                self._lose(error)
        if self._trouble.error is not None:
            self._trouble = self._trouble.over()
        self._means.budget.earn()
        self._round.left -= 1
        self._opening.committed_token_ids.extend(verdict.token_ids)
        self.length = self._current.length
        self._load = self._current.load
        verdict.round = self._round.number  # each verifier counts from 1
        return verdict

    async def close(self) -> None:
        """Ends the stream. Where nothing is owed it ends well, and the verifier sees that it does."""
        if self._current is not None:
            await self._current.close()

    def cancel(self) -> None:
        """Ends the stream here and now, whatever it owes. Without effect on one that has ended."""
        if self._current is not None:
            self._current.cancel()

    # ------------------------------------------------------------------------------------------------------- a round

    async def _begin_round(self, round_: _Round) -> None:
        """Sends a round, unless there is nobody to send it to, or somebody better to be found first: the client is not
        to wait for that with what it may be told already, so `verdict` does it.
        """
        self._round = round_
        if self._current is None or self._current.draining:
            return
        try:
            await self._send(self._current)
        except RequestError as error:
            self._lose(error)

    async def _send(self, target: VerifySequence) -> None:
        self._round.is_sent = True
        if self._round.is_decode:
            await target.decode(self._round.left)
        else:
            await target.propose(self._round.token_ids, self._round.distributions)

    # -------------------------------------------------------------------------------------------------- going elsewhere

    def _lose(self, error: RequestError) -> None:
        """Leaves a verifier that has failed the sequence.

        Raises:
            RequestError: the error, where another verifier would answer the same, or too many were lost already.
        """
        loss = loss_of(error)
        if loss is Loss.MISMATCHED and self._asks_for_other_weights():
            loss = None
        was_running = self._current is not None and self._current.is_awaited
        current, seat = self._leave()
        if loss is None or current is None or seat is None:
            raise error
        seat.lost(loss, error)
        if current.is_open:
            _log.warning(
                "a sequence has lost its verifier",
                request_id=self._opening.request_id,
                verifier=seat.replica.address,
                loss=loss.value,
                reason=error.message,
                tokens=self.length,
            )
        self._trouble.met(seat.replica, loss, error, had_taken=current.is_open, was_running=was_running)

    async def _resume(self) -> None:
        """Opens the sequence at another verifier.

        Raises:
            RequestError: none has taken it in time.
        """
        started, loss = time.monotonic(), self._trouble.loss
        try:
            await self._open(self._means.patience)
        finally:
            self._note_pause(time.monotonic() - started)
        self._note_switch(loss)

    async def _move(self) -> None:
        """Leaves a verifier that drains, where another one is at hand; it may go on in the grace where none is."""
        old, seat, was_sent = self._current, self._seat, self._round.is_sent
        replica = self._means.replicas.choose(self._trouble.mute, proven=True)
        if replica is None or not self._means.budget.take_now():
            return
        assert old is not None
        started = time.monotonic()
        new = self._sit(replica)
        try:
            async with asyncio.timeout(MOVING_PATIENCE):
                await new.begin()
        except (RequestError, TimeoutError) as error:
            assert self._seat is not None
            new.cancel()
            self._means.budget.give_back()
            if isinstance(error, TimeoutError):
                self._trouble.did_not_answer(replica)
            elif (loss := loss_of(error)) is not None:
                self._seat.lost(loss, error)
            self._current, self._seat, self._round.is_sent = old, seat, was_sent
            return
        except BaseException:
            old.cancel()
            raise
        finally:
            self._note_pause(time.monotonic() - started)
        old.cancel()
        self._tally.moves += 1
        self._note_switch(Loss.DRAINING)

    async def _open(self, patience: float) -> verifier_service_pb2.Opened:
        """Opens the sequence at one verifier after the other, until one takes it.

        Raises:
            RequestError: none does in so many seconds, or one has refused what all would.
        """
        is_again = self._opened is not None  # then a verifier is to run once more what another one had run
        latest = time.monotonic() + LONGEST if self._deadline is None else self._deadline - self._margin
        looked = 0.0  # seconds; a wait for the budget is no wait for a verifier
        while True:
            if is_again and not await self._means.budget.take(latest):
                raise self._trouble.given_up(self._means.replicas.names, ", and the budget of failovers is spent")
            started = time.monotonic()
            try:
                if self._current is None:
                    until = min(latest, started + min(patience, self._means.patience) - looked)
                    trouble = self._trouble
                    replica = await self._means.replicas.wait(until, trouble.avoid, failed=trouble.failed)
                    if replica is None:
                        raise self._trouble.given_up(self._means.replicas.names)
                    self._sit(replica)
                assert self._current is not None
                return await self._current.begin()
            except BaseException as error:
                if is_again:
                    self._means.budget.give_back()
                if self._current is None or not isinstance(error, RequestError):
                    raise
                looked += time.monotonic() - started
                self._lose(error)

    def _sit(self, replica: Replica) -> VerifySequence:
        """Takes a seat at a replica: nothing is said there yet."""
        opening = verifier_service_pb2.OpenSequence()
        opening.CopyFrom(self._opening)
        opening.isolated = self._trouble.is_suspect
        if self._opened is not None:
            opening.reopened = True
            if opening.committed_token_ids and "resume" not in opening.required_features:
                opening.required_features.append("resume")
        self._seat = ReplicaSeat(replica)
        timeout = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
        self._current = replica.open(opening, sequence_id=self._sequence_id, timeout=timeout, seat=self._seat)
        self._round.is_sent = False
        return self._current

    def _leave(self) -> tuple[VerifySequence | None, ReplicaSeat | None]:
        current, seat = self._current, self._seat
        self._current = self._seat = None
        if current is not None:
            current.cancel()
        return current, seat

    def _asks_for_other_weights(self) -> bool:
        target = self._means.replicas.target
        asked = self._opening.weights_fingerprint
        return bool(asked) and target is not None and asked != target.weights_fingerprint

    def _note_pause(self, seconds: float) -> None:
        self.pause += seconds
        self._tally.seconds += seconds
        self._means.observer.paused(seconds)

    def _note_switch(self, loss: Loss) -> None:
        assert self._seat is not None
        self._tally.count += 1
        self._tally.tokens += self.length
        self._means.observer.switched(loss)
        _log.info(
            "a sequence goes on at another verifier",
            request_id=self._opening.request_id,
            verifier=self._seat.replica.address,
            loss=loss.value,
            tokens=self.length,
            seconds=round(self.pause, 3),
        )
