"""Every token is drawn once, by its origin, and the rejected one stands before what took its place."""

from io import StringIO

import pytest
from rich.console import Console

from outrider.cli.demo import TokenWriter, shares
from outrider.client import Chunk, Round, TokenOrigin

DRAFT, CORRECTION, TARGET = TokenOrigin.DRAFT, TokenOrigin.CORRECTION, TokenOrigin.TARGET


def _chunk(texts: list[str], origins: list[TokenOrigin], rounds: list[Round]) -> Chunk:
    return Chunk(0, "".join(texts), tuple(range(len(texts))), tuple(origins), tuple(texts), (), tuple(rounds))


def _round(number: int, output_length: int, drafted: list[str], accepted: int) -> Round:
    return Round(number, output_length, tuple(range(len(drafted))), tuple(drafted), accepted, ())


def _drawn(chunks: list[Chunk], *, terminal: bool = False, **environment: str) -> str:
    out = StringIO()
    console = Console(file=out, force_terminal=terminal, _environ={"TERM": "xterm-256color", **environment})
    writer = TokenWriter(console)
    writer.prompt("def f():")
    for chunk in chunks:
        writer.chunk(chunk)
    writer.end()
    return out.getvalue()


ONE_REJECTED = [
    _chunk(["\n", "    return", " 1"], [DRAFT, DRAFT, CORRECTION], [_round(1, 0, ["\n", "    return", " 2", "x"], 2)])
]


def test_without_colour_marks_tell_them_apart() -> None:
    assert _drawn(ONE_REJECTED) == "def f():\n    return[- 2-]{+ 1+}\n"
    assert _drawn(ONE_REJECTED, terminal=True, NO_COLOR="1") == _drawn(ONE_REJECTED)
    assert _drawn(ONE_REJECTED, terminal=True, TERM="dumb") == _drawn(ONE_REJECTED)


def test_with_colour_nothing_is_added_to_the_text() -> None:
    drawn = _drawn(ONE_REJECTED, terminal=True)
    assert "[-" not in drawn
    assert "{+" not in drawn
    assert "\x1b[9;31m 2\x1b[0m" in drawn  # struck and red
    assert "\x1b[1;34m 1\x1b[0m" in drawn  # bold and blue
    assert "\x1b[32m    return\x1b[0m" in drawn  # green


def test_a_round_reported_ahead_of_its_text_waits_for_it() -> None:
    rounds = [_round(1, 0, ["a", "b"], 1)]
    chunks = [_chunk(["a"], [DRAFT], rounds), _chunk(["c"], [CORRECTION], [])]
    assert _drawn(chunks) == "def f():a[-b-]{+c+}\n"


def test_a_token_waits_for_its_text() -> None:
    held = Chunk(0, "", (0, 1), (DRAFT, CORRECTION), ("a", "b"), (), (), held_tokens=2)
    come = Chunk(0, "abc", (2,), (TARGET,), ("c",), (), (), held_tokens=0)
    assert _drawn([held, come]) == "def f():a{+b+}{+c+}\n"
    some = Chunk(0, "a", (), (), (), (), (), held_tokens=1)
    assert _drawn([held, some]) == "def f():a\n"


def test_what_the_end_of_the_text_cut_is_not_called_rejected() -> None:
    rounds = [_round(1, 0, ["a", "b", "c"], 1)]
    assert _drawn([_chunk(["a"], [DRAFT], rounds)]) == "def f():a\n"


def test_a_whole_proposal_is_followed_by_the_targets_own_token() -> None:
    rounds = [_round(1, 0, ["a"], 1), _round(2, 2, [], 0)]
    assert _drawn([_chunk(["a", "b", "c"], [DRAFT, TARGET, TARGET], rounds)]) == "def f():a{+b+}{+c+}\n"


def test_white_space_shows_where_its_mark_would_not() -> None:
    rounds = [_round(1, 0, ["\n\n"], 0)]
    drawn = _drawn([_chunk(["\n    "], [CORRECTION], rounds), _chunk(["  "], [TARGET], [_round(2, 1, [], 0)])])
    assert drawn == "def f():[-↵↵-]{+↵+}\n    {+  +}\n"


def test_brackets_in_the_text_are_text() -> None:
    assert _drawn([_chunk(["[red]", "x[/red]"], [DRAFT, DRAFT], [])]) == "def f():[red]x[/red]\n"


@pytest.mark.parametrize(
    ("text", "token_texts", "parts"),
    [
        ("ab c", ["a", "b", " c"], ["a", "b", " c"]),
        ("x é y", ["x", " \ufffd", "\ufffd", " y"], ["x", "", " é", " y"]),
        ("日本", ["\ufffd", "\ufffd"], ["", "日本"]),
        ("Hello world", ["Hello", "world"], ["Hello", " world"]),
        ("end", ["end", ""], ["end", ""]),
        ("", [], []),
    ],
)
def test_parts_of_tokens_join_to_the_text(text: str, token_texts: list[str], parts: list[str]) -> None:
    assert shares(text, token_texts) == parts
    assert "".join(parts) == text
