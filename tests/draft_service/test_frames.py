"""Frames: one size, one pace, and nothing said is lost, whatever is cut and joined."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draft_service.frames import Frames, framed
from draft_service.privacy import Emission
from draft_service.responses import Responses
from protos.outrider.v1.draft_service_pb2 import (
    GenerateChunk,
    GenerateFinished,
    GenerateResponse,
    GenerateStarted,
)
from tests.leaping import leaping

SIZE = 160
STARTED = GenerateResponse(started=GenerateStarted(request_id="r", prompt_token_ids=[1] * 400))
FINISHED = GenerateResponse(finished=GenerateFinished(finish_reason=3))  # type: ignore[arg-type]


def chunk(text: str, *tokens: int, index: int = 0) -> GenerateResponse:
    return GenerateResponse(chunk=GenerateChunk(index=index, text=text, token_ids=tokens, origins=[2] * len(tokens)))  # type: ignore[list-item]


PIECES = st.lists(st.tuples(st.text("ab é😀", max_size=120), st.integers(0, 2**31), st.integers(0, 1)), max_size=40)


@given(PIECES, st.lists(st.integers(1, 6), max_size=20))
@settings(max_examples=150, deadline=None)
def test_frames_have_one_size_and_say_all_of_it_in_order(pieces: list[tuple[str, int, int]], bursts: list[int]) -> None:
    frames, sent = Frames(SIZE), []
    queue = [chunk(text, token, index=index) for text, token, index in pieces]
    for burst in [*bursts, len(queue)]:
        for response in queue[:burst]:
            frames.put(response)
        del queue[:burst]
        sent.append(frames.take())
    while not frames.are_empty:
        sent.append(frames.take())
    assert {frame.ByteSize() for frame in sent} == {SIZE}
    for index in (0, 1):
        chunks = [frame.chunk for frame in sent if frame.HasField("chunk") and frame.chunk.index == index]
        assert "".join(each.text for each in chunks) == "".join(text for text, _, i in pieces if i == index)
        assert [token for each in chunks for token in each.token_ids] == [token for _, token, i in pieces if i == index]
        assert all(len(each.origins) == len(each.token_ids) for each in chunks)


@given(PIECES)
@settings(max_examples=100, deadline=None)
def test_text_that_came_with_its_tokens_is_just_theirs(pieces: list[tuple[str, int, int]]) -> None:
    """Who resumes after any frame counts its tokens, and drops text that has come without one."""
    frames = Frames(SIZE)
    texts = iter([text for text, _, _ in pieces])
    for text, token, _ in pieces:
        frames.put(chunk(text, token))
    waiting = ""
    while not frames.are_empty:
        said = frames.take().chunk
        waiting += said.text
        if said.token_ids:
            assert waiting == "".join(next(texts) for _ in said.token_ids)
            waiting = ""


def test_a_cut_tokens_beginning_does_not_join_the_tokens_before_it() -> None:
    frames = Frames(SIZE)
    frames.put(chunk("whole", 7))
    frames.put(chunk("pa"))
    first, second = frames.take().chunk, frames.take().chunk
    assert (first.text, list(first.token_ids)) == ("whole", [7])
    assert (second.text, list(second.token_ids)) == ("pa", [])


def test_what_repeats_the_prompt_takes_a_multiple() -> None:
    frames = Frames(SIZE)
    frames.put(STARTED)
    assert frames.take().ByteSize() == 480


@leaping
async def test_frames_leave_by_the_clock_whether_or_not_there_is_something_to_say() -> None:
    responses, pace = Responses(), 0.05
    responses.send(STARTED)
    times, frames = [], []
    clock = asyncio.get_running_loop().time

    async def read() -> None:
        async for frame in framed(responses, Emission(SIZE, pace)):
            times.append(clock())
            frames.append(frame)

    reader = asyncio.create_task(read())
    await asyncio.sleep(0.12)
    for token in range(30):
        responses.send(chunk("ab", token))
    await asyncio.sleep(0.12)
    responses.send(FINISHED)
    responses.end()
    await reader
    assert [frame.WhichOneof("event") for frame in frames] == ["started", None, None, "chunk", None, "finished"]
    assert {frame.ByteSize() for frame in frames[1:]} == {SIZE}
    assert times == pytest.approx([number * pace for number in range(6)])


@leaping
async def test_frames_never_make_up_for_the_time_in_which_nobody_read() -> None:
    responses, pace = Responses(), 0.05
    responses.send(STARTED)
    clock = asyncio.get_running_loop().time
    frames = framed(responses, Emission(SIZE, pace))
    times = []
    for pause in (0.0, 0.0, 0.32, 0.0, 0.0):
        await anext(frames)
        times.append(clock())
        await asyncio.sleep(pause)
    await frames.aclose()
    assert times == pytest.approx([tick * pace for tick in (0, 1, 2, 9, 10)])


async def test_an_error_comes_after_what_came_before_it() -> None:
    responses = Responses()
    responses.send(STARTED)
    responses.send(chunk("a", 1))
    responses.end(ValueError("broken"))
    frames: list[GenerateResponse] = []

    async def read() -> None:
        async for frame in framed(responses, Emission(SIZE, 0.001)):
            frames.append(frame)

    with pytest.raises(ValueError, match="broken"):
        await read()
    assert [frame.WhichOneof("event") for frame in frames] == ["started", "chunk"]
