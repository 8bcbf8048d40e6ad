"""The size of a model's vocabulary, before anything of the model is loaded.

It reads one small file, runs no code of the checkpoint's, and says nothing of whether the model can be loaded.
"""

import json
from pathlib import Path

from huggingface_hub import hf_hub_download


def vocabulary_size(name: str, revision: str | None = None) -> int | None:
    """What the configuration of a folder or hub id says it is; None where it says nothing, or is not to be had."""
    path = Path(name).expanduser() / "config.json"
    try:
        if not path.parent.is_dir():
            path = Path(hf_hub_download(name, "config.json", revision=revision))
        config = json.loads(path.read_bytes())
    except Exception:  # of many kinds, from the hub's client; whoever loads the model says in one line what is wrong
        return None
    texts = [config, config.get("text_config")] if isinstance(config, dict) else []
    sizes = (text.get("vocab_size") for text in texts if isinstance(text, dict))
    return next((size for size in sizes if isinstance(size, int) and size > 0), None)
