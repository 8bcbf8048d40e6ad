"""Models of llama.cpp, read from GGUF files by the low-level functions of llama-cpp-python."""

import ctypes
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from outrider.runtime.attention import AttentionLayer
from outrider.runtime.checkpoint import gguf_fingerprint, model_fingerprint
from outrider.runtime.errors import CheckpointError, UnsupportedModel
from outrider.runtime.gguf import has_long_factors, is_gguf, read, read_metadata, resolve_file
from outrider.runtime.gguf_tokenizer import gguf_tokenizer
from outrider.runtime.loader import LoadedModel, ModelSource
from outrider.runtime.selfcheck import Reference
from outrider.runtime.tokenizer import Tokenizer

LLAMA_CPP = "llama.cpp"
_ALL_F32 = 0  # `general.file_type`
_ENDLESS = 2**31 - 1
_WITHOUT_LOGITS = "llama-embed"  # llama.cpp keeps its keys and values, as of a model that writes


def chosen_runtime(runtime: str, model: str) -> str:
    """The runtime of a model, `torch` or `llama.cpp`, by the setting and the model's name.

    Raises:
        CheckpointError: the runtime cannot run such a model.
    """
    if runtime == "torch" and is_gguf(model):
        raise CheckpointError(f"--runtime torch: '{model}' is a GGUF file; only --runtime llama.cpp runs it")
    if runtime == LLAMA_CPP and not is_gguf(model):
        raise CheckpointError(
            f"--runtime llama.cpp: the name '{model}' does not end in .gguf; make a GGUF file of a checkpoint with: "
            f"outrider convert {model} OUT.gguf"
        )
    return LLAMA_CPP if is_gguf(model) else "torch"


@dataclass
class LlamaModel(LoadedModel):
    """A model of llama.cpp.

    Attributes:
        handle: of the model in the library.
        file_type: of most weights, such as q4_k_m; by torch's name where it has one.
    """

    handle: Any = field(default=None, repr=False)
    file_type: str = ""

    @property
    def number_format(self) -> str:
        return self.file_type


@cache
def library() -> ModuleType:
    """The bindings of llama.cpp, which then logs to `_log_lines` only.

    Raises:
        CheckpointError: the extra is not installed.
    """
    try:
        import llama_cpp
    except ImportError as error:
        raise CheckpointError(
            f"a GGUF file needs llama.cpp, which is not installed ({error}): pip install -e '.[llama]' in a clone of "
            "Outrider"
        ) from error
    except (OSError, RuntimeError) as error:  # of its shared library
        raise CheckpointError(f"the library of llama-cpp-python cannot be loaded: {error}") from error
    _check_processor(llama_cpp, processor_flags())
    llama_cpp.llama_log_set(_log_callback(llama_cpp), None)
    llama_cpp.llama_backend_init()
    return llama_cpp


# Instructions that llama.cpp may be built for, by its own names, and Linux's flags for them.
_INSTRUCTIONS = {
    "avx": "avx", "avx2": "avx2", "f16c": "f16c", "fma": "fma", "bmi2": "bmi2", "avx_vnni": "avx_vnni",
    "avx512": "avx512f", "avx512_vbmi": "avx512vbmi", "avx512_vnni": "avx512_vnni", "avx512_bf16": "avx512_bf16",
    "amx_int8": "amx_int8",
}  # fmt: skip


def processor_flags() -> frozenset[str]:
    """Linux's flags of this processor; empty where there are none."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    found = (line.partition(":")[2] for line in lines if line.startswith("flags"))
    return frozenset(next(found, "").split())


def _check_processor(llama_cpp: ModuleType, flags: frozenset[str]) -> None:
    """Compares the instructions of the build with the processor's: a missing one would kill the process with SIGILL.

    Raises:
        CheckpointError: the processor lacks some.
    """
    functions = llama_cpp.llama_cpp._lib
    built = [name for name in _INSTRUCTIONS if getattr(functions, f"ggml_cpu_has_{name}", int)()]
    lacking = [name.upper() for name in built if _INSTRUCTIONS[name] not in flags]
    if flags and lacking:
        raise CheckpointError(
            f"llama-cpp-python is built for {', '.join(lacking)}, which this processor lacks: "
            "pip install --force-reinstall --no-binary llama-cpp-python llama-cpp-python"
        )


_log_lines: list[str] = []
_MOST_LINES = 50
_ERROR = 4  # GGML_LOG_LEVEL_ERROR


@cache
def _log_callback(llama_cpp: ModuleType) -> Any:
    """Keeps the last errors of the library: its functions return none."""

    def keep(level: int, text: bytes, _data: object) -> None:
        if level == _ERROR:
            _log_lines.append(text.decode("utf-8", "replace").strip())
            del _log_lines[:-_MOST_LINES]

    return llama_cpp.llama_log_callback(keep)


def errors() -> str:
    """The errors that the library logged since the last call, in one line."""
    lines, _log_lines[:] = list(dict.fromkeys(_log_lines)), []
    return "; ".join(lines) or "llama.cpp gives no reason"


def load_gguf(source: ModelSource) -> tuple[LlamaModel, Tokenizer]:
    """Loads a GGUF file and its tokenizer.

    Raises:
        CheckpointError: it cannot be found, is not GGUF, or its model cannot be run; the text is one line.
    """
    llama_cpp = library()
    path = resolve_file(source.name, source.revision)
    metadata, tensors = read(path)
    fingerprint = gguf_fingerprint(path)
    architecture = str(metadata.get("general.architecture"))
    original = f"{architecture}.rope.scaling.original_context_length"
    # llama.cpp takes the factors for long contexts if the cells of all sequences are more than the original length. A
    # text may not depend on that: all have the others, as by the first runtime, and no more positions.
    override = original if has_long_factors(path, tensors) else None
    handle = _load(
        llama_cpp, path, architecture, vocab_only=False, layers=_gpu_layers(llama_cpp, source.device), endless=override
    )
    context_length = llama_cpp.llama_model_n_ctx_train(handle)
    if override is not None:
        context_length = min(context_length, metadata.get(original, context_length))
    if (
        llama_cpp.llama_model_has_encoder(handle)
        or not llama_cpp.llama_model_has_decoder(handle)
        or llama_cpp.llama_model_is_recurrent(handle)
        or llama_cpp.llama_model_is_hybrid(handle)
    ):
        raise UnsupportedModel(
            f"'{source.name}' is a model of architecture '{architecture}', with an encoder or a recurrent state, which "
            "cannot be rolled back"
        )
    if architecture == _WITHOUT_LOGITS:
        raise no_text(source.name)
    vocab = llama_cpp.llama_model_get_vocab(handle)
    tokenizer = gguf_tokenizer(llama_cpp, handle, metadata, source.name)
    description = ctypes.create_string_buffer(256)
    llama_cpp.llama_model_desc(handle, description, len(description))
    weights = description.value.decode("utf-8", "replace")
    vocab_size = llama_cpp.llama_vocab_n_tokens(vocab)
    heads = llama_cpp.llama_model_n_head(handle)
    size = metadata.get(f"{architecture}.attention.key_length") or llama_cpp.llama_model_n_embd(handle) // heads
    layer = AttentionLayer(heads, llama_cpp.llama_model_n_head_kv(handle), size, size**-0.5, None)
    if "outrider.tokenizer_config" in metadata:
        # Of `outrider convert`. Where such a file names no end of sequence, llama.cpp takes one all the same.
        ends = metadata.get("outrider.eos_token_ids", ())
    else:
        ends = (token for token in range(vocab_size) if llama_cpp.llama_vocab_is_eog(vocab, token))
    eos_token_ids = tuple(ends)
    return LlamaModel(
        model=None,
        device=torch.device("cpu"),
        dtype=torch.float32,
        dtype_reason=f"logits of llama.cpp are float32; the weights: {weights}",
        quantisation=None,
        vocab_size=vocab_size,
        context_length=context_length,
        name=source.name,
        eos_token_ids=eos_token_ids,
        weights_fingerprint=model_fingerprint(fingerprint, eos_token_ids, None),
        weight_bytes=llama_cpp.llama_model_size(handle),
        layers=(layer,) * llama_cpp.llama_model_n_layer(handle),
        reference=Reference(torch.empty(2, 0, dtype=torch.int64), torch.empty(2, 0, 0)),
        kv_dtype=torch.float32 if metadata.get("general.file_type") == _ALL_F32 else torch.float16,
        handle=handle,
        file_type=_file_type(llama_cpp, metadata.get("general.file_type")),
    ), tokenizer


def _file_type(llama_cpp: ModuleType, number: int | None) -> str:
    prefixes = ("LLAMA_FTYPE_ALL_", "LLAMA_FTYPE_MOSTLY_")
    names = [name for name in dir(llama_cpp) if name.startswith(prefixes) and getattr(llama_cpp, name) == number]
    short = names[0].split("_", 3)[3].lower() if names else "gguf"
    return {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}.get(short, short)


def no_text(name: str) -> UnsupportedModel:
    """The error for a model whose tokens see those after them."""
    return UnsupportedModel(
        f"llama.cpp runs '{name}' as a model of embeddings or of diffusion, which does not write token by token"
    )


def load_gguf_tokenizer(source: ModelSource) -> Tokenizer:
    """The tokenizer of a GGUF file, without its weights.

    Raises:
        CheckpointError: see `load_gguf`.
    """
    llama_cpp = library()
    path = resolve_file(source.name, source.revision)
    metadata = read_metadata(path)
    handle = _load(llama_cpp, path, str(metadata.get("general.architecture")), vocab_only=True, layers=0)
    return gguf_tokenizer(llama_cpp, handle, metadata, source.name)


def _load(
    llama_cpp: ModuleType, path: Path, architecture: str, *, vocab_only: bool, layers: int, endless: str | None = None
) -> Any:
    """`endless` is an entry of the metadata that llama.cpp gets as the largest number."""
    parameters = llama_cpp.llama_model_default_params()
    parameters.vocab_only, parameters.n_gpu_layers = vocab_only, layers
    overrides = (llama_cpp.llama_model_kv_override * 2)()  # the second, without a key, ends them
    if endless is not None:
        overrides[0].tag, overrides[0].key = llama_cpp.LLAMA_KV_OVERRIDE_TYPE_INT, endless.encode()
        overrides[0].value.val_i64 = _ENDLESS
        parameters.kv_overrides = overrides
    errors()
    handle = llama_cpp.llama_model_load_from_file(str(path).encode(), parameters)
    if not handle:
        raise CheckpointError(
            f"llama.cpp of llama-cpp-python {llama_cpp.__version__} cannot load '{path}', architecture "
            f"'{architecture}': {errors()}"
        )
    return Handle(handle, llama_cpp.llama_model_free)


class Handle:
    """A handle of the library, and as such an argument of its functions (ctypes); freed with its last reference.

    Args:
        needed: another handle, to be freed later.
    """

    def __init__(self, handle: Any, free: Callable[[Any], None], needed: "Handle | None" = None) -> None:
        self._as_parameter_ = handle
        weakref.finalize(self, _free, free, handle, needed).atexit = False


def _free(free: Callable[[Any], None], handle: Any, _needed: Handle | None) -> None:
    free(handle)


def _gpu_layers(llama_cpp: ModuleType, device: str) -> int:
    """Layers on a GPU: all (-1) or none."""
    if device == "cpu":
        return 0
    if llama_cpp.llama_supports_gpu_offload():
        return -1
    if device != "auto":
        raise CheckpointError(f"--device is {device}; llama-cpp-python is built for the CPU alone")
    return 0
