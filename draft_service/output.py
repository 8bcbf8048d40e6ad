"""Output of a sample: detokenises, finds stop strings, and sends chunks."""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from draft_service.responses import Responses
from draft_service.sequence import STATISTICS, SpeculationCounts, Timings
from outrider.runtime.tokenizer import IncrementalDetokenizer
from protos.outrider.v1 import draft_service_pb2, sampling_pb2, speculation_pb2
from protos.outrider.v1.draft_service_pb2 import GenerateChunk, GenerateResponse

_BROKEN = "\N{REPLACEMENT CHARACTER}"


class StopFinder:
    """Finds stop strings in a text, character by character.

    If several are complete at the same character, the longest counts. A character costs two searches among the sorted
    strings on average, and a look-up for each of their lengths. The result does not depend on how the text is cut into
    pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._whole = frozenset(stops)
        self._sorted = sorted(self._whole)
        self._lengths = sorted({len(stop) for stop in stops}, reverse=True)
        self._begun = ""  # the longest end of the text that a longer stop string begins with

    @property
    def held(self) -> int:
        """How many of the last characters may begin a stop string."""
        return len(self._begun)

    def feed(self, character: str) -> str | None:
        """The stop string that this character completes."""
        text = self._begun + character
        found = next((text[-n:] for n in self._lengths if n <= len(text) and text[-n:] in self._whole), None)
        while text and not self._begins(text):
            text = text[1:]
        self._begun = text
        return found

    def _begins(self, text: str) -> bool:
        """Whether a longer stop string begins with `text`. If one does, the next one in order does."""
        i = bisect_right(self._sorted, text)
        return i < len(self._sorted) and self._sorted[i].startswith(text)


@dataclass(frozen=True, slots=True)
class Released:
    """Text to send, and the number of tokens that it completes.

    Attributes:
        tail: the first part of a token that a stop string cuts; sent after `text`.
        ends: where in `text` each token ends.
    """

    text: str
    tokens: int
    tail: str = ""
    ends: tuple[int, ...] = ()

    def by_end(self) -> Iterator["Released"]:
        """The same without the tail, in parts of tokens that end together: a text that is resumed after a part neither
        repeats nor lacks anything.
        """
        begin = 0
        for end, tokens in groupby(self.ends):
            yield Released(self.text[begin:end], len(list(tokens)))
            begin = end


class OutputText:
    """The text of one sample.

    Text is released in whole tokens: it always is the text of the tokens counted with it, so a resumed request
    continues there. Only the last token may be cut, by a stop string.

    Attributes:
        stopped_by: the stop string that ended the text; None before. The first to be complete counts; of those complete
            at the same character, the longest.
    """

    def __init__(
        self, detokenizer: IncrementalDetokenizer, *, stop: Sequence[str] = (), min_tokens: int = 0, written: int = 0
    ) -> None:
        """Starts after `written` output tokens. Stop strings count from `min_tokens` output tokens on."""
        self.stopped_by: str | None = None
        self._detokenizer = detokenizer
        self._finder = StopFinder(stop)
        self._finds = bool(stop)
        self._min_tokens = min_tokens
        self._written = written
        self._text = ""  # not released; starts at `_sent`
        self._sent = 0
        self._length = 0  # of all text
        self._cut: int | None = None  # where the text ends
        self._ends: deque[int] = deque()  # end of each token that is not released
        # Of tokens after those, whose last character is incomplete: its begin, and their end if it stays incomplete.
        self._incomplete: list[tuple[int, int]] = []

    def push(self, token: int) -> bool:
        """Adds a token. Returns whether a stop string ends the text; then no more tokens may be added."""
        self._written += 1
        self._scan(self._detokenizer.push(token))
        self._incomplete.append((self._length, self._length + self._detokenizer.kept))
        if not self._detokenizer.pending or self._cut is not None:
            self._settle()
        return self._cut is not None

    def push_silent(self) -> None:
        """Adds a token without text, such as a stop token at the end."""
        self._written += 1
        self._incomplete.append((self._length, self._length + self._detokenizer.kept))

    def release(self) -> Released:
        """The text that can be sent now. After a stop string: all text before it."""
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
        """The rest of the text at the end of the sample, up to the stop string if there is one."""
        if self._cut is None:
            self._scan(self._detokenizer.flush())
        self._settle()
        end = self._length if self._cut is None else self._cut
        return self._take(end)

    def _settle(self) -> None:
        """Finds the ends of the tokens whose last character was incomplete: it stayed so, or a later token ends it."""
        ends, following = deque[int](), self._length
        for begin, end in reversed(self._incomplete):
            if not self._text[begin - self._sent : end - self._sent].strip(_BROKEN):
                following = min(end, following)
            ends.appendleft(following)
        self._ends += ends
        self._incomplete.clear()

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


_DRAFT = draft_service_pb2.TOKEN_ORIGIN_DRAFT
_CORRECTION = draft_service_pb2.TOKEN_ORIGIN_CORRECTION
_TARGET = draft_service_pb2.TOKEN_ORIGIN_TARGET


class Emitter:
    """Streams one sample's chunks: each token as soon as it is committed, its text once no stop string can cut it.

    If the service dies, the unsent tokens are lost. Which ones are lost depends on time only, not on the tokens, so a
    service that draws them again still follows the target's distribution.
    """

    def __init__(
        self,
        responses: Responses,
        text: OutputText,
        *,
        index: int,
        prompt_tokens: int,
        committed: Sequence[int] = (),
        show_token: Callable[[int], str] | None = None,
        one_by_one: bool = False,
    ) -> None:
        """`committed` are tokens that an earlier call sent. `show_token` turns one token into text; it also turns on
        reports of rounds. `one_by_one` sends each token, and each text whose tokens end together, in a response of
        its own.
        """
        self.cached_tokens = 0
        self._responses = responses
        self._text = text
        self._index = index
        self._prompt_tokens = prompt_tokens
        self._committed = len(committed)
        self._sent = len(committed)
        self._whole = len(committed)  # of the sent tokens, from the first: those whose text was sent
        self._last = committed[-1] if committed else None
        self._show_token = show_token
        self._one_by_one = one_by_one
        # Not turned into text yet, with the drafted tokens and the reports of their rounds.
        self._verdicts: list[tuple[speculation_pb2.Verdict, Sequence[int], draft_service_pb2.RoundReport | None]] = []
        self._chunk = GenerateChunk()  # tokens and reports that have not been sent
        self._sent_at = responses.now

    @property
    def completion_tokens(self) -> int:
        """Output tokens of this call whose text was sent."""
        return max(0, self._whole - self._committed)

    def resume(self, held: Sequence[int], *, is_silent: bool) -> bool:
        """Adds the last tokens of an earlier call, whose text was not sent. Call it first.

        Returns whether a stop string ends the text. `is_silent`: the last token has no text.
        """
        self._whole -= len(held)
        for i, token in enumerate(held):
            if is_silent and i == len(held) - 1:
                self._text.push_silent()
            elif self._text.push(token):
                return True
        return False

    def take(
        self,
        verdict: speculation_pb2.Verdict,
        drafted: Sequence[int],
        report: draft_service_pb2.RoundReport | None = None,
    ) -> None:
        """Adds the verdict of a round. Cheap: `send` or `finish` turns it into text."""
        self._verdicts.append((verdict, drafted, report))

    def send(self, timings: Timings) -> bool:
        """Sends tokens and text, unless they may wait to be joined with later ones.

        Returns whether a stop string ended the text; then the rest is dropped.
        """
        self._read_verdicts()
        is_over = self._text.stopped_by is not None
        if is_over or timings.first_token is None or not self._responses.may_wait_since(self._sent_at):
            self._send(self._text.release(), timings)
        return is_over

    def flush(self, timings: Timings) -> None:
        """Sends what waits to be joined, before an error ends the call."""
        self._read_verdicts()
        self._send(self._text.release(), timings)

    def send_prompt_logprobs(self, part: sampling_pb2.PromptLogprobs) -> None:
        self._responses.send(GenerateResponse(prompt_logprobs=part))

    async def wait_for_client(self) -> bool:
        return await self._responses.wait_for_client()

    def finish(
        self, reason: sampling_pb2.FinishReason, counts: SpeculationCounts, timings: Timings
    ) -> sampling_pb2.FinishReason:
        """Sends the rest and the end. Returns the finish reason: a stop string overrides `reason`."""
        self._read_verdicts()
        self._send(self._text.finish(), timings)
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
            cut_tokens=self._sent - self._whole,
        )
        self._responses.send(GenerateResponse(finished=finished))
        return reason

    def _read_verdicts(self) -> None:
        taken, self._verdicts = self._verdicts, []  # first: after an error nothing may follow the gap
        for verdict, drafted, report in taken:
            if self._text.stopped_by is None:
                self._read(verdict, drafted, report)

    def _read(
        self, verdict: speculation_pb2.Verdict, drafted: Sequence[int], report: draft_service_pb2.RoundReport | None
    ) -> None:
        chunk, show = self._chunk, self._show_token
        if report is not None and show is not None:
            report.drafted_texts.extend([show(token) for token in report.drafted_token_ids])
            chunk.rounds.append(report)
        own = _CORRECTION if verdict.accepted < len(drafted) else _TARGET
        silent = len(verdict.token_ids) - (verdict.finish_reason == sampling_pb2.FINISH_REASON_STOP_TOKEN)
        for i, token in enumerate(verdict.token_ids):
            self._last = token
            chunk.token_ids.append(token)
            chunk.origins.append(_DRAFT if i < verdict.accepted else own)
            if verdict.logprobs:
                chunk.logprobs.append(verdict.logprobs[i])
            if show is not None:
                chunk.token_texts.append(show(token))
            if i == silent:
                self._text.push_silent()
            elif self._text.push(token):
                return

    def _send(self, released: Released, timings: Timings) -> None:
        chunk, self._chunk = self._chunk, GenerateChunk()
        self._sent_at = self._responses.now
        if self._one_by_one:
            for i, (token, origin) in enumerate(zip(chunk.token_ids, chunk.origins, strict=True)):
                one = GenerateChunk(token_ids=[token], origins=[origin], logprobs=chunk.logprobs[i : i + 1])
                self._send_chunk(one, Released("", 0), timings)
            for part in released.by_end():
                self._send_chunk(GenerateChunk(), part, timings)
        elif chunk.token_ids or released.text or released.tokens:
            self._send_chunk(chunk, released, timings)
        if released.tail:  # apart: a client that resumes must not count it
            self._send_chunk(GenerateChunk(), Released(released.tail, 0), timings)

    def _send_chunk(self, chunk: GenerateChunk, released: Released, timings: Timings) -> None:
        """Sends a chunk of tokens with a text."""
        self._sent += len(chunk.token_ids)
        self._whole += released.tokens
        chunk.index, chunk.text, chunk.held_tokens = self._index, released.text, self._sent - self._whole
        if chunk.token_ids:
            timings.tokens_out(len(chunk.token_ids))
        self._responses.send(GenerateResponse(chunk=chunk))
