"""Speech of any length as segments of text: windows, the segments in the model's output, and where the next window
begins.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from outrider.client.audio import FRAME_S, AudioSource, Samples, read_samples, speech_encoder
from outrider.client.errors import refused
from outrider.client.events import Chunk, Completion, Event, Finished, FinishReason
from outrider.client.texts import parts_of_tokens
from protos.outrider.v1 import draft_service_pb2, model_pb2

if TYPE_CHECKING:
    from outrider.client.client import AsyncClient

# A timestamp counts steps of 0.02 s.
_FRAMES_OF_STEP = 2
# First tokens of the decoder: start, language, task, no timestamps.
_DECODER_PROMPT = 4

_SINGLE = ("n", "committed_token_ids", "held_tokens")


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of the speech: begin and end in seconds, its text as the model wrote it, and all its tokens."""

    start: float
    end: float
    text: str
    token_ids: tuple[int, ...]


class AsyncTranscription:
    """The segments of one speech, as they come. Iterate it once.

    Attributes:
        segments: those so far.
        completions: one for each window that is done.
        duration: seconds of the audio; 0 before it is read.
        position: seconds that are done.
    """

    def __init__(
        self,
        client: AsyncClient,
        audio: AudioSource,
        timeout: float | None,
        options: Mapping[str, Any],
        generate: Callable[..., AsyncGenerator[Event, None]] | None = None,
    ) -> None:
        """`generate` is called for each window in place of the client's."""
        self.segments: list[Segment] = []
        self.completions: list[Completion] = []
        self.duration = 0.0
        self.position = 0.0
        self._generate = client.generate if generate is None else generate
        self.stream = self._transcribe(client, audio, timeout, dict(options))

    @property
    def text(self) -> str:
        """The text of all segments so far."""
        return "".join(segment.text for segment in self.segments).strip()

    def __aiter__(self) -> AsyncGenerator[Segment, None]:
        return self.stream

    async def wait(self) -> Self:
        """Reads all segments, and returns the transcription."""
        async for _ in self.stream:
            pass
        return self

    async def aclose(self) -> None:
        """Cancels the call."""
        await self.stream.aclose()

    async def _transcribe(
        self, client: AsyncClient, audio: AudioSource, timeout: float | None, options: dict[str, Any]
    ) -> AsyncGenerator[Segment, None]:
        _check(options)
        pair = await client.get_model(timeout=timeout)
        encoder = speech_encoder(pair.target)
        samples = await asyncio.to_thread(read_samples, audio, options.pop("sample_rate", None), encoder.sample_rate)
        self.duration = samples.seconds
        if samples.frames > encoder.frames:
            _check_timestamps(encoder, samples)
            options["timestamps"] = True
        first = encoder.first_timestamp_token_id or None
        options.setdefault("temperature", 0.0)
        options.setdefault("max_new_tokens", most_tokens(pair))
        options["report_rounds"] = True  # with the text of each token
        seed, seek = options.pop("seed", None), 0
        while seek < samples.frames:
            frames = min(encoder.frames, samples.frames - seek)
            window = Window(seek, frames, first, has_times=options["timestamps"])
            options["audio"] = samples.part(seek, window.frames)
            # Texts of one seed share their random numbers: each window has a seed of its own.
            options["seed"] = None if seed is None else (seed + len(self.completions)) % 2**64
            async with aclosing(self._generate(timeout=timeout, **options)) as events:
                async for event in events:
                    for segment in window.take(event):
                        self.position = max(self.position, min(segment.end, self.duration))
                        self.segments.append(segment)
                        yield segment
            self.completions.append(Completion.of(window.events))
            seek += window.advance
            self.position = min(seek * FRAME_S, self.duration)
        self.position = self.duration


class Transcription:
    """As `AsyncTranscription`, without an event loop."""

    def __init__(self, transcription: AsyncTranscription, stream: Generator[Segment, None, None]) -> None:
        self._transcription = transcription
        self._stream = stream

    @property
    def segments(self) -> list[Segment]:
        return self._transcription.segments

    @property
    def completions(self) -> list[Completion]:
        return self._transcription.completions

    @property
    def duration(self) -> float:
        return self._transcription.duration

    @property
    def position(self) -> float:
        return self._transcription.position

    @property
    def text(self) -> str:
        return self._transcription.text

    def __iter__(self) -> Generator[Segment, None, None]:
        return self._stream

    def wait(self) -> Self:
        """Reads all segments, and returns the transcription."""
        for _ in self._stream:
            pass
        return self

    def close(self) -> None:
        """Cancels the call."""
        self._stream.close()


def _check(options: Mapping[str, Any]) -> None:
    for name in _SINGLE:
        if options.get(name) is not None:
            raise refused(name, f"{name} is set; leave it out: transcribe writes one text from its beginning")
    for name in ("frame_bytes", "frame_pace"):
        if options.get(name) is not None:
            raise refused(name, f"{name} is set; leave it out: transcribe needs reports on single tokens")


def _check_timestamps(encoder: model_pb2.EncoderInfo, samples: Samples) -> None:
    if not encoder.first_timestamp_token_id:
        raise refused(
            "audio",
            f"audio has {samples.seconds:.2f} s; at most {encoder.frames * FRAME_S:g} s with this model, which "
            "writes no timestamps to cut longer audio by: cut it, or serve a model with timestamps",
        )


def most_tokens(pair: draft_service_pb2.DraftServiceGetModelResponse) -> int:
    """As many tokens as fit after the decoder's prompt."""
    longest = pair.model.limits.max_sequence_tokens
    return max(1, longest - max(_DECODER_PROMPT, len(pair.target.encoder.decoder_prompt_token_ids)))


# ----------------------------------------------------------------------------------------------------------- windows


@dataclass(frozen=True, slots=True)
class Span:
    """A segment of a window: tokens from `begin` to `end`, speech from `start` to `stop` in steps of 0.02 s."""

    begin: int
    end: int
    start: int
    stop: int


def find_spans(tokens: Sequence[int], first_timestamp: int | None, frames: int) -> tuple[list[Span], int]:
    """The segments of a window, and how many frames after its begin the next one begins.

    As `_retrieve_segment` of transformers' Whisper: two timestamps in a row end a segment and begin the next one. The
    next window repeats the rest after the last such pair, unless it ends with a timestamp. Without a pair the
    whole window is one segment.

    Args:
        tokens: the model's output, without the stop token.
        first_timestamp: the token of the timestamp 0.00; None: the model writes none.
        frames: frames of the window's audio.
    """
    steps = [
        token - first_timestamp if first_timestamp is not None and token >= first_timestamp else None
        for token in tokens
    ]
    # The position of the second timestamp of each pair.
    pairs = [i for i in range(1, len(steps)) if steps[i - 1] is not None and steps[i] is not None]
    if not pairs:
        stop = next((step for step in reversed(steps) if step is not None), 0)
        return [Span(0, len(tokens), 0, stop or frames // _FRAMES_OF_STEP)], frames
    ends_with_one = steps[-1] is not None and steps[-2] is None
    cuts = [*pairs, len(tokens)] if ends_with_one else pairs
    spans = [
        Span(begin, end, steps[begin] or 0, steps[end - 1] or 0)
        for begin, end in zip([0, *cuts[:-1]], cuts, strict=True)
    ]
    return spans, frames if ends_with_one else spans[-1].stop * _FRAMES_OF_STEP


class Window:
    """The model's output for one window.

    Args:
        seek: frames before the window.
        frames: frames of its audio.
        first_timestamp: the token of the timestamp 0.00; None: the model writes none.
        has_times: whether timestamps are asked for. A model may write some all the same; they are no text.

    Attributes:
        events: all events so far.
        advance: how many frames after this window's begin the next one begins. Known at the end.
    """

    def __init__(self, seek: int, frames: int, first_timestamp: int | None, *, has_times: bool = True) -> None:
        self.events: list[Event] = []
        self.frames = frames
        self.advance = frames
        self._seek = seek
        self._first = first_timestamp
        self._first_cut = first_timestamp if has_times else None
        self._tokens: list[int] = []
        self._texts: list[str] = []
        self._text = ""
        self._found = 0  # segments so far

    def take(self, event: Event) -> list[Segment]:
        """Takes in an event, and returns the segments that it completes."""
        self.events.append(event)
        match event:
            case Chunk():
                self._tokens += event.token_ids
                self._texts += event.token_texts
                self._text += event.text
                if any(self._is_timestamp(token) for token in event.token_ids):
                    return self._complete(len(self._tokens) - event.held_tokens)
            case Finished():
                return self._end(event)
        return []

    def _complete(self, count: int) -> list[Segment]:
        """The new segments that a pair of timestamps ends. Later tokens do not change them."""
        spans, _ = find_spans(self._tokens[:count], self._first_cut, self.frames)
        return self._segments([span for span in spans if span.end < count], count)

    def _end(self, finished: Finished) -> list[Segment]:
        count = len(self._tokens) - finished.cut_tokens
        if finished.finish_reason is FinishReason.STOP_TOKEN:
            count -= 1
        spans, advance = find_spans(self._tokens[:count], self._first_cut, self.frames)
        self.advance = advance or self.frames  # a pair of 0.00 would repeat the window for ever
        return self._segments(spans, count)

    def _segments(self, spans: Sequence[Span], count: int) -> list[Segment]:
        """The spans that are new, but those without text."""
        new, self._found = spans[self._found :], max(self._found, len(spans))
        parts = parts_of_tokens(self._text, self._texts[:count]) if new else []
        segments = []
        for span in new:
            tokens = self._tokens[span.begin : span.end]
            text = "".join(
                part
                for token, part in zip(tokens, parts[span.begin : span.end], strict=True)
                if not self._is_timestamp(token)
            )
            if text.strip():
                segments.append(Segment(self._seconds(span.start), self._seconds(span.stop), text, tuple(tokens)))
        return segments

    def _seconds(self, step: int) -> float:
        return round((self._seek + step * _FRAMES_OF_STEP) * FRAME_S, 2)

    def _is_timestamp(self, token: int) -> bool:
        return self._first is not None and token >= self._first
