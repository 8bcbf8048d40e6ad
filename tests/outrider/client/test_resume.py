"""A draft service, or the connection to it, fails under a request: the client resumes, and the text is the same.

The services are real. Where the connection fails, both addresses lead to one service, through a proxy each. Held text
and log-probabilities: `tests/exactness/test_draft_failover.py`.
"""

import asyncio
import signal
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
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
    PositionLogprobs,
    PromptLogprobs,
    Queued,
    SpeculationPolicy,
    Started,
    TokenLogprob,
    Unavailable,
)
from outrider.client.audio import Samples
from outrider.client.errors import typed
from outrider.client.request import build
from outrider.client.resume import Generation
from outrider.rpc.errors import draining
from protos.outrider.v1 import draft_service_pb2 as pb
from protos.outrider.v1 import model_pb2, sampling_pb2
from tests.cluster import Cluster, wait_healthy, wait_until
from tests.proxy import Proxy, Way
from tests.slow_steps import STEP_SECONDS

PROMPT = "def area(radius):\n"
# A fixed γ, with a chunk for each round, gives a text the same bytes each time.
SAMPLED: Options = {
    "temperature": 1.0, "seed": 11, "max_new_tokens": 72, "ignore_eos": True, "gamma": 5, "joined_responses": False
}  # fmt: skip
LONG: Options = {**SAMPLED, "max_new_tokens": 900, "gamma": 0}
"""A text that takes the pair seconds: a fault after a chunk falls in the middle of it."""
SILENCE_S = 1.0
TIMEOUT_S = 100.0


@contextmanager
def two_proxies(target: str) -> Iterator[list[Proxy]]:
    with Proxy(target) as one, Proxy(target) as other:
        yield [one, other]


async def measured(proxy: Proxy, options: Options) -> tuple[Completion, int]:
    """The text through this proxy, and the bytes that came to the client."""
    async with AsyncClient(proxy.address) as client:
        with proxy.recording() as seen:
            completion = await client.complete(PROMPT, **options)
    return completion, sum(len(segment.data) for segment in seen if segment.way is Way.DOWN)


async def cut_after(count: int, proxies: Sequence[Proxy], options: Options) -> Completion:
    """The text where each proxy cuts its connection once, after so many bytes to the client."""
    for proxy in proxies:
        proxy.cut_after(count, Way.DOWN)
    async with AsyncClient([proxy.address for proxy in proxies]) as client:
        completion = await client.complete(PROMPT, **options)
    for proxy in proxies:
        proxy.heal()
    return completion


async def collect(events: AsyncGenerator[Event, None], at_chunk: Callable[[list[Chunk]], object]) -> Completion:
    """The completion of all events; `at_chunk` is called at each chunk with those so far."""
    taken: list[Event] = []
    async for event in events:
        taken.append(event)
        if isinstance(event, Chunk):
            at_chunk([each for each in taken if isinstance(each, Chunk)])
    return Completion.of(taken)


def resumes(completion: Completion) -> int:
    return completion.samples[0].num_resumes


def assert_same(one: Completion, other: Completion) -> None:
    first, second = one.samples[0], other.samples[0]
    for name in ("text", "token_ids", "finish_reason", "stop", "stop_token_id"):
        assert getattr(first, name) == getattr(second, name), name
    assert one.usage.completion_tokens == other.usage.completion_tokens
    assert one.usage.prompt_tokens == other.usage.prompt_tokens


@pytest.mark.parametrize(
    "options",
    [
        SAMPLED | {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2, "max_new_tokens": 200},
        {"temperature": 1.0, "seed": 3, "max_new_tokens": 200, "joined_responses": False},
    ],
    ids=["penalties", "the model's own end"],
)
async def test_a_text_cut_twice_is_the_same(draft_address: str, options: Options) -> None:
    """Cut at 45 % of its bytes, and again after as many through the other proxy.

    By bytes: a chunk that has been sent cannot be cut off, and a slow client may find all of them sent. Late enough
    for a response: before the first a call starts anew, which is no resume.
    """
    with two_proxies(draft_address) as proxies:
        whole, total = await measured(proxies[0], options)
        for _ in range(3):  # on a busy machine chunks hold more tokens, and the second cut may come too late
            broken = await cut_after(9 * total // 20, proxies, options)
            assert_same(broken, whole)
            if resumes(broken) == 2:
                break
    # Where the model's own end shortens the text, the second cut may fall into the request for the model's description.
    assert resumes(broken) in ((2,) if "ignore_eos" in options else (1, 2))
    assert resumes(whole) == 0


async def test_a_cut_at_any_byte_neither_loses_nor_repeats(draft_address: str) -> None:
    """Each connection dies at some byte, also inside the last messages. The text ends within a token, by a stop string.

    The part of that token that was delivered before the end got lost must not be delivered twice.
    """
    options: Options = {**SAMPLED, "max_new_tokens": 40}
    with two_proxies(draft_address) as proxies:
        async with AsyncClient(proxies[0].address) as client:
            texts = (await client.complete(PROMPT, **options | {"report_rounds": True})).samples[0].token_texts
            options["stop"] = [_within_a_token(texts)]
            events = [event async for event in client.generate(PROMPT, **options)]
        assert any(isinstance(event, Chunk) and event.text and not event.token_ids for event in events)
        whole, total = await measured(proxies[0], options)
        assert whole.finish_reason is FinishReason.STOP_STRING
        found = [
            await cut_after(max(total - back, 1), proxies, options)
            for back in (2, 20, 40, 60, 85, 110, 130, 160, 195, 230, 270, total // 2)
        ]
    for broken in found:
        assert_same(broken, whole)
    # The last 39 bytes belong to no message, and each of gRPC's pings makes a connection 17 bytes longer or shorter.
    assert sum(map(resumes, found)) >= 6


def _within_a_token(texts: Sequence[str]) -> str:
    """The end of a token, from its third character on, that the text has nowhere before; of several the last."""
    starts = list(accumulate((len(text) for text in texts), initial=0))
    text = "".join(texts)
    return next(
        stop
        for i, stop in reversed([(i, text[2:]) for i, text in enumerate(texts)])
        if stop and text.find(stop) == starts[i] + 2
    )


async def test_a_text_resumes_when_its_only_service_is_back(draft_address: str) -> None:
    """Twice in one text; by bytes: a slow client may find all chunks sent, and no message may hold most of them."""
    options: Options = SAMPLED | {"max_new_tokens": 600, "joined_responses": False}
    with Proxy(draft_address) as proxy:
        whole, total = await measured(proxy, options)
        count = total // 6  # on a busy machine chunks join, and the text has fewer bytes
        async with AsyncClient(proxy.address, timeout=90) as client:
            proxy.close_after(count, Way.DOWN)
            text = asyncio.create_task(client.complete(PROMPT, **options))
            for is_first in (True, False):
                await asyncio.to_thread(wait_until, lambda: not proxy.is_open)
                await asyncio.sleep(0.5)  # some tries fail
                if is_first:
                    proxy.close_after(count, Way.DOWN)
                proxy.open()
            broken = await text
    assert resumes(broken) == 2
    assert_same(broken, whole)


async def test_without_any_service_a_call_fails_after_its_retry_timeout_and_counts_its_tokens(
    draft_address: str,
) -> None:
    seen: list[Chunk] = []
    with two_proxies(draft_address) as proxies:
        addresses = [proxy.address for proxy in proxies]

        def close(chunks: list[Chunk]) -> None:
            seen[:] = chunks
            if len(chunks) == 3:
                for proxy in proxies:
                    proxy.close()

        async with AsyncClient(addresses, timeout=90, retry_timeout=1.0) as client:
            with pytest.raises(Unavailable) as caught:
                await collect(client.generate(PROMPT, **LONG), close)
    error, tokens = caught.value, sum(len(chunk.token_ids) for chunk in seen)
    assert error.delivered_tokens == tokens > 0
    assert f"; {tokens} tokens were delivered" in str(error)
    assert set(error.tries) == set(addresses)
    assert min(error.tries.values()) >= 1


@pytest.mark.parametrize("number", [signal.SIGSTOP, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_old_and_new_texts_continue_at_another_service(number: signal.Signals, demo_pair: Pair, tmp_path: Path) -> None:
    """After SIGSTOP connections stay, and the system accepts new ones, without an answer on any."""
    options: Options = {"temperature": 1.0, "seed": 11, "max_new_tokens": 60, "ignore_eos": True, "gamma": 2}
    counts = [0, 0]
    slow = tmp_path / "step-seconds"  # so that the signal comes in the middle of a text
    slow.write_text("0.1")
    with Cluster() as cluster:
        verifier = cluster.verifier(fault="slow_steps", env={STEP_SECONDS: str(slow)})
        victim = cluster.draft(verifier, flags="--drafter lookup")
        wait_healthy(verifier, victim)

        async def one(client: AsyncClient, index: int) -> Completion:
            def stop(chunks: list[Chunk]) -> None:
                counts[index] = len(chunks)
                if min(counts) == 3:
                    victim.send(number)

            return await collect(client.generate(PROMPT, **options), stop)

        async def run() -> tuple[Sequence[Completion], Sequence[Completion]]:
            addresses = [victim.address, demo_pair.draft.address]
            async with AsyncClient(addresses, timeout=TIMEOUT_S, silence=SILENCE_S) as client:
                broken = await asyncio.gather(one(client, 0), one(client, 1))
            async with AsyncClient(addresses, timeout=TIMEOUT_S, silence=SILENCE_S) as client:
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


# ------------------------------------------------------------------------------------------------- encoder–decoder


STARTED = Started.of(pb.GenerateStarted(request_id="r", prompt_token_ids=[90, 91], seed=7, max_new_tokens=9))
CHUNK = Chunk.of(pb.GenerateChunk(text="ab", token_ids=[1, 2, 3], held_tokens=1))
ENCODER = model_pb2.ModelInfo(encoder=model_pb2.EncoderInfo(kind=model_pb2.ENCODER_KIND_TEXT))


def interrupted(request: pb.GenerateRequest) -> Generation:
    generation = Generation(request, None, None)
    assert not generation.needs_model, "a request that has not begun is sent as it is"
    assert generation.request() == request
    generation.take(STARTED)
    assert not generation.needs_model, "nothing was delivered"
    assert generation.request().WhichOneof("prompt") == request.WhichOneof("prompt")
    generation.take(CHUNK)
    return generation


@pytest.mark.parametrize(
    "options",
    [
        {"audio": Samples(np.arange(9, dtype="<i2"), 16_000), "language": "en", "timestamps": True},
        {"features": np.ones((2, 3)), "decoder_prompt_token_ids": [90, 91]},
    ],
    ids=["audio", "features"],
)
def test_speech_is_sent_again_with_the_prompt_of_its_decoder(options: Any) -> None:
    request = build(None, {**options, "ignore_eos": True})
    generation = interrupted(request)
    assert not generation.needs_model
    expected = pb.GenerateRequest()
    expected.CopyFrom(request)
    expected.ClearField("transcription")
    expected.decoder_prompt_token_ids[:] = [90, 91]
    assert_continues(generation, expected)


def test_a_text_is_sent_again_to_an_encoder_and_as_tokens_to_any_other_model() -> None:
    for target in (ENCODER, model_pb2.ModelInfo()):
        generation = interrupted(pb.GenerateRequest(text="a text"))
        needs = [generation.needs_model]
        generation.learn(target)
        needs.append(generation.needs_model)
        assert needs == [True, False]
        if target is ENCODER:
            expected = pb.GenerateRequest(
                text="a text", decoder_prompt_token_ids=[90, 91], required_features=["encoder"]
            )
        else:
            expected = pb.GenerateRequest(token_ids={"ids": [90, 91]})
        assert_continues(generation, expected)


def test_a_continued_request_keeps_the_policy_that_its_start_named() -> None:
    """With the seed, which it did not give at first, the service would choose another."""
    generation = Generation(pb.GenerateRequest(text="a text"), None, None)
    generation.take(replace(STARTED, policy=SpeculationPolicy.ADAPTIVE))
    assert generation.request().speculation.policy == pb.SPECULATION_POLICY_ADAPTIVE


def test_a_continued_request_needs_the_weights_of_its_start() -> None:
    generation = Generation(pb.GenerateRequest(text="a text"), None, None)
    generation.take(replace(STARTED, weights_fingerprint="f" * 64))
    assert generation.request().weights_fingerprint == "f" * 64


def test_a_continued_request_has_the_length_of_its_start() -> None:
    """Another service may have another context."""
    generation = Generation(build("a text", {"fill_context": True}), None, None)
    assert generation.request().fill_context
    generation.take(STARTED)
    request = generation.request()
    assert (request.fill_context, request.max_new_tokens, list(request.required_features)) == (False, 9, [])


def test_a_continued_conversation_needs_no_feature_of_its_template() -> None:
    """Its tokens take its place: a service without the feature may continue it."""
    messages = [{"role": "user", "content": "x", "name": "Ada"}]
    generation = Generation(build(messages, {"template_arguments": {"a": 1}}), None, None)
    assert set(generation.request().required_features) == {"message_names", "template_arguments"}
    generation.take(replace(STARTED, prompt_token_ids=(7, 8)))
    request = generation.request()
    assert (list(request.token_ids.ids), list(request.required_features)) == ([7, 8], [])


def test_only_what_is_delivered_is_progress() -> None:
    """A service that queues each attempt, or sends what was delivered already, and then fails is left in time."""
    generation = Generation(pb.GenerateRequest(text="a text"), None, None)
    scored = PromptLogprobs(1, (PositionLogprobs(TokenLogprob(5, -1.0, -1.0), ()),))
    progress = []
    for event in (Queued(3), scored, Queued(2), scored, CHUNK):
        generation.failed(typed(draining()))
        generation.take(event)
        progress.append(not generation.failures)
    assert progress == [False, True, False, False, True]


@pytest.mark.parametrize("samples", [1, 2])
def test_the_times_of_a_continued_text_are_of_this_clock(samples: int) -> None:
    """Those of its last service begin later, at the request that continues the text, and lack the way to the client."""
    began = time.monotonic()
    generation = Generation(pb.GenerateRequest(text="a text", n=samples), None, None)
    generation.request()
    generation.take(STARTED)
    generation.request()
    generation.take(STARTED)
    for index in range(samples):
        time.sleep(0.01)
        generation.take(replace(CHUNK, index=index))
        timings = {"time_to_first_token_us": 1, "total_us": 2}
        [*_, end] = generation.take(Finished.of(pb.GenerateFinished(index=index, timings=timings)))
        assert isinstance(end, Finished)
        passed = 1e6 * (time.monotonic() - began)
        first, total = end.timings.time_to_first_token_us, end.timings.total_us
        assert 10_000 * (index + 1) <= first <= total <= passed + 1


def assert_continues(generation: Generation, expected: pb.GenerateRequest) -> None:
    """With all that a continued request has; `expected` is the rest."""
    expected.MergeFrom(pb.GenerateRequest(request_id="r", committed_token_ids=[1, 2, 3], held_tokens=1))
    expected.max_new_tokens = 9
    expected.sampling.seed = 7
    expected.sampling.rule = sampling_pb2.ACCEPTANCE_RULE_UNSPECIFIED
    expected.required_features.append("held_tokens")
    assert generation.request() == expected
