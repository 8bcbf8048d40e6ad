"""Frames: one size, one pace, and nothing said is lost, whatever is cut and joined."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draft_service.output import Responses
from draft_service.privacy import Emission, Frames, framed
from protos.outrider.v1.draft_service_pb2 import GenerateChunk, GenerateFinished, GenerateResponse, GenerateStarted
from tests.fake_clock import fake_clock

SIZE, TOKEN_BYTES = 160, 48
STARTED = GenerateResponse(started=GenerateStarted(request_id="r", prompt_token_ids=[1] * 400))
FINISHED = GenerateResponse(finished=GenerateFinished(finish_reason=3))  # type: ignore[arg-type]


def frames_of(size: int = SIZE) -> Frames:
    return Frames(size, token_bytes=TOKEN_BYTES)


def token(number: int, *, held: int = 1, index: int = 0) -> GenerateResponse:
    return GenerateResponse(
        chunk=GenerateChunk(index=index, token_ids=[number], origins=[2], held_tokens=held)  # type: ignore[list-item]
    )


def text(said: str, *, held: int = 0, index: int = 0) -> GenerateResponse:
    return GenerateResponse(chunk=GenerateChunk(index=index, text=said, held_tokens=held))


PIECES = st.lists(st.tuples(st.text("ab é😀", max_size=120), st.integers(0, 2**31), st.integers(0, 1)), max_size=40)
ROUNDS = st.lists(st.integers(1, 5), min_size=1, max_size=20)


def in_rounds(pieces: list[tuple[str, int, int]], rounds: list[int]) -> list[list[GenerateResponse]]:
    """What each round says: its tokens, then the text of each; of two samples, whose rounds take turns."""
    said = []
    for index in (0, 1):
        own = [(words, number) for words, number, i in pieces if i == index]
        turn = 0
        while own:
            now, own = own[: rounds[turn % len(rounds)]], own[rounds[turn % len(rounds)] :]
            turn += 1
            tokens = [token(number, held=i + 1, index=index) for i, (_, number) in enumerate(now)]
            texts = [text(words, held=len(now) - i - 1, index=index) for i, (words, _) in enumerate(now)]
            said.append([*tokens, *texts])
    return said


@given(PIECES, ROUNDS)
@settings(max_examples=150, deadline=None)
def test_frames_have_one_size_and_say_all_of_it_in_order(pieces: list[tuple[str, int, int]], rounds: list[int]) -> None:
    frames, sent = frames_of(), []
    for said in in_rounds(pieces, rounds):
        for response in said:
            frames.put(response)
        sent.append(frames.take())
    while not frames.are_empty:
        sent.append(frames.take())
    assert {frame.ByteSize() for frame in sent} <= {SIZE}
    for index in (0, 1):
        chunks = [frame.chunk for frame in sent if frame.HasField("chunk") and frame.chunk.index == index]
        assert "".join(each.text for each in chunks) == "".join(words for words, _, i in pieces if i == index)
        assert [number for each in chunks for number in each.token_ids] == [n for _, n, i in pieces if i == index]
        assert all(len(each.origins) == len(each.token_ids) for each in chunks)


@given(PIECES, ROUNDS)
@settings(max_examples=100, deadline=None)
def test_text_that_came_with_the_end_of_tokens_is_just_theirs(
    pieces: list[tuple[str, int, int]], rounds: list[int]
) -> None:
    """Who resumes after any frame gives its tokens and how many are held, and drops the text of none."""
    pieces = [(words, number, 0) for words, number, _ in pieces]
    frames = frames_of()
    for said in in_rounds(pieces, rounds):
        for response in said:
            frames.put(response)
    texts, sent, whole, waiting = iter([words for words, _, _ in pieces]), 0, 0, ""
    while not frames.are_empty:
        chunk = frames.take().chunk
        sent += len(chunk.token_ids)
        waiting += chunk.text
        ended = sent - chunk.held_tokens - whole
        if ended:
            assert waiting == "".join(next(texts) for _ in range(ended))
            waiting = ""
        whole += ended


@given(st.lists(st.integers(0, 2**31), min_size=40, max_size=60))
@settings(max_examples=10, deadline=None)
def test_whether_a_token_is_in_a_frame_does_not_depend_on_what_it_is(numbers: list[int]) -> None:
    """What is sent before a death does not depend on the tokens: a last token of one byte takes the space of five."""

    def place_of_the_last(numbers: list[int]) -> int:
        frames, count, left = frames_of(), 0, len(numbers)
        for number in numbers:
            frames.put(token(number))
        while left:
            left -= len(frames.take().chunk.token_ids)
            count += 1
        return count

    for end in range(1, len(numbers)):
        before = numbers[:end]
        assert place_of_the_last([*before, 0]) == place_of_the_last([*before, 2**32 - 1])


def test_a_cut_tokens_beginning_does_not_join_the_tokens_before_it() -> None:
    frames = frames_of()
    for response in (token(7, held=1), token(8, held=2), text("whole", held=1), text("pa", held=1)):
        frames.put(response)
    first, second = frames.take().chunk, frames.take().chunk
    assert (first.text, list(first.token_ids), first.held_tokens) == ("whole", [7, 8], 1)
    assert (second.text, list(second.token_ids), second.held_tokens) == ("pa", [], 1)


@fake_clock
async def test_frames_leave_by_the_clock_whether_or_not_there_is_something_to_say() -> None:
    responses, pace = Responses(), 0.05
    responses.send(STARTED)
    times, frames = [], []
    clock = asyncio.get_running_loop().time

    async def read() -> None:
        async for frame in framed(responses, Emission(SIZE, TOKEN_BYTES, pace)):
            times.append(clock())
            frames.append(frame)

    reader = asyncio.create_task(read())
    await asyncio.sleep(0.12)
    for number in range(30):
        responses.send(token(number))
        responses.send(text("ab"))
    await asyncio.sleep(0.12)
    responses.send(FINISHED)
    responses.end()
    await reader
    assert [frame.WhichOneof("event") for frame in frames] == ["started", None, None, "chunk", "chunk", "finished"]
    assert {frame.ByteSize() for frame in frames[1:]} == {SIZE}
    assert times == pytest.approx([number * pace for number in range(6)])
