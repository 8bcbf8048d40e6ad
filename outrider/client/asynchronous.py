"""`AsyncClient`: one channel, many calls. Knows when a call may be tried again, not what it asks for."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from types import TracebackType
from typing import Self, Unpack

import grpc

from outrider.client import events
from outrider.client.errors import typed
from outrider.client.events import Event
from outrider.client.request import Options, Prompt, build
from outrider.client.results import Collector, Completion
from outrider.rpc.channel import open_channel
from protos.outrider.v1 import draft_service_pb2 as pb
from protos.outrider.v1 import draft_service_pb2_grpc

# Responses stream in small pieces; requests may hold a long prompt.
MAX_MESSAGE_BYTES = 16 * 1024 * 1024

# gRPC's own retries: a call is tried again only while nothing of an answer has arrived, within its deadline, after
# exponential backoff with jitter, and not at all while most calls fail. Attempts beyond five it cuts to five.
_RETRIES = {
    "methodConfig": [
        {
            "name": [{"service": pb.DESCRIPTOR.services_by_name["DraftService"].full_name}],
            "retryPolicy": {
                "maxAttempts": 5,
                "initialBackoff": "0.2s",
                "maxBackoff": "3s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE", "RESOURCE_EXHAUSTED"],
            },
        }
    ]
}


class AsyncClient:
    r"""Talks to the draft service at `HOST:PORT`. One client serves any number of calls at once; make it inside the
    event loop that it is used in.

    Args:
        address: the draft service.
        timeout: seconds that a call may take in all, retries included, unless it says otherwise; None: for ever.
        retry: whether a call that is refused as UNAVAILABLE or RESOURCE_EXHAUSTED is tried again. Only ever before the
            first response.

    >>> import asyncio
    >>> from outrider.client import AsyncClient, Chunk
    >>> async def main():
    ...     async with AsyncClient(address) as client:
    ...         pieces = []
    ...         async for event in client.generate("import os\n", max_new_tokens=16, temperature=0):
    ...             if isinstance(event, Chunk):
    ...                 pieces.append(event.text)
    ...         completion = await client.complete("import os\n", max_new_tokens=16, temperature=0)
    ...         return "".join(pieces) == completion.text
    >>> asyncio.run(main())
    True
    """

    def __init__(self, address: str, *, timeout: float | None = 300.0, retry: bool = True):
        self.address = address
        self._timeout = timeout
        # Said either way: gRPC retries by default, though by a server's policy only.
        options = [("grpc.enable_retries", int(retry))]
        self._channel = open_channel(
            address,
            max_message_bytes=MAX_MESSAGE_BYTES,
            options=[*options, ("grpc.service_config", json.dumps(_RETRIES))] if retry else options,
        )
        self._stub: draft_service_pb2_grpc.DraftServiceAsyncStub = draft_service_pb2_grpc.DraftServiceStub(
            self._channel
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the channel; calls in progress are cancelled."""
        await self._channel.close()

    async def generate(
        self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[Options]
    ) -> AsyncGenerator[Event, None]:
        """Streams one generation: `Started`, then `Chunk`s, then a `Finished` for each sample.

        Leaving the iterator, by `aclose`, by cancelling its task or by dropping it, cancels the call at both services.

        Args:
            prompt: text, token ids, or messages.
            timeout: seconds for this call; None: the client's.
            options: see `Options`.

        Raises:
            OutriderError: of the type that fits; see `outrider.client.errors`.
            TypeError: an option that does not exist.
        """
        timeout = self._timeout if timeout is None else timeout
        call = self._stub.Generate(build(prompt, options), timeout=timeout)
        try:
            async for response in call:
                event = events.read(response)
                if event is not None:
                    yield event
        except grpc.RpcError as error:
            raise typed(error, timeout) from error
        finally:
            call.cancel()  # without effect on a call that has ended

    async def complete(self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[Options]) -> Completion:
        """`generate`, put together. Same arguments, same errors."""
        collector = Collector()
        async for event in self.generate(prompt, timeout=timeout, **options):
            collector.add(event)
        return collector.completion()

    async def get_model(self, *, timeout: float | None = None) -> pb.DraftServiceGetModelResponse:
        """What the pair is: `model` is the draft, `target` the model whose text it is.

        Raises:
            OutriderError: of the type that fits.
        """
        timeout = self._timeout if timeout is None else timeout
        try:
            return await self._stub.GetModel(pb.DraftServiceGetModelRequest(), timeout=timeout)
        except grpc.RpcError as error:
            raise typed(error, timeout) from error
