"""Frames have one size and leave at one pace; cut and joined responses lose nothing."""

import asyncio
from itertools import pairwise, zip_longest

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draft_service.privacy import Emission, Frames, framed
from draft_service.responses import Responses
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


def text(words: str, *, held: int = 0, index: int = 0) -> GenerateResponse:
    return GenerateResponse(chunk=GenerateChunk(index=index, text=words, held_tokens=held))


PIECES = st.lists(st.tuples(st.text("ab é😀", max_size=120), st.integers(0, 2**31), st.integers(0, 1)), max_size=40)
ROUNDS = st.lists(st.integers(1, 5), min_size=1, max_size=20)


def in_rounds(pieces: list[tuple[str, int, int]], rounds: list[int]) -> list[list[GenerateResponse]]:
    """Each round's responses: its tokens, then the text of each. Two samples, by turns."""
    responses: list[list[list[GenerateResponse]]] = [[], []]
    for index in (0, 1):
        own = [(words, number) for words, number, i in pieces if i == index]
        turn = 0
        while own:
            now, own = own[: rounds[turn % len(rounds)]], own[rounds[turn % len(rounds)] :]
            turn += 1
            tokens = [token(number, held=i + 1, index=index) for i, (_, number) in enumerate(now)]
            texts = [text(words, held=len(now) - i - 1, index=index) for i, (words, _) in enumerate(now)]
            responses[index].append([*tokens, *texts])
    return [each for both in zip_longest(*responses) for each in both if each]


@given(PIECES, ROUNDS)
@settings(max_examples=200, deadline=None)
def test_frames_have_one_size_and_resume_after_any(pieces: list[tuple[str, int, int]], rounds: list[int]) -> None:
    """After each frame a client has all text of the tokens that are not held, and so can resume."""
    frames, sent = frames_of(), []
    for responses in in_rounds(pieces, rounds):
        for response in responses:
            frames.put(response)
        sent.append(frames.take())
    while not frames.are_empty:
        sent.append(frames.take())
    assert {frame.ByteSize() for frame in sent} <= {SIZE}
    for index in (0, 1):
        own = [(words, number) for words, number, i in pieces if i == index]
        texts, tokens, whole, text = iter([words for words, _ in own]), list[int](), 0, ""
        for chunk in (frame.chunk for frame in sent if frame.HasField("chunk") and frame.chunk.index == index):
            assert len(chunk.origins) == len(chunk.token_ids)
            tokens += chunk.token_ids
            text += chunk.text
            if ended := len(tokens) - chunk.held_tokens - whole:
                assert text == "".join(next(texts) for _ in range(ended))
                text = ""
            whole += ended
        assert (tokens, whole, text) == ([number for _, number in own], len(own), "")


@given(st.lists(st.integers(0, 2**31), min_size=40, max_size=60))
@settings(max_examples=10, deadline=None)
def test_the_frame_of_a_token_does_not_depend_on_its_value(numbers: list[int]) -> None:
    """Otherwise a failure would reveal something: a token of one byte takes the space of five."""

    def frame_of_the_last(numbers: list[int]) -> int:
        frames, count, left = frames_of(), 0, len(numbers)
        for number in numbers:
            frames.put(token(number))
        while left:
            left -= len(frames.take().chunk.token_ids)
            count += 1
        return count

    for end in range(1, len(numbers)):
        before = numbers[:end]
        assert frame_of_the_last([*before, 0]) == frame_of_the_last([*before, 2**32 - 1])


@pytest.mark.parametrize("size", [0, 1000])
def test_samples_that_write_by_turns_have_no_frame_for_each_token(size: int) -> None:
    frames, found = frames_of(size), dict[int, list[int]]()
    for number in range(20):
        for index in range(4):
            frames.put(token(number, held=0, index=index))
    for _ in range(4):
        chunk = frames.take().chunk
        found[chunk.index] = list(chunk.token_ids)
    assert found == {index: list(range(20)) for index in range(4)}
    assert frames.are_empty


def test_part_of_a_tokens_text_does_not_join_the_tokens_before_it() -> None:
    frames = frames_of()
    for response in (token(7, held=1), token(8, held=2), text("whole", held=1), text("pa", held=1)):
        frames.put(response)
    first, second = frames.take().chunk, frames.take().chunk
    assert (first.text, list(first.token_ids), first.held_tokens) == ("whole", [7, 8], 1)
    assert (second.text, list(second.token_ids), second.held_tokens) == ("pa", [], 1)


@fake_clock
async def test_a_frame_is_full_of_one_samples_tokens() -> None:
    """Also if the tokens of several samples wait, which come by turns."""
    counts = {}
    for samples in (1, 4):
        responses, frames = Responses(), []
        responses.send(STARTED)
        for number in range(400):
            for index in range(samples):
                responses.send(token(number, held=0, index=index))
        responses.end()
        async for frame in framed(responses, Emission(1000, TOKEN_BYTES, 0.05)):
            frames.append(len(frame.chunk.token_ids))
        counts[samples] = frames[1]
        assert sum(frames) == 400 * samples
        assert len(frames) <= 1 + samples * (2 + 400 // frames[1])
    assert counts[1] == counts[4] > 100


@fake_clock
async def test_frames_leave_by_the_clock_even_if_empty() -> None:
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


@fake_clock
async def test_the_pace_never_catches_up_after_a_slow_reader() -> None:
    """A burst would show how many frames waited."""
    responses, pace = Responses(), 0.05
    responses.send(STARTED)
    clock, times = asyncio.get_running_loop().time, []
    frames = framed(responses, Emission(SIZE, TOKEN_BYTES, pace))
    async for _ in frames:
        times.append(clock())
        if len(times) == 3:
            await asyncio.sleep(10.2 * pace)
        if len(times) == 8:
            break
    await frames.aclose()
    gaps = [after - before for before, after in pairwise(times)]
    assert gaps == pytest.approx([pace, pace, 11 * pace, *[pace] * 4])
