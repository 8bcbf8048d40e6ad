"""The model that a service was told to run: from settings to weights, tokenizer and KV pool.

It knows nothing of what the service does with them.
"""

import structlog
import torch

from outrider.lm.attention_choice import choose_attention
from outrider.lm.checkpoint import LoadedModel, ModelSource, load_model
from outrider.lm.kv_size import MIB, block_bytes, blocks_for, free_device_bytes, kv_dtype
from outrider.lm.packed import PackedModel
from outrider.lm.tokenizer import Tokenizer, load_tokenizer
from outrider.settings import ServiceSettings, SettingsError

_log = structlog.get_logger()

DEFAULT_SEQUENCE_TOKENS = 8192  # where neither the settings nor a shorter context say less
DEFAULT_CPU_KV_MB = 1024


def load(settings: ServiceSettings) -> tuple[LoadedModel, Tokenizer]:
    """The model and its tokenizer. Takes as long as reading the weights does.

    Raises:
        CheckpointError: the model cannot be loaded or run.
    """
    source = model_source(settings)
    return load_model(source), load_tokenizer(source)


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


def build_packed(
    settings: ServiceSettings, loaded: LoadedModel, length: int, *, most_sequences: int | None = None
) -> PackedModel:
    """The model with what it attends with, and a pool of as many blocks as there is room for.

    Args:
        settings: of the service.
        loaded: the model.
        length: positions of a sequence at most.
        most_sequences: so many at their longest can be of use; None is any number.

    Raises:
        CheckpointError: the attention asked for cannot run here.
        SettingsError: one sequence at its longest would not fit.
    """
    choice = choose_attention(settings.attention, loaded.layers, kv_dtype(loaded), loaded.device)
    _log.info("attending", attention=choice.name, reason=choice.reason, block_tokens=choice.block_tokens)
    blocks = kv_blocks(settings, loaded, choice.block_tokens)
    if most_sequences is not None:
        blocks = min(blocks, most_sequences * blocks_for(length, choice.block_tokens))
    return PackedModel.build(loaded, settings.max_sequences, length, blocks=blocks, attention=choice)


def kv_blocks(settings: ServiceSettings, loaded: LoadedModel, block_tokens: int) -> int:
    """How many blocks of keys and values, of so many positions each, there is room for.

    Raises:
        SettingsError: one sequence at its longest would not fit.
    """
    if settings.kv_cache_mb is not None:
        room = settings.kv_cache_mb * MIB
    elif loaded.device.type == "cuda":
        room = int(settings.kv_memory_fraction * free_device_bytes(loaded.device))
    else:
        room = DEFAULT_CPU_KV_MB * MIB
    size, tokens = block_bytes(loaded, block_tokens), sequence_tokens(settings, loaded)
    blocks, least = room // size, blocks_for(tokens, block_tokens)
    if blocks < least:
        raise SettingsError(
            f"--kv-cache-mb: {room / MIB:.0f} MiB hold {blocks} blocks of {block_tokens} tokens; one sequence of "
            f"--max-sequence-tokens {tokens} takes {least} of them, {least * size / MIB:.1f} MiB"
        )
    return blocks
