"""The sweep of round-trip times runs as its user starts it; and what it foretells is what the formulas say."""

import json
from pathlib import Path

import pytest

from benchmarks.network import ALONE, Foretold, Tally, arms, main
from outrider.theory import tokens_per_second


def test_a_quick_sweep_adds_what_it_says_to_the_wire(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "network.json"
    assert main(["--quick", "--dtype", "float32", "--output", str(output)]) == 0
    document = json.loads(output.read_text())
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["rows"] == document["rows"]
    assert output.with_suffix(".png").stat().st_size > 1000
    by_arm = {(row["added_ms"], row["arm"]): row for row in document["rows"]}
    assert {arm for _, arm in by_arm} == set(arms(4))
    near, far = by_arm[0.0, "sequential"], by_arm[20.0, "sequential"]
    assert far["wire_ms"] >= 20.0, "each round pays the way"
    assert by_arm[0.0, ALONE]["ratio"] == by_arm[20.0, ALONE]["ratio"] == 1.0
    assert far["tokens_per_round"] == near["tokens_per_round"] > 1.5, "the same texts by the same drafts"
    assert far["foretold_ratio"] < near["foretold_ratio"]
    assert str(tmp_path) not in output.read_text()


def test_what_is_foretold_follows_the_formulas() -> None:
    paired = Tally([1.0], tokens=300, rounds=100, drafts=100, drafted=400, judged_alpha=320.0)
    paired.draft_s, paired.pass_s, paired.verdict_s = 0.4, 0.7, 0.8
    alone = Tally([1.0], tokens=300, rounds=300, pass_s=1.5, verdict_s=1.5)
    shallow = Tally([1.0], tokens=200, rounds=100, drafts=100, drafted=100, pass_s=0.55)
    foretold = Foretold.of(paired, alone, shallow, 4)
    assert (foretold.alpha, foretold.draft_step, foretold.round_trip) == pytest.approx((0.8, 0.001, 0.001))
    assert foretold.verify_pass(5) == pytest.approx(0.005 + 4 * 0.0005)
    assert foretold.rate("sequential", 0.02, 0.0, 96) == pytest.approx(tokens_per_second(0.8, 4, 0.001, 0.007, 0.021))
    assert foretold.rate("outcome cache", 0.0, 1.0, 96) == pytest.approx(tokens_per_second(0.8, 4, 0.0, 0.007, 0.001))
    assert foretold.rate(ALONE, 0.048, 0.0, 96) == pytest.approx(1 / 0.0055)
    assert foretold.rate("adaptive", 0.0, 0.0, 96) >= foretold.rate("sequential", 0.0, 0.0, 96)
