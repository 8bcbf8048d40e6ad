"""A verifier, a draft service, and one more behind a link that breaks: processes, their logs and metrics."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from outrider.cli.processes import STOP_TIMEOUT_S, ServiceProcess, fixed
from tests.fork_server import ForkedService
from tests.metrics import Samples, scrape
from tests.proxy import Proxy
from tests.services import HEALTHY_WITHIN_S, MODELS

PLACES, WAITING = 44, 16
"""Of the verifier: fewer than there are streams, so that some wait and some are refused."""

KV_CACHE = ("--kv-cache-mb", "10")
"""Of the verifier: some 1,700 positions, and so less than as many sequences want: some give way and are run again."""

SLOW_CLIENT_S = 3.0
"""How long either service bears with a reader that does not read."""

_SHARED = ("--dtype", "float32", "--device", "cpu", "--threads", "1", "--slow-client-timeout", str(SLOW_CLIENT_S))
_LOOK_S = 0.2


@dataclass
class Watched:
    """A service, all it has logged, and its metrics."""

    process: ServiceProcess
    metrics_url: str
    lines: list[str] = field(default_factory=list)

    @property
    def address(self) -> str:
        """HOST:PORT."""
        return self.process.address

    def samples(self) -> Samples:
        """Scrape its metrics."""
        return scrape(self.metrics_url)

    def entries(self) -> list[dict[str, object]]:
        """Return the lines of its log that are JSON, parsed."""
        return [json.loads(line) for line in self.lines if line.startswith("{")]

    def plain_lines(self) -> list[str]:
        """Return the others: traces, and what libraries say past the log."""
        return [line for line in self.lines if line.strip() and not line.startswith("{")]


@dataclass(frozen=True)
class Cluster:
    """All of them. `way` is what the frail draft service reaches the verifier by."""

    verifier: Watched
    draft: Watched
    frail: Watched
    way: Proxy

    @property
    def services(self) -> tuple[Watched, Watched, Watched]:
        """Return the three services."""
        return self.verifier, self.draft, self.frail


@contextmanager
def running_cluster() -> Iterator[Cluster]:
    """Start all at once, wait until they serve, and stop them at the end."""
    verifier_address = fixed("127.0.0.1:0")
    with ExitStack() as stack:
        way = stack.enter_context(Proxy(verifier_address))

        def launch(module: str, *flags: str) -> Watched:
            metrics, lines = fixed("127.0.0.1:0"), list[str]()
            arguments = [module, *flags, "--metrics-listen", metrics, *_SHARED]
            process = stack.enter_context(
                ForkedService.launch(arguments, on_line=lines.append, fault="impatient_keepalive")
            )
            return Watched(process, f"http://{metrics}/metrics", lines)

        def draft(verifier: str) -> Watched:
            model = ("--model", str(MODELS / "draft"), "--listen", "127.0.0.1:0")
            return launch("draft_service", *model, "--verifier", verifier)

        model = ("--model", str(MODELS / "target"), "--listen", verifier_address)
        limits = ("--max-sequences", str(PLACES), "--max-waiting", str(WAITING))
        cluster = Cluster(
            launch("verifier_service", *model, *limits, *KV_CACHE), draft(verifier_address), draft(way.address), way
        )
        for service in cluster.services:
            service.process.wait_healthy(HEALTHY_WITHIN_S)
        yield cluster
        for service in cluster.services:  # all at once: each takes a second or two to end
            service.process.process.send_signal(signal.SIGTERM)
        for service in cluster.services:
            service.process.process.wait(STOP_TIMEOUT_S)


def until(holds: Callable[[], bool], seconds: float) -> bool:
    """Wait until it holds; False where it does not in time."""
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(_LOOK_S)
    return True
