"""Clips of speech for measurements: the audio files of a user, cut into windows that a model takes at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from outrider.client import Options, OutriderError, Prompt
from outrider.client.audio import Samples, read_samples
from outrider.evaluation import EvaluationError
from protos.outrider.v1 import model_pb2

SUFFIXES = (".wav", ".flac", ".ogg", ".mp3")
"""Of the files that are read in a folder."""


@dataclass(frozen=True, slots=True)
class Clip:
    """Speech that a request asks about.

    Attributes:
        samples: at most a window.
        language: of the text; empty is the model's default.
        task: `transcribe` or `translate`; empty is the model's default.
        timestamps: the model writes timestamps.
    """

    samples: Samples
    language: str = ""
    task: str = ""
    timestamps: bool = False

    @property
    def options(self) -> Options:
        """Of a request, in place of a prompt."""
        options = Options(audio=self.samples, timestamps=self.timestamps)
        if self.language:
            options["language"] = self.language
        if self.task:
            options["task"] = self.task
        return options


Source: TypeAlias = Prompt | Clip
"""What a target continues or transcribes."""


def request_of(source: Source) -> tuple[Prompt | None, Options]:
    """Return the prompt of a request, if there is one, and the options of speech."""
    return (None, source.options) if isinstance(source, Clip) else (source, Options())


def clips_for(target: model_pb2.ModelInfo, audio: Sequence[Path], **options: Any) -> list[Clip]:
    """Return the windows of audio for a target, with options of `Clip`; none if it takes text and no path is given.

    Raises:
        EvaluationError: the target takes speech and no path is given, or the reverse; or a clip cannot be used.
    """
    if target.encoder.kind != model_pb2.ENCODER_KIND_SPEECH:
        if audio:
            raise EvaluationError(
                f"--audio is given, and the target {target.name} takes no speech: give --prompts-file"
            )
        return []
    if not audio:
        raise EvaluationError(f"the target {target.name} takes speech: give --audio FILE_OR_FOLDER")
    windows = read_clips(audio, target.encoder.sample_rate, target.encoder.frames)
    return [Clip(samples, **options) for samples in windows]


def refuse_speech(target: model_pb2.ModelInfo, command: str) -> None:
    """Raises `EvaluationError` if a target takes speech: it names the commands that measure it."""
    if target.encoder.kind == model_pb2.ENCODER_KIND_SPEECH:
        raise EvaluationError(
            f"the target {target.name} takes speech, and {command} takes text: outrider bench --audio measures its "
            "speed, outrider alpha --audio the acceptance"
        )


def read_clips(paths: Sequence[Path], sample_rate: int, frames: int) -> list[Samples]:
    """Return the windows of all clips, in turn.

    Args:
        paths: files, and folders of files.
        sample_rate: as the model takes it.
        frames: of 10 ms that the model takes at once; the last window of a clip may be shorter.

    Raises:
        EvaluationError: a file cannot be read, the extra `audio` is not installed, or a folder has no audio.
    """
    windows: list[Samples] = []
    for file in [file for path in paths for file in _files(path)]:
        try:
            samples = read_samples(file, None, sample_rate)
        except OutriderError as error:
            raise EvaluationError(f"--audio {file}: {error.message.removeprefix('audio: ')}") from error
        except ImportError as error:
            raise EvaluationError(str(error)) from error
        windows += [samples.part(begin, frames) for begin in range(0, samples.frames, frames)]
    return windows


def _files(path: Path) -> list[Path]:
    """The file, or those of the folder with one of `SUFFIXES`, in the order of their names."""
    if not path.is_dir():
        return [path]
    found = sorted(each for each in path.iterdir() if each.suffix.lower() in SUFFIXES)
    if not found:
        raise EvaluationError(f"--audio {path}: the folder has no file that ends in {', '.join(SUFFIXES)}")
    return found
