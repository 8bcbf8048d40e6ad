"""48 clients of two draft services, most of whose streams are disturbed, each in its own way.

It lasts until enough of everything has happened, so that a slow machine sees as much of it as a fast one.
"""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import grpc

from outrider.client import AsyncClient, Chunk, Event, Finished, FinishReason, Options, OutriderError
from outrider.client.errors import typed
from outrider.client.events import read
from outrider.client.request import build
from outrider.rpc.channel import open_channel
from outrider.rpc.errors import from_rpc_error
from protos.outrider.v1.draft_service_pb2_grpc import DraftServiceStub
from tests.cluster import MODELS, Cluster, Service, wait_healthy
from tests.proxy import Proxy

SHORTEST, LONGEST = 40, 100  # tokens of a text
PROMPT_CHARS = (8, 60, 140, 500)
SAMPLING: tuple[Options, ...] = (
    Options(temperature=0.0, rule="tokenwise"),
    Options(temperature=1.0, rule="coupled"),
    Options(temperature=0.0, rule="coupled"),
)

MAX_SEQUENCES, MAX_WAITING = 32, 12
"""Of the verifier: fewer than there are streams, so that some wait and some are refused."""
KV_CACHE_MB = 7
"""Of the verifier: some 1,200 positions, fewer than that many sequences need, so that some are preempted."""
SLOW_CLIENT_S = 3.0
"""How long either service waits for a reader that does not read."""

LEAST_S, MOST_S = 5.0, 120.0
ENOUGH = 8
"""Streams disturbed in each way, undisturbed at each endpoint, cancelled; half as many that failed as they should."""
CLIENT_TIMEOUT_S = 120.0
SEED = 11
STALL_S = (0.2, 2 * SLOW_CLIENT_S)
"""A slow reader's pause: shorter than the limit, or longer."""
VANISHING, VANISH_WITHIN_S, KEEPALIVE_S = 4, 5.0, 15.0
"""Some vanish in the beginning: a server here pings a peer after 6 s, and gives it 6 s to answer."""
CUT_FIRST_S, CUT_EVERY_S, CUT_FOR_S = 3.0, 9.0, 0.5
"""Of the frail draft service's link to the verifier."""
NARROW = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
"""Channel options of a client that buffers little."""

Events = AsyncIterator[Event]


class Endpoint(StrEnum):
    DRAFT = "draft"
    FRAIL = "frail"  # a draft service whose own link to the verifier is cut now and then


CLIENTS = {Endpoint.DRAFT: 32, Endpoint.FRAIL: 16}


class Behaviour(StrEnum):
    """How a client treats its stream."""

    PLAIN = "plain"  # reads to the end
    CANCEL = "cancel"  # cancels the call after some tokens
    SLOW = "slow"  # stops reading for a while
    DEADLINE = "deadline"  # has set a deadline that may be too short
    TIME_LIMIT = "time_limit"  # has set a time limit
    CUT = "cut"  # its connection ends without an end of HTTP/2
    VANISH = "vanish"  # its connection falls silent, and does not end


SHARES: dict[Behaviour, float] = {
    Behaviour.PLAIN: 0.27,
    Behaviour.CANCEL: 0.14,
    Behaviour.SLOW: 0.24,  # they take long: with fewer of them the run would last until enough have failed
    Behaviour.DEADLINE: 0.13,
    Behaviour.TIME_LIMIT: 0.10,
    Behaviour.CUT: 0.12,
}

FAILURES: dict[Behaviour, set[tuple[str, str]]] = {
    Behaviour.SLOW: {("DEADLINE_EXCEEDED", "IDLE")},
    Behaviour.DEADLINE: {("DEADLINE_EXCEEDED", "UNSPECIFIED")},
    Behaviour.CUT: {("UNAVAILABLE", "UNSPECIFIED")},
}
"""How a stream may fail that was disturbed so: status and reason."""


@dataclass(frozen=True, slots=True)
class Request:
    """One of a few requests, sent again and again. `length` is the number of its tokens."""

    number: int
    prompt: str
    length: int
    sampling: Options

    def options(self) -> Options:
        return Options(max_new_tokens=self.length, ignore_eos=True, seed=self.number) | self.sampling


@dataclass(slots=True)
class Outcome:
    """The result of one stream.

    Attributes:
        status: the name of its gRPC status; CANCELLED where the client left, OK where it read to the end.
        whole: whether it ended at its full length.
    """

    endpoint: Endpoint
    behaviour: Behaviour
    request: Request
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    status: str = "OK"
    error: OutriderError | None = None
    whole: bool = False

    @property
    def failure(self) -> tuple[str, str]:
        """Status and reason."""
        return self.status, self.error.reason if self.error else ""


def requests(count: int) -> list[Request]:
    """Return the same ones whenever it is called."""
    texts = [json.loads(line)["text"] for line in (MODELS / "prompts.jsonl").read_text(encoding="utf-8").splitlines()]
    chance = random.Random(5)
    return [
        Request(
            number,
            texts[number][: PROMPT_CHARS[number % len(PROMPT_CHARS)]],
            chance.randint(SHORTEST, LONGEST),
            SAMPLING[number % len(SAMPLING)],
        )
        for number in range(count)
    ]


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


def client_of(address: str) -> AsyncClient:
    return AsyncClient(address, timeout=CLIENT_TIMEOUT_S, retry=False)


# -------------------------------------------------------------------------------------------------------- one stream


async def disturb(
    outcome: Outcome, address: str, client: AsyncClient, chance: random.Random, vanished: AsyncExitStack
) -> None:
    """Run one stream to its end; `vanished` keeps the connections of clients that vanish."""
    request = outcome.request
    at = chance.randint(0, request.length)
    options = request.options() | Options(gamma=chance.choice((0, 1, 3, 4, 5, 8)))
    options["cache_salt"] = chance.choice(("", str(chance.random())))  # prompts in the prefix cache, and new ones
    if outcome.behaviour is Behaviour.TIME_LIMIT:
        options["time_limit"] = chance.uniform(0.05, 4.0)

    def events(client: AsyncClient = client, timeout: float | None = None) -> Events:
        return client.generate(request.prompt, timeout=timeout, **options)

    match outcome.behaviour:
        case Behaviour.PLAIN | Behaviour.TIME_LIMIT:
            await _take(events(), outcome)
        case Behaviour.DEADLINE:
            seconds = chance.choice((0.02, chance.uniform(0.1, 1.0), chance.uniform(1.0, 5.0)))
            await _take(events(timeout=seconds), outcome)
        case Behaviour.CANCEL if chance.random() < 0.5:  # between two chunks
            await _take(events(), outcome, most=at)
            outcome.status = "OK" if outcome.whole else "CANCELLED"
        case Behaviour.CANCEL:  # while it waits for one
            try:
                async with asyncio.timeout(chance.uniform(0.0, 4.0)):
                    await _take(events(), outcome)
            except TimeoutError:
                outcome.status = "CANCELLED"
        case Behaviour.SLOW:
            # Twenty candidates a token make every response larger than the buffer.
            message = build(request.prompt, request.options() | Options(logprobs=20, gamma=4))
            async with open_channel(address, options=NARROW) as channel:
                call = DraftServiceStub(channel).Generate(message, timeout=CLIENT_TIMEOUT_S)
                stall = chance.uniform(*STALL_S)
                try:
                    await _take(_events_of(call), outcome, act=lambda: asyncio.sleep(stall), act_at=at // 2)
                finally:
                    call.cancel()
        case Behaviour.CUT:
            reset = chance.random() < 0.5
            with Proxy(address) as proxy:

                async def cut() -> None:
                    proxy.cut(reset=reset)

                async with client_of(proxy.address) as own:
                    await _take(events(own), outcome, act=cut, act_at=at)
        case Behaviour.VANISH:
            proxy = vanished.enter_context(Proxy(address))
            async with client_of(proxy.address) as own:
                await _take(events(own), outcome, most=1)
                proxy.stall()
            outcome.status = "CANCELLED"


async def _events_of(call: Any) -> Events:
    try:
        async for response in call:
            for event in read(response):
                yield event
    except grpc.RpcError as error:
        raise typed(from_rpc_error(error)) from error


async def _take(
    events: Events,
    outcome: Outcome,
    *,
    most: int | None = None,
    act: Callable[[], Awaitable[None]] | None = None,
    act_at: int = 0,
) -> None:
    """Take events in, up to `most` tokens; `act` once, as soon as `act_at` have come."""
    async with aclosing(events) as taken:  # type: ignore[type-var]
        async for event in taken:
            match event:
                case Chunk():
                    outcome.token_ids += event.token_ids
                    outcome.text += event.text
                case Finished():
                    outcome.whole = event.finish_reason is FinishReason.LENGTH
            if most is not None and len(outcome.token_ids) >= most:
                return
            if act is not None and len(outcome.token_ids) >= act_at:
                await act()
                act = None


# --------------------------------------------------------------------------------------------------------------- chaos


class Chaos:
    """Runs clients against a cluster. `outcomes` are those of all streams that have ended."""

    def __init__(self) -> None:
        self.outcomes: list[Outcome] = []
        self._began = time.monotonic()
        self._to_vanish = VANISHING
        self._last_vanished = 0.0

    async def run(self, cluster: ChaosCluster, requests: Sequence[Request]) -> None:
        addresses = {Endpoint.DRAFT: cluster.draft.address, Endpoint.FRAIL: cluster.frail.address}
        async with AsyncExitStack() as stack:
            clients = {each: await stack.enter_async_context(client_of(addresses[each])) for each in Endpoint}

            async def work(endpoint: Endpoint, number: int) -> None:
                chance = random.Random(f"{SEED}/{endpoint}/{number}")
                while not self._is_over():
                    outcome = Outcome(endpoint, self._behaviour(endpoint, chance), chance.choice(requests))
                    try:
                        await disturb(outcome, addresses[endpoint], clients[endpoint], chance, stack)
                    except OutriderError as error:
                        outcome.status, outcome.error = error.code.name, error
                    await self._add(outcome, chance)

            workers = [asyncio.create_task(work(each, n)) for each in Endpoint for n in range(CLIENTS[each])]
            breaking = asyncio.create_task(self._break(cluster.link))
            done, pending = await asyncio.wait(workers, timeout=MOST_S + CLIENT_TIMEOUT_S / 2)
            for task in (*pending, breaking):
                task.cancel()
            await asyncio.gather(*workers, breaking, return_exceptions=True)
            for worker in done:
                worker.result()
            assert not pending, "streams that have not ended long after the last began"
            # Clients that vanished stay until the services have given them up.
            await asyncio.sleep(max(0.0, self._last_vanished + KEEPALIVE_S - time.monotonic()))

    def of(self, behaviour: Behaviour) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.behaviour is behaviour]

    def counts(self) -> list[float]:
        """The number of each event, in shares of `ENOUGH`."""
        whole = Counter(each.endpoint for each in self.outcomes if each.whole)
        cancelled = sum(each.status == "CANCELLED" for each in self.of(Behaviour.CANCEL))
        counts = [*(len(self.of(each)) for each in SHARES), *(whole[each] for each in Endpoint), cancelled]
        failed = [sum(each.failure in due for each in self.of(how)) for how, due in FAILURES.items()]
        return [*(count / ENOUGH for count in counts), *(2 * count / ENOUGH for count in failed)]

    def _is_over(self) -> bool:
        lasted = time.monotonic() - self._began
        return lasted > MOST_S or (lasted > LEAST_S and min(self.counts()) >= 1)

    def _behaviour(self, endpoint: Endpoint, chance: random.Random) -> Behaviour:
        early = time.monotonic() < self._began + VANISH_WITHIN_S
        if early and endpoint is Endpoint.DRAFT and self._to_vanish and chance.random() < 0.3:
            self._to_vanish -= 1
            return Behaviour.VANISH
        return chance.choices(list(SHARES), list(SHARES.values()))[0]

    async def _add(self, outcome: Outcome, chance: random.Random) -> None:
        self.outcomes.append(outcome)
        if outcome.behaviour is Behaviour.VANISH and outcome.error is None:
            self._last_vanished = time.monotonic()
        elif outcome.behaviour is Behaviour.VANISH:  # refused: another one shall vanish
            self._to_vanish += 1
        if outcome.error is not None and outcome.error.retry_after is not None:
            await asyncio.sleep(min(outcome.error.retry_after, chance.uniform(0.2, 2.0)))
        elif outcome.status == "UNAVAILABLE":
            await asyncio.sleep(chance.uniform(0.0, 2 * CUT_FOR_S))

    async def _break(self, link: Proxy) -> None:
        await asyncio.sleep(CUT_FIRST_S)
        while not self._is_over():
            link.close()
            await asyncio.sleep(CUT_FOR_S)
            link.open()
            await asyncio.sleep(CUT_EVERY_S)
