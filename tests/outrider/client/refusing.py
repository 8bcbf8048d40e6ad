"""A server that speaks for a draft service in trouble: it refuses a number of calls before it answers, or after."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from outrider.rpc import errors
from outrider.rpc.errors import RequestError
from outrider.rpc.server import bind, create_server
from protos.outrider.v1 import draft_service_pb2 as pb
from protos.outrider.v1 import draft_service_pb2_grpc


class Refusing(draft_service_pb2_grpc.DraftServiceServicer):
    """Refuses the first `times` calls with `error`; where `late`, only after one response, and where `at_the_end`,
    after all of them.
    """

    def __init__(
        self, error: RequestError, *, times: int = 1_000, late: bool = False, at_the_end: bool = False
    ) -> None:
        self.error = error
        self.times = times
        self.late = late
        self.at_the_end = at_the_end
        self.calls = 0

    @errors.guarded
    async def GetModel(self, request: pb.DraftServiceGetModelRequest, context: Any) -> pb.DraftServiceGetModelResponse:
        raise self.error

    @errors.guarded
    async def Propose(
        self, request_iterator: AsyncIterator[pb.ProposeRequest], context: Any
    ) -> AsyncIterator[pb.ProposeResponse]:
        async for _ in request_iterator:
            raise self.error
        yield pb.ProposeResponse()

    @errors.guarded
    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        self.calls += 1
        refused = self.calls <= self.times
        if refused and not self.late and not self.at_the_end:
            raise self.error
        yield pb.GenerateResponse(started=pb.GenerateStarted(request_id=f"call {self.calls}", max_new_tokens=9))
        if refused and not self.at_the_end:
            raise self.error
        yield pb.GenerateResponse(finished=pb.GenerateFinished())
        if refused:
            raise self.error


@asynccontextmanager
async def refusing(servicer: Refusing) -> AsyncIterator[str]:
    """The server on a free port; its address."""
    server: grpc.aio.Server = create_server(max_message_bytes=1 << 20)
    draft_service_pb2_grpc.add_DraftServiceServicer_to_server(servicer, server)
    address = bind(server, "127.0.0.1:0")
    await server.start()
    try:
        yield address
    finally:
        await server.stop(None)
