"""Sequences whose verifiers fail: they commit the tokens of an undisturbed sequence.

Two proxies to one real verifier are two replicas. Each proposal follows from its base length alone, so all sequences
commit the same tokens.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from itertools import count
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest

from draft_service import failover
from draft_service.drafters.base import Draft, DrafterKind
from draft_service.failover import PER_ROUND, PER_SECOND, FailoverBudget, FailoverStream, FailureKind, Verifiers
from draft_service.generation import Sample
from draft_service.output import Emitter, OutputText
from draft_service.responses import Responses
from draft_service.sequence import Sequence
from kernels.sparse import SparseDistribution
from kernels.verify import Rule
from outrider.cli.processes import ServiceProcess
from outrider.rpc.errors import (
    RequestError,
    failed_precondition,
    invalid_field,
    overloaded,
    to_status,
    unavailable,
    yielded,
)
from outrider.runtime.loader import ModelSource
from outrider.runtime.tokenizer import IncrementalDetokenizer, load_tokenizer
from protos.outrider.v1 import model_pb2, sampling_pb2, speculation_pb2, verifier_service_pb2
from tests.cluster import MODELS, Cluster
from tests.draft_service.records import generation, record
from tests.draft_service.verifiers import NO_VERIFIER, Switches, fake_verifier, matched, model_of, status_of
from tests.proxy import Proxy, Way

PROMPT = [5, 6, 7, 8, 9]
TOKENS = 36
SILENCE_S = 20.0  # longer than any verifier is silent unless it is stalled
TIMEOUT_S = 60.0
TEXTS = 2  # under each rule; more until there were so many failovers


@pytest.fixture(scope="module")
def real() -> Iterator[ServiceProcess]:
    """A verifier with the demo target, and more sequences than the tests need: faults leave some open for a while."""
    with Cluster("--max-sequences 16 --idle-timeout 8") as cluster:
        verifier = cluster.verifier()
        verifier.wait_healthy()
        yield verifier


@pytest.fixture
def proxies(real: ServiceProcess) -> Iterator[list[Proxy]]:
    with ExitStack() as stack:
        yield [stack.enter_context(Proxy(real.address, seed=number)) for number in range(2)]


def text(rule: Rule = Rule.COUPLED, tokens: int = TOKENS, **fields: Any) -> Sequence:
    return record(rule, seed=77, prompt=PROMPT, max_new_tokens=tokens, **fields)


def proposal(base: int, rule: Rule) -> Draft:
    """Tokens drawn by the base length, and their distributions: uniform over a few frequent tokens."""
    chance = random.Random(base)
    tokens = [chance.randrange(10, 26) for _ in range(chance.randint(1, 4))]
    if rule is Rule.COUPLED:
        return Draft(tokens, [], 0.0)
    q = SparseDistribution(np.arange(10, 26), np.ones(16, np.uint16), 16)
    return Draft(tokens, [q] * len(tokens), 0.0)


async def write(
    verifiers: Verifiers,
    sequence: Sequence,
    disturb: Callable[[int], None] = lambda step: None,
    *,
    timeout: float = TIMEOUT_S,
) -> list[int]:
    """Write a text. `disturb` is called before each step, with its number."""
    stream = FailoverStream(verifiers, sequence, timeout=timeout)
    steps = count()

    async def step() -> None:
        disturb(next(steps))
        await asyncio.sleep(0)

    try:
        await step()
        await stream.open()
        while sequence.left:
            await step()
            base = len(sequence.tokens)
            if base % 5 == 0:
                sequence.decode(min(4, sequence.left))
            else:
                sequence.propose(proposal(base, sequence.request.sampling.rule))
            await stream.send()
            while sequence.round.owed:
                await step()
                verdict = await stream.verdict()
                assert verdict.round == sequence.round.number, "round numbers continue at the next verifier"
                assert verdict.base_length == len(sequence.tokens)
                sequence.commit(verdict)
        assert sequence.finish_reason == sampling_pb2.FINISH_REASON_LENGTH
        await stream.close()
    finally:
        stream.cancel()
    return sequence.tokens[sequence.prompt_length :]


async def error_of(writing: Awaitable[Any]) -> tuple[RequestError, float]:
    """The error that it ends with, and after how many seconds."""
    started = time.monotonic()
    with pytest.raises(RequestError) as caught:
        await writing
    return caught.value, time.monotonic() - started


class Faults:
    """Break one of two proxies at times, and heal it a few steps later; never both at once."""

    def __init__(self, proxies: list[Proxy], chance: random.Random) -> None:
        self._proxies = proxies
        self._chance = chance
        self._broken: tuple[Proxy, int] | None = None
        self.kinds: list[str] = []

    def __call__(self, step: int) -> None:
        if self._broken is not None and step >= self._broken[1]:
            self._broken[0].cut()  # data that the fault held back must not arrive later
            self._broken[0].heal()
            self._broken = None
        if self._broken is None and self._chance.random() < 0.2:
            proxy = self._chance.choice(self._proxies)
            self._broken = (proxy, step + self._chance.randint(1, 4))
            self.kinds.append(self._break(proxy))

    def _break(self, proxy: Proxy) -> str:
        match kind := self._chance.choice(["cut", "reset", "up", "down", "refuse", "stall", "half", "noise"]):
            case "cut" | "reset":
                proxy.cut(reset=kind == "reset")
            case "up" | "down":  # inside the next messages
                proxy.cut_after(self._chance.randint(1, 600), Way(kind))
            case "refuse":
                proxy.close()
            case "stall":
                proxy.stall()
            case "half":
                proxy.stall(Way.DOWN)
            case "noise":
                proxy.garble(self._chance.choice([Way.UP, Way.DOWN]))
        return kind


@pytest.mark.parametrize("rule", [Rule.COUPLED, Rule.TOKENWISE, Rule.BLOCK])
async def test_tokens_are_the_same_after_any_fault(rule: Rule, proxies: list[Proxy], real: ServiceProcess) -> None:
    """Cuts, resets, stalls, noise and refusals, between messages or inside one.

    Under `tokenwise` and `block` too: a round that is sent again has the same draws (invariant 2).
    """
    async with matched(real) as verifiers:
        alone = await write(verifiers, text(rule))
    assert len(alone) == TOKENS
    switches = Switches()
    for seed in count():  # a fault of the proxy that a sequence does not use costs nothing
        if seed >= TEXTS and len(switches.reasons) >= TEXTS:
            break
        assert seed < 20 * TEXTS, switches.reasons
        faults = Faults(proxies, random.Random(f"{rule.value} {seed}"))
        async with matched(*proxies, switches=switches) as verifiers:
            assert await write(verifiers, text(rule), faults) == alone, (seed, faults.kinds)
        for proxy in proxies:
            proxy.cut()
            proxy.heal()


async def test_the_least_load_counts_open_sequences(proxies: list[Proxy], real: ServiceProcess) -> None:
    """At the replica with the fewest: the other one of two has none."""
    async with matched(real) as verifiers:
        stream = FailoverStream(verifiers, text(Rule.COUPLED), timeout=60.0)
        await stream.open()
        assert verifiers.replicas.least_load() == 1
        stream.cancel()
        assert verifiers.replicas.least_load() == 0
    async with matched(*proxies[:2]) as verifiers:
        stream = FailoverStream(verifiers, text(Rule.COUPLED), timeout=60.0)
        await stream.open()
        assert verifiers.replicas.least_load() == 0
        stream.cancel()


async def test_a_sequence_waits_for_the_failover_budget_and_continues(
    proxies: list[Proxy], real: ServiceProcess
) -> None:
    """A budget of one, and two faults: the second failover waits for the next token, which takes a second, less a tenth
    for each of the four verdicts of the first round. Each fault comes right before a round is sent, so that its verdict
    cannot have arrived.
    """
    times, sequence = list[float](), text(Rule.TOKENWISE)

    def disturb(step: int) -> None:
        times.append(time.monotonic())
        if step in (1, 6):
            for proxy in proxies:
                proxy.cut()

    async with matched(real) as verifiers:
        alone = await write(verifiers, text(Rule.TOKENWISE))
    async with matched(*proxies, burst=1, silence=SILENCE_S) as verifiers:
        assert await write(verifiers, sequence, disturb) == alone
    assert sequence.counts.message.num_failovers == 2
    assert time.monotonic() - times[1] > 0.59


STEP_FAILED = (grpc.StatusCode.INTERNAL, "STEP_FAILED")


@pytest.mark.parametrize(("timeout", "failover_timeout"), [(3.0, 60.0), (60.0, 0.7)])
async def test_without_verifiers_it_is_unavailable_after_the_shorter_of_deadline_and_failover_timeout(
    timeout: float, failover_timeout: float, proxies: list[Proxy]
) -> None:
    soon = 0.85 * min(timeout, failover_timeout)  # the error comes before the deadline

    def close_all(step: int) -> None:
        if step == 4:
            for proxy in proxies:
                proxy.close()

    async with matched(*proxies, failover_timeout=failover_timeout, silence=SILENCE_S) as verifiers:
        error, seconds = await error_of(write(verifiers, text(), close_all, timeout=timeout))
    assert status_of(error) == NO_VERIFIER
    assert all(proxy.address in error.message for proxy in proxies)
    assert soon < seconds < 30.0


async def test_an_error_of_the_request_causes_no_failover(proxies: list[Proxy]) -> None:
    switches = Switches()
    async with matched(*proxies, switches=switches) as verifiers:
        wrong = text()
        wrong.request.message.sampling.temperature = -1.0
        error, _ = await error_of(FailoverStream(verifiers, wrong, timeout=60.0).open())
        assert error.code is grpc.StatusCode.INVALID_ARGUMENT
        assert [replica.status for replica in verifiers.replicas.all()] == ["ready", "ready"]
    assert switches.reasons == []


@asynccontextmanager
async def faulty(error: RequestError, real: ServiceProcess, *, opens: bool = True) -> AsyncIterator[Any]:
    """A fake verifier with the model of the real one, which ends each sequence with an error.

    Without `opens` it first opens isolated sequences only. Yields its address, and `isolated` of each opening.
    """
    model, openings = await model_of(real.address), list[bool]()

    async def verify(_: Any, context: Any) -> None:
        opening = (await context.read()).open
        openings.append(opening.isolated)
        if opens or opening.isolated:
            opened = verifier_service_pb2.Opened(
                rule=opening.sampling.rule, weights_fingerprint=model.weights_fingerprint, limits=model.limits
            )
            await context.write(verifier_service_pb2.VerifyResponse(opened=opened))
            await context.read()
        await context.abort_with_status(to_status(error))

    async with fake_verifier(verify, model=model) as address:
        yield SimpleNamespace(address=address, openings=openings)


DIES = RequestError(grpc.StatusCode.UNAVAILABLE, "UNSPECIFIED", "killed")
LOSES = unavailable("NO_VERIFIER", "the service has lost its model")
FAILS = RequestError(*STEP_FAILED, "the step failed")


@pytest.mark.parametrize(
    ("failure", "opens"),
    [(DIES, True), (DIES, False), (LOSES, True), (FAILS, True)],
    ids=["dies", "dies before Opened has left", "loses its model", "step fails"],
)
async def test_a_round_that_fails_at_two_verifiers_is_sent_to_no_third(
    failure: RequestError, opens: bool, real: ServiceProcess
) -> None:
    """The second runs it isolated."""
    how = {"opens": opens}
    async with faulty(failure, real, **how) as one, faulty(failure, real, **how) as two, matched(one, two) as verifiers:
        error, _ = await error_of(write(verifiers, text()))
        assert status_of(error) == STEP_FAILED
        assert failure.message in error.message
        if failure is FAILS:  # which opens no breaker
            assert [replica.status for replica in verifiers.replicas.all()] == ["ready", "ready"]
    assert sorted(one.openings + two.openings) == [False, True]


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNAUTHENTICATED])
async def test_a_verifier_that_refuses_a_sequence_has_not_run_it(code: grpc.StatusCode, real: ServiceProcess) -> None:
    """One that still loads, or does not admit the draft service. So the next one does not run it alone."""
    refusal = RequestError(code, "NO_VERIFIER", "the model is loading")
    async with faulty(refusal, real, opens=False) as refusing, matched(refusing) as verifiers:
        stream = FailoverStream(verifiers, text(), timeout=2.0)
        await error_of(stream.open())
        assert not stream._failures.suspected
    assert refusing.openings
    assert not any(refusing.openings)


async def test_a_suspected_round_stays_at_a_draining_verifier(real: ServiceProcess, proxies: list[Proxy]) -> None:
    """It runs alone there; the next verifier would run it with others."""
    async with matched(*proxies) as verifiers:
        stream = FailoverStream(verifiers, sequence := text(tokens=2), timeout=TIMEOUT_S)
        await stream.open()
        assert stream._stream is not None
        stream._failures.suspected.append(stream._stream.replica)
        for moves in (0, 1):  # a verdict clears the suspicion
            stream._stream.draining = True
            stream._failures.last = unavailable("NO_VERIFIER", "died")
            sequence.decode(1)
            await stream.send()
            sequence.commit(await stream.verdict())
            assert sequence.counts.message.num_drain_moves == moves
        stream.cancel()


@pytest.mark.parametrize("opens", [False, True])
async def test_held_text_is_not_sent_before_a_verifier_has_opened_the_sequence(
    opens: bool, real: ServiceProcess
) -> None:
    """It would come again with the next attempt, which `started` begins."""
    request = generation(committed=[260, 270], gamma=0, drafter=DrafterKind.NONE)
    request.message.held_tokens = 1
    responses, ignore = Responses(), lambda *_: None
    text = OutputText(IncrementalDetokenizer(load_tokenizer(ModelSource(str(MODELS / "target")))))
    emitter = Emitter(responses, text, index=0, prompt_tokens=3, committed=request.committed)
    watch: Any = SimpleNamespace(texts=None, begins=lambda: None, ends=lambda: None, judged=ignore)
    gamma: Any = SimpleNamespace(learn=lambda: None, judged=ignore, pause=0)
    drafter: Any = None
    sample = Sample(request, 0, emitter, gamma, watch, arrived=0.0)
    error = invalid_field("sampling.temperature", "refused")
    async with faulty(error, real, opens=opens) as peer, matched(peer) as verifiers:
        await error_of(sample.run(verifiers, drafter, timeout=TIMEOUT_S, on_open=lambda _: None))
    sent = responses.take_now()
    assert (sent is not None) == opens
    assert sent is None or sent.chunk.text


OTHER_WEIGHTS = failed_precondition("PAIR_MISMATCH", "other weights")


@pytest.mark.parametrize(
    "error",
    [FAILS, overloaded("full", retry_after=90.0), yielded("idle", retry_after=90.0), OTHER_WEIGHTS],
    ids=["step fails", "full", "idle", "other weights"],
)
async def test_an_error_of_one_verifier_costs_no_text(error: RequestError, real: ServiceProcess) -> None:
    switches, texts = Switches(), list[list[int]]()
    async with faulty(error, real, opens=error is FAILS) as peer, matched(real, peer, switches=switches) as verifiers:
        while not peer.openings:
            assert len(texts) < 60
            texts.append(await write(verifiers, text(tokens=4)))
        texts += [await write(verifiers, text(tokens=4)) for _ in range(4 if error is not FAILS else 0)]
    assert all(each == texts[0] for each in texts)
    assert len(peer.openings) == 1, "it is not used again"
    assert switches.reasons == ([FailureKind.STEP_FAILED] if error is FAILS else [])


async def test_a_failover_is_no_part_of_a_measured_cycle() -> None:
    events: list[str] = []
    gamma: Any = SimpleNamespace(
        learn=lambda: None, judged=lambda *_: events.append("judged"), disturbed=lambda: events.append("disturbed")
    )
    watch: Any = SimpleNamespace(texts=None, judged=lambda *_: None)
    emitter: Any = None
    sample = Sample(generation(), 0, emitter, gamma, watch, arrived=0.0)
    sample.sequence.decode(3)
    for pause in (0.0, 1.0, 0.0):
        target: Any = SimpleNamespace(pause=pause, verdict=_one_token)
        await sample._next_verdict(target)
    assert events == ["judged", "disturbed", "judged", "judged"]


async def _one_token() -> speculation_pb2.Verdict:
    return speculation_pb2.Verdict(token_ids=[7])


@pytest.mark.parametrize(
    ("retry_after", "failover_timeout", "tries"),
    [(0.5, 2.5, range(2, 10)), (90.0, 60.0, range(1, 2)), (None, 2.5, range(2, 5))],
)
async def test_a_sequence_refused_by_all_waits_for_retry_after_or_ends_with_it(
    retry_after: float | None,
    failover_timeout: float,
    tries: range,
    real: ServiceProcess,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(failover, "OPENING_TIMEOUT", failover_timeout)
    full = overloaded("full", retry_after=retry_after)
    async with faulty(full, real, opens=False) as peer, matched(peer, failover_timeout=failover_timeout) as verifiers:
        error, waited = await error_of(write(verifiers, text(), timeout=90.0))
    assert status_of(error) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED")
    assert error.retry_after == retry_after
    assert len(peer.openings) in tries
    assert waited < 30.0


async def test_a_sequence_waits_for_a_verifier_that_restarts_though_another_is_full(
    proxies: list[Proxy], real: ServiceProcess
) -> None:
    """The full one names a time that is too late."""
    async with matched(real) as verifiers:
        alone = await write(verifiers, text())
    restarts, peers = proxies[0], list[Any]()

    def disturb(step: int) -> None:
        if step == 4:
            restarts.close()
            asyncio.get_running_loop().call_later(1.0, restarts.heal)

    async with faulty(overloaded("full", retry_after=90.0), real, opens=False) as full:
        peers += [restarts, full]
        async with matched(*peers, failover_timeout=60.0) as verifiers:
            assert await write(verifiers, text(), disturb) == alone
    assert len(full.openings) in (1, 2)


async def test_the_error_says_why_no_verifier_is_used() -> None:
    model = model_pb2.ModelInfo(weights_fingerprint="a")
    async with fake_verifier(model=model) as peer, matched(peer) as verifiers:
        verifiers.replicas.all()[0].probed(model, "its weights fingerprint is b")
        error, _ = await error_of(FailoverStream(verifiers, text(), timeout=20.0).open())
    assert status_of(error) == NO_VERIFIER
    assert error.message.endswith(f"opened the sequence: {peer} is not used: its weights fingerprint is b")


async def test_many_full_verifiers_end_an_opening_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though each may be tried again before all others have refused."""
    seconds, full = 1.0, overloaded("full", retry_after=0.05)
    monkeypatch.setattr(failover, "OPENING_TIMEOUT", seconds)
    model = model_pb2.ModelInfo(weights_fingerprint="a")

    async def verify(_: Any, context: Any) -> None:
        await context.read()
        await asyncio.sleep(0.05)
        await context.abort_with_status(to_status(full))

    async with AsyncExitStack() as stack:
        peers = [await stack.enter_async_context(fake_verifier(verify, model=model)) for _ in range(4)]
        verifiers = await stack.enter_async_context(matched(*peers))
        error, waited = await error_of(FailoverStream(verifiers, text(), timeout=20.0).open())
    assert status_of(error) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED")
    assert seconds <= waited < 10.0


async def test_failovers_are_bounded_by_burst_rounds_and_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random rounds, waits and failovers. The bound holds between any two moments."""
    chance, now, burst = random.Random(5), 0.0, 12
    monkeypatch.setattr(failover, "time", SimpleNamespace(monotonic=lambda: now))
    budget = FailoverBudget(burst)
    history: list[tuple[float, int, int]] = []
    rounds = taken = 0
    for _ in range(3000):
        match chance.randrange(3):
            case 0:
                rounds += 1
                budget.earn()
            case 1:
                taken += await budget.take()
            case _:
                now += chance.expovariate(2.0)
        history.append((now, rounds, taken))
    for _ in range(20_000):
        (t0, r0, n0), (t1, r1, n1) = sorted(chance.sample(history, 2))
        assert n1 - n0 <= burst + PER_ROUND * (r1 - r0) + PER_SECOND * (t1 - t0) + 1e-6
    assert taken > 540, "487 without the income of rounds"
