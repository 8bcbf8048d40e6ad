"""What `outrider demo` draws: each token once, by its origin, and what both ways of writing a text cost."""

from collections.abc import Iterator
from functools import partial
from io import StringIO

import pytest
from rich.console import Console

from outrider.cli import demo
from outrider.cli.demo import Comparison, Cost, TokenWriter, compare, draw_comparison, shares, warn_of_busy_processors
from outrider.cli.processes import busy_processors, processors
from outrider.client import Chunk, Client, Completion, Event, Options, Round, TokenOrigin

DRAFT, CORRECTION, TARGET = TokenOrigin.DRAFT, TokenOrigin.CORRECTION, TokenOrigin.TARGET
PROMPT = "import os\nimport sys\n\n\ndef main(argv):\n"


# ----------------------------------------------------------------------------------------------------------- drawing


def _chunk(texts: list[str], origins: list[TokenOrigin], rounds: list[Round]) -> Chunk:
    return Chunk(0, "".join(texts), tuple(range(len(texts))), tuple(origins), tuple(texts), (), tuple(rounds))


def _round(number: int, output_length: int, drafted: list[str], accepted: int) -> Round:
    return Round(number, output_length, tuple(range(len(drafted))), tuple(drafted), accepted, ())


def _drawn(chunks: list[Chunk], *, terminal: bool = False, **environment: str) -> str:
    out = StringIO()
    writer = TokenWriter(Console(file=out, force_terminal=terminal, _environ={"TERM": "xterm-256color", **environment}))
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


HELD = Chunk(0, "", (0, 1), (DRAFT, CORRECTION), ("a", "b"), (), (), held_tokens=2)
WHOLE_PROPOSAL = [_round(1, 0, ["a"], 1), _round(2, 2, [], 0)]


@pytest.mark.parametrize(
    ("chunks", "drawn"),
    [
        ([_chunk(["a"], [DRAFT], [_round(1, 0, ["a", "b"], 1)]), _chunk(["c"], [CORRECTION], [])], "a[-b-]{+c+}"),
        ([HELD, Chunk(0, "abc", (2,), (TARGET,), ("c",), (), (), held_tokens=0)], "a{+b+}{+c+}"),
        ([_chunk(["a", "b", "c"], [DRAFT, TARGET, TARGET], WHOLE_PROPOSAL)], "a{+b+}{+c+}"),
        (
            [
                _chunk(["\n    "], [CORRECTION], [_round(1, 0, ["\n\n"], 0)]),
                _chunk(["  "], [TARGET], [_round(2, 1, [], 0)]),
            ],
            "[-↵↵-]{+↵+}\n    {+  +}",
        ),
        ([_chunk(["[red]", "x[/red]"], [DRAFT, DRAFT], [])], "[red]x[/red]"),
    ],
    ids=[
        "a round reported ahead of its text",
        "text that was held",
        "the target's own token after a whole proposal",
        "white space",
        "brackets are text",
    ],
)
def test_tokens_are_drawn_by_their_origin(chunks: list[Chunk], drawn: str) -> None:
    assert _drawn(chunks) == f"def f():{drawn}\n"


@pytest.mark.parametrize(
    ("text", "token_texts", "parts"),
    [
        ("ab c", ["a", "b", " c"], ["a", "b", " c"]),
        ("x é y", ["x", " \ufffd", "\ufffd", " y"], ["x", "", " é", " y"]),
        ("Hello world", ["Hello", "world"], ["Hello", " world"]),
        ("", [], []),
    ],
)
def test_parts_of_tokens_join_to_the_text(text: str, token_texts: list[str], parts: list[str]) -> None:
    assert shares(text, token_texts) == parts
    assert "".join(parts) == text


# --------------------------------------------------------------------------------------------------------- comparing


def test_both_ways_write_the_same_text_and_the_drawing_holds_it(draft_address: str) -> None:
    out = StringIO()
    writer = TokenWriter(Console(file=out, width=80))
    options: Options = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True, "gamma": 5}
    with Client(draft_address, timeout=60) as client:

        def drawn() -> Iterator[Event]:
            for event in client.generate(PROMPT, **options | {"report_rounds": True}):
                if isinstance(event, Chunk):
                    writer.chunk(event)
                yield event

        shown = Completion.of(drawn())
        comparison = compare(partial(client.complete, PROMPT, **options), shown, repeats=1)
    assert comparison.first_difference is None
    assert comparison.pair.tokens == comparison.target_alone.tokens == comparison.target_alone.rounds == 24
    assert comparison.pair.rounds == shown.statistics.num_rounds <= 24
    assert comparison.pair.mean_acceptance_length is not None
    assert (comparison.target_alone.alpha, comparison.target_alone.mean_acceptance_length) == (None, None)
    rejected = [report for report in shown.samples[0].rounds if report.accepted < len(report.drafted_texts)]
    assert out.getvalue().count("[-") <= len(rejected)
    kept = "".join(part.split("-]")[-1] for part in out.getvalue().split("[-"))
    assert kept.replace("{+", "").replace("+}", "").replace("↵\n", "\n") == shown.text


def test_the_table_fits_eighty_columns_and_says_all() -> None:
    pair = Cost(tokens=128, rounds=40, alpha=0.8, mean_acceptance_length=3.2, tokens_per_second=212.345)
    alone = Cost(tokens=128, rounds=128, alpha=None, mean_acceptance_length=None, tokens_per_second=100.0)
    drawn, parted = StringIO(), StringIO()
    for first_difference, out in ((None, drawn), (7, parted)):
        comparison = Comparison(pair, alone, 2.12345, 3, first_difference)
        draw_comparison(Console(file=out, width=80), comparison, promised=True)
    rows = [line.split() for line in drawn.getvalue().splitlines()]
    assert ["draft", "+", "target", "128", "40", "0.80", "3.20", "212.3", "2.12"] in rows
    assert ["target", "alone", "128", "128", "–", "–", "100.0", "1.00"] in rows
    assert "…" not in drawn.getvalue()
    assert "same text" in drawn.getvalue()
    assert "differ from token 8 on" in parted.getvalue()


@pytest.mark.parametrize(("busy", "warns"), [(1.9, True), (0.1, False)])
def test_times_on_a_busy_machine_come_with_a_warning(
    busy: float, warns: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "busy_processors", lambda: busy)
    monkeypatch.setattr(demo, "processors", lambda: frozenset(range(2)))
    warn_of_busy_processors()
    assert ("keep 1.9 of 2 processors busy" in capsys.readouterr().err) is warns
    assert 0 <= busy_processors(0.05) <= len(processors())
