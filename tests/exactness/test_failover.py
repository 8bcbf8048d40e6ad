"""Verifiers that die, drain or fall silent under a draft service: the client sees a pause.

Real processes, killed and stopped by signals in the middle of texts. What was written is compared token for token with
what the same requests get undisturbed: under `coupled`, at temperature 0, and under `tokenwise` and `block` too, where
a round that is judged again has the draws it had (invariant 2). All in float32.
"""

from __future__ import annotations

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
from tests.exactness.worlds import World

PROMPT = (15, 12, 14)
LENGTH = 64
STREAMS: tuple[Options, ...] = tuple(
    Options(temperature=temperature, rule=rule, gamma=gamma, seed=seed, max_new_tokens=LENGTH, ignore_eos=True)
    for seed, (temperature, rule, gamma) in enumerate(
        [(1.0, "coupled", 4), (0.0, "tokenwise", 3), (1.0, "tokenwise", 4), (1.0, "block", 5), (1.0, "coupled", 0)] * 2
    )
)
"""Of every exact rule, with drafts and without (by `Decode`), several at once."""
SOME = LENGTH * len(STREAMS) // 6

SILENCE_S = 3.0
PATIENCE_S = 4.0
SOON_S = 60.0


@dataclass
class Stack:
    """A draft service and its two verifiers; the one that was struck last."""

    draft: Service
    verifiers: tuple[Service, ...]
    struck: Service

    def statuses(self) -> dict[str, int]:
        found = self.draft.samples()["outrider_verifiers"]
        return {dict(labels)["status"]: int(count) for labels, count in found.items() if count}

    def restore(self) -> None:
        """All are there again, and the draft service knows it."""
        for verifier in self.verifiers:
            if verifier.returncode is not None:
                verifier.start_again()
        wait_healthy(*self.verifiers)
        wait_until(lambda: sum(self.statuses().get(state, 0) for state in ("ready", "recovering")) == 2)

    def strike(self, number: signal.Signals) -> None:
        """Send a signal to the one with the most sequences, which is half of them at least."""
        count = self.draft.count
        self.struck = max(self.verifiers, key=lambda each: count("outrider_verifier_sequences", verifier=each.address))
        self.struck.send(number)

    def switches(self, reason: str) -> float:
        return self.draft.count("outrider_verifier_switches_total", reason=reason)


@pytest.fixture(scope="module")
def shared(cluster: Cluster, attentive: World) -> Iterator[Stack]:
    # Slowly, so that whatever happens to a verifier happens in the middle of its texts.
    verifiers = [cluster.verifier(model=attentive.target, fault="unhurried", flags=sampling.FLAGS) for _ in range(2)]
    limits = ("--verifier-timeout", str(SILENCE_S), "--failover-timeout", str(PATIENCE_S))
    flags = (*limits, *sampling.DRAFT_FLAGS)
    draft = cluster.draft(*verifiers, model=attentive.drafts["uniform"], flags=flags)
    wait_healthy(*verifiers, draft)
    yield Stack(draft, tuple(verifiers), verifiers[0])
    for service in (*verifiers, draft):
        service.end()


@pytest.fixture
def stack(shared: Stack) -> Stack:
    """With all its verifiers."""
    shared.restore()
    return shared


@dataclass
class Text:
    """What one request got."""

    ids: list[int] = field(default_factory=list)
    finished: Finished | None = None
    error: Exception | None = None

    @property
    def failovers(self) -> int:
        return self.finished.statistics.num_failovers if self.finished else 0


def write(stack: Stack, fault: Callable[[], None] = lambda: None) -> list[Text]:
    """Ask for all `STREAMS` at once; once there are `SOME` tokens of them together, `fault` is called."""
    return asyncio.run(_write(stack.draft.address, [fault]))


async def _write(address: str, faults: list[Callable[[], None]]) -> list[Text]:
    texts = [Text() for _ in STREAMS]
    async with AsyncClient(address, timeout=90.0, retry=False) as client:

        async def one(text: Text, options: Options) -> None:
            try:
                async for event in client.generate(PROMPT, **options):
                    match event:
                        case Chunk():
                            text.ids += event.token_ids
                            if faults and sum(len(each.ids) for each in texts) >= SOME:
                                faults.pop()()
                        case Finished():
                            text.finished = event
            except Unavailable as error:
                text.error = error

        await asyncio.gather(*(one(text, options) for text, options in zip(texts, STREAMS, strict=True)))
    return texts


def ids(texts: list[Text]) -> list[list[int]]:
    return [text.ids for text in texts]


def failovers(texts: list[Text]) -> int:
    return sum(text.failovers for text in texts)


@pytest.fixture(scope="module")
def undisturbed(shared: Stack) -> list[list[int]]:
    """What each request gets where nothing happens."""
    texts = write(shared)
    assert failovers(texts) == 0
    assert all(len(text.ids) == LENGTH for text in texts)
    return ids(texts)


def test_a_verifier_that_is_killed_costs_a_pause_and_no_token(stack: Stack, undisturbed: list[list[int]]) -> None:
    before = stack.switches("died")
    texts = write(stack, lambda: stack.strike(signal.SIGKILL))
    assert ids(texts) == undisturbed
    assert 2 <= failovers(texts) <= len(STREAMS), "those that were there, once each"
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


def test_one_that_drains_is_left_between_rounds_and_the_last_one_finishes(
    stack: Stack, undisturbed: list[list[int]]
) -> None:
    texts = write(stack, lambda: stack.strike(signal.SIGTERM))
    assert ids(texts) == undisturbed
    moves = sum(text.finished.statistics.num_drain_moves for text in texts if text.finished)
    assert moves == failovers(texts) >= 2
    wait_until(lambda: stack.struck.logged("stopped"))
    (last,) = (verifier for verifier in stack.verifiers if verifier is not stack.struck)
    texts = write(stack, lambda: last.send(signal.SIGTERM))
    assert ids(texts) == undisturbed, "there is no other: it has its grace for this"
    assert failovers(texts) == 0
    last.process.wait()


def test_one_that_says_nothing_is_left_after_a_while(stack: Stack, undisturbed: list[list[int]]) -> None:
    before = stack.switches("silent")
    try:
        texts = write(stack, lambda: stack.strike(signal.SIGSTOP))
    finally:
        stack.struck.send(signal.SIGCONT)
    assert ids(texts) == undisturbed
    assert stack.switches("silent") - before == failovers(texts) >= 2


def test_with_all_of_them_gone_it_is_unavailable_in_time_and_what_was_written_is_there(
    stack: Stack, undisturbed: list[list[int]]
) -> None:
    def strike_all() -> None:
        for verifier in stack.verifiers:
            verifier.send(signal.SIGKILL)

    started = time.monotonic()
    texts = write(stack, strike_all)
    assert time.monotonic() - started < PATIENCE_S + SOON_S
    assert sum(text.error is not None for text in texts) > len(texts) / 2
    for text, whole in zip(texts, undisturbed, strict=True):
        assert text.ids == whole[: len(text.ids)]
        assert (text.error is None) == (len(text.ids) == LENGTH)
    wait_for_health(stack.draft.address, "", SOON_S)
