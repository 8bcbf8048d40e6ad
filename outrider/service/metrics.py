"""Prometheus metrics of a service, and the HTTP server that exposes them.

Names begin with `outrider_`. Each service adds its own metrics to the registry. With --vllm-metrics some of them are
there a second time, under the names that vLLM gives them.
"""

import math
import socket
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate
from socketserver import TCPServer
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Info,
    ProcessCollector,
    disable_created_metrics,
    make_wsgi_app,
)
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from outrider.rpc.server import StartupError
from outrider.service.best_effort import COMPONENTS
from outrider.service.logs import dropped_lines

# Otherwise each counter would have one more series, the time of its creation, which nothing uses.
disable_created_metrics()

# From a proposal by `lookup` to a long prompt; each bucket about twice the one before.
SHORT_S = (50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3, 20e-3, 50e-3, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
FIRST_TOKEN_S = (1e-3, 2e-3, 5e-3, 10e-3, 20e-3, 50e-3, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
WHOLE_S = (10e-3, 20e-3, 50e-3, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0)

# Timeout of an idle connection; a scrape takes milliseconds.
CONNECTION_SECONDS = 10.0
# Open connections, a thread each; one more closes the oldest.
MAX_CONNECTIONS = 16
# Between two checks for the shutdown of the server.
_POLL_SECONDS = 0.1


class Metrics:
    """The registry of one service, with the process's own metrics and `outrider_service_info`."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.registry.register(Collected(internal_errors))
        self.registry.register(Collected(_dropped_lines))

    def describe(self, **labels: str) -> None:
        """Adds `outrider_service_info`, with these labels."""
        text = "Always 1; the labels name the service, its version, model and device."
        info = Info("outrider_service", text, registry=None)
        info.info(labels)
        self.registry.register(info)

    def gauge(self, name: str, text: str, value: Callable[[], float]) -> None:
        """Adds the gauge `outrider_name`, whose value is read at each scrape."""
        Gauge(f"outrider_{name}", text, registry=self.registry).set_function(value)

    def counter(self, name: str, text: str, **labels: Iterable[str]) -> Counter:
        """Adds the counter `outrider_name`. Values of a single label are shown from the start."""
        counter = Counter(f"outrider_{name}", text, tuple(labels), registry=self.registry)
        if len(labels) == 1:
            for value in next(iter(labels.values())):
                counter.labels(value)
        return counter


class Collected(Collector):
    """Metrics that `read` makes at each scrape."""

    def __init__(self, read: Callable[[], Iterator[Metric]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        return self._read()


def internal_errors() -> Iterator[Metric]:
    """Failed calls of each `Component` of the process."""
    family = CounterMetricFamily(
        "outrider_internal_errors",
        "Errors caught in components that only speed up or observe a text; the text went on without them.",
        labels=["component"],
    )
    for component in list(COMPONENTS.values()):
        family.add_metric([component.name], component.errors)
    yield family


def _dropped_lines() -> Iterator[Metric]:
    yield CounterMetricFamily(
        "outrider_log_lines_dropped",
        "Lines for standard output and standard error that were dropped because they could not be written in time.",
        value=dropped_lines(),
    )


class VllmMetrics(Collector):
    """Metrics under the names that vLLM gives them, for routers and dashboards that read those."""

    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        """Registers itself; `model` is the value of the label `model_name`."""
        self._model = model
        self._sources: list[tuple[str, Collector, tuple[str, ...]]] = []
        registry.register(self)

    def add(self, name: str, source: Collector, *kept: str) -> None:
        """Shows a metric as `vllm:name`, without `_total` if it is a counter: summed over its labels, except `kept`."""
        self._sources.append((f"vllm:{name}", source, kept))

    def gauge(self, name: str, text: str, value: Callable[[], float]) -> None:
        """Shows a value as `vllm:name`."""
        gauge = Gauge(name, text, registry=None)
        gauge.set_function(value)
        self.add(name, gauge)

    def collect(self) -> Iterator[Metric]:
        for name, source, kept in self._sources:
            for family in source.collect():
                yield self._renamed(family, name, {*kept, "le"})

    def _renamed(self, family: Metric, name: str, kept: set[str]) -> Metric:
        sums: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        if family.type == "counter" and kept == {"le"}:
            sums["_total", ()] = 0.0  # shown before the first value, as vLLM does
        for sample in family.samples:
            labels = tuple((label, value) for label, value in sample.labels.items() if label in kept)
            key = (sample.name.removeprefix(family.name), labels)
            sums[key] = sums.get(key, 0.0) + sample.value
        renamed = Metric(name, family.documentation, family.type)
        for (suffix, labels), value in sums.items():
            renamed.add_sample(name + suffix, {"model_name": self._model, **dict(labels)}, value)
        return renamed


class Times(Collector):
    """A histogram of seconds, as `prometheus_client.Histogram`: it takes many equal values at once, for the price of
    one. Values come from one thread; any thread may read.
    """

    def __init__(self, name: str, text: str, buckets: Sequence[float], registry: CollectorRegistry | None) -> None:
        """Registers itself, unless `registry` is None."""
        self._name = name
        self._text = text
        self._bounds = [*buckets, math.inf]
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0
        if registry is not None:
            registry.register(self)

    def observe(self, seconds: float, count: int = 1) -> None:
        """Records `count` times so many seconds."""
        self._counts[bisect_left(self._bounds, seconds)] += count
        self._sum += seconds * count

    def describe(self) -> Iterator[Metric]:
        yield HistogramMetricFamily(self._name, self._text)

    def collect(self) -> Iterator[Metric]:
        sums = zip(map(floatToGoString, self._bounds), accumulate(self._counts), strict=True)
        yield HistogramMetricFamily(self._name, self._text, buckets=list(sums), sum_value=self._sum)


class TextMetrics:
    """Times and tokens of texts, and what became of their drafted tokens, as a draft service or a front sees them.

    The counters of drafted tokens have names of vLLM's only.

    Attributes:
        first_token: from the arrival of a request to the first token of each sample.
        whole: from the arrival of a request that ended well to its end.
    """

    def __init__(self, registry: CollectorRegistry, prefix: str, requests: str) -> None:
        """`prefix` is that of the names; `requests` says what ends."""

        def counter(name: str, text: str) -> Counter:
            return Counter(f"{prefix}{name}", text, registry=registry)

        def seconds(name: str, text: str, buckets: Sequence[float]) -> Times:
            return Times(f"{prefix}{name}_seconds", text, buckets, registry)

        def unnamed(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"spec_decode_num_{name}", text, labels, registry=None)

        self._prompt = counter(
            "prompt_tokens", f"Prompt tokens of ended {requests}; each prompt counts once, with any number of samples."
        )
        self._generated = counter("generation_tokens", f"Generated tokens of ended {requests}.")
        self.first_token = seconds(
            "time_to_first_token", "From the arrival of a request to the first token of each sample.", FIRST_TOKEN_S
        )
        self._between = seconds(
            "inter_token_latency",
            "From one token of a sample to the next; tokens that are sent together share the time equally.",
            SHORT_S,
        )
        self.whole = seconds(
            "e2e_request_latency", "From the arrival of a request to its end, if its status is OK.", WHOLE_S
        )
        self._drafts = unnamed("drafts", "Proposals of at least one token that a verifier judged.")
        self._draft_tokens = unnamed("draft_tokens", "Drafted tokens in judged proposals.")
        self._accepted = unnamed("accepted_tokens", "Drafted tokens that were accepted.")
        self._accepted_at = unnamed(
            "accepted_tokens_per_pos", "Accepted tokens by position in the proposal, from 0.", "position"
        )

    def show_vllm(self, shown: VllmMetrics) -> None:
        shown.add("prompt_tokens", self._prompt)
        shown.add("generation_tokens", self._generated)
        shown.add("time_to_first_token_seconds", self.first_token)
        shown.add("inter_token_latency_seconds", self._between)
        shown.add("e2e_request_latency_seconds", self.whole)
        shown.add("spec_decode_num_drafts", self._drafts)
        shown.add("spec_decode_num_draft_tokens", self._draft_tokens)
        shown.add("spec_decode_num_accepted_tokens", self._accepted)
        shown.add("spec_decode_num_accepted_tokens_per_pos", self._accepted_at, "position")

    def ended(self, *, prompt: int, generated: int) -> None:
        self._prompt.inc(prompt)
        self._generated.inc(generated)

    def next_tokens(self, seconds: float, count: int) -> None:
        """Records `count` tokens that came together, `seconds` after those before them."""
        if count:
            self._between.observe(seconds / count, count)

    def judged(self, drafts: int, drafted: int, accepted_at: Sequence[int]) -> None:
        """Counts judged proposals of `drafted` tokens together, with the accepted tokens at each position."""
        self._drafts.inc(drafts)
        self._draft_tokens.inc(drafted)
        self._accepted.inc(sum(accepted_at))
        for position, count in enumerate(accepted_at):
            if count:
                self._accepted_at.labels(str(position)).inc(count)


class _Handler(WSGIRequestHandler):
    timeout = CONNECTION_SECONDS

    def log_message(self, *_: Any, **__: Any) -> None:
        """Logs nothing."""


class _Server(ThreadingWSGIServer):
    request_queue_size = 256
    allow_reuse_port = False

    def __init__(self, address: Any, family: socket.AddressFamily) -> None:
        self.address_family = family
        self._open: dict[Any, None] = {}
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # the parent's would resolve this host's name
        self.server_name, self.server_port = "", self.server_address[1]
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        if len(self._open) >= MAX_CONNECTIONS:
            oldest = next(iter(self._open))
            self._open.pop(oldest, None)
            with suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)  # its thread reads the end
        self._open[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Logs nothing about a broken connection."""


@contextmanager
def exposed(metrics: Metrics, address: str) -> Iterator[str]:
    """Serves the metrics over HTTP, at any path, on threads; yields `HOST:PORT` with the real port.

    Raises:
        StartupError: the port is taken, or the host is not this machine's.
    """
    host, _, port = address.rpartition(":")
    try:
        family, _, _, _, found = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        server = _Server(found, family)
    except OSError as error:
        raise StartupError(f"--metrics-listen: cannot listen at {address}: {error.strerror or error}") from error
    app = make_wsgi_app(metrics.registry)
    # Always in Prometheus' text format: the library fails on headers that ask for an unknown version of OpenMetrics.
    server.set_app(lambda environ, start: app({**environ, "HTTP_ACCEPT": ""}, start))
    thread = threading.Thread(target=server.serve_forever, args=(_POLL_SECONDS,), name="metrics", daemon=True)
    thread.start()
    try:
        yield f"{host}:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
