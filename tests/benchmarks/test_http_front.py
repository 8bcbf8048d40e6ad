"""The servers of the benchmark of the HTTP front."""

from contextlib import ExitStack

import pytest

from benchmarks import http_front
from outrider.cli.processes import ServiceError


def test_a_server_that_ends_is_an_error_with_its_log() -> None:
    with ExitStack() as running, pytest.raises(ServiceError, match=r"at http://127.*No module named benchmarks\.none"):
        http_front.server(running, "benchmarks.none")
