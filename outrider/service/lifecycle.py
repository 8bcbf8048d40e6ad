"""The life of a service: listen, load, serve, drain, stop; with its health and metrics. Both services share it.

Health is also served on a port of its own, in plaintext, for probes without a certificate.
"""

import asyncio
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, ExitStack
from functools import partial
from typing import Any, TypeVar

import grpc
import structlog
from prometheus_client import Gauge
from prometheus_client.core import CounterMetricFamily, Metric

from outrider.environment import loop_factory
from outrider.rpc.auth import REFUSALS, Authentication
from outrider.rpc.errors import RequestError, internal, unavailable
from outrider.rpc.health import PROBES, STARTUP, HealthState
from outrider.rpc.server import StartupError, bind, create_server, cut_off, enable_reflection, serve_until_signal
from outrider.runtime.device import check_environment
from outrider.runtime.engine import Engine
from outrider.runtime.errors import CheckpointError, ModelLost
from outrider.service.logs import configure_logging, leave
from outrider.service.metrics import Collected, Metrics, exposed
from outrider.service.settings import ServiceSettings, SettingsError, listening
from outrider.service.tracing import Tracing

# Requests are a service name, and responses a number.
_MAX_MESSAGE_BYTES = 4096


def export_health(service: "Service", health: HealthState, bound: float) -> None:
    """Adds the gauges of health and of the engine's step. If the event loop has not run for `bound` seconds, liveness
    and readiness are 0: a probe would get no answer.
    """
    gauge = Gauge(
        "outrider_health",
        "Health status by probe (readiness, liveness, startup): 1 is SERVING.",
        ("probe",),
        registry=service.metrics.registry,
    )

    def is_serving(probe: str) -> bool:
        return health.is_serving(probe) and (probe == STARTUP or time.monotonic() - health.last_check <= bound)

    for probe in PROBES:
        gauge.labels(probe).set_function(partial(is_serving, probe))

    def step_seconds() -> float:
        return 0.0 if service.engine is None else service.engine.step_seconds()

    text = "Time that the engine's current step has lasted; 0 while the engine waits for work or is not loaded."
    service.metrics.gauge("engine_step_seconds", text, step_seconds)


def export_refused(service: "Service", authentication: Sequence[Authentication]) -> None:
    """Adds the counter of refused calls."""

    def refused() -> Iterator[Metric]:
        text = "Calls that authentication or the limits of a client refused, by status code."
        family = CounterMetricFamily("outrider_refused_calls", text, labels=["code"])
        for code in REFUSALS:
            family.add_metric([code.name], sum(each.refused[code] for each in authentication))
        yield family

    service.metrics.registry.register(Collected(refused))


_log = structlog.get_logger()

Result = TypeVar("Result")

# The engine's thread takes the interpreter's lock often and briefly; with Python's default of 5 ms a verdict may wait
# that long for the event loop.
SWITCH_INTERVAL = 0.0005
# Between two checks that the engine's loop runs.
CHECK_SECONDS = 1.0
# On a busy machine the event loop may be this late and still count as alive.
SLOW_LOOP_SECONDS = 10.0


Warm = Callable[[], Awaitable[None]]
"""`Service.load` calls it once the model has run."""


class Service(ABC):
    """The interface of a service to `run`.

    Attributes:
        name: full name of its gRPC service.
        also: full names of further gRPC services on its port.
        metrics: its metrics; served with --metrics-listen.
        tracing: traces of its calls; recorded with --otlp-endpoint.
        engine: runs its model; None before the model is loaded, or without one.
    """

    name: str
    also: tuple[str, ...] = ()
    engine: Engine[Any, Any, Any] | None

    def __init__(self) -> None:
        self.metrics = Metrics()
        self.tracing = Tracing()
        self.engine = None

    @abstractmethod
    def register(self, server: grpc.aio.Server) -> None:
        """Adds the servicer to a server that has not started. Calls may arrive before `load` has ended."""

    @abstractmethod
    async def load(self, warm: Warm) -> None:
        """Loads the model and everything else that serving needs; returns when ready. Awaits `warm` once the model has
        run: after that the service may wait for others, and a restart would not help.

        Raises:
            CheckpointError, RequestError: the service cannot serve; the text is one line.
        """

    @abstractmethod
    async def drain(self) -> None:
        """Notifies the calls in progress. Called once, when no new call can arrive."""

    @abstractmethod
    def stop(self) -> None:
        """Frees the resources of `load`. Called when no call is in progress."""

    async def broken(self) -> str:
        """Returns the reason once this process can never serve again. By default it never returns."""
        return await asyncio.get_running_loop().create_future()


async def live(service: Service, settings: ServiceSettings, program: str) -> None:
    """Runs a service until a signal ends it; `program` is its name in traces.

    Raises:
        StartupError, CheckpointError, RequestError: it cannot serve.
        SettingsError: a setting cannot be met.
        ModelLost: it served, and no longer can.
    """
    with ExitStack() as running:
        if settings.otlp_endpoint is not None:
            service.tracing.open(service=program, endpoint=settings.otlp_endpoint, ratio=settings.trace_sample)
            running.callback(service.tracing.close)
            _log.info("tracing", endpoint=settings.otlp_endpoint, ratio=settings.trace_sample)
        if settings.metrics_listen is not None:
            shown = running.enter_context(exposed(service.metrics, settings.metrics_listen))
            _log.info("metrics", address=f"http://{shown}/metrics")
        await _listen(service, settings)


async def _listen(service: Service, settings: ServiceSettings) -> None:
    tls, first = listening(settings)
    transport = "plaintext" if tls is None else "mutual TLS" if tls.requires_client_certificate else "TLS"
    server = create_server(
        max_message_bytes=settings.max_message_bytes,
        max_concurrent_streams=settings.max_concurrent_streams,
        max_connection_age_s=settings.max_connection_age,
        first=first,
    )
    health = HealthState(server, [service.name, *service.also])
    export_refused(service, first)
    export_health(service, health, max(settings.liveness_timeout, SLOW_LOOP_SECONDS))
    service.register(server)
    enable_reflection(server, [service.name, *service.also])
    address = bind(server, settings.listen, None if tls is None else tls.credentials())
    async with AsyncExitStack() as beside:
        probed = ""
        if settings.health_listen is not None:
            probe_server = create_server(max_message_bytes=_MAX_MESSAGE_BYTES, max_concurrent_streams=64)
            health.register(probe_server)
            probed = bind(probe_server, settings.health_listen)
            await probe_server.start()
            beside.push_async_callback(probe_server.stop, None)
        await server.start()
        # First the address, for the parent process; health stays NOT_SERVING until the model is loaded.
        _log.info("listening", address=address, model=settings.model, transport=transport, grace=settings.grace)
        if probed:
            _log.info("health", address=probed)
        await _serve(service, settings, server, health)


async def _serve(service: Service, settings: ServiceSettings, server: grpc.aio.Server, health: HealthState) -> None:
    serving = asyncio.create_task(
        serve_until_signal(server, health, grace_s=settings.grace, on_drain=service.drain), name="serving"
    )
    loading = asyncio.create_task(_load(service, health), name="loading")
    watching = asyncio.create_task(_watch(service, health, settings.liveness_timeout), name="watching")
    breaking = asyncio.create_task(service.broken(), name="breaking")
    try:
        await asyncio.wait((serving, loading, breaking), return_when=asyncio.FIRST_COMPLETED)
        if loading.done() and not breaking.done():
            loading.result()
            await asyncio.wait((serving, breaking), return_when=asyncio.FIRST_COMPLETED)
        if breaking.done():  # do not drain: it would wait for steps that never run
            _log.error("cannot serve any more", reason=breaking.result())
            await health.drain()
            # Not DRAINING: a sequence may be the cause, and draft services then suspect those that ran.
            await cut_off(server, unavailable("NO_VERIFIER", "the service has lost its target; call another one"))
            raise ModelLost(breaking.result())
        await serving
    finally:
        for task in (serving, loading, watching, breaking):
            task.cancel()
        await asyncio.gather(serving, loading, watching, breaking, return_exceptions=True)
        service.stop()
    _log.info("stopped")


async def _load(service: Service, health: HealthState) -> None:
    await service.load(health.warm)
    await health.serving()
    _log.info("serving")


async def _watch(service: Service, health: HealthState, bound: float) -> None:
    """Sets liveness by the engine, and logs when it stops and when it runs again."""
    last = ""
    while True:
        await asyncio.sleep(min(CHECK_SECONDS, bound / 4))
        failure = "" if service.engine is None else service.engine.failure(bound)
        if bool(failure) != bool(last):
            if failure:
                _log.error("engine is not alive", reason=failure)
            else:
                _log.warning("engine is alive again")
        await health.alive(not failure)
        last = failure


# Name of the threads of `in_thread`.
_IN_THREAD = "in_thread"


async def in_thread(function: Callable[[], Result]) -> Result:
    """Runs a function on a daemon thread, which does not delay the exit of the process as a pool's would."""
    future: Future[Result] = Future()
    future.set_running_or_notify_cancel()  # a cancelled caller does not cancel it: `work` still sets its result

    def work() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # without a result the caller would wait for ever
            future.set_exception(error)

    threading.Thread(target=work, daemon=True, name=_IN_THREAD).start()
    return await asyncio.wrap_future(future)


async def first_result(engine: Engine[Any, Any, Any], work: Awaitable[Result]) -> Result:
    """Awaits the result of the first step of an engine.

    Raises:
        RequestError: the engine has ended.
    """
    result = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait((result,), timeout=CHECK_SECONDS))[0]:
            if not engine.alive:
                raise internal(
                    "INTERNAL", "the engine ended before its first step; its error is in the log above this line"
                )
        return result.result()
    finally:
        result.cancel()


def run(program: str, settings: ServiceSettings, make: Callable[[], Service]) -> int:
    """Runs a service as a process and returns its exit code: 0 after a signal, 1 if it cannot serve, or no
    longer, 2 if a setting cannot be met on this machine.
    """
    code = _run_until_end(program, settings, make)
    if any(thread.name == _IN_THREAD for thread in threading.enumerate()):
        leave(code)  # Python would end a thread that loads amid C++ code, which aborts the process
    return code


def _run_until_end(program: str, settings: ServiceSettings, make: Callable[[], Service]) -> int:
    is_readable = configure_logging(program, settings.log_level)
    settings.warn_of_variables()
    sys.setswitchinterval(SWITCH_INTERVAL)
    try:
        check_environment()
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(live(make(), settings, program))
    except (StartupError, CheckpointError, ModelLost, RequestError, SettingsError) as error:
        message = error.message if isinstance(error, RequestError) else str(error)
        if not is_readable:  # a terminal shows the line below
            _log.error("cannot serve", reason=message)
        print(f"{program}: {message}", file=sys.stderr)  # noqa: T201  # the one line an operator looks for
        return 2 if isinstance(error, SettingsError) else 1
    return 0
