"""An abort while a message is being written: a client that does not read, over a real socket."""

import asyncio
from itertools import count
from typing import Any

import grpc
from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto import vllm_engine_pb2_grpc

from draft_service.vllm_service import Call
from protos.outrider.v1 import draft_service_pb2, model_pb2

LIMITS = model_pb2.Limits(max_samples=1, max_message_bytes=1 << 26)
TOKENS = [1] * (1 << 12)
# Without the probe the window stays small, and a client that does not read stops its writer soon.
SMALL_WINDOW = (("grpc.http2.bdp_probe", 0), ("grpc.max_receive_message_length", -1))


class Endless(vllm_engine_pb2_grpc.VllmEngineServicer):
    """A text without an end, as fast as its reader takes it."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.written = 0

    async def Generate(self, request: Any, context: Any) -> None:
        call = Call(request, context, LIMITS)
        self.calls.append(call)
        await call.run(lambda: self._generate(call))

    async def _generate(self, call: Call) -> None:
        for self.written in count():
            chunk = draft_service_pb2.GenerateChunk(token_ids=TOKENS)
            await call.write(draft_service_pb2.GenerateResponse(chunk=chunk))

    async def stuck(self) -> None:
        """Return once a write waits for the reader."""
        before = -1
        while before != self.written:
            before = self.written
            await asyncio.sleep(0.1)


async def test_an_abort_during_a_write_loses_no_token() -> None:
    """A write that is cancelled would be lost, and block the next one."""
    endless, server = Endless(), grpc.aio.server()
    vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(endless, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", SMALL_WINDOW) as channel:
            request = vllm.GenerateRequest(stream=True)
            answer = aiter(vllm_engine_pb2_grpc.VllmEngineStub(channel).Generate(request, timeout=60))
            first = await anext(answer)
            await endless.stuck()
            endless.calls[0].abort()
            await asyncio.sleep(0.1)
            responses = [first, *[response async for response in answer]]
    finally:
        await server.stop(None)
    streamed = [token for response in responses for token in response.chunk.token_ids]
    end = responses[-1].complete
    assert (end.finish_reason, end.completion_tokens) == ("abort", len(streamed))
    assert list(end.output_ids) == streamed
    assert len(streamed) == len(TOKENS) * (endless.written + 1), "the message that was being written came"
