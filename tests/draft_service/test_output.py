"""Text out: whatever the tokens, the text is the reference's, nothing of a stop string leaks, and tokens are whole."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draft_service.output import OutputText, StopFinder


class Bytes:
    """A detokenizer whose token n is the bytes `pieces[n]`: UTF-8 may be cut anywhere, and a piece may be empty."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = pieces
        self._rest = b""

    def push(self, token: int) -> str:
        self._rest += self._pieces[token]
        whole = self._rest
        for cut in range(4):
            try:
                text = whole[: len(whole) - cut].decode()
            except UnicodeDecodeError:
                continue
            self._rest = whole[len(whole) - cut :]
            return text
        return ""

    def flush(self) -> str:
        rest, self._rest = self._rest, b""
        return rest.decode(errors="replace")

    @property
    def pending(self) -> bool:
        return bool(self._rest)


def first_stop(ends: Sequence[int], text: str, stops: Sequence[str], min_tokens: int) -> tuple[int, str] | None:
    """The plain meaning: the first character that completes a stop string, in a token late enough; the longest there.

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
    """For each token, the length of the text with the first token from it on that ends between characters."""
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
    """Pushes all tokens, releasing after each group of them; texts, tokens released, and the stop string."""
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
            assert "".join(texts) == whole.decode(), "what was sent is the text of the tokens that were sent"
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
def test_text_is_the_references_however_it_is_cut(
    pieces: list[bytes], stops: list[str], min_tokens: int, groups: list[int]
) -> None:
    text = b"".join(pieces).decode()
    ends, so_far = list[int](), Bytes(pieces)
    for i in range(len(pieces)):
        ends.append((ends[-1] if ends else 0) + len(so_far.push(i)))
    expected = first_stop(ends, text, stops, min_tokens)

    texts, tokens, stop = run(pieces, stops, min_tokens, groups)

    cut = len(text) if expected is None else expected[0]
    assert "".join(texts) == text[:cut]
    assert stop == (None if expected is None else expected[1])
    assert tokens == sum(end <= cut for end in whole_ends(pieces)), "tokens that end at or before the cut"


@settings(max_examples=300, deadline=None)
@given(cut_texts(), STOPS, GROUPS)
def test_no_part_of_a_stop_string_is_ever_sent(pieces: list[bytes], stops: list[str], groups: list[int]) -> None:
    texts, _, stop = run(pieces, stops, 0, groups)
    if stop is None:
        return
    text, cut = b"".join(pieces).decode(), len("".join(texts))
    assert text[cut:].startswith(stop)
    sent = ""
    for piece in texts:
        sent += piece
        assert len(sent) <= cut


@settings(max_examples=300, deadline=None)
@given(
    st.text(st.sampled_from("ab"), max_size=40),
    st.lists(st.text(st.sampled_from("ab"), min_size=1, max_size=6), max_size=4),
)
def test_held_back_is_the_longest_beginning_of_a_stop_string(text: str, stops: list[str]) -> None:
    finder = StopFinder(stops)
    for end in range(1, len(text) + 1):
        finder.feed(text[end - 1])
        beginnings = [stop[:n] for stop in stops for n in range(1, len(stop))]
        assert finder.held == max((len(part) for part in beginnings if text[:end].endswith(part)), default=0)


@pytest.mark.parametrize(
    ("text", "stops", "expected", "stop"),
    [
        ("one END two", ["END"], "one ", "END"),
        ("one EN", ["END"], "one EN", None),
        ("aabc", ["abc", "bc"], "a", "abc"),  # complete at the same character: the longest
        ("xabcd", ["abcd", "bc"], "xa", "bc"),  # complete first
        ("ab", ["ab", "abc"], "", "ab"),  # complete first, though a longer one may follow
        ("aaab", ["aab"], "a", "aab"),  # a failed beginning overlaps the match
        ("naïve\n\nnext", ["\n\n"], "naïve", "\n\n"),
    ],
)
def test_which_stop_string_wins(text: str, stops: list[str], expected: str, stop: str | None) -> None:
    pieces = [character.encode() for character in text]
    texts, _, found = run(pieces, stops, 0, [1])
    assert ("".join(texts), found) == (expected, stop)


def test_stop_string_counts_from_the_token_that_completes_it() -> None:
    pieces = [b"a", b"b", b"a", b"b", b"a", b"b"]
    texts, tokens, stop = run(pieces, ["ab"], 2, [1])
    assert ("".join(texts), tokens, stop) == ("", 0, "ab")
    texts, tokens, stop = run(pieces, ["ab"], 4, [1])
    assert ("".join(texts), tokens, stop) == ("ab", 2, "ab")
    texts, tokens, stop = run(pieces, ["ab"], 7, [1])
    assert ("".join(texts), tokens, stop) == ("ababab", 6, None)


def test_tokens_inside_a_character_wait_for_its_end() -> None:
    smile = "😀".encode()
    out = OutputText(Bytes([b"x", smile[:1], smile[1:3], smile[3:], b"y"]))
    sent = []
    for token in range(5):
        out.push(token)
        released = out.release()
        sent.append((released.text, released.tokens))
    assert sent == [("x", 1), ("", 0), ("", 0), ("😀", 3), ("y", 1)]


def test_stop_token_is_the_last_token_and_has_no_text() -> None:
    out = OutputText(Bytes([b"x", b"\xf0\x9f"]), stop=["xyz"])
    out.push(0)
    out.push(1)
    out.push_silent()
    assert out.release().tokens == 0
    released = out.finish()
    assert (released.text, released.tokens) == ("x\N{REPLACEMENT CHARACTER}", 3)


def test_resumed_output_counts_the_tokens_before_it() -> None:
    out = OutputText(Bytes([b"END"]), stop=["END"], min_tokens=4, written=3)
    assert out.push(0)
    out = OutputText(Bytes([b"END"]), stop=["END"], min_tokens=4, written=2)
    assert not out.push(0)
