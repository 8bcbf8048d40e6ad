"""The client library: errors and retries, its examples on a real pair, and the choice of an endpoint."""

import asyncio
import doctest
import gc
import json
import math
import os
import re
import signal
import socket
import threading
from collections.abc import AsyncIterator
from concurrent.futures import CancelledError
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

import outrider.client
from outrider.cli.processes import ServiceProcess
from outrider.client import (
    TLS,
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
from outrider.client import client as client_module
from outrider.rpc import errors
from outrider.rpc.errors import RequestError
from outrider.rpc.server import bind, create_server
from outrider.rpc.tls import ServerTLS
from protos.outrider.v1 import draft_service_pb2 as pb
from tests.certificates import Authority

PROMPT = "def add(a, b):\n"
GREEDY: Options = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
LONG: Options = {"max_new_tokens": 900, "ignore_eos": True, "gamma": 0}
"""A text that takes the pair seconds, so that a cancel falls in the middle of it."""


# ------------------------------------------------------------------------------------------------- errors and retries


class Refusing:
    """A draft service that refuses the first `times` calls, each after so many of its two responses."""

    def __init__(self, error: RequestError, *, times: int = 1_000, after: int = 0) -> None:
        self.calls = 0
        self.metadata: list[dict[str, Any]] = []  # of each call
        self._error, self._times, self._after = error, times, after

    @errors.guarded
    async def Generate(self, request: pb.GenerateRequest, context: Any) -> None:
        self.calls += 1
        self.metadata.append(dict(context.invocation_metadata()))
        started = pb.GenerateStarted(request_id=f"call {self.calls}", max_new_tokens=9)
        responses = [pb.GenerateResponse(started=started), pb.GenerateResponse(finished=pb.GenerateFinished())]
        is_refused = self.calls <= self._times
        for response in responses[: self._after] if is_refused else responses:
            await errors.write(context, response)
        if is_refused:
            raise self._error


@asynccontextmanager
async def serving(servicer: Refusing, credentials: grpc.ServerCredentials | None = None) -> AsyncIterator[str]:
    """The servicer on a free port; its address."""
    server = create_server(max_message_bytes=1 << 20)
    generate: Any = grpc.unary_stream_rpc_method_handler(
        servicer.Generate, pb.GenerateRequest.FromString, pb.GenerateResponse.SerializeToString
    )
    methods = grpc.method_handlers_generic_handler("outrider.v1.DraftService", {"Generate": generate})
    server.add_generic_rpc_handlers((methods,))
    address = bind(server, "127.0.0.1:0", credentials)
    await server.start()
    try:
        yield address
    finally:
        await server.stop(None)


async def failure(*servicers: Refusing, options: Options | None = None, **how: Any) -> tuple[OutriderError, list[str]]:
    """The error of a call to these services, and their addresses."""
    async with AsyncExitStack() as stack:
        addresses = [await stack.enter_async_context(serving(servicer)) for servicer in servicers]
        client = await stack.enter_async_context(AsyncClient(addresses, **how))
        with pytest.raises(OutriderError) as caught:
            await client.complete("x", **options or {})
    return caught.value, addresses


TOO_LARGE = RequestError(grpc.StatusCode.RESOURCE_EXHAUSTED, "UNSPECIFIED", "larger than max (9 vs. 4)")
PERMANENT: dict[str, tuple[RequestError, type[OutriderError]]] = {
    "field": (errors.invalid_field("n", "is 9, at most 8", given=9), InvalidRequest),
    "feature": (errors.failed_precondition("UNKNOWN_FEATURE", "no tree"), FailedPrecondition),
    "pair": (errors.failed_precondition("PAIR_MISMATCH", "other vocabulary"), PairMismatch),
    "idle": (errors.idle("silent"), DeadlineExceeded),
    "too large, which has the status of a full service": (TOO_LARGE, Overloaded),
}


@pytest.mark.parametrize(("error", "kind"), PERMANENT.values(), ids=PERMANENT.keys())
async def test_a_permanent_error_has_its_type_and_is_not_retried(
    error: RequestError, kind: type[OutriderError]
) -> None:
    servicer = Refusing(error)
    raised, _ = await failure(servicer)
    assert type(raised) is kind
    assert (raised.code, raised.reason) == (error.code, error.reason)
    assert raised.metadata == error.metadata
    assert raised.field == error.metadata.get("field")
    assert str(raised) == f"{error.code.name}: {error.message}"
    assert servicer.calls == 1


@pytest.fixture
def short_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "FIRST_BACKOFF_S", 0.005)
    monkeypatch.setattr(resume, "MAX_BACKOFF_S", 0.02)


async def test_metadata_goes_with_every_attempt(short_backoff: None) -> None:
    servicer = Refusing(errors.draining(), times=2)
    async with serving(servicer) as address, AsyncClient(address) as client:
        await client.complete("x", metadata={"traceparent": "00-ab", "tenant": "a"})
    assert len(servicer.metadata) == 3
    assert all({"traceparent": "00-ab", "tenant": "a"}.items() <= each.items() for each in servicer.metadata)


TRANSIENT = [errors.overloaded("full"), errors.overloaded("full", retry_after=0.01), errors.draining()]


@pytest.mark.usefixtures("short_backoff")
@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize("error", TRANSIENT, ids=["overloaded", "with a hint", "draining"])
async def test_a_transient_error_is_retried_until_success(error: RequestError, after: int) -> None:
    servicer = Refusing(error, times=20, after=after)
    async with serving(servicer) as address, AsyncClient(address) as client:
        await client.complete("x")
    assert servicer.calls == 21


@pytest.mark.usefixtures("short_backoff")
@pytest.mark.parametrize(
    ("retry", "options", "after"), [(True, {"n": 2}, 2), (False, {}, 0)], ids=["samples begun", "no retry"]
)
async def test_some_calls_are_not_retried(retry: bool, options: Options, after: int) -> None:
    servicer = Refusing(errors.draining(), after=after)
    error, _ = await failure(servicer, options=options, retry=retry)
    assert type(error) is Unavailable
    assert error.reason == "DRAINING"
    assert servicer.calls == 1


@pytest.mark.usefixtures("short_backoff")
async def test_the_retry_timeout_bounds_the_retries_and_the_error_counts_them() -> None:
    servicers = [Refusing(errors.draining()), Refusing(errors.overloaded("full"))]
    error, addresses = await failure(*servicers, retry_timeout=0.3)
    assert type(error) in (Unavailable, Overloaded)
    calls = [servicer.calls for servicer in servicers]
    assert min(calls) >= 2
    assert error.tries == dict(zip(addresses, calls, strict=True))
    tries = ", ".join(f"{address} ({count})" for address, count in error.tries.items())
    assert f"tries at {tries}; 0 tokens were delivered" in str(error)


@pytest.mark.usefixtures("short_backoff")
async def test_a_timeout_between_retries_names_the_last_error() -> None:
    error, (address,) = await failure(Refusing(errors.overloaded("full", retry_after=60.0)), timeout=0.5)
    assert type(error) in (Overloaded, DeadlineExceeded)
    assert re.search(r"full.*tries at", str(error))
    assert error.tries[address] >= 2, "the hint is longer than the time, and the last try comes late"


@pytest.mark.parametrize(
    ("option", "seconds"),
    [
        ("timeout", math.nan),
        ("timeout", -1.0),
        ("retry_timeout", math.nan),
        ("retry_timeout", -0.5),
        ("silence", math.nan),
        ("silence", -1.0),
        ("silence", 0.0),
    ],
)
async def test_a_time_that_is_none_is_refused_at_once(option: str, seconds: float) -> None:
    """A silence of 0 or below repeated each call for ever; a timer of NaN seconds disorders those of the loop."""
    with pytest.raises(ValueError, match=f"^{option} is {seconds:g}; it must be "):
        AsyncClient("127.0.0.1:9", **{option: seconds})  # type: ignore[arg-type]


async def test_a_timeout_of_a_call_is_a_number() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        async with AsyncClient(address, timeout=math.inf, retry_timeout=math.inf, silence=math.inf) as client:
            for call in (client.complete("x", timeout=math.nan), client.get_model(timeout=math.nan)):
                with pytest.raises(InvalidRequest, match="timeout is nan; it must be a number of seconds") as caught:
                    await call
                assert caught.value.field == "timeout"
            with pytest.raises(DeadlineExceeded):  # a caller may pass its own remaining time
                await client.get_model(timeout=-1.0)


async def test_a_call_tries_an_address_that_another_call_found_failing() -> None:
    """Without time for retries each address has its one try."""
    works, fails = Refusing(errors.draining(), times=0), Refusing(errors.draining())
    async with AsyncExitStack() as stack:
        addresses = [await stack.enter_async_context(serving(servicer)) for servicer in (works, fails)]
        client = await stack.enter_async_context(AsyncClient(addresses, retry_timeout=0))
        await client._endpoints.addresses()
        client._endpoints.failed(addresses[0])
        await client.complete("x")
    assert (works.calls, fails.calls) == (1, 1)


@pytest.mark.parametrize("after", [0, 1])
async def test_a_pair_that_does_not_match_is_left_for_another_address(after: int) -> None:
    """Each has its one try."""
    mismatch = errors.failed_precondition("PAIR_MISMATCH", "other weights")
    works, others = Refusing(mismatch, times=0), [Refusing(mismatch, after=after) for _ in range(2)]
    async with AsyncExitStack() as stack:
        addresses = [await stack.enter_async_context(serving(servicer)) for servicer in (works, *others)]
        client = await stack.enter_async_context(AsyncClient(addresses))
        for _ in range(3):
            await client.complete("x")
        client = await stack.enter_async_context(AsyncClient(addresses[1:]))
        calls = sum(each.calls for each in others)
        with pytest.raises(PairMismatch):
            await client.complete("x")
    assert works.calls == 3
    assert sum(each.calls for each in others) == calls + 2


async def test_closing_the_client_ends_a_call_that_waits_to_try_again() -> None:
    servicer = Refusing(errors.overloaded("full", retry_after=600.0))
    async with serving(servicer) as address:
        client = await asyncio.to_thread(Client, address, timeout=None)

        def call() -> type[BaseException] | None:
            try:
                client.complete("x")
            except BaseException as error:
                return type(error)
            return None

        ended = asyncio.create_task(asyncio.to_thread(call))
        while not client._client._endpoints._failed:  # noqa: ASYNC110  # the call is in the client's own thread
            await asyncio.sleep(0.01)
        await asyncio.to_thread(client.close)
        async with asyncio.timeout(30):
            assert await ended is CancelledError


@pytest.mark.parametrize("retries", [0, 1])
async def test_a_closed_client_begins_no_call(retries: int) -> None:
    """Nor does a call that waits for its next attempt."""
    client = AsyncClient("127.0.0.1:9", timeout=2)
    call = asyncio.create_task(client.get_model())
    while retries and not client._endpoints._failed:  # noqa: ASYNC110  # set in the call
        await asyncio.sleep(0.01)
    await client.close()
    with pytest.raises(RuntimeError, match="the client is closed; make a new one"):
        await call


async def test_a_client_that_is_being_closed_begins_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop would stop before the call has ended, and its thread wait for ever."""
    client = await asyncio.to_thread(Client, "127.0.0.1:9")
    closing, goes_on, close = threading.Event(), threading.Event(), client._client.close

    async def slow_close() -> None:
        closing.set()
        await asyncio.to_thread(goes_on.wait)
        await close()

    monkeypatch.setattr(client._client, "close", slow_close)
    closed = asyncio.create_task(asyncio.to_thread(client.close))
    try:
        await asyncio.to_thread(closing.wait)
        with pytest.raises(RuntimeError, match="the client is closed"):
            await asyncio.to_thread(client.get_model, timeout=0.1)
    finally:
        goes_on.set()
        await closed


def test_after_a_fork_a_call_is_an_error(draft_address: str) -> None:
    """Without one it would never end: neither gRPC's threads nor the client's are in the new process."""
    with Client(draft_address) as client:
        client.get_model()
        if not (child := os.fork()):
            signal.alarm(5)
            try:
                with pytest.raises(RuntimeError, match="of the process that this one was forked from; make a new one"):
                    client.get_model()
                client.close()
                with Client(draft_address) as new, pytest.raises(RuntimeError, match="fork before the first call"):
                    new.get_model()
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        client.get_model()


# ------------------------------------------------------------------------------------------- TLS on one side only


@pytest.fixture
def credentials(tmp_path: Path) -> grpc.ServerCredentials:
    server = Authority(tmp_path).issue("server", file="server")
    return ServerTLS(server.cert, server.key).credentials()


async def test_a_client_with_tls_leaves_a_service_without_at_once() -> None:
    error, (address,) = await failure(Refusing(errors.draining()), tls=TLS(), timeout=60)
    assert str(error).startswith(f"UNAVAILABLE: the service at {address} does not speak TLS")
    assert "; leave out --tls" in str(error)
    assert error.tries == {address: 1}


async def test_a_client_without_tls_leaves_a_service_with_it_at_once(credentials: grpc.ServerCredentials) -> None:
    async with serving(Refusing(errors.draining()), credentials) as address, AsyncClient(address, timeout=60) as client:
        with pytest.raises(Unavailable) as caught:
            await client.complete("x")
    assert str(caught.value).startswith(f"UNAVAILABLE: the service at {address} requires TLS; give --tls-ca or --tls")
    assert caught.value.tries == {address: 1}


@pytest.mark.usefixtures("short_backoff")
async def test_with_several_services_the_one_with_the_other_transport_is_left_out(
    credentials: grpc.ServerCredentials,
) -> None:
    busy = Refusing(errors.overloaded("full"), times=3)
    async with serving(Refusing(errors.draining()), credentials) as first, serving(busy) as second:
        for addresses in ([first, second], [second, first]):
            async with AsyncClient(addresses, timeout=60) as client:
                await client.complete("x")
    assert busy.calls == 5


@pytest.mark.usefixtures("short_backoff")
async def test_a_listener_that_only_closes_connections_is_tried_again() -> None:
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    address = "127.0.0.1:{1}".format(*server.sockets[0].getsockname())
    async with server, AsyncClient(address, timeout=60, retry_timeout=0.5) as client:
        with pytest.raises(Unavailable) as caught:
            await client.complete("x")
    assert "requires TLS" not in str(caught.value)
    assert caught.value.tries[address] >= 2


# ------------------------------------------------------------------------------------------------- on a real pair


@pytest.mark.parametrize("module", [outrider.client, client_module], ids=lambda module: module.__name__)
def test_examples_run(module: Any, draft_address: str) -> None:
    examples = doctest.DocTestFinder(recurse=True).find(module, extraglobs={"address": draft_address})
    results = [doctest.DocTestRunner().run(example) for example in examples if example.examples]
    assert results
    assert all(result.failed == 0 for result in results)


async def test_events_come_in_order_and_make_up_the_completion(draft_address: str) -> None:
    async with AsyncClient(draft_address) as client:
        events = [event async for event in client.generate(PROMPT, **GREEDY)]
        completion, *others = await asyncio.gather(*(client.complete(PROMPT, **GREEDY) for _ in range(4)))
        by_tokens = await client.complete(completion.started.prompt_token_ids, **GREEDY)
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


async def _status(process: ServiceProcess, request_id: str) -> str:
    """Wait for the service's log line of a request, and return its status."""
    async with asyncio.timeout(60):
        while True:
            for line in process.log_lines():
                if request_id in line and "status" in (entry := json.loads(line)):
                    return str(entry["status"])
            await asyncio.sleep(0.05)


async def test_closing_the_iterator_cancels_the_call(draft_process: ServiceProcess) -> None:
    with Client(draft_process.address, timeout=90) as blocking:
        events = blocking.generate(PROMPT, **LONG | {"request_id": "closed iterator"})
        assert isinstance(next(events), Started)
        assert isinstance(next(events), Chunk)
        events.close()
        assert await _status(draft_process, "closed iterator") == "CANCELLED"
    async with AsyncClient(draft_process.address) as client:
        stream = client.generate(PROMPT, **LONG | {"request_id": "closed async iterator"})
        async for event in stream:
            if isinstance(event, Chunk):
                break
        await stream.aclose()
        assert await _status(draft_process, "closed async iterator") == "CANCELLED"
        assert (await client.complete(PROMPT, **GREEDY)).finish_reason is FinishReason.LENGTH


async def test_the_garbage_collector_may_drop_an_iterator_in_the_thread_of_the_loop(
    draft_process: ServiceProcess,
) -> None:
    blocking = Client(draft_process.address, timeout=90)
    events = blocking.generate(PROMPT, **LONG | {"request_id": "dropped iterator"})
    assert isinstance(next(events), Started)
    cycle: list[Any] = [events]
    cycle.append(cycle)
    del events, cycle

    async def collect() -> None:
        gc.collect()

    asyncio.run_coroutine_threadsafe(collect(), blocking._loop).result(timeout=20)
    assert await _status(draft_process, "dropped iterator") == "CANCELLED"
    blocking.close()


async def test_a_huge_timeout_is_as_good_as_none(draft_address: str) -> None:
    async with AsyncClient(draft_address, timeout=1e12) as client:
        assert (await client.get_model()).target.name


async def test_a_deadline_is_an_error_with_its_length(draft_address: str) -> None:
    async with AsyncClient(draft_address) as client:
        with pytest.raises(DeadlineExceeded, match=r"timeout of 0\.05 s"):
            await client.complete(PROMPT, timeout=0.05, max_new_tokens=400, ignore_eos=True)
