"""Chaos: 64 streams at once, of which most are cancelled, stall, run out of time, or lose their connection.

An undisturbed stream writes what it writes alone; any other has a prefix of it, and a status that says why. Afterwards
no service holds anything.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack

import grpc
import pytest

from outrider.client import AsyncClient
from outrider.rpc.channel import wait_for_health
from tests.chaos.clients import DraftClients, VerifierClients
from tests.chaos.workload import (
    CLIENT_TIMEOUT_S,
    ENOUGH,
    FAILURES,
    MAX_SEQUENCES,
    MAX_WAITING,
    SHARES,
    VANISHING,
    Behaviour,
    Chaos,
    ChaosCluster,
    Clients,
    Endpoint,
    Expected,
    Outcome,
    Request,
    chaos_cluster,
    requests,
    write_alone,
)
from tests.cluster import wait_until
from tests.verifier_service.streams import Stream, opening

pytestmark = pytest.mark.timeout(400)

REQUESTS = requests(12)
REST_WITHIN_S = 60.0
HELD = ("outrider_num_requests_running", "outrider_num_requests_waiting", "outrider_kv_blocks_used")
CHECKS = "outrider_kv_integrity_checks_total"

LEAVE = {Behaviour.CANCEL, Behaviour.VANISH, Behaviour.HALF_CLOSE}
"""Their status is the client's own, and never an error."""
OVERLOADED = ("RESOURCE_EXHAUSTED", "OVERLOADED")
NO_VERIFIER = ("UNAVAILABLE", "NO_VERIFIER")
LOGGED = {"OK", "CANCELLED", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED"}
"""How streams end, by a service's log."""
WARNINGS = {"verifier", "a sequence has lost its verifier"}
"""Of the draft service whose link to the verifier breaks."""

Texts = dict[int, Expected]


@pytest.fixture(scope="module")
def cluster() -> Iterator[ChaosCluster]:
    with chaos_cluster() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def expected(cluster: ChaosCluster) -> Texts:
    return asyncio.run(write_alone(cluster.draft.address, REQUESTS))


@pytest.fixture(scope="module")
def chaos(cluster: ChaosCluster, expected: Texts) -> Chaos:
    async def run() -> Chaos:
        chaos = Chaos()
        async with AsyncExitStack() as gone:
            clients: list[Clients] = [
                DraftClients(Endpoint.DRAFT, cluster.draft.address, gone),
                DraftClients(Endpoint.FRAIL, cluster.frail.address, gone),
                VerifierClients(cluster.verifier.address, expected, gone),
            ]
            await chaos.run(cluster, clients, REQUESTS)
        return chaos

    return asyncio.run(run())


def test_every_disturbance_came_and_enough_streams_were_left_alone(chaos: Chaos, cluster: ChaosCluster) -> None:
    """Half as many as the run waits for, should its time have been over before."""
    least = ENOUGH // 2
    ends = Counter((outcome.endpoint, outcome.behaviour, outcome.status) for outcome in chaos.outcomes)
    for (endpoint, behaviour, status), count in sorted(ends.items()):
        print(f"{endpoint:9} {behaviour:10} {status:18} {count}")
    for behaviour in SHARES:
        assert len(chaos.of(behaviour)) >= least, behaviour
    for behaviour, failures in FAILURES.items():
        assert sum((each.status, each.reason) in failures for each in chaos.of(behaviour)) >= least // 2, behaviour
    assert sum(each.status == "CANCELLED" for each in chaos.of(Behaviour.CANCEL)) >= least
    assert {each.endpoint for each in chaos.of(Behaviour.VANISH) if each.status == "CANCELLED"} == VANISHING.keys()
    for endpoint in Endpoint:
        assert sum(each.whole and each.endpoint is endpoint for each in chaos.outcomes) >= least, endpoint
    assert cluster.verifier.count("outrider_preemptions_total") >= 10


def test_every_stream_ends(chaos: Chaos) -> None:
    assert not chaos.left_over


def test_whole_texts_are_those_written_alone_and_others_are_beginnings_of_them(chaos: Chaos, expected: Texts) -> None:
    for outcome in chaos.outcomes:
        alone = expected[outcome.request.number]
        length = None if outcome.whole else len(outcome.token_ids)
        assert tuple(outcome.token_ids) == alone.token_ids[:length], outcome
        assert alone.text.startswith(outcome.text), outcome
        if outcome.behaviour is Behaviour.PLAIN and outcome.status == "OK":
            assert outcome.whole, outcome


def _is_right(outcome: Outcome) -> bool:
    failure = (outcome.status, outcome.reason)
    return (
        outcome.status == "OK"
        or failure in FAILURES.get(outcome.behaviour, ())
        or (outcome.status == "CANCELLED" and not outcome.reason and outcome.behaviour in LEAVE)
        or (failure == OVERLOADED and (outcome.retry_after or 0) > 0)
        or (failure == NO_VERIFIER and outcome.endpoint is Endpoint.FRAIL)
    )


def test_every_failure_has_the_status_of_its_cause(chaos: Chaos) -> None:
    wrong = [str(outcome) for outcome in chaos.outcomes if not _is_right(outcome)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.usefixtures("chaos")
def test_services_hold_nothing_and_the_kv_cache_is_intact(cluster: ChaosCluster) -> None:
    for service in cluster.services:
        wait_until(lambda s=service: not any(map(s.count, HELD)), REST_WITHIN_S, f"{service.name} is at rest")  # type: ignore[misc]
    wait_until(lambda: cluster.verifier.count(CHECKS, outcome="intact"), REST_WITHIN_S)
    assert not cluster.verifier.count(CHECKS, outcome="corrupted")


@pytest.mark.usefixtures("chaos")
def test_as_many_requests_as_ever_are_served(cluster: ChaosCluster, expected: Texts) -> None:
    """As many at once as may run or wait: none is refused, and every text is right."""
    for service in cluster.services:
        service.check()
        wait_for_health(service.address, "", 60.0)

    async def together() -> None:
        async with (
            AsyncClient(cluster.draft.address, timeout=CLIENT_TIMEOUT_S, retry=False) as client,
            AsyncClient(cluster.frail.address, timeout=CLIENT_TIMEOUT_S, retry=False) as frail,
        ):

            async def write(number: int, request: Request) -> None:
                done = await (client if number % 4 else frail).complete(request.prompt, **request.options())
                assert done.text == expected[request.number].text

            crowd = [REQUESTS[1 + number % (len(REQUESTS) - 1)] for number in range(MAX_SEQUENCES + MAX_WAITING)]
            await asyncio.gather(*(write(number, request) for number, request in enumerate(crowd)))

    asyncio.run(together())


@pytest.mark.usefixtures("chaos")
def test_decode_goes_on_past_what_a_client_may_leave_unread(cluster: ChaosCluster, expected: Texts) -> None:
    long = REQUESTS[0]
    alone = expected[long.number]
    with grpc.insecure_channel(cluster.verifier.address) as channel, Stream(channel) as stream:
        stream.open(opening([*alone.prompt_ids], max_new_tokens=long.length))
        stream.decode(1, [*alone.prompt_ids], long.length)
        verdicts = [stream.verdict() for _ in range(long.length)]
    assert [verdict.token_ids[0] for verdict in verdicts] == list(alone.token_ids)
    # The load is that of the step before; that of the first was another's.
    assert {(verdict.load.running, verdict.load.waiting) for verdict in verdicts[1:]} == {(1, 0)}


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
        print(service.name, dict(ends))
        assert ends.total() > 20
        assert ends.keys() <= LOGGED | ({"UNAVAILABLE"} if is_frail else set())
