"""`outrider transcribe`: the text of speech, from a draft service that runs already."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from outrider.cli.options import (
    calling_options,
    connected,
    draft_option,
    request_of,
    retry_timeout_option,
    sampling_options,
    temperature_option,
    timeout_option,
)
from outrider.cli.output import Failure, ended_document, started_document, warn_of_loss, write_json
from outrider.cli.progress import progress
from outrider.client import Segment, Transcription


@click.command("transcribe", short_help="The text of speech, from a file.")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, allow_dash=True))
@draft_option("the text continues")
@click.option("--language", metavar="NAME", help="Language of the speech, for example en. Default: the model's.")
@click.option("--task", metavar="NAME", help="transcribe, or translate (into English). Default: transcribe.")
@click.option("--timestamps", is_flag=True, help="Print the times of each segment.")
@click.option(
    "--max-new-tokens",
    type=int,
    help="Maximum tokens to generate for each window of audio. Default: as many as the model can.",
)
@timeout_option("Time after which a window of audio fails.")
@retry_timeout_option("a window")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end instead of text.")
@calling_options
@temperature_option("0")
@sampling_options
def transcribe_command(
    file: str, draft: str, timeout: float, retry_timeout: float | None, as_json: bool, **values: Any
) -> None:
    """Write down the speech in FILE; `-` reads the file from standard input.

    FILE is WAV, FLAC, OGG or MP3, of any sample rate and length, for a pair of speech models. Text goes to stdout, one
    segment a line, and a progress bar to stderr, if that is a terminal. Needs the extra `audio`.

    \b
    outrider transcribe talk.wav
    outrider transcribe --language de --task translate --timestamps talk.mp3
    outrider transcribe --json - < talk.flac
    """  # noqa: D301  # click reads the backspace: no rewrapping of the paragraph
    audio = sys.stdin.buffer.read() if file == "-" else Path(file)
    with connected(draft, timeout, retry_timeout, values) as client:
        shows_times = values["timestamps"]
        options: dict[str, Any] = dict(request_of(values))
        transcription = client.transcribe(audio, **options)
        try:
            with progress("s", with_lines=False) as update:
                update("Transcribing", 0, 0)
                for segment in transcription:
                    if not as_json:
                        click.echo(_line(segment, shows_times))
                    update("Transcribing", round(transcription.position), round(transcription.duration))
        except ImportError as error:
            raise Failure(str(error)) from error
    if as_json:
        write_json(_document(transcription))
    else:
        warn_of_loss(transcription.completions[0].started)


def _line(segment: Segment, shows_times: bool) -> str:
    text = segment.text.strip()
    return f"[{_time(segment.start)} - {_time(segment.end)}] {text}" if shows_times else text


def _time(seconds: float) -> str:
    """As `[hours:]minutes:seconds`, with hundredths."""
    hundredths = round(seconds * 100)
    hours, rest = divmod(hundredths, 360_000)
    minutes, rest = divmod(rest, 6_000)
    text = f"{minutes:02d}:{rest // 100:02d}.{rest % 100:02d}"
    return f"{hours}:{text}" if hours else text


def _document(transcription: Transcription) -> dict[str, Any]:
    return {
        "text": transcription.text,
        "duration": transcription.duration,
        "segments": [asdict(segment) for segment in transcription.segments],
        "windows": [ended_document(completion) for completion in transcription.completions],
        **started_document(transcription.completions[0].started),
    }
