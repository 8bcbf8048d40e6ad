"""The kernel's benchmark runs, its contenders sample from the target's distribution, and its arithmetic is right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import kernel
from benchmarks.clocks import CpuClock, Times
from benchmarks.kernel import LABELS, aims
from benchmarks.kernel_contenders import Case, Outrider, Rows, Shape, Transformers, unfused
from kernels.verify import Rule, verify
from tests.exactness import chisquare

CPU = torch.device("cpu")
V, GAMMA = 12, 2
LEVEL = 0.001


@pytest.fixture(scope="module")
def rows() -> Rows:
    return Rows.make(V, torch.float32, CPU)


def law_after(rows: Rows, row: int) -> np.ndarray:
    return torch.softmax(rows.logits[row].double(), dim=-1).numpy()


def check_distribution(rows: Rows, emitted: list[list[int]], *, notices: float) -> None:
    """Each of the tokens, as far as there are any: rows do not depend on what was drafted, so nor do they."""
    for place in range(GAMMA + 1):
        tokens = [each[place] for each in emitted if len(each) > place]
        fit = chisquare.goodness_of_fit(np.bincount(tokens, minlength=V), law_after(rows, place))
        assert chisquare.detectable(fit.df, fit.n, level=LEVEL, power=0.95) <= notices
        assert fit.p_value > LEVEL, f"token {place}: {fit}"


def test_unfused_torch_samples_from_the_target(rows: Rows) -> None:
    """20,000 sequences; a total variation of 0.04 in any of the three tokens is seen with a power of 95 %."""
    torch.manual_seed(0)
    case = Case(Shape(V, 20_000, GAMMA), rows)
    accepted, tokens = unfused(case.logits, case.draft_logits, case.drafted)
    assert 0.1 < float(accepted.float().mean()) / GAMMA < 0.95
    drafted = case.drafted.tolist()
    emitted = [
        [*drafted[b][:n], token] for b, (n, token) in enumerate(zip(accepted.tolist(), tokens.tolist(), strict=True))
    ]
    check_distribution(rows, emitted, notices=0.04)


def test_transformers_samples_from_the_target(rows: Rows) -> None:
    """3,000 sequences; a total variation of 0.1 is seen with a power of 95 %."""
    torch.manual_seed(0)
    runs = Transformers().start(Case(Shape(V, 3_000, GAMMA), rows)).run()
    check_distribution(rows, [tokens[0].tolist() for tokens, _ in runs], notices=0.1)


@pytest.mark.parametrize("rule", [Rule.TOKENWISE, Rule.BLOCK])
def test_outriders_cases_are_drawn_from_what_they_state(rows: Rows, rule: Rule) -> None:
    """3,000 sequences: drafts that were not drawn from the q̂ they state would show in the text."""
    case = Case(Shape(V, 3_000, GAMMA, rule), rows)
    results = verify(case.logits.flatten(0, 1), case.proposals)
    emitted = [
        [*proposal.tokens[: result.accepted], result.next_token]
        for proposal, result in zip(case.proposals, results, strict=True)
    ]
    check_distribution(rows, emitted, notices=0.1)


def test_coupled_cases_share_the_targets_noise(rows: Rows) -> None:
    """20 drafts: independent noise would accept Σ p q of each, 0.27 in the mean; shared noise accepts 0.75 here."""
    laws = [torch.softmax(rows.logits[i], dim=-1) @ torch.softmax(rows.draft_logits[i], dim=-1) for i in range(20)]
    assert float(sum(laws)) / 20 < 0.3
    case = Case(Shape(V, 1, 20, Rule.COUPLED), rows)
    accepted, logits = 0, case.logits[0]
    tokens = case.proposals[0].tokens
    for i, token in enumerate(tokens):  # each row by itself, so that one rejection does not hide the rest
        single = case.proposals[0]
        (result,) = verify(
            logits[i : i + 1], [type(single)((), (), single.law, single.seed, single.base_length + i, Rule.COUPLED)]
        )
        accepted += result.next_token == token
    assert accepted / 20 > 0.6


def test_an_outrider_that_is_not_built_takes_no_part(rows: Rows) -> None:
    assert "this build has" in str(Outrider("nonsense").refusal(Case(Shape(V, 1, 1), rows)))


def test_a_clock_makes_the_runs_it_is_told_to() -> None:
    made: list[int] = []
    found = CpuClock(CPU, repeats=9).times(lambda: made.append(1), cold=False)
    assert (found.repeats, len(made)) == (9, 11)  # two do not count
    assert 0 <= found.low <= found.median <= found.high
    assert Times.of([float(i) for i in range(11)]) == Times(5.0, 1.0, 9.0, 11)


@pytest.mark.timeout(200)
def test_quick_measures_what_a_cpu_can_and_says_who_took_no_part(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "kernel.json"
    arguments = ["--quick", "--device", "cpu", "--path", "torch", "--output", str(output)]
    assert kernel.main([*arguments, "--parts", "gamma"]) == 0
    first = json.loads(output.read_text())["rows"]
    assert kernel.main([*arguments, "--resume"]) == 0
    document = json.loads(output.read_text())
    assert document["rows"][: len(first)] == first
    for part in kernel.PARTS:
        shapes = list(kernel.QUICK.shapes(part))
        assert len([run for run in document["rows"] if run["part"] == part]) == len(shapes) * len(LABELS)
    figures = [run for run in document["rows"] if "us" in run]
    assert {run["contender"] for run in figures} == {"outrider", "transformers", "torch"}
    assert {run["rule"] for run in figures} >= {"tokenwise", "block", "coupled"}
    for run in figures:
        assert run["us"]["eager cold"]["repeats"] == kernel.QUICK.repeats
        assert run["must_bytes"] >= 2 * run["B"] * (run["gamma"] + 1) * run["V"]
        assert 0 <= run["accepted"] <= run["gamma"]
    assert document["aims"] == []  # they are for a GPU
    assert output.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert "it is compiled for a GPU only" in capsys.readouterr().out
    assert str(tmp_path) not in output.read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_the_full_run_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert kernel.main([]) == 2
    assert "there is no CUDA device; --quick runs small sizes on a CPU" in capsys.readouterr().err


@pytest.mark.gpu
def test_on_a_gpu_launches_are_captured(tmp_path: Path) -> None:
    output = tmp_path / "kernel.json"
    assert kernel.main(["--quick", "--device", "cuda", "--output", str(output)]) == 0
    ours = [run for run in json.loads(output.read_text())["rows"] if run["contender"] == "outrider" and "us" in run]
    assert ours
    assert all("graph warm" in run["us"] and run["peak_bytes"] > 0 for run in ours)


def run_of(contender: str, us: float, **changes: Any) -> dict[str, Any]:
    told = {name: {"median": us} for name in ("eager cold", "eager warm", "graph cold", "graph warm", "whole")}
    return {
        "part": "gamma", "contender": contender, "V": 1000, "B": 1, "gamma": 5, "rule": "tokenwise", "us": told,
        "must_bytes": 12_000, "peak_bytes": 0, "accepted": 1.0,
    } | changes  # fmt: skip


def test_aims_are_judged_by_their_worst_case() -> None:
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
