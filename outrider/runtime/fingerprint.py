"""Fingerprints: whether two services hold the same weights, or the same vocabulary, without reading everything.

It knows nothing of models or of how a tokenizer splits text.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from outrider.runtime.errors import CheckpointError

# Where a configuration was saved, and by which release, changes no logit.
_PROVENANCE = frozenset({"_name_or_path", "transformers_version"})

_SAMPLES = 64  # places read in each weights file, spread evenly, first and last included
_SAMPLE_BYTES = 4096


class HasVocabulary(Protocol):
    """The part of a tokenizer that a fingerprint needs."""

    def get_vocab(self) -> Mapping[str, int]:
        """Token to id, added tokens included."""


def weights_fingerprint(folder: str | os.PathLike[str]) -> str:
    """SHA-256, in hex, over the configuration, the safetensors headers and a sample of each weights file's bytes.

    A change in the configuration, in a tensor's name, type or shape, or at a sampled place changes it. It never reads a
    large file whole: 64 places of 4 KiB in each.

    Raises:
        CheckpointError: the folder has no configuration or no weights.
    """
    folder = Path(folder)
    config = folder / "config.json"
    if not config.is_file():
        raise CheckpointError(f"'{folder}' has no config.json")
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
    if not files:
        raise CheckpointError(f"'{folder}' has no weights (*.safetensors or pytorch_model*.bin)")
    digest = hashlib.sha256(_normalised(config))
    for file in files:
        _add(digest, file.name.encode())
        _add_file(digest, file)
    return digest.hexdigest()


def tokenizer_fingerprint(tokenizer: HasVocabulary) -> str:
    """SHA-256, in hex, over the map from token to id, added tokens included.

    Two tokenizers with the same fingerprint give every id the same token; how they split text may differ.
    """
    digest = hashlib.sha256()
    for token, index in sorted(tokenizer.get_vocab().items()):
        _add(digest, token.encode("utf-8", "surrogatepass"))
        _add(digest, str(index).encode())
    return digest.hexdigest()


def _normalised(config: Path) -> bytes:
    try:
        values = json.loads(config.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"'{config}' is not JSON: {error}") from error
    kept: dict[str, Any] = {key: value for key, value in values.items() if key not in _PROVENANCE}
    return json.dumps(kept, sort_keys=True, separators=(",", ":")).encode()


def _add_file(digest: "hashlib._Hash", path: Path) -> None:
    size = path.stat().st_size
    with path.open("rb") as file:
        start = 0
        if path.suffix == ".safetensors":
            length = int.from_bytes(file.read(8), "little")
            if 8 + length > size:
                raise CheckpointError(f"'{path}' is cut off: its header ends at byte {8 + length} of {size}")
            _add(digest, file.read(length))
            start = 8 + length
        _add(digest, str(size).encode())
        last = max(start, size - _SAMPLE_BYTES)
        for sample in range(_SAMPLES):
            file.seek(start + (last - start) * sample // (_SAMPLES - 1))
            _add(digest, file.read(_SAMPLE_BYTES))


def _add(digest: "hashlib._Hash", part: bytes) -> None:
    """Adds a part with its length, so that no two lists of parts look alike."""
    digest.update(len(part).to_bytes(8, "little"))
    digest.update(part)
