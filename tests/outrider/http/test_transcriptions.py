"""/v1/audio/transcriptions of a pair of speech models, with OpenAI's own client too."""

import asyncio
import io
import re
import sys
import tempfile
import threading
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import soundfile
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartParser

from outrider.client import Client, Event, Transcription
from outrider.http import transcription
from outrider.http.pair import Pair
from tests.cluster import Cluster, wait_healthy
from tests.metrics import parse
from tests.outrider.http.conftest import plain, running_front
from tests.project.tree import ROOT

SPEECH = ROOT / "models" / "speech"
CLIP, LONG = SPEECH / "clips" / "en-1.wav", SPEECH / "clips" / "en-long.wav"
PATH = "/v1/audio/transcriptions"


@pytest.fixture(scope="module")
def speech_draft() -> Iterator[str]:
    """The address of a draft service."""
    with Cluster() as cluster:
        verifier = cluster.verifier(model=SPEECH / "target")
        draft = cluster.draft(verifier, model=SPEECH / "draft")
        wait_healthy(verifier, draft)
        yield draft.address


@pytest.fixture(scope="module")
def speech(speech_draft: str) -> Iterator[tuple[str, Client]]:
    """The URL of a front, and our own client of its draft service."""
    with running_front(speech_draft) as url, Client(speech_draft) as client:
        yield url, client


def test_the_text_is_that_of_our_own_client(speech: tuple[str, Client]) -> None:
    url, ours = speech
    wanted = ours.transcribe(CLIP, language="en").wait()
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as sdk, CLIP.open("rb") as file:
        found = sdk.audio.transcriptions.create(model="target", file=file, language="en")
    assert found.text == wanted.text
    answer = plain.post(url + PATH, files={"file": CLIP.read_bytes()}, data={"response_format": "text"}, timeout=60)
    assert answer.text == wanted.text + "\n"


def test_a_file_need_not_say_how_long_it_is(speech: tuple[str, Client], monkeypatch: pytest.MonkeyPatch) -> None:
    """An encoder that writes FLAC to a pipe leaves the number of samples in its header at 0."""
    url, ours = speech
    values, rate = soundfile.read(CLIP, dtype="int16")
    written = io.BytesIO()
    soundfile.write(written, values, rate, format="FLAC")
    flac = written.getvalue()
    flac = flac[:21] + bytes([flac[21] & 0xF0]) + bytes(4) + flac[26:]
    answer = plain.post(url + PATH, files={"file": flac}, timeout=60)
    assert (answer.status_code, answer.json()["text"]) == (200, ours.transcribe(CLIP).wait().text)
    monkeypatch.setattr(transcription, "MOST_SECONDS", 1)
    error = plain.post(url + PATH, files={"file": flac}, timeout=60).json()["error"]
    assert (error["param"], error["message"]) == ("file", "file has more than 1 s; cut it")


def test_audio_of_all_requests_together_is_bounded(speech: tuple[str, Client], monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that is refused or has ended takes no part of it."""
    generate, began, goes_on = Pair.generate, threading.Event(), threading.Event()

    async def held(pair: Pair, *arguments: Any, **options: Any) -> AsyncGenerator[Event, None]:
        began.set()
        await asyncio.to_thread(goes_on.wait, 60)
        async for event in generate(pair, *arguments, **options):
            yield event

    def post() -> Any:
        return plain.post(speech[0] + PATH, files={"file": CLIP.read_bytes()}, timeout=60)

    monkeypatch.setattr(Pair, "generate", held)
    monkeypatch.setattr(transcription, "MOST_AT_ONCE", 1.5 * soundfile.info(CLIP).duration)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(post)
        began.wait(60)
        refused = post()
        goes_on.set()
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    error = refused.json()["error"]
    assert error["code"] == "rate_limit_exceeded"
    assert re.fullmatch(
        r"file has \d s of audio or more, and other requests \d s; this server holds .*", error["message"]
    )
    assert [first.result().status_code, post().status_code] == [200, 200]


def test_audio_is_not_read_on_after_its_request_has_ended() -> None:
    """The thread that decodes it goes on when a client has gone."""
    audio = transcription.AudioInMemory()
    with audio.request() as check:
        check(transcription.MOST_AT_ONCE / 4)
    with pytest.raises(TimeoutError):
        check(transcription.MOST_AT_ONCE / 3)
    assert audio._seconds == 0


@pytest.fixture(scope="module")
def wanted(speech: tuple[str, Client]) -> Transcription:
    """That of `LONG` by our own client."""
    return speech[1].transcribe(LONG, timestamps=True).wait()


def test_long_audio_has_segments_with_times_and_its_windows_count_as_texts(
    speech: tuple[str, Client], wanted: Transcription
) -> None:
    url, _ = speech
    before = parse(plain.get(f"{url}/metrics").text)
    data = {"response_format": "verbose_json", "timestamp_granularities[]": "segment"}
    found = plain.post(url + PATH, files={"file": LONG.read_bytes()}, data=data, timeout=60).json()
    after = parse(plain.get(f"{url}/metrics").text)
    assert found["text"] == wanted.text
    assert found["duration"] == wanted.duration
    assert [(each["start"], each["end"], each["text"]) for each in found["segments"]] == [
        (each.start, each.end, each.text) for each in wanted.segments
    ]
    windows = wanted.completions

    def grown(name: str) -> float:
        return after[f"outrider_http_{name}"][()] - before[f"outrider_http_{name}"][()]

    assert grown("e2e_request_latency_seconds_count") == grown("time_to_first_token_seconds_count") == len(windows) > 1
    assert grown("generation_tokens_total") == sum(each.usage.completion_tokens for each in windows)
    assert grown("prompt_tokens_total") == sum(each.usage.prompt_tokens for each in windows)


def test_subtitles(speech: tuple[str, Client]) -> None:
    files = {"file": CLIP.read_bytes()}
    subtitles = plain.post(speech[0] + PATH, files=files, data={"response_format": "srt"}, timeout=60)
    assert subtitles.text.startswith("1\n00:00:")
    assert subtitles.text.count(" --> ") >= 1


def test_the_time_limit_is_of_all_windows_and_none_needs_the_file(
    speech_draft: str, wanted: Transcription, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = 4.0
    count = len(wanted.completions)
    generate, parse_form = Pair.generate, MultiPartParser.parse
    forms: list[FormData] = []
    closed: list[bool] = []

    async def kept(parser: MultiPartParser) -> FormData:
        forms.append(await parse_form(parser))
        return forms[0]

    async def slow(pair: Pair, *arguments: Any, **options: Any) -> AsyncGenerator[Event, None]:
        file = forms[0]["file"]
        assert isinstance(file, UploadFile)
        closed.append(file.file.closed)
        await asyncio.sleep(1.2 * limit / count)  # before its own time begins
        async for event in generate(pair, *arguments, **options):
            yield event

    monkeypatch.setattr(Pair, "generate", slow)
    monkeypatch.setattr(MultiPartParser, "parse", kept)
    with running_front(speech_draft, timeout=limit) as url:
        answer = plain.post(url + PATH, files={"file": LONG.read_bytes()}, data={"response_format": "srt"}, timeout=60)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (504, "deadline_exceeded"), error
    assert set(closed) == {True}


@pytest.mark.parametrize(
    ("data", "content", "status", "param"),
    [
        ({}, None, 400, "file"),
        ({}, b"RIFF", 400, "file"),
        ({}, b"", 400, "file"),
        ({"model": "whisper-1"}, b"RIFF", 404, "model"),
        ({"language": "xx"}, CLIP, 400, "language"),
        ({"prompt": "hello"}, CLIP, 400, "prompt"),
        ({"stream": "true"}, CLIP, 400, "stream"),
        ({"response_format": "xml"}, CLIP, 400, "response_format"),
        ({"temperature": "hot"}, CLIP, 400, "temperature"),
        ({"timestamp_granularities[]": "word"}, CLIP, 400, "timestamp_granularities"),
        ({"unknown": "1"}, CLIP, 400, "unknown"),
        ({}, bytes(26 * 1024 * 1024), 413, None),
    ],
)
def test_a_wrong_form_is_refused_by_name(
    speech: tuple[str, Client], data: dict[str, str], content: object, status: int, param: str | None
) -> None:
    raw = CLIP.read_bytes() if content is CLIP else content
    files: Any = {"file": ("x.wav", raw)} if raw is not None else {"model": (None, b"target")}
    answer = plain.post(speech[0] + PATH, files=files, data=data, timeout=60)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param), error
    assert str(ROOT) not in error["message"]


@pytest.mark.parametrize(("fields", "named"), [({}, "prompt"), ({"echo": True, "logprobs": 1}, "echo")])
def test_a_pair_of_speech_refuses_text(speech: tuple[str, Client], fields: dict[str, Any], named: str) -> None:
    answer = plain.post(f"{speech[0]}/v1/completions", json={"prompt": "x"} | fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, named)
    assert str(ROOT) not in answer.text


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        ("application/json", b"{}"),
        ("multipart/form-data", b"x"),
        ("multipart/form-data; boundary=x", b"no form"),
        (
            "multipart/form-data; boundary=x",
            b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nabc',
        ),
    ],
    ids=["json", "no boundary", "no form", "cut"],
)
def test_a_body_that_is_no_form_is_refused(speech: tuple[str, Client], kind: str, content: bytes) -> None:
    answer = plain.post(speech[0] + PATH, content=content, headers={"content-type": kind})
    assert answer.status_code == 400
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_without_the_extra_audio_a_transcription_is_refused(
    speech: tuple[str, Client], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package soundfile is there, but not the library that it loads."""
    (tmp_path / "soundfile.py").write_text("raise OSError('sndfile library not found')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "soundfile", raising=False)
    answer = plain.post(speech[0] + PATH, files={"file": CLIP.read_bytes()}, timeout=60)
    assert (answer.status_code, "extra `audio`" in answer.json()["error"]["message"]) == (501, True)


def test_a_large_file_stays_in_memory(speech: tuple[str, Client], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> Any:
        raise PermissionError("there is no disk")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    answer = plain.post(speech[0] + PATH, files={"file": bytes(2 << 20)})
    assert answer.status_code == 400
    assert "cannot decode" in answer.json()["error"]["message"]
