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
from tests.outrider.rpc.probe import Probe, both, many, once, serving

RAISED: list[tuple[RequestError, grpc.StatusCode]] = [
    (errors.invalid_field("sampling.top_p", "is 0; allowed is (0, 1]", given=0), grpc.StatusCode.INVALID_ARGUMENT),
    (errors.wrong_base("base length 7, sequence ends at 9", given=7, end=9), grpc.StatusCode.INVALID_ARGUMENT),
    (
        errors.failed_precondition("PAIR_MISMATCH", "vocabularies differ", draft=1, target=2),
        grpc.StatusCode.FAILED_PRECONDITION,
    ),
    (errors.overloaded("full", waiting=64), grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.permission_denied("not you", seen="a", allowed="b"), grpc.StatusCode.PERMISSION_DENIED),
    (errors.draining(), grpc.StatusCode.UNAVAILABLE),
    (errors.unavailable("NO_VERIFIER", "no verifier answers"), grpc.StatusCode.UNAVAILABLE),
    (errors.internal("BAD_LOGITS", "logits of row 3 are not numbers"), grpc.StatusCode.INTERNAL),
]
IDS = [error.reason for error, _ in RAISED]


async def _failure(probe: Probe, method: Callable[..., Any] = once) -> RequestError:
    async with serving(probe) as address, open_channel(address) as channel:
        call = method(channel)(_requests() if method is both else b"0")
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


@pytest.mark.parametrize("method", [once, many, both])
async def test_when_to_try_again_arrives_with_it_whatever_the_method(method: Callable[..., Any]) -> None:
    arrived = await _failure(Probe(lambda: errors.overloaded("full", retry_after=2.25, waiting=64)), method)
    assert (arrived.retry_after, arrived.reason, arrived.metadata) == (2.25, "OVERLOADED", {"waiting": "64"})
    assert (await _failure(Probe(lambda: errors.overloaded("full")), method)).retry_after is None


@pytest.mark.parametrize("method", [once, many, both])
async def test_an_unforeseen_exception_is_internal_and_keeps_its_text_to_the_log(
    method: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        arrived = await _failure(Probe(lambda: KeyError("the secret")), method)
    assert (arrived.code, arrived.reason) == (grpc.StatusCode.INTERNAL, "INTERNAL")
    assert "secret" not in arrived.message
    assert "the secret" in caplog.text


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
