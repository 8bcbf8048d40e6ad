"""Encoder–decoder pairs through both services: client and command line return the text of transformers, also
of a lost stream.
"""

import asyncio
import json
import re
import shlex
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from outrider.cli import main
from outrider.cli.transcribe import _line
from outrider.client import AsyncClient, AsyncTranscription, Client, Event, FailedPrecondition, InvalidRequest, Segment
from tests.encoder_decoders import (
    DE,
    EOS,
    FIRST_TIMESTAMP,
    FRAMES,
    MAX_TOKENS,
    RATE,
    decoder_prompt,
    features,
    generated,
    noise,
    segments_of,
    serving_all,
    tokenizer,
    transcribed,
)
from tests.proxy import Proxy, Way

soundfile = pytest.importorskip("soundfile")
pytest.importorskip("soxr")

COUNT = 30
"""Tokens of a window."""
GREEDY: dict[str, Any] = {"temperature": 0, "max_new_tokens": COUNT}


@pytest.fixture(scope="module")
def addresses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Of a draft service, by its model."""
    with serving_all(tmp_path_factory.mktemp("pairs")) as pairs:
        yield {name: pairs(name).draft.address for name in ("t5", "whisper")}


@pytest.fixture
def address(addresses: dict[str, str]) -> str:
    return addresses["whisper"]


@pytest.fixture(scope="module")
def talk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """2.9 s, three windows at least."""
    path = tmp_path_factory.mktemp("talk") / "talk.flac"
    soundfile.write(path, noise(2.9, seed=1), RATE)
    return path


def test_a_window_is_what_transformers_writes(address: str) -> None:
    samples = noise(0.8)
    with Client(address) as client:
        for language in ("en", "de"):
            expected = transcribed(samples, timestamps=False, language=language, count=COUNT)
            spoken = {**GREEDY, "language": language, "task": "transcribe"}
            by_audio = client.complete(audio=samples, sample_rate=RATE, **spoken)
            by_features = client.complete(features=features(samples), **spoken)
            prompt = by_audio.started.prompt_token_ids
            prompted = client.complete(features=features(samples), decoder_prompt_token_ids=prompt, **GREEDY)
            for completion in (by_audio, by_features, prompted):
                assert [token for token in completion.token_ids if token != EOS] == expected
            assert by_audio.text == tokenizer().decode(expected, skip_special_tokens=True)


def segments(samples: Any) -> list[tuple[float, float, list[int]]]:
    """By transformers. The features of a window are those of its own samples."""
    seek, found, total = 0, list[Any](), len(samples) // 160
    while seek < total:
        frames = min(FRAMES, total - seek)
        window = samples[seek * 160 : (seek + frames) * 160]
        new, advance = segments_of(transcribed(window, timestamps=True, count=COUNT), seek, frames)
        found += new
        seek += advance
    return found


def test_long_audio_is_cut_as_by_transformers(address: str, talk: Path) -> None:
    expected = [each for each in segments(noise(2.9, seed=1)) if _text(each[2]).strip()]
    with Client(address) as client:
        transcription = client.transcribe(talk, language="en", max_new_tokens=COUNT)
        positions = [transcription.position for _ in transcription]
    assert len(transcription.segments) == len(expected) > 3
    for segment, (start, end, tokens) in zip(transcription.segments, expected, strict=True):
        assert [segment.start, segment.end] == pytest.approx([start, end], abs=0.02)
        assert list(segment.token_ids) in (tokens, tokens[:-1])
        assert segment.text == _text(tokens)
    assert positions == sorted(positions)
    assert transcription.duration == transcription.position == pytest.approx(2.9)
    assert len(transcription.completions) >= 3
    content = talk.read_bytes()

    async def run() -> AsyncTranscription:
        async with AsyncClient(address) as client:
            return await client.transcribe(content, language="en", timestamps=True, max_new_tokens=COUNT).wait()

    again = asyncio.run(run())
    assert again.segments == transcription.segments
    assert again.text == transcription.text


def _text(tokens: list[int]) -> str:
    words = [token for token in tokens if token < FIRST_TIMESTAMP]
    return str(tokenizer().decode(words, skip_special_tokens=True))


def test_short_audio_without_timestamps_is_one_segment(address: str) -> None:
    samples = noise(0.5)
    with Client(address) as client:
        (segment,) = client.transcribe(samples, sample_rate=RATE).wait().segments
    assert list(segment.token_ids) == transcribed(samples, timestamps=False, count=MAX_TOKENS - 4)
    assert (segment.start, segment.end) == (0.0, 0.5)


async def test_a_transcription_ends_its_call_before_its_close_returns(address: str, talk: Path) -> None:
    class Watched(AsyncClient):
        calls = 0

        async def generate(self, *arguments: Any, **options: Any) -> AsyncGenerator[Event, None]:
            self.calls += 1
            try:
                async with aclosing(super().generate(*arguments, **options)) as events:
                    async for event in events:
                        yield event
            finally:
                await asyncio.sleep(0)
                self.calls -= 1

    async with Watched(address) as client:
        transcription = client.transcribe(talk, language="en", max_new_tokens=COUNT)
        await anext(aiter(transcription))
        assert client.calls == 1
        await transcription.aclose()
        assert client.calls == 0


def test_each_window_has_a_seed_of_its_own(address: str, talk: Path) -> None:
    with Client(address) as client:
        both = [client.transcribe(talk, temperature=1.0, seed=5, max_new_tokens=8).wait() for _ in range(2)]
        with pytest.raises(InvalidRequest, match=r"audio has 2\.90 s; at most 1 s at once with this model"):
            client.complete(audio=talk)
        unfit: list[Any] = [{"n": 2}, {"frame_bytes": 512}]
        for options in unfit:
            with pytest.raises(InvalidRequest, match=f"{next(iter(options))} is set; leave it out"):
                client.transcribe(talk, **options).wait()
    assert both[0].segments == both[1].segments
    seeds = [completion.seed for completion in both[0].completions]
    assert seeds == list(range(5, 5 + len(seeds)))


PROMPT = "translate this, please."


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("t5", {"prompt": PROMPT}),
        ("t5", {"prompt": tokenizer().encode(PROMPT)}),
        ("whisper", {
            "prompt": None, "audio": noise(1.0, seed=2), "sample_rate": RATE, "language": "de", "timestamps": True
        }),
    ],
    ids=["text", "token ids", "speech"],
)  # fmt: skip
async def test_a_lost_stream_continues_with_the_same_input(
    addresses: dict[str, str], name: str, own: dict[str, Any]
) -> None:
    """Cut at some bytes; language and timestamps are in the decoder's prompt of the continued request."""
    options = {**own, "temperature": 1.0, "seed": 3, "max_new_tokens": 40, "ignore_eos": True, "gamma": 2}
    options["joined_responses"] = False  # else nothing has come when the stream is cut
    prompt = decoder_prompt(name, language=DE, timestamps=True)
    resumes = 0
    with Proxy(addresses[name]) as first, Proxy(addresses[name]) as second:
        async with AsyncClient(first.address) as client:
            with first.recording() as seen:
                whole = await client.complete(**options)
            total = sum(len(segment.data) for segment in seen if segment.way is Way.DOWN)
        for nth, share in enumerate((0.6, 0.75, 0.9, 0.65, 0.7, 0.8)):
            if nth >= 3 and resumes >= 2:
                break  # more cuts for a busy machine, where a stream has fewer bytes and may end before one
            for proxy in (first, second):
                proxy.cut_after(round(share * total), Way.DOWN)
            async with AsyncClient([first.address, second.address]) as client:
                broken = await client.complete(**options)
            for proxy in (first, second):
                proxy.heal()
            resumes += broken.samples[0].num_resumes
            for each in (whole, broken):
                assert (each.text, each.token_ids) == (whole.text, whole.token_ids)
                assert list(each.started.prompt_token_ids) == prompt
    assert resumes >= 2


def test_generate_prints_what_transformers_writes(addresses: dict[str, str]) -> None:
    for prompt in (PROMPT, "a", "what is it?"):
        expected = generated("t5", torch.tensor(tokenizer().encode(prompt)), 24)
        arguments = f"--draft {addresses['t5']} --temperature 0 --max-new-tokens 24 {shlex.quote(prompt)}"
        assert _run("generate", arguments) == tokenizer().decode(expected, skip_special_tokens=True) + "\n"


def _run(command: str, line: str) -> str:
    done = CliRunner().invoke(main, [command, *shlex.split(line)], prog_name="outrider")
    assert (done.exit_code, done.stderr) == (0, "")
    return done.stdout


def test_the_command_prints_segments_and_json(address: str, tmp_path: Path) -> None:
    talk = tmp_path / "talk.flac"
    soundfile.write(talk, noise(1.9, seed=1), RATE)
    with Client(address) as client:
        expected = client.transcribe(talk, language="de", max_new_tokens=COUNT).wait()
    options = f"--draft {address} {talk} --language de --max-new-tokens {COUNT}"
    document = json.loads(_run("transcribe", f"{options} --json"))
    assert document["text"] == expected.text
    assert document["duration"] == pytest.approx(1.9)
    assert [Segment(**each | {"token_ids": tuple(each["token_ids"])}) for each in document["segments"]] == (
        expected.segments
    )
    assert len(document["windows"]) == len(expected.completions) > 1
    plain = _run("transcribe", options)
    assert plain == "".join(f"{segment.text.strip()}\n" for segment in expected.segments)
    timed = _run("transcribe", f"{options} --timestamps")
    first = expected.segments[0]
    assert timed.startswith(f"[00:{first.start:05.2f} - 00:{first.end:05.2f}] {first.text.strip()}\n")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("whisper", b"no audio", "outrider: INVALID_ARGUMENT: audio: cannot decode"),
        ("whisper", np.zeros(0), "audio has no samples"),
        ("t5", np.zeros(1600), "outrider: FAILED_PRECONDITION: .* has no speech encoder, and takes text"),
    ],
)
def test_the_command_fails_in_one_line(
    addresses: dict[str, str], tmp_path: Path, name: str, content: Any, message: str
) -> None:
    path = tmp_path / "x.wav"
    path.write_bytes(content) if isinstance(content, bytes) else soundfile.write(path, content, RATE)
    done = CliRunner().invoke(main, ["transcribe", "--draft", addresses[name], str(path)], prog_name="outrider")
    assert (done.exit_code, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert re.search(message, line)


def test_a_model_of_text_refuses_speech(addresses: dict[str, str]) -> None:
    with Client(addresses["t5"]) as client:
        for call in (client.complete, lambda audio: client.transcribe(audio).wait()):
            with pytest.raises(FailedPrecondition, match="no speech encoder, and takes text"):
                call(audio=Path("no.wav"))
        with pytest.raises(InvalidRequest, match="transcription"):
            client.complete("a", language="en")


@pytest.mark.parametrize(
    ("segment", "line"),
    [
        (Segment(0.0, 2.5, " Hello", ()), "[00:00.00 - 00:02.50] Hello"),
        (Segment(59.999, 3600.1, "x", ()), "[01:00.00 - 1:00:00.10] x"),
    ],
)
def test_times_of_a_line(segment: Segment, line: str) -> None:
    assert _line(segment, True) == line
    assert _line(segment, False) == segment.text.strip()
