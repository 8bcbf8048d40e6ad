"""The health of a server over `grpc.health.v1`, by service name.

| service name | SERVING while |
| --- | --- |
| empty, `readiness`, each gRPC service | it accepts requests: the model is loaded, its loops run, it does not drain |
| `startup` | the model has loaded and run once; never NOT_SERVING after that |
| `liveness` | its loops run, from the start, also while it drains; restart the process if not |
"""

import time
from collections.abc import Iterable
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

READINESS, LIVENESS, STARTUP = "readiness", "liveness", "startup"
PROBES = (READINESS, LIVENESS, STARTUP)
"""Service names for probes."""

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class HealthState:
    """The health of a server and of each service on it. At first alive and not ready.

    Registers the standard health service. Make it before the server starts.
    """

    def __init__(self, server: grpc.aio.Server, services: Iterable[str]):
        self._services = ("", *services)
        self._is_ready = self._is_warm = self._is_stuck = self._drains = False
        self.last_check = time.monotonic()
        self._servicer: Any = health.aio.HealthServicer()  # it would report the empty name as SERVING from its start
        self._servicer._server_status = self._statuses()
        self.register(server)

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the health service to another server too, which has not started."""
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    def is_serving(self, probe: str) -> bool:
        """Whether `probe`, one of `PROBES`, is SERVING now."""
        if probe == STARTUP:
            return self._is_warm
        return not self._is_stuck and (probe == LIVENESS or (self._is_ready and not self._drains))

    async def warm(self) -> None:
        """Call it once the model has loaded and run."""
        self._is_warm = True
        await self._publish()

    async def serving(self) -> None:
        """Ready from now on, until the server drains."""
        self._is_ready = self._is_warm = True
        await self._publish()

    async def alive(self, is_alive: bool) -> None:
        """Sets whether the loops run; if not, the server is not ready either. Call it at regular intervals from the
        event loop: other threads use `last_check`, the time of the last call, to see whether the event loop runs.
        """
        self.last_check = time.monotonic()
        if self._is_stuck == is_alive:
            self._is_stuck = not is_alive
            await self._publish()

    async def drain(self) -> None:
        """Not ready from now on. Cannot be undone."""
        self._drains = True
        await self._publish()

    def _statuses(self) -> dict[str, int]:
        probes = dict.fromkeys(self._services, READINESS) | {probe: probe for probe in PROBES}
        return {name: _SERVING if self.is_serving(probe) else _NOT_SERVING for name, probe in probes.items()}

    async def _publish(self) -> None:
        for name, status in self._statuses().items():
            await self._servicer.set(name, status)
