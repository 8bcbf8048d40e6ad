"""A sequence at the verifier: its tokens, KV slot, outstanding rounds and replies."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kernels.adjustments import Adjuster
from kernels.verify import Proposed, TokenLogprobs, VerifyResult
from outrider.rpc.errors import RequestError, counted, internal, out_of_order, wrong_base
from outrider.service.wire import PROMPT_POSITIONS, PrefixHash, encode_logprobs, round_micros
from protos.outrider.v1 import sampling_pb2, speculation_pb2, verifier_service_pb2
from verifier_service.request import Opening, Round

# Weight of the last turnaround in a running mean.
RECENT = 0.125
# A sequence is late after its mean turnaround plus so many mean deviations. No step waits for a late sequence.
LATE = 2.0
# Longer turnarounds, in seconds, are ignored.
LONGEST = 3600.0


@dataclass(slots=True)
class Turnaround:
    """From a verdict to the next round of the same sequence, in seconds: the running mean, and the mean deviation."""

    mean: float = 0.0
    deviation: float = 0.0
    count: int = 0

    def add(self, seconds: float) -> None:
        """Adds one; ignores invalid times."""
        if not 0 <= seconds < LONGEST:
            return
        if self.count == 0:
            self.mean, self.deviation = seconds, seconds / 2
        else:
            self.deviation += RECENT * (abs(seconds - self.mean) - self.deviation)
            self.mean += RECENT * (seconds - self.mean)
        self.count += 1

    def longest_expected(self) -> float | None:
        """The longest expected turnaround; None before the first."""
        return self.mean + LATE * self.deviation if self.count else None


def seconds_to_linger(now: float, since: float, due: Iterable[float], bound: float) -> float:
    """How much longer to delay a step. All times are in seconds.

    Args:
        since: when the step could have started.
        due: when each sequence that owes a round is expected to send it.
        bound: the longest delay after `since`.

    Returns:
        Time until the last sequence that is due within the bound; 0 if there is none.
    """
    return min(max((at - now for at in due if now < at <= since + bound), default=0.0), bound)


# Seconds after which a sequence with an overdue round counts as silent.
SILENT = 1.0
MAX_BACKLOG = 64  # unread replies at which a sequence pauses


Encode = Callable[[], verifier_service_pb2.VerifyResponse]
"""A reply that its stream builds: protobuf takes microseconds, in which the engine's thread goes on."""

Reply = verifier_service_pb2.VerifyResponse | Encode | RequestError | None  # None: the stream ends well


def encoded(reply: Reply) -> verifier_service_pb2.VerifyResponse | RequestError | None:
    """The reply, built."""
    return reply() if callable(reply) else reply


@dataclass(slots=True)
class Unsent:
    """A verdict before it is delivered: on a proposal, or of the last tokens of a `Decode`.

    Attributes:
        timings: of each step that wrote some of the tokens.
        load: after the last one.
        due: when it must be delivered, by `time.perf_counter()`.
        committed: the same when its first token was committed.
        waited: seconds from then until it was delivered, if it was joined with later ones.
    """

    round: int
    base_length: int
    judged: int
    tokens: list[int]
    result: VerifyResult
    reason: sampling_pb2.FinishReason
    timings: list[Callable[[], speculation_pb2.VerdictTimings]]
    load: speculation_pb2.VerifierLoad
    due: float
    committed: float
    waited: float = 0.0

    def join(self, later: "Unsent") -> None:
        """Adds the tokens of a later step of the same `Decode`."""
        self.tokens += later.tokens
        self.timings += later.timings
        self.result, self.reason, self.load = later.result, later.reason, later.load


@dataclass(slots=True, eq=False)
class TargetSequence:
    """A sequence and its state. The engine's thread changes it. The stream reads it, and counts `num_written`.

    Invariant 5: between steps the KV cache holds the committed tokens without the last one, or fewer during prefill.

    Attributes:
        deliver: hands a reply to the stream; called on the engine's thread.
        slot: in the KV pool; None in the queue.
        arrival: number in order of arrival. Newer sequences are preempted first.
        num_replies: delivered, without notices.
        num_written: of them, those that were written to the client.
        scored: position of the next prompt token whose log-probabilities are to be sent, if they are wanted.
        opened: for an isolated sequence, the `Opened` to send when its turn begins; None after that.
        unsent: tokens of the current `Decode` that `send` delivers later, in one verdict.
    """

    sequence_id: str
    opening: Opening
    vocab_size: int
    deliver: Callable[[Reply], None]
    slot: int | None = None
    arrival: int = 0
    num_replies: int = 0
    num_written: int = 0
    scored: int = 1
    opened: verifier_service_pb2.VerifyResponse | None = None
    unsent: Unsent | None = None
    rounds: deque[Round] = field(default_factory=deque)
    received: int = 0  # rounds that the engine took from the stream
    tokens: list[int] = field(init=False)
    decoded: int = 0  # tokens written by the current `Decode`
    judged_at: float = 0.0  # time.perf_counter() at its last verdict
    prefilled_at: float = 0.0  # time.perf_counter() when its prompt had run without a round
    replied_at: float = 0.0  # time.perf_counter() at its last reply other than a verdict on tokens
    turnaround: Turnaround = field(default_factory=Turnaround)
    last_round: int = 0
    finished: bool = False
    half_closed: bool = False  # no more rounds will come
    failed: bool = False  # it ended with an error: its KV cache may hold NaN
    prefix_kept: bool = False  # whether its prefix is in the prefix cache
    is_isolated: bool = field(init=False)  # it runs in steps of its own until its first verdict
    _hash: PrefixHash = field(init=False)
    adjuster: Adjuster | None = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = self.opening.prompt + self.opening.committed
        self.is_isolated = self.opening.isolated
        self._hash = PrefixHash(self.tokens)
        opening = self.opening
        self.adjuster = Adjuster.after(opening.prompt, opening.committed, opening.logit_rules, self.vocab_size)

    @property
    def written(self) -> int:
        """Output tokens, with those committed before it was opened."""
        return len(self.tokens) - len(self.opening.prompt)

    @property
    def owes_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of its prompt are still to be sent. Until then nothing but the prompt runs."""
        return self.opening.top_prompt_logprobs >= 0 and self.scored < len(self.opening.prompt)

    @property
    def prefills(self) -> bool:
        """Whether its prompt runs without a round: at the beginning, and not again after a preemption."""
        return not (self.judged_at or self.prefilled_at)

    @property
    def is_paused(self) -> bool:
        """Whether its client is too far behind in reading replies."""
        return self.backlog >= MAX_BACKLOG

    @property
    def backlog(self) -> int:
        """Replies that are not written yet."""
        return self.num_replies - self.num_written

    @property
    def awaits_turn(self) -> bool:
        """Whether it is isolated and not opened yet: it cannot send rounds."""
        return self.opened is not None

    # ------------------------------------------------------------------------------------------------------- rounds

    def submit(self, round_: Round) -> None:
        """Queues a round behind those outstanding.

        Raises:
            RequestError: INVALID_ARGUMENT: its number is not above the last one.
        """
        newest = self.rounds[-1].number if self.rounds else self.last_round
        if round_.number <= newest:
            raise out_of_order(f"the round's number is {round_.number}; it must be above {newest}, the last one")
        if self.judged_at and not self.rounds:
            self.turnaround.add(max(0.0, round_.arrived - self.judged_at))  # below 0 if it was sent before the verdict
        self.rounds.append(round_)

    def due(self) -> float | None:
        """When its next round is expected; None if it owes none, or before its first turnaround."""
        latest = self.turnaround.longest_expected()
        if latest is None or self.rounds or self.finished:
            return None
        return self.judged_at + latest

    def idle_seconds(self, now: float) -> float:
        """Seconds for which it has waited for its client, to send a round or to read replies; 0 if it does not wait."""
        waits = self.is_paused or self.finished or not (self.prefills or self.rounds)
        return now - max(self.judged_at, self.prefilled_at, self.replied_at) if waits else 0.0

    def is_active(self, now: float) -> bool:
        """Whether it has rounds to judge, or had one recently. Silent and paused sequences are not active."""
        latest = self.turnaround.longest_expected() or 0.0
        recent = self.judged_at > 0 and now - self.judged_at <= latest + SILENT
        return not (self.finished or self.is_paused) and (bool(self.rounds) or recent)

    def half_close(self) -> None:
        """The client sends no more rounds: ends in order after all that it waits for is sent."""
        self.half_closed = True
        self._end_if_done()

    def next_round(self) -> Round | None:
        """The next round to judge; None if none is outstanding. Answers overtaken rounds with STALE.

        Raises:
            RequestError: INVALID_ARGUMENT: the base is wrong, although the client had seen every verdict.
        """
        while self.rounds and not self.finished:
            current = self.rounds[0]
            is_base = current.base_length == len(self.tokens) and current.prefix_hash == self._hash.digest()
            if self.decoded or is_base:
                return current
            if current.seen_round >= self.last_round:
                raise self._wrong_base(current)
            self.rounds.popleft()
            self.last_round = current.number
            self._reply(
                verdict=speculation_pb2.Verdict(
                    round=current.number, base_length=current.base_length, status=speculation_pb2.VERDICT_STATUS_STALE
                )
            )
            self._end_if_done()
        return None

    def drafted(self, round_: Round) -> tuple[int, ...]:
        """The drafted tokens to judge: as many as may still be written. No token decides this (invariant 4)."""
        return round_.tokens[: self.opening.max_new_tokens - self.written]

    def proposed(self, round_: Round) -> Proposed:
        """The round as input of `kernels.verify`."""
        tokens = self.drafted(round_)
        return Proposed(
            tokens=tokens,
            q=round_.distributions[: len(tokens)],
            params=self.opening.sampling.params,
            seed=self.opening.seed,
            base_length=len(self.tokens),
            rule=self.opening.sampling.rule,
            lenience=self.opening.sampling.lenience,
            sigmoid=self.opening.sampling.sigmoid,
            adjustments=() if self.adjuster is None else tuple(self.adjuster.rows(tokens)),
            top_logprobs=self.opening.top_logprobs,
            reports_probabilities=self.opening.reports_probabilities,
        )

    def decode_count(self, round_: Round, most: int) -> int:
        """How many tokens of a `Decode` one step may write, `most` at most; 1 for a proposal."""
        if not self._joins_verdicts:
            return 1
        return max(1, min(most, round_.decode - self.decoded, self.opening.max_new_tokens - self.written))

    @property
    def may_be_decoded(self) -> bool:
        """Whether the decode loop may draw its tokens: it counts and reports only tokens."""
        reports = self.opening.top_logprobs >= 0 or self.opening.reports_probabilities
        return not reports and (self.adjuster is None or self.adjuster.is_counted(1))

    @property
    def _joins_verdicts(self) -> bool:
        """Whether one verdict may answer several tokens of a `Decode`."""
        return self.opening.joined_verdicts and self.opening.top_logprobs < 0

    def owed_since(self, round_: Round) -> float:
        """When the wait for the round's next verdict began: at its arrival, or within a Decode at the last verdict."""
        return self.judged_at if self.decoded else round_.arrived

    def _wrong_base(self, round_: Round) -> RequestError:
        if round_.base_length != len(self.tokens):
            text = (
                f"base_length of round {round_.number} is {round_.base_length}; it must be the number of tokens of "
                f"prompt and committed output, {len(self.tokens)}"
            )
        else:
            text = (
                f"prefix_hash of round {round_.number} is {round_.prefix_hash.hex()}; for the "
                f"{counted(len(self.tokens), 'token')} of the sequence it must be {self._hash.digest().hex()}"
            )
        return wrong_base(text, base_length=round_.base_length, sequence_length=len(self.tokens))

    # ------------------------------------------------------------------------------------------------------- replies

    def add_prompt_logprobs(self, logprobs: Sequence[TokenLogprobs] | None) -> None:
        """Delivers log-probabilities of the prompt's next tokens; None stands for bad logits.

        Raises:
            RequestError: INTERNAL: the logits are NaN or infinite.
        """
        if logprobs is None:
            raise internal(
                "BAD_LOGITS",
                f"the target's logits for the prompt, after {self.scored} tokens or later, are NaN or infinite; try "
                "another --dtype",
            )
        for first in range(0, len(logprobs), PROMPT_POSITIONS):
            part = encode_logprobs(logprobs[first : first + PROMPT_POSITIONS])
            self._reply(prompt_logprobs=sampling_pb2.PromptLogprobs(first_position=self.scored, logprobs=part))
            self.scored += len(part)
        self._end_if_done()

    def commit(
        self,
        round_: Round,
        result: VerifyResult,
        earlier: Sequence[int],
        timings: Callable[[], speculation_pb2.VerdictTimings],
        load: speculation_pb2.VerifierLoad,
    ) -> int:
        """Commits the tokens of a result, cut at the end of the sequence, and delivers the verdict.

        Within a `Decode`, `send` delivers it later, joined with the next ones. The sequence's first token waits only if
        the opening says so.
        `earlier` are tokens of a `Decode` before the result's.

        Returns:
            How many of the drafted tokens were accepted and committed.
        """
        base, drafted = len(self.tokens), self.drafted(round_)
        tokens, reason = self._cut([*drafted[: result.accepted], *earlier, result.next_token])
        self.tokens += tokens
        self._hash.extend(tokens)
        if self.adjuster is not None:
            for token in tokens:
                self.adjuster.push(token)
        # The time of a long prompt counts: the client takes a verifier that sends nothing for too long for lost.
        since = self.judged_at or (round_.arrived if self.opening.joins_first else -math.inf)
        due, self.judged_at = since + self.opening.seconds_joined, time.perf_counter()
        self.is_isolated = False
        self.decoded += len(tokens)
        if self.decoded >= round_.decode:
            self.rounds.popleft()
            self.last_round = round_.number
            self.decoded = 0
        self.finished = reason != sampling_pb2.FINISH_REASON_UNSPECIFIED
        judged = min(result.accepted + 1, len(drafted))
        verdict = Unsent(round_.number, base, judged, tokens, result, reason, [timings], load, due, self.judged_at)
        if self.unsent is None:
            self.unsent = verdict
        else:
            self.unsent.join(verdict)
        if not self._joins_verdicts or due < self.judged_at or not self.decoded or self.finished:
            self.send()
        if self.finished:
            self.deliver(None)
        else:
            self._end_if_done()
        return min(result.accepted, len(tokens))

    def send(self) -> None:
        """Delivers the verdict that is not sent, if there is one."""
        if self.unsent is not None:
            self.num_replies += 1
            if len(self.unsent.timings) > 1:
                self.unsent.waited = time.perf_counter() - self.unsent.committed
            self.deliver(partial(_encode_verdict, self.sequence_id, self.unsent))
            self.unsent = None

    def send_by(self, now: float) -> float:
        """When tokens of a `Decode` must be sent: those that wait, or those that come now."""
        return now + self.opening.seconds_joined if self.unsent is None else self.unsent.due

    def _end_if_done(self) -> None:
        if self.half_closed and not (self.owes_prompt_logprobs or self.rounds or self.finished):
            self.finished = True
            self.deliver(None)

    def _cut(self, tokens: list[int]) -> tuple[list[int], sampling_pb2.FinishReason]:
        """The tokens up to the first stop token or the limit, and the finish reason."""
        left = self.opening.max_new_tokens - self.written
        for i, token in enumerate(tokens[:left]):
            if token in self.opening.stop_token_ids:
                return tokens[: i + 1], sampling_pb2.FINISH_REASON_STOP_TOKEN
        if len(tokens) >= left:
            return tokens[:left], sampling_pb2.FINISH_REASON_LENGTH
        return tokens, sampling_pb2.FINISH_REASON_UNSPECIFIED

    def end(self, error: RequestError) -> None:
        self.finished = self.failed = True
        self.send()
        self.deliver(error)

    def notify(self, notice: verifier_service_pb2.Notice) -> None:
        self.deliver(verifier_service_pb2.VerifyResponse(sequence_id=self.sequence_id, notice=notice))

    def _reply(self, **kind: Any) -> None:
        self.num_replies += 1
        self.replied_at = time.perf_counter()
        self.deliver(verifier_service_pb2.VerifyResponse(sequence_id=self.sequence_id, **kind))


def _encode_verdict(sequence_id: str, unsent: Unsent) -> verifier_service_pb2.VerifyResponse:
    result, tokens = unsent.result, unsent.tokens
    reply = verifier_service_pb2.VerifyResponse(sequence_id=sequence_id)
    verdict = reply.verdict  # in place: a message that is built on its own is copied into the one around it
    verdict.round, verdict.base_length = unsent.round, unsent.base_length
    verdict.status = speculation_pb2.VERDICT_STATUS_JUDGED
    verdict.judged, verdict.accepted = unsent.judged, min(result.accepted, len(tokens))
    verdict.token_ids.extend(tokens)
    verdict.beta.extend(result.beta)
    verdict.logprobs.extend(encode_logprobs(result.logprobs[: len(tokens)]))
    verdict.target_probabilities.extend(result.probabilities)
    verdict.finish_reason = unsent.reason
    *earlier, last = (timings() for timings in unsent.timings)
    for each in earlier:
        last.queue_us += each.queue_us
        last.forward_us += each.forward_us
        last.verify_us += each.verify_us
    verdict.timings.CopyFrom(last)
    verdict.timings.joined_us = round_micros(unsent.waited)
    verdict.load.CopyFrom(unsent.load)
    return reply
