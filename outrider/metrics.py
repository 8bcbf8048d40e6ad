"""Prometheus metrics of a service, and the HTTP server that shows them. It knows nothing of what is counted.

Names begin with `outrider_`; what a service counts it makes itself, in the registry here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Info, ProcessCollector, disable_created_metrics, start_http_server

from outrider.rpc.server import StartupError

# One more series for each, which says when a counter began; nothing here asks.
disable_created_metrics()


class Metrics:
    """The registry of one service, with what the process itself uses and `outrider_service_info`."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._info = Info("outrider_service", "What runs here.", registry=self.registry)

    def describe(self, **labels: str) -> None:
        """Sets the labels of `outrider_service_info`; until then it has none."""
        self._info.info(labels)


@contextmanager
def exposed(metrics: Metrics, address: str) -> Iterator[str]:
    """Serves the metrics over HTTP, at any path, on threads of their own; yields `HOST:PORT` with the real port.

    Raises:
        StartupError: the port is taken, or the host is not this machine's.
    """
    host, _, port = address.rpartition(":")
    try:
        server, thread = start_http_server(int(port), addr=host.strip("[]"), registry=metrics.registry)
    except OSError as error:
        raise StartupError(f"cannot show metrics at {address}: {error.strerror or error}") from error
    try:
        yield f"{host}:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
