"""A collector of traces: a real gRPC server that takes OTLP, as the services send it, and keeps the spans."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from tests.cluster import wait_until


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


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps what comes."""

    def __init__(self) -> None:
        self.address = ""
        self._spans: list[Span] = []

    def Export(self, request: Any, context: Any) -> Any:
        spans = []
        for resource in request.resource_spans:
            about = {each.key: each.value.string_value for each in resource.resource.attributes}
            spans += [_read(about["service.name"], span) for scope in resource.scope_spans for span in scope.spans]
        self._spans += spans
        return trace_service_pb2.ExportTraceServiceResponse()

    def spans(self, trace_id: str | None = None) -> list[Span]:
        """Those of a trace, or all, in the order in which they began."""
        return sorted(
            (span for span in list(self._spans) if trace_id in (None, span.trace_id)), key=lambda span: span.began
        )

    def wait(self, trace_id: str, count: int) -> list[Span]:
        """The spans of a trace, once there are so many."""
        return wait_until(lambda: found if len(found := self.spans(trace_id)) >= count else [])


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
    )


@contextmanager
def collecting() -> Iterator[Collector]:
    collector, server = Collector(), grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    collector.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(None).wait()
