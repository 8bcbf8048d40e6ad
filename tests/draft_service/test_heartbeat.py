"""Signs of life come while nothing else is said, and no more than one waits for the reader."""

import asyncio

from draft_service.output import Responses
from draft_service.service import Heartbeat
from protos.outrider.v1.draft_service_pb2 import GenerateChunk, GenerateResponse

CHUNK = GenerateResponse(chunk=GenerateChunk(text="a"))
SECONDS = 0.01


async def test_one_comes_whenever_nothing_was_said() -> None:
    responses = Responses()
    with Heartbeat(responses, SECONDS):
        reader = aiter(responses)
        for _ in range(3):
            assert (await anext(reader)).WhichOneof("event") is None
        responses.send(CHUNK)
        assert (await anext(reader)) == CHUNK


async def test_they_do_not_pile_up_and_end_with_the_call() -> None:
    responses = Responses()
    with Heartbeat(responses, SECONDS):
        await asyncio.sleep(10 * SECONDS)
    sent = responses.sent
    assert sent <= 1
    await asyncio.sleep(5 * SECONDS)
    assert responses.sent == sent
