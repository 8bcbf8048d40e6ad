"""GGUF files: where they are, and their metadata. The values of arrays of text are skipped, their lengths kept."""

import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from huggingface_hub import hf_hub_download

from outrider.runtime.errors import CheckpointError

MAGIC = b"GGUF"
SUFFIX = ".gguf"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_LONG_FACTORS = "rope_factors_long.weight"
_PART = re.compile(r"-\d{5}-of-(\d{5})\.gguf$")
# struct's format of each type of GGUF.
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True, slots=True)
class Texts:
    """An array of text, whose values were skipped.

    Attributes:
        length: how many there are.
    """

    length: int


def is_gguf(name: str) -> bool:
    """Whether a model's name is that of a GGUF file: a path, or `ORG/MODEL/FILE.gguf` on the hub."""
    return name.lower().endswith(SUFFIX)


def parts(name: str) -> list[str]:
    """The names of all files of a model that is split (`NAME-00001-of-00003.gguf`); else `name` alone."""
    found = _PART.search(name)
    if found is None:
        return [name]
    return [f"{name[: found.start()]}-{number + 1:05}-of-{found[1]}.gguf" for number in range(int(found[1]))]


def resolve_file(name: str, revision: str | None = None) -> Path:
    """The local GGUF file of `name`. A file of the hub that is not in the local cache is downloaded, with all parts of
    its model.

    Raises:
        CheckpointError: there is no such file, or the hub cannot be reached.
    """
    path = Path(name).expanduser()
    if path.is_file():
        return path
    organisation, model, file = (*name.split("/", 2), "", "")[:3]
    if path.is_absolute() or name.startswith(("./", "../", "~")) or not file:
        raise CheckpointError(f"there is no file '{name}'; give a GGUF file, or a file of the hub: ORG/MODEL/FILE.gguf")
    try:
        found = {part: hf_hub_download(f"{organisation}/{model}", part, revision=revision) for part in parts(file)}
        return Path(found[file])
    except Exception as error:  # of many types, from the hub's client
        raise CheckpointError(
            f"'{name}' is not a file here, and cannot be downloaded from the hub: {type(error).__name__}: {error}"
        ) from error


def read_metadata(path: Path) -> dict[str, Any]:
    """The metadata of a GGUF file.

    Raises:
        CheckpointError: it cannot be opened, is no GGUF file, or is cut off.
    """
    return read(path)[0]


def has_long_factors(path: Path, tensors: list[str]) -> bool:
    """Whether a model has other rotary embeddings for long contexts (longrope). `tensors` are those of its first file.

    Raises:
        CheckpointError: see `read_metadata`.
    """
    others = (read(Path(file))[1] for file in parts(str(path))[1:])
    return any(_LONG_FACTORS in names for names in (tensors, *others))


def read(path: Path) -> tuple[dict[str, Any], list[str]]:
    """The metadata of a GGUF file, and the names of its tensors; raises as `read_metadata`."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise CheckpointError(f"cannot read '{path}': {error}") from error
    with file:
        magic = file.read(4)
        if magic != MAGIC:
            raise CheckpointError(f"'{path}' is not a GGUF file: it begins with {magic!r}, not {MAGIC!r}")
        try:
            (version,) = struct.unpack("<I", file.read(4))
            if version not in _VERSIONS:
                raise CheckpointError(f"'{path}' has version {version} of GGUF; versions 2 and 3 are supported")
            tensors, count = struct.unpack("<QQ", file.read(16))
            found, names = {}, []
            for _ in range(count):
                key = _text(file)
                (kind,) = struct.unpack("<I", file.read(4))
                found[key] = _value(file, kind)
            for _ in range(tensors):
                names.append(_text(file))
                (dimensions,) = struct.unpack("<I", file.read(4))
                file.seek(8 * dimensions + 12, 1)  # the dimensions, type and offset
        # A damaged length gives any of the last four.
        except (struct.error, KeyError, ValueError, OSError, MemoryError, OverflowError) as error:
            raise CheckpointError(
                f"'{path}' is cut off or damaged: its metadata cannot be read; copy it again"
            ) from error
    return found, names


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == _STRING:
        return _text(file)
    if kind != _ARRAY:
        return _numbers(file, kind, 1)[0]
    inner, length = struct.unpack("<IQ", file.read(12))
    if inner == _STRING:
        for _ in range(length):
            file.seek(struct.unpack("<Q", file.read(8))[0], 1)
        return Texts(length)
    return list(_numbers(file, inner, length))


def _numbers(file: BinaryIO, kind: int, count: int) -> tuple[Any, ...]:
    form = f"<{count}{_FORMATS[kind]}"
    return struct.unpack(form, file.read(struct.calcsize(form)))


def _text(file: BinaryIO) -> str:
    (size,) = struct.unpack("<Q", file.read(8))
    text = file.read(size)
    if len(text) < size:
        raise struct.error
    return text.decode()
