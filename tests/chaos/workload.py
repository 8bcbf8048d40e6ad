"""64 clients of two draft services and a verifier, most of whose streams are disturbed, each in its own way.

It lasts until enough of everything has happened, so that a slow machine sees as much of it as a fast one.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from outrider.client import AsyncClient, Options
from tests.cluster import MODELS, Cluster, Service, wait_healthy
from tests.proxy import Proxy

SHORTEST, LONGEST = 12, 32  # tokens of a text
VERY_LONG = 96  # of one text: more verdicts than a client may leave unread
PROMPT_CHARS = (8, 60, 140, 500)
SAMPLING: tuple[Options, ...] = (
    Options(temperature=0.0, rule="tokenwise"),
    Options(temperature=1.0, rule="coupled"),
    Options(temperature=0.0, rule="coupled"),
)

MAX_SEQUENCES, MAX_WAITING = 44, 16
"""Of the verifier: fewer than there are streams, so that some wait and some are refused."""
KV_CACHE_MB = 10
"""Of the verifier: some 1,700 positions, fewer than that many sequences need, so that some are preempted."""
SLOW_CLIENT_S = 3.0
"""How long either service waits for a reader that does not read."""

LEAST_S, MOST_S = 5.0, 120.0
ENOUGH = 8
"""Streams disturbed in each way, undisturbed at each endpoint, cancelled; half as many that failed as they should."""
CLIENT_TIMEOUT_S = 120.0
SEED = 11
STALL_S = (0.2, 2 * SLOW_CLIENT_S)
"""A slow reader's pause: shorter than the limit, or longer."""
VANISH_WITHIN_S, KEEPALIVE_S = 5.0, 15.0
"""Some vanish in the beginning: a server here pings a peer after 6 s, and gives it 6 s to answer."""
CUT_FIRST_S, CUT_EVERY_S, CUT_FOR_S = 3.0, 9.0, 0.5
"""Of the frail draft service's link to the verifier."""


class Endpoint(StrEnum):
    DRAFT = "draft"
    FRAIL = "frail"  # a draft service whose own link to the verifier is cut now and then
    VERIFIER = "verifier"


CLIENTS = {Endpoint.DRAFT: 40, Endpoint.FRAIL: 8, Endpoint.VERIFIER: 16}
VANISHING = {Endpoint.DRAFT: 4, Endpoint.VERIFIER: 4}


class Behaviour(StrEnum):
    """What a client does to its stream."""

    PLAIN = "plain"  # reads to the end
    CANCEL = "cancel"  # cancels the call after some tokens
    SLOW = "slow"  # stops reading for a while
    DEADLINE = "deadline"  # has set a deadline that may be too short
    TIME_LIMIT = "time_limit"  # asks for what can be written in a short time
    HALF_CLOSE = "half_close"  # sends no more rounds, in the middle of the text
    CUT = "cut"  # its connection ends without an end of HTTP/2
    VANISH = "vanish"  # its connection falls silent, and does not end


SHARES: dict[Behaviour, float] = {
    Behaviour.PLAIN: 0.37,
    Behaviour.CANCEL: 0.17,
    Behaviour.SLOW: 0.08,
    Behaviour.DEADLINE: 0.15,
    Behaviour.TIME_LIMIT: 0.08,
    Behaviour.CUT: 0.15,
}
"""At the verifier a half-close takes the place of the time limit, which is the draft service's."""

FAILURES: dict[Behaviour, set[tuple[str, str]]] = {
    Behaviour.SLOW: {("DEADLINE_EXCEEDED", "IDLE")},
    Behaviour.DEADLINE: {("DEADLINE_EXCEEDED", "UNSPECIFIED")},
    Behaviour.CUT: {("UNAVAILABLE", "UNSPECIFIED")},
}
"""How a stream may fail that was disturbed so: status and reason."""


@dataclass(frozen=True, slots=True)
class Request:
    """One of a few requests, made again and again. `length` is the number of its tokens."""

    number: int
    prompt: str
    length: int
    sampling: Options

    def options(self) -> Options:
        return Options(max_new_tokens=self.length, ignore_eos=True, seed=self.number) | self.sampling


@dataclass(frozen=True, slots=True)
class Expected:
    """What a request writes when it is alone."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str


@dataclass(slots=True)
class Outcome:
    """What came of one stream.

    Attributes:
        status: the name of its gRPC status; CANCELLED where the client left, OK where it read to the end.
        reason: of the error, as the contract names it.
        retry_after: seconds, where the error said so.
        whole: whether it ended at its full length.
    """

    endpoint: Endpoint
    behaviour: Behaviour
    request: Request
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    status: str = "OK"
    reason: str = ""
    message: str = ""
    retry_after: float | None = None
    whole: bool = False

    def fail(self, error: Any) -> None:
        """Take in an error of the client or of `outrider.rpc`."""
        self.status, self.reason, self.message = error.code.name, error.reason, error.message
        self.retry_after = error.retry_after

    def __str__(self) -> str:
        return (
            f"{self.behaviour} at {self.endpoint}, request {self.request.number}: {self.status} {self.reason} "
            f"after {len(self.token_ids)} of {self.request.length} tokens: {self.message}"
        )


def requests(count: int) -> list[Request]:
    """Return the same ones whenever it is called; the first is the long one."""
    texts = [json.loads(line)["text"] for line in (MODELS / "prompts.jsonl").read_text(encoding="utf-8").splitlines()]
    chance = random.Random(5)
    return [
        Request(
            number,
            texts[number][: PROMPT_CHARS[number % len(PROMPT_CHARS)]],
            chance.randint(SHORTEST, LONGEST) if number else VERY_LONG,
            SAMPLING[number % len(SAMPLING)],
        )
        for number in range(count)
    ]


async def write_alone(address: str, requests: Sequence[Request]) -> dict[int, Expected]:
    """Return what each request writes alone, by its number."""
    found = {}
    async with AsyncClient(address, timeout=CLIENT_TIMEOUT_S) as client:
        for request in requests:
            done = await client.complete(request.prompt, **request.options())
            assert len(done.token_ids) == request.length
            found[request.number] = Expected(done.started.prompt_token_ids, done.token_ids, done.text)
    return found


@dataclass(frozen=True)
class ChaosCluster:
    """A verifier and two draft services; the frail one reaches the verifier by `link`."""

    verifier: Service
    draft: Service
    frail: Service
    link: Proxy

    @property
    def services(self) -> tuple[Service, Service, Service]:
        return self.verifier, self.draft, self.frail


@contextmanager
def chaos_cluster() -> Iterator[ChaosCluster]:
    limits = f"--max-sequences {MAX_SEQUENCES} --max-waiting {MAX_WAITING} --kv-cache-mb {KV_CACHE_MB}"
    with Cluster(f"--slow-client-timeout {SLOW_CLIENT_S}", fault="impatient_keepalive") as cluster:
        verifier = cluster.verifier(flags=limits)
        with Proxy(verifier.address) as link:
            services = ChaosCluster(verifier, cluster.draft(verifier), cluster.draft(link.address), link)
            wait_healthy(*services.services)
            yield services


class Clients(Protocol):
    """Makes streams at one endpoint."""

    endpoint: Endpoint

    async def stream(self, behaviour: Behaviour, request: Request, chance: random.Random) -> Outcome:
        """Run one stream to its end, whatever that is."""

    async def close(self) -> None: ...


class Chaos:
    """Runs clients against a cluster.

    Attributes:
        outcomes: of all streams that have ended.
        left_over: the streams that had not ended long after the last began.
    """

    def __init__(self) -> None:
        self.outcomes: list[Outcome] = []
        self.left_over: list[str] = []
        self._began = time.monotonic()
        self._vanishing = VANISHING.copy()
        self._last_vanished = 0.0

    async def run(self, cluster: ChaosCluster, clients: Sequence[Clients], requests: Sequence[Request]) -> None:
        workers = [
            asyncio.create_task(self._work(each, requests, random.Random(f"{SEED}/{each.endpoint}/{number}")))
            for each in clients
            for number in range(CLIENTS[each.endpoint])
        ]
        breaking = asyncio.create_task(self._break(cluster.link))
        _, pending = await asyncio.wait(workers, timeout=MOST_S + CLIENT_TIMEOUT_S / 2)
        self.left_over = [str(worker) for worker in pending]
        for task in (*pending, breaking):
            task.cancel()
        await asyncio.gather(*workers, breaking, return_exceptions=True)
        for worker in workers:
            if worker not in pending:
                worker.result()
        for each in clients:
            await each.close()
        # Clients that vanished stay until the services have given them up.
        await asyncio.sleep(max(0.0, self._last_vanished + KEEPALIVE_S - time.monotonic()))

    def of(self, behaviour: Behaviour) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.behaviour is behaviour]

    def _is_over(self) -> bool:
        lasted = time.monotonic() - self._began
        return lasted > MOST_S or (lasted > LEAST_S and self._has_enough())

    def _has_enough(self) -> bool:
        whole = Counter(each.endpoint for each in self.outcomes if each.whole)
        cancelled = sum(each.status == "CANCELLED" for each in self.of(Behaviour.CANCEL))
        counts = [*(len(self.of(each)) for each in SHARES), *(whole[each] for each in Endpoint), cancelled]
        failed = [sum((each.status, each.reason) in due for each in self.of(how)) for how, due in FAILURES.items()]
        return min(counts) >= ENOUGH and min(failed) >= ENOUGH // 2

    def _behaviour(self, endpoint: Endpoint, chance: random.Random) -> Behaviour:
        early = time.monotonic() < self._began + VANISH_WITHIN_S
        if early and self._vanishing.get(endpoint, 0) and chance.random() < 0.3:
            self._vanishing[endpoint] -= 1
            return Behaviour.VANISH
        (behaviour,) = chance.choices(list(SHARES), list(SHARES.values()))
        if behaviour is Behaviour.TIME_LIMIT and endpoint is Endpoint.VERIFIER:
            return Behaviour.HALF_CLOSE
        return behaviour

    async def _work(self, clients: Clients, requests: Sequence[Request], chance: random.Random) -> None:
        while not self._is_over():
            behaviour = self._behaviour(clients.endpoint, chance)
            outcome = await clients.stream(behaviour, chance.choice(requests), chance)
            self.outcomes.append(outcome)
            if behaviour is Behaviour.VANISH and outcome.status == "CANCELLED":
                self._last_vanished = time.monotonic()
            elif behaviour is Behaviour.VANISH:  # refused: another one shall vanish
                self._vanishing[outcome.endpoint] += 1
            if outcome.retry_after is not None:
                await asyncio.sleep(min(outcome.retry_after, chance.uniform(0.2, 2.0)))
            elif outcome.status == "UNAVAILABLE":
                await asyncio.sleep(chance.uniform(0.0, 2 * CUT_FOR_S))

    async def _break(self, link: Proxy) -> None:
        await asyncio.sleep(CUT_FIRST_S)
        while not self._is_over():
            link.close()
            await asyncio.sleep(CUT_FOR_S)
            link.open()
            await asyncio.sleep(CUT_EVERY_S)
