"""Fake verifiers, and the draft service's view of real ones without the service."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import grpc

from draft_service.failover import FailoverBudget, Verifiers
from draft_service.metrics import FailoverMetrics
from draft_service.replicas import Replicas
from outrider.rpc.channel import RenewedChannel
from outrider.rpc.errors import RequestError
from outrider.rpc.server import bind, create_server
from outrider.rpc.tls import ChannelTLS
from protos.outrider.v1 import model_pb2
from protos.outrider.v1.verifier_service_pb2 import VerifierServiceGetModelRequest, VerifierServiceGetModelResponse
from protos.outrider.v1.verifier_service_pb2_grpc import VerifierServiceStub, add_VerifierServiceServicer_to_server

SILENCE_S = 1.5
NO_VERIFIER = (grpc.StatusCode.UNAVAILABLE, "NO_VERIFIER")

Verify = Callable[[Any, Any], Awaitable[None]]


def status_of(error: RequestError) -> tuple[grpc.StatusCode, str]:
    return error.code, error.reason


@asynccontextmanager
async def fake_verifier(
    verify: Verify | None = None, *, model: model_pb2.ModelInfo | None = None, listen: str = "127.0.0.1:0"
) -> AsyncIterator[str]:
    """Yield its address."""

    async def get_model(_: Any, __: Any) -> VerifierServiceGetModelResponse:
        return VerifierServiceGetModelResponse(model=model)

    server = create_server(max_message_bytes=1 << 20)
    servicer: Any = SimpleNamespace(Verify=verify, GetModel=get_model)
    add_VerifierServiceServicer_to_server(servicer, server)
    address = bind(server, listen)
    await server.start()
    try:
        yield address
    finally:
        await server.stop(None)


@dataclass
class Switches(FailoverMetrics):
    """Records failovers and pauses."""

    reasons: list[str] = field(default_factory=list)
    pauses: int = 0

    def switched(self, reason: str) -> None:
        self.reasons.append(reason)

    def paused(self, seconds: float) -> None:
        self.pauses += 1


def connect(address: str, name: str = "", tls: ChannelTLS | None = None) -> RenewedChannel[Any]:
    return RenewedChannel(address, VerifierServiceStub, max_message_bytes=1 << 20, tls=tls, name=name)


@asynccontextmanager
async def matched(
    *verifiers: Any,
    switches: Switches | None = None,
    failover_timeout: float = 10.0,
    burst: int = 64,
    silence: float = SILENCE_S,
) -> AsyncIterator[Verifiers]:
    """These verifiers (services or addresses), once their models are known."""
    addresses = [getattr(each, "address", each) for each in verifiers]
    replicas = Replicas(addresses, connect, timeout=silence)
    await replicas.match(await model_of(addresses[0]))  # the target's model serves as the draft's
    try:
        while not all(replica.has_target for replica in replicas.all()):  # noqa: ASYNC110  # there is no event
            await asyncio.sleep(0.02)
        yield Verifiers(replicas, FailoverBudget(burst), failover_timeout, switches or Switches())
        assert all(replica.num_open == 0 for replica in replicas.all()), "every stream has ended"
    finally:
        replicas.close()


async def model_of(address: str) -> Any:
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = VerifierServiceStub(channel)
        return (await stub.GetModel(VerifierServiceGetModelRequest())).model
