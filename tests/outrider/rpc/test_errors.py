"""An error arrives as it was raised; nothing else gets out."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest

from outrider.rpc import errors
from outrider.rpc.channel import open_channel
from outrider.rpc.errors import RequestError
from protos.outrider.v1 import model_pb2
from tests.outrider.rpc.probe import Probe, both, many, once, serving, written

RAISED: list[tuple[RequestError, grpc.StatusCode]] = [
    (errors.invalid_field("sampling.top_p", "is 0; allowed is (0, 1]", given=0), grpc.StatusCode.INVALID_ARGUMENT),
    (errors.out_of_order("a proposal before OpenSequence"), grpc.StatusCode.INVALID_ARGUMENT),
    (errors.wrong_base("base length 7, sequence ends at 9", given=7, end=9), grpc.StatusCode.INVALID_ARGUMENT),
    (
        errors.failed_precondition("PAIR_MISMATCH", "vocabularies differ", draft=1, target=2),
        grpc.StatusCode.FAILED_PRECONDITION,
    ),
    (errors.overloaded("no room", waiting=64), grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.unauthenticated("no token"), grpc.StatusCode.UNAUTHENTICATED),
    (errors.permission_denied("not you", seen="a", allowed="b"), grpc.StatusCode.PERMISSION_DENIED),
    (errors.draining(), grpc.StatusCode.UNAVAILABLE),
    (errors.unavailable("NO_VERIFIER", "no verifier answers"), grpc.StatusCode.UNAVAILABLE),
    (errors.idle("silent for 60 s"), grpc.StatusCode.DEADLINE_EXCEEDED),
    (errors.internal("BAD_LOGITS", "logits of row 3 are not numbers"), grpc.StatusCode.INTERNAL),
]
IDS = [error.reason for error, _ in RAISED]


async def _failure(probe: Probe, method: Callable[..., Any] = once) -> RequestError:
    async with serving(probe) as address, open_channel(address) as channel:
        call = method(channel)(_requests() if method in (both, written) else b"0")
        with pytest.raises(grpc.RpcError) as caught:
            await (call if method is once else _drained(call))
        return errors.from_rpc_error(caught.value)


async def _drained(call: Any) -> None:
    async for _ in call:
        pass


async def _requests() -> AsyncIterator[bytes]:
    yield b"x"


@pytest.mark.parametrize(("raised", "code"), RAISED, ids=IDS)
async def test_an_error_arrives_as_it_was_raised(raised: RequestError, code: grpc.StatusCode) -> None:
    arrived = await _failure(Probe(lambda: raised))
    assert arrived.code is raised.code is code
    assert (arrived.reason, arrived.message, arrived.metadata) == (raised.reason, raised.message, raised.metadata)


@pytest.mark.parametrize("method", [once, many, both, written])
async def test_when_to_try_again_arrives_with_it_whatever_the_method(method: Callable[..., Any]) -> None:
    arrived = await _failure(Probe(lambda: errors.overloaded("no room", retry_after=2.25, waiting=64)), method)
    assert (arrived.retry_after, arrived.reason, arrived.metadata) == (2.25, "OVERLOADED", {"waiting": "64"})
    assert (await _failure(Probe(lambda: errors.overloaded("no room")), method)).retry_after is None


@pytest.mark.parametrize("method", [both, written])
async def test_streams_may_yield_or_write(method: Callable[..., Any]) -> None:
    async with serving(Probe()) as address, open_channel(address) as channel:
        assert [answer async for answer in method(channel)(_requests())] == [b"x"]


async def test_the_blocking_api_reads_the_same_error() -> None:
    raised = errors.invalid_field("n", "is 9, at most 8", given=9, limit=8)

    def call(address: str) -> RequestError:
        with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as caught:
            once(channel)(b"")
        return errors.from_rpc_error(caught.value)

    async with serving(Probe(lambda: raised)) as address:
        arrived = await asyncio.to_thread(call, address)
    assert (arrived.code, arrived.reason, arrived.metadata) == (raised.code, raised.reason, raised.metadata)


@pytest.mark.parametrize("method", [once, many, both, written])
async def test_an_unforeseen_exception_is_internal_and_keeps_its_text_to_the_log(
    method: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        arrived = await _failure(Probe(lambda: KeyError("the secret")), method)
    assert (arrived.code, arrived.reason) == (grpc.StatusCode.INTERNAL, "INTERNAL")
    assert "secret" not in arrived.message
    assert "the secret" in caplog.text


async def test_a_status_that_cannot_leave_is_no_fault_of_the_servers(caplog: pytest.LogCaptureFixture) -> None:
    """Sending fails where the deadline passes in that moment, and logs what a servicer then raises."""

    class Over(Probe):
        @errors.guarded
        async def Once(self, request: bytes, context: Any) -> bytes:
            return await refused(self, request, _Gone(context))

    @errors.guarded
    async def refused(probe: Any, request: bytes, context: Any) -> bytes:
        raise errors.idle("silent for 60 s")

    with caplog.at_level(logging.INFO):
        async with serving(Over()) as address, open_channel(address) as channel:
            with pytest.raises(grpc.RpcError) as caught:
                await once(channel)(b"0", timeout=0.5)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert not caplog.records


@pytest.mark.parametrize(
    "told", [grpc.aio.InternalError("Failed"), grpc.aio.UsageError("finished already"), asyncio.InvalidStateError()]
)
async def test_a_message_that_cannot_leave_is_no_fault_of_the_servers(
    told: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    class Over(Probe):
        @errors.guarded
        async def Once(self, request: bytes, context: Any) -> bytes:
            gone: Any = _Gone(context, told)
            await errors.write(gone, request)
            return request

    with caplog.at_level(logging.INFO):
        async with serving(Over()) as address, open_channel(address) as channel:
            with pytest.raises((grpc.RpcError, asyncio.CancelledError)):
                await once(channel)(b"0", timeout=1.0)
    assert not caplog.records


class _Gone:
    """A context whose call ends while something is being sent, as gRPC tells it."""

    def __init__(self, context: Any, told: Exception | None = None) -> None:
        self._context = context
        self._told = told or grpc.aio.InternalError("Failed to send a status")

    async def write(self, message: Any) -> None:
        raise self._told

    async def abort_with_status(self, status: Any) -> None:
        await asyncio.sleep(0)
        raise self._told


async def test_a_cancelled_call_closes_its_handler() -> None:
    probe = Probe()
    async with serving(probe) as address, open_channel(address) as channel:
        call = many(channel)(b"60")
        assert await call.read() == b"first"
        call.cancel()
        async with asyncio.timeout(60):
            await probe.closed.wait()
        assert await once(channel)(b"still here") == b"still here"


async def test_a_message_longer_than_trailing_metadata_is_cut_and_still_arrives() -> None:
    raised = errors.invalid_field("stop", "γ" * 100_000, given="x" * 100_000)
    arrived = await _failure(Probe(lambda: raised))
    assert arrived.reason == "INVALID_FIELD"
    assert arrived.message.startswith("stop: γγγ")
    assert arrived.message.endswith("…")
    assert arrived.metadata["field"] == "stop"


async def test_a_status_that_no_server_of_ours_made_has_no_reason() -> None:
    async with open_channel("127.0.0.1:1") as channel:
        with pytest.raises(grpc.RpcError) as caught:
            await once(channel)(b"")
    arrived = errors.from_rpc_error(caught.value)
    assert (arrived.code, arrived.reason) == (grpc.StatusCode.UNAVAILABLE, errors.UNSPECIFIED)


def test_the_field_is_named_once() -> None:
    assert errors.invalid_field("top_p", "is 0").message == "top_p: is 0"
    assert errors.invalid_field("top_p", "top_p is 0").message == "top_p is 0"


def test_every_reason_of_the_contract_can_be_raised_and_no_other() -> None:
    names = {value.name.removeprefix("ERROR_REASON_") for value in model_pb2.ErrorReason.DESCRIPTOR.values}
    by_name = {"UNSPECIFIED", "UNKNOWN_FEATURE", "NO_CHAT_TEMPLATE", "INTERNAL", "STEP_FAILED"}
    assert names == by_name | {error.reason for error, _ in RAISED}
    for name in names:
        assert RequestError(grpc.StatusCode.INTERNAL, name, "").reason == name
    with pytest.raises(ValueError, match="NO_SUCH_REASON"):
        errors.internal("NO_SUCH_REASON", "")


def test_a_blocking_servicer_method_is_refused_where_it_is_written() -> None:
    with pytest.raises(TypeError, match="neither a coroutine function"):

        @errors.guarded
        def Blocking(self: object, request: bytes, context: object) -> bytes:
            return request
