"""Prometheus metrics of a service, and the HTTP server that shows them.

Names begin with `outrider_`; what a service counts it makes itself, in the registry here.
"""

from __future__ import annotations

import asyncio
import io
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from wsgiref.handlers import SimpleHandler

from prometheus_client import CollectorRegistry, Info, ProcessCollector, disable_created_metrics, make_wsgi_app
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from outrider.rpc.server import StartupError
from outrider.service.best_effort import COMPONENTS
from outrider.service.logs import dropped_lines

# One more series for each, which says when a counter began; nothing here asks.
disable_created_metrics()

# Of an HTTP connection, from its first byte to its last; a scraper takes milliseconds.
CONNECTION_SECONDS = 10.0
# Open at once; one more closes the oldest.
MAX_CONNECTIONS = 64
_MAX_HEAD_BYTES = 1 << 14
_BACKLOG = 256


class Metrics:
    """The registry of one service, with what the process itself uses and `outrider_service_info`."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.registry.register(_InternalErrors())
        self.registry.register(_DroppedLines())
        self._info = Info("outrider_service", "What runs here.", registry=self.registry)

    def describe(self, **labels: str) -> None:
        """Sets the labels of `outrider_service_info`; until then it has none."""
        self._info.info(labels)


class _InternalErrors(Collector):
    """Failed calls of each `Component` of the process."""

    def collect(self) -> Iterator[CounterMetricFamily]:
        family = CounterMetricFamily(
            "outrider_internal_errors",
            "Errors that were caught and ignored, since the component only speeds up or watches a text.",
            labels=["component"],
        )
        for component in list(COMPONENTS.values()):
            family.add_metric([component.name], component.errors)
        yield family


class _DroppedLines(Collector):
    """Log lines that the process could not write."""

    def collect(self) -> Iterator[CounterMetricFamily]:
        yield CounterMetricFamily(
            "outrider_log_lines_dropped",
            "Lines for standard output and standard error that were dropped, since they could not be written in time.",
            value=dropped_lines(),
        )


class _Server:
    """An HTTP server in one thread, however many connections there are: each is answered once, and closed."""

    def __init__(self, registry: CollectorRegistry, listening: socket.socket) -> None:
        self._app = make_wsgi_app(registry)
        self._listening = listening
        self._open: dict[asyncio.StreamWriter, None] = {}
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        with suppress(RuntimeError):  # its thread has failed
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(
            self._connected, sock=self._listening, limit=_MAX_HEAD_BYTES, backlog=_BACKLOG
        )
        await self._stop.wait()
        server.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._open) >= MAX_CONNECTIONS:
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.transport.abort()
        self._open[writer] = None
        try:
            with suppress(OSError, EOFError, asyncio.LimitOverrunError, TimeoutError):
                async with asyncio.timeout(CONNECTION_SECONDS):
                    writer.write(self._answer(await reader.readuntil(b"\r\n\r\n")))
                    writer.close()
                    await writer.wait_closed()
        finally:
            self._open.pop(writer, None)
            writer.transport.abort()

    def _answer(self, head: bytes) -> bytes:
        """The response to a request, whose head ends in an empty line. What it asks for is up to the library."""
        request, *fields = head.decode("latin-1").split("\r\n")
        method, target, *_ = [*request.split(" "), "", ""]
        path, _, query = target.partition("?")
        environ = {"REQUEST_METHOD": method, "PATH_INFO": path, "QUERY_STRING": query, "SERVER_PROTOCOL": "HTTP/1.0"}
        for name, _, value in (field.partition(":") for field in fields):
            environ["HTTP_" + name.strip().upper().replace("-", "_")] = value.strip()
        response = io.BytesIO()
        SimpleHandler(io.BytesIO(), response, sys.stderr, environ, multithread=False).run(self._app)
        return response.getvalue()


def _listen(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(_BACKLOG)
    except OSError:
        listening.close()
        raise
    return listening


@contextmanager
def exposed(metrics: Metrics, address: str) -> Iterator[str]:
    """Serves the metrics over HTTP, at any path, on a thread of its own; yields `HOST:PORT` with the real port.

    Raises:
        StartupError: the port is taken, or the host is not this machine's.
    """
    host, _, port = address.rpartition(":")
    try:
        listening = _listen(host.strip("[]"), int(port))
    except OSError as error:
        raise StartupError(f"cannot show metrics at {address}: {error.strerror or error}") from error
    bound = listening.getsockname()[1]
    server = _Server(metrics.registry, listening)
    try:
        yield f"{host}:{bound}"
    finally:
        server.stop()
