"""Two verifiers and two draft services that know both, all watched: metrics over HTTP, traces to a collector.

The first draft service traces none but requests that come with a trace that is recorded; the second traces all.
"""

import json
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from outrider.cli.processes import ServiceProcess, fixed
from tests.fork_server import ForkedService
from tests.metrics import Samples, scrape
from tests.operations.collector import Collector, collecting
from tests.services import HEALTHY_WITHIN_S, MODELS

# A draft service has little of it, so that some requests outlast it.
VERIFIER_GRACE, DRAFT_GRACE = ("--grace", "30"), ("--grace", "2")
FLAGS = ("--dtype", "float32", "--threads", "1", "--metrics-listen", "127.0.0.1:0")
SOON = {"OTEL_BSP_SCHEDULE_DELAY": "200"}  # milliseconds that spans are gathered for


@dataclass(frozen=True)
class Cluster:
    """The services, and who watches them."""

    verifiers: list[ServiceProcess]
    drafts: list[ServiceProcess]
    collector: Collector

    @property
    def draft_addresses(self) -> list[str]:
        return [draft.address for draft in self.drafts]


@contextmanager
def running_cluster() -> Iterator[Cluster]:
    """All of it, healthy."""
    with ExitStack() as running:
        collector = running.enter_context(collecting())
        traced = ("--otlp-endpoint", f"http://{collector.address}")

        def launch(module: str, model: str, *flags: str) -> ServiceProcess:
            arguments = [module, "--model", str(MODELS / model), *traced, *FLAGS, *flags]
            return running.enter_context(ForkedService.launch(arguments, env=SOON))

        addresses = [fixed("127.0.0.1:0") for _ in range(2)]
        verifiers = [
            launch("verifier_service", "target", "--listen", address, *VERIFIER_GRACE) for address in addresses
        ]
        drafts = [
            launch(
                "draft_service",
                "draft",
                *("--verifier", ",".join(addresses), "--listen", "127.0.0.1:0", "--trace-sample", ratio),
                *DRAFT_GRACE,
            )
            for ratio in ("0", "1")
        ]
        for service in (*verifiers, *drafts):
            service.wait_healthy(HEALTHY_WITHIN_S)
        yield Cluster(verifiers, drafts, collector)
        for service in (*drafts, *verifiers):  # all at once: each takes seconds
            if service.returncode is None:
                service.process.send_signal(signal.SIGTERM)


def logged(service: ServiceProcess, event: str | None = None) -> list[dict[str, Any]]:
    """The lines of its log, or those with this event."""
    lines = [json.loads(line) for line in service.log_lines() if line.startswith("{")]
    return [line for line in lines if event in (None, line["event"])]


def metrics_url(service: ServiceProcess) -> str:
    """Where its metrics are."""
    (line,) = logged(service, "metrics")
    return str(line["address"])


def metrics_of(service: ServiceProcess) -> Samples:
    """What it shows now."""
    return scrape(metrics_url(service))


def until(holds: Callable[[], Any], seconds: float = 60.0) -> Any:
    """What `holds` returns once that is something."""
    end = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < end, "not in time"
        time.sleep(0.05)
    return found
