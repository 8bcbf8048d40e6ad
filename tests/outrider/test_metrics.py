"""Metrics are there over HTTP, and an address that cannot be had is an error at once."""

from urllib.request import urlopen

import pytest

from outrider.metrics import Metrics, exposed
from outrider.rpc.server import StartupError


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
        pytest.raises(StartupError, match=f"^cannot show metrics at {address}: Address already in use$"),
    ):
        exposed(Metrics(), address).__enter__()


def test_a_host_that_is_not_here_is_named() -> None:
    with pytest.raises(StartupError, match=r"^cannot show metrics at 192\.0\.2\.1:0: "):
        exposed(Metrics(), "192.0.2.1:0").__enter__()
