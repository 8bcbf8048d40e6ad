"""`outrider convert`: what a GGUF file has of its checkpoint, and what is refused."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, normalizers

from outrider.runtime.errors import CheckpointError, UnsupportedModel
from outrider.runtime.gguf import read_metadata
from outrider.runtime.gguf_convert import convert
from outrider.runtime.llama_cpp import LlamaRunner
from outrider.runtime.llama_loader import load_gguf, load_gguf_tokenizer
from outrider.runtime.loader import ModelSource, load_model
from outrider.runtime.model_runner import Chunk
from outrider.runtime.tokenizer import load_tokenizer
from tests.cluster import MODELS
from tests.gguf_files import TEMPLATE, TEXTS, save_tokenizer, write_gguf
from tests.outrider.runtime import tiny

pytest.importorskip("llama_cpp", reason="the extra `llama` is not installed: make test-llama")
pytest.importorskip("gguf", reason="the extra `llama` is not installed: make test-llama")


def save(name: str, folder: Path) -> Path:
    """Save a tiny model with a tokenizer."""
    tiny.save(tiny.FAMILIES[name](), folder)
    save_tokenizer(folder, tiny.VOCABULARY, chat_template=TEMPLATE)
    return folder


def edit(path: Path, **entries: Any) -> None:
    """Change entries of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


@pytest.mark.parametrize(
    ("name", "entry", "message"),
    [
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rotary embeddings of type 'linear'"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act 'gelu'; outrider convert supports 'silu'"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx True"),
    ],
)
def test_what_llama_cpp_would_not_do_is_not_converted(
    name: str, entry: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = save(name, tmp_path)
    edit(folder / "config.json", rope_parameters=None, **entry)
    with pytest.raises(UnsupportedModel, match=message):
        convert(str(folder), tmp_path / "out.gguf", "f32")


@pytest.mark.parametrize(
    ("left_out", "given"),
    [(("layer_types", "_sliding_window_pattern"), {"sliding_window_pattern": 2}), (("rope_parameters",), {})],
    ids=["windows", "rotary embeddings"],
)
def test_what_a_configuration_leaves_out_has_transformers_values(
    left_out: tuple[str, ...], given: dict[str, int], tmp_path: Path
) -> None:
    config = transformers.Gemma3TextConfig(
        **tiny.SHAPE,
        num_key_value_heads=2,
        head_dim=8,
        query_pre_attn_scalar=8,
        sliding_window=tiny.WINDOW,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )
    save_tokenizer(tiny.save(config, tmp_path), tiny.VOCABULARY)
    entries = json.loads((tmp_path / "config.json").read_text())
    entries = {key: value for key, value in entries.items() if key not in left_out} | given
    (tmp_path / "config.json").write_text(json.dumps(entries))
    loaded, _ = load_gguf(ModelSource(str(write_gguf(tmp_path)), device="cpu"))
    runner, tokens = LlamaRunner(loaded, blocks=2, max_length=64, threads=1), list(range(3, 40))
    wanted = tiny.Reference(tmp_path)(tokens)
    found = runner.logits([Chunk(runner.pool.allocate(), tokens, 0, 0)])
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-3 * float(wanted.abs().max()))


def test_an_old_checkpoint_without_a_context_length_and_a_type_of_tokenizer_is_converted(tmp_path: Path) -> None:
    folder = save("llama", tmp_path)
    entries = json.loads((folder / "config.json").read_text())
    del entries["max_position_embeddings"]
    (folder / "config.json").write_text(json.dumps(entries))
    entries = json.loads((folder / "tokenizer.json").read_text())
    del entries["model"]["type"]
    (folder / "tokenizer.json").write_text(json.dumps(entries))
    assert load_gguf(ModelSource(str(write_gguf(folder)), device="cpu"))[0].context_length == 2048
    assert read_metadata(write_gguf(folder))["tokenizer.ggml.model"] == "gpt2"


def test_an_added_token_that_the_model_lacks_is_left_out(tmp_path: Path) -> None:
    """As Gemma 3's for images, in its checkpoints for text."""
    folder = save("llama", tmp_path)
    count = read_metadata(write_gguf(folder))["tokenizer.ggml.tokens"].length
    entries = json.loads((folder / "tokenizer.json").read_text())
    token = {"id": count, "content": "<image>", "special": True, "normalized": False}
    entries["added_tokens"].append(token | dict.fromkeys(("single_word", "lstrip", "rstrip"), False))
    (folder / "tokenizer.json").write_text(json.dumps(entries))
    assert read_metadata(write_gguf(folder))["tokenizer.ggml.tokens"].length == count


def test_only_the_checkpoints_own_weights_are_converted(tmp_path: Path) -> None:
    """Some repositories hold the weights a second time, under other names."""
    folder = save("llama", tmp_path)
    alone = write_gguf(folder).read_bytes()
    save_file({"layers.0.attention.wq.weight": torch.zeros(32, 32)}, folder / "consolidated.safetensors")
    convert(str(folder), tmp_path / "out.gguf", "f32")
    assert (tmp_path / "out.gguf").read_bytes() == alone
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"cannot read '.*model.safetensors'"):
        convert(str(folder), tmp_path / "out.gguf", "f32")


def test_a_damaged_tokenizer_is_not_converted(tmp_path: Path) -> None:
    folder = save("llama", tmp_path)
    (folder / "tokenizer.json").write_text((folder / "tokenizer.json").read_text()[:-9])
    with pytest.raises(CheckpointError, match=r"cannot read '.*tokenizer.json'"):
        convert(str(folder), tmp_path / "out.gguf", "f32")


def test_the_output_of_a_conversion_is_a_file_or_a_link_to_one(tmp_path: Path) -> None:
    pipe, link, file = (tmp_path / name for name in ("pipe.gguf", "link.gguf", "file.gguf"))
    os.mkfifo(pipe)
    link.symlink_to(file)
    with pytest.raises(CheckpointError, match=r"file\.q8' does not end in \.gguf"):
        convert(str(MODELS / "draft"), tmp_path / "file.q8", "q8_0")
    with pytest.raises(CheckpointError, match=r"pipe\.gguf' is not a regular file"):
        convert(str(MODELS / "draft"), pipe, "bf16")
    assert pipe.is_fifo()
    convert(str(MODELS / "draft"), link, "bf16")
    assert link.is_symlink()
    assert read_metadata(file)


BEGIN = {"__type": "AddedToken", "content": "<begin>"}  # as in Llama 2


@pytest.mark.parametrize(
    "entry", [{"bos_token": BEGIN}, {"sep_token": "<tool>"}, {"additional_special_tokens": ["<tool>"]}]
)
def test_a_converted_tokenizer_is_that_of_the_checkpoint(entry: dict[str, Any], tmp_path: Path) -> None:
    folder = save("llama", tmp_path)
    edit(folder / "tokenizer_config.json", **entry)
    theirs = load_tokenizer(ModelSource(str(folder)))
    ours = load_gguf_tokenizer(ModelSource(str(write_gguf(folder))))
    assert ours.fingerprint == theirs.fingerprint
    assert ours.special_tokens() == theirs.special_tokens()
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
    chat = [{"role": "user", "content": "the hat"}, {"role": "tool", "content": "an"}]
    assert ours.encode_chat(chat) == theirs.encode_chat(chat)
    moody = {"mood": "an"}
    assert ours.encode_chat(chat, moody) == theirs.encode_chat(chat, moody) != ours.encode_chat(chat)


def test_the_tokenizer_of_a_family_that_transformers_rebuilds_is_the_rebuilt_one(tmp_path: Path) -> None:
    """Of a Llama tokenizer transformers takes vocabulary and merges, and decides itself where spaces are added."""
    tiny.save(tiny.FAMILIES["llama"](), tmp_path)
    letters = ["<unk>", "<s>", "</s>", "▁", *"catehdnr"]
    merges = [("c", "a"), ("ca", "t"), ("▁", "cat"), ("▁", "▁")]
    words = [*letters, *map("".join, merges)]
    found = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=merges))
    found.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    found.add_special_tokens(["<s>", "</s>"])
    found.save(str(tmp_path / "tokenizer.json"))
    roles = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(roles))
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    theirs = load_tokenizer(ModelSource(str(tmp_path)))
    ours = load_gguf_tokenizer(ModelSource(str(write_gguf(tmp_path))))
    for text in ("cat", " cat", "  the cat", "cat</s>cat", "cat</s> cat"):
        assert ours.encode(text) == theirs.encode(text)
    assert theirs.encode("cat</s>cat", add_special=False) != found.encode("cat</s>cat", add_special_tokens=False).ids
    chat = [{"role": "cat", "content": "a cat"}, {"role": "the", "content": "</s>cat"}]
    assert ours.encode_chat(chat) == theirs.encode_chat(chat)
    assert ours.fingerprint == theirs.fingerprint


@pytest.mark.parametrize("role", [None, "eos_token"])
def test_only_the_checkpoints_own_tokens_end_a_text(role: str | None, tmp_path: Path) -> None:
    """llama.cpp takes token 11 of a byte-level vocabulary where a file names none, and else the tokenizer's."""
    folder = save("llama", tmp_path)
    (folder / "generation_config.json").unlink()
    edit(folder / "config.json", eos_token_id=None)
    if role is None:
        edit(folder / "tokenizer_config.json", eos_token=None)
    loaded, tokenizer = load_gguf(ModelSource(str(write_gguf(folder)), device="cpu"))
    assert loaded.eos_token_ids == load_model(ModelSource(str(folder), device="cpu")).eos_token_ids == ()
    assert tokenizer.eos_token_ids == load_tokenizer(ModelSource(str(folder))).eos_token_ids


def test_the_default_of_several_chat_templates_is_that_of_the_file(tmp_path: Path) -> None:
    folder = save("llama", tmp_path)
    (folder / "chat_template.jinja").unlink()
    templates = [{"name": "tool_use", "template": "[tool]"}, {"name": "default", "template": TEMPLATE}]
    edit(folder / "tokenizer_config.json", chat_template=templates)
    theirs = load_tokenizer(ModelSource(str(folder)))
    ours = load_gguf_tokenizer(ModelSource(str(write_gguf(folder))))
    assert ours.chat_template == theirs.chat_template == TEMPLATE
    chat = [{"role": "user", "content": "the hat"}]
    assert ours.encode_chat(chat) == theirs.encode_chat(chat)
