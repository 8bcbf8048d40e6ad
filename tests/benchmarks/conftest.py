"""Benchmarks that a test runs in its own process get their services from the fork server: see `tests.fork_server`."""

import pytest

from tests.fork_server import ForkedService


@pytest.fixture(autouse=True)
def _services_are_forked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("gpu") is not None:
        return  # a forked process cannot use CUDA where its parent has
    monkeypatch.setattr("benchmarks.services.ServiceProcess", ForkedService)
