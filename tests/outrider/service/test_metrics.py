"""Metrics are served over HTTP beside idle and broken connections."""

import socket
import threading
from contextlib import ExitStack, suppress
from urllib.request import Request, urlopen

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from outrider.rpc.server import StartupError
from outrider.service import metrics as module
from outrider.service.metrics import MAX_CONNECTIONS, Metrics, Times, exposed
from tests.metrics import parse


def test_metrics_are_served_and_the_port_is_free_afterwards() -> None:
    metrics = Metrics()
    with exposed(metrics, "127.0.0.1:0") as address:
        before = urlopen(f"http://{address}/metrics", timeout=10).read().decode()
        assert "outrider_service_info" not in before, "it has no labels yet"
        metrics.describe(version="1", model='a "b"')
        shown = urlopen(f"http://{address}/metrics", timeout=10).read().decode()
        assert 'outrider_service_info{model="a \\"b\\"",version="1"} 1.0' in shown
        assert "_created" not in shown
        odd = Request(f"http://{address}/metrics", headers={"Accept": "application/openmetrics-text; version=zz"})
        assert "outrider_service_info" in urlopen(odd, timeout=10).read().decode()
        in_use = f"^--metrics-listen: cannot listen at {address}: Address already in use$"
        with pytest.raises(StartupError, match=in_use), exposed(Metrics(), address):
            pass
    with exposed(metrics, address) as again:
        assert again == address


def _connect(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=60)


def _is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_idle_connections_take_few_threads_and_keep_no_scrape_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CONNECTION_SECONDS", 3600.0)
    with exposed(Metrics(), "127.0.0.1:0") as address, ExitStack() as opened:
        threads = threading.active_count()
        idle = [opened.enter_context(_connect(address)) for _ in range(200)]
        for connection in idle:
            connection.sendall(b"GET /metrics HT")
        shown = urlopen(f"http://{address}/metrics", timeout=60).read().decode()
        assert "outrider_log_lines_dropped_total 0.0" in shown
        assert threading.active_count() <= threads + MAX_CONNECTIONS + 1
        assert all(_is_closed(connection) for connection in idle[: 200 - MAX_CONNECTIONS])


@pytest.mark.parametrize(
    "head", [b"GET\r\n\r\n", b"POST /metrics HTTP/1.1\r\n\r\n", b"\xff\xfe : \r\n:\r\n\r\n", b"x" * 70_000]
)
def test_an_invalid_request_harms_no_other(head: bytes) -> None:
    with exposed(Metrics(), "127.0.0.1:0") as address:
        with _connect(address) as connection:
            connection.sendall(head)
            with suppress(ConnectionResetError):
                while connection.recv(1 << 16):
                    pass
        assert urlopen(f"http://{address}/metrics", timeout=60).status == 200


def test_times_are_those_of_a_histogram() -> None:
    buckets, values = (0.5, 1.0, 2.0), (0.1, 0.5, 0.75, 1.0, 2.5)
    registries = CollectorRegistry(), CollectorRegistry()
    expected = Histogram("t_seconds", "Times.", registry=registries[0], buckets=buckets)
    times = Times("t_seconds", "Times.", buckets, registries[1])
    for count, seconds in enumerate(values, 1):
        for _ in range(count):
            expected.observe(seconds)
        times.observe(seconds, count)
    shown, wanted = (parse(generate_latest(registry).decode()) for registry in reversed(registries))
    assert shown == wanted
    with pytest.raises(ValueError, match="Duplicated"):
        Times("t_seconds", "Times.", buckets, registries[1])
