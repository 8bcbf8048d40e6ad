"""The benchmark of policies runs, with real services and real models; replays are held against plain arithmetic."""

import io
import random
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.gamma import QUICK, arms_of, main, measure, texts_of
from benchmarks.gamma_replay import GivenTimes, agreements, counted_rate, rates, replay
from benchmarks.gamma_report import draw, summarise, table
from benchmarks.record import Record
from draft_service.speculation import Fixed
from outrider.cli.processes import Pair
from outrider.client import Client
from tests.services import MODELS

TIMES = GivenTimes(draft_fixed=0.0005, draft_token=0.001, pass_fixed=0.01, pass_token=0.0003, rest=0.002, alone=0.0103)


def test_every_arm_is_measured_and_replayed(demo_pair: Pair, tmp_path: Path) -> None:
    record = Record.open(tmp_path / "gamma.json", {"machine": {"cpu": "some", "cores": 2}}, resume=False)
    arms = arms_of("coupled", quick=True)
    texts = texts_of(MODELS / "target", ["def mean(values):"], replace(QUICK, prompts=1, new_tokens=24))
    with Client(demo_pair.address) as client:
        measure(client, "demo", texts, arms, record, Console(file=io.StringIO()))
        before = list(record.runs)
        measure(client, "demo", texts, arms, record, Console(file=io.StringIO()))
    assert record.runs == before  # nothing is left to do
    record.put("summary", summarise(record.runs))
    for temperature in ("0", "1"):
        found = record.document["summary"]["demo"][temperature]
        assert found["arms"].keys() == arms.keys()
        assert found["arms"]["fixed 2"]["mean_gamma"] == pytest.approx(2, abs=0.2)
        assert found["arms"]["alone"]["ratio_to_alone"] == 1
        assert found["texts_that_differ"] == 0  # in float32
        replayed = found["replayed"]["tokens_per_second"]
        assert replayed.keys() == {*arms, "oracle"} - {"adaptive, entropy 2"}
        assert replayed["oracle"] >= max(replayed["fixed 2"], replayed["alone"])
    for run in record.runs:
        if run["arm"] is None:
            assert agreements(run["rounds_recorded"])
        else:
            assert run["tokens"] == 24
    assert len(table(record.document).splitlines()) == 2 + 2 * (len(arms) + 1)
    draw(record.document, tmp_path / "gamma.png")
    assert (tmp_path / "gamma.png").read_bytes().startswith(b"\x89PNG")


def test_prompts_that_are_not_there_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quick", "--prompts-file", str(tmp_path / "none.jsonl")]) == 2
    assert "none.jsonl" in capsys.readouterr().err


def test_recorded_rounds_tell_where_draft_and_target_agree() -> None:
    assert agreements([(0, 4, 2), (3, 4, 0), (4, 4, 4)]) == [True, True, False, False, *[True] * 5]
    with pytest.raises(ValueError, match="a round begins at 4; the rounds before it end at 3"):
        agreements([(0, 4, 2), (4, 4, 0)])


@pytest.mark.parametrize("gamma", [0, 1, 3, 16])
def test_a_replay_with_a_fixed_length_is_what_that_length_gives(gamma: int) -> None:
    """Round by round as one would do it by hand."""
    source = random.Random(3)
    text = [source.random() < 0.8 for _ in range(400)]
    at, rounds, drafted = 0, 0, 0
    while at < len(text):
        length = min(gamma, len(text) - at - 1)
        run = 0
        while run < length and text[at + run]:
            run += 1
        at, rounds, drafted = at + run + 1, rounds + 1, drafted + length
    tokens, seconds, lengths = replay(Fixed(gamma), text, TIMES, 16)
    assert (tokens, lengths) == (400, drafted)
    if gamma == 0:
        assert seconds == pytest.approx(400 * TIMES.alone)
    elif text[-1]:  # else the last round of none is the target's alone
        assert tokens / seconds == pytest.approx(counted_rate(TIMES, 400, rounds, drafted), rel=0.01)


def test_the_oracle_is_ahead_of_all_and_adaptive_is_near_the_best() -> None:
    source = random.Random(4)
    texts = [[source.random() < 0.85 for _ in range(200)] for _ in range(10)]
    found = rates(texts, TIMES, range(1, 17), 16)
    best = max(rate for name, rate in found.items() if name.startswith("fixed "))
    assert found["oracle"] > 1.1 * best
    assert found["adaptive"] > 0.95 * best
