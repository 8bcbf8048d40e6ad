"""The benchmark of drafters runs, with real services, and its arithmetic holds; no test judges its speeds."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.drafters import Plan, kinds, main, parts
from benchmarks.drafters_summary import DRAFTERS, summarise
from models.corpus import Document
from outrider.client import Drafter
from tests.benchmarks import quick

ARGUMENTS = ("--quick", "--new-tokens", "12")


@pytest.mark.slow
@pytest.mark.timeout(300)  # two services start, on whatever else the machine does
def test_quick_measures_every_drafter_and_says_so_in_one_json_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # In the place of megabytes, of which the first tenth is counted.
    monkeypatch.setattr(
        "benchmarks.drafters.training_documents", lambda: [Document("a.py", Path(__file__).read_text())]
    )
    document, runs = quick.run(main, ARGUMENTS, tmp_path, capsys)
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    assert set(document["summary"]["demo"]) == {"completion", "edit"}
    for by_temperature in document["summary"]["demo"].values():
        assert set(by_temperature) == {"0", "1"}
        for figures in by_temperature.values():
            assert tuple(figures) == DRAFTERS
            assert figures["none"]["ratio"] == 1
            assert figures["none"]["alpha"] is None
            assert 0 <= figures["model"]["alpha"] <= 1
    assert len(runs) == 4 * len(DRAFTERS)
    for run in runs:
        assert run["tokens"] == 12
        assert run["draft_failures"] == 0
        assert (run["inner_guessed"] > 0) <= (run["drafter"] == "staged")


def test_every_drafter_of_the_contract_is_measured() -> None:
    assert set(DRAFTERS) == {drafter.value for drafter in Drafter if drafter is not Drafter.UNSPECIFIED}


def test_all_parts_are_different_and_an_edit_ends_in_its_own_beginning() -> None:
    plan = Plan(prompts=2, repetitions=2)
    found = list(parts(plan, ["a\nb\nc\nd\ne\nf\n", "x\n"]))
    assert len(set(found)) == len(found) == 2 * 2 * 2 * 2
    assert kinds("a\nb\nc\nd\ne\nf\n")["edit"].endswith("once more.\na\nb\n")
    assert kinds("x\n")["edit"].endswith("once more.\nx\n")


def test_figures_are_medians_over_repetitions_and_sums_over_texts() -> None:
    def run(drafter: str, repetition: int, seconds: float, **figures: Any) -> dict[str, Any]:
        plain = {"tokens": 10, "rounds": 5, "drafted": 0, "accepted": 0, "alpha": None, "draft_failures": 0}
        keys = {"pair": "p", "kind": "k", "temperature": "0", "repetition": repetition, "drafter": drafter}
        return {
            **keys, "seconds": seconds, "inner_guessed": 0, "inner_accepted": 0, "phases": {"draft": 0.0}, **plain,
            **figures,
        }  # fmt: skip

    alone = [run("none", repetition, 2.0) for repetition in range(3)]
    drafted: dict[str, Any] = {"phases": {"draft": 0.01}, "inner_guessed": 8, "inner_accepted": 2}
    staged = [
        run("staged", repetition, seconds, drafted=10, accepted=6, alpha=alpha, **drafted)
        for repetition, (seconds, alpha) in enumerate([(1.0, 0.5), (0.5, 0.7), (4.0, 0.6)])
    ]
    figures = summarise([*alone, *staged])["p"]["k"]["0"]
    assert tuple(figures) == ("none", "staged")
    found = figures["staged"]
    assert (found["tokens_per_second"], found["ratio"], found["ratio_range"]) == (10.0, 2.0, [0.5, 4.0])
    assert (found["alpha"], found["inner_acceptance"], found["tokens_per_round"]) == (pytest.approx(0.6), 0.25, 2.0)
    assert found["us_per_drafted_token"] == pytest.approx(1000)


def test_prompts_that_are_not_there_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ARGUMENTS, "--prompts-file", str(tmp_path / "none.jsonl")]) == 2
    assert "none.jsonl" in capsys.readouterr().err
