"""The client library at work: where its calls go, when it tries again, and how its examples run on a real pair."""

import asyncio
import doctest
import json
import re
import socket
from collections.abc import Iterator
from contextlib import AsyncExitStack
from types import SimpleNamespace
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
    InvalidRequest,
    Options,
    OutriderError,
    Overloaded,
    PairMismatch,
    Started,
    Unavailable,
    resume,
)
from outrider.client import (
    client as client_module,
)
from outrider.client.endpoints import Endpoints, split
from outrider.rpc import errors
from outrider.rpc.errors import RequestError
from tests.outrider.client.refusing import Refusing, refusing

PROMPT = "def add(a, b):\n"
LONG: Options = {"max_new_tokens": 900, "ignore_eos": True, "gamma": 0}
"""A text that takes the pair seconds, so that a cancel falls in the middle of it."""


def greedy(**more: Unpack[Options]) -> Options:
    """24 tokens of the most probable text, and what else is asked."""
    return {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True, **more}


# ------------------------------------------------------------------------------------- what it raises, and tries again


async def failure(*servicers: Refusing, options: Options | None = None, **how: Any) -> tuple[OutriderError, list[str]]:
    """The error of a call to draft services in trouble, and their addresses."""
    async with AsyncExitStack() as stack:
        addresses = [await stack.enter_async_context(refusing(servicer)) for servicer in servicers]
        client = await stack.enter_async_context(AsyncClient(addresses, **how))
        with pytest.raises(OutriderError) as caught:
            await client.complete("x", **options or {})
    return caught.value, addresses


TOO_LARGE = RequestError(grpc.StatusCode.RESOURCE_EXHAUSTED, "UNSPECIFIED", "larger than max (9 vs. 4)")
RAISED: dict[str, tuple[RequestError, type[OutriderError]]] = {
    "field": (errors.invalid_field("n", "is 9, at most 8", given=9), InvalidRequest),
    "feature": (errors.failed_precondition("UNKNOWN_FEATURE", "no tree"), FailedPrecondition),
    "pair": (errors.failed_precondition("PAIR_MISMATCH", "other vocabulary"), PairMismatch),
    "idle": (errors.idle("silent"), DeadlineExceeded),
    "too large, which has the status of a full service": (TOO_LARGE, Overloaded),
}


@pytest.mark.parametrize(("error", "kind"), RAISED.values(), ids=RAISED.keys())
async def test_an_error_comes_by_type_and_at_once(error: RequestError, kind: type[OutriderError]) -> None:
    servicer = Refusing(error)
    raised, _ = await failure(servicer)
    assert type(raised) is kind
    assert (raised.code, raised.reason) == (error.code, error.reason)
    assert raised.metadata == error.metadata
    assert raised.field == error.metadata.get("field")
    assert str(raised) == f"{error.code.name}: {error.message}"
    assert servicer.calls == 1


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses between tries are a tenth as long."""
    monkeypatch.setattr(resume, "FIRST_BACKOFF_S", 0.005)
    monkeypatch.setattr(resume, "MAX_BACKOFF_S", 0.02)


PASSING = [errors.overloaded("full"), errors.overloaded("full", retry_after=0.01), errors.draining()]


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("late", [False, True], ids=["at once", "after the first response"])
@pytest.mark.parametrize("error", PASSING, ids=["overloaded", "with a hint", "draining"])
async def test_a_refusal_is_tried_again_until_it_is_none(error: RequestError, late: bool) -> None:
    servicer = Refusing(error, times=20, late=late)
    async with refusing(servicer) as address, AsyncClient(address) as client:
        await client.complete("x")
    assert servicer.calls == 21


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize(
    ("retry", "options", "at_the_end"), [(True, {"n": 2}, True), (False, {}, False)], ids=["samples begun", "no retry"]
)
async def test_some_calls_are_made_once(retry: bool, options: Options, at_the_end: bool) -> None:
    servicer = Refusing(errors.draining(), at_the_end=at_the_end)
    error, _ = await failure(servicer, options=options, retry=retry)
    assert type(error) is Unavailable
    assert error.reason == "DRAINING"
    assert servicer.calls == 1


@pytest.mark.usefixtures("hurried")
async def test_patience_bounds_how_long_it_is_tried_and_the_error_says_where_and_how_often() -> None:
    servicers = [Refusing(errors.draining()), Refusing(errors.overloaded("full"))]
    error, addresses = await failure(*servicers, patience=0.3)
    assert type(error) in (Unavailable, Overloaded)
    calls = [servicer.calls for servicer in servicers]
    assert min(calls) >= 2
    assert error.tries == dict(zip(addresses, calls, strict=True))
    tries = ", ".join(f"{address} ({count})" for address, count in error.tries.items())
    assert f"tries at {tries}; 0 tokens were delivered" in str(error)


@pytest.mark.usefixtures("hurried")
async def test_a_call_whose_time_is_over_says_what_it_waited_for() -> None:
    error, (address,) = await failure(Refusing(errors.overloaded("full", retry_after=60.0)), timeout=0.5)
    assert type(error) in (Overloaded, DeadlineExceeded)
    assert re.search(r"full.*tries at", str(error))
    assert error.tries[address] >= 2, "the hint is longer than the time, and the last try comes late"


# ------------------------------------------------------------------------------------------------- on a real pair


@pytest.mark.parametrize("module", [outrider.client, client_module], ids=lambda module: module.__name__)
def test_examples_run(module: Any, draft_address: str) -> None:
    examples = doctest.DocTestFinder(recurse=True).find(module, extraglobs={"address": draft_address})
    results = [doctest.DocTestRunner().run(example) for example in examples if example.examples]
    assert results
    assert all(result.failed == 0 for result in results)


@pytest.fixture
def client(draft_address: str) -> Iterator[Client]:
    """A blocking client of the real pair."""
    with Client(draft_address, timeout=90) as made:
        yield made


async def test_events_come_in_order_and_make_up_the_completion(draft_address: str) -> None:
    async with AsyncClient(draft_address) as client:
        events = [event async for event in client.generate(PROMPT, **greedy())]
        completion, *others = await asyncio.gather(*(client.complete(PROMPT, **greedy()) for _ in range(4)))
        by_tokens = await client.complete(completion.started.prompt_token_ids, **greedy())
    assert {other.token_ids for other in (*others, by_tokens)} == {completion.token_ids}
    assert isinstance(events[0], Started)
    assert isinstance(events[-1], Finished)
    chunks = [event for event in events[1:-1] if isinstance(event, Chunk)]
    assert len(chunks) == len(events) - 2
    assert completion.text == "".join(chunk.text for chunk in chunks)
    assert completion.token_ids == tuple(token for chunk in chunks for token in chunk.token_ids)
    assert len(completion.token_ids) == len(completion.samples[0].origins) == completion.usage.completion_tokens == 24
    assert completion.finish_reason is FinishReason.LENGTH
    assert completion.usage.prompt_tokens == len(completion.started.prompt_token_ids)


def test_a_seed_is_a_text_and_samples_have_their_own(client: Client) -> None:
    sampled, again = (client.complete(PROMPT, seed=7, max_new_tokens=12) for _ in range(2))
    assert (sampled.seed, sampled.rule) == (7, AcceptanceRule.COUPLED)
    assert again.token_ids == sampled.token_ids
    several = client.complete(PROMPT, n=3, seed=7, max_new_tokens=12)
    assert [sample.index for sample in several.samples] == [0, 1, 2]
    assert len({sample.token_ids for sample in several.samples}) == 3
    assert several.text == several.samples[0].text == sampled.text


async def _how_it_ended(process: ServiceProcess, request_id: str) -> str:
    """The status in the service's log line of a request; waits for it."""
    async with asyncio.timeout(60):
        while True:
            for line in process.log_lines():
                if request_id in line and "status" in (entry := json.loads(line)):
                    return str(entry["status"])
            await asyncio.sleep(0.05)


async def test_leaving_the_iterator_cancels_the_call(client: Client, draft_process: ServiceProcess) -> None:
    events = client.generate(PROMPT, **LONG | {"request_id": "left plainly"})
    assert isinstance(next(events), Started)
    assert isinstance(next(events), Chunk)
    events.close()
    assert await _how_it_ended(draft_process, "left plainly") == "CANCELLED"
    async with AsyncClient(draft_process.address) as other:
        async for event in (left := other.generate(PROMPT, **LONG | {"request_id": "left early"})):
            if isinstance(event, Chunk):
                break
        await left.aclose()
        assert await _how_it_ended(draft_process, "left early") == "CANCELLED"
        assert (await other.complete(PROMPT, **greedy())).finish_reason is FinishReason.LENGTH


async def test_a_deadline_is_an_error_and_says_its_length(draft_address: str) -> None:
    async with AsyncClient(draft_address) as client:
        with pytest.raises(DeadlineExceeded, match=r"timeout of 0\.05 s"):
            await client.complete(PROMPT, timeout=0.05, max_new_tokens=400, ignore_eos=True)


# --------------------------------------------------------------------------------------------------- where calls go


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Resolves every name to `ips`; `asked` has the names."""
    found = SimpleNamespace(ips=["10.0.0.1", "10.0.0.2"], asked=[])

    async def getaddrinfo(_: Any, host: str, port: int, **__: Any) -> list[Any]:
        found.asked.append(host)
        families = {True: socket.AF_INET6, False: socket.AF_INET}
        return [(families[":" in ip], socket.SOCK_STREAM, 6, "", (ip, port)) for ip in found.ips]

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", getaddrinfo)
    return found


async def test_a_name_is_all_its_addresses_and_resolved_again_when_one_fails(resolver: Any) -> None:
    endpoints = Endpoints(["drafts:50051", "127.0.0.1:7"])
    first = [await endpoints.choose() for _ in range(6)]
    assert sorted(set(first)) == ["10.0.0.1:50051", "10.0.0.2:50051", "127.0.0.1:7"]
    assert resolver.asked == ["drafts"]
    resolver.ips[1] = "10.0.0.3"
    endpoints.failed("10.0.0.1:50051")
    later = {await endpoints.choose() for _ in range(6)}
    assert resolver.asked == ["drafts", "drafts"]
    assert later == {"10.0.0.3:50051", "127.0.0.1:7"}, "what failed is passed over while there are others"
    endpoints.failed("10.0.0.3:50051")
    endpoints.failed("127.0.0.1:7")
    assert await endpoints.choose() == "10.0.0.1:50051", "what failed first"
    assert not endpoints.has_fresh()


@pytest.mark.parametrize(
    ("given", "names"),
    [("a:1", ["a:1"]), ("a:1, b:2,a:1", ["a:1", "b:2"]), (["a:1", "b:2"], ["a:1", "b:2"])],
)
def test_addresses_may_be_a_list_or_have_commas_between(given: Any, names: list[str]) -> None:
    assert split(given) == names
    with pytest.raises(ValueError, match="no address"):
        split(" , ")
