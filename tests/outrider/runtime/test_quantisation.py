"""Quantised checkpoints run as transformers runs them, our own layers step aside, and what cannot be loaded is named.

The method `gemma` (integers of 8, 4 or 2 bits with a scale per row) is the one that transformers computes with torch
alone; the others need packages of their own.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.integrations.gemma_quant import QuantizedLinear

from outrider.runtime.errors import CheckpointError
from outrider.runtime.fused_decoder import FusedDecoder
from outrider.runtime.fused_layers import is_plain
from outrider.runtime.loader import LoadedModel, ModelSource, load_model, settle_dtype
from outrider.runtime.model_runner import Chunk, ModelRunner
from outrider.runtime.selfcheck import reference
from tests.outrider.runtime.steps import MAX_LENGTH, logits_by, random_steps
from tests.outrider.runtime.tiny import Truth

Load = Callable[..., LoadedModel]


def quantise(source: Path, folder: Path, bits: int) -> tuple[Path, Path]:
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
        most = 2 ** (bits - 1) - 1
        scale = weight.abs().amax(1, keepdim=True) / most
        rounded = (weight / scale).round().clamp(-most, most)
        tensors[name] = rounded * scale
        held[name] = rounded.to(torch.int8) if bits == 8 else nibbles(rounded)
        held[name.replace("weight", "weight_scale")] = scale
        for side in ("input", "output"):
            held[name.replace("weight", f"{side}_activation_scale")] = torch.tensor(0.0)  # 0: not rounded
    save_file(tensors, floats / "model.safetensors", metadata={"format": "pt"})
    save_file(held, integers / "model.safetensors", metadata={"format": "pt"})
    configure(integers, {"quant_method": "gemma", "num_bits": bits, "modules_to_not_convert": ["lm_head"]})
    return integers, floats


def nibbles(values: Tensor) -> Tensor:
    """Two to a byte, the first in its low half, 8 above their value."""
    raised = (values + 8).to(torch.uint8).unflatten(1, (-1, 2))
    return raised[..., 0] | (raised[..., 1] << 4)


def configure(folder: Path, quantisation: dict[str, Any]) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": quantisation}))


def load_as(folder: Path, dtype: str = "float32") -> LoadedModel:
    return load_model(ModelSource(str(folder), dtype=dtype, device="cpu"))


@pytest.mark.parametrize("fuse", [False, True], ids=["unfused", "fused"])
@pytest.mark.parametrize(("name", "bits"), [("llama", 8), ("llama", 4), ("gemma3", 8), ("mixtral", 8)])
def test_integer_weights_give_the_logits_of_the_same_numbers_as_floats(
    name: str, bits: int, fuse: bool, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    integers, floats = quantise(checkpoint(name), tmp_path, bits)
    loaded = load_as(integers)
    found, steps = random_steps(ModelRunner.build(loaded, 5, MAX_LENGTH, fuse=fuse), 4)
    wanted, original = (torch.cat(logits_by(Truth(folder), steps)) for folder in (floats, checkpoint(name)))
    assert (wanted - original).abs().max() > 1e-2, "else quantising changed nothing"
    assert (torch.cat(found) - wanted).abs().max() <= 1e-5 * max(1.0, float(wanted.abs().max()))
    assert loaded.quantisation == "gemma"
    kinds = {type(module).__name__ for path, module in loaded.model.named_modules() if path.endswith("q_proj")}
    assert kinds == {"QuantizedLinear"}
    assert not isinstance(loaded.fused, FusedDecoder)


def test_layers_that_are_not_quantised_take_the_dtype_asked_for(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """Transformers leaves it as it was stored, here in float32."""
    integers, floats = quantise(checkpoint("llama"), tmp_path, 8)
    loaded = load_as(integers, "bfloat16")
    kinds: dict[str, set[torch.dtype]] = {}
    for name, parameter in loaded.model.named_parameters():
        kinds.setdefault(name.rsplit(".", 1)[-1] if "_proj" in name else "the rest", set()).add(parameter.dtype)
    assert kinds["the rest"] == {torch.bfloat16}
    assert kinds["weight"] == {torch.int8}
    assert kinds["weight_scale"] == {torch.float32}
    found, steps = random_steps(ModelRunner.build(loaded, 5, MAX_LENGTH), 5)
    wanted = torch.cat(logits_by(Truth(floats), steps))
    assert ((torch.cat(found) - wanted).norm(dim=-1) / wanted.norm(dim=-1)).median() < 0.05


def test_settling_casts_plain_numbers_and_leaves_the_rest() -> None:
    model = nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4), QuantizedLinear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    last = model[4]
    assert isinstance(last, nn.Linear)
    tag(last)
    model._keep_in_fp32_modules_strict = ["3"]  # type: ignore[assignment]
    settle_dtype(model, torch.bfloat16)
    assert [model[i].weight.dtype for i in (0, 1, 3, 4)] == [torch.bfloat16] * 2 + [torch.float32] * 2
    assert (model[2].weight.dtype, model[2].weight_scale.dtype) == (torch.int8, torch.float32)


# ------------------------------------------------------------------------------------------------ our layers step aside


class Tagged(Tensor):
    """As quantised weights come: a tensor of another class, in an ordinary layer, with an ordinary dtype."""


class Other(nn.Linear):
    """A linear layer of another class, as quantised ones are."""


def tag(module: nn.Linear) -> None:
    module.weight = nn.Parameter(module.weight.detach().as_subclass(Tagged), requires_grad=False)


def put_hook(module: nn.Linear) -> None:
    module.register_forward_hook(lambda module, args, out: 1.01 * out)


def put_forward(module: nn.Linear) -> None:
    own = module.forward
    module.forward = lambda x: 1.01 * own(x)  # type: ignore[assignment, method-assign]


def put_class(module: nn.Linear) -> None:
    module.__class__ = Other


def put_integers(module: nn.Linear) -> None:
    module.weight = nn.Parameter(module.weight.detach().round().to(torch.int8), requires_grad=False)


CHANGES = (tag, put_hook, put_forward, put_class, put_integers)


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_layer_is_not_plain(change: Callable[[nn.Linear], None]) -> None:
    module = nn.Linear(4, 4)
    assert is_plain(module, nn.Linear)
    change(module)
    assert not is_plain(module, nn.Linear)


@pytest.mark.parametrize("change", [tag, put_hook, put_forward, put_class])
@pytest.mark.parametrize("name", ["llama", "phi3"])
def test_a_model_with_a_changed_layer_keeps_it(name: str, change: Callable[[nn.Linear], None], load: Load) -> None:
    found = []
    for fuse in (False, True):
        loaded = load(name)
        layer = loaded.model.model.layers[1].self_attn.o_proj
        change(layer)
        loaded.reference = reference(loaded.model, loaded.vocab_size, loaded.context_length)
        model = ModelRunner.build(loaded, 1, 32, fuse=fuse)
        assert not isinstance(loaded.fused, FusedDecoder)
        assert loaded.model.model.layers[1].self_attn.o_proj is layer
        found.append(model.forward([Chunk(model.pool.allocate(), range(24), 0, 0)]))
    assert (found[0] - found[1]).abs().max() <= 1e-5 * max(1.0, float(found[0].abs().max()))


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("quantisation", "message"),
    [
        # Each method is named with its package.
        ({"quant_method": "gptq", "bits": 4}, "optimum"),
        ({"quant_method": "awq", "bits": 4}, "gptqmodel"),
        ({"quant_method": "aqlm"}, "([Aa]ccelerate|AQLM)"),
        ({"quant_method": "vptq"}, "([Aa]ccelerate|VPTQ)"),
        ({"quant_method": "quark"}, "Quark"),
        ({"quant_method": "sinq"}, "sinq"),
        *(
            pytest.param(
                {"quant_method": method},
                "GPU",
                marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
            )
            for method in ("fbgemm_fp8", "higgs", "spqr")
        ),
        # Transformers would load such weights as plain ones, with a warning.
        ({"quant_method": "abacus"}, r"which this transformers does not know \(it knows .*gptq"),
        ({"bits": 4}, "names no quant_method"),
    ],
    ids=str,
)
def test_a_method_that_cannot_run_is_refused_with_the_reason(
    quantisation: dict[str, Any], message: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(checkpoint("llama"), tmp_path / "quantised"))
    configure(folder, quantisation)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_as(folder)
    assert "quant_method" not in quantisation or f"quantised by '{quantisation['quant_method']}'" in str(caught.value)
    assert "\n" not in str(caught.value)
