"""The benchmark of the rules counts what the services do, and redrafts what they judged; no figure is judged here."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.acceptance import EXPECTED
from benchmarks.record import Record
from benchmarks.rules import Arm, Plan, main, measure, write
from benchmarks.rules_report import draw, summarise, table
from outrider.cli.processes import Pair
from outrider.client import AcceptanceRule, Client
from tests.cluster import MODELS

PLAN = Plan(prompts=2, rounds=3, temperatures=(1.0,), gammas=(3,))
PROMPTS = ["def mean(values):", "import os\n"]


def test_every_arm_has_its_rounds_and_drafts_come_again(demo_pair: Pair, tmp_path: Path) -> None:
    record = Record.open(tmp_path / "rules.json", {}, resume=False)
    told = io.StringIO()
    with Client(demo_pair.address) as client:
        offered = {AcceptanceRule.of(number).value for number in client.get_model().model.rules}
        measure(client, MODELS / "target", PLAN, PROMPTS, record, Console(file=told))
        before = list(record.runs)
        measure(client, MODELS / "target", PLAN, PROMPTS, record, Console(file=told))
    assert record.runs == before  # nothing is left to do
    assert {run["rule"] for run in record.runs} == offered - {"sigmoid"} >= set(EXPECTED)
    for run in record.runs:
        assert run["rounds"] == PLAN.rounds
        assert 0 <= run["accepted"] <= 3 * PLAN.rounds
        if run["rule"] in EXPECTED:
            assert run["redrafted"] == PLAN.rounds
            assert all(0 <= value <= 3 * PLAN.rounds for value in run["expected"].values())
    record.put("summary", summarise(record.runs))
    assert record.document["summary"]["1"]["3"]["rules"]["block"]["rounds"] == 6
    assert len(table(record.document).splitlines()) == 2 + len(offered - {"sigmoid"})
    draw(record.document, tmp_path / "rules.png")
    assert (tmp_path / "rules.png").read_bytes().startswith(b"\x89PNG")


def test_a_text_is_cut_after_its_rounds(demo_pair: Pair) -> None:
    with Client(demo_pair.address) as client:
        text = write(client, PROMPTS[0], Arm(1.0, 4, AcceptanceRule.BLOCK), seed=3, rounds=4)
    assert len(text.bases) == len(text.drafted) == len(text.accepted) == 4
    assert all(len(drafted) == 4 for drafted in text.drafted)
    steps = [after - before for before, after in zip(text.bases, text.bases[1:], strict=False)]
    assert steps == [1 + accepted for accepted in text.accepted[:-1]]
    for base, drafted, accepted in zip(text.bases[:-1], text.drafted, text.accepted, strict=False):
        assert text.output[base : base + accepted] == drafted[:accepted]


def test_prompts_that_are_not_there_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quick", "--prompts-file", str(tmp_path / "none.jsonl")]) == 2
    assert "none.jsonl" in capsys.readouterr().err
