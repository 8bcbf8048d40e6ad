"""Clients of a draft service, each of which disturbs its own stream in one way, or in none."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager

import grpc

from outrider.client import AsyncClient, Chunk, Event, Finished, FinishReason, OutriderError
from outrider.client.errors import typed
from outrider.client.events import read
from outrider.client.request import build
from outrider.rpc.channel import open_channel
from protos.outrider.v1.draft_service_pb2_grpc import DraftServiceStub
from tests.chaos.broken_connection import Wire
from tests.chaos.requests import Behaviour, Door, Outcome, Request

PATIENCE_S = 120.0
"""Of a client that has set no deadline of its own: whoever waits longer has been forgotten."""

NARROW = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
"""Channel options of a client that takes little ahead of what it reads."""

Pause = Callable[[], Awaitable[None]]
Events = AsyncIterator[Event]


class DraftClients:
    """Makes streams at one draft service."""

    def __init__(self, door: Door, address: str, stall: tuple[float, float], gone: AsyncExitStack) -> None:
        """`stall` bounds the seconds of a slow reader's pause; `gone` holds what vanished clients leave behind."""
        self.door = door
        self._address = address
        self._stall = stall
        self._gone = gone
        self._client = AsyncClient(address, timeout=PATIENCE_S, retry=False)

    async def close(self) -> None:
        """End what all share."""
        await self._client.close()

    async def stream(self, behaviour: Behaviour, request: Request, chance: random.Random) -> Outcome:
        """Run one stream to its end, whatever that is."""
        outcome = Outcome(self.door, behaviour, request)
        acts = {
            Behaviour.PLAIN: self._plain,
            Behaviour.CANCEL: self._cancel,
            Behaviour.SLOW: self._slow,
            Behaviour.DEADLINE: self._deadline,
            Behaviour.TIME_LIMIT: self._time_limit,
            Behaviour.CUT: self._cut,
            Behaviour.VANISH: self._vanish,
        }
        try:
            await acts[behaviour](outcome, chance)
        except OutriderError as error:
            outcome.status, outcome.reason, outcome.message = error.code.name, error.reason, error.message
            outcome.retry_after = error.retry_after
        return outcome

    async def _plain(self, outcome: Outcome, chance: random.Random) -> None:
        await _hear(self._events(outcome.request, chance), outcome)

    async def _cancel(self, outcome: Outcome, chance: random.Random) -> None:
        """Half of them between two chunks, and half while they wait for one."""
        if chance.random() < 0.5:
            await _hear(self._events(outcome.request, chance), outcome, most=chance.randint(0, outcome.request.length))
            outcome.status = "OK" if outcome.whole else "CANCELLED"
            return
        try:
            async with asyncio.timeout(chance.uniform(0.0, 4.0)):
                await _hear(self._events(outcome.request, chance), outcome)
        except TimeoutError:
            outcome.status = "CANCELLED"

    async def _slow(self, outcome: Outcome, chance: random.Random) -> None:
        async def pause() -> None:
            await asyncio.sleep(chance.uniform(*self._stall))

        # Twenty candidates a token make every response larger than what is taken ahead.
        message = build(outcome.request.prompt, outcome.request.options() | {"logprobs": 20, "gamma": 4})
        async with open_channel(self._address, options=NARROW) as channel:
            call = DraftServiceStub(channel).Generate(message, timeout=PATIENCE_S)
            try:
                await _hear(_read(call), outcome, pause=pause, pause_at=chance.randint(0, outcome.request.length // 2))
            finally:
                call.cancel()

    async def _deadline(self, outcome: Outcome, chance: random.Random) -> None:
        seconds = chance.choice((0.02, chance.uniform(0.1, 1.0), chance.uniform(1.0, 5.0)))
        await _hear(self._events(outcome.request, chance, timeout=seconds), outcome)

    async def _time_limit(self, outcome: Outcome, chance: random.Random) -> None:
        await _hear(self._events(outcome.request, chance, time_limit=chance.uniform(0.05, 4.0)), outcome)

    async def _cut(self, outcome: Outcome, chance: random.Random) -> None:
        reset = chance.random() < 0.5

        async def cut() -> None:
            wire.cut(reset=reset)

        async with self._through_a_wire() as (wire, client):
            at = chance.randint(0, outcome.request.length)
            await _hear(self._events(outcome.request, chance, client=client), outcome, pause=cut, pause_at=at)

    async def _vanish(self, outcome: Outcome, chance: random.Random) -> None:
        wire = await self._gone.enter_async_context(Wire(self._address))
        async with AsyncClient(wire.address, timeout=PATIENCE_S, retry=False) as client:
            await _hear(self._events(outcome.request, chance, client=client), outcome, most=1)
            wire.hang()
        outcome.status = "CANCELLED"

    @asynccontextmanager
    async def _through_a_wire(self) -> AsyncIterator[tuple[Wire, AsyncClient]]:
        async with Wire(self._address) as wire, AsyncClient(wire.address, timeout=PATIENCE_S, retry=False) as client:
            yield wire, client

    def _events(
        self,
        request: Request,
        chance: random.Random,
        *,
        client: AsyncClient | None = None,
        timeout: float | None = None,
        time_limit: float | None = None,
    ) -> Events:
        options = request.options()
        options["gamma"] = chance.choice((0, 1, 3, 4, 5, 8))
        options["cache_salt"] = chance.choice(("", str(chance.random())))  # prompts at hand, and prompts to be read
        if time_limit is not None:
            options["time_limit"] = time_limit
        return (client or self._client).generate(request.prompt, timeout=timeout, **options)


async def _read(call: object) -> Events:
    try:
        async for response in call:  # type: ignore[attr-defined]
            event = read(response)
            if event is not None:
                yield event
    except grpc.RpcError as error:
        raise typed(error) from error


async def _hear(
    events: Events, outcome: Outcome, *, most: int | None = None, pause: Pause | None = None, pause_at: int = 0
) -> None:
    """Take events in, up to `most` tokens where that is said; pause once, as soon as `pause_at` have come."""
    async with aclosing(events) as heard:  # type: ignore[type-var]
        async for event in heard:
            match event:
                case Chunk():
                    outcome.token_ids += event.token_ids
                    outcome.text += event.text
                case Finished():
                    outcome.whole = event.finish_reason is FinishReason.LENGTH
            if most is not None and len(outcome.token_ids) >= most:
                return
            if pause is not None and len(outcome.token_ids) >= pause_at:
                await pause()
                pause = None
