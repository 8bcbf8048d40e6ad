"""The benchmark of the outcome cache runs, and says what it found."""

import json
from pathlib import Path

import pytest

from benchmarks.outcome_cache import best, main


def test_quick_measures_both_ways_and_says_so_in_one_json_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out.json"
    asked = ["--quick", "--prompts", "1", "--tokens", "24", "--dtype", "float32", "--output", str(output)]
    assert main(asked) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document == json.loads(output.read_text())
    assert str(tmp_path) not in output.read_text()
    assert output.with_suffix(".png").is_file()
    for row in document["results"]:
        assert row["ratio"] > 0
        assert row["same_text"] == [1, 1]
        assert row["per_round_ms"]["without"]["saved"] == 0
    assert [row["way"] for row in document["best"]] == ["greedy", "coupled"]


def test_each_arm_has_its_own_best_length() -> None:
    rows = [
        {"placement": "p", "way": "w", "gamma": gamma, "tokens_per_second": {"with": one, "without": other}}
        for gamma, one, other in ((3, 100.0, 95.0), (8, 120.0, 90.0))
    ]
    (found,) = best(rows)
    assert found["gamma"] == {"with": 8, "without": 3}
    assert found["ratio"] == pytest.approx(120 / 95, abs=1e-3)
