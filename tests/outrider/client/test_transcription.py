"""Long audio is cut into windows and segments as transformers' Whisper does it."""

import random
from collections.abc import Sequence
from itertools import chain

import pytest

from outrider.client import Chunk, Finished, Segment
from outrider.client.transcription import Window, find_spans
from protos.outrider.v1 import draft_service_pb2 as pb
from protos.outrider.v1 import sampling_pb2
from tests.encoder_decoders import segments_of as whispers_segments

FIRST = 100
"""The token of the timestamp 0.00."""
EOS = 99


def random_window(random_: random.Random) -> tuple[list[int], int]:
    """Tokens and frames of a window. The first token is a timestamp, as the model's rules have it; the others may
    break those rules.
    """
    frames = random_.choice([3000, random_.randrange(1, 3000)])
    count = random_.randrange(1, 12)
    share = random_.choice([0.0, 0.2, 0.5, 0.9])
    tokens = [
        FIRST + random_.randrange(-(-frames // 2)) if random_.random() < share else random_.randrange(FIRST - 1)
        for _ in range(count)
    ]
    tokens[0] = FIRST + random_.randrange(3)
    return tokens, frames


def test_segments_and_the_next_window_are_those_of_transformers() -> None:
    random_ = random.Random(0)
    kinds = set()
    for _ in range(3000):
        tokens, frames = random_window(random_)
        seek = random_.randrange(10_000)
        expected, advance = whispers_segments(tokens, seek, frames, FIRST)
        spans, offset = find_spans(tokens, FIRST, frames)
        assert offset == advance
        kinds.add((len(spans) > 1, offset == frames))
        assert len(spans) == len(expected)
        for i, (span, (start, end, taken)) in enumerate(zip(spans, expected, strict=True)):
            assert seek * 0.01 + span.start * 0.02 == pytest.approx(start, abs=1e-6)
            # The product of transformers is rounded down where it is just below a whole step.
            assert seek * 0.01 + span.stop * 0.02 == pytest.approx(end, abs=0.0201 if len(tokens) == span.end else 1e-6)
            ours = tokens[span.begin : span.end]
            # There the last segment also has the timestamp after it.
            assert taken == ours or (i == len(spans) - 1 and taken == tokens[span.begin : span.end + 1])
    assert kinds == {(False, False), (False, True), (True, False), (True, True)}


def test_without_timestamps_the_window_is_one_segment() -> None:
    (span,), advance = find_spans([1, FIRST + 4, FIRST + 5], None, 600)
    assert (span.begin, span.end, span.start, span.stop, advance) == (0, 3, 0, 300, 600)
    (span,), advance = find_spans([], FIRST, 600)
    assert (span.begin, span.end, span.stop, advance) == (0, 0, 300, 600)


def text_of(token: int) -> str:
    return "" if token >= FIRST else f" {token}"


def written(tokens: Sequence[int], sizes: Sequence[int], *, held: int = 0) -> list[Chunk | Finished]:
    """The events of a window: chunks of these sizes, whose last `held` tokens come without text."""
    events: list[Chunk | Finished] = []
    begin = 0
    shown = 0
    for size in sizes:
        part = tokens[begin : begin + size]
        begin += len(part)
        whole = len(tokens) if begin == len(tokens) else max(begin - held, shown)
        text = "".join(text_of(token) for token in tokens[shown:whole] if token != EOS)
        shown = whole
        chunk = pb.GenerateChunk(
            text=text, token_ids=part, token_texts=[text_of(token) for token in part], held_tokens=begin - whole
        )
        events.append(Chunk.of(chunk))
    ends = tokens[-1:] == [EOS]
    reason = sampling_pb2.FINISH_REASON_STOP_TOKEN if ends else sampling_pb2.FINISH_REASON_LENGTH
    return [*events, Finished.of(pb.GenerateFinished(finish_reason=reason))]


def segments_of(window: Window, events: Sequence[Chunk | Finished]) -> list[list[Segment]]:
    return [window.take(event) for event in events]


def flat(parts: Sequence[Sequence[Segment]]) -> list[Segment]:
    return list(chain.from_iterable(parts))


@pytest.mark.parametrize("held", [0, 2])
def test_segments_come_as_soon_as_they_are_whole_and_do_not_change(held: int) -> None:
    """In any pieces they are those of the whole, with the text between their timestamps."""
    random_ = random.Random(held)
    early = 0
    for _ in range(500):
        tokens, frames = random_window(random_)
        if random_.random() < 0.7:
            tokens.append(EOS)
        sizes = [random_.randrange(1, 4) for _ in tokens]
        at_once, window = Window(40, frames, FIRST), Window(40, frames, FIRST)
        expected = segments_of(at_once, written(tokens, [len(tokens)]))
        found = segments_of(window, written(tokens, sizes, held=held))
        assert flat(found) == flat(expected)
        assert window.advance == at_once.advance > 0
        early += sum(map(len, found[:-1]))
        whole = [token for token in tokens if token != EOS]
        spans, _ = find_spans(whole, FIRST, frames)
        texts = ["".join(map(text_of, whole[span.begin : span.end])) for span in spans]
        assert [segment.text for segment in flat(found)] == [text for text in texts if text]
    assert early > 50


def test_timestamps_that_are_not_asked_for_are_no_text() -> None:
    window = Window(0, 600, FIRST, has_times=False)
    texts = [" 1", "<|0.08|>", "<|0.10|>", " 2"]
    chunk = pb.GenerateChunk(text="".join(texts), token_ids=[1, FIRST + 4, FIRST + 5, 2], token_texts=texts)
    finished = Finished.of(pb.GenerateFinished(finish_reason=sampling_pb2.FINISH_REASON_LENGTH))
    (segment,) = flat(segments_of(window, [Chunk.of(chunk), finished]))
    assert (segment.text, segment.start, segment.end, window.advance) == (" 1 2", 0.0, 6.0, 600)


def test_a_pair_at_zero_does_not_repeat_the_window() -> None:
    window = Window(0, 3000, FIRST)
    segments_of(window, written([FIRST, FIRST, 7, EOS], [4]))
    assert window.advance == 3000


def test_times_count_from_the_begin_of_the_audio() -> None:
    window = Window(1234, 3000, FIRST)
    events = written([FIRST, 1, 2, FIRST + 55, FIRST + 55, 3, EOS], [9])
    (segment,) = flat(segments_of(window, events))
    assert segment == Segment(12.34, 13.44, " 1 2", (FIRST, 1, 2, FIRST + 55))
    assert window.advance == 110
