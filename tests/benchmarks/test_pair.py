"""The benchmark of the pair runs, with real services and real models; no test judges its speeds."""

import json
from pathlib import Path

import pytest

from benchmarks.contenders import Run
from benchmarks.pair import main
from benchmarks.plan import TEMPERATURES
from benchmarks.summary import CONTENDERS
from benchmarks.tuning import Tuned
from tests.benchmarks import quick

ARGUMENTS = ("--quick", "--prompts", "1", "--new-tokens", "8")


@pytest.mark.timeout(300)  # two services and transformers start, on whatever else the machine does
def test_quick_measures_every_contender_and_says_so_in_one_json_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document, runs = quick.run(main, ARGUMENTS, tmp_path, capsys)
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")

    assert set(document["summary"]["demo"]) == {f"{temperature:g}" for temperature in TEMPERATURES}
    for summary in document["summary"]["demo"].values():
        assert set(summary["contenders"]) == set(CONTENDERS)
        assert summary["contenders"]["outrider-pair"]["predicted_ratio"] > 0
    for run in runs:
        found = Run.of(run)
        assert found.tokens == 8
        assert sum(found.phases.values()) == pytest.approx(found.seconds)
        assert found.phases["wire"] >= 0
        assert found.phases["queue"] <= found.seconds
        assert (found.drafted > 0) == (run["contender"] in ("assisted", "outrider-pair"))


def test_prompts_that_are_not_there_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ARGUMENTS, "--prompts-file", str(tmp_path / "none.jsonl")]) == 2
    assert "none.jsonl" in capsys.readouterr().err


def test_settings_survive_json() -> None:
    tuned = Tuned.untuned(TEMPERATURES)
    assert Tuned.of(json.loads(json.dumps(tuned.document()))) == tuned
