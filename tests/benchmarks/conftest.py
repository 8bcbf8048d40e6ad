"""Benchmarks that a test runs in its own process get their services from the fork server: see `tests.fork_server`."""

import pytest

from tests.fork_server import ForkedService


@pytest.fixture(autouse=True)
def _services_are_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.services.ServiceProcess", ForkedService)
