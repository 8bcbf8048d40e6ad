"""Both services serve whatever becomes of what they write: requests, SIGTERM, metrics and health go on."""

import asyncio
import functools
import io
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from outrider.cli.processes import fixed, service_environment
from outrider.client import AsyncClient, Completion
from outrider.rpc.channel import wait_for_health
from tests.commands import full_pipe
from tests.fork_server import Child, fork_server
from tests.metrics import Samples, scrape
from tests.operations.cluster import until
from tests.services import HEALTHY_WITHIN_S, MODELS

FLAGS = ("--dtype", "float32", "--threads", "1", "--log-level", "debug")


@dataclass
class Unheard:
    """A service whose lines nobody reads, so that its addresses are chosen here."""

    process: Child
    address: str
    metrics: str

    def scrape(self) -> Samples:
        return scrape(f"http://{self.metrics}/metrics")

    def value(self, name: str, **labels: str) -> float:
        return self.scrape()[name][tuple(sorted(labels.items()))]

    def has_dropped_more_than(self, lines: int) -> bool:
        return self.value("outrider_log_lines_dropped_total") > lines

    def stop(self) -> int:
        """Its exit code after SIGTERM."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


@contextmanager
def unheard_pair(verifier_output: int, draft_output: int) -> Iterator[tuple[Unheard, Unheard]]:
    verifier_address = fixed("127.0.0.1:0")
    with ExitStack() as running:

        def start(module: str, model: str, address: str, output: int, *flags: str) -> Unheard:
            metrics = fixed("127.0.0.1:0")
            arguments = ["--model", str(MODELS / model), "--listen", address, "--metrics-listen", metrics]
            pid = fork_server().start(module, [*arguments, *FLAGS, *flags], output, env=service_environment(1))
            process = Child(pid, io.StringIO(), fork_server())
            running.callback(process.kill)
            return Unheard(process, address, metrics)

        verifier = start("verifier_service", "target", verifier_address, verifier_output)
        draft = start("draft_service", "draft", fixed("127.0.0.1:0"), draft_output, "--verifier", verifier_address)
        for service in (verifier, draft):
            wait_for_health(service.address, "", HEALTHY_WITHIN_S)
        yield verifier, draft


async def _complete(address: str, requests: int) -> list[Completion]:
    """Answers to requests as small as can be, 64 of them at a time; raises the first failure."""
    limit = asyncio.Semaphore(64)
    async with AsyncClient(address, retry=False, timeout=120) as client:

        async def ask(number: int) -> Completion:
            async with limit:
                return await client.complete([7], max_new_tokens=1, temperature=0.0, seed=number)

        return await asyncio.gather(*map(ask, range(requests)))


def test_two_thousand_requests_pass_while_nobody_reads_the_logs() -> None:
    with (
        full_pipe() as of_verifier,
        full_pipe() as of_draft,
        unheard_pair(of_verifier[1], of_draft[1]) as services,
    ):
        answers = asyncio.run(_complete(services[1].address, 2_000))
        assert [len(answer.token_ids) for answer in answers] == [1] * 2_000
        for service in services:
            assert service.value("outrider_log_lines_dropped_total") > 0
            for probe in ("liveness", "readiness"):
                assert service.value("outrider_health", probe=probe) == 1
        assert [service.stop() for service in reversed(services)] == [0, 0]


def test_output_that_fails_fails_no_request() -> None:
    reading, closed_pipe = os.pipe()
    os.close(reading)
    full_disk = os.open("/dev/full", os.O_WRONLY)
    try:
        with unheard_pair(closed_pipe, full_disk) as services:
            answers = asyncio.run(_complete(services[1].address, 64))
            assert [len(answer.token_ids) for answer in answers] == [1] * 64
            for service in services:
                # A line is dropped when it is its turn to be written, which may be after the answer.
                until(functools.partial(service.has_dropped_more_than, 64))
                assert service.value("outrider_health", probe="liveness") == 1
            assert [service.stop() for service in reversed(services)] == [0, 0]
    finally:
        os.close(closed_pipe)
        os.close(full_disk)
