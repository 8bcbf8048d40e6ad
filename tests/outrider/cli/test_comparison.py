"""The two ways of the demo: same prompt, same text, and each way's own costs."""

from io import StringIO

from rich.console import Console

from outrider.cli.demo import Comparison, Cost, Subject, TokenWriter, draw_comparison
from outrider.client import Chunk, Client, Completion, Event, FinishReason

PROMPT = "import os\nimport sys\n\n\ndef main(argv):\n"


def test_both_ways_write_the_same_text_and_the_drawing_holds_it(draft_address: str) -> None:
    out = StringIO()
    writer = TokenWriter(Console(file=out, width=80))
    taken: list[Event] = []
    with Client(draft_address, timeout=60) as client:
        subject = Subject(client, PROMPT, {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True, "gamma": 5})
        subject.warm_up()
        for event in subject.stream():
            taken.append(event)
            if isinstance(event, Chunk):
                writer.chunk(event)
        shown = Completion.of(taken)
        comparison = subject.compare(shown, repeats=1)
    assert shown.finish_reason is FinishReason.LENGTH
    assert comparison.first_difference is None
    assert comparison.pair.tokens == comparison.target_alone.tokens == comparison.target_alone.rounds == 24
    assert comparison.pair.rounds == shown.statistics.num_rounds <= 24
    assert comparison.pair.mean_acceptance_length is not None
    assert (comparison.target_alone.alpha, comparison.target_alone.mean_acceptance_length) == (None, None)
    rejected = [report for report in shown.samples[0].rounds if report.accepted < len(report.drafted_texts)]
    assert out.getvalue().count("[-") <= len(rejected)
    kept = "".join(part.split("-]")[-1] for part in out.getvalue().split("[-"))
    assert kept.replace("{+", "").replace("+}", "").replace("↵\n", "\n") == shown.text


def _table(comparison: Comparison, *, promised: bool = True) -> str:
    out = StringIO()
    draw_comparison(Console(file=out, width=80), comparison, promised=promised)
    return out.getvalue()


PAIR = Cost(tokens=128, rounds=40, alpha=0.8, mean_acceptance_length=3.2, tokens_per_second=212.345)
ALONE = Cost(tokens=128, rounds=128, alpha=None, mean_acceptance_length=None, tokens_per_second=100.0)


def test_the_table_fits_eighty_columns_and_says_all() -> None:
    drawn = _table(Comparison(PAIR, ALONE, 2.12345, 3, None))
    rows = [line.split() for line in drawn.splitlines()]
    assert ["draft", "+", "target", "128", "40", "0.80", "3.20", "212.3", "2.12"] in rows
    assert ["target", "alone", "128", "128", "–", "–", "100.0", "1.00"] in rows
    assert "…" not in drawn
    assert "same text" in drawn


def test_texts_that_part_are_not_called_the_same() -> None:
    parted = Comparison(PAIR, ALONE, 2.1, 3, 7)
    assert "part at token 8" in _table(parted)
    assert "text" not in _table(parted, promised=False)
