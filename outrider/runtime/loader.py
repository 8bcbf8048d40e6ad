"""Loads a model of transformers from a folder or a hub id, for batches of packed sequences.

Models are causal language models, and those with encoder and decoder. It loads the weights (plain, quantised, or the
share of one rank), reads the model's limits, and checks its packed forward pass against transformers. An error is one
line with the reason.
"""

import contextlib
import hashlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.utils import is_accelerate_available
from transformers.utils import logging as transformers_logging
from transformers.utils.quantization_config import FineGrainedFP8Config

from kernels.generation_rules import GenerationRules
from outrider.runtime import generation_rules
from outrider.runtime.attention import ELSEWHERE, NAME, AttentionLayer, Program, TransformersProgram, probe_attention
from outrider.runtime.checkpoint import model_fingerprint, read_json, resolve_folder, token_ids, weights_fingerprint
from outrider.runtime.device import find_device
from outrider.runtime.encoder_decoder import LONGEST, EncoderDecoder, patch_model
from outrider.runtime.errors import CheckpointError, UnsupportedModel
from outrider.runtime.fused_layers import is_changed, is_plain_tensor
from outrider.runtime.selfcheck import Reference, check_program, logits_tolerance, reference
from outrider.runtime.skip_layers import skip_layers

# Packages of modules with plain weights; quantised modules come from other packages.
_ORDINARY = ("torch.nn.", "transformers.models.", "transformers.pytorch_utils", "transformers_modules.")
# Model types with encoder and decoder that packed batches support.
_ENCODER_DECODERS = {
    "bart": AutoModelForSeq2SeqLM,
    "marian": AutoModelForSeq2SeqLM,
    "t5": AutoModelForSeq2SeqLM,
    "whisper": AutoModelForSpeechSeq2Seq,
}
# Entries of a configuration that name the mask token of parallel drafting (PARD, and others).
_MASK_TOKENS = ("pard_token", "ptd_token_id")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class ModelSource:
    """The source of a model, and how to run it.

    Attributes:
        name: a folder, or a hub id.
        revision: branch, tag or commit of a hub id.
        dtype: of weights and activations: `float32`, `bfloat16`, `float16`, or `auto`: the dtype of the checkpoint if
            the device is fast at it, else float32. A CPU is fast at bfloat16 if it has instructions for it, and never
            at float16.
        device: `auto` (CUDA if available), `cpu`, `cuda` (the first) or `cuda:N`.
        trust_remote_code: run Python code that comes with the checkpoint.
        ranks: number of processes that share the model; each loads its part.
        skip_layers: layers to leave out, see `outrider.runtime.skip_layers`.
    """

    name: str
    revision: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    trust_remote_code: bool = False
    ranks: int = 1
    skip_layers: str | None = None


@dataclass
class LoadedModel:
    """A model for `outrider.runtime.model_runner.ModelRunner`.

    Attributes:
        model: the transformers model, in eval mode, with our attention: it runs packed batches only. Fusing moves the
            weights out of it.
        device: of its weights.
        dtype: of its weights and activations.
        dtype_reason: why this dtype, for the log.
        quantisation: the quantisation method of the checkpoint, by transformers' name; None if it is not quantised.
        vocab_size: V, the number of logits, with padding.
        context_length: the most positions of a sequence.
        name: as in its source.
        eos_token_ids: the end-of-sequence tokens of the generation config, or else of the config.
        weights_fingerprint: see `model_fingerprint`.
        weight_bytes: of all its tensors. Fusing may change it.
        layers: the attention of each layer; with tensor parallelism, the heads of this process only.
        reference: transformers' logits of a few tokens, to check other programs against.
        fused: the fused program, once it has been built.
        encoder: of a model with encoder and decoder; None for others.
        generation_rules: the changes of transformers' `generate` to the logits of such a model; None: no change.
        mask_token: stands for an unknown token in parallel drafting; None if the model was not trained so.
        kv_dtype: of the KV cache; None: see `outrider.runtime.memory.kv_dtype`.
    """

    model: Any
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
    encoder: EncoderDecoder | None = field(default=None, repr=False)
    generation_rules: GenerationRules | None = None
    mask_token: int | None = None
    kv_dtype: torch.dtype | None = None

    @property
    def number_format(self) -> str:
        """Of the weights, by name."""
        return str(self.dtype).removeprefix("torch.")


def load_model(source: ModelSource, before: Callable[[dict[str, str]], object] | None = None) -> LoadedModel:
    """Loads a model without output, and checks its packed forward pass against transformers.

    Args:
        before: called before the weights are loaded, with the facts that all ranks must share, by name.

    Raises:
        CheckpointError: it cannot be found, is neither a causal language model nor a supported one with an encoder, its
            weights are incomplete, or it needs a feature that packed attention does not support. The text is one line.
    """
    device = find_device(source.device)
    folder = resolve_folder(source.name, source.revision, code=source.trust_remote_code)
    with _quiet():
        config = _config(folder, source)
        quantisation = _quantisation(config, source.name)
        dtype, dtype_reason = _dtype(source.dtype, config, device)
        fingerprint = weights_fingerprint(folder)
        if before is not None:
            before({"weights": fingerprint, "dtype": str(dtype).removeprefix("torch.")})
        options = sharding(config, source.name, quantisation, source.ranks)
        if quantisation is not None and device.type == "cuda" and is_accelerate_available():
            options["device_map"] = {"": device}  # some methods choose their kernels while loading
        if quantisation == "fp8":
            options["quantization_config"] = _expanded_fp8(config)
        try:
            model = _load_weights(folder, source, config, dtype, options)
        except CheckpointError as error:
            if quantisation is None:
                raise
            raise CheckpointError(f"the weights are quantised by '{quantisation}': {error}") from error
        if quantisation is not None:
            settle_dtype(model, dtype)
        if source.skip_layers is not None:
            skipped = skip_layers(model, source.skip_layers, source.name)
            fingerprint = hashlib.sha256(f"{fingerprint} without {skipped}".encode()).hexdigest()
        return _ready(model.to(device), source.name, fingerprint, device, dtype, dtype_reason, quantisation)


def adopt(model: Any, name: str, weights_fingerprint: str) -> LoadedModel:
    """As `load_model`, for a model that is in memory already; keeps its device and dtype.

    Args:
        model: a model of transformers, of one dtype and on one device. Its attention is replaced by ours.
        weights_fingerprint: identifies its weights: models with the same one and the same generation config count as
            the same.

    Raises:
        CheckpointError: it needs a feature that packed attention does not support. The text is one line.
    """
    first = next(model.parameters())
    with _quiet():
        try:
            model.set_attn_implementation(NAME)
        except ValueError as error:
            raise UnsupportedModel(f"the attention of {type(model).__name__} {ELSEWHERE}") from error
        return _ready(model, name, weights_fingerprint, first.device, first.dtype, "the dtype of the given model", None)


def _ready(
    model: Any,
    name: str,
    fingerprint: str,
    device: torch.device,
    dtype: torch.dtype,
    dtype_reason: str,
    quantisation: str | None,
) -> LoadedModel:
    """The `LoadedModel` of a model on its device, after checks of its attention and its logits."""
    model = model.eval().requires_grad_(False)
    context_length = _context_length(model.config)
    vocab_size = _vocab_size(model)
    encoder: EncoderDecoder | None = None
    if model.config.is_encoder_decoder:
        expected = reference(model, vocab_size, context_length)  # first: `patch_model` breaks the model's own forward
        encoder = patch_model(model, context_length)
    layers = probe_attention(model, context_length, encoder)
    if encoder is None:
        expected = reference(model, vocab_size, context_length)
    allowed = logits_tolerance(dtype, quantised=quantisation is not None)
    why = check_program(encoder or TransformersProgram(model), layers, expected, dtype, device, allowed)
    if why:
        raise UnsupportedModel(
            f"{type(model).__name__} gives other logits in a batch of sequences than in transformers: {why}; probably "
            "it has a state or a mask outside the attention"
        ) from why.cause
    eos_token_ids = _eos_token_ids(model)
    rules = generation_rules.read(model.generation_config, model.config)
    return LoadedModel(
        model=model,
        device=device,
        dtype=dtype,
        dtype_reason=dtype_reason,
        quantisation=quantisation,
        vocab_size=vocab_size,
        context_length=context_length,
        name=name,
        eos_token_ids=eos_token_ids,
        weights_fingerprint=model_fingerprint(fingerprint, eos_token_ids, rules),
        weight_bytes=_weight_bytes(model),
        layers=layers,
        reference=expected,
        encoder=encoder,
        generation_rules=rules,
        mask_token=_mask_token(model, vocab_size, name),
    )


def _config(folder: Path, source: ModelSource) -> Any:
    if not (folder / "config.json").is_file():
        files = sorted(each.name for each in folder.glob("*.gguf"))
        raise CheckpointError(
            f"'{source.name}' has no config.json; give "
            + (f"one of its GGUF files: {', '.join(files)}" if files else "the folder or hub id of a model")
        )
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=source.trust_remote_code)
    except Exception as error:
        raise CheckpointError(f"cannot read the configuration of '{source.name}': {error}") from error
    kinds = getattr(config, "architectures", None)  # transformers does not check it
    if kinds is not None and not (isinstance(kinds, list) and all(isinstance(each, str) for each in kinds)):
        raise CheckpointError(f"architectures of '{source.name}' is {kinds!r}; it must be a list of names")
    if (generation := folder / "generation_config.json").is_file():
        read_json(generation)  # transformers ignores a damaged one, and with it the end-of-sequence tokens
    if getattr(config, "is_encoder_decoder", False):
        if config.model_type not in _ENCODER_DECODERS:
            raise UnsupportedModel(
                f"'{source.name}' has an encoder, and its model type is '{config.model_type}'; of such models "
                f"{', '.join(_ENCODER_DECODERS)} run"
            )
        if source.ranks > 1:
            flag = f"--tensor-parallel-size {source.ranks}"
            raise CheckpointError(f"{flag}: '{source.name}' has an encoder; use one rank")
        return config
    remote = source.trust_remote_code and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not remote:
        raise UnsupportedModel(
            f"'{source.name}' is not a causal language model of transformers: its model type is '{config.model_type}'"
        )
    if not remote:
        _check_plain(config, source.name)
    return config


# ------------------------------------------------------------------------------------------------------------ weights


def _dtype(name: str, config: Any, device: torch.device) -> tuple[torch.dtype, str]:
    if name in _DTYPES:
        return _DTYPES[name], "as requested"
    if name != "auto":
        raise CheckpointError(f"--dtype is '{name}'; it must be auto, {', '.join(_DTYPES)}")
    own = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None) or torch.float32
    if own not in _DTYPES.values():
        return torch.float32, f"{own} of the checkpoint is not supported"
    if device.type == "cuda" or own == torch.float32:
        return own, "the dtype of the checkpoint"
    if own == torch.bfloat16 and cpu_computes_bfloat16():
        return own, "the dtype of the checkpoint, for which this CPU has instructions"
    return torch.float32, f"this CPU ({torch.backends.cpu.get_cpu_capability()}) has no instructions for {own}"


def cpu_computes_bfloat16() -> bool:
    """Whether this CPU has instructions for bfloat16."""
    checks = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    return any(check is not None and check() for check in checks)


def _load_weights(folder: Path, source: ModelSource, config: Any, dtype: torch.dtype, options: dict[str, Any]) -> Any:
    is_causal = not getattr(config, "is_encoder_decoder", False)
    auto: Any = AutoModelForCausalLM if is_causal else _ENCODER_DECODERS[config.model_type]
    try:
        model, report = auto.from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation=NAME,
            trust_remote_code=source.trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, by name
            **options,
        )
    except KeyError as error:
        if NAME not in str(error):
            raise CheckpointError(
                f"cannot load '{source.name}': its configuration lacks {error}, or transformers does not know it"
            ) from error
        kind = ", ".join(getattr(config, "architectures", None) or [config.model_type])
        raise UnsupportedModel(f"the attention of {kind} {ELSEWHERE}") from error
    except Exception as error:
        raise CheckpointError(f"cannot load '{source.name}': {type(error).__name__}: {error}") from error
    wrong_sizes = (f"{key} {list(found)}, not {list(size)}" for key, found, size in report["mismatched_keys"])
    for problem, named in (("missing_keys", report["missing_keys"]), ("wrong sizes", wrong_sizes)):
        if keys := sorted(named):
            raise CheckpointError(
                f"the weights of '{source.name}' do not match its config.json: {problem} {', '.join(keys[:3])}"
                + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")
            )
    return model


def _expanded_fp8(config: Any) -> FineGrainedFP8Config:
    """Expands the weights at load. The kernels for them are in the hub's package `kernels`, which cannot be installed
    beside our folder of that name.
    """
    found = config.quantization_config
    found = found if isinstance(found, dict) else found.to_dict()
    kept = found.get("modules_to_not_convert") or found.get("ignored_layers")
    return FineGrainedFP8Config(dequantize=True, modules_to_not_convert=kept)


def _quantisation(config: Any, name: str) -> str | None:
    """The quantisation method of a checkpoint; None if it is not quantised.

    Raises:
        CheckpointError: transformers does not know the method. It would load the weights as plain weights.
    """
    found = getattr(config, "quantization_config", None)
    if found is None:
        return None
    found = found if isinstance(found, dict) else found.to_dict()
    method = getattr(found.get("quant_method"), "value", found.get("quant_method"))
    for bits in ("4bit", "8bit"):
        if found.get(f"load_in_{bits}"):
            method = f"bitsandbytes_{bits}"
    if method is None:
        raise CheckpointError(f"the quantization_config of '{name}' has no quant_method; add it to config.json")
    if (method := str(method)) not in AUTO_QUANTIZER_MAPPING:  # a damaged one may be a list
        known = ", ".join(sorted(AUTO_QUANTIZER_MAPPING))
        raise CheckpointError(
            f"the weights of '{name}' are quantised by '{method}'; the installed transformers supports {known}"
        )
    return method


def settle_dtype(model: nn.Module, dtype: torch.dtype) -> None:
    """Casts the parameters of a quantised model that are plain, or were dequantised while loading, to a dtype.

    transformers casts the weights of plain checkpoints only: embedding, norms and head of a quantised one keep the
    dtype of the file. Scales of quantised layers are not cast, nor are modules that the model keeps in float32.
    """
    kept: set[str] = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:
        kept |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    for name, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        is_ordinary = type(module).__module__.startswith(_ORDINARY) and not is_changed(module)
        if is_ordinary and all(is_plain_tensor(parameter) for parameter in own.values()):
            for key, parameter in own.items():
                if not any(part in f"{name}.{key}" for part in kept):
                    parameter.data = parameter.data.to(dtype)


def sharding(config: Any, name: str, quantisation: str | None, ranks: int) -> dict[str, Any]:
    """The options of `from_pretrained` that load this rank's share by transformers' tensor-parallel plan; empty for one
    rank. Create the process group before the model is loaded.

    Raises:
        CheckpointError: the model cannot be split among ranks.
    """
    if ranks == 1:
        return {}
    flag = f"--tensor-parallel-size {ranks}"
    if quantisation is not None:
        raise CheckpointError(
            f"{flag}: the weights of '{name}' are quantised by '{quantisation}'; only plain weights can be split among "
            "ranks"
        )
    text = config.get_text_config()
    if not (getattr(text, "base_model_tp_plan", None) or getattr(config, "base_model_tp_plan", None)):
        raise CheckpointError(f"{flag}: transformers has no tensor-parallel plan for '{text.model_type}'; use one rank")
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    if heads % ranks or kv_heads % ranks:
        raise CheckpointError(
            f"{flag}: '{name}' has {heads} attention heads and {kv_heads} KV heads; the number of ranks must divide "
            "both"
        )
    from transformers.distributed import DistributedConfig  # missing in older releases, which need it for ranks only

    if "tp_size" not in inspect.signature(DistributedConfig).parameters:
        raise CheckpointError(
            f"{flag}: the installed transformers is too old for tensor parallelism; install a release that "
            "constraints.txt names"
        )
    return {"distributed_config": DistributedConfig(tp_size=ranks)}


# -------------------------------------------------------------------------------------------------------------- facts


def _vocab_size(model: Any) -> int:
    head = model.get_output_embeddings()
    if head is None or getattr(head, "weight", None) is None:
        raise UnsupportedModel(f"{type(model).__name__} has no output embedding: it is not a causal language model")
    return int(head.weight.shape[0])


def _mask_key(config: Any) -> str | None:
    return next((key for key in _MASK_TOKENS if getattr(config, key, None) is not None), None)


def _check_plain(config: Any, name: str) -> None:
    """Refuses heads for a target's hidden states. Some have the model type of a plain model and a mask token."""
    foreign = set(getattr(config, "architectures", None) or ()).difference(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    if foreign and (key := _mask_key(config)) is not None:
        raise UnsupportedModel(
            f"'{name}' has {key} and the architecture {min(foreign)}, which is no causal language model of "
            "transformers: such heads need the target's hidden states, which a draft service does not get; give a "
            "plain causal draft"
        )


def _mask_token(model: Any, vocab_size: int, name: str) -> int | None:
    key = _mask_key(model.config)
    if key is None or model.config.is_encoder_decoder:
        return None
    token = getattr(model.config, key)
    rows = min(vocab_size, model.get_input_embeddings().weight.shape[0])
    if not isinstance(token, int) or not 0 <= token < rows:
        raise CheckpointError(f"{key} of '{name}' is {token!r}; the mask token must be from 0 to {rows - 1}")
    return token


def _weight_bytes(model: Any) -> int:
    tensors = [*model.parameters(), *model.buffers()]
    own = [each.to_local() if hasattr(each, "to_local") else each for each in tensors]  # of this rank, of DTensors
    return sum({each.data_ptr(): each.numel() * each.element_size() for each in own}.values())  # tied ones once


def _context_length(config: Any) -> int:
    text = config.get_text_config()
    lengths = (getattr(text, name, None) for name in ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"))
    length = next((length for length in lengths if isinstance(length, int) and length > 0), None)
    length = getattr(config, "max_target_positions", None) or length or (LONGEST if config.is_encoder_decoder else None)
    if length is None:
        raise CheckpointError(
            f"config.json of this '{config.model_type}' model has no context length; add max_position_embeddings"
        )
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = [rope, *(kind for kind in rope.values() if isinstance(kind, dict))]  # one, or one per kind of layer
    for kind in kinds:
        original = kind.get("original_max_position_embeddings") or 0
        if original and kind.get("rope_type") == "longrope":
            # Beyond its original length this rotary embedding depends on the longest sequence of the batch.
            length = min(length, original)
        elif original and kind.get("rope_type") == "yarn":  # model cards add it, and leave the length as it was
            length = max(length, int(original * kind.get("factor", 1.0)))
    return length


def _eos_token_ids(model: Any) -> tuple[int, ...]:
    for config in (getattr(model, "generation_config", None), model.config.get_text_config()):
        found = getattr(config, "eos_token_id", None)
        if found is not None:
            return token_ids("eos_token_id", found)
    return ()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Turns off progress bars and log messages of transformers; its errors are exceptions."""
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
