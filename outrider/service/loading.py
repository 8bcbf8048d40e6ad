"""Loads the model of a service by its settings: weights, tokenizer and KV pool."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import structlog
import torch
from torch import Tensor
from transformers import GenerationConfig

from outrider.rpc.errors import counted
from outrider.runtime.batch import Chunk
from outrider.runtime.checkpoint import resolve_folder
from outrider.runtime.cuda_graph import capturer_for
from outrider.runtime.decode_loop import DecodeLoop
from outrider.runtime.device import describe_device, find_device, work_on
from outrider.runtime.errors import CheckpointError, ModelLost
from outrider.runtime.fused_decoder import FusedDecoder, fuse_model
from outrider.runtime.llama_cpp import LlamaRunner, most_sequences
from outrider.runtime.llama_loader import LLAMA_CPP, LlamaModel, chosen_runtime, load_gguf, load_gguf_tokenizer
from outrider.runtime.loader import LoadedModel, ModelSource, load_model
from outrider.runtime.memory import (
    MIB,
    DeviceMemory,
    block_bytes,
    blocks_for,
    explain_out_of_memory,
    kv_dtype,
    memory_of,
    sequence_blocks,
)
from outrider.runtime.model_runner import ModelRunner
from outrider.runtime.paged_attention import AUTO, SDPA, choose_attention
from outrider.runtime.tensor_parallel import TensorParallel
from outrider.runtime.tokenizer import Tokenizer, load_tokenizer
from outrider.runtime.torch_runner import TorchRunner
from outrider.service.encoder_input import EncoderInputs
from outrider.service.settings import ServiceSettings, SettingsError

_log = structlog.get_logger()

DEFAULT_SEQUENCE_TOKENS = 8192  # unless the settings or the context length are below
DEFAULT_CPU_KV_MB = 1024
MOST_STEPPED = 64  # sequences in one captured decode loop: it keeps the logits of each step

Loader = Callable[[ServiceSettings], tuple[LoadedModel, Tokenizer]]
"""Loads the model of a service: `load`, or a replacement in tests."""


def load(settings: ServiceSettings) -> tuple[LoadedModel, Tokenizer]:
    """Loads the model and its tokenizer, and makes its device the current one of this thread.

    Raises:
        CheckpointError: the model cannot be loaded or run.
    """
    source = model_source(settings)
    if uses_llama(settings):
        return _load_gguf(source)
    device = find_device(source.device)
    work_on(device)
    with explain_out_of_memory(
        memory_of(device),
        f"the weights of '{settings.model}' (another --device or --dtype; other processes on the device count, too)",
    ):
        loaded = load_model(source)
        fuse_model(loaded, paged=settings.attention not in (AUTO, SDPA))
    _log.info(
        "loaded",
        model=loaded.name,
        device=str(loaded.device),
        **describe_device(loaded.device),
        dtype=loaded.number_format,
        reason=loaded.dtype_reason,
        **({"layers": len(loaded.layers), "skip_layers": source.skip_layers} if source.skip_layers else {}),
        **({"cpu_decoder": loaded.fused.cpu_decoder is not None} if isinstance(loaded.fused, FusedDecoder) else {}),
    )
    return loaded, load_tokenizer(source)


def _load_gguf(source: ModelSource) -> tuple[LoadedModel, Tokenizer]:
    if source.skip_layers is not None:
        raise CheckpointError(f"--skip-layers {source.skip_layers}: llama.cpp runs all layers of '{source.name}'")
    if source.dtype != "auto":
        _log.warning("--dtype is ignored: a GGUF file has types of its own", dtype=source.dtype, model=source.name)
    loaded, tokenizer = load_gguf(source)
    _log.info("loaded", model=loaded.name, runtime=LLAMA_CPP, reason=loaded.dtype_reason)
    return loaded, tokenizer


def uses_llama(settings: ServiceSettings) -> bool:
    """Whether llama.cpp runs the model.

    Raises:
        CheckpointError: --runtime does not fit the model.
    """
    return chosen_runtime(settings.runtime, settings.model) == LLAMA_CPP


def load_share(settings: ServiceSettings, parallel: TensorParallel) -> LoadedModel:
    """Joins the other ranks and loads this rank's share of the model.

    Raises:
        CheckpointError: the model cannot be loaded or run, or another rank has other weights or another dtype.
        SettingsError: this rank has no device.
        ModelLost: another rank is gone.
    """
    device = parallel.ranks.device(settings.device)
    if uses_llama(settings):
        raise CheckpointError(f"--tensor-parallel-size {parallel.ranks.size}: llama.cpp runs on one rank")
    parallel.join(device)
    try:
        # The first pass, while loading, needs the same shapes and dtype on all ranks.
        return load_model(
            model_source(settings, device=device, ranks=parallel.ranks.size), lambda facts: parallel.agree(0, facts)
        )
    except CheckpointError as error:
        if isinstance(error.__cause__, RuntimeError):  # of a collective: another rank may have failed
            raise ModelLost(parallel.failure_reason("loading failed", error)) from error
        raise


def load_tokenizer_alone(settings: ServiceSettings) -> Tokenizer:
    """Loads the tokenizer of the model. Its weights may be missing.

    Raises:
        CheckpointError: there is no tokenizer, or it cannot be read.
    """
    source = model_source(settings)
    return load_gguf_tokenizer(source) if uses_llama(settings) else load_tokenizer(source)


def load_encoder_inputs(settings: ServiceSettings, loaded: LoadedModel) -> EncoderInputs | None:
    """The inputs of the model's encoder; None if it has none.

    Raises:
        CheckpointError: its feature extractor cannot be read, or does not fit the model.
    """
    if loaded.encoder is None:
        return None
    return EncoderInputs(loaded.encoder.info, _folder(settings))


def load_generation_config(settings: ServiceSettings) -> GenerationConfig:
    """The generation config of the model, whose weights may be missing; transformers' defaults if there is none.

    Raises:
        CheckpointError: it cannot be read.
    """
    folder = _folder(settings)
    if not (folder / "generation_config.json").is_file():
        return GenerationConfig()
    try:
        return GenerationConfig.from_pretrained(folder)
    except Exception as error:
        raise CheckpointError(f"cannot read the generation config of '{settings.model}': {error}") from error


def _folder(settings: ServiceSettings) -> Path:
    return resolve_folder(settings.model, settings.revision, weights=False, code=settings.trust_remote_code)


def model_source(settings: ServiceSettings, *, device: torch.device | None = None, ranks: int = 1) -> ModelSource:
    """The source of the model, and how to run it.

    Args:
        device: of this rank, for tensor parallelism.
    """
    return ModelSource(
        name=settings.model,
        revision=settings.revision,
        dtype=settings.dtype,
        device=settings.device if device is None else str(device),
        trust_remote_code=settings.trust_remote_code,
        ranks=ranks,
        skip_layers=settings.layers_to_skip,
    )


def sequence_tokens(settings: ServiceSettings, loaded: LoadedModel) -> int:
    """The largest number of tokens of one sequence, prompt and output together."""
    return min(settings.max_sequence_tokens or DEFAULT_SEQUENCE_TOKENS, loaded.context_length)


@dataclass(frozen=True, slots=True)
class Built:
    """A model that can run, and its use of memory.

    Attributes:
        model_runner: the model with its KV cache.
        memory: of its device.
        workspace: bytes of temporaries of the largest batch; 0 if not measured.
    """

    model_runner: ModelRunner
    memory: DeviceMemory
    workspace: int

    def capture(
        self,
        settings: ServiceSettings,
        loop: DecodeLoop,
        *,
        tokens: int,
        with_kernels: bool,
        widest: int,
        max_batch_tokens: int | None = None,
    ) -> int:
        """Captures a decode loop and steps as CUDA graphs, if possible and within the limits of the settings, and logs
        which.

        Args:
            tokens, with_kernels: of the loop, see `DecodeLoop.capture`.
            widest, max_batch_tokens: of the steps, see `ModelRunner.capture`.

        Returns:
            Bytes of the graphs.

        Raises:
            CheckpointError: out of memory.
        """
        device = self.model_runner.loaded.device
        work_on(device)
        if not settings.graphs or not self.model_runner.attention.can_be_captured(device):
            return 0
        capturer, began, before = capturer_for(device), time.perf_counter(), self.memory.free()
        seconds, most_bytes = settings.graph_seconds / 2, settings.graph_memory_mb * MIB
        with explain_out_of_memory(self.memory, f"CUDA graphs: lower --graph-memory-mb {settings.graph_memory_mb}"):
            in_loop = loop.capture(
                capturer, sequences=min(settings.max_sequences, MOST_STEPPED), tokens=tokens,
                with_kernels=with_kernels, seconds=seconds, most_bytes=most_bytes,
            )  # fmt: skip
            steps = self.model_runner.capture(
                capturer, max_sequences=settings.max_sequences, widest=widest, max_batch_tokens=max_batch_tokens,
                seconds=seconds, most_bytes=most_bytes,
            )  # fmt: skip
        summary = f"decode loop: {in_loop}; steps: {steps}"
        _log.info("CUDA graphs captured", steps=summary, seconds=round(time.perf_counter() - began, 1))
        return max(capturer.bytes, before - self.memory.free())

    def log_memory(self, graphs: int) -> None:
        """Logs the use of memory in MiB. `graphs` is bytes of CUDA graphs."""
        pool, memory = self.model_runner.pool, self.memory
        sizes = {"weights": self.model_runner.loaded.weight_bytes, "kv": pool.memory_bytes}
        sizes |= {"graphs": graphs, "workspace": self.workspace}
        if memory.total:
            sizes |= {"free": memory.free(), "total": memory.total}
        fields = {f"{name}_mib": round(size / MIB) for name, size in sizes.items()}
        _log.info("memory", device=memory.name, **fields, kv_tokens=pool.blocks.count * pool.block_tokens)


def build_model_runner(
    settings: ServiceSettings,
    loaded: LoadedModel,
    length: int,
    *,
    max_batch_tokens: int,
    behind: Callable[[Tensor], object] | None = None,
    most_sequences: int | None = None,
    forks: int = 0,
    memory: DeviceMemory | None = None,
    parallel: TensorParallel | None = None,
) -> Built:
    """Builds the model runner: the model, its attention, and as many KV blocks as memory allows.

    On a GPU the largest batch runs before the KV cache is allocated, to measure its temporaries, and once after: a
    model that does not fit fails here.

    Args:
        length: largest number of tokens of a sequence.
        max_batch_tokens: largest number of tokens of a batch.
        behind: called with the logits `[R, V]` of the largest batch, to include the memory it needs.
        most_sequences: no more blocks than for this many of the longest sequences; None: no limit.
        forks: the most of each sequence.
        memory: of the model's device; None: the real one.
        parallel: the ranks, if there are several: each calls this with the same settings, and all get the number of
            blocks of the rank with the least memory.

    Raises:
        CheckpointError: --attention cannot run here, the largest batch does not fit, or another rank has other
            settings.
        SettingsError: one sequence of the largest length does not fit.
        ModelLost: a rank is gone.
    """
    requested = settings.max_sequence_tokens
    if requested is not None and requested > loaded.context_length:
        _log.warning(
            "--max-sequence-tokens is above the model's context length, which is the limit",
            max_sequence_tokens=requested,
            context_length=loaded.context_length,
        )
    memory = memory or memory_of(loaded.device)
    if isinstance(loaded, LlamaModel):
        return _build_llama(settings, loaded, length, max_batch_tokens=max_batch_tokens, forks=forks, memory=memory)
    is_shared = parallel is not None
    with explain_out_of_memory(memory, "the self-check of attention"):
        choice = choose_attention(
            settings.attention, loaded.layers, kv_dtype(loaded), loaded.device,
            paged=is_shared, has_encoder=loaded.encoder is not None,
        )  # fmt: skip
    _log.info("attention", attention=choice.name, reason=choice.reason, block_tokens=choice.block_tokens)

    def build(blocks: int) -> ModelRunner:
        # Fusing needs whole weights; a rank has its share only.
        fuse = not is_shared
        return TorchRunner.build(loaded, settings.max_sequences, length, blocks=blocks, fuse=fuse, attention=choice)

    def largest(model_runner: ModelRunner) -> None:
        logits = profiling_run(model_runner, max_batch_tokens)
        if behind is not None:
            behind(logits)

    enough = profiling_blocks(max_batch_tokens, length)
    enough += -(-max_batch_tokens // length) * sequence_blocks(loaded, 0)  # of encoders
    batch = f"the largest batch, {max_batch_tokens} tokens"
    advice = "lower --max-batch-tokens (verifier) or --prefill-tokens (draft service)"
    with explain_out_of_memory(memory, f"{batch}: {advice}"):
        workspace = memory.peak(lambda: largest(build(enough))) - enough * block_bytes(loaded)
    captures = settings.graphs and choice.can_be_captured(loaded.device) and not is_shared
    graphs = settings.graph_memory_mb * MIB if captures else 0
    blocks = kv_blocks(settings, loaded, left=memory.free() - max(0, workspace) - graphs)
    if most_sequences is not None:
        blocks = min(blocks, most_sequences * sequence_blocks(loaded, length))
    if parallel is not None:
        blocks = parallel.agree(blocks, {"attention": choice.name, "tokens of a sequence": length})
    size = blocks * block_bytes(loaded)
    with explain_out_of_memory(memory, f"the KV cache, {size / MIB:.0f} MiB: lower --kv-cache-mb"):
        model_runner = build(blocks)
    if model_runner.layer_choice is not None:
        _log.info("decoder layers", run_by=model_runner.layer_choice.name, reason=model_runner.layer_choice.reason)
    with explain_out_of_memory(memory, f"{batch}, beside the KV cache: lower --kv-memory-fraction or --kv-cache-mb"):
        memory.peak(lambda: largest(model_runner))
    return Built(model_runner, memory, max(0, workspace))


def _build_llama(
    settings: ServiceSettings,
    loaded: LlamaModel,
    length: int,
    *,
    max_batch_tokens: int,
    forks: int,
    memory: DeviceMemory,
) -> Built:
    """llama.cpp searches all cells at each rollback, so there are no more than the most sequences can fill."""
    if settings.max_sequences > (most := most_sequences(loaded)):
        raise SettingsError(
            f"--max-sequences is {settings.max_sequences}; llama.cpp holds {most} sequences of '{loaded.name}' at most"
        )
    all_blocks = settings.max_sequences * sequence_blocks(loaded, length)
    blocks = min(kv_blocks(settings, loaded, left=0), all_blocks)
    runner = LlamaRunner(
        loaded, blocks=blocks, max_length=length, max_batch_tokens=max_batch_tokens,
        sequences=settings.max_sequences * (1 + forks), threads=settings.threads,
    )  # fmt: skip
    return Built(runner, memory, 0)


def kv_blocks(settings: ServiceSettings, loaded: LoadedModel, *, left: int) -> int:
    """The number of KV blocks that fit.

    Args:
        left: free bytes of a GPU, without those that the model needs.

    Raises:
        SettingsError: one sequence of the largest length does not fit.
    """
    if settings.kv_cache_mb is not None:
        flag, capacity = "--kv-cache-mb", settings.kv_cache_mb * MIB
    elif loaded.device.type == "cuda":
        left = max(0, left)
        flag = f"--kv-memory-fraction {settings.kv_memory_fraction:g} of {left / MIB:.0f} MiB"
        capacity = int(settings.kv_memory_fraction * left)
    else:
        flag, capacity = "--kv-cache-mb", DEFAULT_CPU_KV_MB * MIB
    size, tokens = block_bytes(loaded), sequence_tokens(settings, loaded)
    blocks, least = capacity // size, sequence_blocks(loaded, tokens)
    if blocks < least:
        raise SettingsError(
            f"{flag}: the KV cache of {capacity / MIB:.0f} MiB has {counted(blocks, 'block')}; one sequence of "
            f"--max-sequence-tokens {tokens} takes {least}, or {least * size / MIB:.1f} MiB: give it more memory "
            "(another service on the device may hold it: lower its --kv-cache-mb), or lower --max-sequence-tokens"
        )
    return blocks


# --------------------------------------------------------------------------------------------------- profiling run


def profiling_blocks(tokens: int, length: int) -> int:
    """Blocks that `profiling_run` needs for all its tokens."""
    whole, rest = divmod(tokens, length)
    return whole * blocks_for(length) + blocks_for(rest)


def profiling_run(model_runner: ModelRunner, tokens: int) -> Tensor:
    """Runs a batch of `tokens` tokens, of few long sequences, with all logits, `[tokens, V]`; frees its blocks.

    With too few free blocks the batch is smaller: no larger one can occur then.
    """
    pool = model_runner.pool
    slots: list[int] = []
    chunks: list[Chunk] = []
    free, encoder = pool.blocks.num_free, sequence_blocks(model_runner.loaded, 0, pool.block_tokens)
    try:
        while tokens and free > encoder:
            slots.append(model_runner.allocate_for_trial())
            free -= encoder
            count = min(tokens, model_runner.max_length, free * pool.block_tokens)
            chunks.append(Chunk(slots[-1], [0] * count, 0, 0))
            tokens -= count
            free -= blocks_for(count, pool.block_tokens)
        return model_runner.forward(chunks)
    finally:
        for slot in slots:
            pool.free(slot)
