"""Quantised checkpoints give the logits of transformers, and other methods are refused by name.

Only the method `gemma` (integers of 8, 4 or 2 bits with a scale per row) needs no package beside torch.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.runtime.errors import CheckpointError
from outrider.runtime.fused_decoder import FusedDecoder
from outrider.runtime.loader import ModelSource, load_model
from outrider.runtime.torch_runner import TorchRunner
from tests.outrider.runtime.steps import MAX_LENGTH, random_steps, reference_logits
from tests.outrider.runtime.tiny import Reference


def configure(folder: Path, quantisation: dict[str, Any]) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": quantisation}))


def quantise(source: Path, folder: Path) -> tuple[Path, Path]:
    """Return a checkpoint with integer weights in its layers, and one with the same numbers as floats."""
    integers, floats = folder / "integers", folder / "floats"
    for copy in (integers, floats):
        shutil.copytree(source, copy)
    tensors = load_file(source / "model.safetensors")
    held: dict[str, Tensor] = {}
    for name, weight in tensors.items():
        if not name.endswith("_proj.weight"):
            held[name] = weight
            continue
        scale = weight.abs().amax(1, keepdim=True) / 127
        rounded = (weight / scale).round().clamp(-127, 127)
        tensors[name] = rounded * scale
        held[name] = rounded.to(torch.int8)
        held[name.replace("weight", "weight_scale")] = scale
        for side in ("input", "output"):
            held[name.replace("weight", f"{side}_activation_scale")] = torch.tensor(0.0)  # 0: not rounded
    save_file(tensors, floats / "model.safetensors", metadata={"format": "pt"})
    save_file(held, integers / "model.safetensors", metadata={"format": "pt"})
    configure(integers, {"quant_method": "gemma", "num_bits": 8, "modules_to_not_convert": ["lm_head"]})
    return integers, floats


@pytest.mark.parametrize("name", ["llama", "gemma3", "mixtral"])
def test_integer_weights_give_the_logits_of_equal_floats(
    name: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """Unfused, then fused."""
    integers, floats = quantise(checkpoint(name), tmp_path)
    loaded = load_model(ModelSource(str(integers), dtype="float32", device="cpu"))
    unfused, steps = random_steps(TorchRunner.build(loaded, 5, MAX_LENGTH, fuse=False), 4)
    fused, _ = random_steps(TorchRunner.build(loaded, 5, MAX_LENGTH), 4)
    wanted, original = (torch.cat(reference_logits(Reference(folder), steps)) for folder in (floats, checkpoint(name)))
    assert (wanted - original).abs().max() > 1e-2, "quantising changes the logits"
    for found in (unfused, fused):
        assert (torch.cat(found) - wanted).abs().max() <= 1e-5 * max(1.0, float(wanted.abs().max()))
    assert loaded.quantisation == "gemma"
    kinds = {type(module).__name__ for path, module in loaded.model.named_modules() if path.endswith("q_proj")}
    assert kinds == {"QuantizedLinear"}
    assert not isinstance(loaded.fused, FusedDecoder)


@pytest.mark.parametrize(
    ("quantisation", "message"),
    [
        ({"quant_method": "gptq", "bits": 4}, "optimum"),  # its package
        # Transformers would load such weights as plain ones, with a warning.
        ({"quant_method": "abacus"}, r"the installed transformers supports .*gptq"),
        ({"quant_method": ["gptq"]}, r"the installed transformers supports .*gptq"),
        ({"bits": 4}, "has no quant_method"),
    ],
    ids=str,
)
def test_a_method_that_cannot_run_is_refused_with_the_reason(
    quantisation: dict[str, Any], message: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(checkpoint("llama"), tmp_path / "quantised"))
    configure(folder, quantisation)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_model(ModelSource(str(folder), dtype="float32", device="cpu"))
    assert "quant_method" not in quantisation or f"quantised by '{quantisation['quant_method']}'" in str(caught.value)
    assert "\n" not in str(caught.value)
