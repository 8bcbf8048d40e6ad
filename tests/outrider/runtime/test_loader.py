"""Checkpoints are loaded as configured, and those that we cannot run are refused in one line with the reason."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    GenerationConfig,
    GPT2Config,
    LlamaConfig,
    PegasusConfig,
    PreTrainedConfig,
    ViTConfig,
)
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP, GPT2Attention

from outrider.runtime import generation_rules, loader
from outrider.runtime.checkpoint import model_fingerprint, weights_fingerprint
from outrider.runtime.errors import CheckpointError
from outrider.runtime.loader import LoadedModel, ModelSource, adopt, load_model
from tests.encoder_decoders import save
from tests.outrider.runtime import tiny

Load = Callable[..., LoadedModel]
Checkpoint = Callable[[str], Path]
SMALL: dict[str, Any] = tiny.SHAPE | {"num_hidden_layers": 2}


def refusal(folder: Path | str, **source: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_model(ModelSource(str(folder), **{"dtype": "float32", "device": "cpu", **source}))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_loaded_model_has_the_values_of_its_configuration(load: Load, checkpoint: Checkpoint) -> None:
    loaded = load("llama")
    weights = weights_fingerprint(checkpoint("llama"))
    assert (loaded.vocab_size, loaded.context_length, loaded.eos_token_ids) == (97, 64, (2,))
    assert (loaded.dtype, loaded.device) == (torch.float32, torch.device("cpu"))
    assert loaded.name == str(checkpoint("llama"))
    assert loaded.weights_fingerprint == model_fingerprint(weights, [2], None)
    assert loaded.model.config.model_type == "llama"
    assert not loaded.model.training
    assert [(layer.heads, layer.kv_heads, layer.head_dim, layer.window) for layer in loaded.layers] == [
        (4, 2, 8, None)
    ] * 3


def test_stop_tokens_are_those_of_the_generation_config(tmp_path: Path) -> None:
    folder = tiny.save(LlamaConfig(**SMALL), tmp_path)
    path = folder / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": [2, 7, 11]}))
    assert load_model(ModelSource(str(folder), device="cpu")).eos_token_ids == (2, 7, 11)
    path.unlink()
    assert load_model(ModelSource(str(folder), device="cpu")).eos_token_ids == (2,)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"eos_token_id": [2, "7"]}', "eos_token_id is [2, '7']; it must be a token id, or a list of them"),
        ('{"eos_token_id": 2.0}', "eos_token_id is 2.0; it must be a token id, or a list of them"),
        ('{"eos_token_id": [2, 7', "generation_config.json': Expecting ',' delimiter"),
        ("[]", "generation_config.json' is not a JSON object"),
    ],
)
def test_a_damaged_generation_config_is_refused(text: str, message: str, folder: Path) -> None:
    (folder / "generation_config.json").write_text(text)
    assert message in refusal(folder)


@pytest.mark.parametrize(
    ("stored", "computes_bfloat16", "chosen"),
    [
        (torch.bfloat16, True, torch.bfloat16),
        (torch.bfloat16, False, torch.float32),
        (torch.float16, True, torch.float32),
    ],
    ids=str,
)
def test_auto_dtype_is_the_checkpoints_if_the_cpu_computes_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: torch.dtype, computes_bfloat16: bool, chosen: torch.dtype
) -> None:
    monkeypatch.setattr(loader, "cpu_computes_bfloat16", lambda: computes_bfloat16)
    loaded = load_model(ModelSource(str(tiny.save(LlamaConfig(**SMALL), tmp_path, dtype=stored)), device="cpu"))
    assert loaded.dtype == chosen == next(loaded.model.parameters()).dtype
    assert loaded.dtype_reason


def test_a_hub_id_is_loaded_from_the_cache(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    repo = tmp_path / "models--someone--tiny"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit)
    (repo / "snapshots").mkdir()
    (repo / "snapshots" / commit).symlink_to(checkpoint("llama"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    loaded = load_model(ModelSource("someone/tiny", dtype="float32", device="cpu"))
    assert loaded.name == "someone/tiny"
    assert loaded.weights_fingerprint == model_fingerprint(weights_fingerprint(checkpoint("llama")), [2], None)
    assert "cannot be reached" in refusal("someone/other")


def test_an_invalid_checkpoint_is_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    assert refusal(tmp_path / "nowhere") == (
        f"there is no folder '{tmp_path / 'nowhere'}'; give a folder, or a hub id such as ORG/MODEL"
    )
    assert "neither a folder here nor a valid hub id" in refusal("not a name!")
    assert "has no config.json" in refusal(tmp_path)
    ViTConfig().save_pretrained(tmp_path)
    assert "not a causal language model of transformers: its model type is 'vit'" in refusal(tmp_path)
    PegasusConfig().save_pretrained(tmp_path)
    assert "has an encoder, and its model type is 'pegasus'; of such models bart, marian, t5" in refusal(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model"}')
    assert "cannot read the configuration" in refusal(tmp_path)
    for kinds in (7, "LlamaForCausalLM", [["LlamaForCausalLM"]]):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": kinds}))
        assert refusal(tmp_path) == f"architectures of '{tmp_path}' is {kinds!r}; it must be a list of names"
    folder = Path(shutil.copytree(checkpoint("llama"), tmp_path / "incomplete"))
    tensors = load_file(folder / "model.safetensors")
    weight = tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert "missing_keys model.layers.1.mlp.up_proj.weight" in refusal(folder)
    tensors["model.layers.1.mlp.up_proj.weight"] = weight[:7]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert "wrong sizes model.layers.1.mlp.up_proj.weight [7, 32], not [48, 32]" in refusal(folder)
    tensors["model.layers.1.mlp.up_proj.weight"] = weight * torch.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert "are NaN or infinite in transformers itself" in refusal(folder)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()
    assert f"cannot read '{folder}/model.safetensors'" in refusal(folder)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"dtype": "int8"}, "is 'int8'"),
        ({"device": "tpu"}, "is 'tpu'"),
        ({"device": "cuda:99"}, f"torch finds {torch.cuda.device_count() or 'no'} CUDA device"),
    ],
)
def test_unknown_dtypes_and_devices_are_named(source: dict[str, str], message: str, checkpoint: Checkpoint) -> None:
    assert message in refusal(checkpoint("llama"), **source)


def test_masks_of_a_window_as_long_as_the_context_are_none(tmp_path: Path) -> None:
    """Phi-MoE makes them, and hands its attention no window."""

    def config(window: int) -> transformers.PhimoeConfig:
        return transformers.PhimoeConfig(**SMALL, num_key_value_heads=2, num_local_experts=2, sliding_window=window)

    loaded = load_model(ModelSource(str(tiny.save(config(64), tmp_path / "long")), device="cpu"))
    assert {layer.window for layer in loaded.layers} == {None}
    assert "attends to chunks of 63 positions" in refusal(tiny.save(config(63), tmp_path / "short"))


UNSUPPORTED: dict[str, tuple[Callable[[], PreTrainedConfig], str]] = {
    "chunks": (
        lambda: transformers.Llama4TextConfig(
            **SMALL,
            num_key_value_heads=2,
            head_dim=8,
            attention_chunk_size=4,
            num_local_experts=2,
            intermediate_size_mlp=48,
        ),
        "attends to chunks of 4 positions, .*; docs/reference/models.md",
    ),
    "state outside attention": (
        lambda: transformers.Lfm2Config(**SMALL, num_key_value_heads=2, layer_types=["conv", "full_attention"]),
        "Lfm2.* attention in 1 of 2 layers",
    ),
    "own attention": (
        lambda: transformers.FalconConfig(vocab_size=97, hidden_size=32, num_hidden_layers=1, num_attention_heads=4),
        "Falcon.* attention interface",
    ),
    "no arguments": (lambda: transformers.StableLmConfig(**SMALL), "does not pass keyword arguments on"),
}


@pytest.mark.parametrize(("config", "message"), UNSUPPORTED.values(), ids=UNSUPPORTED.keys())
def test_unsupported_features_are_named(config: Callable[[], PreTrainedConfig], message: str, tmp_path: Path) -> None:
    assert re.search(message, refusal(tiny.save(config(), tmp_path)))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("sinks", torch.zeros(1), "attention sinks that depend on the token"),
        ("block_sequence_ids", torch.zeros(1), "bidirectional attention"),
        ("s_aux", torch.zeros(4, 2), "layer 0 has attention sinks of shape [4, 2]; it must be [4]"),
    ],
)
def test_unsupported_arguments_of_attention_are_named(
    name: str, value: torch.Tensor, message: str, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, more = GPT2Attention.forward, {name: value}
    monkeypatch.setattr(GPT2Attention, "forward", lambda self, *args, **given: forward(self, *args, **given, **more))
    assert message in refusal(checkpoint("gpt2"))


def test_a_model_that_packing_changes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """State outside the attention, here a sum over the rows of a step, shows in the logits of the self-check."""
    config = GPT2Config(vocab_size=97, n_positions=64, n_embd=32, n_layer=2, n_head=4)
    folder, model = tiny.save(config, tmp_path), AutoModelForCausalLM.from_config(config)
    forward = GPT2MLP.forward
    monkeypatch.setattr(GPT2MLP, "forward", lambda self, x: forward(self, x) + x.cumsum(1))
    assert "gives other logits in a batch of sequences than in transformers" in refusal(folder)
    with pytest.raises(CheckpointError, match="gives other logits in a batch of sequences than in transformers"):
        adopt(model, "mine", "its fingerprint")


@pytest.fixture
def folder(checkpoint: Checkpoint, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint("llama"), tmp_path / "model"))


def edit(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}, indent=4))


def test_the_fingerprint_depends_on_the_content_alone(folder: Path, tmp_path: Path) -> None:
    before = weights_fingerprint(folder)
    assert len(before) == 64
    copied = shutil.copytree(folder, tmp_path / "elsewhere")
    edit(folder, transformers_version="9.9", _name_or_path="/somewhere")
    (folder / "README.md").write_text("not a weight")
    save_file({"layers.0.attention.wq.weight": torch.zeros(32, 32)}, folder / "consolidated.safetensors")
    assert weights_fingerprint(folder) == weights_fingerprint(copied) == before


def test_a_missing_part_of_the_weights_is_named(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"lm_head.weight": "model-00001-of-00001.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"model-00001-of-00001\.safetensors': there is no such file"):
        weights_fingerprint(folder)


@pytest.mark.parametrize(
    ("scaling", "length"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 128),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16}, 64),
        ({"rope_type": "linear", "factor": 4.0}, 64),
    ],
)
def test_yarn_extends_the_context_length(scaling: dict[str, Any], length: int, folder: Path) -> None:
    """Model cards of Qwen add it to config.json, and leave max_position_embeddings as it was, here 64."""
    edit(folder, rope_parameters={"rope_theta": 10_000.0, **scaling})
    assert load_model(ModelSource(str(folder), dtype="float32", device="cpu")).context_length == length


@pytest.mark.parametrize(
    ("name", "position"), [("config.json", None), ("model.safetensors", 12), ("model.safetensors", -1)]
)
def test_the_fingerprint_follows_configuration_header_and_weights(
    folder: Path, name: str, position: int | None
) -> None:
    before = weights_fingerprint(folder)
    if position is None:
        edit(folder, rms_norm_eps=1e-4)
    else:
        content = bytearray((folder / name).read_bytes())
        content[position] ^= 1
        (folder / name).write_bytes(content)
    assert weights_fingerprint(folder) != before


@pytest.mark.parametrize(
    ("changes", "is_same"),
    [
        ({"num_beams": 4, "temperature": 0.5, "do_sample": True, "top_k": 5}, True),
        ({"suppress_tokens": [31, 30, 31], "bad_words_ids": [[9, 11], [10]]}, True),
        ({"suppress_tokens": [30]}, False),
        ({"suppress_tokens": None}, False),
        ({"bad_words_ids": [[11, 9], [10]]}, False),
        ({"begin_suppress_tokens": [5]}, False),
        ({"no_repeat_ngram_size": 2}, False),
        ({"repetition_penalty": 1.1}, False),
        ({"min_length": 4}, False),
        ({"min_new_tokens": 4}, False),
        ({"forced_bos_token_id": None}, False),
        ({"forced_eos_token_id": None}, False),
        ({"eos_token_id": [2, 8]}, False),
    ],
    ids=str,
)
def test_the_fingerprint_follows_the_rules_of_the_generation_config(changes: dict[str, Any], is_same: bool) -> None:
    own = {"suppress_tokens": [30, 31], "bad_words_ids": [[10], [9, 11]], "no_repeat_ngram_size": 3, "eos_token_id": 2}
    own |= {"forced_bos_token_id": 9, "forced_eos_token_id": 2}

    def fingerprint(options: dict[str, Any]) -> str:
        rules = generation_rules.read(GenerationConfig(**options), BartConfig(vocab_size=97))
        assert rules is not None
        return model_fingerprint("weights", rules.eos_tokens, rules)

    assert (fingerprint(own | changes) == fingerprint(own)) is is_same


def test_a_loaded_models_fingerprint_includes_its_generation_config(folder: Path, tmp_path: Path) -> None:
    """Of a model with an encoder the rules, too; without rules both are the same."""

    def fingerprints(folder: Path, name: str, value: object) -> list[str]:
        path = folder / "generation_config.json"
        found = []
        for each in ({}, {name: value}):
            path.write_text(json.dumps(json.loads(path.read_text()) | each))
            found.append(load_model(ModelSource(str(folder), dtype="float32", device="cpu")).weights_fingerprint)
        return found

    first, second = fingerprints(folder, "eos_token_id", [2, 7])
    assert first != second
    first, second = fingerprints(folder, "no_repeat_ngram_size", 3)
    assert first == second, "the services do not do this to logits of a causal model"
    first, second = fingerprints(save("bart", tmp_path / "bart"), "no_repeat_ngram_size", 4)
    assert first != second


def test_the_fingerprint_samples_large_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    path = tmp_path / "model.safetensors"
    save_file({"w": torch.zeros(8, dtype=torch.uint8)}, path)
    with path.open("r+b") as file:
        file.truncate(1 << 40)  # sparse: reading the whole would outlast any test
    assert len(weights_fingerprint(tmp_path)) == 64
