"""Both services serve whatever becomes of what they write: requests, SIGTERM, metrics and health go on."""

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager

from outrider.cli.processes import service_environment
from outrider.client import AsyncClient, Completion
from tests.cluster import Cluster, Service, wait_healthy, wait_until
from tests.commands import full_pipe


@contextmanager
def unread_pair(verifier_output: int, draft_output: int) -> Iterator[tuple[Service, Service]]:
    """A pair whose output goes to these descriptors."""
    with Cluster("--log-level debug") as cluster:
        verifier = cluster.verifier(output=verifier_output, env=service_environment(1))
        draft = cluster.draft(verifier, output=draft_output, env=service_environment(1))
        wait_healthy(verifier, draft)
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
        unread_pair(of_verifier[1], of_draft[1]) as services,
    ):
        answers = asyncio.run(_complete(services[1].address, 2_000))
        assert [len(answer.token_ids) for answer in answers] == [1] * 2_000
        for service in services:
            assert service.count("outrider_log_lines_dropped_total") > 0
            for probe in ("liveness", "readiness"):
                assert service.count("outrider_health", probe=probe) == 1
        assert [service.stop() for service in reversed(services)] == [0, 0]


def test_output_that_fails_fails_no_request() -> None:
    reading, closed_pipe = os.pipe()
    os.close(reading)
    full_disk = os.open("/dev/full", os.O_WRONLY)
    try:
        with unread_pair(closed_pipe, full_disk) as services:
            answers = asyncio.run(_complete(services[1].address, 64))
            assert [len(answer.token_ids) for answer in answers] == [1] * 64
            for service in services:
                # A line is dropped when it is its turn to be written, which may be after the answer.
                wait_until(lambda service=service: service.count("outrider_log_lines_dropped_total") > 64)  # type: ignore[misc]
                assert service.count("outrider_health", probe="liveness") == 1
            assert [service.stop() for service in reversed(services)] == [0, 0]
    finally:
        os.close(closed_pipe)
        os.close(full_disk)
