"""Output text: it equals the reference for any tokens, without stop strings; responses come in order."""

import asyncio
import codecs
from collections.abc import AsyncIterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draft_service.output import Emitter, OutputText
from draft_service.responses import (
    BYTES_JOINED,
    HEARTBEAT_SECONDS,
    MAX_BACKLOG,
    RESUME_BACKLOG,
    SECONDS_JOINED,
    Responses,
)
from draft_service.sequence import SpeculationCounts, Timings
from outrider.runtime.loader import ModelSource
from outrider.runtime.tokenizer import IncrementalDetokenizer, load_tokenizer
from protos.outrider.v1 import draft_service_pb2, sampling_pb2, speculation_pb2
from protos.outrider.v1.draft_service_pb2 import GenerateChunk, GenerateResponse
from tests.cluster import MODELS
from tests.fake_clock import fake_clock


class Bytes(IncrementalDetokenizer):
    """A detokenizer whose token n is the bytes `pieces[n]`: UTF-8 may be cut anywhere, and a piece may be empty."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.pending, self.kept = False, 0

    def push(self, token: int) -> str:
        text = self._decoder.decode(self._pieces[token])
        self.pending = bool(self._decoder.getstate()[0])
        self.kept = int(self.pending)
        return text

    def flush(self) -> str:
        self.pending, self.kept = False, 0
        return self._decoder.decode(b"", final=True)


def first_stop(ends: Sequence[int], text: str, stops: Sequence[str], min_tokens: int) -> tuple[int, str] | None:
    """Reference: the first character that completes a stop string, in a token late enough; there, the longest one.

    `ends[k]` is the length of the text once token k is in.
    """
    for end in range(1, len(text) + 1):
        tokens = next(k for k, length in enumerate(ends) if length >= end) + 1
        if tokens < min_tokens:
            continue
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return end - len(stop), stop
    return None


def whole_ends(pieces: Sequence[bytes]) -> list[int]:
    """For each token, the length of the text up to the next token that ends between characters."""
    ends: list[int] = []
    for end in range(1, len(pieces) + 1):
        try:
            length = len(b"".join(pieces[:end]).decode())
        except UnicodeDecodeError:
            continue
        ends += [length] * (end - len(ends))
    return ends


def run(
    pieces: list[bytes], stops: list[str], min_tokens: int, groups: Sequence[int]
) -> tuple[list[str], int, str | None]:
    """Push all tokens, and release after each group. Return texts, tokens released, and the stop string."""
    out = OutputText(Bytes(pieces), stop=stops, min_tokens=min_tokens)
    texts, tokens = [], 0
    at, group = 0, 0
    while at < len(pieces) and out.stopped_by is None:
        for _ in range(groups[group % len(groups)]):
            if at < len(pieces) and not out.push(at):
                at += 1
            else:
                break
        group += 1
        released = out.release()
        texts.append(released.text + released.tail)
        tokens += released.tokens
        if out.stopped_by is None:
            whole = b"".join(pieces[:tokens])
            assert "".join(texts) == whole.decode(), "text of the tokens sent"
    released = out.finish()
    return [*texts, released.text + released.tail], tokens + released.tokens, out.stopped_by


TEXTS = st.text(st.sampled_from("abé€😀"), min_size=1, max_size=30)
STOPS = st.lists(st.text(st.sampled_from("abé€😀"), min_size=1, max_size=4), max_size=3)
GROUPS = st.lists(st.integers(1, 6), min_size=1, max_size=4)


@st.composite
def cut_texts(draw: st.DrawFn) -> list[bytes]:
    """A text as tokens, cut at any byte; some tokens are empty."""
    data = draw(TEXTS).encode()
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=20)))
    return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]


@settings(max_examples=600, deadline=None)
@given(cut_texts(), STOPS, st.integers(0, 8), GROUPS)
def test_text_is_the_references_with_any_cuts(
    pieces: list[bytes], stops: list[str], min_tokens: int, groups: list[int]
) -> None:
    text = b"".join(pieces).decode()
    ends, so_far = list[int](), Bytes(pieces)
    for i in range(len(pieces)):
        ends.append((ends[-1] if ends else 0) + len(so_far.push(i)))
    expected = first_stop(ends, text, stops, min_tokens)

    texts, tokens, stop = run(pieces, stops, min_tokens, groups)

    cut = len(text) if expected is None else expected[0]
    assert "".join(texts) == text[:cut], "no part of a stop string was sent"
    assert stop == (None if expected is None else expected[1])
    assert tokens == sum(end <= cut for end in whole_ends(pieces)), "tokens that end at or before the cut"


def test_a_stop_token_is_the_last_token_and_has_no_text() -> None:
    out = OutputText(Bytes([b"x", b"\xf0\x9f"]), stop=["xyz"])
    out.push(0)
    out.push(1)
    out.push_silent()
    assert out.release().tokens == 0
    released = out.finish()
    assert (released.text, released.tokens) == ("x\N{REPLACEMENT CHARACTER}", 3)


@pytest.mark.parametrize("count", [1, 10, 70])
def test_tokens_of_broken_characters_before_a_stop_string_are_part_of_the_output(count: int) -> None:
    tokenizer = load_tokenizer(ModelSource(str(MODELS / "target")))
    broken = next(token for token in range(300) if tokenizer.decode([token], False) == "\N{REPLACEMENT CHARACTER}")
    out = OutputText(IncrementalDetokenizer(tokenizer), stop=["return"])
    assert not any(out.push(broken) for _ in range(count))
    assert any(out.push(token) for token in tokenizer.encode("return"))
    released = out.release()
    assert (released.text, released.tail) == ("\N{REPLACEMENT CHARACTER}" * count, "")
    assert released.ends == tuple(range(1, count + 1))
    assert out.finish().tokens == 0


@pytest.mark.parametrize("reason", [sampling_pb2.FINISH_REASON_LENGTH, sampling_pb2.FINISH_REASON_STOP_TOKEN])
async def test_text_sent_in_parts_resumes_after_any(reason: sampling_pb2.FinishReason) -> None:
    """Also inside a character, and before a token without text."""
    tokenizer = load_tokenizer(ModelSource(str(MODELS / "target")))
    special = "<|endoftext|>"
    tokens = tokenizer.encode(f"ab\N{GRINNING FACE}{special}c\n{special}", add_special=False)
    responses, timings = Responses(), Timings(0.0)
    counts = SpeculationCounts(draft_service_pb2.DRAFTER_MODEL, draft_service_pb2.SPECULATION_POLICY_FIXED)
    text = OutputText(IncrementalDetokenizer(tokenizer))
    emitter = Emitter(responses, text, index=0, prompt_tokens=1, one_by_one=True)
    emitter.take(speculation_pb2.Verdict(token_ids=tokens, finish_reason=reason), [])
    emitter.finish(reason, counts, timings)
    sent, count = "", 0
    while (response := responses.take_now()) is not None and response.HasField("chunk"):
        sent += response.chunk.text
        count += len(response.chunk.token_ids)
        whole = count - response.chunk.held_tokens
        rest = IncrementalDetokenizer(tokenizer, tokens[:whole])
        assert sent + "".join(rest.push(token) for token in tokens[whole:]) == tokenizer.decode(tokens)
    assert whole == len(tokens)


def test_resumed_output_counts_the_tokens_before_it() -> None:
    out = OutputText(Bytes([b"END"]), stop=["END"], min_tokens=4, written=3)
    assert out.push(0)
    out = OutputText(Bytes([b"END"]), stop=["END"], min_tokens=4, written=2)
    assert not out.push(0)


def test_one_of_many_stop_strings_is_found() -> None:
    """As many as `--max-stop-strings` may allow."""
    stops = [f"{'a' * 250}{i}" for i in range(10_000)]
    out = OutputText(Bytes([b"a" * 250, b"1"]), stop=stops)
    assert not out.push(0)
    assert not out.release().text
    assert out.push(1)
    assert out.stopped_by == stops[1]


def response(index: int) -> GenerateResponse:
    return GenerateResponse(chunk=GenerateChunk(index=index))


async def test_the_writer_waits_until_half_of_the_backlog_is_read() -> None:
    responses = Responses()
    for index in range(MAX_BACKLOG):
        responses.send(response(index))
    waiting = asyncio.create_task(responses.wait_for_client())
    await asyncio.sleep(0)
    reader = aiter(responses)
    for _ in range(MAX_BACKLOG - RESUME_BACKLOG):
        assert not waiting.done()
        await anext(reader)
    await asyncio.wait_for(waiting, 30.0)


@fake_clock
async def test_a_heartbeat_comes_so_long_after_the_last_event() -> None:
    responses, loop = Responses(), asyncio.get_running_loop()
    reader = aiter(responses)
    for share in (0.1, 0.9, 0.5):
        await asyncio.sleep(share * HEARTBEAT_SECONDS)
        responses.send(response(1))
        sent = loop.time()
        assert (await anext(reader)) == response(1)
        assert (await anext(reader)).WhichOneof("event") is None
        assert loop.time() - sent == pytest.approx(HEARTBEAT_SECONDS)


@fake_clock
async def test_heartbeats_fill_pauses_and_do_not_pile_up() -> None:
    responses = Responses()
    reader = aiter(responses)
    for _ in range(3):
        assert (await anext(reader)).WhichOneof("event") is None
    responses.send(response(1))
    assert (await anext(reader)) == response(1)
    await asyncio.sleep(10 * HEARTBEAT_SECONDS)  # the client does not read
    responses.end()
    assert [each async for each in reader] == []


async def indices(reader: AsyncIterator[GenerateResponse]) -> list[int]:
    """Of the chunks in the next response."""
    found = await anext(reader)
    return [each.chunk.index for each in found.joined or [found]]


@fake_clock
async def test_joined_responses_come_once_a_second_and_at_the_end() -> None:
    responses, loop = Responses(), asyncio.get_running_loop()
    responses.are_joined = True
    began, reader = loop.time(), aiter(responses)
    reading = asyncio.create_task(indices(reader))
    for index in range(5):  # at 0, 0.3, 0.6, 0.9 and 1.2 s
        responses.send(response(index))
        await asyncio.sleep(0.3 * SECONDS_JOINED)
    assert await reading == [0, 1, 2, 3]
    assert await indices(reader) == [4]
    assert loop.time() - began == pytest.approx(2.0 * SECONDS_JOINED)
    reading = asyncio.create_task(indices(reader))
    for index in (5, 6):
        responses.send(response(index))
        await asyncio.sleep(0.1 * SECONDS_JOINED)
    assert not reading.done()
    responses.end(ValueError("the end"))
    assert await reading == [5, 6]
    with pytest.raises(ValueError, match="the end"):
        await anext(reader)


async def test_joined_responses_do_not_wait_for_more_than_fit() -> None:
    """Neither for more than half of the backlog, nor in messages that grow without a bound."""
    responses = Responses()
    responses.are_joined = True
    reader = aiter(responses)
    for index in range(RESUME_BACKLOG):
        responses.send(response(index))
    assert await asyncio.wait_for(indices(reader), 30.0) == list(range(RESUME_BACKLOG))
    large = GenerateResponse(chunk=GenerateChunk(text="x" * (BYTES_JOINED // 2)))
    for _ in range(5):
        responses.send(large)
    responses.end()
    assert [len(each.joined) async for each in reader] == [2, 2, 0]


@fake_clock
async def test_a_joined_response_waits_for_a_second_though_none_follows() -> None:
    responses, loop = Responses(), asyncio.get_running_loop()
    responses.are_joined = True
    reader, began = aiter(responses), loop.time()
    reading = asyncio.create_task(indices(reader))
    await asyncio.sleep(0.1 * SECONDS_JOINED)
    responses.send(response(1))
    assert await reading == [1]
    assert loop.time() - began == pytest.approx(SECONDS_JOINED)
    assert (await anext(reader)).WhichOneof("event") is None
    assert loop.time() - began == pytest.approx(SECONDS_JOINED + HEARTBEAT_SECONDS)


@fake_clock
async def test_an_emitter_joins_tokens_until_a_stop_string() -> None:
    responses, timings = Responses(), Timings(0.0)
    responses.are_joined = True
    tokens = OutputText(Bytes([b"a", b"b", b"."]), stop=["."])
    emitter = Emitter(responses, tokens, index=0, prompt_tokens=1)

    async def read() -> list[list[tuple[str, list[int]]]]:
        return [
            [(one.chunk.text, list(one.chunk.token_ids)) for one in each.joined or [each]] async for each in responses
        ]

    reading = asyncio.create_task(read())
    for token, seconds in ((0, 0.0), (1, 0.5), (0, 0.6), (1, 0.1), (1, 0.1), (2, 0.1)):
        await asyncio.sleep(seconds * SECONDS_JOINED)
        emitter.take(speculation_pb2.Verdict(token_ids=[token]), [])
        assert emitter.send(timings) is (token == 2)
    responses.end()
    assert await reading == [[("a", [0])], [("ba", [1, 0]), ("bb", [1, 1, 2])]]


async def test_tokens_of_a_round_come_one_by_one_for_frames() -> None:
    """A frame must not depend on how many tokens a round has, nor on which."""
    responses, timings = Responses(), Timings(0.0)
    text = OutputText(Bytes([b"a", b"b", b"c"]), stop=[])
    emitter = Emitter(responses, text, index=0, prompt_tokens=1, one_by_one=True)
    emitter.take(speculation_pb2.Verdict(token_ids=[0, 1, 2]), [])
    emitter.send(timings)
    responses.end()
    chunks = [each.chunk async for each in responses]
    assert [list(each.token_ids) for each in chunks if each.token_ids] == [[0], [1], [2]]
    assert [each.text for each in chunks if each.text] == ["a", "b", "c"]


@fake_clock
async def test_tokens_that_wait_come_before_an_error() -> None:
    responses, timings = Responses(), Timings(0.0)
    responses.are_joined = True
    emitter = Emitter(responses, OutputText(Bytes([b"a"]), stop=[]), index=0, prompt_tokens=1)
    for _ in range(3):
        emitter.take(speculation_pb2.Verdict(token_ids=[0]), [])
        emitter.send(timings)
    emitter.flush(timings)
    responses.end(ValueError("lost"))
    read = aiter(responses)
    assert sum(len(one.chunk.token_ids) for one in (await anext(read)).joined) == 3
    with pytest.raises(ValueError, match="lost"):
        await anext(read)


@fake_clock
async def test_each_of_several_emitters_sends_once_a_second() -> None:
    """One of them is always a moment later than the other, just after the reader took the responses."""
    responses, timings = Responses(), [Timings(0.0), Timings(0.0)]
    responses.are_joined = True
    emitters = [
        Emitter(responses, OutputText(Bytes([b"a"]), stop=[]), index=index, prompt_tokens=1) for index in range(2)
    ]

    async def read() -> list[int]:
        return [one.chunk.index async for each in responses for one in each.joined or [each]]

    reading = asyncio.create_task(read())
    for _ in range(100):
        for emitter, own in zip(emitters, timings, strict=True):
            emitter.take(speculation_pb2.Verdict(token_ids=[0]), [])
            emitter.send(own)
            await asyncio.sleep(0.05 * SECONDS_JOINED)
    responses.end()
    indices = await reading
    assert [indices.count(index) for index in range(2)] == pytest.approx([10, 10], abs=2)
