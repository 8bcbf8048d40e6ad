"""A draft service that dies or hangs under a request, or the way to it: the client goes on and nothing shows.

The services are real. Where it is the way that breaks, both addresses lead to one service, through a proxy each.
"""

import asyncio
import signal
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
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
    FinishReason,
    Options,
    Unavailable,
)
from tests.cluster import Cluster
from tests.proxy import Proxy, Way

PROMPT = "def area(radius):\n"
# By a γ that is the same each time, a text comes in the same bytes.
SAMPLED: Options = {"temperature": 1.0, "seed": 11, "max_new_tokens": 72, "ignore_eos": True, "gamma": 5}
GREEDY: Options = {"temperature": 0, "max_new_tokens": 72, "ignore_eos": True, "gamma": 5}
LONG: Options = {**SAMPLED, "max_new_tokens": 900, "gamma": 0}
"""It takes the pair seconds: whatever is done after a chunk is done in the middle of it."""
SILENCE_S = 2.0
LONG_S = 100.0


@contextmanager
def two_ways(target: str) -> Iterator[list[Proxy]]:
    with Proxy(target) as one, Proxy(target) as other:
        yield [one, other]


def both(proxies: Sequence[Proxy]) -> list[str]:
    return [proxy.address for proxy in proxies]


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


REQUESTS: dict[str, Options] = {
    "greedy": GREEDY | {"max_new_tokens": 120},
    "coupled": SAMPLED | {"max_new_tokens": 120},
    "penalties": SAMPLED | {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2},
    "text that is held": SAMPLED | {"stop": [" \0", "e\0", "\n    \0"]},
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


async def test_with_its_only_service_gone_for_a_while_it_goes_on_when_it_is_back(draft_address: str) -> None:
    """Twice in one text."""
    options: Options = SAMPLED | {"max_new_tokens": 160}
    with Proxy(draft_address) as proxy:
        tasks = set[asyncio.Task[None]]()

        async def come_back() -> None:
            await asyncio.sleep(1.0)  # some tries fail
            proxy.open()

        def leave(chunks: list[Chunk]) -> None:
            if len(chunks) in (3, 12):
                proxy.refuse()
                proxy.cut()
                tasks.add(asyncio.create_task(come_back()))

        async with AsyncClient(proxy.address, timeout=90) as client:
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


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_texts_under_way_and_new_ones_go_on_elsewhere(number: signal.Signals, demo_pair: Pair) -> None:
    """After SIGSTOP connections stay, and new ones are taken by the system. Nobody behind them says a word."""
    options: Options = {"temperature": 1.0, "seed": 11, "max_new_tokens": 160, "ignore_eos": True}
    counts = [0, 0]
    with Cluster() as cluster:
        victim = cluster.draft(demo_pair.verifier, flags="--drafter lookup")
        victim.wait_healthy()

        async def one(client: AsyncClient, index: int) -> Completion:
            def stop(chunks: list[Chunk]) -> None:
                counts[index] = len(chunks)
                if min(counts) == 3:
                    victim.send(number)

            return await collect(client.generate(PROMPT, **options), stop)

        async def run() -> tuple[Sequence[Completion], Sequence[Completion]]:
            addresses = [victim.address, demo_pair.draft.address]
            async with AsyncClient(addresses, timeout=LONG_S, silence=SILENCE_S) as client:
                broken = await asyncio.gather(one(client, 0), one(client, 1))
            async with AsyncClient(addresses, timeout=LONG_S, silence=SILENCE_S) as client:
                return broken, [await client.complete(PROMPT, **options) for _ in range(2)]

        try:
            broken, new = asyncio.run(run())
        finally:
            victim.send(signal.SIGCONT)
    with Client(demo_pair.draft.address) as client:
        whole = client.complete(PROMPT, **options)
    assert sum(map(resumes, broken)) >= 1
    for completion in (*broken, *new):
        assert (completion.text, completion.token_ids) == (whole.text, whole.token_ids)
