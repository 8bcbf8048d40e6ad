"""A draft service that dies under a request, or the way to it: the client goes on at another one, and nothing shows.

The services are real. Where it is the way that breaks, both addresses lead to one service, through a proxy each.
"""

import asyncio
import signal
import socket
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from typing import Any

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
from outrider.client.endpoints import Endpoints, split
from outrider.rpc import errors
from tests.cluster import Cluster
from tests.outrider.client.refusing import Refusing, refusing
from tests.proxy import Proxy, Way

PROMPT = "def area(radius):\n"
# By a γ that is the same each time, a text comes in the same bytes.
SAMPLED: Options = {"temperature": 1.0, "seed": 11, "max_new_tokens": 72, "ignore_eos": True, "gamma": 5}
GREEDY: Options = {"temperature": 0, "max_new_tokens": 72, "ignore_eos": True, "gamma": 5}
LONG: Options = {**SAMPLED, "max_new_tokens": 900, "gamma": 0}
"""It takes the pair seconds: whatever is done after a chunk is done in the middle of it."""


@contextmanager
def two_ways(target: str) -> Iterator[tuple[Proxy, Proxy]]:
    with Proxy(target) as one, Proxy(target) as other:
        yield one, other


def both(proxies: tuple[Proxy, Proxy]) -> list[str]:
    return [proxy.address for proxy in proxies]


async def collect(events: AsyncGenerator[Event, None], *, at: Sequence[int], then: Any) -> Completion:
    """The whole of it; after each of the chunks `at`, counted from 1, does `then`."""
    taken: list[Event] = []
    chunks = 0
    async for event in events:
        taken.append(event)
        chunks += isinstance(event, Chunk)
        if isinstance(event, Chunk) and chunks in at:
            then()
    return Completion.of(taken)


def assert_same(one: Completion, other: Completion) -> None:
    assert one.text == other.text
    assert one.token_ids == other.token_ids
    assert one.finish_reason == other.finish_reason
    assert (one.samples[0].stop, one.samples[0].stop_token_id) == (
        other.samples[0].stop,
        other.samples[0].stop_token_id,
    )
    assert one.usage.completion_tokens == other.usage.completion_tokens
    assert one.usage.prompt_tokens == other.usage.prompt_tokens
    assert [entry.token.token_id for entry in one.logprobs] == [entry.token.token_id for entry in other.logprobs]
    assert [entry.token.adjusted for entry in one.logprobs] == pytest.approx(
        [entry.token.adjusted for entry in other.logprobs], abs=1e-3
    )


# ------------------------------------------------------------------------------------------------ the way breaks

LAWS: dict[str, Options] = {
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


@pytest.mark.parametrize("options", LAWS.values(), ids=LAWS.keys())
async def test_text_and_tokens_are_those_of_a_request_that_nothing_befell(draft_address: str, options: Options) -> None:
    """Cut before the half of what there is to be said, and again after as much, when the other way serves.

    By bytes: what has been sent can no longer be cut off, and a client that is held up may find all of it sent. Late
    enough for an answer to have come: before the first, a call is begun anew, and that does not count.
    """
    with two_ways(draft_address) as proxies:
        async with AsyncClient(proxies[0].address) as client:
            with proxies[0].recording() as seen:
                await client.complete(PROMPT, **options)
        total = sum(segment.size for segment in seen if segment.way is Way.DOWN)
        for proxy in proxies:
            proxy.cut_after(9 * total // 20, Way.DOWN)
        async with AsyncClient(both(proxies)) as client:
            broken = await client.complete(PROMPT, **options)
            whole = await client.complete(PROMPT, **options | {"seed": broken.seed})
    # Where the model's own end counts, the second may meet the question which tokens that are.
    assert broken.samples[0].num_resumes in ((2,) if "ignore_eos" in options else (1, 2))
    assert whole.samples[0].num_resumes == 0
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
            with proxies[0].recording() as seen:
                events = [event async for event in client.generate(PROMPT, **options)]
            whole = await client.complete(PROMPT, **options)
            assert whole.finish_reason is FinishReason.STOP_STRING
            assert any(isinstance(event, Chunk) and event.text and not event.token_ids for event in events)
            total = sum(segment.size for segment in seen if segment.way is Way.DOWN)
        resumes = 0
        for back in (2, 20, 60, 110, 160, 230, total // 2):
            for proxy in proxies:
                proxy.cut_after(max(total - back, 1), Way.DOWN)
            async with AsyncClient(both(proxies)) as client:
                broken = await client.complete(PROMPT, **options)
            assert_same(broken, whole)
            resumes += broken.samples[0].num_resumes
            for proxy in proxies:
                proxy.heal()
    assert resumes >= 6


def _within_a_token(texts: Sequence[str]) -> str:
    """What is first met inside of a token, and goes to its end; of those the last."""
    starts = list(accumulate((len(text) for text in texts), initial=0))
    text = "".join(texts)
    return next(
        stop
        for i, stop in reversed([(i, text[2:]) for i, text in enumerate(texts)])
        if stop and text.find(stop) == starts[i] + 2
    )


async def test_the_end_alone_is_lost(draft_address: str) -> None:
    """All tokens came, by the limit or with the model's own end, and nothing said so."""
    with two_ways(draft_address) as proxies:
        for options in (SAMPLED | {"max_new_tokens": 12}, LAWS["the model's own end"]):
            async with AsyncClient(proxies[0].address) as client:
                with proxies[0].recording() as seen:
                    whole = await client.complete(PROMPT, **options)
                total = sum(segment.size for segment in seen if segment.way is Way.DOWN)
            for proxy in proxies:
                proxy.cut_after(total - 30, Way.DOWN)
            async with AsyncClient(both(proxies)) as client:
                assert_same(await client.complete(PROMPT, **options), whole)
            for proxy in proxies:
                proxy.heal()


async def test_nothing_is_lost_with_the_end_of_the_call_itself() -> None:
    """The last sample has ended, and the status never came: there is nothing to go on with."""
    servicers = [Refusing(errors.unavailable("DRAINING", "gone"), at_the_end=True) for _ in range(2)]
    async with refusing(servicers[0]) as one, refusing(servicers[1]) as other, AsyncClient([one, other]) as client:
        events = [type(event) async for event in client.generate("x")]
    assert events == [Started, Finished]
    assert sum(servicer.calls for servicer in servicers) == 1


@pytest.mark.parametrize("ways", [1, 2])
async def test_with_every_service_gone_for_a_while_it_goes_on_when_one_is_back(draft_address: str, ways: int) -> None:
    """Also where there is but one address, and twice in one text."""
    with two_ways(draft_address) as proxies:
        used, tasks = proxies[:ways], set[asyncio.Task[None]]()

        async def come_back() -> None:
            await asyncio.sleep(1.0)  # some tries fail
            for proxy in used:
                proxy.open()

        def leave() -> None:
            for proxy in used:
                proxy.refuse()
                proxy.cut()
            tasks.add(asyncio.create_task(come_back()))

        options: Options = SAMPLED | {"max_new_tokens": 160}
        async with AsyncClient([proxy.address for proxy in used], timeout=90) as client:
            broken = await collect(client.generate(PROMPT, **options), at=[3, 12], then=leave)
            whole = await client.complete(PROMPT, **options)
        await asyncio.gather(*tasks)
    assert broken.samples[0].num_resumes >= 1
    assert_same(broken, whole)


async def test_with_every_service_gone_it_fails_after_its_patience_and_says_what_came(draft_address: str) -> None:
    with two_ways(draft_address) as proxies:
        seen: list[Chunk] = []

        async def read(client: AsyncClient) -> None:
            async for event in client.generate(PROMPT, **LONG):
                if isinstance(event, Chunk):
                    seen.append(event)
                    if len(seen) == 3:
                        for proxy in proxies:
                            proxy.close()

        async with AsyncClient(both(proxies), timeout=90, patience=1.0) as client:
            with pytest.raises(Unavailable) as caught:
                await read(client)
    error, tokens = caught.value, sum(len(chunk.token_ids) for chunk in seen)
    assert error.delivered_tokens == tokens > 0
    assert f"; {tokens} tokens were delivered" in str(error)
    assert set(error.tries) == set(both(proxies))
    assert min(error.tries.values()) >= 1


async def test_of_several_samples_none_is_begun_twice(draft_address: str) -> None:
    """It fails as with one address, once there is text."""
    with two_ways(draft_address) as proxies:

        def cut() -> None:
            for proxy in proxies:
                proxy.cut()

        async with AsyncClient(both(proxies)) as client:
            with pytest.raises(Unavailable):
                await collect(client.generate(PROMPT, **LONG | {"n": 3}), at=[2], then=cut)
            assert len((await client.complete(PROMPT, **SAMPLED | {"n": 3, "max_new_tokens": 4})).samples) == 3


async def test_without_retry_it_does_not_go_on(draft_address: str) -> None:
    with two_ways(draft_address) as proxies:

        def cut() -> None:
            for proxy in proxies:
                proxy.cut()

        async with AsyncClient(both(proxies), retry=False) as client:
            with pytest.raises(Unavailable):
                await collect(client.generate(PROMPT, **LONG), at=[2], then=cut)


async def test_a_time_limit_holds_over_all_parts(draft_address: str) -> None:
    with two_ways(draft_address) as proxies:

        def cut() -> None:
            time.sleep(0.5)
            for proxy in proxies:
                proxy.cut()

        async with AsyncClient(both(proxies)) as client:
            begun = time.monotonic()
            broken = await collect(client.generate(PROMPT, **LONG | {"time_limit": 1.0}), at=[2], then=cut)
            assert time.monotonic() - begun < 45
    assert broken.finish_reason in (FinishReason.TIME_LIMIT, FinishReason.LENGTH)
    assert broken.timings.total_us >= 500_000


# ------------------------------------------------------------------------------------------------- a service dies


def test_a_draft_service_killed_under_its_requests(demo_pair: Pair) -> None:
    """SIGKILL. Four requests run, two of them there, where rounds take so long that they have not ended by then; the
    other service has another drafter. Text is held wherever it may become a stop string, which it never does.
    """
    with ExitStack() as stack:
        way = stack.enter_context(Proxy(demo_pair.verifier.address))
        way.delay(0.02)
        victim = stack.enter_context(Cluster()).draft(way.address, flags="--drafter lookup")
        victim.wait_healthy()
        asked = [GREEDY, GREEDY, SAMPLED, SAMPLED]
        asked = [options | {"max_new_tokens": 160, "stop": [" \0", "e\0", "\n    \0"]} for options in asked]

        async def run() -> tuple[list[Completion], list[Completion]]:
            async with AsyncClient([victim.address, demo_pair.draft.address]) as client:
                chunks = [0] * len(asked)

                async def one(number: int) -> Completion:
                    taken: list[Event] = []
                    async for event in client.generate(PROMPT, **asked[number]):
                        taken.append(event)
                        chunks[number] += isinstance(event, Chunk)
                        if min(chunks) >= 3 and victim.returncode is None:
                            victim.process.send_signal(signal.SIGKILL)
                            victim.process.wait(60)
                    return Completion.of(taken)

                broken = await asyncio.gather(*(one(number) for number in range(len(asked))))
                return broken, [await client.complete(PROMPT, **options) for options in (GREEDY160, SAMPLED160)]

        broken, (greedy, sampled) = asyncio.run(run())
    assert victim.returncode == -signal.SIGKILL
    for completion, whole in zip(broken, (greedy, greedy, sampled, sampled), strict=True):
        assert_same(completion, whole)
    assert [completion.samples[0].num_resumes for completion in broken].count(1) == 2
    assert sum(completion.samples[0].num_resumes for completion in broken) == 2


GREEDY160: Options = {**GREEDY, "max_new_tokens": 160}
SAMPLED160: Options = {**SAMPLED, "max_new_tokens": 160}


def test_the_blocking_client_goes_on_too(draft_address: str) -> None:
    with two_ways(draft_address) as proxies, Client(",".join(both(proxies))) as client:
        text = ""
        for number, event in enumerate(client.generate(PROMPT, **SAMPLED)):
            text += event.text if isinstance(event, Chunk) else ""
            if number == 3:
                for proxy in proxies:
                    proxy.cut()
        assert text == client.complete(PROMPT, **SAMPLED).text


# ---------------------------------------------------------------------------------------------------- addresses


async def test_a_name_is_all_its_addresses_and_asked_again_when_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    known = ["10.0.0.1", "10.0.0.2"]
    asked: list[str] = []

    async def getaddrinfo(host: str, port: int, **_: Any) -> list[Any]:
        asked.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, port)) for ip in known]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo, raising=False)
    endpoints = Endpoints(["drafts:50051", "127.0.0.1:7"])
    first = [await endpoints.choose() for _ in range(6)]
    assert sorted(set(first)) == ["10.0.0.1:50051", "10.0.0.2:50051", "127.0.0.1:7"]
    assert asked == ["drafts"]
    known[1] = "10.0.0.3"
    endpoints.failed("10.0.0.1:50051")
    later = {await endpoints.choose() for _ in range(6)}
    assert asked == ["drafts", "drafts"]
    assert later == {"10.0.0.3:50051", "127.0.0.1:7"}, "what failed is passed over while there are others"
    endpoints.failed("10.0.0.3:50051")
    endpoints.failed("127.0.0.1:7")
    assert await endpoints.choose() == "10.0.0.1:50051", "what failed first"
    assert not endpoints.has_fresh()


async def test_a_service_of_both_families_is_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    async def getaddrinfo(host: str, port: int, **_: Any) -> list[Any]:
        six = [(socket.AF_INET6, socket.SOCK_STREAM, 6, "", (f"fd00::{i}", port, 0, 0)) for i in (1, 2)]
        return [*six, *((socket.AF_INET, socket.SOCK_STREAM, 6, "", (f"10.0.0.{i}", port)) for i in (1, 2))]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo, raising=False)
    assert await Endpoints(["drafts:50051"]).addresses() == ["[fd00::1]:50051", "[fd00::2]:50051"]


@pytest.mark.parametrize(
    ("given", "names"),
    [("a:1", ["a:1"]), ("a:1, b:2,a:1", ["a:1", "b:2"]), (["a:1", "b:2"], ["a:1", "b:2"])],
)
def test_addresses_may_be_a_list_or_have_commas_between(given: Any, names: list[str]) -> None:
    assert split(given) == names


def test_no_address_is_refused() -> None:
    with pytest.raises(ValueError, match="no address"):
        split(" , ")
