"""Runs are on disk at once and an interrupted benchmark goes on; figures follow from runs by plain arithmetic."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import drafters, gamma, harness, outcome_cache, plots
from benchmarks.contenders import Task, WrongLength, text_run
from benchmarks.harness import Bench, read_prompts, spread

RESULTS = sorted(harness.RESULTS.glob("*.json"))


def bench(tmp_path: Path, *, resume: bool = False, **settings: Any) -> Bench:
    known = {"quick": True, "command": "it", "output": tmp_path / "sub" / "r.json", "resume": resume}
    return Bench("it", argparse.Namespace(**known, **settings))


def test_what_is_measured_is_on_disk_and_a_resumed_benchmark_knows_it(tmp_path: Path) -> None:
    before = bench(tmp_path, prompts=2)
    before.add({"prompt": 0, "temperature": "1"})
    assert before.once("tuning", lambda: {"gamma": 4}) == {"gamma": 4}
    after = bench(tmp_path, prompts=2, resume=True)
    assert after.has(prompt=0, temperature="1")
    assert not after.has(prompt=1)
    assert after.once("tuning", lambda: pytest.fail("it was made already")) == {"gamma": 4}
    assert bench(tmp_path, prompts=2).runs == []  # not resumed it begins anew


def test_other_settings_are_not_mixed_in(tmp_path: Path) -> None:
    bench(tmp_path, prompts=2).add({"prompt": 0})
    with pytest.raises(ValueError, match=r"r\.runs\.jsonl cannot be resumed: it was made with other settings"):
        bench(tmp_path, prompts=3, resume=True)


def test_the_document_holds_the_summary_and_no_runs(tmp_path: Path) -> None:
    one = bench(tmp_path, prompts=2)
    one.add({"prompt": 0})
    written = one.write({"summary": {"rate": 1 / 3}})
    assert json.loads(one.output.read_text()) == written
    assert written["summary"] == {"rate": 0.33333333}
    assert (written["settings"], len(written["load_average"])) == ({"prompts": 2}, 2)
    assert "prompt" not in one.output.read_text().replace("prompts", "")


def test_quick_changes_defaults_and_not_what_was_asked() -> None:
    def asked(*arguments: str) -> Any:
        parser = harness.parser("it", "It.", quick="less")
        parser.add_argument("--prompts", type=int, default=12)
        return harness.parse(parser, arguments, {"prompts": 2})

    assert (asked().prompts, asked("--quick").prompts, asked("--quick", "--prompts", "5").prompts) == (12, 2, 5)
    assert asked("--output", "/home/me/x.json").command == "python -m benchmarks.it --output x.json"


@pytest.mark.parametrize(("count", "expected"), [(1, "a"), (2, "ac"), (5, "abcde"), (9, "abcde")])
def test_chosen_items_are_spread_over_all(count: int, expected: str) -> None:
    assert spread("abcde", count) == list(expected)


def test_a_line_without_a_prompt_is_named(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"text": "x = "}\n\n{"prompt": "y"}\n')
    with pytest.raises(ValueError, match=r"line 3 of prompts\.jsonl has no text"):
        read_prompts(path)
    path.write_text("\n")
    with pytest.raises(ValueError, match="has no prompt to write after"):
        read_prompts(path)


def test_a_text_of_another_length_is_no_result() -> None:
    with pytest.raises(WrongLength, match="it wrote 3 tokens of prompt 7, not 4"):
        text_run("it", Task(7, (1,), 4, 0.0, 1), [1, 2, 3], {}, seconds=1.0, rounds=3)


def test_rates_and_ratios_are_of_the_same_repetition() -> None:
    runs = [
        {"repetition": nth, "tokens": 10, "seconds": seconds}
        for nth, seconds in [(0, 1.0), (0, 3.0), (1, 2.0), (2, 1.0)]
    ]
    rates = harness.rates(runs)
    assert rates == {0: 5.0, 1: 5.0, 2: 10.0}
    assert harness.ratio(rates, {0: 5.0, 1: 2.5, 2: 2.5}) == {"ratio": 2.0, "ratio_range": [1.0, 4.0]}
    assert harness.ratio(rates, {}) == {"ratio": None}
    assert harness.rotated("abc", 4) == ["b", "c", "a"]


def text(arm: str, seconds: float, **figures: Any) -> dict[str, Any]:
    plain = {"repetition": 0, "prompt": 0, "tokens": 100, "rounds": 100, "drafted": 0, "accepted": 0, "digest": "same"}
    return {"arm": arm, "drafter": arm, "seconds": seconds, "alpha": None, **plain, **figures}


def test_policies_are_held_against_the_best_fixed_length() -> None:
    runs = [
        text("alone", 4.0),
        text("fixed 2", 2.0, rounds=40, drafted=80),
        text("fixed 8", 1.0, rounds=20, drafted=160),
    ]
    runs.append(text("adaptive", 1.25, digest="other"))
    found = gamma.figures(runs, ["alone", "fixed 2", "fixed 8", "adaptive"])
    assert found["best_fixed"] == "fixed 8"
    assert found["arms"]["adaptive"]["ratio_to_best_fixed"] == pytest.approx(0.8)
    assert found["arms"]["adaptive"]["range"] == pytest.approx([3.2, 3.2])
    assert found["arms"]["fixed 8"]["mean_gamma"] == 8
    assert (found["texts"], found["texts_that_differ"]) == (1, 1)


def test_drafters_are_held_against_none() -> None:
    inner = {"inner_guessed": 0, "inner_accepted": 0, "draft_failures": 0, "phases": {"draft": 0.0}}
    staged = {"drafted": 10, "accepted": 6, "alpha": 0.5, "rounds": 50, "inner_guessed": 8, "inner_accepted": 2}
    runs = [text("staged", 1.0, **inner | staged | {"phases": {"draft": 0.01}}), text("none", 2.0, **inner)]
    found = drafters.figures(runs)
    assert list(found) == ["none", "staged"]
    assert (found["staged"]["ratio"], found["staged"]["inner_acceptance"]) == (2.0, 0.25)
    assert (found["staged"]["tokens_per_round"], found["staged"]["us_per_drafted_token"]) == (2.0, pytest.approx(1000))
    assert drafters.kinds("a\nb\nc\nd\ne\nf\n")["edit"].endswith("once more.\na\nb\n")


def test_each_way_of_the_outcome_cache_has_its_own_best_length() -> None:
    rows = [
        {"placement": "p", "way": "w", "gamma": length, "tokens_per_second": {"with": one, "without": other}}
        for length, one, other in ((3, 100.0, 95.0), (8, 120.0, 90.0))
    ]
    (found,) = outcome_cache.best(rows)
    assert found["gamma"] == {"with": 8, "without": 3}
    assert found["ratio"] == pytest.approx(120 / 95)


# Large ones take seconds to draw, and the small ones of the same benchmarks are drawn the same.
LARGE = ("load-demo", "load-deepened")


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[pytest.mark.slow] if path.stem in LARGE else [], id=path.stem) for path in RESULTS],
)
def test_a_committed_result_is_small_and_is_drawn_by_its_benchmark(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = json.loads(path.read_text())
    if "benchmark" not in document:
        assert path.stem.startswith("exactness")
        return
    assert path.stat().st_size < 150_000
    assert "runs" not in document
    copy = tmp_path / path.name
    copy.write_text(path.read_text())
    monkeypatch.setattr("sys.argv", ["benchmarks.plots", str(copy)])
    assert plots.main() == 0
    assert list(tmp_path.glob("*.png"))
