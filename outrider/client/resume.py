"""Retries of a call, and continuing a generation at another service: a `Generation` keeps the delivered tokens and the
failures so far, and builds the request for the rest.
"""

import asyncio
import logging
import math
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import cast

import grpc

from outrider.client.errors import OutriderError, PairMismatch, refused
from outrider.client.events import (
    Chunk,
    Event,
    Finished,
    FinishReason,
    PromptLogprobs,
    Queued,
    SpeculationPolicy,
    Started,
    Statistics,
    Timings,
    Usage,
)
from outrider.client.request import require
from outrider.rpc.channel import Metadata
from outrider.rpc.errors import UNSPECIFIED
from protos.outrider.v1 import draft_service_pb2 as pb
from protos.outrider.v1 import model_pb2, sampling_pb2

# Pause between two attempts: as long as the service suggests, at least this, doubled with each attempt.
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.2, 3.0
# A pause takes at most half of the time left, so that time is left for the last attempt. With less than this the client
# gives up.
LEAST_LEFT_S = 0.05
# gRPC adds a timeout to the time of day, in nanoseconds of 64 bits. If that overflows, the call ends at once.
_LONGEST_TIMEOUT_S = 1e9

_logger = logging.getLogger("outrider.client")


class Call:
    """One call with its retries.

    Args:
        timeout: seconds for all attempts together; None: no limit. At 0 or below the call ends at once.
        retry_timeout: seconds of retries while no service accepts the call; None: until the timeout.
        spent: seconds of the timeout that have passed.

    Attributes:
        address: the endpoint of the current attempt.
        metadata: that each attempt sends.
        failures: failed attempts since the last progress.

    Raises:
        InvalidRequest: the timeout is not a number.
    """

    def __init__(self, timeout: float | None, retry_timeout: float | None, *, spent: float = 0.0) -> None:
        if timeout is not None and math.isnan(timeout):
            raise refused("timeout", "timeout is nan; it must be a number of seconds")
        self.address = ""
        self.metadata: Metadata = ()
        self.timeout = timeout
        self.failures = 0
        self._began = time.monotonic()
        self._end = math.inf if timeout is None else self._began + timeout - spent
        self._retry_timeout = math.inf if retry_timeout is None else retry_timeout
        self._give_up = math.inf  # when
        self._is_noted = False
        self._hopeless: set[str] = set()  # addresses where the last attempt failed for good
        self._tries: dict[str, int] = {}  # that failed, by address
        self._last: OutriderError | None = None  # the last failure other than the passed deadline

    @property
    def time_left(self) -> float | None:
        """Seconds of the timeout, as gRPC takes them; None is for ever."""
        return None if self._end == math.inf else min(max(self._end - time.monotonic(), 0.0), _LONGEST_TIMEOUT_S)

    @property
    def can_go_on(self) -> bool:
        """Whether another attempt can continue after this one."""
        return True

    @property
    def delivered(self) -> int:
        """Tokens delivered, of all samples."""
        return 0

    def failed(self, failure: OutriderError) -> None:
        """The current attempt has failed."""
        if not self.failures:
            self._give_up = time.monotonic() + self._retry_timeout
        self.failures += 1
        self._tries[self.address] = self._tries.get(self.address, 0) + 1
        if failure.is_transient:
            self._last = failure
        if failure.is_wrong_transport or isinstance(failure, PairMismatch):
            self._hopeless.add(self.address)
        else:
            self._hopeless.discard(self.address)

    def is_hopeless(self, addresses: Sequence[str]) -> bool:
        """Whether each address has a pair that does not match, or speaks TLS where the client does not, or the other
        way round.
        """
        return self._hopeless.issuperset(addresses)

    def has_untried(self, addresses: Sequence[str]) -> bool:
        """Whether no attempt of this call has failed at one of the addresses."""
        return not self._tries.keys() >= set(addresses)

    async def pause(self, failure: OutriderError, *, elsewhere: bool) -> bool:
        """Pauses before the next attempt, unless it is `elsewhere`; returns False if there is no time for one."""
        now = time.monotonic()
        if elsewhere:
            return now < self._end
        left = min(self._give_up, self._end) - now
        if left < LEAST_LEFT_S:
            return False
        backoff = min(FIRST_BACKOFF_S * 2 ** min(self.failures - 1, 10), MAX_BACKOFF_S) * random.uniform(0.5, 1.5)
        hint = (failure.retry_after or 0.0) * random.uniform(1.0, 1.25)
        if not self._is_noted:
            self._is_noted = True
            _logger.warning("%s; retrying%s", failure, f" for {left:.3g} s" if left < math.inf else "")
        await asyncio.sleep(min(max(backoff, hint), left / 2))
        return True

    def described(self, failure: OutriderError, addresses: Sequence[str]) -> OutriderError:
        """The failure that ends the call, with the attempts at each address and the delivered tokens."""
        is_late = failure.code is grpc.StatusCode.DEADLINE_EXCEEDED and failure.reason == UNSPECIFIED
        if failure.is_transient or is_late:
            failure.tries = {address: self._tries.get(address, 0) for address in (*addresses, *self._tries)}
            failure.delivered_tokens = self.delivered
            if is_late and self._last is not None:
                failure.message += f"; before that {self._last}"
            if failure.is_wrong_transport and len(addresses) == 1:
                return failure  # the one try is of no interest
            tries = ", ".join(f"{address} ({count})" for address, count in failure.tries.items())
            failure.message += f"; tries at {tries}; {self.delivered} tokens were delivered"
        return failure


def _has_encoder(request: pb.GenerateRequest) -> bool | None:
    """Whether the request is for an encoder–decoder model; None if it may be for either kind."""
    if request.decoder_prompt_token_ids or request.HasField("transcription"):
        return True
    return {"audio": True, "features": True, "chat": False}.get(request.WhichOneof("prompt") or "")


class Generation(Call):
    """One request for text.

    Attributes:
        resumes: how often it was continued after tokens had been delivered.
    """

    def __init__(
        self, request: pb.GenerateRequest, timeout: float | None, retry_timeout: float | None, *, spent: float = 0.0
    ) -> None:
        super().__init__(timeout, retry_timeout, spent=spent)
        self.resumes = 0
        self._request = request
        self._eos_token_ids: frozenset[int] | None = None  # the target's, once requested
        self._has_encoder = _has_encoder(request)
        self._is_single = request.n <= 1
        self._started: Started | None = None
        self._scored = 1  # position of the next log-probabilities of the prompt to deliver
        self._is_scored = False  # all of them were delivered
        self._tokens: list[int] = list(request.committed_token_ids)
        self._given = len(self._tokens)  # given by the caller, of an earlier request
        self._held = request.held_tokens  # of the last tokens, whose text has not been delivered
        self._first_tokens: dict[int, float] = {}  # by sample: seconds until its first token arrived
        self._parts: list[Chunk] = []  # of the text of a token that is held
        self._has_text = False
        self._ends = 0  # of samples

    # ---------------------------------------------------------------------------------------------------- events

    def take(self, event: Event) -> list[Event]:
        """Takes in an event of the current attempt, and returns the events to deliver."""
        if isinstance(event, Chunk):  # most events are chunks
            self.failures = 0
            return self._take_chunk(event)
        if isinstance(event, Started):  # not progress: a service may fail each time after it
            if self._started is not None:
                self.resumes += 1
                return []
            self._started = event
            return [event]
        match event:
            case PromptLogprobs():
                return self._take_prompt_logprobs(event)
            case Finished():
                self.failures = 0
                self._has_text = True
                self._ends += 1
                return [*self._pop_parts(), self._whole(event)]
            case Queued():  # not progress either
                return [event]

    def _take_prompt_logprobs(self, part: PromptLogprobs) -> list[Event]:
        """Drops positions that were delivered: a continued request begins again."""
        new = part.logprobs[max(0, self._scored - part.first_position) :]
        if not new:
            return []
        self.failures = 0
        first = max(self._scored, part.first_position)
        self._scored = first + len(new)
        return [PromptLogprobs(first, new)]

    def _take_chunk(self, chunk: Chunk) -> list[Event]:
        if chunk.token_ids and chunk.index not in self._first_tokens:
            self._first_tokens[chunk.index] = time.monotonic() - self._began
        self._has_text = True
        self._is_scored = True  # its log-probabilities come before the text
        whole = len(self._tokens) - self._held
        self._tokens += chunk.token_ids
        self._held = chunk.held_tokens
        if self._is_single and chunk.text and len(self._tokens) - self._held == whole:
            # A part of a token's text is kept until the rest, or the end, has arrived: a continued request would
            # deliver the whole text of the token again.
            self._parts.append(replace(chunk, token_ids=(), origins=(), token_texts=(), logprobs=(), rounds=()))
            return [replace(chunk, text="")] if chunk.token_ids else []
        return [*self._pop_parts(), chunk] if self._parts else [chunk]

    def _pop_parts(self) -> list[Chunk]:
        parts, self._parts = self._parts, []
        return parts

    # ------------------------------------------------------------------------------------------------- going on

    @staticmethod
    def _needs_no(request: pb.GenerateRequest, *features: str) -> None:
        request.required_features[:] = [each for each in request.required_features if each not in features]

    def request(self) -> pb.GenerateRequest:
        """The request for the rest: the original one if nothing was delivered."""
        self._parts.clear()
        started = self._started
        if started is None:
            return self._request
        request = pb.GenerateRequest()
        request.CopyFrom(self._request)
        request.request_id = started.request_id
        if self._has_encoder:  # the prompt is the encoder's, and `started` has the decoder's
            request.decoder_prompt_token_ids[:] = started.prompt_token_ids
            request.ClearField("transcription")
            require(request, "encoder")
        elif self._has_encoder is False:
            request.token_ids.ids[:] = started.prompt_token_ids  # in place of text or messages
            self._needs_no(request, "message_names", "template_arguments")
        if self._is_scored:
            request.ClearField("prompt_logprobs")
        request.committed_token_ids[:] = self._tokens
        request.held_tokens = self._held
        if self._held:
            require(request, "held_tokens")
        request.sampling.seed = started.seed
        request.sampling.rule = cast("sampling_pb2.AcceptanceRule", started.rule.number)
        request.weights_fingerprint = started.weights_fingerprint
        request.max_new_tokens = started.max_new_tokens
        request.ClearField("fill_context")
        self._needs_no(request, "fill_context")
        if started.policy is not SpeculationPolicy.UNSPECIFIED:  # with a seed the default is another
            request.speculation.policy = cast("pb.SpeculationPolicy", started.policy.number)
        if started.tokens_per_pass:  # a seed's text depends on it, and services may have other defaults
            request.speculation.tokens_per_pass = started.tokens_per_pass
        if request.HasField("time_limit"):
            request.time_limit.FromTimedelta(timedelta(seconds=max(self._time_limit_left(), 0.001)))
        return request

    @property
    def is_over(self) -> bool:
        """Whether every sample has ended, so that only the status of the call is missing."""
        return self._ends >= max(self._request.n, 1)

    @property
    def delivered(self) -> int:
        return len(self._tokens) - self._given

    @property
    def can_go_on(self) -> bool:
        return self._is_single or not self._has_text  # of several samples, none may have begun

    @property
    def needs_model(self) -> bool:
        """Whether the target's description is needed: to repeat the prompt, or to decide if the text has ended."""
        needs_eos = self._eos_token_ids is None and self._is_single and not self._request.ignore_eos and not self._held
        return self.delivered > 0 and (self._has_encoder is None or needs_eos)

    def learn(self, target: model_pb2.ModelInfo) -> None:
        self._eos_token_ids = frozenset(target.eos_token_ids)
        if self._has_encoder is None:
            self._has_encoder = target.HasField("encoder")

    def ended(self) -> Finished | None:
        """The end, if all tokens and their text were delivered and only `Finished` was lost; else None."""
        started, request = self._started, self._request
        if started is None or not self._is_single or self._held:
            return None
        stops = set(request.stop_token_ids)
        if not request.ignore_eos:
            stops |= self._eos_token_ids or set()
        if self.delivered > 0 and self._tokens[-1] in stops:
            return self._finished(started, FinishReason.STOP_TOKEN, self._tokens[-1])
        if len(self._tokens) >= started.max_new_tokens:
            return self._finished(started, FinishReason.LENGTH)
        if request.HasField("time_limit") and self._time_limit_left() <= 0:
            return self._finished(started, FinishReason.TIME_LIMIT)
        return None

    def _time_limit_left(self) -> float:
        return self._request.time_limit.ToTimedelta().total_seconds() - (time.monotonic() - self._began)

    # -------------------------------------------------------------------------------------------------- the end

    def _whole(self, finished: Finished) -> Finished:
        """The end of the last part, with usage and timings of the whole text."""
        if not self.resumes:
            return finished
        usage, timings = finished.usage, finished.timings
        if self._is_single:
            usage = replace(usage, completion_tokens=max(0, self.delivered - finished.cut_tokens))
        first, total = self._times(finished.index)
        timings = replace(timings, time_to_first_token_us=first, total_us=total)
        return replace(finished, num_resumes=self.resumes, usage=usage, timings=timings)

    def _finished(self, started: Started, reason: FinishReason, stop_token_id: int | None = None) -> Finished:
        """An end without a service's `Finished`: its statistics are lost."""
        first, total = self._times(0)
        return Finished(
            index=0,
            finish_reason=reason,
            stop=None,
            stop_token_id=stop_token_id,
            usage=Usage(len(started.prompt_token_ids), self.delivered, 0),
            statistics=replace(Statistics.of(pb.SpeculationStatistics()), drafter=started.drafter),
            timings=Timings.of(pb.GenerateTimings(time_to_first_token_us=first, total_us=total)),
            num_resumes=self.resumes + 1,
        )

    def _times(self, index: int) -> tuple[int, int]:
        """Microseconds to the first token and to the end of a sample that ends now, by this clock."""
        first, total = self._first_tokens.get(index, 0.0), time.monotonic() - self._began
        return round(first * 1e6), round(total * 1e6)
