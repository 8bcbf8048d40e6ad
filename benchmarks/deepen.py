"""Makes a model deeper without changing what it says: the same text at the cost of a larger target.

Every layer is followed by copies of itself whose two projections back into the residual stream are zero. A copy does
all the work of a layer and adds nothing, so each logit stays what it was, bit for bit. It stands in for a target that
is several times as large where none is at hand; it is no model worth serving.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

WEIGHTS = "model.safetensors"
# What a layer adds to the residual stream, it adds through these.
OUTPUTS = ("self_attn.o_proj.", "mlp.down_proj.")
_LAYER = re.compile(r"^(?P<before>.*\blayers\.)(?P<index>\d+)\.(?P<after>.+)$")


def deepened(source: Path, factor: int, folder: Path) -> Path:
    """The model of `source` with `factor` times its layers, in a folder of its own below `folder`; made once.

    The name holds a digest of the source, so that a model trained anew is deepened anew.

    Raises:
        ValueError: `factor` is below 1, or the model is not laid out like Llama's.
        OSError: `source` holds no model.
    """
    if factor < 1:
        raise ValueError(f"factor is {factor}; it must be at least 1")
    out = folder / f"{source.name}-x{factor}-{digest_of(source)}"
    if (out / WEIGHTS).is_file():
        return out
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    layers = config.get("num_hidden_layers", 0)
    weights = _deepened_weights(load_file(source / WEIGHTS), layers, factor)
    config["num_hidden_layers"] = layers * factor
    if isinstance(config.get("layer_types"), list):
        config["layer_types"] = [kind for kind in config["layer_types"] for _ in range(factor)]
    out.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.is_file() and file.name not in (WEIGHTS, "config.json"):
            shutil.copyfile(file, out / file.name)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    # Last, and under its name only when whole: whoever finds it finds all of it.
    save_file(weights, out / f"{WEIGHTS}.part", metadata={"format": "pt"})
    (out / f"{WEIGHTS}.part").rename(out / WEIGHTS)
    return out


def _deepened_weights(weights: dict[str, torch.Tensor], layers: int, factor: int) -> dict[str, torch.Tensor]:
    outputs = {f"layers.{index}.{output}" for index in range(layers) for output in OUTPUTS}
    if not layers or not all(any(output in name for name in weights) for output in outputs):
        raise ValueError(f"a layer lacks {' or '.join(OUTPUTS)}; only layouts like Llama's can be deepened")
    deep: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        found = _LAYER.match(name)
        if found is None:
            deep[name] = tensor
            continue
        silent = found["after"].startswith(OUTPUTS)
        for copy in range(factor):
            place = int(found["index"]) * factor + copy
            values = torch.zeros_like(tensor) if silent and copy else tensor.clone()
            deep[f"{found['before']}{place}.{found['after']}"] = values
    return deep


def digest_of(folder: Path) -> str:
    """A short name of a model: of its configuration and its weights."""
    digest = hashlib.sha256()
    for name in ("config.json", WEIGHTS):
        digest.update((folder / name).read_bytes())
    return digest.hexdigest()[:12]
