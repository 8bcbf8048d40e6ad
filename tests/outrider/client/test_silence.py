"""A draft service that hangs: it neither answers nor closes, and the client goes on at another one after its patience.

The services are real, and one is stopped by a signal. Where a request waits for its turn, the service says so.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest

from outrider.cli.processes import Pair, ServiceProcess
from outrider.client import AsyncClient, Chunk, Completion, Event, Finished, Options, Started, Unavailable
from outrider.rpc.errors import unavailable
from protos.outrider.v1 import draft_service_pb2 as pb
from protos.outrider.v1.draft_service_pb2_grpc import DraftServiceStub
from tests.cluster import Cluster
from tests.outrider.client.refusing import Refusing, refusing
from tests.proxy import Proxy, Way

PROMPT = "def area(radius):\n"
SAMPLED: Options = {"temperature": 1.0, "seed": 11, "max_new_tokens": 120, "ignore_eos": True}
SILENCE_S = 2.0
LONG_S = 100.0


@pytest.fixture(scope="module")
def way(demo_pair: Pair) -> Iterator[Proxy]:
    """The way from the service below to its verifier."""
    with Proxy(demo_pair.verifier.address) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def victim(way: Proxy) -> Iterator[ServiceProcess]:
    with Cluster() as cluster:
        draft = cluster.draft(way.address, flags="--drafter lookup")
        draft.wait_healthy()
        yield draft


def test_a_service_with_nothing_to_say_says_that_it_is_alive(victim: ServiceProcess, way: Proxy) -> None:
    """Its verifier owes it an answer: before the text begins there is nothing to tell."""
    with grpc.insecure_channel(victim.address) as channel:
        way.stall(Way.DOWN)
        try:
            call = DraftServiceStub(channel).Generate(pb.GenerateRequest(text=PROMPT, max_new_tokens=4), timeout=LONG_S)
            assert next(call).WhichOneof("event") is None
        finally:
            way.flow(Way.DOWN)
        events = [response.WhichOneof("event") for response in call]
    told = [event for event in events if event is not None]
    assert (told[0], told[-1]) == ("started", "finished")


async def test_texts_under_way_and_new_ones_go_on_elsewhere(victim: ServiceProcess, demo_pair: Pair) -> None:
    """SIGSTOP: connections stay, and new ones are taken by the system. Nobody behind them says a word."""
    addresses = [victim.address, demo_pair.draft.address]
    chunks = [0, 0]
    try:
        async with AsyncClient(addresses, timeout=LONG_S, silence=SILENCE_S) as client:

            async def one(number: int) -> Completion:
                taken: list[Event] = []
                async for event in client.generate(PROMPT, **SAMPLED):
                    taken.append(event)
                    chunks[number] += isinstance(event, Chunk)
                    if min(chunks) == 3:
                        os.kill(victim.process.pid, signal.SIGSTOP)
                return Completion.of(taken)

            broken = await asyncio.gather(one(0), one(1))
        async with AsyncClient(addresses, timeout=LONG_S, silence=SILENCE_S) as client:
            new = await asyncio.gather(*(client.complete(PROMPT, **SAMPLED) for _ in range(2)))
        async with AsyncClient(demo_pair.draft.address) as client:
            whole = await client.complete(PROMPT, **SAMPLED)
    finally:
        os.kill(victim.process.pid, signal.SIGCONT)
    assert sum(completion.samples[0].num_resumes for completion in broken) >= 1
    for completion in (*broken, *new):
        assert (completion.text, completion.token_ids) == (whole.text, whole.token_ids)


class Mute(Refusing):
    """Answers, and then hangs as a program does, whose connections its libraries keep alive."""

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        self.calls += 1
        yield pb.GenerateResponse(started=pb.GenerateStarted(request_id="mute", max_new_tokens=9))
        await asyncio.sleep(LONG_S)

    async def GetModel(self, request: pb.DraftServiceGetModelRequest, context: Any) -> pb.DraftServiceGetModelResponse:
        await asyncio.sleep(LONG_S)
        return pb.DraftServiceGetModelResponse()


async def test_a_hang_that_keepalive_does_not_see_is_left_too() -> None:
    mute, alive = Mute(unavailable("DRAINING", "")), Refusing(unavailable("DRAINING", ""), times=0)
    async with refusing(mute) as one, refusing(alive) as other:
        async with AsyncClient([one, other], silence=0.2) as client:
            for _ in range(2):
                assert [type(event) async for event in client.generate("x")] == [Started, Finished]
        assert mute.calls >= 1
        async with AsyncClient([one, one.replace("127.0.0.1", "localhost")], silence=0.1, patience=0) as client:
            with pytest.raises(Unavailable, match="was silent"):
                await client.get_model()


async def test_where_there_is_nobody_else_it_waits() -> None:
    mute = Mute(unavailable("DRAINING", ""))
    async with refusing(mute) as address, AsyncClient(address, silence=0.05) as client:
        events = client.generate("x", timeout=1.0)
        assert isinstance(await anext(events), Started)
        with pytest.raises(Exception, match="did not end within its timeout of 1 s"):
            await anext(events)
