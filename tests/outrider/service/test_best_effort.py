"""A component catches, counts and logs its errors, and lets a cancellation pass."""

import asyncio
import math
import time
import uuid

import pytest
from prometheus_client import generate_latest
from structlog.testing import capture_logs

from outrider.service.best_effort import Component
from outrider.service.metrics import Metrics


@pytest.fixture
def component() -> Component:
    return Component(f"test-{uuid.uuid4().hex}")


def fail() -> float:
    raise ValueError("a bug")


def test_an_error_gives_the_default_and_is_counted(component: Component) -> None:
    assert component.run(lambda: 3, 7) == 3
    assert component.errors == 0
    assert component.run(fail, 7.0) == 7.0

    @component.quiet
    def note() -> None:
        fail()

    note()
    assert component.errors == 2
    shown = generate_latest(Metrics().registry).decode()
    assert f'outrider_internal_errors_total{{component="{component.name}"}} 2.0' in shown


@pytest.mark.parametrize(
    ("value", "expected"),
    [(3.0, 3.0), (-1.0, 0.0), (11.0, 10.0), (math.inf, 10.0), (-math.inf, 0.0), (math.nan, 5.0)],
)
def test_a_number_is_clamped_to_its_range(component: Component, value: float, expected: float) -> None:
    assert component.bounded(lambda: value, 5.0, low=0.0, high=10.0) == expected
    assert component.bounded(fail, 5.0, low=0.0, high=10.0) == 5.0


@pytest.mark.parametrize("error", [asyncio.CancelledError, KeyboardInterrupt, SystemExit])
def test_cancellation_passes_through(component: Component, error: type[BaseException]) -> None:
    def cancel() -> None:
        raise error

    with pytest.raises(error):
        component.run(cancel, None)
    assert component.errors == 0


def test_errors_are_logged_once_a_minute(component: Component, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with capture_logs() as lines:
        for seconds in (0.0, 1.0, 58.0, 2.0, 1.0):
            now[0] += seconds
            component.run(fail, 0.0)
    assert [line["errors"] for line in lines] == [1, 4]
    assert all(line["component"] == component.name and isinstance(line["exc_info"], ValueError) for line in lines)
