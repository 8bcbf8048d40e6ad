"""Code that only makes a text faster, or only observes it, must never fail it: it runs in a `Component`.

A component catches errors of its calls, counts them, logs one a minute and continues with a safe default. `Metrics`
shows the counts as `outrider_internal_errors_total{component}`. Authentication, limits, input checks and privacy pacing
are not components: they fail closed.
"""

import functools
import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import ParamSpec, TypeVar

import structlog

LOG_INTERVAL_S = 60.0

COMPONENTS: "dict[str, Component]" = {}
"""All components of this process, by name."""

Result = TypeVar("Result")
Parameters = ParamSpec("Parameters")

_log = structlog.get_logger()


class Component:
    """A part of a service that is allowed to fail. Make it once, at module level; any thread may use it.

    Attributes:
        name: the metric's label.
        errors: failed calls so far.

    Raises:
        ValueError: the name is taken.
    """

    def __init__(self, name: str) -> None:
        if name in COMPONENTS:
            raise ValueError(f"the component {name!r} exists already")
        self.name = name
        self.errors = 0
        self._lock = threading.Lock()
        self._last_log = -math.inf
        COMPONENTS[name] = self

    def run(self, call: Callable[[], Result], default: Result) -> Result:
        """Returns the result of `call`, or `default` if it raises an `Exception`. A cancellation is not caught."""
        try:
            return call()
        except Exception as error:
            self.note(error)
            return default

    def bounded(self, call: Callable[[], float], default: float, *, low: float, high: float) -> float:
        """As `run`, for a number: clamped to [`low`, `high`], and `default` if it is NaN or not a number."""

        def clamped() -> float:
            value = call()
            return default if math.isnan(value) else min(max(value, low), high)

        return self.run(clamped, default)

    def quiet(self, function: Callable[Parameters, None]) -> Callable[Parameters, None]:
        """Decorates a function that returns nothing, so that it never raises."""

        @functools.wraps(function)
        def call(*arguments: Parameters.args, **named: Parameters.kwargs) -> None:
            self.run(functools.partial(function, *arguments, **named), None)

        return call

    def note(self, error: Exception) -> None:
        """Counts and logs an error. For asynchronous calls, which `run` cannot await."""
        now = time.monotonic()
        with self._lock:
            self.errors += 1
            is_due = now - self._last_log >= LOG_INTERVAL_S
            if is_due:
                self._last_log = now
        if is_due:
            with suppress(Exception):
                _log.error("internal error, ignored", component=self.name, errors=self.errors, exc_info=error)
