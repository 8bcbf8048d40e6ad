"""A sequence at the draft service: its tokens, its current round, its counts and timings."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from draft_service.drafters.base import CacheUse, Draft
from draft_service.request import DRAFTER_TO_WIRE, POLICY_TO_WIRE, CheckedRequest
from outrider.seeds import derive_seed
from outrider.service.best_effort import Component
from outrider.service.metrics import TextMetrics
from outrider.service.model_info import MAX_NAME_CHARS
from outrider.service.sampling import RULE_TO_WIRE
from outrider.service.wire import PrefixHash, draft_probability, micros, round_micros
from protos.outrider.v1 import draft_service_pb2, sampling_pb2, speculation_pb2, verifier_service_pb2

STATISTICS = Component("speculation_statistics")

JOIN_MS = 1000  # for which tokens of the target alone may wait, if the client gets joined responses


class SpeculationCounts:
    """Counts of one sample.

    Attributes:
        message: the counts; `to_message` adds sums, means, and those by position.
    """

    def __init__(self, drafter: draft_service_pb2.Drafter, policy: draft_service_pb2.SpeculationPolicy) -> None:
        self.message = draft_service_pb2.SpeculationStatistics(drafter=drafter, policy=policy)
        self._drafted, self._accepted = list[int](), list[int]()  # by position
        self._beta_sum = 0.0
        self._beta_count = self._gamma_sum = 0

    def add(self, round_: "Round", verdict: speculation_pb2.Verdict) -> None:
        """Records a verdict on a round."""
        counts, drafted = self.message, len(round_.draft_tokens)
        counts.num_rounds += 1
        counts.num_short_drafts += drafted < round_.gamma
        self._gamma_sum += round_.gamma
        if not drafted:
            return
        counts.num_drafts += 1
        missing = [0] * (drafted - len(self._drafted))
        self._drafted += missing
        self._accepted += missing
        for position in range(drafted):
            self._drafted[position] += 1
            self._accepted[position] += position < verdict.accepted
        if verdict.beta:
            self._beta_sum += sum(verdict.beta)
            self._beta_count += len(verdict.beta)
        else:  # the rule gives no β: use 1 for accepted tokens and 0 for rejected ones
            self._beta_sum += verdict.accepted
            self._beta_count += verdict.judged

    def add_cache_use(self, use: CacheUse) -> None:
        self.message.num_outcome_cache_queries += 1
        self.message.num_outcome_cache_hits += use.hit
        self.message.num_predrafted_tokens += use.drafted
        self.message.num_wasted_tokens += max(0, use.drafted - use.used)

    def to_message(self) -> draft_service_pb2.SpeculationStatistics:
        counts = self.message
        counts.num_draft_tokens_per_pos[:] = self._drafted
        counts.num_accepted_tokens_per_pos[:] = self._accepted
        counts.num_draft_tokens, counts.num_accepted_tokens = sum(self._drafted), sum(self._accepted)
        if self._beta_count:
            counts.alpha = self._beta_sum / self._beta_count
        if counts.num_rounds:
            counts.mean_gamma = self._gamma_sum / counts.num_rounds
        if counts.num_drafts:
            counts.draft_acceptance_rate = counts.num_accepted_tokens / counts.num_draft_tokens
            counts.mean_acceptance_length = 1 + counts.num_accepted_tokens / counts.num_drafts
        return counts


@dataclass(slots=True)
class Timings:
    """Times of one sample, in seconds.

    Attributes:
        arrived: the arrival of the request, by `time.perf_counter()`.
        joined: how long the first token of the last verdict had waited for others.
        failover: spent without a verifier, until the next one had opened the sequence.
    """

    arrived: float
    texts: TextMetrics | None = None
    joined: float = 0.0
    first_token: float | None = None
    draft: float = 0.0
    verdict: float = 0.0
    saved: float = 0.0
    queue_us: int = 0
    forward_us: int = 0
    verify_us: int = 0
    failover: float = 0.0
    first_round: draft_service_pb2.RoundTimings | None = None
    _last_token: float = 0.0

    def add(self, waited: float, verdict: speculation_pb2.Verdict) -> None:
        """Records a verdict, `waited` seconds after its proposal was sent."""
        self.verdict += waited
        self.queue_us += verdict.timings.queue_us
        self.forward_us += verdict.timings.forward_us
        self.verify_us += verdict.timings.verify_us
        if self.first_round is None:
            self.first_round = draft_service_pb2.RoundTimings(**self._phases(round_micros))

    @STATISTICS.quiet
    def tokens_out(self, count: int) -> None:
        """Records that `count` tokens were sent to the client together."""
        now, before = time.perf_counter(), self._last_token
        self._last_token = now  # first: metrics may fail
        if self.first_token is None:
            self.first_token = now - self.joined - self.arrived
            if self.texts is not None:
                self.texts.first_token.observe(self.first_token)
                self.texts.next_tokens(self.joined, count - 1 if self.joined else 0)
        elif self.texts is not None:
            self.texts.next_tokens(now - before, count)

    def to_message(self) -> draft_service_pb2.GenerateTimings:
        return draft_service_pb2.GenerateTimings(
            time_to_first_token_us=micros(self.first_token or 0.0),
            total_us=micros(time.perf_counter() - self.arrived),
            saved_us=micros(self.saved),
            failover_us=micros(self.failover),
            first_round=self.first_round,
            **self._phases(micros),
        )

    def _phases(self, whole: Callable[[float], int]) -> dict[str, int]:
        """The times of all rounds so far, by their names in messages."""
        return {
            "draft_us": whole(self.draft),
            "verdict_us": whole(self.verdict),
            "queue_us": self.queue_us,
            "forward_us": self.forward_us,
            "verify_us": self.verify_us,
        }


@dataclass(slots=True)
class Round:
    """A proposal or a `Decode`.

    Attributes:
        number: of the round in its sequence, from 1.
        owed: what is still to come: the verdict of a proposal, or the tokens of a `Decode`.
        draft: the proposal; None for a `Decode`.
        gamma: the chosen γ; the proposal may have fewer tokens.
        draft_start: `time.perf_counter()` when drafting began.
        sent: the same when it was sent.
        judged_at: the same when its last verdict came.
        waited: seconds of the wait for that verdict, without failovers.
    """

    number: int
    owed: int = 0
    draft: Draft | None = None
    gamma: int = 0
    draft_start: float = 0.0
    sent: float = 0.0
    judged_at: float = 0.0
    waited: float = 0.0

    @property
    def draft_tokens(self) -> list[int]:
        return [] if self.draft is None else self.draft.token_ids


class Sequence:
    """One sample of a request.

    Attributes:
        tokens: prompt and committed output.
        round: the current or last one; number 0 before the first.
        finish_reason: unspecified until the sequence ends.
        scored: position of the next token of the prompt whose log-probabilities are to be sent to the client.
        is_scored: set once no more of them will come.
        on_prompt_logprobs: sends them, and waits for the client.
    """

    def __init__(
        self, request: CheckedRequest, index: int = 0, *, arrived: float = 0.0, texts: TextMetrics | None = None
    ) -> None:
        """`arrived` is the arrival of the request, by `time.perf_counter()`. `texts` count tokens that are sent."""
        self.request = request
        self.index = index
        self.id = f"{request.request_id[: MAX_NAME_CHARS - 8]}/{index}"  # no longer than a verifier takes
        self.tokens = [*request.prompt, *request.committed]
        self.prompt_length = len(request.prompt)
        self.round = Round(0)
        self.finish_reason: sampling_pb2.FinishReason = sampling_pb2.FINISH_REASON_UNSPECIFIED
        drafter, policy = request.speculation.drafter, request.speculation.policy
        self.counts = SpeculationCounts(DRAFTER_TO_WIRE[drafter], POLICY_TO_WIRE[policy])
        self.timings = Timings(arrived, texts)
        self.scored = 1
        self.is_scored = asyncio.Event()
        if not self.needs_prompt_logprobs:
            self.is_scored.set()
        self.on_prompt_logprobs: Callable[[sampling_pb2.PromptLogprobs], Awaitable[None]] | None = None
        self._hash = PrefixHash(self.tokens)

    @property
    def seed(self) -> int:
        return derive_seed(self.request.draft_sequence.seed, self.index)

    @property
    def left(self) -> int:
        """Tokens that may still be written."""
        return self.request.max_new_tokens - (len(self.tokens) - self.prompt_length)

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of the prompt are still to come. Only the first sample reports them."""
        wanted = self.request.top_prompt_logprobs is not None and self.index == 0
        return wanted and self.scored < self.prompt_length

    @property
    def prefix_hash(self) -> bytes:
        return self._hash.digest()

    def propose(self, draft: Draft, *, gamma: int = 0, start: float = 0.0) -> None:
        """Begins a round with a proposal, whose drafting began at `start`."""
        self.round = Round(self.round.number + 1, 1, draft, gamma, start, sent=time.perf_counter())

    def decode(self, tokens: int) -> None:
        """Begins a round in which the target writes so many tokens without a draft."""
        self.round = Round(self.round.number + 1, tokens, sent=time.perf_counter())

    async def take_prompt_logprobs(self, part: sampling_pb2.PromptLogprobs) -> None:
        """Sends the positions of a part that were not sent before: a new verifier begins again.

        Raises:
            ValueError: positions are missing before it, or it goes beyond the prompt.
        """
        first, end = part.first_position, part.first_position + len(part.logprobs)
        if not 1 <= first <= self.scored or end > self.prompt_length:
            raise ValueError(
                f"log-probabilities of the prompt's positions {first} to {end - 1} came; the next one is {self.scored} "
                f"of {self.prompt_length - 1}"
            )
        del part.logprobs[: self.scored - first]
        if part.logprobs:
            part.first_position, self.scored = self.scored, end
            if not self.needs_prompt_logprobs:
                self.is_scored.set()
            if self.on_prompt_logprobs is not None:
                await self.on_prompt_logprobs(part)

    def commit(self, verdict: speculation_pb2.Verdict) -> None:
        """Appends the tokens of the round's next verdict."""
        self.tokens += verdict.token_ids
        self._hash.extend(verdict.token_ids)
        self.timings.joined = verdict.timings.joined_us / 1e6
        self.round.owed -= len(verdict.token_ids) if self.round.draft is None else 1
        self.finish_reason = verdict.finish_reason

    def report(self, verdict: speculation_pb2.Verdict) -> draft_service_pb2.RoundReport:
        """The report of the round after its last verdict, without the texts of drafted tokens."""
        round_, arrived = self.round, self.timings.arrived
        sent = round_.judged_at - round_.waited
        start, seconds = (sent, 0.0) if round_.draft is None else (round_.draft_start, round_.draft.seconds)
        return draft_service_pb2.RoundReport(
            round=verdict.round,
            output_length=verdict.base_length - self.prompt_length,
            drafted_token_ids=round_.draft_tokens,
            accepted=verdict.accepted,
            beta=verdict.beta,
            draft_start_us=micros(start - arrived),
            sent_us=micros(sent - arrived),
            timings=draft_service_pb2.RoundTimings(
                draft_us=round_micros(seconds),
                verdict_us=round_micros(round_.waited),
                queue_us=verdict.timings.queue_us,
                forward_us=verdict.timings.forward_us,
                verify_us=verdict.timings.verify_us,
            ),
            target_probabilities=verdict.target_probabilities,
            draft_probabilities=self._draft_probabilities(),
        )

    def _draft_probabilities(self) -> list[float]:
        """The probability q of each drafted token of the round, if it is reported; empty under `coupled`."""
        draft = self.round.draft
        if not self.request.message.speculation.report_probabilities or draft is None or not draft.distributions:
            return []
        return [draft_probability(q, x) for x, q in zip(draft.token_ids, draft.distributions, strict=True)]

    def opening(self, *, reopened: bool = False, isolated: bool = False) -> verifier_service_pb2.OpenSequence:
        """The message that opens the sequence at a verifier, with the seed and the rule that the draft service chose.

        Args:
            reopened: another verifier has run the sequence before.
            isolated: a step with the sequence failed, so it must run in steps of its own.
        """
        request, message, rules = self.request, self.request.message, self.request.sampling.logit_rules
        committed = self.tokens[self.prompt_length :]
        needs = {
            "decode": True,
            "logprobs": request.top_logprobs is not None,
            "prompt_logprobs": self.needs_prompt_logprobs,
            "report_probabilities": message.speculation.report_probabilities,
            "penalties": not replace(rules, min_new_tokens=0, generation=None).is_identity,
            "resume": bool(committed),
            "fixed_rounds": bool(request.round_sizes.response),
            "encoder": request.encoder_input is not None,
        }
        # A stop string, or the time limit, may end the text before tokens that wait.
        is_patient = request.joined_responses and not request.stop and request.time_limit is None
        opening = verifier_service_pb2.OpenSequence(
            prompt_token_ids=self.tokens[: self.prompt_length],
            committed_token_ids=committed,
            sampling=message.sampling,  # seed and rule are set below
            max_new_tokens=request.max_new_tokens,
            min_new_tokens=message.min_new_tokens,
            stop_token_ids=message.stop_token_ids,
            ignore_eos=message.ignore_eos,
            # An older verifier would silently ignore fields that it does not know.
            required_features=[name for name, is_needed in needs.items() if is_needed],
            weights_fingerprint=message.weights_fingerprint,
            cache_salt=message.cache_salt,
            request_id=request.request_id,
            request_bytes=request.round_sizes.request,
            response_bytes=request.round_sizes.response,
            reopened=reopened,
            isolated=isolated,
            encoder_input=request.encoder_input,
            joined_verdicts=not request.round_sizes.response,  # one verdict of several tokens would show in its size
            join_ms=JOIN_MS if is_patient else None,
            report_probabilities=message.speculation.report_probabilities,
        )
        opening.sampling.seed = self.seed
        opening.sampling.rule = RULE_TO_WIRE[request.sampling.rule]  # not the verifier's default
        if request.top_logprobs is not None:
            opening.logprobs.top_n = request.top_logprobs
        if self.needs_prompt_logprobs and request.top_prompt_logprobs is not None:
            opening.prompt_logprobs.top_n = request.top_prompt_logprobs
        return opening
