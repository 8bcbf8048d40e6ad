"""The benchmark of the pair runs, with real services and real models; no test judges its speeds."""

import json
from pathlib import Path

import pytest

from benchmarks.contenders import Run
from benchmarks.pair import main
from benchmarks.plan import TEMPERATURES
from benchmarks.summary import CONTENDERS
from benchmarks.tuning import Tuned

ARGUMENTS = ("--quick", "--prompts", "1", "--new-tokens", "8")


@pytest.mark.timeout(300)  # two services and transformers start, on whatever else the machine does
def test_quick_measures_every_contender_and_says_so_in_one_json_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"text": "def mean(values):"}\n{"text": "import os"}\n')
    output = tmp_path / "out.json"
    arguments = [*ARGUMENTS, "--prompts-file", str(prompts), "--output", str(output)]
    assert main(arguments) == 0
    told = capsys.readouterr().out
    document = json.loads(told.splitlines()[-1])
    written = json.loads(output.read_text())
    assert written["summary"] == document["summary"]
    assert str(tmp_path) not in output.read_text()
    assert output.with_suffix(".png").read_bytes().startswith(b"\x89PNG")

    assert set(document["summary"]["demo"]) == {f"{temperature:g}" for temperature in TEMPERATURES}
    for summary in document["summary"]["demo"].values():
        assert set(summary["contenders"]) == set(CONTENDERS)
        assert summary["contenders"]["outrider-pair"]["predicted_ratio"] > 0
    for run in written["runs"]:
        found = Run.of(run)
        assert found.tokens == 8
        assert sum(found.phases.values()) == pytest.approx(found.seconds)
        assert found.phases["wire"] >= 0
        assert found.phases["queue"] <= found.seconds
        assert (found.drafted > 0) == (run["contender"] in ("assisted", "outrider-pair"))

    # Resumed, it has nothing left to measure and comes to the same figures.
    before = output.read_text()
    assert main([*arguments, "--resume"]) == 0
    assert json.loads(output.read_text())["runs"] == json.loads(before)["runs"]


def test_prompts_that_are_not_there_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ARGUMENTS, "--prompts-file", str(tmp_path / "none.jsonl")]) == 2
    assert "none.jsonl" in capsys.readouterr().err


def test_settings_survive_json() -> None:
    tuned = Tuned.untuned(TEMPERATURES)
    assert Tuned.of(json.loads(json.dumps(tuned.document()))) == tuned
