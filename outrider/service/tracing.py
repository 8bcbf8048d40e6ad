"""Traces: what a service records of its calls, and where it sends that (OpenTelemetry, OTLP over gRPC).

Where in a trace a call stands goes from a caller's metadata to that of the calls one makes, and to each log line, in
the form of W3C Trace Context (`traceparent`, version 00). Nothing is recorded until it is told where to send it, and
until then nothing of OpenTelemetry is imported.
"""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import structlog

from outrider.service.best_effort import Component
from outrider.service.settings import SettingsError

_log = structlog.get_logger()

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


# ---------------------------------------------------------------------------------------------------------- recording

TRACING = Component("tracing")

Attributes: TypeAlias = Mapping[str, str | int | float | bool]

# Spans that wait to be sent: those of some thousand rounds. More are dropped, and nobody waits for a collector.
MAX_QUEUE, MAX_BATCH = 16_384, 1_024
# How long one message to the collector may take, and all that is left at the end.
EXPORT_SECONDS, CLOSING_SECONDS = 5.0, 2.0


class CallTrace:
    """One call in its trace, recorded or not.

    Attributes:
        is_recorded: whether its spans are; where not, `span` and `describe` need not be called.
    """

    def __init__(self, span: Any = None, tracer: Any = None) -> None:
        self.is_recorded = tracer is not None
        self._span = span
        self._tracer = tracer
        # Spans have times of day; ours are of the clock that never goes back.
        self._offset = time.time_ns() - time.perf_counter_ns() if self.is_recorded else 0

    @TRACING.quiet
    def span(self, name: str, began: float, ended: float, attributes: Attributes) -> None:
        """Records a part of the call that has ended; the times are `time.perf_counter()`'s."""
        if not self.is_recorded:
            return
        part = self._tracer.start_span(
            name, context=_around(self._span), attributes=attributes, start_time=self._at(began)
        )
        part.end(end_time=self._at(ended))

    @TRACING.quiet
    def describe(self, attributes: Attributes) -> None:
        """Adds to what is known of the call."""
        if self.is_recorded:
            self._span.set_attributes(attributes)

    def _at(self, seconds: float) -> int:
        return int(seconds * 1e9) + self._offset


UNTRACED = CallTrace()
"""Of a call that nobody records."""


class Tracing:
    """The traces of one service; off until `open`."""

    def __init__(self) -> None:
        self._provider: Any = None
        self._tracer: Any = None

    def open(self, *, service: str, version: str, endpoint: str, ratio: float) -> None:
        """Records from now on, of calls that come without a trace this share, and of others what their trace says.

        Args:
            service: the resource's `service.name`.
            version: its `service.version`.
            endpoint: `http://HOST:PORT` of a collector that takes OTLP over gRPC, or `https://`.
            ratio: in [0, 1].

        Raises:
            SettingsError: what this takes is not installed.
        """
        try:
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
        except ImportError as error:
            raise SettingsError(
                f"--otlp-endpoint: {error.name} is not installed; pip install 'outrider[service]' brings it"
            ) from error
        exporter = OTLPSpanExporter(
            endpoint=endpoint, insecure=urlsplit(endpoint).scheme == "http", timeout=EXPORT_SECONDS
        )
        self._provider = TracerProvider(
            sampler=ParentBasedTraceIdRatio(ratio),
            resource=Resource.create(
                {
                    "service.namespace": "outrider",
                    "service.name": service,
                    "service.version": version,
                    "service.instance.id": f"{socket.gethostname()}:{os.getpid()}",
                }
            ),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(exporter, max_queue_size=MAX_QUEUE, max_export_batch_size=MAX_BATCH)
        )
        self._tracer = self._provider.get_tracer("outrider", version)

    @contextmanager
    def call(self, name: str, metadata: Iterable[Any] | None) -> Iterator[CallTrace]:
        """A call, from now until the block ends; `metadata` are its caller's. What the block logs has the trace's ids,
        and so have the calls that it makes (`outrider.service.tracing`).
        """
        parent = TRACING.run(lambda: incoming(metadata), None)
        span = None if self._tracer is None else TRACING.run(lambda: self._begin(name, parent), None)
        if span is None:
            if parent is not None:
                current.set(parent)
            yield UNTRACED
            return
        is_recorded = TRACING.run(span.is_recording, False)
        try:
            yield CallTrace(span, self._tracer) if is_recorded else UNTRACED
        except Exception as error:  # a client that leaves is no error of ours
            text = str(error) or type(error).__name__
            TRACING.run(lambda: _mark_failed(span, text), None)
            raise
        finally:
            TRACING.run(span.end, None)

    def _begin(self, name: str, parent: TraceContext | None) -> Any:
        """Starts the span of a call, and makes it the current one."""
        from opentelemetry.trace import SpanKind

        span = self._tracer.start_span(name, context=_from(parent), kind=SpanKind.SERVER)
        own = span.get_span_context()
        current.set(TraceContext(own.trace_id, own.span_id, own.trace_flags.sampled))
        return span

    def close(self) -> None:
        """Sends what is left, as far as that takes some seconds at most."""
        if self._provider is None:
            return
        last = threading.Thread(target=self._provider.shutdown, name="last-spans", daemon=True)
        last.start()
        last.join(CLOSING_SECONDS)
        if last.is_alive():
            _log.warning("the last spans of traces were not sent", seconds=CLOSING_SECONDS)


def _mark_failed(span: Any, text: str) -> None:
    from opentelemetry.trace import Status, StatusCode

    span.set_status(Status(StatusCode.ERROR, text))


def _around(span: Any) -> Any:
    from opentelemetry.trace import set_span_in_context

    return set_span_in_context(span)


def _from(parent: TraceContext | None) -> Any:
    """The parent as OpenTelemetry has it. An empty context, where there is none: nothing else is looked at."""
    from opentelemetry.context import Context
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

    if parent is None:
        return Context()
    flags = TraceFlags(TraceFlags.SAMPLED if parent.is_sampled else TraceFlags.DEFAULT)
    return set_span_in_context(
        NonRecordingSpan(SpanContext(parent.trace_id, parent.span_id, is_remote=True, trace_flags=flags)), Context()
    )
