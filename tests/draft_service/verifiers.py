"""Verifiers as the draft service sees them: matched, without a service, and fakes that do what a test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from draft_service.failover import FailoverBudget, Verifiers
from draft_service.metrics import FailoverMetrics
from draft_service.replicas import Replicas
from outrider.rpc.server import bind, create_server
from protos.outrider.v1 import model_pb2
from protos.outrider.v1.verifier_service_pb2 import (
    VerifierServiceGetModelRequest,
    VerifierServiceGetModelResponse,
    VerifyRequest,
    VerifyResponse,
)
from protos.outrider.v1.verifier_service_pb2_grpc import VerifierServiceStub

SILENCE_S = 1.5

Verify = Callable[[Any, Any], Awaitable[None]]


async def _no_sequences(_: Any, context: Any) -> None:
    await context.abort(grpc.StatusCode.UNIMPLEMENTED)


@asynccontextmanager
async def fake_verifier(
    verify: Verify = _no_sequences,
    *,
    model: model_pb2.ModelInfo | None = None,
    listen: str = "127.0.0.1:0",
) -> AsyncIterator[str]:
    """Yields the address of one."""

    async def get_model(_: Any, __: Any) -> VerifierServiceGetModelResponse:
        return VerifierServiceGetModelResponse(model=model)

    handlers: dict[str, Any] = {
        "Verify": grpc.stream_stream_rpc_method_handler(
            verify, VerifyRequest.FromString, VerifyResponse.SerializeToString
        ),
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


@dataclass
class Switches(FailoverMetrics):
    """Keeps what failover would show."""

    reasons: list[str] = field(default_factory=list)
    pauses: int = 0

    def switched(self, reason: str) -> None:
        self.reasons.append(reason)

    def paused(self, seconds: float) -> None:
        self.pauses += 1


@asynccontextmanager
async def matched(
    *verifiers: Any,
    switches: Switches | None = None,
    failover_timeout: float = 10.0,
    burst: int = 64,
    silence: float = SILENCE_S,
) -> AsyncIterator[Verifiers]:
    """These verifiers (addresses, or what has one), once each of them is known."""
    addresses = [getattr(each, "address", each) for each in verifiers]
    replicas = Replicas(addresses, max_message_bytes=1 << 20, timeout=silence)
    await replicas.match(await model_of(addresses[0]))  # a model is its own draft
    try:
        while not all(replica.has_target for replica in replicas.all()):  # noqa: ASYNC110  # no event for it
            await asyncio.sleep(0.02)
        yield Verifiers(replicas, FailoverBudget(burst), failover_timeout, switches or Switches())
        assert all(replica.num_open == 0 for replica in replicas.all()), "every lease has ended"
    finally:
        replicas.close()


async def model_of(address: str) -> Any:
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = VerifierServiceStub(channel)
        return (await stub.GetModel(VerifierServiceGetModelRequest())).model
