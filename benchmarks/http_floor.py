"""The least that a front can do, for comparison: takes messages of a draft service, and writes events.

Run as `python -m benchmarks.http_floor HOST:PORT_OF_DRAFT HOST:PORT`. It has grpc.aio, uvloop and uvicorn, as the
front, and nothing else: no checks, no retries, no metrics, no JSON of its own. A path below /read only reads: it writes
its events at the end, in one piece.
"""

# First: it prepares gRPC, which the others import.
from outrider.rpc import core  # noqa: F401

# isort: split

import json
import sys
from typing import Any

import grpc
import uvicorn

from protos.outrider.v1 import draft_service_pb2 as pb

HEAD = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
EVENT = (
    b'data: {"id": "cmpl-00000000000000000000000000000000", "object": "text_completion", "created": 1700000000, '
    b'"model": "target", "system_fingerprint": "fp_000000000000", "choices": [{"index":0,"text":" of text",'
    b'"logprobs":null,"finish_reason":null}]}\n\n'
)
"""Of the size that the front's have."""


class Floor:
    """An ASGI application."""

    def __init__(self, draft: str) -> None:
        self._draft = draft
        self._channel: grpc.aio.Channel | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body, is_whole = b"", False
        while not is_whole:
            message = await receive()
            body += message.get("body", b"")
            is_whole = not message.get("more_body", False)
        await send(HEAD)
        if scope["method"] == "POST":
            await self._text(json.loads(body), send, only_reads=scope["path"].startswith("/read"))
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async def _text(self, body: Any, send: Any, *, only_reads: bool) -> None:
        if self._channel is None:
            self._channel = grpc.aio.insecure_channel(self._draft)
        read: Any = self._channel.unary_stream(
            "/outrider.v1.DraftService/Generate",
            request_serializer=pb.GenerateRequest.SerializeToString,
            response_deserializer=pb.GenerateResponse.FromString,
        )
        request = pb.GenerateRequest(max_new_tokens=body["max_tokens"], ignore_eos=True)
        request.token_ids.ids.extend(body["prompt"])
        request.sampling.temperature = body["temperature"]
        request.sampling.seed = body["seed"]
        chunks = 0
        async for response in read(request):
            if response.chunk.text:
                chunks += 1
                if not only_reads:
                    await send({"type": "http.response.body", "body": EVENT, "more_body": True})
        if only_reads:
            await send({"type": "http.response.body", "body": EVENT * chunks, "more_body": True})


def main() -> None:
    draft, address = sys.argv[1:]
    host, _, port = address.rpartition(":")
    config: dict[str, Any] = {"loop": "uvloop", "http": "httptools", "ws": "none", "lifespan": "off"}
    uvicorn.run(Floor(draft), host=host, port=int(port), log_level="warning", access_log=False, **config)


if __name__ == "__main__":
    main()
