"""Both services serve whatever becomes of what they write: requests, SIGTERM, metrics and health go on."""

import asyncio

from outrider.cli.processes import service_environment
from outrider.client import AsyncClient, Completion
from tests.cluster import Cluster, wait_healthy
from tests.commands import full_pipe


async def _complete(address: str, requests: int) -> list[Completion]:
    """Answers to requests as small as can be, 64 of them at a time; raises the first failure."""
    limit = asyncio.Semaphore(64)
    async with AsyncClient(address, retry=False, timeout=120) as client:

        async def ask(number: int) -> Completion:
            async with limit:
                return await client.complete([7], max_new_tokens=1, temperature=0.0, seed=number)

        return await asyncio.gather(*map(ask, range(requests)))


def test_two_thousand_requests_pass_while_nobody_reads_the_logs() -> None:
    with full_pipe() as of_verifier, full_pipe() as of_draft, Cluster("--log-level debug") as cluster:
        verifier = cluster.verifier(output=of_verifier[1], env=service_environment(1))
        draft = cluster.draft(verifier, output=of_draft[1], env=service_environment(1))
        wait_healthy(verifier, draft)
        services = (draft, verifier)
        answers = asyncio.run(_complete(draft.address, 2_000))
        assert [len(answer.token_ids) for answer in answers] == [1] * 2_000
        for service in services:
            assert service.count("outrider_log_lines_dropped_total") > 0
            for probe in ("liveness", "readiness"):
                assert service.count("outrider_health", probe=probe) == 1
        assert [service.stop() for service in services] == [0, 0]
