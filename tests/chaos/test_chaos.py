"""Chaos: 64 streams at once, of which most are cancelled, stall, run out of time, or lose their connection.

Whoever is left alone writes what it writes alone; whoever is not has a prefix of it, and a status that says why. And
afterwards nobody holds anything.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator

import grpc
import pytest

from outrider.client import AsyncClient
from outrider.rpc.channel import wait_for_health
from tests.chaos.clients import PATIENCE_S
from tests.chaos.cluster import QUEUE, SLOTS, ChaosCluster, chaos_cluster
from tests.chaos.disturbances import BEHAVIOURS, DUE, ENOUGH, VANISHING, Aftermath, expect, storm
from tests.chaos.requests import Behaviour, Door, Expected, Outcome, Request, requests
from tests.cluster import Service, wait_until
from tests.verifier_service.streams import Stream, opening

pytestmark = pytest.mark.timeout(400)

REQUESTS = 12
REST_WITHIN_S = 60.0

VERIFIER_AT_REST = {
    "outrider_num_requests_running": 0,
    "outrider_num_requests_waiting": 0,
    "outrider_kv_blocks_used": 0,
}
DRAFT_AT_REST = {
    "outrider_num_requests_running": 0,
    "outrider_kv_blocks_used": 0,
}
PREEMPTIONS = "outrider_preemptions_total"
CHECKS = "outrider_kv_integrity_checks_total"

LEFT = {Behaviour.CANCEL, Behaviour.VANISH, Behaviour.HALF_CLOSE}
"""Who leaves gets no status but the one it makes itself, and no error in any case."""

OVERLOADED = ("RESOURCE_EXHAUSTED", "OVERLOADED")
NO_VERIFIER = ("UNAVAILABLE", "NO_VERIFIER")

ENDS = {"OK", "CANCELLED", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED"}
"""What a service writes into its log of how a stream ended."""

LOSSES = {"verifier", "a sequence has lost its verifier"}
"""What the draft service whose way to the verifier breaks has to say of it, as a warning."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[ChaosCluster]:
    with chaos_cluster() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def asked() -> list[Request]:
    return requests(REQUESTS)


@pytest.fixture(scope="module")
def expected(cluster: ChaosCluster, asked: list[Request]) -> dict[int, Expected]:
    return asyncio.run(expect(cluster.draft.address, asked))


@pytest.fixture(scope="module")
def aftermath(cluster: ChaosCluster, asked: list[Request], expected: dict[int, Expected]) -> Aftermath:
    return asyncio.run(storm(cluster, asked, expected))


def test_there_was_chaos(aftermath: Aftermath) -> None:
    """Each way to disturb did disturb, again and again, and enough streams went through undisturbed: half as many as
    the storm waits for, should its time have been over before.
    """
    least = ENOUGH // 2
    ends = Counter((outcome.door, outcome.behaviour, outcome.status) for outcome in aftermath.outcomes)
    for (door, behaviour, status), count in sorted(ends.items()):
        print(f"{door:9} {behaviour:10} {status:18} {count}")
    for behaviour in BEHAVIOURS:
        assert sum(outcome.behaviour is behaviour for outcome in aftermath.outcomes) >= least, behaviour
    for behaviour, due in DUE.items():
        assert sum((each.status, each.reason) in due for each in _of(aftermath, behaviour)) >= least // 2, behaviour
    assert sum(each.status == "CANCELLED" for each in _of(aftermath, Behaviour.CANCEL)) >= least
    vanished = Counter(each.door for each in _of(aftermath, Behaviour.VANISH) if each.status == "CANCELLED")
    assert vanished.keys() == VANISHING.keys()
    for door in Door:
        assert sum(each.whole and each.door is door for each in aftermath.outcomes) >= least, door


def test_some_sequences_gave_way_to_others(cluster: ChaosCluster, aftermath: Aftermath) -> None:
    assert aftermath.outcomes
    preemptions = cluster.verifier.count(PREEMPTIONS)
    print(f"{preemptions:.0f} preemptions")
    assert preemptions >= 10


def _of(aftermath: Aftermath, behaviour: Behaviour) -> list[Outcome]:
    return [outcome for outcome in aftermath.outcomes if outcome.behaviour is behaviour]


def test_every_stream_ends(aftermath: Aftermath) -> None:
    assert not aftermath.left_over


def test_whole_texts_are_those_written_alone(aftermath: Aftermath, expected: dict[int, Expected]) -> None:
    wrong = [
        f"{outcome}: {outcome.token_ids}"
        for outcome in aftermath.outcomes
        if outcome.whole and tuple(outcome.token_ids) != expected[outcome.request.number].token_ids
    ]
    assert not wrong, "\n".join(wrong)


def test_broken_off_texts_are_beginnings_of_them(aftermath: Aftermath, expected: dict[int, Expected]) -> None:
    for outcome in aftermath.outcomes:
        told = expected[outcome.request.number]
        assert told.token_ids[: len(outcome.token_ids)] == tuple(outcome.token_ids), outcome
        assert told.text.startswith(outcome.text), outcome


def test_whoever_was_not_disturbed_reads_to_the_end(aftermath: Aftermath) -> None:
    """But for those that were refused, and those whose draft service lost the verifier."""
    for outcome in aftermath.outcomes:
        if outcome.behaviour is Behaviour.PLAIN and outcome.status == "OK":
            assert outcome.whole, outcome


def test_every_failure_has_the_status_that_its_cause_deserves(aftermath: Aftermath) -> None:
    wrong = []
    for outcome in aftermath.outcomes:
        failure = (outcome.status, outcome.reason)
        due = outcome.status == "OK" or failure in DUE.get(outcome.behaviour, ())
        due = due or (outcome.status == "CANCELLED" and not outcome.reason and outcome.behaviour in LEFT)
        due = due or (failure == OVERLOADED and outcome.retry_after is not None and outcome.retry_after > 0)
        due = due or (failure == NO_VERIFIER and outcome.door is Door.FRAIL)
        if not due:
            wrong.append(str(outcome))
    assert not wrong, "\n".join(wrong)


def test_the_verifier_holds_nothing(cluster: ChaosCluster, aftermath: Aftermath) -> None:
    assert aftermath.outcomes
    _come_to_rest(cluster.verifier, VERIFIER_AT_REST)


def test_its_pool_is_intact(cluster: ChaosCluster, aftermath: Aftermath) -> None:
    assert aftermath.outcomes
    wait_until(lambda: cluster.verifier.count(CHECKS, outcome="intact"), REST_WITHIN_S)
    assert not cluster.verifier.count(CHECKS, outcome="corrupted")


def test_the_draft_services_hold_nothing(cluster: ChaosCluster, aftermath: Aftermath) -> None:
    assert aftermath.outcomes
    for service in (cluster.draft, cluster.frail):
        _come_to_rest(service, DRAFT_AT_REST)


def _come_to_rest(service: Service, rest: dict[str, int]) -> None:
    def held() -> dict[str, float]:
        samples = service.samples()
        return {name: samples[name][()] for name in rest}

    wait_until(lambda: held() == rest, REST_WITHIN_S, f"{service.name} is at rest")


def test_all_go_on_with_room_for_as_many_as_before(
    cluster: ChaosCluster, aftermath: Aftermath, asked: list[Request], expected: dict[int, Expected]
) -> None:
    """As many at once as have places or may wait for one: nobody is refused, and everybody writes what is right."""
    assert aftermath.outcomes
    for service in cluster.services:
        service.check()
        wait_for_health(service.address, "", 60.0)

    async def together() -> None:
        async with (
            AsyncClient(cluster.draft.address, timeout=PATIENCE_S, retry=False) as client,
            AsyncClient(cluster.frail.address, timeout=PATIENCE_S, retry=False) as frail,
        ):
            crowd = [asked[1 + number % (REQUESTS - 1)] for number in range(SLOTS + QUEUE)]
            done = await asyncio.gather(
                *(
                    (frail if number % 4 == 0 else client).complete(request.prompt, **request.options())
                    for number, request in enumerate(crowd)
                )
            )
            for request, completion in zip(crowd, done, strict=True):
                assert completion.text == expected[request.number].text

    asyncio.run(together())


def test_the_target_alone_goes_on_past_what_a_client_may_leave_unread(
    cluster: ChaosCluster, aftermath: Aftermath, asked: list[Request], expected: dict[int, Expected]
) -> None:
    assert aftermath.outcomes
    long, told = asked[0], expected[asked[0].number]
    with grpc.insecure_channel(cluster.verifier.address) as channel, Stream(channel) as stream:
        stream.open(opening([*told.prompt_ids], max_new_tokens=long.length))
        stream.decode(1, [*told.prompt_ids], long.length)
        verdicts = [stream.verdict() for _ in range(long.length)]
    assert [verdict.token_ids[0] for verdict in verdicts] == list(told.token_ids)
    # The load is that of the step before; that of the first was another's.
    assert {(verdict.load.running, verdict.load.waiting) for verdict in verdicts[1:]} == {(1, 0)}


def test_the_logs_speak_of_no_fault(cluster: ChaosCluster, aftermath: Aftermath) -> None:
    assert aftermath.outcomes
    for service in cluster.services:
        entries = service.logged()
        loud = [entry for entry in entries if entry["level"] not in ("debug", "info")]
        if service is cluster.frail:
            assert LOSSES & {entry["event"] for entry in loud if entry["level"] == "warning"}
            loud = [entry for entry in loud if entry["event"] not in LOSSES]
        assert not loud, f"{len(loud)} of {service.name}: {loud[:5]}"
        assert not service.plain_lines(), f"{service.name}: {service.plain_lines()[:20]}"
        ends = Counter(str(entry["status"]) for entry in entries if entry["event"] in ("generate", "sequence"))
        print(service.name, dict(ends))
        assert sum(ends.values()) > 20
        assert ends.keys() <= (ENDS | {"UNAVAILABLE"} if service is cluster.frail else ENDS)
