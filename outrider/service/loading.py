"""The model of a service: from settings to weights, tokenizer and KV pool."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog
import torch
from torch import Tensor

from outrider.runtime.batch import Chunk
from outrider.runtime.cuda_graph import capturer_for
from outrider.runtime.device import describe_device, find_device, work_on
from outrider.runtime.errors import CheckpointError, ModelLost
from outrider.runtime.fused_decoder import fuse_model
from outrider.runtime.loader import LoadedModel, ModelSource, load_model
from outrider.runtime.memory import MIB, DeviceMemory, MemoryUse, block_bytes, blocks_for, kv_dtype, memory_of, telling
from outrider.runtime.model_runner import ModelRunner
from outrider.runtime.paged_attention import choose_attention
from outrider.runtime.tensor_parallel import TensorParallel
from outrider.runtime.tokenizer import Tokenizer, load_tokenizer
from outrider.service.settings import ServiceSettings, SettingsError

_log = structlog.get_logger()

DEFAULT_SEQUENCE_TOKENS = 8192  # where neither the settings nor a shorter context say less
DEFAULT_CPU_KV_MB = 1024

Loader = Callable[[ServiceSettings], tuple[LoadedModel, Tokenizer]]
"""Gives a service its model: `load`, unless the service was made with another."""


def load(settings: ServiceSettings) -> tuple[LoadedModel, Tokenizer]:
    """The model and its tokenizer; this thread works on its device from then on. Takes as long as reading the weights
    does.

    Raises:
        CheckpointError: the model cannot be loaded or run.
    """
    source = model_source(settings)
    device = find_device(source.device)
    work_on(device)
    with telling(memory_of(device), f"the weights of '{settings.model}'"):
        loaded = load_model(source)
        fuse_model(loaded)
    _log.info(
        "loaded",
        model=loaded.name,
        device=str(loaded.device),
        **describe_device(loaded.device),
        dtype=str(loaded.dtype).removeprefix("torch."),
        reason=loaded.dtype_reason,
    )
    return loaded, load_tokenizer(source)


def load_share(settings: ServiceSettings, parallel: TensorParallel) -> LoadedModel:
    """Meets the other ranks, and loads this one's share of the model while they load theirs.

    Raises:
        CheckpointError: the model cannot be loaded or run.
        SettingsError: this rank has no device.
        ModelLost: another rank is gone.
    """
    device = parallel.ranks.device(settings.device)
    parallel.join(device)
    try:
        return load_model(model_source(settings, device=device, ranks=parallel.ranks.size))
    except CheckpointError as error:
        if isinstance(error.__cause__, RuntimeError):  # it ran: another rank may be what broke
            raise ModelLost(parallel.broke("the load broke", error)) from error
        raise


def load_tokenizer_alone(settings: ServiceSettings) -> Tokenizer:
    """The tokenizer of the model, whose weights are not looked at and need not be there.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    return load_tokenizer(model_source(settings))


def model_source(settings: ServiceSettings, *, device: torch.device | None = None, ranks: int = 1) -> ModelSource:
    """Where the model comes from and how it is to run.

    Args:
        settings: of the service.
        device: of this process, where it is one of several that share the model.
        ranks: how many they are.
    """
    return ModelSource(
        name=settings.model,
        revision=settings.revision,
        dtype=settings.dtype,
        device=settings.device if device is None else str(device),
        trust_remote_code=settings.trust_remote_code,
        ranks=ranks,
    )


def sequence_tokens(settings: ServiceSettings, loaded: LoadedModel) -> int:
    """How long one sequence may become, prompt and output together."""
    return min(settings.max_sequence_tokens or DEFAULT_SEQUENCE_TOKENS, loaded.context_length)


@dataclass(frozen=True, slots=True)
class Built:
    """A model that can run, and where memory went for it.

    Attributes:
        model_runner: the model with its pool.
        memory: of its device.
        workspace: bytes that the largest pass works in; 0 where that is not measured.
    """

    model_runner: ModelRunner
    memory: DeviceMemory
    workspace: int

    def capture(self, settings: ServiceSettings, capture: Callable[..., str]) -> int:
        """Has passes captured where that can be, within what the settings allow, and says which.

        Args:
            settings: of the service.
            capture: takes a capturer, and `seconds` and `most_bytes`, see `GraphRunner.capture`.

        Returns:
            Bytes that they took.

        Raises:
            CheckpointError: there is no room for them.
        """
        device = self.model_runner.loaded.device
        work_on(device)
        if not settings.graphs or not self.model_runner.attention.can_be_captured(device):
            return 0
        capturer, began, before = capturer_for(device), time.perf_counter(), self.memory.free()
        most = settings.graph_memory_mb * MIB
        with telling(self.memory, f"captured passes: lower --graph-memory-mb {settings.graph_memory_mb}"):
            said = capture(capturer, seconds=settings.graph_seconds, most_bytes=most)
        _log.info("captured", passes=said, seconds=round(time.perf_counter() - began, 1))
        return max(capturer.bytes, before - self.memory.free())

    def tell_memory(self, graphs: int) -> None:
        """Logs what went where. `graphs` is bytes of captured passes."""
        use = MemoryUse(
            self.model_runner.loaded.weight_bytes, self.model_runner.pool.memory_bytes, graphs, self.workspace
        )
        pool = self.model_runner.pool
        _log.info("memory", **use.told(self.memory), kv_tokens=pool.blocks.count * pool.block_tokens)


def build_model_runner(
    settings: ServiceSettings,
    loaded: LoadedModel,
    length: int,
    *,
    pass_tokens: int,
    behind: Callable[[Tensor], object] | None = None,
    most_sequences: int | None = None,
    memory: DeviceMemory | None = None,
    parallel: TensorParallel | None = None,
) -> Built:
    """The model with what it attends with, and a pool of as many blocks as there is room for.

    On a GPU its largest pass runs before there is a pool, so that the room it takes is left to it, and once more when
    there is one: what fails for want of memory fails here.

    Args:
        settings: of the service.
        loaded: the model.
        length: positions of a sequence at most.
        pass_tokens: rows of a pass at most.
        behind: what else is done with the logits of a pass, `[R, V]`.
        most_sequences: so many at their longest can be of use; None is any number.
        memory: of the model's device; None is the real one.
        parallel: the ranks, where there are several: each calls this with the same settings, and their pools have as
            many blocks as every rank has room for.

    Raises:
        CheckpointError: the attention asked for cannot run here, there is no room for the largest pass, or another rank
            differs in what all must share.
        SettingsError: one sequence at its longest would not fit.
        ModelLost: a rank is gone.
    """
    asked = settings.max_sequence_tokens
    if asked is not None and asked > loaded.context_length:
        _log.warning(
            "max_sequence_tokens is above the model's context length, which is the limit",
            max_sequence_tokens=asked,
            context_length=loaded.context_length,
        )
    memory = memory or memory_of(loaded.device)
    is_shared = parallel is not None
    with telling(memory, "trying the attention out"):
        choice = choose_attention(settings.attention, loaded.layers, kv_dtype(loaded), loaded.device, paged=is_shared)
    _log.info("attending", attention=choice.name, reason=choice.reason, block_tokens=choice.block_tokens)

    def build(blocks: int) -> ModelRunner:
        # The fused equivalents take weights apart, which are parts already where they are shared.
        fuse = not is_shared
        return ModelRunner.build(loaded, settings.max_sequences, length, blocks=blocks, fuse=fuse, attention=choice)

    def largest(model_runner: ModelRunner) -> None:
        logits = profiling_run(model_runner, pass_tokens)
        if behind is not None:
            behind(logits)

    enough = profiling_blocks(pass_tokens, length, choice.block_tokens)
    with telling(memory, f"a pass of {pass_tokens} tokens"):
        workspace = memory.peak(lambda: largest(build(enough))) - enough * block_bytes(loaded, choice.block_tokens)
    captures = settings.graphs and choice.can_be_captured(loaded.device) and not is_shared
    graphs = settings.graph_memory_mb * MIB if captures else 0
    blocks = kv_blocks(settings, loaded, choice.block_tokens, left=memory.free() - max(0, workspace) - graphs)
    if most_sequences is not None:
        blocks = min(blocks, most_sequences * blocks_for(length, choice.block_tokens))
    if parallel is not None:
        facts = {
            "weights": loaded.weights_fingerprint,
            "dtype": str(loaded.dtype).removeprefix("torch."),
            "attention": choice.name,
            "tokens of a block": choice.block_tokens,
            "tokens of a sequence": length,
        }
        blocks = parallel.agree(blocks, facts)
    with telling(memory, f"{blocks * block_bytes(loaded, choice.block_tokens) / MIB:.0f} MiB of keys and values"):
        model_runner = build(blocks)
    if model_runner.layer_choice is not None:
        _log.info("layers", run_by=model_runner.layer_choice.name, reason=model_runner.layer_choice.reason)
    with telling(memory, f"a pass of {pass_tokens} tokens beside keys and values: lower --kv-memory-fraction"):
        memory.peak(lambda: largest(model_runner))
    return Built(model_runner, memory, max(0, workspace))


def kv_blocks(settings: ServiceSettings, loaded: LoadedModel, block_tokens: int, *, left: int) -> int:
    """How many blocks of keys and values, of so many positions each, there is room for.

    Args:
        settings: of the service.
        loaded: the model.
        block_tokens: positions of a block.
        left: bytes of the device that nothing else needs, where they are ours to share out.

    Raises:
        SettingsError: one sequence at its longest would not fit.
    """
    if settings.kv_cache_mb is not None:
        flag, room = "--kv-cache-mb", settings.kv_cache_mb * MIB
    elif loaded.device.type == "cuda":
        left = max(0, left)
        flag = f"--kv-memory-fraction {settings.kv_memory_fraction:g} of {left / MIB:.0f} MiB"
        room = int(settings.kv_memory_fraction * left)
    else:
        flag, room = "--kv-cache-mb", DEFAULT_CPU_KV_MB * MIB
    size, tokens = block_bytes(loaded, block_tokens), sequence_tokens(settings, loaded)
    blocks, least = room // size, blocks_for(tokens, block_tokens)
    if blocks < least:
        raise SettingsError(
            f"{flag}: {room / MIB:.0f} MiB hold {blocks} blocks of {block_tokens} tokens; one sequence of "
            f"--max-sequence-tokens {tokens} takes {least} of them, {least * size / MIB:.1f} MiB"
        )
    return blocks


# --------------------------------------------------------------------------------------------------- profiling run


def profiling_blocks(tokens: int, length: int, block_tokens: int) -> int:
    """Blocks that `profiling_run` takes, where there are as many."""
    whole, rest = divmod(tokens, length)
    return whole * blocks_for(length, block_tokens) + blocks_for(rest, block_tokens)


def profiling_run(model_runner: ModelRunner, tokens: int) -> Tensor:
    """A pass of so many tokens with logits of them all, `[tokens, V]`; nothing of it stays in the pool.

    They are those of few long sequences. Where the pool has no room for so many, it has none for such a pass either,
    and the pass is as large as there is room for.
    """
    pool = model_runner.pool
    slots: list[int] = []
    chunks: list[Chunk] = []
    room = pool.blocks.num_free
    try:
        while tokens and room:
            count = min(tokens, pool.max_length, room * pool.block_tokens)
            slots.append(pool.allocate())
            chunks.append(Chunk(slots[-1], [0] * count, 0, 0))
            tokens -= count
            room -= blocks_for(count, pool.block_tokens)
        return model_runner.forward(chunks)
    finally:
        for slot in slots:
            pool.free(slot)
