"""Verifiers that die, drain, fall silent or run something else, under a draft service: the client sees a pause.

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
from pathlib import Path

import pytest

from outrider.client import AsyncClient, Chunk, Finished, Options, Statistics, Unavailable
from outrider.rpc.channel import wait_for_health
from tests.cluster import Cluster, Service, free_address, wait_healthy, wait_until
from tests.exactness import pairs, sampling
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

SILENCE_S = 3.0
PATIENCE_S = 4.0
SOON_S = 60.0
SLOWLY = "unhurried"
"""So that whatever happens to a verifier happens in the middle of its texts."""

Ids = tuple[int, ...]


@dataclass
class Stack:
    """A draft service and the addresses of its verifiers, at which processes come and go; the last one struck."""

    cluster: Cluster
    target: Path
    addresses: tuple[str, ...]
    draft: Service
    verifiers: dict[str, Service] = field(default_factory=dict)
    struck: str = ""

    def statuses(self) -> dict[str, int]:
        found = self.draft.samples()["outrider_verifiers"]
        return {dict(labels)["status"]: int(count) for labels, count in found.items() if count}

    def start(self, address: str, target: Path | None = None) -> Service:
        """Starts a verifier there."""
        flags = (*sampling.VERIFIER_FLAGS, "--listen", address)
        self.verifiers[address] = service = self.cluster.verifier(
            model=target or self.target, fault=SLOWLY, flags=flags
        )
        wait_healthy(service)
        return service

    def restore(self) -> None:
        """All are there again, and the draft service knows it."""
        for address in self.addresses:
            if address not in self.verifiers:
                self.start(address)
        wait_until(
            lambda: sum(self.statuses().get(state, 0) for state in ("closed", "half_open")) == len(self.addresses)
        )

    def signal_busiest(self, number: signal.Signals) -> None:
        """To the one with the most sequences: of several that is at least half."""
        held = {
            dict(labels)["verifier"]: n for labels, n in self.draft.samples()["outrider_verifier_sequences"].items()
        }
        self.struck = max(self.addresses, key=held.__getitem__)
        self.signal(self.struck, number)

    def signal(self, address: str, number: signal.Signals) -> None:
        self.verifiers[address].send(number)
        if number in (signal.SIGKILL, signal.SIGTERM):
            del self.verifiers[address]

    def switches(self, reason: str) -> int:
        return int(self.draft.samples()["outrider_verifier_switches_total"][(("reason", reason),)])


@pytest.fixture(scope="module")
def shared(cluster: Cluster, attentive: World) -> Iterator[Stack]:
    """Two verifiers, one of them by a name, and a draft service."""
    first = cluster.verifier(model=attentive.target, fault=SLOWLY, flags=sampling.VERIFIER_FLAGS)
    second = free_address()
    name = f"localhost:{second.rpartition(':')[2]}"
    limits = ("--verifier-timeout", str(SILENCE_S), "--failover-patience", str(PATIENCE_S))
    flags = (*limits, *sampling.DRAFT_FLAGS)
    draft = cluster.draft(first, name, model=attentive.drafts["uniform"], flags=flags)
    stack = Stack(cluster, attentive.target, (first.address, second), draft, {first.address: first})
    wait_healthy(first, draft)
    yield stack
    for service in (*stack.verifiers.values(), draft):
        service.end()


@pytest.fixture
def stack(shared: Stack) -> Stack:
    """With all its verifiers."""
    shared.restore()
    return shared


@dataclass(frozen=True)
class Text:
    """What one request got."""

    ids: Ids
    statistics: Statistics | None
    error: Exception | None = None
    failover_us: int = 0


SOME = LENGTH * len(STREAMS) // 6


def write(stack: Stack, fault: Callable[[], None] | None = None) -> list[Text]:
    """Asks for all `STREAMS` at once; once there are `SOME` tokens of them together, `fault` is called."""
    return asyncio.run(_write(stack.draft.address, [] if fault is None else [fault]))


async def _write(address: str, faults: list[Callable[[], None]]) -> list[Text]:
    seen = 0
    async with AsyncClient(address, timeout=90.0, retry=False) as client:

        async def one(options: Options) -> Text:
            nonlocal seen
            ids: list[int] = []
            statistics, failover_us = None, 0
            try:
                async for event in client.generate(PROMPT, **options):
                    match event:
                        case Chunk():
                            ids += event.token_ids
                            seen += len(event.token_ids)
                            if faults and seen >= SOME:
                                faults.pop()()
                        case Finished():
                            statistics, failover_us = event.statistics, event.timings.failover_us
            except Unavailable as error:
                return Text(tuple(ids), statistics, error)
            return Text(tuple(ids), statistics, failover_us=failover_us)

        return await asyncio.gather(*map(one, STREAMS))


def ids(texts: list[Text]) -> list[Ids]:
    return [text.ids for text in texts]


def failovers(texts: list[Text]) -> int:
    return sum(text.statistics.num_failovers for text in texts if text.statistics)


def broken_off(texts: list[Text]) -> None:
    """Whoever had not ended yet was told so, and that is nearly all."""
    assert all(isinstance(text.error, Unavailable) for text in texts if len(text.ids) < LENGTH)
    assert sum(text.error is not None for text in texts) > len(texts) / 2


@pytest.fixture(scope="module")
def undisturbed(shared: Stack) -> list[Ids]:
    """What each request gets where nothing happens."""
    shared.restore()
    texts = write(shared)
    assert failovers(texts) == 0
    assert all(len(text.ids) == LENGTH for text in texts)
    assert len(set(ids(texts))) > len(STREAMS) - 2, "two are greedy, and alike"
    return ids(texts)


def test_a_verifier_that_is_killed_costs_a_pause_and_no_token(stack: Stack, undisturbed: list[Ids]) -> None:
    before = stack.switches("died")
    texts = write(stack, lambda: stack.signal_busiest(signal.SIGKILL))
    assert ids(texts) == undisturbed
    assert 2 <= failovers(texts) <= len(STREAMS), "those that were there, once each"
    assert stack.switches("died") - before == failovers(texts)
    assert sum(text.statistics.num_drain_moves for text in texts if text.statistics) == 0
    moved = [text for text in texts if text.statistics and text.statistics.num_failovers]
    assert all(text.statistics.num_reopened_tokens > len(PROMPT) for text in moved if text.statistics)
    assert all(bool(text.failover_us) == (text in moved) for text in texts)
    wait_until(lambda: stack.statuses() == {"closed": 1, "open": 1})
    breakers = stack.draft.samples()["outrider_verifier_breaker_state"]
    assert breakers == {(("verifier", address),): 2 * (address == stack.struck) for address in stack.addresses}
    assert stack.draft.samples()["outrider_failover_seconds_total"][()] > 0
    wait_until(lambda: set(stack.draft.samples()["outrider_verifier_sequences"].values()) == {0})
    wait_for_health(stack.draft.address, "", SOON_S)


def test_one_that_comes_back_is_used_again(stack: Stack, undisturbed: list[Ids]) -> None:
    assert ids(write(stack)) == undisturbed
    for service in stack.verifiers.values():
        wait_until(lambda service=service: service.logged("sequence"))  # type: ignore[misc]


def test_one_that_drains_is_left_between_rounds_and_the_last_one_finishes(stack: Stack, undisturbed: list[Ids]) -> None:
    services = dict(stack.verifiers)
    texts = write(stack, lambda: stack.signal_busiest(signal.SIGTERM))
    (last,) = stack.verifiers
    assert ids(texts) == undisturbed
    assert sum(text.statistics.num_drain_moves for text in texts if text.statistics) == failovers(texts) >= 2
    wait_until(lambda: services[stack.struck].logged("stopped"))
    texts = write(stack, lambda: stack.signal(last, signal.SIGTERM))
    assert ids(texts) == undisturbed, "there is no other: it has its grace for this"
    assert failovers(texts) == 0


def test_one_that_says_nothing_is_left_after_a_while(stack: Stack, undisturbed: list[Ids]) -> None:
    before = stack.switches("silent")
    try:
        texts = write(stack, lambda: stack.signal_busiest(signal.SIGSTOP))
    finally:
        stack.signal(stack.struck, signal.SIGCONT)
    assert ids(texts) == undisturbed
    assert stack.switches("silent") - before == failovers(texts) >= 2


def test_with_all_of_them_gone_it_is_unavailable_in_time_and_what_was_written_is_there(
    stack: Stack, undisturbed: list[Ids]
) -> None:
    """By the patience here; `tests/draft_service/test_failover.py` has a deadline that is sooner."""

    def gone() -> None:
        for address in stack.addresses:
            stack.signal(address, signal.SIGKILL)

    started = time.monotonic()
    texts = write(stack, gone)
    assert time.monotonic() - started < PATIENCE_S + SOON_S
    broken_off(texts)
    assert sum(len(text.ids) for text in texts) >= SOME
    assert all(text.ids == whole[: len(text.ids)] for text, whole in zip(texts, undisturbed, strict=True))
    wait_for_health(stack.draft.address, "", SOON_S)
    assert stack.statuses() == {"open": 2}


def test_one_with_other_weights_is_never_used(
    shared: Stack, undisturbed: list[Ids], tmp_path_factory: pytest.TempPathFactory
) -> None:
    stack = shared
    good, odd = stack.addresses
    for address in stack.addresses:
        if address in stack.verifiers:
            stack.signal(address, signal.SIGKILL)
    mismatched = stack.start(odd, pairs.write_target(tmp_path_factory.mktemp("odd"), seed=99))
    stack.start(good)
    wait_until(lambda: stack.statuses() in ({"closed": 1, "mismatched": 1}, {"half_open": 1, "mismatched": 1}))
    assert ids(write(stack)) == undisturbed
    texts = write(stack, lambda: stack.signal(good, signal.SIGKILL))
    broken_off(texts)
    assert all(text.ids == whole[: len(text.ids)] for text, whole in zip(texts, undisturbed, strict=True))
    assert not mismatched.logged("sequence")
    told = [entry for entry in stack.draft.logged("verifier") if entry["status"] == "mismatched"]
    assert len(told) == 1
    assert "weights" in str(told[0]["reason"])
