"""Sequences whose verifiers are taken from them at random: the tokens are those of an undisturbed life, one by one.

A real verifier behind two proxies is two replicas. The rounds (proposals with their laws, or tokens of the target's
own) follow from the base length alone, so what an undisturbed sequence commits is what every other one must.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import ExitStack, asynccontextmanager
from itertools import count
from typing import Any

import grpc
import pytest

from draft_service import failover
from draft_service.failover import FailoverStream, FailureKind
from kernels.verify import Rule
from outrider.cli.processes import ServiceProcess
from outrider.rpc.errors import RequestError, failed_precondition, overloaded, to_status
from outrider.rpc.server import bind, create_server
from protos.outrider.v1 import (
    model_pb2,
    sampling_pb2,
    verifier_service_pb2,
    verifier_service_pb2_grpc,
)
from protos.outrider.v1.verifier_service_pb2_grpc import VerifierServiceStub
from tests.cluster import Cluster
from tests.draft_service.lives import (
    LIVES,
    MAX_BYTES,
    PATIENT_S,
    PROMPT,
    TIMEOUT_S,
    TOKENS,
    Switches,
    matched,
    text,
    write,
)
from tests.proxy import Proxy, Way


@pytest.fixture(scope="module")
def real() -> Iterator[ServiceProcess]:
    """A verifier with the demo target and room for what faults leave behind for a while."""
    with Cluster("--max-sequences 16 --no-gamma-cap --idle-timeout 8") as cluster:
        verifier = cluster.verifier()
        verifier.wait_healthy()
        yield verifier


@pytest.fixture
def ways(real: ServiceProcess) -> Iterator[list[Proxy]]:
    """Two ways to it."""
    with ExitStack() as stack:
        yield [stack.enter_context(Proxy(real.address, seed=number)) for number in range(2)]


# ---------------------------------------------------------------------------------------------- faults at random places


class Trouble:
    """Breaks one of the ways now and then, and mends it a little later; never both at once."""

    def __init__(self, ways: list[Proxy], chance: random.Random, share: float) -> None:
        self._ways = ways
        self._chance = chance
        self._share = share
        self._broken: tuple[Proxy, int] | None = None
        self.faults: list[str] = []

    async def __call__(self, step: int) -> None:
        if self._broken is not None and step >= self._broken[1]:
            self._broken[0].cut()  # what the fault has left in a connection must not come out of it later
            self._broken[0].heal()
            self._broken = None
        if self._broken is None and self._chance.random() < self._share:
            way = self._chance.choice(self._ways)
            self._broken = (way, step + self._chance.randint(1, 4))
            self.faults.append(self._break(way))
        await asyncio.sleep(0)

    def _break(self, way: Proxy) -> str:
        match kind := self._chance.choice(["cut", "reset", "up", "down", "refuse", "stall", "half", "noise", "delay"]):
            case "cut" | "reset":
                way.cut(reset=kind == "reset")
            case "up" | "down":  # somewhere inside what passes next
                way.cut_after(self._chance.randint(1, 600), Way(kind))
            case "refuse":
                way.close()
            case "stall":
                way.stall()
            case "half":
                way.stall(Way.DOWN)
            case "noise":
                way.garble(self._chance.choice([Way.UP, Way.DOWN]))
            case "delay":
                way.delay(0.03)
        return kind


@pytest.mark.parametrize(
    ("rule", "temperature"),
    [
        (Rule.COUPLED, 1.0),
        (Rule.TOKENWISE, 1.0),
        (Rule.BLOCK, 1.0),
        pytest.param(Rule.TOKENWISE, 0.0, marks=pytest.mark.slow),
    ],
)
async def test_whatever_becomes_of_its_verifiers_the_tokens_are_the_same(
    rule: Rule, temperature: float, ways: list[Proxy], real: ServiceProcess
) -> None:
    """Cuts, resets, silence, half of a silence, noise and refusals, between any two messages or inside one.

    Under `tokenwise` and `block` too: a round that is sent again has the draws it had (invariant 2).
    """
    async with matched([real.address]) as verifiers:
        alone = await write(verifiers, text(rule, temperature))
    assert len(alone) == TOKENS
    kinds: set[str] = set()
    switches = Switches()
    for seed in count():  # which way a sequence takes is chance, and a fault in the other one costs it nothing
        if seed >= LIVES and len(switches.reasons) >= LIVES:
            break
        assert seed < 20 * LIVES, switches.reasons
        trouble = Trouble(ways, random.Random(f"{rule.value} {seed}"), share=0.2)
        async with matched([way.address for way in ways], switches) as verifiers:
            assert await write(verifiers, text(rule, temperature), trouble) == alone, (seed, trouble.faults)
        kinds.update(trouble.faults)
        for way in ways:
            way.cut()
            way.heal()
    print(sorted(kinds), switches.reasons)


async def test_what_failover_costs_is_told(ways: list[Proxy]) -> None:
    switches, sequence = Switches(), text()

    async def cut(step: int) -> None:
        if step in (3, 9):
            for way in ways:
                way.cut()

    async with matched([way.address for way in ways], switches, silence=PATIENT_S) as verifiers:
        await write(verifiers, sequence, cut)
    tally = sequence.counts.failovers
    assert switches.reasons == [FailureKind.DIED] * tally.count
    assert tally.count >= 2
    assert tally.moves == 0
    assert tally.count * len(PROMPT) < tally.tokens <= tally.count * (len(PROMPT) + TOKENS)
    assert tally.seconds == pytest.approx(switches.seconds)
    assert 0 < tally.seconds < TIMEOUT_S


async def test_with_its_budget_spent_a_sequence_waits_and_goes_on(ways: list[Proxy], real: ServiceProcess) -> None:
    """One opening in the bucket, and two deaths: the second waits for the next token, which time alone brings.

    Both come right before a round is sent, so that neither finds its verdict here already. A second lies between the
    two openings, less a tenth for each of the four verdicts of the first round.
    """
    times, sequence = list[float](), text(Rule.TOKENWISE)

    async def cut(step: int) -> None:
        times.append(time.monotonic())
        if step in (1, 6):
            for way in ways:
                way.cut()

    async with matched([real.address]) as verifiers:
        alone = await write(verifiers, text(Rule.TOKENWISE))
    async with matched([way.address for way in ways], burst=1, silence=PATIENT_S) as verifiers:
        assert await write(verifiers, sequence, cut) == alone
    assert sequence.counts.failovers.count == 2
    assert time.monotonic() - times[1] > 0.59


# ------------------------------------------------------------------------------------------------------- where it ends


async def refused(writing: Awaitable[Any]) -> tuple[RequestError, float]:
    started = time.monotonic()
    with pytest.raises(RequestError) as caught:
        await writing
    return caught.value, time.monotonic() - started


@pytest.mark.parametrize(("timeout", "patience"), [(3.0, 60.0), (60.0, 0.7)])
async def test_with_every_verifier_gone_it_is_unavailable_within_deadline_and_patience(
    timeout: float, patience: float, ways: list[Proxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sooner of the two decides, also for one that has not begun."""
    monkeypatch.setattr(failover, "OPENING_PATIENCE", 60.0)
    soon = 0.85 * min(timeout, patience)  # some of a deadline is left to tell of it

    async def gone(step: int) -> None:
        if step == 4:
            for way in ways:
                way.close()

    names = [way.address for way in ways]
    async with matched(names, patience=patience, silence=PATIENT_S) as verifiers:
        error, seconds = await refused(write(verifiers, text(), gone, timeout=timeout))
        assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "NO_VERIFIER")
        assert all(name in error.message for name in names)
        assert soon < seconds < 30.0
        error, seconds = await refused(write(verifiers, text(), timeout=min(timeout, 2.0)))
        assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "NO_VERIFIER")
        assert seconds < 30.0


async def test_the_clients_deadline_is_carried_on_to_the_next_verifier(ways: list[Proxy]) -> None:
    timeout = 2.0

    async def cut_then_stall(step: int) -> None:
        if step == 3:
            ways[0].cut()
            ways[1].cut()
        if step == 5:
            for way in ways:
                way.stall(Way.DOWN)

    async with matched([way.address for way in ways], silence=60.0) as verifiers:
        error, seconds = await refused(write(verifiers, text(), cut_then_stall, timeout=timeout))
    assert error.code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert 0.9 * timeout < seconds < 30.0


async def test_what_is_the_requests_own_fault_is_told_at_once_and_tried_once(ways: list[Proxy]) -> None:
    switches = Switches()
    async with matched([way.address for way in ways], switches) as verifiers:
        wrong = text(params=sampling_pb2.SamplingParams(temperature=-1.0))
        error, seconds = await refused(FailoverStream(verifiers, wrong, timeout=60.0).open())
        assert error.code is grpc.StatusCode.INVALID_ARGUMENT
        other = text(weights_fingerprint="f" * 64)
        error, more = await refused(FailoverStream(verifiers, other, timeout=60.0).open())
        assert (error.code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "PAIR_MISMATCH")
        assert seconds + more < 30.0
        assert [replica.status for replica in verifiers.replicas.all()] == ["closed", "closed"]
    assert switches.reasons == []


# ---------------------------------------------------------------------------------------- verifiers that are not right


class Peer(verifier_service_pb2_grpc.VerifierServiceServicer):
    """Runs what it is told that it runs, and ends each sequence with an error, before or after it was opened."""

    def __init__(self, model: model_pb2.ModelInfo, error: RequestError, *, opens: bool) -> None:
        self.openings = 0
        self.isolated: list[bool] = []
        self._model, self._error, self._opens = model, error, opens

    async def GetModel(self, request: Any, context: Any) -> verifier_service_pb2.VerifierServiceGetModelResponse:
        return verifier_service_pb2.VerifierServiceGetModelResponse(model=self._model)

    async def Verify(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
        asked = (await context.read()).open
        self.openings += 1
        self.isolated.append(asked.isolated)
        if self._opens:
            opened = verifier_service_pb2.Opened(
                rule=asked.sampling.rule, weights_fingerprint=self._model.weights_fingerprint
            )
            await context.write(verifier_service_pb2.VerifyResponse(opened=opened))
            await context.read()
        await context.abort_with_status(to_status(self._error))


@asynccontextmanager
async def wrong(error: RequestError, real: ServiceProcess, *, opens: bool) -> AsyncIterator[tuple[str, Peer]]:
    """A peer that says it runs what the real verifier does."""
    async with grpc.aio.insecure_channel(real.address) as channel:
        stub: Any = VerifierServiceStub(channel)
        model = (await stub.GetModel(verifier_service_pb2.VerifierServiceGetModelRequest())).model
    server = create_server(max_message_bytes=MAX_BYTES)
    peer = Peer(model, error, opens=opens)
    verifier_service_pb2_grpc.add_VerifierServiceServicer_to_server(peer, server)
    address = bind(server, "127.0.0.1:0")
    await server.start()
    try:
        yield address, peer
    finally:
        await server.stop(None)


DIES = RequestError(grpc.StatusCode.UNAVAILABLE, "UNSPECIFIED", "killed")
STEP_FAILED = RequestError(grpc.StatusCode.INTERNAL, "STEP_FAILED", "the step failed")


async def test_a_round_that_ends_two_verifiers_is_sent_to_no_third(real: ServiceProcess) -> None:
    """To the second with the word that it is to run alone."""
    async with (
        wrong(DIES, real, opens=True) as (one, first),
        wrong(DIES, real, opens=True) as (two, second),
        matched([one, two]) as verifiers,
    ):
        error, _ = await refused(write(verifiers, text()))
    assert (error.code, error.reason) == (grpc.StatusCode.INTERNAL, "STEP_FAILED")
    assert "killed" in error.message
    assert sorted(first.isolated + second.isolated) == [False, True]


async def test_a_step_that_failed_is_tried_once_more_at_another_verifier_alone_there(real: ServiceProcess) -> None:
    async with (
        wrong(STEP_FAILED, real, opens=True) as (one, first),
        wrong(STEP_FAILED, real, opens=True) as (two, second),
        matched([one, two]) as verifiers,
    ):
        for _ in range(4):  # no breaker opens, so each is tried at both
            error, _ = await refused(write(verifiers, text()))
            assert (error.code, error.reason) == (grpc.StatusCode.INTERNAL, "STEP_FAILED")
            assert "the step failed" in error.message
        assert [replica.status for replica in verifiers.replicas.all()] == ["closed", "closed"]
    assert first.openings == second.openings == 4
    assert sum(first.isolated + second.isolated) == 4


async def test_a_step_that_failed_at_one_verifier_alone_costs_the_text_nothing(real: ServiceProcess) -> None:
    switches = Switches()
    async with (
        wrong(STEP_FAILED, real, opens=True) as (address, peer),
        matched([real.address, address], switches) as verifiers,
    ):
        texts = [await write(verifiers, text(tokens=4))]
        while not peer.openings:
            assert len(texts) < 60
            texts.append(await write(verifiers, text(tokens=4)))
    assert len({tuple(each) for each in texts}) == 1
    assert switches.reasons == [FailureKind.STEP_FAILED]


async def test_a_step_that_failed_at_the_only_verifier_ends_the_text_at_once(real: ServiceProcess) -> None:
    async with wrong(STEP_FAILED, real, opens=True) as (one, peer), matched([one], patience=60.0) as verifiers:
        error, seconds = await refused(write(verifiers, text()))
    assert (error.code, error.reason, error.message) == (grpc.StatusCode.INTERNAL, "STEP_FAILED", "the step failed")
    assert peer.openings == 1
    assert seconds < 30.0


async def test_who_is_refused_by_one_goes_to_another(real: ServiceProcess) -> None:
    full = overloaded("full", retry_after=90.0)
    async with wrong(full, real, opens=False) as (address, peer), matched([real.address, address]) as verifiers:
        started = time.monotonic()
        texts = [await write(verifiers, text(tokens=4)) for _ in range(6)]
        assert time.monotonic() - started < 45.0
    assert len({tuple(each) for each in texts}) == 1
    assert peer.openings <= 1, "it has said for how long it is full"


@pytest.mark.parametrize(("retry_after", "patience", "tries"), [(0.5, 2.5, range(2, 10)), (90.0, 60.0, range(1, 2))])
async def test_who_is_refused_by_all_waits_as_told_where_that_is_soon_and_learns_of_it_otherwise(
    retry_after: float, patience: float, tries: range, real: ServiceProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failover, "OPENING_PATIENCE", patience)
    full = overloaded("full", retry_after=retry_after)
    async with wrong(full, real, opens=False) as (address, peer), matched([address], patience=patience) as verifiers:
        error, waited = await refused(write(verifiers, text(), timeout=90.0))
    assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED")
    assert error.retry_after == retry_after
    assert peer.openings in tries
    assert waited < 30.0


async def test_a_verifier_that_runs_another_model_by_now_is_left_for_one_that_does_not(
    real: ServiceProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failover, "OPENING_PATIENCE", 60.0)
    changed = failed_precondition("PAIR_MISMATCH", "other weights")
    async with wrong(changed, real, opens=False) as (address, peer), matched([real.address, address]) as verifiers:
        for _ in range(4):
            assert len(await write(verifiers, text(tokens=4))) == 4
        assert peer.openings <= 1
    async with wrong(changed, real, opens=False) as (address, peer), matched([address], patience=60.0) as verifiers:
        error, seconds = await refused(write(verifiers, text(), timeout=90.0))
    assert (error.code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "PAIR_MISMATCH")
    assert seconds < 30.0
