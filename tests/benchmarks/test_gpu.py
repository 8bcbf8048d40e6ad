"""The benchmark of a GPU runs dry on a CPU and goes on where a part fails; its arithmetic and synthetic pair hold."""

import json
import math
from pathlib import Path

import pytest
import torch

from benchmarks import gpu, gpu_checks, gpu_speed
from benchmarks.gpu import DRY, DRY_RUN, FULL, PARTS, RUN_SECONDS, RUNS, GpuBench
from benchmarks.harness import Json
from benchmarks.synthetic_models import TINY_DRAFT, TINY_TARGET, KnownText, build
from outrider.theory import expected_tokens

CPU = torch.device("cpu")


def dry_run(output: Path, *more: str) -> tuple[int, Json]:
    code = gpu.main(["--dry-run", "--output", str(output), *more])
    return code, json.loads(output.read_text())


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_dry_run_of_one_run_measures_its_parts_and_says_that_it_means_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.engine.LEAST_PASSES", 1)
    code, document = dry_run(tmp_path / "gpu.json", "--run", "2")
    assert code == 0
    assert list(document["parts"]) == list(RUNS[2])
    check_services(document)
    assert (document["meaning"], document["aims"]) == (DRY_RUN, [])
    assert DRY_RUN in (tmp_path / "gpu.md").read_text()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_dry_run_measures_every_part(tmp_path: Path) -> None:
    code, document = dry_run(tmp_path / "gpu.json")
    assert code == 0
    check_device(document)
    check_services(document)
    assert {path.name for path in tmp_path.iterdir()} == {"gpu.json", "gpu.md"}


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_on_a_gpu_tiny_models_pass_through_every_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "FULL", DRY)
    output = tmp_path / "gpu.json"
    assert gpu.main(["--output", str(output)]) == 0
    document = json.loads(output.read_text())
    check_device(document)
    check_services(document)
    assert "meaning" not in document


def check_device(document: Json) -> None:
    figures = {name: entry["figures"] for name, entry in document["parts"].items()}
    assert list(figures) == list(PARTS)
    for row in figures["choices"]["rows"]:
        assert row["attention"]
        assert row["graphs"] == "9 of 9 sizes"
    assert all(row["exit_code"] == 0 for row in (*figures["tests"]["rows"], figures["memcheck"]))
    for row in figures["alone"]["shapes"].values():
        assert all(row["contenders"][name]["of_bound"] > 0 for name in ("Outrider, eager", "transformers"))
        assert set(row["pass_seconds"]) == {"1", str(DRY.gamma + 1)}
    assert {run["part"] for run in figures["kernel"]["rows"]} == {"gamma", "batch", "rules"}
    assert all(row["launches"] > 0 and row["us"] > 0 for row in figures["profile"]["rows"])
    assert {row["rows"] for row in figures["profile"]["rows"]} == {1, DRY.gamma + 1}


def check_services(document: Json) -> None:
    figures = {name: entry["figures"] for name, entry in document["parts"].items()}
    text = DRY.text(DRY.target)
    for alpha, row in zip(DRY.alphas, figures["pair"]["rows"], strict=True):
        prompt = text.prompt(alpha, 0, length=DRY.prompt_tokens, output=DRY.pair_tokens)
        judged, accepted, passes = rounds(text, prompt[-1], DRY.pair_tokens, DRY.gamma)
        assert row["found_alpha"] == pytest.approx(accepted / judged, abs=1e-6)  # of the synthetic draft
        assert row["assisted_tokens_per_pass"] == pytest.approx(DRY.pair_tokens / passes, rel=0.35)
    for row in figures["streams"]["rows"]:
        if row["contender"] != gpu_speed.ADAPTIVE:
            assert (row["alpha"] is None) == (row["contender"] == gpu_speed.ALONE)
        if row["contender"] == gpu_speed.PAIR:  # the target alone may write several tokens in a row, too
            assert row["tokens_per_round"] > 1
        assert row["ttft_ms"]["p99"] > 0
    assert 0 < figures["engine"]["rows"][0]["share"] < 1


def rounds(text: KnownText, last: int, count: int, gamma: int) -> tuple[int, int, int]:
    """Judged and accepted drafts, and rounds, of a text after the token `last`: by the formula, without any model."""
    wrong = text.mistakes().tolist()
    judged = accepted = passes = done = 0
    while done < count:
        drafted = min(gamma, count - done - 1)  # the last token is the target's own
        stands = 0
        while stands < drafted and not wrong[last + done + stands]:
            stands += 1
        judged += min(stands + 1, drafted)
        accepted += stands
        done += stands + 1
        passes += 1
    return judged, accepted, passes


def test_a_part_that_fails_is_recorded_and_the_others_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(bench: GpuBench) -> Json:
        raise RuntimeError("the device fell off the bus")

    for name in ("kernel", "alone", "pair"):
        monkeypatch.setitem(gpu.PARTS, name, lambda bench: {"rows": [{"found": 1}]})
    monkeypatch.setattr("benchmarks.kernel.table", str)
    monkeypatch.setattr("benchmarks.kernel.draw", lambda document, path: None)
    arguments = tmp_path / "gpu.json", "--parts", "kernel", "pair"
    with monkeypatch.context() as broken:
        broken.setitem(gpu.PARTS, "kernel", fails)
        code, document = dry_run(*arguments)
    assert code == 1
    assert list(document["parts"]) == ["kernel", "pair"]
    assert document["parts"]["kernel"]["errors"] == ["RuntimeError: the device fell off the bus"]
    assert "the device fell off the bus" in capsys.readouterr().out

    monkeypatch.setitem(gpu.PARTS, "pair", fails)
    code, document = dry_run(*arguments, "--resume")  # only failed parts are measured again
    assert code == 0
    assert all("figures" in entry for entry in document["parts"].values())


def test_each_run_takes_less_than_nine_minutes_and_all_have_each_part_once() -> None:
    assert [name for run in RUNS.values() for name in run] == list(PARTS)
    assert all(sum(run.values()) <= RUN_SECONDS for run in RUNS.values())


def test_aims_are_judged_by_their_worst_case_and_by_what_is_served() -> None:
    shapes = {
        "1B": {"contenders": {"Outrider, graphs": {"error": "no"}}},
        "8B": {"contenders": {"Outrider, graphs": {"of_bound": 0.65}, "transformers": {"of_bound": 0.9}}},
    }
    figures = {
        "alone": {"shapes": shapes},
        "pair": {"rows": [{"of_predicted": 0.95}, {"of_predicted": 0.85}]},
        "engine": {"rows": [{"rounds": "Decode", "share": 0.3}, {"rounds": "Decode", "share": 0.05}]},
    }
    found = gpu.aims({"parts": {name: {"figures": each} for name, each in figures.items()}})
    assert [(each["aim"].split(",")[0], each["found"], each["met"]) for each in found] == [
        ("1B alone", None, None),
        ("8B alone", 0.65, False),
        ("13B alone", None, None),
        ("the pair", 0.85, False),
        ("most streams", 0.05, True),
    ]


# ------------------------------------------------------------------------------------------------------------- checks


@pytest.fixture
def bench() -> GpuBench:
    made = GpuBench(FULL, CPU)
    made.begin(60.0)
    return made


def test_groups_end_with_the_first_in_which_a_test_fails(
    bench: GpuBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, body in (("good", "assert True"), ("bad", "assert 2 + 2 == 5"), ("later", "assert True")):
        (tmp_path / name).mkdir()
        test = f"import pytest\n@pytest.mark.gpu\ndef test_{name}(): {body}\n"
        (tmp_path / name / f"test_{name}.py").write_text(test)
        (tmp_path / name / "test_other.py").write_text("import no_such_package")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    monkeypatch.setattr(gpu_checks, "GROUPS", dict.fromkeys(("good", "bad", "later"), 1))
    monkeypatch.setattr(gpu_checks, "ROOT", tmp_path)
    good, bad = gpu_checks.tests(bench)["rows"]
    assert (good["exit_code"], bad["exit_code"]) == (0, 1)
    assert any("assert (2 + 2) == 5" in line for line in bad["output"])
    assert "the groups after it did not run" in bench.errors[0]


# --------------------------------------------------------------------------------------------------- the synthetic pair


def test_mistakes_come_as_often_as_said_and_independently() -> None:
    """Tokens of a round, over 50,000 rounds or more of γ = 6: their mean within four standard errors (1.5 %)."""
    alpha, gamma, count = 0.7, 6, 200_000
    text = KnownText(count + 10, (alpha,))
    _, accepted, passes = rounds(text, 0, count, gamma)
    assert passes > 50_000
    mean, most = 1 + accepted / passes, gamma + 1
    second = sum((2 * k + 1) * alpha**k for k in range(most))  # E X² of the tokens of a round: Σ (2k + 1) P(X > k)
    error = math.sqrt((second - expected_tokens(alpha, gamma) ** 2) / passes)
    assert 4 * error < 0.015 * mean
    assert abs(mean - expected_tokens(alpha, gamma)) < 4 * error


@pytest.mark.parametrize("drafts", [False, True])
def test_a_synthetic_model_writes_its_known_text(drafts: bool) -> None:
    """After any tokens whatever, and with a margin that bfloat16 does not bridge."""
    shape = TINY_DRAFT if drafts else TINY_TARGET
    text = DRY.text(shape)
    model = build(shape, text, drafts=drafts, device=CPU, dtype=torch.bfloat16)
    tokens = torch.randperm(shape.vocab, generator=torch.Generator().manual_seed(3))[None]
    with torch.inference_mode():
        logits = model(tokens).logits[0].float()
    follows = text.draft_next() if drafts else text.target_next()
    assert torch.equal(text.draft_next() != text.target_next(), text.mistakes())
    best = logits.topk(2)
    assert torch.equal(best.indices[:, 0], follows[tokens[0]])
    assert float((best.values[:, 0] - best.values[:, 1]).min()) > 8 * 2**-8 * float(best.values.max())
    read = sum(weight.numel() for weight in model.parameters()) - (shape.vocab - 1) * shape.hidden
    assert read == shape.weights_read
