"""Traces of calls (OpenTelemetry, exported by OTLP over gRPC).

The trace context of a call (W3C Trace Context, in its metadata) is added to the calls that it makes and to its log
lines. `Tracing.open` imports OpenTelemetry's SDK; nothing is recorded before.
"""

import os
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import structlog
from opentelemetry.context import Context, attach
from opentelemetry.trace import SpanKind, Status, StatusCode, get_current_span, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from outrider.environment import installed_version
from outrider.rpc.channel import Metadata
from outrider.service.best_effort import Component
from outrider.service.settings import SettingsError

_log = structlog.get_logger()

_W3C = TraceContextTextMapPropagator()


def incoming(metadata: Iterable[Any] | None) -> Context:
    """The trace context in the metadata of a call, pairs of key and value; empty if there is none."""
    named = {key: value for key, value in metadata or () if key in _W3C.fields and isinstance(value, str)}
    return _W3C.extract(named, context=Context())  # an empty context: not the current one


def outgoing() -> Metadata:
    """The metadata for a call that this task makes; empty without a trace."""
    headers: dict[str, str] = {}
    _W3C.inject(headers)
    return tuple(headers.items())


def add_trace_ids(logger: object, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Puts the ids of the trace into a log line; a processor of structlog's."""
    context = get_current_span().get_span_context()
    if context.is_valid:
        event["trace_id"] = f"{context.trace_id:032x}"
        event["span_id"] = f"{context.span_id:016x}"
    return event


# ---------------------------------------------------------------------------------------------------------- recording

TRACING = Component("tracing")

Attributes: TypeAlias = Mapping[str, str | int | float | bool]

# Spans in the export queue, enough for a few thousand rounds. More are dropped: no call waits for a collector.
MAX_QUEUE, MAX_BATCH = 16_384, 1_024
# Timeout of one export, and of the last one at the end.
EXPORT_SECONDS, CLOSING_SECONDS = 5.0, 2.0


class CallTrace:
    """One call in its trace, recorded or not.

    Attributes:
        is_recorded: whether its spans are recorded; if not, `span` and `describe` do nothing.
    """

    def __init__(self, span: Any = None, tracer: Any = None) -> None:
        self.is_recorded = tracer is not None
        self._span = span
        self._tracer = tracer
        # Spans have wall-clock times; these are of the monotonic clock.
        self._offset = time.time_ns() - time.perf_counter_ns() if self.is_recorded else 0

    @TRACING.quiet
    def span(self, name: str, began: float, ended: float, attributes: Attributes) -> None:
        """Records a part of the call that has ended; the times are `time.perf_counter()`'s."""
        if not self.is_recorded:
            return
        part = self._tracer.start_span(
            name, context=set_span_in_context(self._span), attributes=attributes, start_time=self._at(began)
        )
        part.end(end_time=self._at(ended))

    @TRACING.quiet
    def describe(self, attributes: Attributes) -> None:
        """Adds attributes to the span of the call."""
        if self.is_recorded:
            self._span.set_attributes(attributes)

    def _at(self, seconds: float) -> int:
        return int(seconds * 1e9) + self._offset


UNTRACED = CallTrace()
"""A call that is not recorded."""


class Tracing:
    """Traces the calls of one service; off until `open`."""

    def __init__(self) -> None:
        self._provider: Any = None
        self._tracer: Any = None

    def open(self, *, service: str, endpoint: str, ratio: float) -> None:
        """Starts recording: a share `ratio` of the calls without a trace context, and the calls whose trace context is
        sampled.

        Args:
            service: the resource's `service.name`.
            endpoint: `http://HOST:PORT` or `https://HOST:PORT` of a collector for OTLP over gRPC.
            ratio: in [0, 1].

        Raises:
            SettingsError: a package is not installed.
        """
        try:
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
        except ImportError as error:
            raise SettingsError(
                f"--otlp-endpoint: {error.name} is not installed: pip install -e '.[service]' in a clone of Outrider"
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
                    "service.version": installed_version(),
                    "service.instance.id": f"{socket.gethostname()}:{os.getpid()}",
                }
            ),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(exporter, max_queue_size=MAX_QUEUE, max_export_batch_size=MAX_BATCH)
        )
        self._tracer = self._provider.get_tracer("outrider", installed_version())

    @contextmanager
    def call(self, name: str, metadata: Iterable[Any] | None) -> Iterator[CallTrace]:
        """Traces a call until the block ends; `metadata` are the caller's. Log lines and calls in the block carry the
        ids of the trace.
        """
        parent = TRACING.run(lambda: incoming(metadata), Context())
        span = None if self._tracer is None else TRACING.run(lambda: self._begin(name, parent), None)
        if span is None:
            attach(parent)
            yield UNTRACED
            return
        is_recorded = TRACING.run(span.is_recording, False)
        try:
            yield CallTrace(span, self._tracer) if is_recorded else UNTRACED
        except Exception as error:  # a cancellation by the client is no error
            text = str(error) or type(error).__name__
            TRACING.run(lambda: span.set_status(Status(StatusCode.ERROR, text)), None)
            raise
        finally:
            TRACING.run(span.end, None)

    def _begin(self, name: str, parent: Context) -> Any:
        """Starts the span of a call, and makes it the current one."""
        span = self._tracer.start_span(name, context=parent, kind=SpanKind.SERVER)
        attach(set_span_in_context(span, parent))  # each call is a task: nothing to restore
        return span

    def close(self) -> None:
        """Exports the remaining spans, for `CLOSING_SECONDS` at most."""
        if self._provider is None:
            return
        last = threading.Thread(target=self._provider.shutdown, name="last-spans", daemon=True)
        last.start()
        last.join(CLOSING_SECONDS)
        if last.is_alive():
            _log.warning("the collector did not take the last spans in time; they are lost", seconds=CLOSING_SECONDS)
