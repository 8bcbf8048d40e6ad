"""The client library: text from a draft service, with or without asyncio.

It needs no model, no tokenizer and no torch. In the examples `address` is the `HOST:PORT` of a draft service.

>>> from outrider.client import Client
>>> with Client(address) as client:
...     completion = client.complete("def add(a, b):", max_new_tokens=24, temperature=0)
>>> completion.usage.completion_tokens <= 24
True
>>> 0 <= completion.statistics.alpha <= 1
True
"""

from outrider.client.client import AsyncClient, Client
from outrider.client.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidRequest,
    OutriderError,
    Overloaded,
    PairMismatch,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
)
from outrider.client.events import (
    AcceptanceRule,
    Chunk,
    Completion,
    Detokenized,
    Drafter,
    Event,
    Finished,
    FinishReason,
    PositionLogprobs,
    PromptLogprobs,
    Queued,
    Round,
    RoundTimings,
    Sample,
    SpecialToken,
    SpeculationPolicy,
    Started,
    Statistics,
    Timings,
    Tokenized,
    TokenizerInfo,
    TokenLogprob,
    TokenOrigin,
    Usage,
)
from outrider.client.request import CommonOptions, Message, Options, Prompt
from outrider.client.transcription import AsyncTranscription, Segment, Transcription
from outrider.rpc.tls import TLS

__all__ = [
    "TLS",
    "AcceptanceRule",
    "AsyncClient",
    "AsyncTranscription",
    "Chunk",
    "Client",
    "CommonOptions",
    "Completion",
    "DeadlineExceeded",
    "Detokenized",
    "Drafter",
    "Event",
    "FailedPrecondition",
    "FinishReason",
    "Finished",
    "Internal",
    "InvalidRequest",
    "Message",
    "Options",
    "OutriderError",
    "Overloaded",
    "PairMismatch",
    "PermissionDenied",
    "PositionLogprobs",
    "Prompt",
    "PromptLogprobs",
    "Queued",
    "Round",
    "RoundTimings",
    "Sample",
    "Segment",
    "SpecialToken",
    "SpeculationPolicy",
    "Started",
    "Statistics",
    "Timings",
    "TokenLogprob",
    "TokenOrigin",
    "Tokenized",
    "TokenizerInfo",
    "Transcription",
    "Unauthenticated",
    "Unavailable",
    "Usage",
]
