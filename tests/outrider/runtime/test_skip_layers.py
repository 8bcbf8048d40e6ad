"""A causal model without some of its layers, against one that never had them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from outrider.runtime.errors import CheckpointError
from outrider.runtime.fused_decoder import fuse_model
from outrider.runtime.loader import LoadedModel, ModelSource, load_model
from outrider.runtime.skip_layers import DecoderLayers, read_layers, write_layers
from tests import encoder_decoders
from tests.outrider.runtime import tiny

# Layers in different lists, of different kinds, and with settings by layer.
FAMILIES = ("llama", "qwen2-sliding", "gemma3", "gpt2", "gpt-neox", "opt", "mixtral", "phi3", "smollm3")


def loaded(folder: Path, **source: Any) -> LoadedModel:
    return load_model(ModelSource(str(folder), dtype="float32", device="cpu", **source))


@pytest.mark.parametrize("name", FAMILIES)
@torch.inference_mode()
def test_the_rest_of_the_layers_computes_as_if_the_others_did_nothing(
    name: str, checkpoint: Callable[[str], Path]
) -> None:
    """Transformers runs the whole model, with layer 1 a bypass."""
    own = loaded(checkpoint(name), skip_layers="1")
    whole: Any = AutoModelForCausalLM.from_pretrained(
        checkpoint(name), dtype=torch.float32, attn_implementation="eager"
    ).eval()
    (layers,) = (each for each in whole.modules() if isinstance(each, nn.ModuleList) and len(each) == 3)

    def bypass(module: nn.Module, given: tuple[Tensor, ...], result: Any) -> Any:
        return (given[0], *result[1:]) if isinstance(result, tuple) else given[0]

    layers[1].register_forward_hook(bypass)
    found = whole(own.reference.tokens, use_cache=False).logits
    torch.testing.assert_close(found, own.reference.logits, rtol=1e-4, atol=1e-4)
    assert len(own.layers) == 2
    fuse_model(own)  # compares its logits with the same


def test_other_layers_are_another_model(checkpoint: Callable[[str], Path]) -> None:
    folder = checkpoint("llama")
    found = [loaded(folder, skip_layers=text).weights_fingerprint for text in (None, "1", "0,1", "0-1", "every-2")]
    assert len(set(found)) == 3
    assert found[2] == found[3]
    assert found[1] == found[4]


def test_layers_come_back(checkpoint: Callable[[str], Path]) -> None:
    model = loaded(checkpoint("gemma3")).model
    kinds = list(model.config.layer_types)
    layers = DecoderLayers(model, "tiny")
    modules = list(model.model.layers)
    layers.skip([0])
    assert model.config.layer_types == kinds[1:]
    assert [layer.self_attn.layer_idx for layer in model.model.layers] == [0, 1]
    layers.skip([])
    assert list(model.model.layers) == modules
    assert model.config.layer_types == kinds
    assert [layer.self_attn.layer_idx for layer in model.model.layers] == [0, 1, 2]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("3", "'{}' has layers 0 to 2, and no layer 3"),
        ("0-2", "--skip-layers 0-2 leaves 0 of the 3 layers of '{}'"),
        ("every-4", "--skip-layers every-4 leaves 3 of the 3 layers of '{}'"),
        ("first", "--skip-layers: 'first' is neither a layer nor a range of layers"),
    ],
)
def test_layers_that_are_not_there_are_refused(text: str, said: str, checkpoint: Callable[[str], Path]) -> None:
    with pytest.raises(CheckpointError) as caught:
        loaded(checkpoint("llama"), skip_layers=text)
    assert said.format(checkpoint("llama")) in str(caught.value)


def test_a_model_with_an_encoder_is_refused(tmp_path: Path) -> None:
    folder = encoder_decoders.save("t5", tmp_path / "t5")
    with pytest.raises(CheckpointError, match="has an encoder; only causal models run without layers"):
        loaded(folder, skip_layers="0")


def test_layers_of_an_unknown_structure_are_refused(tmp_path: Path) -> None:
    folder = tiny.save(tiny.FAMILIES["longcat"](), tmp_path / "longcat")
    with pytest.raises(CheckpointError, match="LongcatFlashForCausalLM has 0 lists of 4 layers; it must have one"):
        loaded(folder, skip_layers="0")


@pytest.mark.parametrize("text", ["", "a", "1,", "-1", "3-", "3-1", "every-1", "every-", "every-x", "1.5"])
def test_texts_that_name_no_layers(text: str) -> None:
    with pytest.raises(ValueError, match=r"for example .*every-3"):
        read_layers(text)


@pytest.mark.parametrize(("layers", "text"), [([3, 5, 6, 7], "3,5-7"), ([2, 0, 1], "0-2"), ([4], "4"), ([1, 3], "1,3")])
def test_a_set_of_layers_is_written_as_it_is_read(layers: list[int], text: str) -> None:
    assert write_layers(layers) == text
    assert sorted(layer for each in read_layers(text) for layer in each) == sorted(layers)


def test_every_third_layer() -> None:
    (found,) = read_layers("every-3")
    assert list(found[:3]) == [2, 5, 8]
