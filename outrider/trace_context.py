"""Where in a trace a call stands: from a caller's metadata to that of the calls one makes, and to each log line.

The form is that of W3C Trace Context (`traceparent`, version 00).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

HEADER = "traceparent"

# A later version may say more after the flags; what is known of it is read all the same.
_FORM = re.compile(r"(?!ff)([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 0x01


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A span of a trace, by its ids; `is_sampled` where it is recorded."""

    trace_id: int
    span_id: int
    is_sampled: bool = False

    @classmethod
    def parse(cls, text: str) -> TraceContext | None:
        """Reads a `traceparent`; None where it is none."""
        found = _FORM.fullmatch(text.strip())
        if found is None or (found[1] == "00" and found[5]):
            return None
        trace_id, span_id, flags = (int(found[i], 16) for i in (2, 3, 4))
        return cls(trace_id, span_id, bool(flags & _SAMPLED)) if trace_id and span_id else None

    def __str__(self) -> str:
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{int(self.is_sampled):02x}"


current: ContextVar[TraceContext | None] = ContextVar("current", default=None)
"""That of the call which this task serves."""


def incoming(metadata: Iterable[Any] | None) -> TraceContext | None:
    """What the caller's metadata, pairs of key and value, say; None where they say nothing, or no sense."""
    for key, value in metadata or ():
        if key == HEADER and isinstance(value, str):
            return TraceContext.parse(value)
    return None


def outgoing() -> tuple[tuple[str, str], ...] | None:
    """The metadata for a call that this task makes; None where it stands in no trace."""
    context = current.get()
    return None if context is None else ((HEADER, str(context)),)


def add_trace_ids(logger: object, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Puts the ids of the trace into a log line; a processor of structlog's."""
    context = current.get()
    if context is not None:
        event["trace_id"] = f"{context.trace_id:032x}"
        event["span_id"] = f"{context.span_id:016x}"
    return event
