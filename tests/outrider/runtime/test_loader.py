"""Checkpoints are read correctly, and those we cannot run are refused in one line with the reason."""

import json
import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    FalconConfig,
    GPT2Config,
    Lfm2Config,
    Llama4TextConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2MoeConfig,
    StableLmConfig,
    T5Config,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP, GPT2Attention

from outrider.runtime import loader
from outrider.runtime.errors import CheckpointError
from outrider.runtime.loader import LoadedModel, ModelSource, adopt, load_model, weights_fingerprint
from outrider.runtime.model_runner import Chunk, ModelRunner
from tests.outrider.runtime import tiny

Load = Callable[..., LoadedModel]
Checkpoint = Callable[[str], Path]
SMALL: dict[str, Any] = tiny.SHAPE | {"num_hidden_layers": 2}
GPT2 = {"vocab_size": 97, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}


def refusal(folder: Path | str, **source: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_model(ModelSource(str(folder), **{"dtype": "float32", "device": "cpu", **source}))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_loaded_model_has_its_numbers(load: Load, checkpoint: Checkpoint) -> None:
    loaded = load("llama")
    assert (loaded.vocab_size, loaded.context_length, loaded.eos_token_ids) == (97, 64, (2,))
    assert (loaded.dtype, loaded.device) == (torch.float32, torch.device("cpu"))
    assert loaded.name == str(checkpoint("llama"))
    assert loaded.weights_fingerprint == weights_fingerprint(checkpoint("llama"))
    assert loaded.config.model_type == "llama"
    assert not loaded.model.training
    assert [(layer.heads, layer.kv_heads, layer.head_dim, layer.window) for layer in loaded.layers] == [
        (4, 2, 8, None)
    ] * 3


def test_each_layer_keeps_its_own_window(load: Load) -> None:
    assert [layer.window for layer in load("gemma3").layers] == [tiny.WINDOW, None, tiny.WINDOW]
    assert [layer.window for layer in load("mistral-sliding").layers] == [tiny.WINDOW] * 3


def test_loading_prints_and_logs_nothing(
    checkpoint: Checkpoint, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    folders = [checkpoint("llama"), checkpoint("gpt2")]
    capfd.readouterr()
    with caplog.at_level(logging.WARNING):
        for folder in folders:
            load_model(ModelSource(str(folder), device="cpu"))
    assert capfd.readouterr() == ("", "")
    assert not caplog.records


def test_all_stop_tokens_of_the_generation_config_count(tmp_path: Path) -> None:
    folder = tiny.save(LlamaConfig(**SMALL), tmp_path)
    path = folder / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": [2, 7, 11]}))
    assert load_model(ModelSource(str(folder), device="cpu")).eos_token_ids == (2, 7, 11)
    path.unlink()
    assert load_model(ModelSource(str(folder), device="cpu")).eos_token_ids == (2,)


@pytest.mark.parametrize(
    ("stored", "computes_bfloat16", "chosen"),
    [
        (torch.bfloat16, True, torch.bfloat16),
        (torch.bfloat16, False, torch.float32),
        (torch.float16, True, torch.float32),
        (torch.float32, True, torch.float32),
    ],
    ids=str,
)
def test_auto_takes_the_checkpoints_dtype_where_the_cpu_computes_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: torch.dtype, computes_bfloat16: bool, chosen: torch.dtype
) -> None:
    monkeypatch.setattr(loader, "_cpu_computes_bfloat16", lambda: computes_bfloat16)
    loaded = load_model(ModelSource(str(tiny.save(LlamaConfig(**SMALL), tmp_path, dtype=stored)), device="cpu"))
    assert loaded.dtype == chosen == next(loaded.model.parameters()).dtype
    assert loaded.dtype_reason


def test_a_hub_id_is_its_local_snapshot(
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
    assert loaded.weights_fingerprint == weights_fingerprint(checkpoint("llama"))
    assert "cannot be reached" in refusal("someone/other")


def test_a_folder_that_is_no_checkpoint_is_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    assert refusal(tmp_path / "nowhere") == f"no folder '{tmp_path / 'nowhere'}'"
    assert "neither a folder here nor a possible hub id" in refusal("not a name!")
    assert "has no config.json" in refusal(tmp_path)
    T5Config(vocab_size=97, d_model=32, num_layers=1, num_heads=2).save_pretrained(tmp_path)
    assert "no causal language model: its model type is 't5'" in refusal(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model"}')
    assert "cannot read the configuration" in refusal(tmp_path)
    folder = Path(shutil.copytree(checkpoint("llama"), tmp_path / "incomplete"))
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert "missing_keys model.layers.1.mlp.up_proj.weight" in refusal(folder)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"dtype": "int8"}, "not 'int8'"),
        ({"device": "tpu"}, "not 'tpu'"),
        ({"device": "meta"}, "not 'meta'"),
        ({"device": "cuda:99"}, f"torch sees {torch.cuda.device_count()} CUDA devices"),
    ],
)
def test_unknown_dtypes_and_devices_are_named(source: dict[str, str], message: str, checkpoint: Checkpoint) -> None:
    assert message in refusal(checkpoint("llama"), **source)


REFUSED: dict[str, tuple[Callable[[], PreTrainedConfig], str]] = {
    "chunks": (
        lambda: Llama4TextConfig(
            **SMALL,
            num_key_value_heads=2,
            head_dim=8,
            attention_chunk_size=4,
            num_local_experts=2,
            intermediate_size_mlp=48,
        ),
        "all but 4 positions.* no layer names that .*chunked attention",
    ),
    "memory elsewhere": (
        lambda: Lfm2Config(**SMALL, num_key_value_heads=2, layer_types=["conv", "full_attention"]),
        "Lfm2.* attention in 1 of 2 layers",
    ),
    "a window in the mask alone": (
        lambda: Qwen2MoeConfig(
            **SMALL,
            num_key_value_heads=2,
            num_experts=2,
            num_experts_per_tok=1,
            use_sliding_window=True,
            sliding_window=3,
        ),
        "all but 3 positions",
    ),
    "both directions": (lambda: BertConfig(**SMALL), "both directions"),
    "own attention": (
        lambda: FalconConfig(vocab_size=97, hidden_size=32, num_hidden_layers=1, num_attention_heads=4),
        "Falcon.* attention interface",
    ),
    "no arguments": (lambda: StableLmConfig(**SMALL), "does not hand keyword arguments"),
}


@pytest.mark.parametrize("feature", REFUSED)
def test_features_beyond_the_packed_attention_are_named(feature: str, tmp_path: Path) -> None:
    config, message = REFUSED[feature]
    assert re.search(message, refusal(tiny.save(config(), tmp_path)))


@pytest.mark.parametrize("feature", ["own attention", "memory elsewhere", "no arguments"])
def test_a_model_in_memory_is_checked_as_any_other(feature: str) -> None:
    config, message = REFUSED[feature]
    with pytest.raises(CheckpointError, match=message):
        adopt(AutoModelForCausalLM.from_config(config()).eval(), "mine", "its fingerprint")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("sinks", torch.zeros(1), "attention sinks that follow the token"),
        ("position_bias", torch.zeros(1), "a bias by position"),
        ("block_sequence_ids", torch.zeros(1), "attention in both directions"),
        ("s_aux", torch.zeros(4, 2), "sinks of layer 0 are [4, 2], not one per head"),
    ],
)
def test_arguments_that_our_attention_ignores_are_named(
    name: str, value: torch.Tensor, message: str, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, more = GPT2Attention.forward, {name: value}
    monkeypatch.setattr(GPT2Attention, "forward", lambda self, *args, **given: forward(self, *args, **given, **more))
    assert message in refusal(checkpoint("gpt2"))


def test_each_layer_has_its_soft_cap_and_sinks(load: Load) -> None:
    assert [(layer.softcap, layer.sinks) for layer in load("gemma2").layers] == [(0.5, False)] * 3
    assert [(layer.softcap, layer.sinks) for layer in load("gpt-oss").layers] == [(None, True)] * 3
    assert all(layer.scores_alone for layer in load("llama").layers)


@pytest.mark.parametrize("by_layer_type", [False, True])
def test_the_context_ends_where_longrope_would_change_its_factors(by_layer_type: bool) -> None:
    """It takes the others as soon as one sequence of a step is beyond the original length."""
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 32}
    config = LlamaConfig(**SMALL)
    nested = {"sliding_attention": {"rope_type": "default"}, "full_attention": rope}
    config.rope_parameters = nested if by_layer_type else rope
    assert loader._context_length(config) == 32


def test_a_model_that_transformers_cannot_run_is_refused(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **options: object) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", fail)
    assert "does not run in transformers itself: RuntimeError: no such kernel" in refusal(checkpoint("llama"))


def test_a_model_that_packing_changes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """State outside the attention, here a sum over the rows of a step, shows in the logits of the self-check."""
    folder, model = tiny.save(GPT2Config(**GPT2), tmp_path), AutoModelForCausalLM.from_config(GPT2Config(**GPT2))
    forward = GPT2MLP.forward
    monkeypatch.setattr(GPT2MLP, "forward", lambda self, x: forward(self, x) + x.cumsum(1))
    assert "give other logits than its own forward" in refusal(folder)
    with pytest.raises(CheckpointError, match="give other logits than its own forward"):
        adopt(model, "mine", "its fingerprint")


def test_a_model_in_memory_is_taken_as_one_from_a_folder(load: Load, checkpoint: Checkpoint) -> None:
    expected = load("llama")
    model = AutoModelForCausalLM.from_pretrained(checkpoint("llama"), dtype=torch.float32).train()
    adopted = adopt(model, "mine", "its fingerprint")
    assert (adopted.name, adopted.weights_fingerprint) == ("mine", "its fingerprint")
    assert not adopted.model.training
    for name in ("layers", "vocab_size", "context_length", "eos_token_ids", "device", "dtype", "quantisation"):
        assert getattr(adopted, name) == getattr(expected, name)
    chunks = [Chunk(0, [5, 6, 7], 0, 0)]
    logits = []
    for loaded in (adopted, expected):
        packed = ModelRunner.build(loaded, max_sequences=1, max_length=8)
        packed.pool.allocate()
        logits.append(packed.forward(chunks))
    assert torch.equal(*logits)


# --------------------------------------------------------------------------------------------------------- fingerprint


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
    assert weights_fingerprint(folder) == weights_fingerprint(copied) == before


def test_a_change_of_the_configuration_changes_the_fingerprint(folder: Path) -> None:
    before = weights_fingerprint(folder)
    edit(folder, rms_norm_eps=1e-4)
    assert weights_fingerprint(folder) != before


@pytest.mark.parametrize("place", [12, -1, "first byte after the header"])
def test_a_changed_byte_in_header_or_sample_changes_the_fingerprint(folder: Path, place: int | str) -> None:
    before = weights_fingerprint(folder)
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    at = place if isinstance(place, int) else 8 + int.from_bytes(content[:8], "little")
    content[at] ^= 1
    path.write_bytes(content)
    assert weights_fingerprint(folder) != before


def test_a_large_file_is_sampled_evenly_and_never_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    path = tmp_path / "model.safetensors"
    save_file({"w": torch.zeros(4 << 20, dtype=torch.uint8)}, path)
    before = weights_fingerprint(tmp_path)
    size = path.stat().st_size
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):  # among any 80 KiB one place is sampled
        with path.open("r+b") as file:
            at = min(int(share * size) + 200, size - (80 << 10))
            file.seek(at)
            original = file.read(80 << 10)
            file.seek(at)
            file.write(b"\x01" * (80 << 10))
        assert weights_fingerprint(tmp_path) != before, share
        with path.open("r+b") as file:
            file.seek(at)
            file.write(original)
    assert weights_fingerprint(tmp_path) == before


def test_a_file_of_any_size_is_sampled(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    path = tmp_path / "model.safetensors"
    save_file({"w": torch.zeros(8, dtype=torch.uint8)}, path)
    with path.open("r+b") as file:
        file.truncate(1 << 40)  # a hole of a tebibyte: reading it whole would outlast any test
    assert len(weights_fingerprint(tmp_path)) == 64


def test_a_folder_that_is_no_checkpoint_has_no_fingerprint(tmp_path: Path) -> None:
    for name, content, message in (
        ("README.md", b"", r"no config\.json"),
        ("config.json", b"{}", "no weights"),
        ("model.safetensors", (1 << 40).to_bytes(8, "little") + b"{}", "cut off"),
        ("config.json", b"{", "not JSON"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(CheckpointError, match=message):
            weights_fingerprint(tmp_path)
