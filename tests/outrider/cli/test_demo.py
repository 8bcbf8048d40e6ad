"""`outrider demo` draws each token once, by its origin, and compares the pair with the target alone."""

from functools import partial
from io import StringIO

import pytest
from rich.console import Console

from outrider.cli.demo import TokenWriter, compare, draw_comparison
from outrider.client import Chunk, Client, Round, TokenOrigin

DRAFT, CORRECTION, TARGET = TokenOrigin.DRAFT, TokenOrigin.CORRECTION, TokenOrigin.TARGET


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


def test_colours_or_else_marks_show_the_origin() -> None:
    rounds = [_round(1, 0, ["\n", "    return", " 2", "x"], 2)]
    one_rejected = [_chunk(["\n", "    return", " 1"], [DRAFT, DRAFT, CORRECTION], rounds)]
    marked = "def f():\n    return[- 2-]{+ 1+}\n"
    assert _drawn(one_rejected) == marked
    assert _drawn(one_rejected, terminal=True, NO_COLOR="1") == marked
    assert _drawn(one_rejected, terminal=True, TERM="dumb") == marked
    coloured = _drawn(one_rejected, terminal=True)
    assert "[-" not in coloured
    assert "{+" not in coloured
    assert "\x1b[9;31m 2\x1b[0m" in coloured  # struck and red
    assert "\x1b[1;34m 1\x1b[0m" in coloured  # bold and blue
    assert "\x1b[32m    return\x1b[0m" in coloured  # green


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
    ids=["a round reported ahead of its text", "held text", "a whole proposal", "white space", "brackets are text"],
)
def test_tokens_are_drawn_by_their_origin(chunks: list[Chunk], drawn: str) -> None:
    assert _drawn(chunks) == f"def f():{drawn}\n"


def test_the_comparison_finds_equal_and_unequal_texts(draft_address: str) -> None:
    out = StringIO()
    console = Console(file=out, width=40)
    with Client(draft_address, timeout=60) as client:
        complete = partial(client.complete, "import os\n", temperature=0, max_new_tokens=24, ignore_eos=True)
        drafted = complete(gamma=4)
        equal, unequal = (compare(complete, complete(max_new_tokens=length), repeats=1) for length in (24, 9))
        alone = compare(partial(complete, gamma=0), drafted, repeats=1)
    assert equal.pair.tokens == equal.target_alone.tokens == 24
    assert equal.pair.passes <= equal.target_alone.passes == 24
    for comparison, first_difference, conclusion in (
        (equal, None, "Both wrote the same text"),
        (unequal, 9, "The texts differ from token 10 on"),
    ):
        assert comparison.first_difference == first_difference
        draw_comparison(console, comparison, drafted, promised=True)
        assert conclusion in out.getvalue()
    assert ["target", "alone", "24", "24", "–", "–"] in [line.split()[:6] for line in out.getvalue().splitlines()]
    draw_comparison(console, alone, drafted, promised=True)
    known = drafted.statistics
    figures = f"α {known.alpha:.2f}, mean acceptance length {known.mean_acceptance_length:.2f}"
    assert f"The text above was drafted: {figures}." in " ".join(out.getvalue().split())
    assert "…" not in out.getvalue(), "a narrow terminal wraps lines and cuts no figure"
