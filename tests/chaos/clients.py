"""Clients of the draft services and of the verifier, each of which disturbs its own stream in one way, or in none."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing
from typing import Any

import grpc

from outrider.client import AsyncClient, Chunk, Event, Finished, FinishReason, OutriderError
from outrider.client.errors import typed
from outrider.client.events import read
from outrider.client.request import build
from outrider.rpc.channel import open_channel
from outrider.rpc.errors import from_rpc_error
from outrider.rpc.timeouts import Ending
from outrider.service.wire import PrefixHash
from protos.outrider.v1 import sampling_pb2, speculation_pb2, verifier_service_pb2
from protos.outrider.v1.draft_service_pb2_grpc import DraftServiceStub
from protos.outrider.v1.verifier_service_pb2_grpc import VerifierServiceStub
from tests.chaos.workload import CLIENT_TIMEOUT_S, STALL_S, Behaviour, Endpoint, Expected, Outcome, Request
from tests.proxy import Proxy

NARROW = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
"""Channel options of a client that takes little ahead of what it reads."""

Pause = Callable[[], Awaitable[None]]
Events = AsyncIterator[Event]


def _deadline(chance: random.Random) -> float:
    return chance.choice((0.02, chance.uniform(0.1, 1.0), chance.uniform(1.0, 5.0)))


class DraftClients:
    """Makes streams at one draft service; `gone` keeps the connections of clients that vanished."""

    def __init__(self, endpoint: Endpoint, address: str, gone: AsyncExitStack) -> None:
        self.endpoint = endpoint
        self._address = address
        self._gone = gone
        self._client = AsyncClient(address, timeout=CLIENT_TIMEOUT_S, retry=False)

    async def close(self) -> None:
        await self._client.close()

    async def stream(self, behaviour: Behaviour, request: Request, chance: random.Random) -> Outcome:
        outcome = Outcome(self.endpoint, behaviour, request)
        try:
            await self._act(behaviour, outcome, chance)
        except OutriderError as error:
            outcome.fail(error)
        return outcome

    async def _act(self, behaviour: Behaviour, outcome: Outcome, chance: random.Random) -> None:
        request = outcome.request
        at = chance.randint(0, request.length)
        match behaviour:
            case Behaviour.PLAIN:
                await _take(self._events(request, chance), outcome)
            case Behaviour.DEADLINE:
                await _take(self._events(request, chance, timeout=_deadline(chance)), outcome)
            case Behaviour.TIME_LIMIT:
                await _take(self._events(request, chance, time_limit=chance.uniform(0.05, 4.0)), outcome)
            case Behaviour.CANCEL if chance.random() < 0.5:  # between two chunks
                await _take(self._events(request, chance), outcome, most=at)
                outcome.status = "OK" if outcome.whole else "CANCELLED"
            case Behaviour.CANCEL:  # while it waits for one
                try:
                    async with asyncio.timeout(chance.uniform(0.0, 4.0)):
                        await _take(self._events(request, chance), outcome)
                except TimeoutError:
                    outcome.status = "CANCELLED"
            case Behaviour.SLOW:
                await self._read_slowly(outcome, chance, at // 2)
            case Behaviour.CUT:

                async def cut() -> None:
                    proxy.cut(reset=chance.random() < 0.5)

                with Proxy(self._address) as proxy:
                    async with AsyncClient(proxy.address, timeout=CLIENT_TIMEOUT_S, retry=False) as client:
                        events = self._events(request, chance, client=client)
                        await _take(events, outcome, pause=cut, pause_at=at)
            case Behaviour.VANISH:
                proxy = self._gone.enter_context(Proxy(self._address))
                async with AsyncClient(proxy.address, timeout=CLIENT_TIMEOUT_S, retry=False) as client:
                    await _take(self._events(request, chance, client=client), outcome, most=1)
                    proxy.stall()
                outcome.status = "CANCELLED"

    async def _read_slowly(self, outcome: Outcome, chance: random.Random, at: int) -> None:
        async def pause() -> None:
            await asyncio.sleep(chance.uniform(*STALL_S))

        # Twenty candidates a token make every response larger than what is taken ahead.
        message = build(outcome.request.prompt, outcome.request.options() | {"logprobs": 20, "gamma": 4})
        async with open_channel(self._address, options=NARROW) as channel:
            call = DraftServiceStub(channel).Generate(message, timeout=CLIENT_TIMEOUT_S)
            try:
                await _take(_events_of(call), outcome, pause=pause, pause_at=at)
            finally:
                call.cancel()

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
        options["cache_salt"] = chance.choice(("", str(chance.random())))  # prompts in the prefix cache, and new ones
        if time_limit is not None:
            options["time_limit"] = time_limit
        return (client or self._client).generate(request.prompt, timeout=timeout, **options)


async def _events_of(call: Any) -> Events:
    try:
        async for response in call:
            event = read(response)
            if event is not None:
                yield event
    except grpc.RpcError as error:
        raise typed(error) from error


async def _take(
    events: Events, outcome: Outcome, *, most: int | None = None, pause: Pause | None = None, pause_at: int = 0
) -> None:
    """Take events in, up to `most` tokens; pause once, as soon as `pause_at` have come."""
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
            if pause is not None and len(outcome.token_ids) >= pause_at:
                await pause()
                pause = None


class _LeftError(Exception):
    """The client goes, in the middle."""


class VerifierClients:
    """Makes `Verify` streams that propose right tokens, wrong ones and none; otherwise as `DraftClients`."""

    endpoint = Endpoint.VERIFIER

    def __init__(self, address: str, expected: dict[int, Expected], gone: AsyncExitStack) -> None:
        """`expected` by the number of the request."""
        self._address = address
        self._expected = expected
        self._gone = gone
        self._channel = open_channel(address)

    async def close(self) -> None:
        await self._channel.close()

    async def stream(self, behaviour: Behaviour, request: Request, chance: random.Random) -> Outcome:
        outcome = Outcome(self.endpoint, behaviour, request)
        async with AsyncExitStack() as stack:
            channel, proxy = self._channel, None
            if behaviour is Behaviour.SLOW:
                channel = await stack.enter_async_context(open_channel(self._address, options=NARROW))
            elif behaviour in (Behaviour.CUT, Behaviour.VANISH):
                proxy = (stack if behaviour is Behaviour.CUT else self._gone).enter_context(Proxy(self._address))
                channel = await stack.enter_async_context(open_channel(proxy.address))
            seconds = _deadline(chance) if behaviour is Behaviour.DEADLINE else CLIENT_TIMEOUT_S
            call: Any = VerifierServiceStub(channel).Verify(timeout=seconds)
            ending = Ending(call)
            sequence = _Sequence(call, outcome, self._expected[request.number], chance)
            try:
                await self._drive(sequence, behaviour, proxy, chance)
            except _LeftError:
                outcome.status = "CANCELLED"
            except (grpc.RpcError, asyncio.InvalidStateError):
                outcome.fail(from_rpc_error(await ending.status()))
            finally:
                call.cancel()
        return outcome

    async def _drive(
        self, sequence: _Sequence, behaviour: Behaviour, proxy: Proxy | None, chance: random.Random
    ) -> None:
        at = chance.randint(0, sequence.outcome.request.length)
        acts = behaviour is not Behaviour.PLAIN
        await sequence.open(logprobs=behaviour is Behaviour.SLOW)
        while not sequence.outcome.whole:
            if behaviour is Behaviour.SLOW:
                await sequence.decode(sequence.outcome.request.length - len(sequence.outcome.token_ids))
            else:
                await sequence.round()
            while sequence.owed and not sequence.outcome.whole:
                if acts and len(sequence.outcome.token_ids) >= at:
                    acts = False
                    match behaviour:  # with a round under way
                        case Behaviour.CANCEL:
                            raise _LeftError
                        case Behaviour.SLOW:
                            await asyncio.sleep(chance.uniform(*STALL_S))
                        case Behaviour.HALF_CLOSE:
                            await sequence.half_close()
                            return
                        case Behaviour.CUT if proxy is not None:
                            proxy.cut(reset=chance.random() < 0.5)
                        case Behaviour.VANISH if proxy is not None:
                            proxy.stall()
                            raise _LeftError
                await sequence.take()
        await sequence.end()


class _Sequence:
    """One call and its rounds. `owed` counts the verdicts that are to come."""

    def __init__(self, call: Any, outcome: Outcome, expected: Expected, chance: random.Random) -> None:
        self.outcome = outcome
        self.owed = 0
        self._call = call
        self._expected = expected
        self._chance = chance
        self._number = 0

    async def open(self, *, logprobs: bool) -> None:
        request = self.outcome.request
        await self._send(
            open=verifier_service_pb2.OpenSequence(
                prompt_token_ids=self._expected.prompt_ids,
                max_new_tokens=request.length,
                ignore_eos=True,
                sampling=sampling_pb2.SamplingParams(
                    temperature=request.sampling["temperature"],
                    seed=request.number,
                    rule=sampling_pb2.ACCEPTANCE_RULE_COUPLED,  # at temperature 0 every rule writes the same
                ),
                logprobs=sampling_pb2.LogprobsParams(top_n=20) if logprobs else None,
                cache_salt=self._chance.choice(("", str(self._chance.random()))),
            )
        )

    async def round(self) -> None:
        """A proposal of what will be accepted, with one token wrong in half of them; or a few tokens of Decode."""
        at, chance = len(self.outcome.token_ids), self._chance
        if chance.random() < 0.3:
            await self.decode(chance.randint(1, 6))
            return
        tokens = list(self._expected.token_ids[at : at + chance.randint(0, 6)])
        if tokens and chance.random() < 0.5:
            tokens[chance.randrange(len(tokens))] = chance.randrange(1, 1000)
        self.owed = 1
        await self._send(proposal=speculation_pb2.Proposal(token_ids=tokens, **self._next_round()))

    async def decode(self, tokens: int) -> None:
        self.owed = min(tokens, self.outcome.request.length - len(self.outcome.token_ids))
        await self._send(decode=verifier_service_pb2.Decode(num_tokens=tokens, **self._next_round()))

    def _next_round(self) -> dict[str, Any]:
        prefix = [*self._expected.prompt_ids, *self.outcome.token_ids]
        self._number += 1
        return {
            "round": self._number,
            "base_length": len(prefix),
            "prefix_hash": PrefixHash(prefix).digest(),
            "seen_round": self._number - 1,
        }

    async def take(self) -> None:
        """Read up to the next verdict."""
        while (reply := await self._call.read()) is not grpc.aio.EOF:
            if reply.WhichOneof("kind") == "verdict":
                verdict = reply.verdict
                assert verdict.status == speculation_pb2.VERDICT_STATUS_JUDGED, f"nothing was sent ahead: {verdict}"
                assert verdict.base_length == len(self._expected.prompt_ids) + len(self.outcome.token_ids)
                self.outcome.token_ids += verdict.token_ids
                self.outcome.whole = verdict.finish_reason == sampling_pb2.FINISH_REASON_LENGTH
                self.owed -= 1
                return
        raise asyncio.InvalidStateError("the stream has ended")

    async def half_close(self) -> None:
        """Send no more; what is owed comes all the same, and then the end."""
        await self._call.done_writing()
        while self.owed:
            await self.take()
        await self.end()

    async def end(self) -> None:
        """Read to the end, at which nothing more may have come."""
        while (reply := await self._call.read()) is not grpc.aio.EOF:
            assert reply.WhichOneof("kind") != "verdict", f"a verdict came after the end: {reply}"

    async def _send(self, **kind: Any) -> None:
        await self._call.write(verifier_service_pb2.VerifyRequest(sequence_id="s", **kind))
