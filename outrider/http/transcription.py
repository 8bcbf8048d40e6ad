"""Transcriptions: a form with an audio file becomes the text of its speech."""

import asyncio
import json
import math
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import grpc
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request
from starlette.responses import Response

from outrider.client import AsyncTranscription, DeadlineExceeded, OutriderError, Segment
from outrider.client.audio import read_samples
from outrider.http.errors import HIDES_SIZES, RETRY_AFTER_S, ApiError, invalid, of_service, unsupported
from outrider.http.pair import Pair
from outrider.http.security import AUDIO_BYTES
from outrider.rpc.errors import UNSPECIFIED

MOST_SECONDS = 7200
"""Of the audio of a request: a small file of silence may hold days of it, and all samples are in memory."""
MOST_AT_ONCE = 3 * MOST_SECONDS
"""Of all audio in memory: 660 MiB."""

_FORMATS = ("json", "text", "verbose_json", "srt", "vtt")
_FIELDS = ("file", "model", "language", "prompt", "response_format", "temperature", "stream", "include")
_GRANULARITIES = ("timestamp_granularities[]", "timestamp_granularities")
# Names of the fields of an error in this form; the contract's are those of the client.
_NAMES = {"audio": "file", "transcription.language": "language", "transcription": "language"}


class AudioInMemory:
    """Bounds the seconds of audio of a request, and those of all requests together."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._lock = threading.Lock()  # files are decoded in threads

    @contextmanager
    def request(self) -> Iterator[Callable[[float], None]]:
        """Yields a function that takes the seconds of the request's audio so far. They count until the context ends."""
        own, is_over = 0.0, False

        def check(seconds: float) -> None:
            nonlocal own
            if seconds > MOST_SECONDS:
                raise invalid("file", f"file has more than {MOST_SECONDS:g} s; cut it")
            with self._lock:
                if is_over:  # the thread that decodes the file outlives its request
                    raise TimeoutError
                others = self._seconds - own
                if others + seconds > MOST_AT_ONCE:
                    text = (
                        f"file has {seconds:.0f} s of audio or more, and other requests {others:.0f} s; this server "
                        f"holds {MOST_AT_ONCE:g} s at once: try again later"
                    )
                    raise ApiError(429, text, code="rate_limit_exceeded", headers={"retry-after": str(RETRY_AFTER_S)})
                self._seconds, own = others + seconds, seconds

        try:
            yield check
        finally:
            with self._lock:
                self._seconds, is_over = self._seconds - own, True


async def transcribe(
    form: FormData,
    metadata: Mapping[str, str],
    pair: Pair,
    timeout: float,
    check_model: Callable[[str | None], Awaitable[None]],
    audio: AudioInMemory,
) -> Response:
    """The answer to POST /v1/audio/transcriptions.

    Args:
        metadata: of the calls.
        pair: of speech models.
        timeout: in seconds, of all windows together.
        check_model: refuses a model that is not served.
        audio: of all requests.

    Raises:
        ApiError: a field is wrong, the pair takes no speech, or too much audio is in memory.
    """
    text_fields = _fields(form)
    await check_model(text_fields.get("model"))
    if pair.hides_sizes:
        raise unsupported("file", f"transcriptions are off: {HIDES_SIZES}")
    file = form.get("file")
    if not isinstance(file, UploadFile):
        raise ApiError(400, "file is missing; it is required", param="file", code="missing_required_parameter")
    encoder = pair.known.target.encoder
    if not encoder.sample_rate:
        raise ApiError(404, f"the model {pair.name!r} takes no speech", param="model", code="model_not_found")
    kind = text_fields.get("response_format", "json")
    has_times = kind in ("verbose_json", "srt", "vtt") and bool(encoder.first_timestamp_token_id)
    try:
        temperature = _temperature(text_fields.get("temperature") or "0")
        with audio.request() as check:
            async with asyncio.timeout(timeout):
                samples = await asyncio.to_thread(read_samples, await file.read(), None, encoder.sample_rate, check)
                await form.close()  # the samples may be in memory for minutes; the file need not be
                transcription = pair.transcribe(
                    samples,
                    language=text_fields.get("language") or None,
                    timestamps=has_times,
                    timeout=timeout,
                    temperature=temperature,
                    metadata=metadata,
                )
                await transcription.wait()
    except TimeoutError:
        text = f"the transcription did not end within {timeout:g} s"
        late = DeadlineExceeded(text, code=grpc.StatusCode.DEADLINE_EXCEEDED, reason=UNSPECIFIED)
        raise of_service(late) from None
    except ImportError as error:
        raise ApiError(501, "this server is installed without the extra `audio`") from error
    except OutriderError as error:
        raise of_service(error, names=_NAMES, models=pair.paths) from error
    return _answer(kind, transcription, text_fields.get("language"))


async def read_form(request: Request) -> FormData:
    """The form of the body, in memory: there may be no disk to write to."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "multipart/form-data":
        raise ApiError(400, f"the body is of the type {kind!r}; it must be multipart/form-data", code="invalid_body")
    parser = MultiPartParser(request.headers, request.stream(), max_files=1, max_fields=16)
    parser.spool_max_size = AUDIO_BYTES + 1
    try:
        return await parser.parse()
    except (MultiPartException, KeyError) as error:  # KeyError: without a boundary
        raise ApiError(400, f"the body is not a form: {error}", code="invalid_body") from None


def _fields(form: FormData) -> dict[str, str]:
    """The fields that are text."""
    found: dict[str, str] = {}
    for name, value in form.multi_items():
        if name == "file":
            continue
        if name not in (*_FIELDS, *_GRANULARITIES):
            raise unsupported(name, f"there is no field {name}")
        if not isinstance(value, str):
            raise invalid(name, f"{name} is a file; it must be text")
        if name in _GRANULARITIES:
            if value != "segment":
                raise unsupported("timestamp_granularities", f"{name} is {value!r}; it must be 'segment'")
            continue
        found[name] = value
    if found.get("response_format", "json") not in _FORMATS:
        text = f"response_format is {found['response_format']!r}; it must be one of {', '.join(_FORMATS)}"
        raise invalid("response_format", text)
    for name, neutral in (("prompt", ("",)), ("stream", ("", "false", "False")), ("include", ("",))):
        if found.get(name, "") not in neutral:
            raise unsupported(name, f"{name} is set; this server does not support it: leave it out")
    return found


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise invalid("temperature", f"temperature is {text!r}; it must be a number")
    return value


# ---------------------------------------------------------------------------------------------------------- answers


def _answer(kind: str, found: AsyncTranscription, language: str | None) -> Response:
    match kind:
        case "text":
            return _plain(found.text + "\n")
        case "srt":
            return _plain(_subtitles(found.segments, ","))
        case "vtt":
            return _plain("WEBVTT\n\n" + _subtitles(found.segments, "."))
    body: dict[str, Any] = {"text": found.text, "usage": {"type": "duration", "seconds": math.ceil(found.duration)}}
    if kind == "verbose_json":
        body |= {"task": "transcribe", "language": language, "duration": found.duration}
        body["segments"] = [
            {"id": i, "start": each.start, "end": each.end, "text": each.text, "tokens": list(each.token_ids)}
            for i, each in enumerate(found.segments)
        ]
    return Response(json.dumps(body), media_type="application/json")


def _plain(text: str) -> Response:
    return Response(text, media_type="text/plain")


def _subtitles(segments: Sequence[Segment], comma: str) -> str:
    blocks = [
        f"{i}\n{_time(each.start, comma)} --> {_time(each.end, comma)}\n{each.text.strip()}\n"
        for i, each in enumerate(segments, 1)
    ]
    return "\n".join(blocks)


def _time(seconds: float, comma: str) -> str:
    whole, thousandths = divmod(round(seconds * 1000), 1000)
    minutes, second = divmod(whole, 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour:02d}:{minute:02d}:{second:02d}{comma}{thousandths:03d}"
