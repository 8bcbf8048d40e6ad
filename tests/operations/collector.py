"""A collector of traces: a real gRPC server that takes OTLP, as the services send it, and keeps the spans."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


@dataclass(frozen=True)
class Span:
    """A span as it came, with its process's `service.name`."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent: str
    began: int
    ended: int
    attributes: dict[str, Any]
    is_error: bool


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps what comes."""

    def __init__(self) -> None:
        self.address = ""
        self._spans: list[Span] = []
        self._lock = threading.Lock()

    def Export(self, request: Any, context: Any) -> Any:
        spans = []
        for resource in request.resource_spans:
            about = {each.key: each.value.string_value for each in resource.resource.attributes}
            spans += [_read(about["service.name"], span) for scope in resource.scope_spans for span in scope.spans]
        with self._lock:
            self._spans += spans
        return trace_service_pb2.ExportTraceServiceResponse()

    def spans(self, trace_id: str | None = None) -> list[Span]:
        """Those of a trace, or all, in the order in which they began."""
        with self._lock:
            found = [span for span in self._spans if trace_id in (None, span.trace_id)]
        return sorted(found, key=lambda span: span.began)

    def wait(self, trace_id: str, is_whole: Callable[[list[Span]], bool], seconds: float = 60.0) -> list[Span]:
        """The spans of a trace, once they are all there."""
        end = time.monotonic() + seconds
        while not is_whole(found := self.spans(trace_id)):
            assert time.monotonic() < end, f"only {[(span.service, span.name) for span in found]} came"
            time.sleep(0.05)
        return found


def _read(service: str, span: Any) -> Span:
    return Span(
        service=service,
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        began=span.start_time_unix_nano,
        ended=span.end_time_unix_nano,
        attributes={each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes},
        is_error=span.status.code == span.status.STATUS_CODE_ERROR,
    )


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector on a free port."""
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    collector.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(None).wait()
