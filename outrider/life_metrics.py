"""What either service shows of its life: what its health says, and how long its engine's step lasts."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from prometheus_client import Gauge

from outrider.metrics import Metrics
from outrider.rpc.health import PROBES, STARTUP, HealthState
from outrider.runtime.engine import Engine


def show_life(
    metrics: Metrics, health: HealthState, engine: Callable[[], Engine[Any, Any, Any] | None], bound: float
) -> None:
    """Shows these from now on; `engine` is asked each time, and may be None until there is one. An event loop that has
    not run for `bound` seconds is neither alive nor ready: it could not answer a probe.
    """
    says = Gauge(
        "outrider_health",
        "What the health service says of readiness, liveness and startup: 1 is SERVING.",
        ("probe",),
        registry=metrics.registry,
    )

    def says_now(probe: str) -> bool:
        return health.says(probe) and (probe == STARTUP or time.monotonic() - health.last_glance <= bound)

    for probe in PROBES:
        says.labels(probe).set_function(partial(says_now, probe))

    def step_seconds() -> float:
        running = engine()
        return 0.0 if running is None else running.heartbeat.step_seconds()

    Gauge(
        "outrider_engine_step_seconds",
        "How long the step of now of the engine's loop has lasted; 0 while it waits for work, or is not there.",
        registry=metrics.registry,
    ).set_function(step_seconds)
