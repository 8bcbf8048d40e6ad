"""The model that a service was told to run: from settings to weights and tokenizer.

It knows nothing of what the service does with them.
"""

from collections.abc import Callable

from outrider.lm.checkpoint import LoadedModel, ModelSource, load_model
from outrider.lm.kv_pool import BLOCK_TOKENS
from outrider.lm.kv_size import MIB, block_bytes, blocks_for, free_device_bytes
from outrider.lm.tokenizer import Tokenizer, load_tokenizer
from outrider.settings import ServiceSettings, SettingsError

DEFAULT_SEQUENCE_TOKENS = 8192  # where neither the settings nor a shorter context say less
DEFAULT_CPU_KV_MB = 1024

Loader = Callable[[ServiceSettings], tuple[LoadedModel, Tokenizer]]
"""What gives a service its model: `load`, unless whoever starts the service has another way to it."""


def load(settings: ServiceSettings) -> tuple[LoadedModel, Tokenizer]:
    """The model and its tokenizer. Takes as long as reading the weights does.

    Raises:
        CheckpointError: the model cannot be loaded or run.
    """
    source = _source(settings)
    return load_model(source), load_tokenizer(source)


def load_tokenizer_alone(settings: ServiceSettings) -> Tokenizer:
    """The tokenizer of the model, whose weights are not looked at and need not be there.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    return load_tokenizer(_source(settings))


def _source(settings: ServiceSettings) -> ModelSource:
    return ModelSource(
        name=settings.model,
        revision=settings.revision,
        dtype=settings.dtype,
        device=settings.device,
        trust_remote_code=settings.trust_remote_code,
    )


def sequence_tokens(settings: ServiceSettings, loaded: LoadedModel) -> int:
    """How long one sequence may become, prompt and output together."""
    return min(settings.max_sequence_tokens or DEFAULT_SEQUENCE_TOKENS, loaded.context_length)


def kv_blocks(settings: ServiceSettings, loaded: LoadedModel) -> int:
    """How many blocks of keys and values there is room for.

    Raises:
        SettingsError: one sequence at its longest would not fit.
    """
    if settings.kv_cache_mb is not None:
        room = settings.kv_cache_mb * MIB
    elif loaded.device.type == "cuda":
        room = int(settings.kv_memory_fraction * free_device_bytes(loaded.device))
    else:
        room = DEFAULT_CPU_KV_MB * MIB
    size, tokens = block_bytes(loaded), sequence_tokens(settings, loaded)
    blocks, least = room // size, blocks_for(tokens)
    if blocks < least:
        raise SettingsError(
            f"--kv-cache-mb: {room / MIB:.0f} MiB hold {blocks} blocks of {BLOCK_TOKENS} tokens; one sequence of "
            f"--max-sequence-tokens {tokens} takes {least} of them, {least * size / MIB:.1f} MiB"
        )
    return blocks
