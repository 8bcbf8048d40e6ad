"""The model that a service was told to run: from settings to weights and tokenizer.

It knows nothing of what the service does with them.
"""

from outrider.lm.checkpoint import LoadedModel, ModelSource, load_model
from outrider.lm.tokenizer import Tokenizer, load_tokenizer
from outrider.settings import ServiceSettings

DEFAULT_SEQUENCE_TOKENS = 8192  # where neither the settings nor a shorter context say less


def load(settings: ServiceSettings) -> tuple[LoadedModel, Tokenizer]:
    """The model and its tokenizer. Takes as long as reading the weights does.

    Raises:
        CheckpointError: the model cannot be loaded or run.
    """
    source = ModelSource(
        name=settings.model,
        revision=settings.revision,
        dtype=settings.dtype,
        device=settings.device,
        trust_remote_code=settings.trust_remote_code,
    )
    return load_model(source), load_tokenizer(source)


def sequence_tokens(settings: ServiceSettings, loaded: LoadedModel) -> int:
    """How long one sequence may become, prompt and output together."""
    return min(settings.max_sequence_tokens or DEFAULT_SEQUENCE_TOKENS, loaded.context_length)
