"""An error arrives as it was raised; the text of any other exception stays in the log."""

import contextlib
import gc
import logging
import weakref
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from outrider.rpc import errors
from outrider.rpc.channel import open_channel
from outrider.rpc.errors import RequestError
from outrider.rpc.server import bind, create_server
from tests.outrider.rpc.probe import NAME, Probe, both, many, once, serving

RAISED: list[tuple[RequestError, grpc.StatusCode]] = [
    (errors.invalid_field("sampling.top_p", "is 0; allowed is (0, 1]", given=0), grpc.StatusCode.INVALID_ARGUMENT),
    (errors.wrong_base("base length 7, sequence ends at 9", given=7, end=9), grpc.StatusCode.INVALID_ARGUMENT),
    (
        errors.failed_precondition("PAIR_MISMATCH", "vocabularies differ", draft=1, target=2),
        grpc.StatusCode.FAILED_PRECONDITION,
    ),
    (errors.overloaded("full", waiting=64), grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.overloaded("full", retry_after=2.25), grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.permission_denied("not you", seen="a", allowed="b"), grpc.StatusCode.PERMISSION_DENIED),
    (errors.draining(), grpc.StatusCode.UNAVAILABLE),
    (errors.unavailable("NO_VERIFIER", "no verifier answers"), grpc.StatusCode.UNAVAILABLE),
    (errors.internal("BAD_LOGITS", "logits of row 3 are not numbers"), grpc.StatusCode.INTERNAL),
]


async def _failure(error: Exception, method: Callable[..., Any] = once) -> RequestError:
    """The error of a call to a service that raises this one."""
    async with serving(Probe(lambda: error)) as address, open_channel(address) as channel:
        call = method(channel)(iter([b"x"]) if method is both else b"0")
        with pytest.raises(grpc.RpcError) as caught:
            await (call if method is once else _read_all(call))
        return errors.from_rpc_error(caught.value)


async def _read_all(call: Any) -> None:
    async for _ in call:
        pass


@pytest.mark.parametrize("method", [once, many, both])
@pytest.mark.parametrize(("raised", "code"), RAISED, ids=[error.reason for error, _ in RAISED])
async def test_an_error_arrives_as_it_was_raised(
    raised: RequestError, code: grpc.StatusCode, method: Callable[..., Any]
) -> None:
    arrived = await _failure(raised, method)
    assert arrived.code is raised.code is code
    assert (arrived.reason, arrived.message, arrived.metadata) == (raised.reason, raised.message, raised.metadata)
    assert arrived.retry_after == raised.retry_after


@pytest.mark.parametrize("method", [once, many, both])
async def test_an_unforeseen_exception_is_internal_and_its_text_is_logged(
    method: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        arrived = await _failure(KeyError("the secret"), method)
    assert (arrived.code, arrived.reason) == (grpc.StatusCode.INTERNAL, "INTERNAL")
    assert "secret" not in arrived.message
    assert "the secret" in caplog.text


async def test_a_message_longer_than_trailing_metadata_is_cut_and_still_arrives() -> None:
    arrived = await _failure(errors.invalid_field("stop", "γ" * 100_000, given="x" * 100_000))
    assert arrived.reason == "INVALID_FIELD"
    assert arrived.message.startswith("stop: γγγ")
    assert arrived.message.endswith("…")
    assert arrived.metadata["field"] == "stop"


async def test_a_status_without_error_info_has_no_reason() -> None:
    async with open_channel("127.0.0.1:1") as channel:
        with pytest.raises(grpc.RpcError) as caught:
            await once(channel)(b"")
    arrived = errors.from_rpc_error(caught.value)
    assert (arrived.code, arrived.reason) == (grpc.StatusCode.UNAVAILABLE, errors.UNSPECIFIED)
    assert arrived.message == "nothing listens at 127.0.0.1:1 (connection refused)"


async def test_a_call_with_tls_names_a_service_without() -> None:
    async with (
        serving(Probe()) as address,
        open_channel(address, credentials=grpc.ssl_channel_credentials()) as channel,
    ):
        with pytest.raises(grpc.RpcError) as caught:
            await once(channel)(b"")
    arrived = errors.from_rpc_error(caught.value)
    assert arrived.message == f"the service at {address} does not speak TLS, and this call does"
    assert arrived.connection is errors.ConnectionFailure.NO_TLS


class _Request:
    """An object that a weak reference can follow."""


@pytest.mark.parametrize("refuses", [True, False])
async def test_a_request_is_freed_with_its_call_without_garbage_collection(refuses: bool) -> None:
    """GRPC keeps an abort and its frames in a cycle, and a refused request may take hundreds of megabytes."""
    received: list[weakref.ref[_Request]] = []

    def decoded(raw: bytes) -> Any:
        request = _Request()
        received.append(weakref.ref(request))
        return request

    class Servicer:
        @errors.guarded
        async def Once(self, request: _Request, context: Any) -> bytes:
            if refuses:
                raise errors.invalid_field("n", "is 9; at most 8")
            return b""

    server = create_server(max_message_bytes=1 << 20)
    handler: Any = grpc.unary_unary_rpc_method_handler(Servicer().Once, decoded)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(NAME, {"Once": handler}),))
    address = bind(server, "127.0.0.1:0")
    await server.start()
    gc.disable()
    try:
        async with open_channel(address) as channel:
            for _ in range(3):
                with contextlib.suppress(grpc.RpcError):
                    await once(channel)(b"x", timeout=60)
        assert [each() for each in received[:2]] == [None, None]
    finally:
        gc.enable()
        await server.stop(None)
