"""Verifiers that die, drain or fall silent under a draft service: the client sees a pause.

Real processes, killed and stopped by signals in the middle of texts. Tokens are those of the same requests without a
failure: under `coupled`, at temperature 0, and under `tokenwise` and `block` too, where a round that is sent again has
the same draws (invariant 2). All in float32.
"""

import asyncio
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from outrider.client import AsyncClient, Chunk, Finished, Options, Unavailable
from outrider.rpc.channel import wait_for_health
from tests.cluster import Cluster, Service, wait_healthy, wait_until
from tests.exactness import sampling
from tests.exactness.services import PairServices

PROMPT = (15, 12, 14)
LENGTH = 40
REQUESTS: tuple[Options, ...] = tuple(
    Options(temperature=temperature, rule=rule, gamma=gamma, seed=seed, max_new_tokens=LENGTH, ignore_eos=True)
    for seed, (temperature, rule, gamma) in enumerate(
        [(1.0, "coupled", 4), (0.0, "tokenwise", 3), (1.0, "tokenwise", 4), (1.0, "block", 5), (1.0, "coupled", 0)] * 2
    )
)
"""Under every exact rule, with drafts and without (by `Decode`), all at once."""
FAULT_AFTER = LENGTH * len(REQUESTS) // 6

VERIFIER_TIMEOUT_S = 3.0
FAILOVER_TIMEOUT_S = 4.0
SOON_S = 60.0


@dataclass
class Stack:
    """A draft service and its two verifiers; the one that got the last signal."""

    draft: Service
    verifiers: tuple[Service, ...]
    struck: Service

    def statuses(self) -> dict[str, int]:
        found = self.draft.samples()["outrider_verifiers"]
        return {dict(labels)["status"]: int(count) for labels, count in found.items() if count}

    def restore(self) -> None:
        """Start dead verifiers again, and wait until the draft service uses both."""
        for verifier in self.verifiers:
            if verifier.returncode is not None:
                verifier.start_again()
        wait_healthy(*self.verifiers)
        wait_until(lambda: sum(self.statuses().get(state, 0) for state in ("ready", "recovering")) == 2)

    def strike(self, number: signal.Signals) -> None:
        """Send a signal to the verifier with the most sequences, at least half of them."""
        name = "outrider_verifier_sequences"
        held = {dict(labels)["verifier"]: count for labels, count in self.draft.samples(name)[name].items()}
        self.struck = max(self.verifiers, key=lambda each: held[each.address])
        self.struck.send(number)

    def switches(self, reason: str) -> float:
        return self.draft.count("outrider_verifier_switches_total", reason=reason)


@pytest.fixture(scope="module")
def shared(cluster: Cluster, attentive: PairServices) -> Iterator[Stack]:
    # Slowly, so that a fault comes in the middle of texts, also where the machine stops for a moment.
    verifiers = [cluster.verifier(model=attentive.target, fault="sluggish", flags=sampling.FLAGS) for _ in range(2)]
    limits = ("--verifier-timeout", str(VERIFIER_TIMEOUT_S), "--failover-timeout", str(FAILOVER_TIMEOUT_S))
    flags = (*limits, *sampling.DRAFT_FLAGS)
    draft = cluster.draft(*verifiers, model=attentive.drafts["uniform"], flags=flags)
    wait_healthy(*verifiers, draft)
    yield Stack(draft, tuple(verifiers), verifiers[0])
    for service in (*verifiers, draft):
        service.end()


@pytest.fixture
def stack(shared: Stack) -> Stack:
    shared.restore()
    return shared


@dataclass
class Text:
    """The response to one request."""

    ids: list[int] = field(default_factory=list)
    finished: Finished | None = None
    error: Exception | None = None

    @property
    def failovers(self) -> int:
        return self.finished.statistics.num_failovers if self.finished else 0


def write(stack: Stack, fault: Callable[[], None] = lambda: None) -> list[Text]:
    """Send all `REQUESTS` at once, and call `fault` after `FAULT_AFTER` of their tokens."""
    return asyncio.run(_write(stack.draft.address, [fault]))


async def _write(address: str, faults: list[Callable[[], None]]) -> list[Text]:
    texts = [Text() for _ in REQUESTS]
    async with AsyncClient(address, timeout=90.0, retry=False) as client:

        async def stream(text: Text, options: Options) -> None:
            try:
                async for event in client.generate(PROMPT, **options):
                    match event:
                        case Chunk():
                            text.ids += event.token_ids
                            if faults and sum(len(each.ids) for each in texts) >= FAULT_AFTER:
                                faults.pop()()
                        case Finished():
                            text.finished = event
            except Unavailable as error:
                text.error = error

        await asyncio.gather(*(stream(text, options) for text, options in zip(texts, REQUESTS, strict=True)))
    return texts


def ids(texts: list[Text]) -> list[list[int]]:
    return [text.ids for text in texts]


def failovers(texts: list[Text]) -> int:
    return sum(text.failovers for text in texts)


@pytest.fixture(scope="module")
def undisturbed(shared: Stack) -> list[list[int]]:
    """The tokens of each request without a fault."""
    texts = write(shared)
    assert failovers(texts) == 0
    assert all(len(text.ids) == LENGTH for text in texts)
    return ids(texts)


def test_a_killed_verifier_costs_a_pause_and_no_token(stack: Stack, undisturbed: list[list[int]]) -> None:
    before = stack.switches("died")
    texts = write(stack, lambda: stack.strike(signal.SIGKILL))
    assert ids(texts) == undisturbed
    assert 2 <= failovers(texts) <= len(REQUESTS), "its sequences, once each"
    assert stack.switches("died") - before == failovers(texts)
    for done in (text.finished for text in texts if text.finished):
        assert bool(done.timings.failover_us) == bool(done.statistics.num_failovers)
        assert done.statistics.num_reopened_tokens >= len(PROMPT) * done.statistics.num_failovers
    wait_until(lambda: stack.statuses() == {"ready": 1, "failing": 1})
    assert stack.draft.count("outrider_verifier_breaker_state", verifier=stack.struck.address) == 2
    wait_until(lambda: not stack.draft.count("outrider_verifier_sequences"))
    stack.restore()
    assert ids(write(stack)) == undisturbed
    wait_until(lambda: stack.struck.logged("sequence"), what="it is used again")


def test_sequences_leave_a_draining_verifier_between_rounds_and_the_last_one_finishes_them(
    stack: Stack, undisturbed: list[list[int]]
) -> None:
    texts = write(stack, lambda: stack.strike(signal.SIGTERM))
    assert ids(texts) == undisturbed
    moves = sum(text.finished.statistics.num_drain_moves for text in texts if text.finished)
    assert moves == failovers(texts) >= 2
    wait_until(lambda: stack.struck.logged("stopped"))
    (last,) = (verifier for verifier in stack.verifiers if verifier is not stack.struck)
    texts = write(stack, lambda: last.send(signal.SIGTERM))
    assert ids(texts) == undisturbed, "there is no other verifier: its grace period is long enough"
    assert failovers(texts) == 0
    last.process.wait()


def test_sequences_leave_a_silent_verifier_after_its_timeout(stack: Stack, undisturbed: list[list[int]]) -> None:
    before = stack.switches("silent")
    try:
        texts = write(stack, lambda: stack.strike(signal.SIGSTOP))
    finally:
        stack.struck.send(signal.SIGCONT)
    assert ids(texts) == undisturbed
    assert stack.switches("silent") - before == failovers(texts) >= 2


def test_without_verifiers_requests_are_unavailable_in_time_and_keep_their_tokens(
    stack: Stack, undisturbed: list[list[int]]
) -> None:
    def strike_all() -> None:
        for verifier in stack.verifiers:
            verifier.send(signal.SIGKILL)

    started = time.monotonic()
    texts = write(stack, strike_all)
    assert time.monotonic() - started < FAILOVER_TIMEOUT_S + SOON_S
    assert sum(text.error is not None for text in texts) > len(texts) / 2
    for text, whole in zip(texts, undisturbed, strict=True):
        assert text.ids == whole[: len(text.ids)]
        assert (text.error is None) == (len(text.ids) == LENGTH)
    wait_for_health(stack.draft.address, "", SOON_S)
