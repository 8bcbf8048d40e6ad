"""Metrics are served over HTTP beside idle and broken connections, and an address in use is an error at once."""

import socket
import threading
from contextlib import ExitStack, suppress
from urllib.request import urlopen

import pytest

from outrider.rpc.server import StartupError
from outrider.service import metrics as module
from outrider.service.metrics import MAX_CONNECTIONS, Metrics, exposed


def test_what_is_described_is_shown_and_the_port_is_free_afterwards() -> None:
    metrics = Metrics()
    for _ in range(2):
        with exposed(metrics, "127.0.0.1:0") as address:
            metrics.describe(version="1", model='a "b"')
            shown = urlopen(f"http://{address}/metrics", timeout=10).read().decode()
            assert 'outrider_service_info{model="a \\"b\\"",version="1"} 1.0' in shown
            assert "_created" not in shown
    with exposed(metrics, address) as again:
        assert again == address


def test_a_port_that_is_taken_is_named() -> None:
    with (
        exposed(Metrics(), "127.0.0.1:0") as address,
        pytest.raises(StartupError, match=f"^cannot serve metrics at {address}: Address already in use$"),
    ):
        exposed(Metrics(), address).__enter__()


def _connect(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=60)


def _is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_idle_connections_cost_few_threads_and_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_a_request_that_is_none_harms_nobody(head: bytes) -> None:
    with exposed(Metrics(), "127.0.0.1:0") as address:
        with _connect(address) as connection:
            connection.sendall(head)
            with suppress(ConnectionResetError):
                while connection.recv(1 << 16):
                    pass
        assert urlopen(f"http://{address}/metrics", timeout=60).status == 200
