"""The files of a checkpoint: where they are, their fingerprint, and the size of the vocabulary.

An error is one line with the reason.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from kernels.generation_rules import GenerationRules
from outrider.runtime import gguf
from outrider.runtime.errors import CheckpointError

# The files of tokenizers and configurations; weights and code have patterns of their own.
TEXTS = ("*.json", "*.txt", "*.model", "*.spm", "*.jinja", "*.tiktoken")
# The same weights in the format of other programs.
OTHER_FORMATS = ("original/*", "metal/*", "consolidated*")
# Entries of a configuration that change no logit: where it was saved, and by which release.
_PROVENANCE = frozenset({"_name_or_path", "transformers_version"})
_SAMPLES, _SAMPLE_BYTES = 64, 4096  # of each weights file, spread evenly, first and last bytes included


def resolve_folder(name: str, revision: str | None = None, *, weights: bool = True, code: bool = False) -> Path:
    """The local folder of `name`. A hub id that is not in the local cache is downloaded.

    Args:
        name: a folder, or a hub id such as `org/model`.
        revision: of a hub id; None is the default branch.
        weights: download the weights, too; safetensors if available.
        code: download Python files, too (remote code).

    Raises:
        CheckpointError: there is no such folder, and the hub has no such model or cannot be reached.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        raise CheckpointError(f"'{name}' is a file; give the folder of a checkpoint, or a hub id such as ORG/MODEL")
    if path.is_absolute() or name.startswith(("./", "../", "~")) or name.count("/") > 1:
        raise CheckpointError(f"there is no folder '{name}'; give a folder, or a hub id such as ORG/MODEL")
    patterns = [*TEXTS, *(["*.safetensors"] if weights else []), *(["*.py"] if code else [])]
    try:
        download = partial(snapshot_download, name, revision=revision, ignore_patterns=OTHER_FORMATS)
        folder = Path(download(allow_patterns=patterns))
        if weights and not any(folder.glob("*.safetensors")):
            folder = Path(download(allow_patterns=[*patterns, "*.bin"]))
    except HFValidationError as error:
        raise CheckpointError(
            f"'{name}' is neither a folder here nor a valid hub id; give a folder, or a hub id such as ORG/MODEL"
        ) from error
    except LocalEntryNotFoundError as error:
        raise CheckpointError(
            f"'{name}' is not a folder here; as a hub id it is not in the local cache, and the hub cannot be reached; "
            "check the id and the network, or give a folder"
        ) from error
    except (HfHubHTTPError, OSError) as error:
        at = f" at revision '{revision}'" if revision else ""
        raise CheckpointError(f"cannot download '{name}'{at} from the hub: {error}") from error
    return folder


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        CheckpointError: it cannot be read, or is no object.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read '{path}': {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"'{path}' is not a JSON object")
    return found


def token_ids(name: str, value: Any) -> tuple[int, ...]:
    """The token ids of an entry `name` of a configuration: one id or a list; none for None.

    Raises:
        CheckpointError: it is something else.
    """
    ids = () if value is None else value if isinstance(value, list | tuple) else (value,)
    if any(type(each) is not int for each in ids):
        raise CheckpointError(f"{name} is {value!r}; it must be a token id, or a list of them")
    return tuple(dict.fromkeys(ids))


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that transformers reads, which need not be all in the folder."""
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.is_file():
        return [whole]
    if index.is_file():
        return [folder / each for each in sorted(set(read_json(index).get("weight_map", {}).values()))]
    return sorted(folder.glob("*.safetensors"))


def weights_fingerprint(folder: str | os.PathLike[str]) -> str:
    """SHA-256, in hex, of the configuration, the safetensors headers and samples of the weight files.

    It changes with the configuration, with names, types and shapes of tensors, and with the sampled bytes: 64 samples
    of 4 KiB from each file.

    Raises:
        CheckpointError: the folder has no configuration or no weights.
    """
    folder = Path(folder)
    config = folder / "config.json"
    if not config.is_file():
        raise CheckpointError(f"'{folder}' has no config.json; give the folder or hub id of a model")
    files = weight_files(folder) or sorted(folder.glob("pytorch_model*.bin"))
    if not files:
        raise CheckpointError(f"'{folder}' has no weights: no *.safetensors and no pytorch_model*.bin")
    if missing := [file for file in files if not file.is_file()]:
        raise CheckpointError(f"cannot read '{missing[0]}': there is no such file")
    kept = {key: value for key, value in read_json(config).items() if key not in _PROVENANCE}
    digest = hashlib.sha256(json.dumps(kept, sort_keys=True, separators=(",", ":")).encode())
    for file in files:
        for part in (file.name.encode(), *_samples(file)):
            digest.update(len(part).to_bytes(8, "little") + part)  # with its length, so that parts cannot run together
    return digest.hexdigest()


def gguf_fingerprint(path: Path) -> str:
    """SHA-256, in hex, of the sizes and of samples of the GGUF files of a model.

    Raises:
        CheckpointError: one of them is missing.
    """
    digest = hashlib.sha256()
    for file in gguf.parts(str(path)):
        for part in _samples(Path(file)):
            digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def model_fingerprint(weights: str, eos_token_ids: Iterable[int], rules: GenerationRules | None) -> str:
    """SHA-256, in hex, of a fingerprint of weights and of the generation config's rules: models with the same one
    write the same text.

    Rules are hashed without defaults: a rule that is added to Outrider later changes no fingerprint of models without.
    """
    defaults = asdict(GenerationRules())
    given = {} if rules is None else asdict(rules)
    own = {name: value for name, value in given.items() if value != defaults[name]}
    generation = json.dumps({"eos": sorted(set(eos_token_ids)), "rules": own}, sort_keys=True)
    return hashlib.sha256(f"{weights} {generation}".encode()).hexdigest()


def _samples(path: Path) -> Iterator[bytes]:
    try:
        size, file = path.stat().st_size, path.open("rb")
    except OSError as error:
        raise CheckpointError(f"cannot read '{path}': {error}") from error
    with file:
        start = 0
        if path.suffix == ".safetensors":
            start = 8 + int.from_bytes(file.read(8), "little")
            if start > size:
                raise CheckpointError(
                    f"'{path}' is cut off: its header ends at byte {start}, and the file at {size}; copy it again"
                )
            yield file.read(start - 8)
        yield str(size).encode()
        last = max(start, size - _SAMPLE_BYTES)
        for sample in range(_SAMPLES):
            file.seek(start + (last - start) * sample // (_SAMPLES - 1))
            yield file.read(_SAMPLE_BYTES)
