"""Clips of speech for measurements: the audio files of a user, cut into windows that a model takes at once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from outrider.client import OutriderError
from outrider.client.audio import Samples, read_samples

SUFFIXES = (".wav", ".flac", ".ogg", ".mp3")
"""Of the files that are read in a folder."""


class ClipError(Exception):
    """A clip cannot be used. The text is one line."""


def find_clips(paths: Sequence[Path]) -> list[Path]:
    """Return the files, and those of each folder with one of `SUFFIXES`, in the order of their names.

    Raises:
        ClipError: a folder has none.
    """
    found: list[Path] = []
    for path in paths:
        if not path.is_dir():
            found.append(path)
            continue
        own = sorted(each for each in path.iterdir() if each.suffix.lower() in SUFFIXES)
        if not own:
            raise ClipError(f"--audio {path}: the folder has no file that ends in {', '.join(SUFFIXES)}")
        found += own
    return found


def read_clips(paths: Sequence[Path], sample_rate: int, frames: int) -> list[Samples]:
    """Return the windows of all clips, in turn.

    Args:
        paths: files, and folders of files.
        sample_rate: as the model takes it.
        frames: of 10 ms that the model takes at once; the last window of a clip may be shorter.

    Raises:
        ClipError: a file cannot be read, the extra `audio` is not installed, or a folder has no audio.
    """
    windows: list[Samples] = []
    for path in find_clips(paths):
        try:
            samples = read_samples(path, None, sample_rate)
        except OutriderError as error:
            raise ClipError(f"--audio {path}: {error.message.removeprefix('audio: ')}") from error
        except ImportError as error:
            raise ClipError(str(error)) from error
        windows += [samples.part(begin, frames) for begin in range(0, samples.frames, frames)]
    return windows
