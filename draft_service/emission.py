"""What one sample tells its client: chunks of tokens and text, and how it ended."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from draft_service.output import OutputText, Released
from draft_service.responses import Responses
from draft_service.statistics import STATISTICS, SpeculationCounts, Timings
from protos.outrider.v1 import draft_service_pb2, sampling_pb2, speculation_pb2

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

    async def room(self) -> None:
        """Waits while the client is too far behind."""
        await self._responses.room()

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
