"""The client library: what it sends, what it reads, when it tries again, and how its examples run on a real pair."""

import asyncio
import doctest
import json
import math
import time
from collections.abc import Iterator
from dataclasses import fields
from typing import Any, Unpack

import grpc
import pytest

import outrider.client
from outrider.cli.processes import ServiceProcess
from outrider.client import (
    AcceptanceRule,
    AsyncClient,
    Chunk,
    Client,
    DeadlineExceeded,
    FailedPrecondition,
    Finished,
    FinishReason,
    Internal,
    InvalidRequest,
    Message,
    Options,
    OutriderError,
    Overloaded,
    PairMismatch,
    Round,
    Started,
    Statistics,
    Timings,
    TokenLogprob,
    TokenOrigin,
    Unavailable,
    Usage,
    asynchronous,
    blocking,
)
from outrider.client.events import read
from outrider.client.request import build
from outrider.client.results import Collector
from outrider.rpc import errors
from outrider.rpc.errors import RequestError
from protos.outrider.v1 import draft_service_pb2 as pb
from protos.outrider.v1 import sampling_pb2
from tests.outrider.refusing import Refusing, refusing

PROMPT = "def add(a, b):\n"


def greedy(**more: Unpack[Options]) -> Options:
    """24 tokens of the most probable text, and what else is asked."""
    return {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True, **more}


# ------------------------------------------------------------------------------------------------- what it sends

EVERY_OPTION: Options = {
    "max_new_tokens": 9,
    "min_new_tokens": 2,
    "n": 3,
    "time_limit": 1.5,
    "temperature": 0.5,
    "top_k": 20,
    "top_p": 0.25,
    "min_p": 0.125,
    "seed": 2**64 - 1,
    "repetition_penalty": 1.5,
    "presence_penalty": -1.5,
    "frequency_penalty": 2.5,
    "logit_bias": {7: -4.0},
    "banned_token_ids": [5, 6],
    "rule": "block",
    "lenience": 0.75,
    "sigmoid_scales": (-1.0, 1.0),
    "stop": ["\n\n", "END"],
    "stop_token_ids": [3],
    "ignore_eos": True,
    "gamma": 0,
    "report_rounds": True,
    "logprobs": 0,
    "keep_special_tokens": True,
    "request_id": "me",
    "required_features": ["tree"],
    "committed_token_ids": [8, 9],
    "weights_fingerprint": "ab",
}


def test_every_option_reaches_the_wire() -> None:
    assert EVERY_OPTION.keys() == Options.__annotations__.keys()
    request = build("x", EVERY_OPTION)
    assert request == pb.GenerateRequest(
        text="x",
        request_id="me",
        committed_token_ids=[8, 9],
        sampling=sampling_pb2.SamplingParams(
            temperature=0.5,
            top_k=20,
            top_p=0.25,
            min_p=0.125,
            seed=2**64 - 1,
            repetition_penalty=1.5,
            presence_penalty=-1.5,
            frequency_penalty=2.5,
            logit_bias=[sampling_pb2.LogitBias(token_id=7, bias=-4.0)],
            banned_token_ids=[5, 6],
            rule=sampling_pb2.ACCEPTANCE_RULE_BLOCK,
            lenience=0.75,
            sigmoid=sampling_pb2.SigmoidScales(alpha=-1.0, beta=1.0),
        ),
        max_new_tokens=9,
        min_new_tokens=2,
        stop_token_ids=[3],
        stop=["\n\n", "END"],
        ignore_eos=True,
        n=3,
        logprobs=sampling_pb2.LogprobsParams(top_n=0),
        time_limit={"seconds": 1, "nanos": 500_000_000},
        speculation=pb.SpeculationParams(gamma=0, report_rounds=True),
        keep_special_tokens=True,
        required_features=["tree"],
        weights_fingerprint="ab",
    )


def test_every_field_of_a_request_can_be_set() -> None:
    request = build("x", EVERY_OPTION)
    unset = {field.name for field in request.DESCRIPTOR.fields} - {field.name for field, _ in request.ListFields()}
    assert unset == {"token_ids", "chat"}
    assert len(request.sampling.ListFields()) == len(request.sampling.DESCRIPTOR.fields)
    assert len(request.speculation.ListFields()) == len(request.speculation.DESCRIPTOR.fields)


def test_what_is_left_out_stays_unset() -> None:
    assert build("x", {}) == pb.GenerateRequest(text="x")
    assert build("x", {"seed": None, "stop": None}) == pb.GenerateRequest(text="x")


def test_a_prompt_is_text_or_tokens_or_messages() -> None:
    assert build("", {}).WhichOneof("prompt") == "text"
    assert list(build([1, 2], {}).token_ids.ids) == [1, 2]
    assert list(build(range(3), {}).token_ids.ids) == [0, 1, 2]
    assert build([], {}).WhichOneof("prompt") == "token_ids"
    chat = [pb.ChatMessage(role="system", content="s"), pb.ChatMessage(role="user", content="u")]
    assert list(build([Message("system", "s"), Message("user", "u")], {}).chat.messages) == chat
    mixed: list[Message | dict[str, str]] = [{"role": "system", "content": "s"}, Message("user", "u")]
    assert list(build(mixed, {}).chat.messages) == chat


@pytest.mark.parametrize(
    ("field", "prompt", "options"),
    [
        ("prompt", [1, -1], {}),
        ("prompt", [1, 2**32], {}),
        ("prompt", [1, "two"], {}),
        ("prompt", 7, {}),
        ("prompt", [{"role": "user"}], {}),
        ("prompt", "half a \ud800 character", {}),
        ("max_new_tokens", "x", {"max_new_tokens": -1}),
        ("max_new_tokens", "x", {"max_new_tokens": 1.5}),
        ("seed", "x", {"seed": 2**64}),
        ("temperature", "x", {"temperature": "hot"}),
        ("rule", "x", {"rule": "best"}),
        ("stop_token_ids", "x", {"stop_token_ids": [-1]}),
        ("time_limit", "x", {"time_limit": math.inf}),
        ("sigmoid_scales", "x", {"sigmoid_scales": 1.0}),
    ],
)
def test_what_the_wire_cannot_carry_names_its_field(field: str, prompt: Any, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        build(prompt, options)
    assert caught.value.field == field
    assert caught.value.message.startswith(f"{field}: ")


def test_an_option_that_does_not_exist_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="max_tokens"):
        build("x", {"max_tokens": 3})


# ------------------------------------------------------------------------------------------------- what it reads


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (Started, pb.GenerateStarted),
        (Chunk, pb.GenerateChunk),
        (Finished, pb.GenerateFinished),
        (Round, pb.RoundReport),
        (Usage, pb.Usage),
        (Statistics, pb.SpeculationStatistics),
        (Timings, pb.GenerateTimings),
        (TokenLogprob, sampling_pb2.TokenLogprob),
    ],
)
def test_events_have_the_fields_of_their_messages(ours: Any, theirs: Any) -> None:
    assert [field.name for field in fields(ours)] == [field.name for field in theirs.DESCRIPTOR.fields]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (FinishReason, sampling_pb2.FinishReason),
        (AcceptanceRule, sampling_pb2.AcceptanceRule),
        (TokenOrigin, pb.TokenOrigin),
    ],
)
def test_enums_have_the_names_of_the_contract(ours: Any, theirs: Any) -> None:
    prefix = theirs.DESCRIPTOR.values[0].name.removesuffix("UNSPECIFIED")
    for value in theirs.DESCRIPTOR.values:
        assert ours.of(value.number) == value.name.removeprefix(prefix).lower()
        assert ours.of(value.number).number == value.number
    assert len(ours) == len(theirs.DESCRIPTOR.values)
    assert ours.of(99) is ours.UNSPECIFIED


def test_numbers_read_as_they_were_written() -> None:
    message = pb.GenerateResponse(
        finished=pb.GenerateFinished(statistics={"alpha": 0.7, "num_draft_tokens_per_pos": [3, 2]})
    )
    event = read(message)
    assert isinstance(event, Finished)
    assert event.statistics.alpha == 0.7
    assert event.statistics.num_draft_tokens_per_pos == (3, 2)
    excluded = TokenLogprob.of(sampling_pb2.TokenLogprob(raw=-0.1, adjusted=-math.inf))
    assert (excluded.raw, excluded.adjusted) == (-0.1, -math.inf)


def test_an_event_of_a_newer_server_is_left_out() -> None:
    assert read(pb.GenerateResponse()) is None


def test_a_generation_that_is_not_whole_is_no_completion() -> None:
    collector = Collector()
    with pytest.raises(ValueError, match="not whole"):
        collector.completion()
    for response in (
        pb.GenerateResponse(started=pb.GenerateStarted()),
        pb.GenerateResponse(chunk=pb.GenerateChunk(index=1, text="x")),
        pb.GenerateResponse(finished=pb.GenerateFinished(index=0)),
    ):
        event = read(response)
        assert event is not None
        collector.add(event)
    with pytest.raises(ValueError, match=r"open \[1\]"):
        collector.completion()


# ------------------------------------------------------------------------------------- what it raises, and tries again

RAISED: list[tuple[RequestError, type[OutriderError]]] = [
    (errors.invalid_field("n", "is 9, at most 8", given=9), InvalidRequest),
    (errors.failed_precondition("UNKNOWN_FEATURE", "no tree"), FailedPrecondition),
    (errors.failed_precondition("PAIR_MISMATCH", "other vocabulary"), PairMismatch),
    (errors.internal("BAD_LOGITS", "NaN"), Internal),
    (errors.idle("silent"), DeadlineExceeded),
    (RequestError(grpc.StatusCode.UNIMPLEMENTED, "UNSPECIFIED", "what?"), OutriderError),
]


@pytest.mark.parametrize(("error", "kind"), RAISED, ids=[kind.__name__ for _, kind in RAISED])
async def test_an_error_comes_by_type_and_at_once(error: RequestError, kind: type[OutriderError]) -> None:
    servicer = Refusing(error)
    async with refusing(servicer) as address, AsyncClient(address) as client:
        with pytest.raises(OutriderError) as caught:
            await client.complete("x")
    assert type(caught.value) is kind
    assert (caught.value.code, caught.value.reason) == (error.code, error.reason)
    assert caught.value.metadata == error.metadata
    assert caught.value.field == error.metadata.get("field")
    assert str(caught.value) == f"{error.code.name}: {error.message}"
    assert servicer.calls == 1


@pytest.mark.parametrize("error", [errors.overloaded("full"), errors.draining()], ids=["overloaded", "draining"])
async def test_a_refusal_is_tried_again_until_it_is_none(error: RequestError) -> None:
    servicer = Refusing(error, times=2)
    async with refusing(servicer) as address, AsyncClient(address) as client:
        completion = await client.complete("x")
    assert completion.started.request_id == "call 3"
    assert servicer.calls == 3


@pytest.mark.parametrize(("error", "kind"), [(errors.overloaded("full"), Overloaded), (errors.draining(), Unavailable)])
async def test_nothing_is_tried_again_after_the_first_response(error: RequestError, kind: type[OutriderError]) -> None:
    servicer = Refusing(error, late=True)
    async with refusing(servicer) as address, AsyncClient(address) as client:
        with pytest.raises(kind):
            await client.complete("x")
    assert servicer.calls == 1


async def test_no_retry_means_no_retry() -> None:
    servicer = Refusing(errors.draining())
    async with refusing(servicer) as address, AsyncClient(address, retry=False) as client:
        with pytest.raises(Unavailable) as caught:
            await client.complete("x")
    assert caught.value.reason == "DRAINING"
    assert servicer.calls == 1


async def test_retries_end_with_the_deadline() -> None:
    servicer = Refusing(errors.overloaded("full"))
    async with refusing(servicer) as address, AsyncClient(address, timeout=0.5) as client:
        begin = time.monotonic()
        with pytest.raises((DeadlineExceeded, Overloaded)):
            await client.complete("x")
        assert time.monotonic() - begin < 1.5
    assert 1 <= servicer.calls <= 4


async def test_nobody_there_is_unavailable() -> None:
    async with AsyncClient("127.0.0.1:1", retry=False) as client:
        with pytest.raises(Unavailable, match="refused"):
            await client.get_model()


# ------------------------------------------------------------------------------------------------- on a real pair


@pytest.mark.parametrize("module", [outrider.client, asynchronous, blocking], ids=lambda module: module.__name__)
def test_examples_run(module: Any, draft_address: str) -> None:
    examples = doctest.DocTestFinder(recurse=True).find(module, extraglobs={"address": draft_address})
    results = [doctest.DocTestRunner().run(example) for example in examples if example.examples]
    assert results
    assert all(result.failed == 0 for result in results)


@pytest.fixture
def client(draft_address: str) -> Iterator[Client]:
    """A blocking client of the real pair."""
    with Client(draft_address, timeout=60) as made:
        yield made


async def test_events_come_in_order_and_make_up_the_completion(draft_address: str) -> None:
    async with AsyncClient(draft_address) as client:
        events = [event async for event in client.generate(PROMPT, **greedy())]
        completion = await client.complete(PROMPT, **greedy())
    assert isinstance(events[0], Started)
    assert isinstance(events[-1], Finished)
    chunks = [event for event in events[1:-1] if isinstance(event, Chunk)]
    assert len(chunks) == len(events) - 2
    assert completion.text == "".join(chunk.text for chunk in chunks)
    assert completion.token_ids == tuple(token for chunk in chunks for token in chunk.token_ids)
    assert len(completion.token_ids) == len(completion.samples[0].origins) == completion.usage.completion_tokens == 24
    assert completion.finish_reason is FinishReason.LENGTH
    assert completion.usage.prompt_tokens == len(completion.started.prompt_token_ids)


async def test_text_tokens_and_seed_say_the_same_prompt(draft_address: str) -> None:
    async with AsyncClient(draft_address) as client:
        by_text = await client.complete(PROMPT, **greedy())
        by_tokens = await client.complete(by_text.started.prompt_token_ids, **greedy())
        sampled = await client.complete(PROMPT, seed=7, max_new_tokens=12)
        again = await client.complete(PROMPT, seed=7, max_new_tokens=12)
    assert by_tokens.token_ids == by_text.token_ids
    assert sampled.seed == 7
    assert again.token_ids == sampled.token_ids


async def test_many_calls_share_one_client(draft_address: str) -> None:
    async with AsyncClient(draft_address) as client:
        alone = await client.complete(PROMPT, **greedy())
        together = await asyncio.gather(*(client.complete(PROMPT, **greedy()) for _ in range(4)))
    assert [completion.token_ids for completion in together] == [alone.token_ids] * 4


async def _how_it_ended(process: ServiceProcess, request_id: str) -> str:
    """The status in the service's log line of a request; waits for it."""
    async with asyncio.timeout(10):
        while True:
            for line in process.log_lines():
                if request_id in line and "status" in (entry := json.loads(line)):
                    return str(entry["status"])
            await asyncio.sleep(0.05)


async def test_leaving_the_iterator_cancels_the_call(draft_process: ServiceProcess) -> None:
    async with AsyncClient(draft_process.address) as client:
        events = client.generate(PROMPT, request_id="left early", max_new_tokens=400, ignore_eos=True)
        async for event in events:
            if isinstance(event, Chunk):
                break
        await events.aclose()
        assert await _how_it_ended(draft_process, "left early") == "CANCELLED"
        assert (await client.complete(PROMPT, **greedy())).finish_reason is FinishReason.LENGTH


async def test_cancelling_the_task_cancels_the_call(draft_process: ServiceProcess) -> None:
    async with AsyncClient(draft_process.address) as client:
        task = asyncio.create_task(client.complete(PROMPT, request_id="given up", max_new_tokens=400, ignore_eos=True))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await _how_it_ended(draft_process, "given up") == "CANCELLED"


async def test_a_deadline_is_an_error_and_says_its_length(draft_address: str) -> None:
    async with AsyncClient(draft_address) as client:
        with pytest.raises(DeadlineExceeded, match=r"timeout of 0\.05 s"):
            await client.complete(PROMPT, timeout=0.05, max_new_tokens=400, ignore_eos=True)


def test_samples_are_told_apart(client: Client) -> None:
    completion = client.complete(PROMPT, n=3, seed=1, max_new_tokens=16, ignore_eos=True)
    assert [sample.index for sample in completion.samples] == [0, 1, 2]
    assert len({sample.token_ids for sample in completion.samples}) == 3
    assert completion.text == completion.samples[0].text


def test_rounds_and_logprobs_come_where_asked_for(client: Client) -> None:
    plain = client.complete(PROMPT, **greedy())
    assert not plain.samples[0].rounds
    assert not plain.samples[0].token_texts
    assert not plain.logprobs
    full = client.complete(PROMPT, **greedy(report_rounds=True, logprobs=2, gamma=3))
    sample = full.samples[0]
    assert full.token_ids == plain.token_ids
    assert len(sample.token_texts) == len(sample.logprobs) == 24
    assert "".join(sample.token_texts) == sample.text
    assert sum(report.accepted for report in sample.rounds) >= full.statistics.num_accepted_tokens
    for entry, token_id in zip(sample.logprobs, sample.token_ids, strict=True):
        assert entry.token.token_id == token_id == entry.top[0].token_id
        assert len(entry.top) == 2


def test_the_target_alone_writes_the_same(client: Client) -> None:
    pair, alone = client.complete(PROMPT, **greedy()), client.complete(PROMPT, **greedy(gamma=0))
    assert alone.token_ids == pair.token_ids
    assert alone.statistics.num_draft_tokens == 0
    assert set(alone.samples[0].origins) == {TokenOrigin.TARGET}
    assert pair.statistics.num_rounds < alone.statistics.num_rounds


async def test_a_plain_loop_streams_and_may_be_left(client: Client, draft_process: ServiceProcess) -> None:
    events = client.generate(PROMPT, request_id="left plainly", max_new_tokens=400, ignore_eos=True)
    assert isinstance(next(events), Started)
    assert isinstance(next(events), Chunk)
    events.close()
    assert await _how_it_ended(draft_process, "left plainly") == "CANCELLED"
    assert client.complete(PROMPT, **greedy()).finish_reason is FinishReason.LENGTH


def test_a_pair_says_what_it_is(client: Client) -> None:
    models = client.get_model()
    assert models.model.vocabulary_fingerprint == models.target.vocabulary_fingerprint
    assert models.model.weights_fingerprint != models.target.weights_fingerprint
    assert models.model.limits.max_gamma > 0


def test_a_closed_client_says_so(draft_address: str) -> None:
    client = Client(draft_address)
    client.close()
    client.close()
    with pytest.raises(RuntimeError, match="closed"):
        client.get_model()


@pytest.mark.parametrize(
    ("options", "field"),
    [({"top_p": 0.0}, "top_p"), ({"max_new_tokens": 10**6}, "max_new_tokens"), ({"gamma": 4_000}, "gamma")],
)
def test_bad_input_names_the_field(client: Client, options: Options, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        client.complete(PROMPT, **options)
    assert caught.value.field is not None
    assert caught.value.field.endswith(field)
