"""Make a model deeper without changing what it says: the same text at the cost of a larger target.

Every layer is followed by copies of itself whose two projections back into the residual stream are zero. A copy does
all the work of a layer and adds nothing, so each logit stays what it was, bit for bit. It stands in for a target that
is several times as large where none is at hand; it is no model worth serving.

    python -m benchmarks.deepen --factor 12 models/demo/target OUT
"""

from __future__ import annotations

import argparse
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


class CannotDeepen(ValueError):
    """The folder holds no model that can be deepened; the text says why."""


def deepen(source: Path, out: Path, factor: int) -> None:
    """Writes to `out` the model of `source` with `factor` times its layers; a layer and its copies lie together.

    Raises:
        CannotDeepen: `factor` is below 1, or the model is not laid out as expected.
    """
    if factor < 1:
        raise CannotDeepen(f"factor is {factor}; it must be at least 1")
    if not (source / WEIGHTS).is_file():
        raise CannotDeepen(f"{source} holds no {WEIGHTS}")
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    weights = deepened_weights(load_file(source / WEIGHTS), layers=_layers(config), factor=factor)
    out.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.is_file() and file.name not in (WEIGHTS, "config.json"):
            shutil.copyfile(file, out / file.name)
    (out / "config.json").write_text(json.dumps(deepened_config(config, factor), indent=2) + "\n", encoding="utf-8")
    # Last, and under its name only when whole: whoever finds it finds all of it.
    save_file(weights, out / f"{WEIGHTS}.part", metadata={"format": "pt"})
    (out / f"{WEIGHTS}.part").rename(out / WEIGHTS)


def deepened_config(config: dict[str, object], factor: int) -> dict[str, object]:
    """The configuration of the deepened model."""
    deep = config | {"num_hidden_layers": _layers(config) * factor}
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        deep["layer_types"] = [kind for kind in kinds for _ in range(factor)]
    return deep


def deepened_weights(weights: dict[str, torch.Tensor], *, layers: int, factor: int) -> dict[str, torch.Tensor]:
    """The tensors of the deepened model, by name.

    Raises:
        CannotDeepen: a layer lacks one of `OUTPUTS`, so that its copies would change the text.
    """
    for index in range(layers):
        for output in OUTPUTS:
            if not any(f"layers.{index}.{output}" in name for name in weights):
                raise CannotDeepen(f"layer {index} has no {output[:-1]}; only layouts like Llama's can be deepened")
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


def _layers(config: dict[str, object]) -> int:
    layers = config.get("num_hidden_layers")
    if not isinstance(layers, int):
        raise CannotDeepen("the configuration has no num_hidden_layers; only layouts like Llama's can be deepened")
    return layers


def cached(source: Path, factor: int, folder: Path) -> Path:
    """The deepened model of `source` in a folder of its own below `folder`; made if it is not there yet.

    The name holds a digest of the source, so that a model trained anew is deepened anew.
    """
    out = folder / f"{source.name}-x{factor}-{digest_of(source)}"
    if not (out / WEIGHTS).is_file():
        deepen(source, out, factor)
    return out


def digest_of(folder: Path) -> str:
    """A short name of a model: of its configuration and its weights.

    Raises:
        OSError: it lacks one of them.
    """
    digest = hashlib.sha256()
    for name in ("config.json", WEIGHTS):
        digest.update((folder / name).read_bytes())
    return digest.hexdigest()[:12]


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.deepen", description="Deepen a model; its text stays.")
    parser.add_argument("source", type=Path, help="folder of the model")
    parser.add_argument("out", type=Path, help="folder to write; made if need be")
    parser.add_argument("--factor", type=int, default=12, help="how many times as deep (default: %(default)s)")
    arguments = parser.parse_args()
    try:
        deepen(arguments.source, arguments.out, arguments.factor)
    except CannotDeepen as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
