"""The kernel's benchmark runs, its contenders sample from the target's distribution, and its arithmetic is right."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import kernel
from benchmarks.kernel import NAMES, Case, Rows, Shape, aims, unfused
from outrider.evaluation import chisquare

CPU = torch.device("cpu")
V, GAMMA = 12, 2
LEVEL = 0.001


def test_unfused_torch_samples_from_the_target() -> None:
    """20,000 sequences; a total variation of 0.04 in any of the three tokens is seen with a power of 95 %."""
    torch.manual_seed(0)
    rows = Rows.make(V, torch.float32, CPU)
    case = Case(Shape(V, 20_000, GAMMA), rows)
    (drafts,) = case.drafted
    accepted, tokens = unfused(case.logits, case.draft_logits, drafts)
    assert 0.1 < float(accepted.float().mean()) / GAMMA < 0.95
    emitted = [
        [*drafted[:n], token]
        for drafted, n, token in zip(drafts.tolist(), accepted.tolist(), tokens.tolist(), strict=True)
    ]
    for position in range(GAMMA + 1):  # rows do not depend on drafted tokens
        seen = np.bincount([each[position] for each in emitted if len(each) > position], minlength=V)
        fit = chisquare.goodness_of_fit(seen, torch.softmax(rows.logits[position].double(), dim=-1).numpy())
        assert chisquare.detectable(fit.df, fit.n, level=LEVEL, power=0.95) <= 0.04
        assert fit.p_value > LEVEL, f"token {position}: {fit}"


@pytest.mark.parametrize("rule", ["tokenwise", "block", "coupled", "sigmoid"])
def test_one_sequence_on_a_cpu_takes_several_seeds_in_turn(rule: str) -> None:
    case = Case(Shape(500, 1, 5, rule), Rows.make(500, torch.float32, CPU))
    assert len({own.tokens for (own,) in case.proposals}) > 8
    assert len({tuple(own.flatten().tolist()) for own in case.drafted}) > 8
    ready = kernel.outrider("torch")(case)
    counts = [ready.run()[0].accepted for _ in range(kernel.TURNS)]
    assert ready.accepted() == pytest.approx(sum(counts) / kernel.TURNS)
    assert len(set(counts)) > 1 or rule == "sigmoid", "sigmoid accepts nearly all"


@pytest.mark.parametrize(("rule", "more"), [("tokenwise", 0), ("sigmoid", 4 * 3)])
def test_only_the_targets_rows_must_be_read(rule: str, more: int) -> None:
    case = Case(Shape(V, 4, 3, rule), Rows.make(V, torch.bfloat16, CPU))
    assert case.must_bytes == 2 * (4 * 4 * V + more)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_quick_measures_what_a_cpu_can_and_says_who_took_no_part(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "kernel.json"
    arguments = ["--quick", "--device", "cpu", "--output", str(output)]
    assert kernel.main([*arguments, "--parts", "gamma"]) == 0
    assert kernel.main([*arguments, "--resume"]) == 0
    document = json.loads(output.read_text())
    for part in kernel.PARTS:
        shapes = list(kernel.QUICK.shapes(part))
        assert len([run for run in document["rows"] if run["part"] == part]) == len(shapes) * len(NAMES)
    figures = [run for run in document["rows"] if "us" in run]
    assert {run["contender"] for run in figures} == {"outrider", "transformers", "torch"}
    assert {run["rule"] for run in figures} >= {"tokenwise", "block", "coupled"}
    for run in figures:
        assert run["us"]["eager cold"]["repeats"] == kernel.QUICK.repeats
        assert run["must_bytes"] >= 2 * run["B"] * (run["gamma"] + 1) * run["V"]
        assert 0 <= run["accepted"] <= run["gamma"]
    assert document["aims"] == []  # they are for a GPU
    assert output.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert "it does not know the rule block" in capsys.readouterr().out
    assert str(tmp_path) not in output.read_text()


@pytest.mark.gpu
def test_on_a_gpu_launches_are_captured(tmp_path: Path) -> None:
    output = tmp_path / "kernel.json"
    assert kernel.main(["--quick", "--device", "cuda", "--output", str(output)]) == 0
    ours = [run for run in json.loads(output.read_text())["rows"] if run["contender"] == "outrider" and "us" in run]
    assert ours
    assert all("graph warm" in run["us"] and run["peak_bytes"] > 0 for run in ours)


def run_of(contender: str, us: float, **changes: Any) -> dict[str, Any]:
    medians = {name: {"median": us} for name in ("eager cold", "eager warm", "graph cold", "graph warm", "whole")}
    return {
        "part": "gamma", "contender": contender, "V": 1000, "B": 1, "gamma": 5, "rule": "tokenwise", "us": medians,
        "must_bytes": 12_000, "peak_bytes": 0, "accepted": 1.0,
    } | changes  # fmt: skip


def test_aims_are_met_by_their_worst_case() -> None:
    document = {
        "device": {"name": "some GPU"},
        "copy_bytes_per_second": 4e12,
        "rows": [
            run_of("outrider", 10.0),
            run_of("outrider", 11.0, V=2000),
            run_of("outrider", 8.0, gamma=1),
            run_of("outrider", 13.0, gamma=20),
            run_of("transformers", 400.0),
            run_of("transformers", 200.0, V=2000),
            run_of("outrider", 100.0, part="batch", B=64, must_bytes=360_000_000),  # 3.6e12 bytes a second
            run_of("outrider", 100.0, part="batch", B=128, must_bytes=300_000_000),
            run_of("outrider", 100.0, part="rules", B=64, rule="coupled", must_bytes=200_000_000),
            {"part": "rules", "contender": "torch", "V": 1000, "B": 1, "gamma": 5, "rule": "block", "refusal": "no"},
        ],
    }
    assert [(aim["found"], aim["met"]) for aim in aims(document)] == [
        (pytest.approx(0.75), False),  # of 0.9 and 0.75
        (pytest.approx(0.5), True),
        (11.0, False),
        (pytest.approx(200 / 11), False),
        (pytest.approx(13 / 8), False),
    ]
