"""Responses keep their order, and whoever makes them waits while a client is too far behind."""

import asyncio

import pytest

from draft_service.output import MAX_BACKLOG, ROOM_AGAIN, Responses
from outrider.rpc.errors import RequestError, internal
from protos.outrider.v1.draft_service_pb2 import GenerateChunk, GenerateResponse


def response(index: int) -> GenerateResponse:
    return GenerateResponse(chunk=GenerateChunk(index=index))


async def test_what_was_sent_is_read_in_order_before_the_error() -> None:
    responses = Responses()
    for index in range(3):
        responses.send(response(index))
    responses.end(internal("INTERNAL", "broken"))
    reader = aiter(responses)
    assert [(await anext(reader)).chunk.index for _ in range(3)] == [0, 1, 2]
    with pytest.raises(RequestError, match="broken"):
        await anext(reader)


async def test_a_reader_waits_for_more() -> None:
    responses = Responses()

    async def produce() -> None:
        for index in range(200):
            await responses.room()
            responses.send(response(index))
            await asyncio.sleep(0)
        responses.end()

    producer = asyncio.create_task(produce())
    assert [each.chunk.index async for each in responses] == list(range(200))
    await producer


async def test_reading_half_makes_room() -> None:
    responses = Responses()
    for index in range(MAX_BACKLOG):
        responses.send(response(index))
    waiting = asyncio.create_task(responses.room())
    await asyncio.sleep(0)
    assert not waiting.done()
    reader = aiter(responses)
    for _ in range(MAX_BACKLOG - ROOM_AGAIN):
        assert not waiting.done()
        await anext(reader)
    await asyncio.wait_for(waiting, 30.0)
