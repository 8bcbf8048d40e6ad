"""What a server says of itself over `grpc.health.v1`, and what each name it is asked by means.

| name | SERVING while |
| --- | --- |
| the empty one, `readiness`, each service by its name | requests are welcome: it is warm, not stuck, does not drain |
| `startup` | it is warm, from then on for good: the model is there, and has run |
| `liveness` | its loops go round, from birth on and also while it drains; restart it where it is not |
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

READINESS, LIVENESS, STARTUP = "readiness", "liveness", "startup"
PROBES = (READINESS, LIVENESS, STARTUP)
"""What probes ask for, beside the services."""

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class _HealthServicer(health.aio.HealthServicer):
    """The standard servicer, but for its first word: it calls the empty name SERVING from birth."""

    def __init__(self, statuses: dict[str, Any]):
        super().__init__()
        self._server_status = statuses


class HealthState:
    """The health of a server and of each service on it: not ready until `serving`, and alive.

    Registers the standard health service. Make it before the server starts.
    """

    def __init__(self, server: grpc.aio.Server, services: Iterable[str]):
        self._ready_names = ("", READINESS, *services)
        self._is_ready = self._is_warm = self._is_stuck = self._drains = False
        self.last_glance = time.monotonic()
        self._servicer = _HealthServicer(
            {**dict.fromkeys((*self._ready_names, STARTUP), _NOT_SERVING), LIVENESS: _SERVING}
        )
        self.register(server)

    def register(self, server: grpc.aio.Server) -> None:
        """Answers at another server too, which has not started; all say the same."""
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    def says(self, probe: str) -> bool:
        """Whether `probe`, one of `PROBES`, is SERVING now."""
        if probe == STARTUP:
            return self._is_warm
        return not self._is_stuck and (probe == LIVENESS or (self._is_ready and not self._drains))

    async def warm(self) -> None:
        """The model is there, and has run."""
        self._is_warm = True
        await self._tell()

    async def serving(self) -> None:
        """Requests are welcome from now on, so it is warm too. Once the server drains, they are not any more."""
        self._is_ready = self._is_warm = True
        await self._tell()

    async def not_serving(self) -> None:
        """Requests are not welcome until `serving` is called again."""
        self._is_ready = False
        await self._tell()

    async def alive(self, is_alive: bool) -> None:
        """Whether its loops go round; while they do not, requests are not welcome either. Call it at regular intervals,
        from the event loop: for other threads `last_glance`, the time of the last call, says whether that goes round.
        """
        self.last_glance = time.monotonic()
        if self._is_stuck == is_alive:
            self._is_stuck = not is_alive
            await self._tell()

    async def drain(self) -> None:
        """Requests are not welcome any more, for good."""
        self._drains = True
        await self._tell()

    async def _tell(self) -> None:
        said = dict.fromkeys(self._ready_names, self.says(READINESS))
        said |= {STARTUP: self.says(STARTUP), LIVENESS: self.says(LIVENESS)}
        for name, is_serving in said.items():
            await self._servicer.set(name, _SERVING if is_serving else _NOT_SERVING)
