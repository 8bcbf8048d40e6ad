"""Speech through both services: what the client and the command line return is what transformers writes."""

import asyncio
import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from outrider.cli import main
from outrider.client import AsyncClient, AsyncTranscription, Client, Completion, InvalidRequest, Options, Segment
from tests.cluster import Cluster, wait_healthy
from tests.outrider.client.speech_pair import RATE, SpeechPair
from tests.proxy import Proxy, Way

soundfile = pytest.importorskip("soundfile")
pytest.importorskip("soxr")

COUNT = 30
"""Tokens of a window."""
GREEDY: dict[str, Any] = {"temperature": 0, "max_new_tokens": COUNT}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> SpeechPair:
    return SpeechPair(tmp_path_factory.mktemp("speech"))


@pytest.fixture(scope="module")
def address(pair: SpeechPair) -> Iterator[str]:
    with Cluster() as cluster:
        verifier = cluster.verifier(model=pair.target)
        draft = cluster.draft(verifier, model=pair.draft)
        wait_healthy(verifier, draft)
        yield draft.address


def noise(seconds: float, seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(-9000, 9000, round(seconds * RATE), dtype="int16")


@pytest.fixture(scope="module")
def talk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """4.7 s, five windows at least."""
    path = tmp_path_factory.mktemp("talk") / "talk.flac"
    soundfile.write(path, noise(4.7, seed=1), RATE)
    return path


def test_a_window_is_what_transformers_writes(pair: SpeechPair, address: str) -> None:
    samples = noise(0.8)
    with Client(address) as client:
        for language in ("en", "de"):
            expected = pair.written(samples, timestamps=False, language=language, count=COUNT)
            spoken = {**GREEDY, "language": language, "task": "transcribe"}
            by_audio = client.complete(audio=samples, sample_rate=RATE, **spoken)
            by_features = client.complete(features=pair.features(samples), **spoken)
            prompted = client.complete(
                features=pair.features(samples),
                decoder_prompt_token_ids=by_audio.started.prompt_token_ids,
                **GREEDY,
            )
            for completion in (by_audio, by_features, prompted):
                assert [token for token in completion.token_ids if token != pair.tokenizer.eos_token_id] == expected
            assert by_audio.text == pair.tokenizer.decode(expected, skip_special_tokens=True)


def assert_expected(pair: SpeechPair, segments: list[Segment], expected: list[Any]) -> None:
    assert len(segments) == len(expected) > 5
    for segment, (start, end, tokens) in zip(segments, expected, strict=True):
        assert [segment.start, segment.end] == pytest.approx([start, end], abs=0.02)
        assert list(segment.token_ids) in (tokens, tokens[:-1])
        assert segment.text == _text(pair, tokens)


def test_long_audio_is_cut_as_by_transformers(pair: SpeechPair, address: str, talk: Path) -> None:
    expected = [each for each in pair.segments(noise(4.7, seed=1), count=COUNT) if _text(pair, each[2]).strip()]
    with Client(address) as client:
        transcription = client.transcribe(talk, language="en", max_new_tokens=COUNT)
        positions = [transcription.position for _ in transcription]
    assert_expected(pair, transcription.segments, expected)
    assert positions == sorted(positions)
    assert transcription.duration == transcription.position == pytest.approx(4.7)
    assert len(transcription.completions) >= 5
    content = talk.read_bytes()

    async def run() -> AsyncTranscription:
        async with AsyncClient(address) as client:
            return await client.transcribe(content, language="en", timestamps=True, max_new_tokens=COUNT).wait()

    again = asyncio.run(run())
    assert again.segments == transcription.segments
    assert again.text == transcription.text


def _text(pair: SpeechPair, tokens: list[int]) -> str:
    words = [token for token in tokens if token < pair.first_timestamp]
    return str(pair.tokenizer.decode(words, skip_special_tokens=True))


def test_short_audio_without_timestamps_is_one_segment(pair: SpeechPair, address: str) -> None:
    samples = noise(0.5)
    with Client(address) as client:
        (segment,) = client.transcribe(samples, sample_rate=RATE).wait().segments
    limit = 60 - 4
    assert list(segment.token_ids) == pair.written(samples, timestamps=False, count=limit)
    assert (segment.start, segment.end) == (0.0, 0.5)


def test_each_window_has_a_seed_of_its_own(address: str, talk: Path) -> None:
    with Client(address) as client:
        both = [client.transcribe(talk, temperature=1.0, seed=5, max_new_tokens=8).wait() for _ in range(2)]
        with pytest.raises(InvalidRequest, match=r"audio has 4\.70 s, and the model takes at most 1 s at once"):
            client.complete(audio=talk)
        with pytest.raises(InvalidRequest, match="n is not for transcribe"):
            client.transcribe(talk, n=2).wait()
    assert both[0].segments == both[1].segments
    seeds = [completion.seed for completion in both[0].completions]
    assert seeds == list(range(5, 5 + len(seeds)))


async def test_a_lost_stream_continues_with_the_same_speech(address: str) -> None:
    """Cut at many bytes; language and timestamps are in the decoder's prompt of the continued request."""
    samples = noise(1.0, seed=2)
    options: Options = {
        "audio": samples, "sample_rate": RATE, "language": "de", "timestamps": True, "gamma": 2,
        "temperature": 1.0, "seed": 3, "max_new_tokens": 50, "ignore_eos": True,
    }  # fmt: skip

    def result(completion: Completion) -> Any:
        return completion.text, completion.token_ids, completion.started.prompt_token_ids

    with Proxy(address) as first, Proxy(address) as second:
        async with AsyncClient(first.address) as client:
            with first.recording() as seen:
                whole = await client.complete(**options)
            total = sum(len(segment.data) for segment in seen if segment.way is Way.DOWN)
        resumes = 0
        for share in (0.6, 0.75, 0.9):
            first.cut_after(round(share * total), Way.DOWN)
            async with AsyncClient([first.address, second.address]) as client:
                broken = [await client.complete(**options) for _ in range(2)]  # one of them through the first
            first.heal()
            resumes += sum(completion.samples[0].num_resumes for completion in broken)
            assert [result(each) for each in broken] == [result(whole)] * 2
    assert resumes >= 2


def _transcribe(address: str, line: str) -> str:
    arguments = ["transcribe", "--draft", address, *shlex.split(line)]
    done = CliRunner().invoke(main, arguments, prog_name="outrider")
    assert (done.exit_code, done.stderr) == (0, "")
    return done.stdout


def test_the_command_prints_segments_and_json(address: str, talk: Path) -> None:
    with Client(address) as client:
        expected = client.transcribe(talk, language="de", max_new_tokens=COUNT).wait()
    options = f"{talk} --language de --max-new-tokens {COUNT}"
    document = json.loads(_transcribe(address, f"{options} --json"))
    assert document["text"] == expected.text
    assert document["duration"] == pytest.approx(4.7)
    assert [Segment(**each | {"token_ids": tuple(each["token_ids"])}) for each in document["segments"]] == (
        expected.segments
    )
    assert len(document["windows"]) == len(expected.completions)
    plain = _transcribe(address, options)
    assert plain == "".join(f"{segment.text.strip()}\n" for segment in expected.segments)
    timed = _transcribe(address, f"{options} --timestamps")
    first = expected.segments[0]
    assert timed.startswith(f"[00:{first.start:05.2f} - 00:{first.end:05.2f}] {first.text.strip()}\n")


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"no audio", "outrider: INVALID_ARGUMENT: audio: cannot decode"), (None, "audio has no samples")],
)
def test_the_command_fails_in_one_line(address: str, tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "x.wav"
    if content is None:
        soundfile.write(path, np.zeros(0), RATE)
    else:
        path.write_bytes(content)
    done = CliRunner().invoke(main, ["transcribe", "--draft", address, str(path)], prog_name="outrider")
    assert (done.exit_code, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert message in line
