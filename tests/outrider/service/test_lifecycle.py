"""The health metric is right while the event loop, which answers probes, does not run."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.rpc.health import PROBES, HealthState
from outrider.rpc.server import create_server
from outrider.service.lifecycle import _watch, export_health, in_thread
from outrider.service.metrics import Metrics
from tests.cluster import Cluster, wait_until
from tests.machine import need_networks
from tests.project.tree import ROOT


class Panic(BaseException):
    """As of an extension in Rust."""


async def test_what_ends_a_thread_is_raised_where_its_result_is_awaited() -> None:
    def panic() -> None:
        raise Panic

    with pytest.raises(Panic):
        async with asyncio.timeout(60):
            await in_thread(panic)


def test_a_service_that_loads_ends_with_0_after_a_signal() -> None:
    with Cluster(fault="loads_for_ever") as cluster:
        verifier = cluster.verifier()
        wait_until(lambda: "loading" in verifier.plain_lines())
        assert verifier.stop() == 0
        assert verifier.logged("stopped")


async def test_an_event_loop_that_does_not_run_is_neither_alive_nor_ready() -> None:
    metrics, health = Metrics(), HealthState(create_server(max_message_bytes=1 << 20), [])
    service: Any = SimpleNamespace(metrics=metrics, engine=None)
    export_health(service, health, 60.0)

    def shown() -> dict[str, float | None]:
        return {probe: metrics.registry.get_sample_value("outrider_health", {"probe": probe}) for probe in PROBES}

    await health.serving()
    assert shown() == {"readiness": 1, "liveness": 1, "startup": 1}
    health.last_check -= 61
    assert shown() == {"readiness": 0, "liveness": 0, "startup": 1}
    watching = asyncio.create_task(_watch(service, health, bound=0.04))
    async with asyncio.timeout(60):
        while not shown()["liveness"]:  # noqa: ASYNC110  # a metric is no event
            await asyncio.sleep(0.01)
    watching.cancel()
    assert shown() == {"readiness": 1, "liveness": 1, "startup": 1}


@pytest.mark.parametrize("service", ["draft_service", "verifier_service"])
def test_a_signal_ends_the_first_process_of_a_container_while_it_imports(service: str) -> None:
    """The kernel drops a signal to PID 1 that has no handler."""
    need_networks()
    command = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", sys.executable, "-m", service]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as parent:
        children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
        pid = int(wait_until(children.read_text))
        wait_until(lambda: _handles(pid, signal.SIGTERM))
        os.kill(pid, signal.SIGTERM)
        written, _ = parent.communicate(timeout=60)
        assert (parent.returncode, written) == (0, ""), "it would fail, as it has no --model"


def _handles(pid: int, number: signal.Signals) -> bool:
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
    assert caught is not None
    return bool(int(caught[1], 16) >> (number - 1) & 1)
