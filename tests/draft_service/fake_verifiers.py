"""gRPC servers in place of verifiers: their `Verify` and `GetModel` do what a test says."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc

from outrider.rpc.server import bind, create_server
from protos.outrider.v1 import model_pb2
from protos.outrider.v1.verifier_service_pb2 import (
    VerifierServiceGetModelRequest,
    VerifierServiceGetModelResponse,
    VerifyRequest,
    VerifyResponse,
)

Verify = Callable[[Any, Any], Awaitable[None]]


async def _no_sequences(_: Any, context: Any) -> None:
    await context.abort(grpc.StatusCode.UNIMPLEMENTED)


@asynccontextmanager
async def fake_verifier(
    verify: Verify = _no_sequences,
    *,
    model: model_pb2.ModelInfo | None = None,
    listen: str = "127.0.0.1:0",
    to_bytes: Callable[[Any], bytes] = VerifyResponse.SerializeToString,
) -> AsyncIterator[str]:
    """Yields the address of one; `to_bytes` serialises what its `Verify` writes."""

    async def get_model(_: Any, __: Any) -> VerifierServiceGetModelResponse:
        return VerifierServiceGetModelResponse(model=model)

    handlers: dict[str, Any] = {
        "Verify": grpc.stream_stream_rpc_method_handler(verify, VerifyRequest.FromString, to_bytes),
        "GetModel": grpc.unary_unary_rpc_method_handler(
            get_model, VerifierServiceGetModelRequest.FromString, VerifierServiceGetModelResponse.SerializeToString
        ),
    }
    server = create_server(max_message_bytes=1 << 20)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("outrider.v1.VerifierService", handlers),))
    address = bind(server, listen)
    await server.start()
    try:
        yield address
    finally:
        await server.stop(None)
