"""Writes a checkpoint of transformers as a GGUF file, for llama.cpp.

Llama, Mistral, Qwen2, Qwen3, Gemma 3 and GPT-2, in their plain forms. The tokenizer goes in twice: as the vocabulary
that llama.cpp reads, and whole, under the key that GGUF has for it (`tokenizer.huggingface.json`). Outrider reads the
second, so a converted model splits text exactly as its checkpoint.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig

from outrider.runtime.checkpoint import read_json, resolve_folder, token_ids, weight_files
from outrider.runtime.errors import CheckpointError, UnsupportedModel
from outrider.runtime.gguf import is_gguf
from outrider.runtime.loader import ModelSource
from outrider.runtime.tokenizer import load_tokenizer

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# Names of GGUF's pre-tokenizers, by the regular expression of the tokenizer.
_PRE_TOKENIZERS = {
    _WORDS + r"\p{N}{1,3}" + _REST: "llama-bpe",
    _WORDS + r"\p{N}" + _REST: "qwen2",
}


@dataclass(frozen=True)
class _Architecture:
    """How one model type is written.

    Attributes:
        name: in GGUF.
        permutes: whether rows of Q and K are reordered: llama.cpp rotates neighbours in this architecture.
        norm_offset: added to the weights of norms.
        transposed: suffixes of weights that the checkpoint stores as [in, out].
    """

    name: str
    permutes: bool = False
    norm_offset: float = 0.0
    transposed: tuple[str, ...] = ()


_ARCHITECTURES = {
    "llama": _Architecture("llama", permutes=True),
    "mistral": _Architecture("llama", permutes=True),
    "qwen2": _Architecture("qwen2"),
    "qwen3": _Architecture("qwen3"),
    "gemma3_text": _Architecture("gemma3", norm_offset=1.0),
    "gpt2": _Architecture("gpt2", transposed=("c_attn.weight", "c_proj.weight", "c_fc.weight")),
}


# Values of entries that llama.cpp does not read, but computes with.
_DONE: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu", "swish"),
    "hidden_activation": ("gelu_pytorch_tanh",),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "use_bidirectional_attention": (False, None),
}


def convert(name: str, output: Path, kind: str, *, revision: str | None = None) -> int:
    """Writes the GGUF file of a folder or hub id; returns its size in bytes. An existing file is replaced;
    of a symbolic link, the file that it names.

    Args:
        kind: of the matrices, `f32`, `f16`, `bf16` or `q8_0`; vectors stay float32.
        revision: of a hub id.

    Raises:
        CheckpointError: the package `gguf` is missing, the checkpoint cannot be converted, or `output` is a device or
            not named `*.gguf`; the text is one line.
    """
    try:
        import gguf
    except ImportError as error:
        raise CheckpointError(
            "outrider convert needs the package gguf: pip install -e '.[llama]' in a clone of Outrider"
        ) from error
    if not is_gguf(output.name):
        raise CheckpointError(f"the name '{output}' does not end in .gguf, by which the services know such a file")
    output = output.resolve()
    if output.exists() and not output.is_file():
        raise CheckpointError(f"'{output}' is not a regular file; give another path for the GGUF file")
    folder = resolve_folder(name, revision)
    config = read_json(folder / "config.json")
    found = _ARCHITECTURES.get(config.get("model_type", ""))
    if found is None:
        raise UnsupportedModel(
            f"'{name}' is a model of type '{config.get('model_type')}'; outrider convert supports "
            f"{', '.join(_ARCHITECTURES)}; for others use convert_hf_to_gguf.py of llama.cpp"
        )
    config = _with_defaults(folder, name)
    _check_plain(config, name)
    part = output.with_name(output.name + ".part")
    writer = gguf.GGUFWriter(part, found.name)
    try:
        _write_shape(writer, gguf, config, found, kind, folder.name)
        _write_tokenizer(writer, gguf, folder, config)
        _write_tensors(writer, gguf, folder, config, found, kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    except BaseException:
        writer.close()
        part.unlink(missing_ok=True)
        raise
    writer.close()
    part.replace(output)
    return output.stat().st_size


def _with_defaults(folder: Path, name: str) -> dict[str, Any]:
    """The configuration with transformers' values for what the file leaves out."""
    try:
        return AutoConfig.from_pretrained(folder).to_dict()
    except Exception as error:  # of many types
        raise CheckpointError(f"cannot read the configuration of '{name}': {error}") from error


def _check_plain(config: dict[str, Any], name: str) -> None:
    """Refuses what this converter would drop in silence."""
    rope = config.get("rope_parameters") or {}
    for each in (rope, *(kind for kind in rope.values() if isinstance(kind, dict))):
        kind = each.get("rope_type", "default")
        if kind != "default":
            raise UnsupportedModel(
                f"'{name}' has rotary embeddings of type '{kind}'; outrider convert supports the default"
            )
    if config.get("quantization_config"):
        raise UnsupportedModel(f"the weights of '{name}' are quantised; give the checkpoint that they were made from")
    if config["model_type"] in ("qwen2", "qwen3", "mistral", "llama") and (
        config.get("use_sliding_window") or (config["model_type"] == "mistral" and config.get("sliding_window"))
    ):
        raise UnsupportedModel(f"'{name}' has sliding windows, which outrider convert supports in gemma3_text alone")
    if config["model_type"] == "gemma3_text" and config.get("query_pre_attn_scalar") != config.get("head_dim"):
        raise UnsupportedModel(
            f"'{name}' has query_pre_attn_scalar {config.get('query_pre_attn_scalar')} and head_dim "
            f"{config.get('head_dim')}; llama.cpp takes one for the other"
        )
    if any(config.get(key) for key in ("attn_logit_softcapping", "final_logit_softcapping")):
        raise UnsupportedModel(f"'{name}' has soft-capping, which llama.cpp's Gemma 3 has not")
    for key, done in _DONE.items():
        is_read = key != "hidden_act" or config["model_type"] != "gemma3_text"
        if is_read and config.get(key, done[0]) not in done:
            raise UnsupportedModel(f"'{name}' has {key} {config[key]!r}; outrider convert supports {done[0]!r}")
    if any(config.get(key) for key in ("attention_bias", "mlp_bias")):
        raise UnsupportedModel(f"'{name}' has biases in attention or MLP, which llama.cpp would drop")


def _write_shape(writer: Any, gguf: Any, config: dict[str, Any], found: _Architecture, kind: str, name: str) -> None:
    """The hyperparameters."""
    is_gpt2 = found.name == "gpt2"
    heads = config["n_head" if is_gpt2 else "num_attention_heads"]
    width = config["n_embd" if is_gpt2 else "hidden_size"]
    writer.add_name(name)
    file_type = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0"}[kind]
    writer.add_file_type(getattr(gguf.LlamaFileType, file_type))
    writer.add_context_length(config["n_positions" if is_gpt2 else "max_position_embeddings"])
    writer.add_embedding_length(width)
    writer.add_block_count(config["n_layer" if is_gpt2 else "num_hidden_layers"])
    writer.add_head_count(heads)
    writer.add_vocab_size(config["vocab_size"])
    if is_gpt2:
        writer.add_feed_forward_length(config.get("n_inner") or 4 * width)
        writer.add_layer_norm_eps(config.get("layer_norm_epsilon", 1e-5))
        return
    size = config.get("head_dim") or width // heads
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    writer.add_layer_norm_rms_eps(config.get("rms_norm_eps", 1e-6))
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_rope_dimension_count(size)
    rope = config["rope_parameters"]
    writer.add_rope_freq_base(float(rope.get("full_attention", rope)["rope_theta"]))
    if found.name == "gemma3":
        _write_windows(writer, config, rope)


def _write_windows(writer: Any, config: dict[str, Any], rope: dict[str, Any]) -> None:
    """The sliding windows of Gemma 3."""
    kinds = config["layer_types"]
    if "sliding_attention" not in kinds:
        return  # llama.cpp aborts at a window that no layer has
    writer.add_sliding_window(config["sliding_window"])
    writer.add_rope_freq_base_swa(float(rope["sliding_attention"]["rope_theta"]))
    writer.add_sliding_window_pattern([each == "sliding_attention" for each in kinds])


# ------------------------------------------------------------------------------------------------------------ weights


def _write_tensors(
    writer: Any, gguf: Any, folder: Path, config: dict[str, Any], found: _Architecture, kind: str
) -> None:
    layers = config.get("num_hidden_layers") or config["n_layer"]
    architecture = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == found.name)
    names = gguf.get_tensor_name_map(architecture, layers)
    heads = config.get("num_attention_heads") or config["n_head"]
    kv_heads = config.get("num_key_value_heads") or heads
    for name, tensor in _tensors(folder):
        if name == "lm_head.weight" and config.get("tie_word_embeddings", found.name in ("gpt2", "gemma3")):
            continue
        if name.endswith((".attn.bias", ".attn.masked_bias", "rotary_emb.inv_freq")):
            continue  # buffers of old checkpoints
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if target is None and found.name == "gpt2":  # saved without the head
            target = names.get_name(f"transformer.{name}", try_suffixes=(".weight", ".bias"))
        if target is None:
            raise UnsupportedModel(f"'{folder}' has the tensor {name}, for which GGUF's {found.name} has no place")
        values = tensor.float()
        if found.permutes and name.endswith(("q_proj.weight", "k_proj.weight")):
            values = permuted(values, heads if name.endswith("q_proj.weight") else kv_heads)
        if name.endswith(found.transposed):
            values = values.T
        if found.norm_offset and name.endswith("norm.weight"):
            values = values + found.norm_offset
        _write_tensor(writer, gguf, target, values, kind)


def _write_tensor(writer: Any, gguf: Any, name: str, values: Tensor, kind: str) -> None:
    array = np.ascontiguousarray(values.numpy())
    if kind == "f32" or array.ndim == 1 or name == "position_embd.weight":
        writer.add_tensor(name, array)
        return
    chosen = getattr(gguf.GGMLQuantizationType, kind.upper())
    if kind == "q8_0" and array.shape[-1] % 32:
        chosen = gguf.GGMLQuantizationType.F16
    writer.add_tensor(name, gguf.quants.quantize(array, chosen), raw_dtype=chosen)


def permuted(weights: Tensor, heads: int) -> Tensor:
    """The rows of a Q or K matrix, `[heads * size, in]`, in llama.cpp's order.

    transformers rotates row i of a head together with row i + size / 2; llama.cpp rotates neighbours.
    """
    return weights.view(heads, 2, -1, weights.size(1)).transpose(1, 2).reshape(weights.shape)


def _tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    files = weight_files(folder)
    if not files:
        raise CheckpointError(f"'{folder}' has no *.safetensors; save the model with save_pretrained first")
    for path in files:
        try:
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118  # not a dict
                    yield name, file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"cannot read '{path}': {error}") from error


# ---------------------------------------------------------------------------------------------------------- tokenizer


def _write_tokenizer(writer: Any, gguf: Any, folder: Path, config: dict[str, Any]) -> None:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(f"'{folder}' has no tokenizer.json; save its tokenizer with save_pretrained first")
    whole = None
    with suppress(CheckpointError):  # it is damaged, or needs code of its own
        # As transformers builds it: for some families it takes only the vocabulary and the merges of the file.
        whole = load_tokenizer(ModelSource(str(folder))).to_json()
    found = read_json(path) if whole is None else json.loads(whole)
    whole = whole or path.read_text(encoding="utf-8")
    options = read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").is_file() else {}
    added = {each["content"]: each for each in found.get("added_tokens", ())}
    vocabulary = found["model"].get("vocab", {})
    if isinstance(vocabulary, list):  # of a unigram model: pairs of a token and its score
        vocabulary = {token: index for index, (token, _) in enumerate(vocabulary)}
    ids = {**vocabulary, **{token: each["id"] for token, each in added.items()}}
    if max(vocabulary.values(), default=-1) >= config["vocab_size"]:
        raise CheckpointError(f"the tokenizer of '{folder}' has more tokens than the model's {config['vocab_size']}")
    # Gemma 3's tokenizer for text has a token for images, which the model lacks.
    ids = {token: index for token, index in ids.items() if index < config["vocab_size"]}
    if _suits_llama_cpp(found):
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(_pre_tokenizer(found))
        size = config["vocab_size"]
        tokens, kinds = [f"[PAD{i}]" for i in range(size)], [gguf.TokenType.UNUSED] * size
        for token, index in ids.items():
            tokens[index] = token
            kinds[index] = gguf.TokenType.NORMAL
            if token in added:
                kinds[index] = gguf.TokenType.CONTROL if added[token]["special"] else gguf.TokenType.USER_DEFINED
        writer.add_token_list(tokens)
        writer.add_token_types(kinds)
        merges = found["model"]["merges"]
        writer.add_token_merges([each if isinstance(each, str) else " ".join(each) for each in merges])
    else:
        writer.add_tokenizer_model("none")  # llama.cpp runs the model, but cannot split text
    writer.add_string("tokenizer.huggingface.json", whole)
    _write_special(writer, folder, config, options, ids)


def _suits_llama_cpp(tokenizer: dict[str, Any]) -> bool:
    """Whether it can go in as `gpt2`."""
    steps = tokenizer.get("pre_tokenizer") or {}
    kinds = {each["type"] for each in steps.get("pretokenizers", [steps]) if each}
    has_merges = bool(tokenizer["model"].get("merges"))  # only BPE has them, and llama.cpp wants some
    return "ByteLevel" in kinds and has_merges


def _pre_tokenizer(tokenizer: dict[str, Any]) -> str:
    """GGUF's name of the pre-tokenizer; GPT-2's if llama.cpp has none that splits the same."""
    steps = tokenizer["pre_tokenizer"]
    for each in steps.get("pretokenizers", [steps]):
        pattern = (each.get("pattern") or {}).get("Regex")
        if pattern in _PRE_TOKENIZERS:
            return _PRE_TOKENIZERS[pattern]
    return "gpt-2"


def _write_special(
    writer: Any, folder: Path, config: dict[str, Any], options: dict[str, Any], ids: dict[str, int]
) -> None:
    """Special tokens, the end-of-sequence tokens of the generation config, and the chat template."""
    path = folder / "generation_config.json"
    generation = read_json(path) if path.is_file() else {}
    roles: dict[str, Callable[[int], None]] = {
        "bos_token": writer.add_bos_token_id,
        "eos_token": writer.add_eos_token_id,
        "pad_token": writer.add_pad_token_id,
        "unk_token": writer.add_unk_token_id,
    }
    for role, add in roles.items():
        token = options.get(role)
        text = token.get("content") if isinstance(token, dict) else token
        if text in ids:
            add(ids[text])
    writer.add_add_bos_token(bool(options.get("add_bos_token", False)))
    ends = generation.get("eos_token_id")
    ends = config.get("eos_token_id") if ends is None else ends
    if ends is not None:
        writer.add_array("outrider.eos_token_ids", list(token_ids("eos_token_id", ends)))
    writer.add_string("outrider.tokenizer_config", json.dumps(options))
    template = folder / "chat_template.jinja"
    text = template.read_text(encoding="utf-8") if template.is_file() else options.get("chat_template")
    if text:
        writer.add_chat_template(text)  # one, or a list with names: then the default is the one that is read
