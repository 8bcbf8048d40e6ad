"""Text out: tokens become text, stop strings are found, and each sample's chunks go out on the request's one stream."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from draft_service.sequence import STATISTICS, SpeculationCounts, Timings
from protos.outrider.v1 import draft_service_pb2, sampling_pb2, speculation_pb2
from protos.outrider.v1.draft_service_pb2 import GenerateResponse


class Detokenizer(Protocol):
    """What turns tokens into text (`outrider.runtime.tokenizer.IncrementalDetokenizer`)."""

    def push(self, token: int, /) -> str:
        """The text that this token completes; what ends inside a character stays inside."""

    def flush(self) -> str:
        """The text of what is left, at the end."""

    @property
    def pending(self) -> bool:
        """Whether something is left inside."""


class StopFinder:
    """Follows a text character by character and says where a stop string is complete.

    Of strings that are complete at the same character the longest counts. One character costs O(1) for each string
    (Knuth, Morris and Pratt), so what is found does not depend on how the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._borders = [_borders(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)  # length of the longest prefix of each that the text ends in

    @property
    def held(self) -> int:
        """How many of the last characters may be the beginning of a stop string."""
        return max(self._matched, default=0)

    def feed(self, character: str) -> str | None:
        """The stop string that this character completes."""
        found = None
        for i, stop in enumerate(self._stops):
            borders, matched = self._borders[i], self._matched[i]
            while matched and stop[matched] != character:
                matched = borders[matched]
            matched += stop[matched] == character
            if matched == len(stop):
                found = found or stop
                matched = borders[matched]
            self._matched[i] = matched
        return found


def _borders(stop: str) -> list[int]:
    """For each prefix length n, the length of the longest proper prefix of `stop[:n]` that it also ends in."""
    borders, border = [0, 0], 0
    for character in stop[1:]:
        while border and stop[border] != character:
            border = borders[border]
        border += stop[border] == character
        borders.append(border)
    return borders


@dataclass(frozen=True, slots=True)
class Released:
    """What may be sent: a text, and how many more tokens it brings to their end.

    Attributes:
        tail: what follows it at the end alone: the beginning of a token that a stop string cuts.
        ends: where in `text` each of the tokens ends.
    """

    text: str
    tokens: int
    tail: str = ""
    ends: tuple[int, ...] = ()

    def by_token(self) -> Iterator["Released"]:
        """The same, a token at a time, the tail aside. Where several end at one place the last of them has the text."""
        begin = 0
        for i, end in enumerate(self.ends):
            stop = begin if self.ends[i + 1 : i + 2] == (end,) else end
            yield Released(self.text[begin:stop], 1)
            begin = stop


class OutputText:
    """The text of one sample.

    Text leaves in whole tokens, so that what was sent is exactly the text of the tokens that were sent, and a resumed
    request goes on where it ends. Only at the end, where a stop string cuts a token, its first part leaves without it.

    Attributes:
        stopped_by: the stop string that ended the text, once there is one. The one that is complete first counts, and
            of those complete at the same character the longest.
    """

    def __init__(
        self, detokenizer: Detokenizer, *, stop: Sequence[str] = (), min_tokens: int = 0, written: int = 0
    ) -> None:
        """Begins after `written` tokens of output; no stop string counts before there are `min_tokens` of them."""
        self.stopped_by: str | None = None
        self._detokenizer = detokenizer
        self._finder = StopFinder(stop)
        self._finds = bool(stop)
        self._min_tokens = min_tokens
        self._written = written
        self._text = ""  # not sent yet; begins at the position `_sent`
        self._sent = 0
        self._length = 0  # of all text so far
        self._cut: int | None = None  # where the text ends
        self._ends: deque[int] = deque()  # of the tokens not released yet: where the text of each ends
        self._incomplete = 0  # tokens after those, whose text ends inside a character

    def push(self, token: int) -> bool:
        """Takes in one token; True when a stop string ends the text, after which no more may come."""
        self._written += 1
        self._scan(self._detokenizer.push(token))
        self._incomplete += 1
        if not self._detokenizer.pending:
            self._settle()
        return self._cut is not None

    def push_silent(self) -> None:
        """Takes in a token that has no text, such as a stop token at the end."""
        self._written += 1
        self._incomplete += 1

    def release(self) -> Released:
        """What may be sent now and was not before. After the cut: all up to it."""
        if self._cut is not None:
            return self._take(self._cut)
        safe = self._length - self._finder.held
        upto = self._sent
        for end in self._ends:
            if end > safe:
                break
            upto = end
        return self._take(upto)

    def finish(self) -> Released:
        """The rest, when the sample has ended: what was held back, up to the cut if there is one."""
        if self._cut is None:
            self._scan(self._detokenizer.flush())
        self._settle()
        end = self._length if self._cut is None else self._cut
        return self._take(end)

    def _settle(self) -> None:
        self._ends.extend([self._length] * self._incomplete)
        self._incomplete = 0

    def _scan(self, text: str) -> None:
        self._text += text
        if not self._finds:
            self._length += len(text)
            return
        for character in text:
            self._length += 1
            found = self._finder.feed(character)
            if found is not None and self._written >= self._min_tokens and self._cut is None:
                self.stopped_by = found
                self._cut = self._length - len(found)

    def _take(self, upto: int) -> Released:
        ends, whole = [], self._sent
        while self._ends and self._ends[0] <= upto:
            whole = self._ends.popleft()
            ends.append(whole - self._sent)
        text, tail = self._text[: whole - self._sent], self._text[whole - self._sent : upto - self._sent]
        self._text = self._text[upto - self._sent :]
        self._sent = upto
        return Released(text, len(ends), tail, tuple(ends))


MAX_BACKLOG = 64
# Samples that wait for room go on once so few are left: waking all of them for each response would cost more than
# writing it.
ROOM_AGAIN = MAX_BACKLOG // 2


class Responses:
    """A queue that many samples write to and one stream reads from.

    Writing never waits, so that what was released is never lost; who writes asks for `room` before it makes more.

    Attributes:
        sent: how many were written.
    """

    def __init__(self) -> None:
        self.sent = 0
        self._queue: deque[GenerateResponse] = deque()
        self._ended = False
        self._error: BaseException | None = None
        self._more = asyncio.Event()
        self._fewer = asyncio.Event()

    def send(self, response: GenerateResponse) -> None:
        """Puts a response at the end."""
        self.sent += 1
        self._queue.append(response)
        self._more.set()

    def end(self, error: BaseException | None = None) -> None:
        """No more comes. An error is raised to the reader after what came before it."""
        self._ended, self._error = True, error
        self._more.set()

    async def room(self) -> bool:
        """Waits while the client is too far behind; whether it was."""
        waits = len(self._queue) >= MAX_BACKLOG
        while len(self._queue) >= MAX_BACKLOG:
            self._fewer.clear()
            await self._fewer.wait()
        return waits

    def take_now(self) -> GenerateResponse | None:
        """The next response; None where there is none now."""
        if not self._queue:
            return None
        return self._take()

    @property
    def are_read(self) -> bool:
        """Whether none waits for the reader."""
        return not self._queue

    @property
    def are_over(self) -> bool:
        """Whether none is left and none will come; reading on raises the error there is."""
        return self._ended and not self._queue

    async def __aiter__(self) -> AsyncIterator[GenerateResponse]:
        while True:
            while self._queue:
                yield self._take()
            if self._ended:
                if self._error is not None:
                    raise self._error
                return
            self._more.clear()
            await self._more.wait()

    def _take(self) -> GenerateResponse:
        response = self._queue.popleft()
        if len(self._queue) <= ROOM_AGAIN:
            self._fewer.set()
        return response


_DRAFT = draft_service_pb2.TOKEN_ORIGIN_DRAFT
_CORRECTION = draft_service_pb2.TOKEN_ORIGIN_CORRECTION
_TARGET = draft_service_pb2.TOKEN_ORIGIN_TARGET

ShowToken = Callable[[int], str]

_NOTHING = Released("", 0)


@dataclass(frozen=True, slots=True)
class _Token:
    """A committed token that has not been told."""

    token: int
    origin: draft_service_pb2.TokenOrigin
    logprobs: sampling_pb2.PositionLogprobs | None


class Emitter:
    """The voice of one sample. It tells each token as soon as it may, and its text once that is safe.

    So a death takes with it what nobody was told, which depends on its time alone, and not on what the tokens were:
    whoever draws them anew elsewhere follows the target's law still.
    """

    def __init__(
        self,
        responses: Responses,
        text: OutputText,
        *,
        index: int,
        prompt_tokens: int,
        committed: Sequence[int] = (),
        show_token: ShowToken | None = None,
        one_by_one: bool = False,
    ) -> None:
        """`committed` are the tokens that were told before. With `show_token`, which turns one token into text by
        itself, rounds are reported too. `one_by_one` gives each token a response of its own, and each token's text.
        """
        self.cached_tokens = 0
        self._responses = responses
        self._text = text
        self._index = index
        self._prompt_tokens = prompt_tokens
        self._committed = len(committed)
        self._told = len(committed)
        self._whole = len(committed)  # of those told, in order: those whose text has been sent
        self._last = committed[-1] if committed else None
        self._show_token = show_token
        self._one_by_one = one_by_one
        self._verdicts: list[tuple[speculation_pb2.Verdict, Sequence[int]]] = []  # not read yet
        self._tokens: list[_Token] = []
        self._rounds: list[draft_service_pb2.RoundReport] = []

    @property
    def completion_tokens(self) -> int:
        """Tokens of the output that were not told before the request."""
        return max(0, self._whole - self._committed)

    def resume(self, held: Sequence[int], *, is_silent: bool) -> bool:
        """Takes in the last of the tokens that were told before: those whose text was not sent. Call it first.

        True where a stop string ends the text in them. `is_silent` says that the last of them has no text.
        """
        self._whole -= len(held)
        for i, token in enumerate(held):
            if is_silent and i == len(held) - 1:
                self._text.push_silent()
            elif self._text.push(token):
                return True
        return False

    def take(self, verdict: speculation_pb2.Verdict, drafted: Sequence[int]) -> None:
        """Takes in a verdict on the drafted tokens. Costs nothing: `send` or `finish` makes text of it."""
        self._verdicts.append((verdict, drafted))

    def send(self, timings: Timings) -> bool:
        """Sends what may be sent now. True where a stop string ends the text; the rest is dropped."""
        self._read_verdicts()
        self._send(self._text.release(), timings)
        return self._text.stopped_by is not None

    async def room(self) -> bool:
        """Waits while the client is too far behind; whether it was."""
        return await self._responses.room()

    def finish(
        self, reason: sampling_pb2.FinishReason, counts: SpeculationCounts, timings: Timings
    ) -> sampling_pb2.FinishReason:
        """Sends the rest and the end. A stop string comes before any other reason; returns the one that holds."""
        self._read_verdicts()
        self._send(self._text.finish(), timings, also_rounds=True)
        stopped_by = self._text.stopped_by
        if stopped_by is not None:
            reason = sampling_pb2.FINISH_REASON_STOP_STRING
        finished = draft_service_pb2.GenerateFinished(
            index=self._index,
            finish_reason=reason,
            stop=stopped_by or "",
            stop_token_id=self._last if reason == sampling_pb2.FINISH_REASON_STOP_TOKEN else None,
            usage=draft_service_pb2.Usage(
                prompt_tokens=self._prompt_tokens,
                completion_tokens=self.completion_tokens,
                cached_tokens=self.cached_tokens,
            ),
            statistics=STATISTICS.run(counts.to_message, draft_service_pb2.SpeculationStatistics()),
            timings=STATISTICS.run(timings.to_message, draft_service_pb2.GenerateTimings()),
            cut_tokens=self._told - self._whole,
        )
        self._responses.send(draft_service_pb2.GenerateResponse(finished=finished))
        return reason

    def _read_verdicts(self) -> None:
        for verdict, drafted in self._verdicts:
            if self._text.stopped_by is None:
                self._read(verdict, drafted)
        self._verdicts.clear()

    def _read(self, verdict: speculation_pb2.Verdict, drafted: Sequence[int]) -> None:
        if self._show_token is not None:
            self._rounds.append(self._report(verdict, drafted, self._show_token))
        own = _CORRECTION if verdict.accepted < len(drafted) else _TARGET
        silent = len(verdict.token_ids) - (verdict.finish_reason == sampling_pb2.FINISH_REASON_STOP_TOKEN)
        for i, token in enumerate(verdict.token_ids):
            logprobs = verdict.logprobs[i] if verdict.logprobs else None
            self._last = token
            self._tokens.append(_Token(token, _DRAFT if i < verdict.accepted else own, logprobs))
            if i == silent:
                self._text.push_silent()
            elif self._text.push(token):
                return

    def _send(self, released: Released, timings: Timings, *, also_rounds: bool = False) -> None:
        tokens, self._tokens = self._tokens, []
        if self._one_by_one:
            for token in tokens:
                self._send_chunk([token], _NOTHING, timings)
            for part in released.by_token():
                self._send_chunk([], part, timings)
        elif tokens or released.text or released.tokens or (also_rounds and self._rounds and not released.tail):
            self._send_chunk(tokens, released, timings)
        if released.tail:  # apart: who resumes the request must not count it, since its token's text has not been sent
            self._send_chunk([], Released(released.tail, 0), timings)

    def _send_chunk(self, tokens: Sequence[_Token], released: Released, timings: Timings) -> None:
        self._told += len(tokens)
        self._whole += released.tokens
        chunk = draft_service_pb2.GenerateChunk(
            index=self._index,
            text=released.text,
            token_ids=[each.token for each in tokens],
            origins=[each.origin for each in tokens],
            logprobs=[each.logprobs for each in tokens if each.logprobs is not None],
            held_tokens=self._told - self._whole,
        )
        if self._show_token is not None:
            chunk.token_texts.extend([self._show_token(each.token) for each in tokens])
            chunk.rounds.extend(self._rounds)
            self._rounds.clear()
        if tokens:
            timings.tokens_out(len(tokens))
        self._responses.send(draft_service_pb2.GenerateResponse(chunk=chunk))

    def _report(
        self, verdict: speculation_pb2.Verdict, drafted: Sequence[int], show: ShowToken
    ) -> draft_service_pb2.RoundReport:
        return draft_service_pb2.RoundReport(
            round=verdict.round,
            output_length=verdict.base_length - self._prompt_tokens,
            drafted_token_ids=drafted,
            drafted_texts=[show(token) for token in drafted],
            accepted=verdict.accepted,
            beta=verdict.beta,
        )
