"""Finds the folder behind a model's name: a folder itself, or the local snapshot of a hub id.

It knows nothing of what the files mean.
"""

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from outrider.lm.errors import CheckpointError

# All that a tokenizer and a configuration consist of; weights and code are asked for by name.
_TEXTS = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken")


def resolve_folder(name: str, revision: str | None = None, *, weights: bool = True, code: bool = False) -> Path:
    """The local folder of `name`, fetched from the hub where it is a hub id that is not here yet.

    Args:
        name: a folder, or a hub id such as `org/model`.
        revision: branch, tag or commit of a hub id; None is the default branch.
        weights: fetch the weights too, preferring safetensors.
        code: fetch Python files too (remote code).

    Raises:
        CheckpointError: there is no such folder, and the hub has no such model or cannot be reached.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.is_absolute() or name.startswith(("./", "../", "~")) or name.count("/") > 1:
        raise CheckpointError(f"no folder '{name}'")
    patterns = [*_TEXTS, *(["*.safetensors"] if weights else []), *(["*.py"] if code else [])]
    try:
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
        if weights and not any(folder.glob("*.safetensors")):
            folder = Path(snapshot_download(name, revision=revision, allow_patterns=[*patterns, "*.bin"]))
    except HFValidationError as error:
        raise CheckpointError(f"'{name}' is neither a folder here nor a possible hub id") from error
    except LocalEntryNotFoundError as error:
        raise CheckpointError(
            f"'{name}' is no folder here, and as a hub id it is not in the local cache and the hub cannot be reached"
        ) from error
    except (HfHubHTTPError, OSError) as error:
        at = f" at revision '{revision}'" if revision else ""
        raise CheckpointError(f"cannot get '{name}'{at} from the hub: {error}") from error
    return folder
