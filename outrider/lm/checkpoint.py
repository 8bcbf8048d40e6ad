"""Loads a causal language model of transformers so that it runs packed passes, or says in one line why it cannot.

It knows nothing of tokenizers, of slots or of what is done with logits.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as transformers_logging

from outrider.lm.attention import NAME
from outrider.lm.device import find_device
from outrider.lm.errors import CheckpointError
from outrider.lm.fingerprint import weights_fingerprint
from outrider.lm.probe import ELSEWHERE, AttentionLayer, probe_attention
from outrider.lm.program import Program, TransformersProgram
from outrider.lm.quantisation import placement, quantisation_method, settle_dtype
from outrider.lm.selfcheck import Reference, deviation, reference, tolerance
from outrider.lm.sharding import sharding
from outrider.lm.snapshot import resolve_folder

__all__ = ["CheckpointError", "LoadedModel", "ModelSource", "adopt", "load_model"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class ModelSource:
    """Where a model comes from and how it is to run.

    Attributes:
        name: a folder, or a hub id.
        revision: branch, tag or commit of a hub id.
        dtype: of weights and activations: `float32`, `bfloat16`, `float16`, or `auto`, the checkpoint's own where the
            device computes in it well. On a CPU without bfloat16 instructions, and for float16 on any CPU, that is
            float32.
        device: `auto` (CUDA where there is one), `cpu`, `cuda` (the first) or `cuda:i`.
        trust_remote_code: run Python code that comes with the checkpoint.
        ranks: how many processes share the model, each loading its part (`outrider.lm.sharding`).
    """

    name: str
    revision: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    trust_remote_code: bool = False
    ranks: int = 1


@dataclass
class LoadedModel:
    """A model ready to be driven by `outrider.lm.packed.PackedModel`.

    Attributes:
        model: the transformers model, in eval mode, with our attention: it runs packed passes only. Fusing it takes the
            weights away from it.
        config: its configuration.
        device: where it lies.
        dtype: what it runs in.
        dtype_reason: why, in a few words, for the log.
        quantisation: the method its weights are quantised by in the checkpoint, as transformers names it; None is none.
        vocab_size: V, the size of its logits; padded rows of the embedding included.
        context_length: how many positions it takes.
        name: as in its source.
        eos_token_ids: all tokens that end a text by the generation config, or else by the config.
        weights_fingerprint: see `outrider.lm.fingerprint`.
        weight_bytes: of all its tensors.
        layers: what each layer asks of the attention; of a shared model, by the heads of this process.
        reference: what transformers makes of a few tokens, to hold other programs against.
        fused: the fused program, once one has been made.
    """

    model: Any
    config: Any
    device: torch.device
    dtype: torch.dtype
    dtype_reason: str
    quantisation: str | None
    vocab_size: int
    context_length: int
    name: str
    eos_token_ids: tuple[int, ...]
    weights_fingerprint: str
    weight_bytes: int
    layers: tuple[AttentionLayer, ...]
    reference: Reference = field(repr=False)
    fused: Program | None = field(default=None, repr=False)


def load_model(source: ModelSource) -> LoadedModel:
    """Loads a model, quietly, and holds its packed forward against transformers' own.

    Raises:
        CheckpointError: it cannot be found, is no causal language model, its weights are incomplete, or it needs
            something the packed attention does not do. The text is one line.
    """
    device = find_device(source.device)
    folder = resolve_folder(source.name, source.revision, code=source.trust_remote_code)
    with _quiet():
        return _load(source, folder, device)


def _load(source: ModelSource, folder: Path, device: torch.device) -> LoadedModel:
    config = _config(folder, source)
    quantisation = quantisation_method(config, source.name)
    dtype, dtype_reason = _dtype(source.dtype, config, device)
    fingerprint = weights_fingerprint(folder)
    options = sharding(config, source.name, quantisation, source.ranks)
    if quantisation is not None:
        options |= placement(device)
    try:
        model = _load_weights(folder, source, config, dtype, options)
    except CheckpointError as error:
        if quantisation is None:
            raise
        raise CheckpointError(f"{error} (its weights are quantised by '{quantisation}')") from error
    if quantisation is not None:
        settle_dtype(model, dtype)
    return _ready(model.to(device), source.name, fingerprint, device, dtype, dtype_reason, quantisation)


def adopt(model: Any, name: str, weights_fingerprint: str) -> LoadedModel:
    """Takes a model that is in memory already, on its device and in its dtype, and holds it as `load_model` does.

    Args:
        model: a causal language model of transformers, of one dtype and on one device. It is changed: its attention
            becomes ours.
        name: how the model is called from here on.
        weights_fingerprint: stands for its weights; two models with the same one are taken to be the same.

    Raises:
        CheckpointError: it needs something the packed attention does not do. The text is one line.
    """
    first = next(model.parameters())
    with _quiet():
        try:
            model.set_attn_implementation(NAME)
        except ValueError as error:
            raise CheckpointError(f"the attention of {type(model).__name__} {ELSEWHERE}") from error
        return _ready(model, name, weights_fingerprint, first.device, first.dtype, "as it came", None)


def _ready(
    model: Any,
    name: str,
    fingerprint: str,
    device: torch.device,
    dtype: torch.dtype,
    dtype_reason: str,
    quantisation: str | None,
) -> LoadedModel:
    """A model that lies on its device, looked over and held against transformers' own forward."""
    model = model.eval().requires_grad_(False)
    layers = probe_attention(model)
    context_length = _context_length(model.config)
    vocab_size = _vocab_size(model)
    expected = reference(model, vocab_size, context_length)
    distance = deviation(TransformersProgram(model), layers, expected, dtype, device)
    allowed = tolerance(dtype, quantised=quantisation is not None)
    if not distance <= allowed:
        raise CheckpointError(
            f"packed passes of {type(model).__name__} give other logits than its own forward (they differ by "
            f"{distance:.2g} of their size, {allowed:g} allowed): it has a state or a mask of its own"
        )
    return LoadedModel(
        model=model,
        config=model.config,
        device=device,
        dtype=dtype,
        dtype_reason=dtype_reason,
        quantisation=quantisation,
        vocab_size=vocab_size,
        context_length=context_length,
        name=name,
        eos_token_ids=_eos_token_ids(model),
        weights_fingerprint=fingerprint,
        weight_bytes=_weight_bytes(model),
        layers=layers,
        reference=expected,
    )


def _config(folder: Path, source: ModelSource) -> Any:
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"'{source.name}' has no config.json")
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=source.trust_remote_code)
    except Exception as error:
        raise CheckpointError(f"cannot read the configuration of '{source.name}': {error}") from error
    remote = source.trust_remote_code and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not remote:
        raise CheckpointError(f"'{source.name}' is no causal language model: its model type is '{config.model_type}'")
    return config


def _dtype(name: str, config: Any, device: torch.device) -> tuple[torch.dtype, str]:
    if name in _DTYPES:
        return _DTYPES[name], "as asked for"
    if name != "auto":
        raise CheckpointError(f"dtype must be auto, {', '.join(_DTYPES)}, not '{name}'")
    own = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None) or torch.float32
    if own not in _DTYPES.values():
        return torch.float32, f"the checkpoint's {own} is none we run"
    if device.type == "cuda" or own == torch.float32:
        return own, "the checkpoint's own"
    if own == torch.bfloat16 and _cpu_computes_bfloat16():
        return own, "the checkpoint's own, and this CPU computes in bfloat16"
    return torch.float32, f"this CPU ({torch.backends.cpu.get_cpu_capability()}) does not compute in {own}"


def _cpu_computes_bfloat16() -> bool:
    checks = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    return any(check is not None and check() for check in checks)


def _load_weights(folder: Path, source: ModelSource, config: Any, dtype: torch.dtype, options: dict[str, Any]) -> Any:
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation=NAME,
            trust_remote_code=source.trust_remote_code,
            output_loading_info=True,
            **options,
        )
    except KeyError as error:
        if NAME not in str(error):
            raise CheckpointError(f"cannot load '{source.name}': no {error}") from error
        kind = ", ".join(getattr(config, "architectures", None) or [config.model_type])
        raise CheckpointError(f"the attention of {kind} {ELSEWHERE}") from error
    except Exception as error:
        raise CheckpointError(f"cannot load '{source.name}': {type(error).__name__}: {error}") from error
    for problem in ("missing_keys", "mismatched_keys"):
        keys = sorted(str(key) for key in report.get(problem) or ())
        if keys:
            raise CheckpointError(
                f"the weights of '{source.name}' do not fit its model: {problem} {', '.join(keys[:3])}"
                + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")
            )
    return model


def _vocab_size(model: Any) -> int:
    head = model.get_output_embeddings()
    if head is None or getattr(head, "weight", None) is None:
        raise CheckpointError(f"{type(model).__name__} has no output embedding: it is no causal language model")
    return int(head.weight.shape[0])


def _weight_bytes(model: Any) -> int:
    tensors = [*model.parameters(), *model.buffers()]
    return sum({each.data_ptr(): each.numel() * each.element_size() for each in tensors}.values())  # tied ones once


def _context_length(config: Any) -> int:
    text = config.get_text_config()
    lengths = (getattr(text, name, None) for name in ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"))
    length = next((length for length in lengths if isinstance(length, int) and length > 0), None)
    if length is None:
        raise CheckpointError(f"the configuration of model type '{config.model_type}' names no context length")
    # Beyond its original length this rotary embedding follows the longest sequence of a pass: who else is there.
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = [rope, *(kind for kind in rope.values() if isinstance(kind, dict))]  # one, or one for each kind of layer
    for kind in kinds:
        if kind.get("rope_type") == "longrope":
            length = min(length, kind.get("original_max_position_embeddings") or length)
    return length


def _eos_token_ids(model: Any) -> tuple[int, ...]:
    generation = getattr(model, "generation_config", None)
    found = getattr(generation, "eos_token_id", None)
    if found is None:
        found = getattr(model.config.get_text_config(), "eos_token_id", None)
    if found is None:
        return ()
    return (found,) if isinstance(found, int) else tuple(dict.fromkeys(found))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars and no advice from transformers; refusals come as exceptions."""
    level = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()
