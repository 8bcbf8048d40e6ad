"""The loop of one sample: draft, send, verdict, commit, emit."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace

import structlog

from draft_service.drafters.base import Draft, Drafter, DraftError, Drafting
from draft_service.failover import FailoverStream, Verifiers
from draft_service.metrics import SampleWatch
from draft_service.output import Emitter
from draft_service.request import CheckedRequest
from draft_service.sequence import STATISTICS, Round, Sequence
from draft_service.speculation import SequenceGamma
from protos.outrider.v1 import draft_service_pb2, sampling_pb2, speculation_pb2, verifier_service_pb2

_log = structlog.get_logger()

# Tokens of one `Decode` while the drafter is in backoff.
DECODED_IN_BACKOFF = 32

OnOpen = Callable[[verifier_service_pb2.Opened | None], None]


class Sample:
    """One sample of a request."""

    def __init__(
        self,
        request: CheckedRequest,
        index: int,
        emitter: Emitter,
        gamma: SequenceGamma,
        watch: SampleWatch,
        *,
        arrived: float,
    ) -> None:
        """`arrived` is the arrival of the request, by `time.perf_counter()`."""
        self.sequence = Sequence(request, index, arrived=arrived, texts=watch.texts)
        self._request = request
        self.emitter = emitter
        self._gamma = gamma
        self._watch = watch
        self.sequence.on_prompt_logprobs = self._send_prompt_logprobs
        self._drafting: Drafting | None = None
        self._draft_start = 0.0  # of the last draft, by `time.perf_counter()`
        self._uncounted: tuple[Round, speculation_pb2.Verdict] | None = None

    async def run(self, verifiers: Verifiers, drafter: Drafter, *, timeout: float, on_open: OnOpen) -> None:
        """Runs the sample to its end. Both services have freed the sequence when this returns or raises.

        Args:
            timeout: seconds left of the client's deadline.
            on_open: called before anything is emitted, with the verifier's `Opened`; with None if the time limit passed
                first, or if the committed tokens end the text.

        Raises:
            RequestError: the verifier refused the sequence or failed, and no other verifier took it.
        """
        request, sequence = self._request, self.sequence
        if request.committed:
            sequence.finish_reason = self._has_ended()
        if not sequence.finish_reason and request.time_limit is not None and self._time_limit_left() <= 0:
            sequence.finish_reason = sampling_pb2.FINISH_REASON_TIME_LIMIT  # it passed in the queue
        if sequence.finish_reason:
            on_open(None)
            self._finish()
            return
        target = FailoverStream(verifiers, sequence, timeout=timeout)
        self._watch.begins()
        try:
            if request.speculation.gamma and sequence.left > 1:  # a verdict adds a token of the target's own
                self._drafting = drafter.open(replace(request.draft_sequence, seed=sequence.seed))
            await self._run_in_time(target, on_open)
            self._finish()
        except BaseException as error:
            target.cancel()
            # A cancelled call sends nothing more. Text before `started` would come again with the next attempt.
            if isinstance(error, Exception) and target.was_opened:
                with suppress(Exception):  # the client gets the first error
                    self.emitter.flush(sequence.timings)
            raise
        finally:
            self._count_verdict()
            self._watch.ends()
            self._stop_drafting()
        await target.close()

    def _finish(self) -> None:
        self._count_verdict()
        sequence = self.sequence
        sequence.finish_reason = self.emitter.finish(sequence.finish_reason, sequence.counts, sequence.timings)

    def _has_ended(self) -> sampling_pb2.FinishReason:
        """The finish reason, if the committed tokens end the text already; otherwise unspecified."""
        committed, held = self._request.committed, self._request.message.held_tokens
        may_stop = len(committed) >= self._request.message.min_new_tokens
        is_stop = may_stop and committed[-1] in self._request.sampling.logit_rules.stop_token_ids
        if held and self.emitter.resume(committed[-held:], is_silent=is_stop):
            return sampling_pb2.FINISH_REASON_STOP_STRING
        if is_stop:
            return sampling_pb2.FINISH_REASON_STOP_TOKEN
        return sampling_pb2.FINISH_REASON_LENGTH if not self.sequence.left else sampling_pb2.FINISH_REASON_UNSPECIFIED

    async def _run_in_time(self, target: FailoverStream, on_open: OnOpen) -> None:
        limit = None if self._request.time_limit is None else self._time_limit_left()
        try:
            async with asyncio.timeout(limit) as clock:
                await self._run_rounds(target, on_open)
        except TimeoutError:
            if not clock.expired():
                raise
            if not self.sequence.finish_reason:  # else the text is whole, and the client reads slowly
                self.sequence.finish_reason = sampling_pb2.FINISH_REASON_TIME_LIMIT
            if not target.was_opened:
                on_open(None)

    def _time_limit_left(self) -> float:
        assert self._request.time_limit is not None
        return self._request.time_limit - (time.perf_counter() - self.sequence.timings.arrived)

    async def _run_rounds(self, target: FailoverStream, on_open: OnOpen) -> None:
        pending = self._begin_draft()  # the draft reads the prompt while the target does
        if pending is None:
            self._begin_round(None)  # the opening carries it
        opened = await target.open()
        self.emitter.cached_tokens = opened.cached_tokens
        on_open(opened)
        while not self.sequence.finish_reason:
            draft = None if pending is None else await self._finish_draft(pending)
            if not self.sequence.round.owed:
                self._begin_round(draft)
            await target.send()
            self._count_verdict()
            if draft is not None:
                self._count_draft(draft)
            await self._emit()  # while the target runs: earlier, it would delay the draft
            if draft is not None:  # after a `Decode`, its verdicts decide whether to draft
                self._gamma.prepare()
            while self.sequence.round.owed and not self.sequence.finish_reason:
                verdict = await self._next_verdict(target)
                self.emitter.take(verdict, self.sequence.round.draft_tokens, self._report(verdict))
                pending = None if self.sequence.round.owed or self.sequence.finish_reason else self._begin_draft()
                if pending is None or self.sequence.timings.first_token is None:
                    await self._emit()

    async def _send_prompt_logprobs(self, part: sampling_pb2.PromptLogprobs) -> None:
        self.emitter.send_prompt_logprobs(part)
        if await self.emitter.wait_for_client():
            self._gamma.disturbed()

    async def _emit(self) -> None:
        """Sends committed tokens and text, and waits if the client has too many responses unread."""
        if self.emitter.send(self.sequence.timings):
            self.sequence.finish_reason = sampling_pb2.FINISH_REASON_STOP_STRING
        if await self.emitter.wait_for_client():
            self._gamma.disturbed()

    # -------------------------------------------------------------------------------------------------------- a round

    def _begin_draft(self) -> Awaitable[Draft] | None:
        """Begins the next proposal; None for a `Decode`."""
        if self._drafting is None or not self._drafting.is_ready():
            return None
        if not self._drafting.capacity():  # its context is full for good
            self._stop_drafting()
            return None
        # A verdict adds a token of the target, so one less than are left.
        gamma = self._gamma.next(min(self._drafting.capacity(), self.sequence.left - 1))
        self._draft_start = time.perf_counter()
        return self._drafting.propose(gamma) if gamma else None

    def _begin_round(self, draft: Draft | None) -> None:
        """Begins a round with a proposal, or with a `Decode` (None)."""
        sequence = self.sequence
        if draft is None:
            most = sequence.left if self._drafting is None else self._gamma.pause or DECODED_IN_BACKOFF
            sequence.decode(min(sequence.left, most))
        else:
            sequence.propose(draft, gamma=self._gamma.gamma, start=self._draft_start)

    async def _finish_draft(self, pending: Awaitable[Draft]) -> Draft | None:
        """The proposal; None if drafting failed before its first token."""
        try:
            draft = await pending
            failed = draft.error
        except DraftError as error:
            draft, failed = None, error
        if failed is not None:
            self.sequence.counts.message.num_draft_failures += 1
            _log.warning(
                "drafting failed",
                request_id=self._request.request_id,
                sample=self.sequence.index,
                reason=str(failed),
                drafted=0 if draft is None else len(draft.token_ids),
                effect="the target writes on without a draft",
            )
        return draft

    async def _next_verdict(self, target: FailoverStream) -> speculation_pb2.Verdict:
        verdict = await target.verdict()
        self.sequence.commit(verdict)
        if self._drafting is not None:
            self._drafting.advance(verdict.token_ids)
        # From here on nothing raises.
        if target.pause:
            self._gamma.disturbed()
        round_, now = self.sequence.round, time.perf_counter()
        self._count_verdict()  # of the same round, if it is a Decode
        round_.waited = now - max(round_.sent, round_.judged_at) - target.pause
        round_.judged_at = now
        self._gamma.judged(round_, verdict)
        self._uncounted = round_, verdict
        return verdict

    def _count_verdict(self) -> None:
        """Updates γ, counts and metrics with the last verdict. The next proposal does not wait for them."""
        if self._uncounted is None:
            return
        self._gamma.learn()
        (round_, verdict), self._uncounted = self._uncounted, None
        self._count(round_, verdict)
        self._watch.judged(round_, verdict)

    def _report(self, verdict: speculation_pb2.Verdict) -> draft_service_pb2.RoundReport | None:
        if not self._request.report_rounds:
            return None
        return STATISTICS.run(lambda: self.sequence.report(verdict), None)

    @STATISTICS.quiet
    def _count(self, round_: Round, verdict: speculation_pb2.Verdict) -> None:
        self.sequence.timings.add(round_.waited, verdict)
        self.sequence.counts.add(round_, verdict)

    @STATISTICS.quiet
    def _count_draft(self, draft: Draft) -> None:
        counts, timings = self.sequence.counts, self.sequence.timings
        if self._drafting is not None:
            counts.message.num_draft_recoveries = self._drafting.recoveries
        timings.draft += draft.seconds
        if (use := draft.cache_use) is not None:
            counts.add_cache_use(use)
            timings.saved += use.saved_seconds

    # -------------------------------------------------------------------------------------------- opening and closing

    def _stop_drafting(self) -> None:
        if self._drafting is not None:
            self._drafting.close()
            self._drafting = None
