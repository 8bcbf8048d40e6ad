"""A draft service that dies or hangs under a request, or the way to it: the client goes on and nothing shows.

The services are real. Where it is the way that breaks, both addresses lead to one service, through a proxy each.
"""

import asyncio
import signal
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import grpc
import pytest

from outrider.cli.processes import Pair
from outrider.client import (
    AsyncClient,
    Chunk,
    Client,
    Completion,
    Event,
    Finished,
    FinishReason,
    Options,
    Started,
    Unavailable,
)
from outrider.rpc import errors
from protos.outrider.v1 import draft_service_pb2 as pb
from protos.outrider.v1.draft_service_pb2_grpc import DraftServiceStub
from tests.cluster import Cluster, Service
from tests.outrider.client.refusing import Refusing, refusing
from tests.proxy import Proxy, Way

PROMPT = "def area(radius):\n"
# By a γ that is the same each time, a text comes in the same bytes.
SAMPLED: Options = {"temperature": 1.0, "seed": 11, "max_new_tokens": 72, "ignore_eos": True, "gamma": 5}
GREEDY: Options = {"temperature": 0, "max_new_tokens": 72, "ignore_eos": True, "gamma": 5}
LONG: Options = {**SAMPLED, "max_new_tokens": 900, "gamma": 0}
"""It takes the pair seconds: whatever is done after a chunk is done in the middle of it."""
GONE = errors.unavailable("DRAINING", "gone")
SILENCE_S = 2.0
LONG_S = 100.0


@contextmanager
def two_ways(target: str) -> Iterator[list[Proxy]]:
    with Proxy(target) as one, Proxy(target) as other:
        yield [one, other]


def both(proxies: Sequence[Proxy]) -> list[str]:
    return [proxy.address for proxy in proxies]


def cut(proxies: Sequence[Proxy]) -> None:
    for proxy in proxies:
        proxy.cut()


async def measured(proxy: Proxy, options: Options) -> tuple[Completion, int]:
    """The text by way of this proxy, and the bytes that came to the client."""
    async with AsyncClient(proxy.address) as client:
        with proxy.recording() as seen:
            completion = await client.complete(PROMPT, **options)
    return completion, sum(len(segment.data) for segment in seen if segment.way is Way.DOWN)


async def cut_after(count: int, proxies: Sequence[Proxy], options: Options) -> Completion:
    """The text where each way breaks after so many bytes to the client; then they are whole again."""
    for proxy in proxies:
        proxy.cut_after(count, Way.DOWN)
    async with AsyncClient(both(proxies)) as client:
        completion = await client.complete(PROMPT, **options)
    for proxy in proxies:
        proxy.heal()
    return completion


async def collect(events: AsyncGenerator[Event, None], at_chunk: Callable[[list[Chunk]], object]) -> Completion:
    """The whole of it; `at_chunk` is called at each chunk with those that came."""
    taken: list[Event] = []
    async for event in events:
        taken.append(event)
        if isinstance(event, Chunk):
            at_chunk([each for each in taken if isinstance(each, Chunk)])
    return Completion.of(taken)


def resumes(completion: Completion) -> int:
    return completion.samples[0].num_resumes


def assert_same(one: Completion, other: Completion) -> None:
    def whole(completion: Completion) -> Any:
        sample, usage = completion.samples[0], completion.usage
        end = (sample.finish_reason, sample.stop, sample.stop_token_id)
        tokens = [entry.token.token_id for entry in sample.logprobs]
        return sample.text, sample.token_ids, end, usage.completion_tokens, usage.prompt_tokens, tokens

    def logprobs(completion: Completion) -> list[float]:
        return [entry.token.adjusted for entry in completion.logprobs]

    assert whole(one) == whole(other)
    assert logprobs(one) == pytest.approx(logprobs(other), abs=1e-3)


# ------------------------------------------------------------------------------------------------ the way breaks

REQUESTS: dict[str, Options] = {
    "greedy": GREEDY | {"max_new_tokens": 120},
    "coupled": SAMPLED | {"max_new_tokens": 120},
    "no seed given": {"temperature": 1.0, "rule": "coupled", "max_new_tokens": 120, "gamma": 5},
    "penalties": SAMPLED | {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2},
    "logprobs": SAMPLED | {"logprobs": 2},
    "at least so many": SAMPLED | {"stop": [" "], "min_new_tokens": 68},
    "text that is held": SAMPLED | {"stop": [" \0", "e\0", "\n    \0"]},
    "frames of a few tokens": SAMPLED | {"stop": [" \0"], "logprobs": 5, "frame_bytes": 512},
    "the model's own end": {"temperature": 1.0, "seed": 3, "max_new_tokens": 200},
}


@pytest.mark.parametrize("options", REQUESTS.values(), ids=REQUESTS.keys())
async def test_text_and_tokens_are_those_of_a_request_that_nothing_befell(draft_address: str, options: Options) -> None:
    """Cut before the half of what there is to be said, and again after as much, when the other way serves.

    By bytes: what has been sent can no longer be cut off, and a client that is held up may find all of it sent. Late
    enough for an answer to have come: before the first, a call is begun anew, and that does not count.
    """
    with two_ways(draft_address) as proxies:
        _, total = await measured(proxies[0], options)
        broken = await cut_after(9 * total // 20, proxies, options)
        whole, _ = await measured(proxies[0], options | {"seed": broken.seed})
    # Where the model's own end counts, the second may meet the question which tokens that are.
    assert resumes(broken) in ((2,) if "ignore_eos" in options else (1, 2))
    assert resumes(whole) == 0
    assert_same(broken, whole)


async def test_a_cut_at_any_byte_neither_loses_nor_repeats(draft_address: str) -> None:
    """Each connection dies at some byte, also inside the last messages. The text ends within a token, by a stop string.

    What was written of that token when the end got lost must not be there twice.
    """
    options: Options = {**SAMPLED, "max_new_tokens": 40}
    with two_ways(draft_address) as proxies:
        async with AsyncClient(proxies[0].address) as client:
            texts = (await client.complete(PROMPT, **options | {"report_rounds": True})).samples[0].token_texts
            options["stop"] = [_within_a_token(texts)]
            events = [event async for event in client.generate(PROMPT, **options)]
        assert any(isinstance(event, Chunk) and event.text and not event.token_ids for event in events)
        whole, total = await measured(proxies[0], options)
        assert whole.finish_reason is FinishReason.STOP_STRING
        found = [
            await cut_after(max(total - back, 1), proxies, options) for back in (2, 20, 60, 110, 160, 230, total // 2)
        ]
    for broken in found:
        assert_same(broken, whole)
    assert sum(map(resumes, found)) >= 6


def _within_a_token(texts: Sequence[str]) -> str:
    """What is first met inside of a token, and goes to its end; of those the last."""
    starts = list(accumulate((len(text) for text in texts), initial=0))
    text = "".join(texts)
    return next(
        stop
        for i, stop in reversed([(i, text[2:]) for i, text in enumerate(texts)])
        if stop and text.find(stop) == starts[i] + 2
    )


@pytest.mark.parametrize("options", [SAMPLED | {"max_new_tokens": 12}, REQUESTS["the model's own end"]])
async def test_the_end_alone_is_lost(draft_address: str, options: Options) -> None:
    """All tokens came, by the limit or with the model's own end, and nothing said so."""
    with two_ways(draft_address) as proxies:
        whole, total = await measured(proxies[0], options)
        assert_same(await cut_after(total - 30, proxies, options), whole)


async def test_nothing_is_lost_with_the_end_of_the_call_itself() -> None:
    """The last sample has ended, and the status never came: there is nothing to go on with."""
    servicers = [Refusing(GONE, at_the_end=True) for _ in range(2)]
    async with refusing(servicers[0]) as one, refusing(servicers[1]) as other, AsyncClient([one, other]) as client:
        events = [type(event) async for event in client.generate("x")]
    assert events == [Started, Finished]
    assert sum(servicer.calls for servicer in servicers) == 1


@pytest.mark.parametrize("ways", [1, 2])
async def test_with_every_service_gone_for_a_while_it_goes_on_when_one_is_back(draft_address: str, ways: int) -> None:
    """Also where there is but one address, and twice in one text."""
    options: Options = SAMPLED | {"max_new_tokens": 160}
    with two_ways(draft_address) as proxies:
        used, tasks = proxies[:ways], set[asyncio.Task[None]]()

        async def come_back() -> None:
            await asyncio.sleep(1.0)  # some tries fail
            for proxy in used:
                proxy.open()

        def leave(chunks: list[Chunk]) -> None:
            if len(chunks) in (3, 12):
                for proxy in used:
                    proxy.refuse()
                    proxy.cut()
                tasks.add(asyncio.create_task(come_back()))

        async with AsyncClient(both(used), timeout=90) as client:
            broken = await collect(client.generate(PROMPT, **options), leave)
            whole = await client.complete(PROMPT, **options)
        await asyncio.gather(*tasks)
    assert resumes(broken) >= 1
    assert_same(broken, whole)


async def test_with_every_service_gone_it_fails_after_its_patience_and_says_what_came(draft_address: str) -> None:
    seen: list[Chunk] = []
    with two_ways(draft_address) as proxies:

        def close(chunks: list[Chunk]) -> None:
            seen[:] = chunks
            if len(chunks) == 3:
                for proxy in proxies:
                    proxy.close()

        async with AsyncClient(both(proxies), timeout=90, patience=1.0) as client:
            with pytest.raises(Unavailable) as caught:
                await collect(client.generate(PROMPT, **LONG), close)
    error, tokens = caught.value, sum(len(chunk.token_ids) for chunk in seen)
    assert error.delivered_tokens == tokens > 0
    assert f"; {tokens} tokens were delivered" in str(error)
    assert set(error.tries) == set(both(proxies))
    assert min(error.tries.values()) >= 1


@pytest.mark.parametrize(("retry", "options"), [(True, {"n": 3}), (False, {})], ids=["several samples", "no retry"])
async def test_some_calls_do_not_go_on(draft_address: str, retry: bool, options: Options) -> None:
    """Of several samples none is begun twice: it fails as with one address, once there is text."""
    with two_ways(draft_address) as proxies:
        async with AsyncClient(both(proxies), retry=retry) as client:
            with pytest.raises(Unavailable):
                await collect(
                    client.generate(PROMPT, **LONG | options), lambda chunks: cut(proxies) if len(chunks) == 2 else None
                )
        async with AsyncClient(both(proxies)) as client:
            short = await client.complete(PROMPT, **SAMPLED | options | {"max_new_tokens": 4})
            assert len(short.samples) == options.get("n", 1)


async def test_a_time_limit_holds_over_all_parts(draft_address: str) -> None:
    with two_ways(draft_address) as proxies:

        def cut_late(chunks: list[Chunk]) -> None:
            if len(chunks) == 2:
                time.sleep(0.5)
                cut(proxies)

        async with AsyncClient(both(proxies)) as client:
            begun = time.monotonic()
            broken = await collect(client.generate(PROMPT, **LONG | {"time_limit": 1.0}), cut_late)
            assert time.monotonic() - begun < 45
    assert broken.finish_reason in (FinishReason.TIME_LIMIT, FinishReason.LENGTH)
    assert broken.timings.total_us >= 500_000


def test_the_blocking_client_goes_on_too(draft_address: str) -> None:
    with two_ways(draft_address) as proxies, Client(",".join(both(proxies))) as client:
        text = ""
        for number, event in enumerate(client.generate(PROMPT, **SAMPLED)):
            text += event.text if isinstance(event, Chunk) else ""
            if number == 3:
                cut(proxies)
        assert text == client.complete(PROMPT, **SAMPLED).text


# ------------------------------------------------------------------------------------------ a service dies or hangs


def test_a_draft_service_killed_under_its_requests(demo_pair: Pair) -> None:
    """SIGKILL. Four requests run, two of them there, where rounds take so long that they have not ended by then. Text
    is held wherever it may become a stop string, which it never does.
    """
    requests = [options | {"max_new_tokens": 160} for options in (GREEDY, GREEDY, SAMPLED, SAMPLED)]
    with Proxy(demo_pair.verifier.address) as way, Cluster() as cluster:
        way.delay(0.02)
        victim = cluster.draft(way.address, flags="--drafter lookup")
        victim.wait_healthy()

        async def run() -> tuple[list[Completion], list[Completion]]:
            async with AsyncClient([victim.address, demo_pair.draft.address]) as client:
                counts = [0] * len(requests)

                async def one(index: int) -> Completion:
                    def kill(chunks: list[Chunk]) -> None:
                        counts[index] = len(chunks)
                        if min(counts) >= 3 and victim.returncode is None:
                            victim.kill()

                    held: Options = {"stop": [" \0", "e\0", "\n    \0"]}
                    return await collect(client.generate(PROMPT, **requests[index] | held), kill)

                broken = await asyncio.gather(*map(one, range(len(requests))))
                return broken, [await client.complete(PROMPT, **options) for options in requests]

        broken, whole = asyncio.run(run())
    assert victim.returncode == -signal.SIGKILL
    for one, other in zip(broken, whole, strict=True):
        assert_same(one, other)
    assert sorted(map(resumes, broken)) == [0, 0, 1, 1]


@pytest.fixture(scope="module")
def way(demo_pair: Pair) -> Iterator[Proxy]:
    """The way from the service below to its verifier."""
    with Proxy(demo_pair.verifier.address) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def victim(way: Proxy) -> Iterator[Service]:
    with Cluster() as cluster:
        draft = cluster.draft(way.address, flags="--drafter lookup")
        draft.wait_healthy()
        yield draft


def test_a_service_with_nothing_to_say_says_that_it_is_alive(victim: Service, way: Proxy) -> None:
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


async def test_texts_under_way_and_new_ones_go_on_elsewhere(victim: Service, demo_pair: Pair) -> None:
    """SIGSTOP: connections stay, and new ones are taken by the system. Nobody behind them says a word."""
    addresses = [victim.address, demo_pair.draft.address]
    options: Options = {"temperature": 1.0, "seed": 11, "max_new_tokens": 120, "ignore_eos": True}
    counts = [0, 0]
    try:
        async with AsyncClient(addresses, timeout=LONG_S, silence=SILENCE_S) as client:

            async def one(index: int) -> Completion:
                def stop(chunks: list[Chunk]) -> None:
                    counts[index] = len(chunks)
                    if min(counts) == 3:
                        victim.send(signal.SIGSTOP)

                return await collect(client.generate(PROMPT, **options), stop)

            broken = await asyncio.gather(one(0), one(1))
        async with AsyncClient(addresses, timeout=LONG_S, silence=SILENCE_S) as client:
            new = await asyncio.gather(*(client.complete(PROMPT, **options) for _ in range(2)))
        async with AsyncClient(demo_pair.draft.address) as client:
            whole = await client.complete(PROMPT, **options)
    finally:
        victim.send(signal.SIGCONT)
    assert sum(map(resumes, broken)) >= 1
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
    mute, alive = Mute(GONE), Refusing(GONE, times=0)
    async with refusing(mute) as one, refusing(alive) as other:
        async with AsyncClient([one, other], silence=0.2) as client:
            for _ in range(2):
                assert [type(event) async for event in client.generate("x")] == [Started, Finished]
        assert mute.calls >= 1
        async with AsyncClient([one, one.replace("127.0.0.1", "localhost")], silence=0.1, patience=0) as client:
            with pytest.raises(Unavailable, match="was silent"):
                await client.get_model()


async def test_where_there_is_nobody_else_it_waits() -> None:
    async with refusing(Mute(GONE)) as address, AsyncClient(address, silence=0.05) as client:
        events = client.generate("x", timeout=1.0)
        assert isinstance(await anext(events), Started)
        with pytest.raises(Exception, match="did not end within its timeout of 1 s"):
            await anext(events)
