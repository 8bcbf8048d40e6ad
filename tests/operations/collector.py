"""A collector of traces: a real gRPC server that receives OTLP from the services, and keeps the spans."""

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
    """A received span, with its process's `service.name`."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent: str
    began: int
    ended: int
    attributes: dict[str, Any]


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.address = ""
        self.spans: list[Span] = []

    def Export(self, request: Any, context: Any) -> Any:
        for resource in request.resource_spans:
            process = _values(resource.resource)
            self.spans += [
                Span(
                    service=process["service.name"],
                    name=span.name,
                    trace_id=span.trace_id.hex(),
                    span_id=span.span_id.hex(),
                    parent=span.parent_span_id.hex(),
                    began=span.start_time_unix_nano,
                    ended=span.end_time_unix_nano,
                    attributes=_values(span),
                )
                for scope in resource.scope_spans
                for span in scope.spans
            ]
        return trace_service_pb2.ExportTraceServiceResponse()

    def wait(self, trace_id: str, count: int) -> list[Span]:
        """Return the spans of a trace, in the order in which they began, once there are so many."""

        def found() -> list[Span]:
            spans = [span for span in list(self.spans) if span.trace_id == trace_id]
            return sorted(spans, key=lambda span: span.began) if len(spans) >= count else []

        return wait_until(found)


def _values(described: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in described.attributes}


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
