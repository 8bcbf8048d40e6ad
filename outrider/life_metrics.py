"""What either service shows of its life: what its health says, and how long its engine's step lasts.

It knows nothing of models or requests.
"""

from collections.abc import Callable
from typing import Any

from prometheus_client import Gauge

from outrider.lm.engine import Engine
from outrider.metrics import Metrics
from outrider.rpc.health import PROBES, HealthState


def show_life(metrics: Metrics, health: HealthState, engine: Callable[[], Engine[Any, Any, Any] | None]) -> None:
    """Shows these from now on; `engine` is asked each time, and may be None until there is one."""
    says = Gauge(
        "outrider_health",
        "What the health service says of readiness, liveness and startup: 1 is SERVING.",
        ("probe",),
        registry=metrics.registry,
    )
    for probe in PROBES:
        says.labels(probe).set_function(lambda probe=probe: health.says(probe))  # type: ignore[misc]

    def step_seconds() -> float:
        running = engine()
        return 0.0 if running is None else running.heartbeat.step_seconds()

    Gauge(
        "outrider_engine_step_seconds",
        "How long the step of now of the engine's loop has lasted; 0 while it waits for work, or is not there.",
        registry=metrics.registry,
    ).set_function(step_seconds)
