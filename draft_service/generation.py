"""One sample's loop, from its opening to its end: draft, verdict, commit, emit, and again."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

import structlog

from draft_service.drafter_choice import KIND_TO_WIRE
from draft_service.drafters.base import Draft, Drafter, DrafterOff, DraftError, DraftLate, DraftSequence
from draft_service.drafters.healing import HealingDrafting
from draft_service.emission import Emitter
from draft_service.failover import ResumingSequence
from draft_service.lengths import SampleLengths
from draft_service.request import Generation
from draft_service.sample_watch import SampleWatch
from draft_service.speculation_choice import POLICY_TO_WIRE
from draft_service.statistics import STATISTICS, SpeculationCounts, Timings
from draft_service.verifier_link import VerifierLink
from outrider.service.sampling import RULE_TO_WIRE
from outrider.service.wire import encode_distribution
from protos.outrider.v1 import sampling_pb2, speculation_pb2, verifier_service_pb2

_log = structlog.get_logger()

# Where there is no proposal the target writes so many tokens alone, at least; then twice as many, up to the most.
FIRST_ALONE, MOST_ALONE = 32, 128

OnOpen = Callable[[verifier_service_pb2.Opened | None], None]


@dataclass(frozen=True, slots=True)
class Round:
    """What was sent to the verifier.

    Attributes:
        drafted: the drafted tokens; none where the target writes alone.
        verdicts: how many answer it.
    """

    drafted: Sequence[int]
    verdicts: int


class Sample:
    """One sample of a request.

    Attributes:
        counts: how speculation goes.
        timings: where the time goes.
        finish_reason: why it ended; unspecified until it has.
    """

    def __init__(
        self,
        request: Generation,
        index: int,
        emitter: Emitter,
        lengths: SampleLengths,
        watch: SampleWatch,
        *,
        arrived: float,
    ) -> None:
        """`lengths` says how much to draft, and `watch` is told how it goes; `arrived` is the request's arrival, as
        `time.perf_counter()` had it.
        """
        self.counts = SpeculationCounts(drafter=KIND_TO_WIRE[request.drafter], policy=POLICY_TO_WIRE[request.policy])
        self.timings = Timings(arrived, watch, failovers=self.counts.failovers)
        self.finish_reason: sampling_pb2.FinishReason = sampling_pb2.FINISH_REASON_UNSPECIFIED
        self._request = request
        self._index = index
        self._emitter = emitter
        self._lengths = lengths
        self._watch = watch
        self._draft_seconds: float | None = (
            None  # what drafting the round under way took; None: the target writes alone
        )
        self._written = len(request.committed)
        self._drafting: HealingDrafting | None = None
        self._sent = 0.0  # when the round under way left
        self._alone = FIRST_ALONE  # tokens that the target writes next, where it is to write alone for a while

    async def run(self, link: VerifierLink, drafter: Drafter, *, timeout: float | None, on_open: OnOpen) -> None:
        """Writes the sample. Both sides are free of it when this returns, or raises.

        Args:
            timeout: what is left of the client's deadline, in seconds.
            on_open: told before anything is emitted what the verifier said when it took the sequence; None where the
                time limit came first, or the committed tokens have ended the text.

        Raises:
            RequestError: the verifier refused, or is gone.
        """
        request = self._request
        if request.committed and (reason := self._has_ended()):
            on_open(None)
            self.finish_reason = self._emitter.finish(reason, self.counts, self.timings)
            return
        if request.time_limit is not None and self._time_limit_left(request.time_limit) <= 0:  # it was queued for long
            on_open(None)
            reason = sampling_pb2.FINISH_REASON_TIME_LIMIT
            self.finish_reason = self._emitter.finish(reason, self.counts, self.timings)
            return
        name = f"{request.request_id}/{self._index}"
        target = link.open(self.opening(), sequence_id=name, timeout=timeout, tally=self.counts.failovers)
        self._watch.begins()
        try:
            if request.gamma:
                self._drafting = HealingDrafting(drafter, self._draft_sequence())
            await self._write_in_time(target, on_open)
        except BaseException:
            target.cancel()
            raise
        finally:
            self._watch.ends()
            self._stop_drafting()
        self.finish_reason = self._emitter.finish(self.finish_reason, self.counts, self.timings)
        await target.close()

    def _has_ended(self) -> sampling_pb2.FinishReason:
        """Why the committed tokens have ended the text already; unspecified where they have not."""
        committed, held = self._request.committed, self._request.held
        may_stop = len(committed) >= self._request.min_new_tokens
        is_stop = may_stop and committed[-1] in self._request.sampling.logit_rules.stop_token_ids
        if held and self._emitter.resume(committed[-held:], is_silent=is_stop):
            return sampling_pb2.FINISH_REASON_STOP_STRING
        if is_stop:
            return sampling_pb2.FINISH_REASON_STOP_TOKEN
        return sampling_pb2.FINISH_REASON_LENGTH if not self._left else sampling_pb2.FINISH_REASON_UNSPECIFIED

    async def _write_in_time(self, target: ResumingSequence, on_open: OnOpen) -> None:
        seconds = self._request.time_limit
        limit = None if seconds is None else self._time_limit_left(seconds)
        try:
            async with asyncio.timeout(limit) as clock:
                await self._write(target, on_open)
        except TimeoutError:
            if not clock.expired():
                raise
            self.finish_reason = sampling_pb2.FINISH_REASON_TIME_LIMIT
            if not target.is_open:
                on_open(None)

    def _time_limit_left(self, seconds: float) -> float:
        return seconds - (time.perf_counter() - self.timings.arrived)

    async def _write(self, target: ResumingSequence, on_open: OnOpen) -> None:
        draft = self._begin_draft()  # the draft reads the prompt while the target does
        opened = await target.begin()
        self._emitter.cached_tokens = opened.cached_tokens
        on_open(opened)
        while not self.finish_reason:
            round_ = await self._send_round(target, draft)
            await self._tell()  # now, while the target works: before, it would have held up the draft
            owed = round_.verdicts
            while owed and not self.finish_reason:
                verdict = await self._next_verdict(target, round_)
                owed -= 1
                self._emitter.take(verdict, round_.drafted)
                draft = None if owed or self.finish_reason else self._begin_draft()
                if draft is None or self.timings.first_token is None:
                    await self._tell()

    async def _tell(self) -> None:
        """Sends what the client may know and does not, and waits where it is too far behind."""
        if self._emitter.send(self.timings):
            self.finish_reason = sampling_pb2.FINISH_REASON_STOP_STRING
        await self._emitter.room()

    # -------------------------------------------------------------------------------------------------------- a round

    def _begin_draft(self) -> Awaitable[Draft] | None:
        """Begins the next proposal; None where the target writes alone."""
        if self._drafting is None or self._drafting.rest:
            return None
        if not self._drafting.room():  # its context is full, and stays so
            self._stop_drafting()
            return None
        gamma = self._gamma()
        return self._drafting.propose(gamma) if gamma else None

    def _gamma(self) -> int:
        """The length of the next proposal, within what may be drafted and written.

        A verdict adds a token of the target's own, so one place less than are left.
        """
        assert self._drafting is not None
        return self._lengths.next(min(self._drafting.room(), self._left - 1))

    async def _send_round(self, target: ResumingSequence, draft: Awaitable[Draft] | None) -> Round:
        drafted = await self._drafted(draft) if draft is not None else None
        if drafted is not None:
            self._alone = FIRST_ALONE
            self._draft_seconds = drafted.seconds
            self._sent = time.perf_counter()
            self._lengths.sent(drafted)
            await target.propose(drafted.token_ids, [encode_distribution(law) for law in drafted.laws])
            self._count_draft(drafted)
            return Round(drafted.token_ids, 1)
        tokens = min(self._left, self._tokens_alone())
        self._draft_seconds = None
        self._sent = time.perf_counter()
        self._lengths.sent(None)
        await target.decode(tokens)
        return Round((), tokens)

    def _tokens_alone(self) -> int:
        """How many tokens the target writes before it is seen whether there is a proposal again."""
        if self._drafting is None:
            return self._left
        if self._drafting.rest:
            return self._drafting.rest
        alone, self._alone = self._alone, min(2 * self._alone, MOST_ALONE)
        return max(alone, self._lengths.pause)

    async def _drafted(self, draft: Awaitable[Draft]) -> Draft | None:
        """The proposal; None where there is none: the target writes alone, for a while where it was not only late."""
        try:
            drafted = await draft
        except DraftError as error:
            if not isinstance(error, DrafterOff):  # it was not asked, and whoever was has told
                self.counts.num_draft_failures += 1
                is_late = isinstance(error, DraftLate)
                _log.warning(
                    "the draft is late; the target writes alone"
                    if is_late
                    else "drafting failed; the target writes alone",
                    request_id=self._request.request_id,
                    sample=self._index,
                    reason=str(error),
                )
            return None
        return drafted

    async def _next_verdict(self, target: ResumingSequence, round_: Round) -> speculation_pb2.Verdict:
        verdict = await target.verdict()
        self._written += len(verdict.token_ids)
        self.finish_reason = verdict.finish_reason
        if self._drafting is not None:
            self._drafting.advance(verdict.token_ids)
        self._account(verdict, len(round_.drafted), pause=target.pause)
        return verdict

    def _account(self, verdict: speculation_pb2.Verdict, drafted: int, *, pause: float) -> None:
        """What a verdict teaches and shows; `pause` seconds of the wait for it were without a verifier.

        What is called here may fail, and cannot raise.
        """
        now = time.perf_counter()
        waited, self._sent = now - self._sent - pause, now  # where more verdicts come, the next one's wait begins here
        asked = self._lengths.asked
        self._lengths.observe(verdict)
        self._count(verdict, drafted, asked, waited)
        self._watch.judged(verdict, asked=asked, drafted=drafted, draft=self._draft_seconds, waited=waited)

    @STATISTICS.quiet
    def _count(self, verdict: speculation_pb2.Verdict, drafted: int, asked: int, waited: float) -> None:
        self.timings.add(waited, verdict)
        self.counts.add(drafted, verdict, asked=asked)

    @STATISTICS.quiet
    def _count_draft(self, draft: Draft) -> None:
        if self._drafting is not None:
            self.counts.num_draft_recoveries = self._drafting.recoveries
        self.timings.draft += draft.seconds
        if draft.foresight is not None:
            self.counts.add_foresight(draft.foresight)
            self.timings.saved += draft.foresight.saved_seconds

    @property
    def _left(self) -> int:
        return self._request.max_new_tokens - self._written

    # -------------------------------------------------------------------------------------------- opening and closing

    def opening(self) -> verifier_service_pb2.OpenSequence:
        """What the verifier is told of the sequence. Whatever the request left open is said here."""
        request = self._request
        opening = verifier_service_pb2.OpenSequence(
            prompt_token_ids=request.prompt,
            committed_token_ids=request.committed,
            sampling=request.params,  # with the rule and the seed below, which are ours to choose
            max_new_tokens=request.max_new_tokens,
            min_new_tokens=request.min_new_tokens,
            stop_token_ids=request.stop_token_ids,
            ignore_eos=request.ignore_eos,
            required_features=_needed(request),
            weights_fingerprint=request.weights_fingerprint,
            cache_salt=request.cache_salt,
            request_id=request.request_id,
            request_bytes=request.round_sizes.request,
            response_bytes=request.round_sizes.response,
        )
        opening.sampling.seed = request.seed_of(self._index)
        opening.sampling.rule = RULE_TO_WIRE[request.sampling.rule]  # the draft's choice, whatever is the verifier's
        if request.top_logprobs is not None:
            opening.logprobs.top_n = request.top_logprobs
        return opening

    def _draft_sequence(self) -> DraftSequence:
        return DraftSequence(
            prompt=self._request.prompt,
            committed=self._request.committed,
            law=self._request.sampling.law,
            logit_rules=self._request.sampling.logit_rules,
            seed=self._request.seed_of(self._index),
            rule=self._request.sampling.rule,
            seed_is_fresh=self._request.seed_is_fresh,
            draft_temperature=self._request.draft_temperature,
            looks_ahead=self._request.outcome_cache,
            max_entropy=self._request.max_entropy,
        )

    def _stop_drafting(self) -> None:
        if self._drafting is not None:
            self._drafting.close()
            self._drafting = None


def _needed(request: Generation) -> list[str]:
    """What the sequence depends on at the verifier: an older one would leave out what it does not know, in silence."""
    needs = {
        "decode": True,
        "logprobs": request.top_logprobs is not None,
        "penalties": not replace(request.sampling.logit_rules, min_new_tokens=0).is_identity,
        "resume": bool(request.committed),
        "fixed_rounds": bool(request.round_sizes.response),
    }
    return [name for name, needed in needs.items() if needed]
