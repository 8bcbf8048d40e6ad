"""Chaos: 48 streams at once, of which most are cancelled, stall, run out of time, or lose their connection.

An undisturbed stream has the text that its request has alone; any other has a prefix of it, and a status that says why.
Afterwards no service holds anything.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator

import pytest

from outrider.client import Completion
from tests.chaos.workload import (
    FAILURES,
    MAX_SEQUENCES,
    MAX_WAITING,
    Behaviour,
    Chaos,
    ChaosCluster,
    Endpoint,
    Outcome,
    chaos_cluster,
    client_of,
    requests,
)
from tests.cluster import wait_healthy, wait_until

pytestmark = pytest.mark.timeout(400)

REQUESTS = requests(12)
REST_WITHIN_S = 60.0
CHECKS = "outrider_kv_integrity_checks_total"

LOGGED = {"OK", "CANCELLED", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED"}
"""How streams end, by a service's log."""
WARNINGS = {"verifier", "verifier lost"}
"""Of the draft service whose link to the verifier breaks."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[ChaosCluster]:
    with chaos_cluster() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def expected(cluster: ChaosCluster) -> list[Completion]:
    """The text of each request without any other."""

    async def write() -> list[Completion]:
        async with client_of(cluster.draft.address) as client:
            return [await client.complete(request.prompt, **request.options()) for request in REQUESTS]

    return asyncio.run(write())


@pytest.fixture(scope="module")
def chaos(cluster: ChaosCluster, expected: list[Completion]) -> Chaos:
    chaos = Chaos()
    asyncio.run(chaos.run(cluster, REQUESTS))
    return chaos


def test_every_disturbance_came_and_enough_streams_were_left_alone(chaos: Chaos, cluster: ChaosCluster) -> None:
    """Half as many as the run waits for, should its time have been over before."""
    assert min(chaos.counts()) >= 0.5, chaos.counts()
    assert any(each.status == "CANCELLED" for each in chaos.of(Behaviour.VANISH))
    assert cluster.verifier.count("outrider_preemptions_total") > 0


def test_texts_are_those_of_each_request_alone_or_begin_them(chaos: Chaos, expected: list[Completion]) -> None:
    for outcome in chaos.outcomes:
        alone = expected[outcome.request.number]
        length = len(outcome.token_ids)
        assert tuple(outcome.token_ids) == alone.token_ids[:length], outcome
        assert alone.text.startswith(outcome.text), outcome
        if outcome.whole:
            assert outcome.text == alone.text, outcome
        if outcome.behaviour is Behaviour.PLAIN and outcome.status == "OK":
            assert outcome.whole, outcome


def _is_right(outcome: Outcome) -> bool:
    return (
        outcome.status == "OK"
        or outcome.failure in FAILURES.get(outcome.behaviour, ())
        or (outcome.failure == ("CANCELLED", "") and outcome.behaviour in (Behaviour.CANCEL, Behaviour.VANISH))
        or (outcome.failure == ("RESOURCE_EXHAUSTED", "OVERLOADED") and (outcome.error.retry_after or 0) > 0)  # type: ignore[union-attr]
        or (outcome.failure == ("UNAVAILABLE", "NO_VERIFIER") and outcome.endpoint is Endpoint.FRAIL)
    )


def test_every_failure_has_the_status_of_its_cause(chaos: Chaos) -> None:
    assert [outcome for outcome in chaos.outcomes if not _is_right(outcome)] == []


@pytest.mark.usefixtures("chaos")
def test_services_hold_nothing_and_the_kv_cache_is_intact(cluster: ChaosCluster) -> None:
    for service in cluster.services:
        wait_until(service.is_idle, REST_WITHIN_S, f"{service.name} is at rest")
    wait_until(lambda: cluster.verifier.count(CHECKS, outcome="intact"), REST_WITHIN_S)
    assert not cluster.verifier.count(CHECKS, outcome="corrupted")


@pytest.mark.usefixtures("chaos")
def test_as_many_requests_as_ever_are_served(cluster: ChaosCluster, expected: list[Completion]) -> None:
    """As many at once as may run or wait: none is refused, and every text is right."""
    wait_healthy(*cluster.services)

    async def together() -> None:
        async with (
            client_of(cluster.draft.address) as client,
            client_of(cluster.frail.address) as frail,
        ):

            async def write(number: int) -> None:
                request = REQUESTS[number % len(REQUESTS)]
                done = await (client if number % 4 else frail).complete(request.prompt, **request.options())
                assert done.text == expected[request.number].text

            await asyncio.gather(*map(write, range(MAX_SEQUENCES + MAX_WAITING)))

    asyncio.run(together())


@pytest.mark.usefixtures("chaos")
def test_logs_report_no_fault(cluster: ChaosCluster) -> None:
    for service in cluster.services:
        is_frail = service is cluster.frail
        entries = service.logged()
        loud = [entry for entry in entries if entry["level"] not in ("debug", "info")]
        if is_frail:
            assert WARNINGS & {entry["event"] for entry in loud if entry["level"] == "warning"}
            loud = [entry for entry in loud if entry["event"] not in WARNINGS]
        assert not loud, f"{len(loud)} of {service.name}: {loud[:5]}"
        assert not service.plain_lines(), f"{service.name}: {service.plain_lines()[:20]}"
        ends = Counter(str(entry["status"]) for entry in entries if entry["event"] in ("generate", "sequence"))
        assert ends.total() > 20
        assert ends.keys() <= LOGGED | ({"UNAVAILABLE"} if is_frail else set())
