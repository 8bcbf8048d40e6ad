"""One generation that may go on elsewhere: what of it has been delivered, and the request that goes on after it."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import timedelta
from typing import cast

from outrider.client.events import (
    Chunk,
    Event,
    Finished,
    FinishReason,
    Queued,
    Started,
    Statistics,
    Timings,
    Usage,
)
from protos.outrider.v1 import draft_service_pb2 as pb
from protos.outrider.v1 import sampling_pb2

HELD_TOKENS = "held_tokens"
"""The feature of a service that gives the text of tokens it is told."""


class Progress:
    """How far one request has come, over all the calls that served it.

    Attributes:
        resumes: how often it has gone on elsewhere after something of it had been delivered.
        eos_token_ids: the target's own, once somebody has asked: see `needs_eos`.
    """

    def __init__(self, request: pb.GenerateRequest) -> None:
        self.resumes = 0
        self.eos_token_ids: frozenset[int] | None = None
        self._request = request
        self._begun = self._call_begun = time.monotonic()
        self._started: Started | None = None
        self._tokens: list[int] = list(request.committed_token_ids)
        self._given = len(self._tokens)  # by the caller: told before, by somebody else
        self._held = request.held_tokens  # of the last tokens, whose text has not been delivered
        self._first_token: float | None = None
        self._parts: list[Chunk] = []  # of the text of a token that is held
        self._has_text = False
        self._ends = 0  # of samples

    def take(self, event: Event) -> list[Event]:
        """What to deliver, now that this has come."""
        match event:
            case Started():
                if self._started is not None:
                    self.resumes += 1
                    return []
                self._started = event
                return [event]
            case Queued():
                return [event]
            case Chunk():
                return self._take_chunk(event)
            case Finished():
                self._has_text = True
                self._ends += 1
                return [*self._pop_parts(), self._whole(event)]

    def _take_chunk(self, chunk: Chunk) -> list[Event]:
        if self._first_token is None and chunk.token_ids:
            self._first_token = time.monotonic() - self._begun
        self._has_text = True
        whole = len(self._tokens) - self._held
        self._tokens += chunk.token_ids
        self._held = chunk.held_tokens
        if self._is_single and chunk.text and len(self._tokens) - self._held == whole:
            # A part of a token's text: the rest follows, or the end, where a stop string cuts it. Were that lost, the
            # whole of the text would come again, so it waits.
            self._parts.append(replace(chunk, token_ids=(), origins=(), token_texts=(), logprobs=(), rounds=()))
            return [replace(chunk, text="")] if chunk.token_ids else []
        return [*self._pop_parts(), chunk]

    def _pop_parts(self) -> list[Chunk]:
        parts, self._parts = self._parts, []
        return parts

    # ---------------------------------------------------------------------------------------------------- going on

    @property
    def is_over(self) -> bool:
        """Whether every sample has ended, and nothing is missing but the end of the call."""
        return self._ends >= max(self._request.n, 1)

    @property
    def delivered(self) -> int:
        """Tokens of all samples that came."""
        return len(self._tokens) - self._given

    @property
    def can_go_on(self) -> bool:
        """Whether another call can go on where this one ended. Of several samples none may have begun."""
        return self._is_single or not self._has_text

    @property
    def needs_eos(self) -> bool:
        """Whether it takes the target's own stop tokens to tell if this has ended."""
        return (
            self.eos_token_ids is None
            and self._is_single
            and not self._request.ignore_eos
            and len(self._tokens) > self._given
            and not self._held
        )

    def ended(self) -> Finished | None:
        """The end, where all was delivered but the end itself. Where text is held somebody has to be asked for it."""
        started = self._started
        if started is None or not self._is_single or self._held:
            return None
        stops = set(self._request.stop_token_ids)
        if not self._request.ignore_eos:
            stops |= self.eos_token_ids or set()
        if len(self._tokens) > self._given and self._tokens[-1] in stops:
            return self._finished(started, FinishReason.STOP_TOKEN, self._tokens[-1])
        if len(self._tokens) >= started.max_new_tokens:
            return self._finished(started, FinishReason.LENGTH)
        if self._request.HasField("time_limit") and self._time_limit_left() <= 0:
            return self._finished(started, FinishReason.TIME_LIMIT)
        return None

    def request(self) -> pb.GenerateRequest:
        """What asks for the rest: for all of it, where nothing came."""
        self._call_begun = time.monotonic()
        self._parts.clear()
        started = self._started
        if started is None:
            return self._request
        request = pb.GenerateRequest()
        request.CopyFrom(self._request)
        request.request_id = started.request_id
        request.token_ids.ids[:] = started.prompt_token_ids  # in place of text or messages
        request.committed_token_ids[:] = self._tokens
        request.held_tokens = self._held
        if self._held and HELD_TOKENS not in request.required_features:
            request.required_features.append(HELD_TOKENS)
        request.sampling.seed = started.seed
        request.sampling.rule = cast("sampling_pb2.AcceptanceRule", started.rule.number)
        request.weights_fingerprint = started.weights_fingerprint
        request.max_new_tokens = started.max_new_tokens
        if request.HasField("time_limit"):
            request.time_limit.FromTimedelta(timedelta(seconds=max(self._time_limit_left(), 0.001)))
        return request

    @property
    def _is_single(self) -> bool:
        return self._request.n <= 1

    def _time_limit_left(self) -> float:
        limit = self._request.time_limit
        return limit.seconds + limit.nanos / 1e9 - (time.monotonic() - self._begun)

    # ----------------------------------------------------------------------------------------------------- the end

    def _whole(self, finished: Finished) -> Finished:
        """The end of the last part as the end of all."""
        if not self.resumes:
            return finished
        before = self._call_begun - self._begun
        first = self._first_token if self._is_single else None
        return replace(
            finished,
            num_resumes=self.resumes,
            usage=replace(
                finished.usage, completion_tokens=max(0, len(self._tokens) - self._given - finished.cut_tokens)
            )
            if self._is_single
            else finished.usage,
            timings=replace(
                finished.timings,
                time_to_first_token_us=round(first * 1e6)
                if first is not None
                else finished.timings.time_to_first_token_us,
                total_us=finished.timings.total_us + round(before * 1e6),
            ),
        )

    def _finished(self, started: Started, reason: FinishReason, stop_token_id: int | None = None) -> Finished:
        """An end that nobody told: its statistics went with the service that had them."""
        total = time.monotonic() - self._begun
        return Finished(
            index=0,
            finish_reason=reason,
            stop=None,
            stop_token_id=stop_token_id,
            usage=Usage(len(started.prompt_token_ids), len(self._tokens) - self._given, 0),
            statistics=replace(Statistics.of(pb.SpeculationStatistics()), drafter=started.drafter),
            timings=Timings.of(
                pb.GenerateTimings(
                    time_to_first_token_us=round((self._first_token or 0.0) * 1e6), total_us=round(total * 1e6)
                )
            ),
            num_resumes=self.resumes + 1,
        )
