"""The largest message that the draft service takes, or sends to a verifier."""

from draft_service.drafters.build import loads_model
from draft_service.settings import DraftSettings
from outrider.loading import DEFAULT_SEQUENCE_TOKENS
from outrider.message_sizes import limit_of, of_generate, of_verify
from outrider.runtime.loader import vocabulary_size

# As verifiers of ours have it; theirs are not known before one answers.
_STOP_TOKEN_IDS = 64


def message_limit(settings: DraftSettings) -> int:
    """In bytes: as was said, or as the draft model and the other limits have it."""
    return settings.max_message_bytes or limit_of(
        _requests(settings, settings.max_sequence_tokens or DEFAULT_SEQUENCE_TOKENS),
        of_verify(
            sequence_tokens=settings.max_sequence_tokens or DEFAULT_SEQUENCE_TOKENS,
            max_gamma=settings.max_gamma,
            max_support=settings.max_support,
            vocab_size=vocabulary_size(settings.model, settings.revision) if loads_model(settings) else None,
            max_stop_token_ids=_STOP_TOKEN_IDS,
        ),
    )


def short_of(settings: DraftSettings, sequence_tokens: int) -> int:
    """How many bytes the longest requests of a target with so many tokens are beyond the limit; 0 where they fit."""
    return max(0, _requests(settings, sequence_tokens) - message_limit(settings))


def _requests(settings: DraftSettings, sequence_tokens: int) -> int:
    return of_generate(
        sequence_tokens=sequence_tokens,
        max_stop_token_ids=_STOP_TOKEN_IDS,
        max_stop_strings=settings.max_stop_strings,
        max_stop_chars=settings.max_stop_string_chars,
    )
