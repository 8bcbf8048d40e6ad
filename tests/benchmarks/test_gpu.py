"""The benchmark of a GPU runs dry on a CPU and goes on where a part fails; its arithmetic and its planted pair hold."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu, gpu_device
from benchmarks.clocks import CpuClock
from benchmarks.gpu_bench import DRY, FULL, PARTS, RUN_SECONDS, RUNS, Deadline, GpuBench
from benchmarks.gpu_pair import alpha_of
from benchmarks.gpu_profile import busy_share, union
from benchmarks.gpu_report import DRY_RUN, summarise, table
from benchmarks.harness import Json
from benchmarks.planted import LLAMA_1B, LLAMA_8B, LLAMA_13B, TINY_DRAFT, TINY_TARGET, Plant, build, written
from benchmarks.planted import __main__ as planted_service
from outrider.theory import expected_tokens

CPU = torch.device("cpu")
LEVEL = 0.001


# ------------------------------------------------------------------------------------------------------ the whole of it


@pytest.mark.timeout(300)
def test_a_dry_run_of_one_run_measures_its_parts(tmp_path: Path) -> None:
    output = tmp_path / "gpu.json"
    assert gpu.main(["--dry-run", "--run", "3", "--output", str(output), "--scratch", str(tmp_path)]) == 0
    document = json.loads(output.read_text())
    assert list(document["parts"]) == list(RUNS[3])
    assert all(entry["figures"] for entry in document["parts"].values())
    assert document["meaning"] == DRY_RUN


@pytest.mark.slow
@pytest.mark.timeout(600)  # services start four times, on whatever else the machine does
def test_a_dry_run_measures_every_part_and_says_that_it_means_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "gpu.json"
    arguments = ["--dry-run", "--output", str(output), "--scratch", str(tmp_path)]
    assert gpu.main(arguments) == 0
    told = capsys.readouterr()
    document = json.loads(output.read_text())
    assert list(document["parts"]) == list(PARTS)
    for entry in document["parts"].values():
        assert entry["figures"]
        assert entry["key"]["device"] == {"name": "cpu"}
        assert entry["key"]["versions"]["torch"] == torch.__version__
    figures = {name: entry["figures"] for name, entry in document["parts"].items()}
    _check_figures(figures)
    (compiled,) = DRY.compiled
    assert figures["alone"]["shapes"][compiled]["contenders"]["transformers, static cache"]["rates"]
    assert str(tmp_path) not in output.read_text()
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []  # nothing is left in the scratch folder

    assert document["meaning"] == DRY_RUN
    assert document["summary"]["aims"] == []
    assert DRY_RUN in output.with_suffix(".md").read_text()
    assert DRY_RUN in told.out
    assert DRY_RUN in " ".join(told.err.split())
    assert {path.name for path in tmp_path.iterdir()} == {"gpu.json", "gpu.md", "gpu.png", "gpu-kernel.png"}

    assert gpu.main([*arguments, "--resume"]) == 0
    assert json.loads(output.read_text())["parts"] == document["parts"]
    assert capsys.readouterr().err.count("it is there already") == len(PARTS)


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_on_a_gpu_tiny_models_pass_through_every_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "FULL", DRY)
    output = tmp_path / "gpu.json"
    assert gpu.main(["--output", str(output), "--scratch", str(tmp_path)]) == 0
    document = json.loads(output.read_text())
    _check_figures({name: entry["figures"] for name, entry in document["parts"].items()})
    assert "meaning" not in document
    assert document["parts"]["profile"]["key"]["device"]["name"] == torch.cuda.get_device_name()


def _check_figures(figures: dict[str, Json]) -> None:
    for row in figures["choices"]["rows"]:
        assert row["attention"]
        assert row["layers_why"]
        assert row["graphs"] == "9 of 9 sizes"
    assert list(figures["tests"]["groups"]) == ["all"]
    assert all(row["exit_code"] == 0 for row in figures["tests"]["groups"].values())
    assert figures["memcheck"]["exit_code"] == 0
    for row in figures["alone"]["shapes"].values():
        assert row["contenders"]["Outrider, eager"]["of_bound"] > 0
        assert row["contenders"]["transformers"]["of_bound"] > 0
        assert set(row["pass_seconds"]) == {"1", str(DRY.gamma + 1)}

    plant = DRY.plant(DRY.target)
    for alpha in DRY.alphas:
        row = figures["pair"]["alphas"][f"{alpha:g}"]
        prompt = plant.prompt(alpha, 0, length=DRY.prompt_tokens, output=DRY.pair_tokens)
        judged, accepted, passes = rounds(plant, prompt[-1], DRY.pair_tokens, DRY.gamma)
        assert row["found_alpha"] == pytest.approx(accepted / judged, abs=1e-6)  # of the draft that was planted
        assert row["of_foretold"] == pytest.approx(row["tokens_per_second"] / row["foretold"])
        assert row["assisted"]["tokens_per_pass"] == pytest.approx(DRY.pair_tokens / passes, rel=0.35)

    assert set(figures["streams"]["levels"]) == {"1", "2"}
    for by_name in figures["streams"]["levels"].values():
        assert by_name["target alone"]["tokens_per_round"] == pytest.approx(1.0)
        assert by_name["the pair"]["tokens_per_round"] > 1
        assert by_name["the pair"]["ttft_ms"]["p99"] > 0
    (cached,) = figures["cache"]["rows"]
    assert cached["ratio"] > 0
    assert cached["pass_ms"] > 0
    for row in figures["share"]["batches"].values():
        assert row["share"] == pytest.approx(row["verify_us"] / (row["verify_us"] + row["forward_us"]))
        assert 0 < row["transformers"]["share"] < 1
    assert {run["part"] for run in figures["kernel"]["rows"]} == {"gamma", "batch", "rules"}
    assert 0 < figures["profile"]["busy_share"] <= 1
    assert figures["profile"]["passes"] > 0


def rounds(plant: Plant, last: int, count: int, gamma: int) -> tuple[int, int, int]:
    """Judged and accepted drafts, and rounds, of a text after the token `last`: by the plant, without any model."""
    wrong = plant.wrong().tolist()
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


def _fails(bench: GpuBench, found: Json) -> Json:
    raise RuntimeError("the device fell off the bus")


def test_a_part_that_fails_is_recorded_and_the_others_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "gpu.json"
    arguments = ["--dry-run", "--output", str(output), "--parts", "share,device,profile"]
    with monkeypatch.context() as broken:
        broken.setitem(gpu.MEASURES, "share", _fails)
        broken.setitem(gpu.MEASURES, "profile", _fails)
        assert gpu.main(arguments) == 1
    parts = json.loads(output.read_text())["parts"]
    assert list(parts) == ["device", "share", "profile"]
    assert "figures" in parts["device"]
    assert parts["share"]["error"] == "RuntimeError: the device fell off the bus"
    assert "the device fell off the bus" in capsys.readouterr().out

    assert gpu.main([*arguments, "--resume"]) == 0  # what failed is measured, and what did not is not
    again = json.loads(output.read_text())["parts"]
    assert again["device"] == parts["device"]
    assert "figures" in again["share"]
    assert "figures" in again["profile"]


def test_what_was_measured_with_other_versions_is_measured_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "gpu.json"
    arguments = ["--dry-run", "--output", str(output), "--parts", "device"]
    assert gpu.main(arguments) == 0
    document = json.loads(output.read_text())
    document["parts"]["device"]["key"]["versions"]["torch"] = "1.0"
    document["parts"]["device"]["figures"]["matrix"] = -1
    output.write_text(json.dumps(document))
    capsys.readouterr()
    assert gpu.main([*arguments, "--resume"]) == 0
    assert "it is there already" not in capsys.readouterr().err
    assert json.loads(output.read_text())["parts"]["device"]["figures"]["matrix"] == DRY.matrix


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main([]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.strip() == (
        "benchmarks.gpu: there is no CUDA device; --dry-run runs all of it with tiny models on a CPU"
    )


def test_a_part_that_does_not_exist_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--dry-run", "--parts", "device,dreams", "--output", str(tmp_path / "out.json")]) == 2
    assert "--parts names dreams; there are choices, tests" in capsys.readouterr().err


def test_each_run_takes_less_than_nine_minutes_and_all_have_each_part_once() -> None:
    assert [name for run in RUNS.values() for name in run] == list(PARTS)
    assert set(FULL.budgets) == set(DRY.budgets) == set(PARTS)
    for run in RUNS.values():
        assert sum(FULL.budgets[name] for name in run) <= RUN_SECONDS < 540 - 20  # imports and pictures take their time


def test_a_part_whose_time_is_over_has_one_turn() -> None:
    assert list(Deadline(0.0).turns(5)) == [0]
    assert list(Deadline(1e6).turns(3)) == [0, 1, 2]


def test_the_static_cache_is_measured_by_a_program_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = {
        "shape": TINY_DRAFT.document(), "alphas": [0.5], "dtype": "float32", "device": "cpu",
        "prompt_tokens": 3, "tokens": 4, "repeats": 2,
    }  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["benchmarks.gpu_device", json.dumps(asked)])
    assert gpu_device.main() == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(told["rates"]) == 2
    assert told["compiled"] is False


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(gpu_device._LEAST_S, "compiling and measuring took more than"), (0.0, "there was no time left for it")],
)
def test_a_compilation_that_takes_too_long_is_ended(
    seconds: float, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_device, "_LEAST_S", 0.01)
    bench = GpuBench(DRY, CPU, CpuClock(CPU, 5), tmp_path, lambda line: None)
    bench.begin(60.0)
    found = bench.tried("it", lambda: gpu_device._compiled(bench, TINY_DRAFT.name, seconds / 50), ours=False)
    assert said in found["error"]
    assert bench.troubles == []  # it is not ours


@pytest.mark.parametrize("arguments", [[], ["proxy"]])
def test_a_service_that_is_none_is_refused(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks.planted", *arguments])
    assert planted_service.main() == 2
    assert "verifier_service or draft_service" in capsys.readouterr().err


# ----------------------------------------------------------------------------------------------------- the planted pair


@pytest.mark.parametrize("alpha", [0.6, 0.9])
def test_the_draft_is_wrong_as_often_as_it_is_said_to_be(alpha: float) -> None:
    """40,000 tokens: at a level of 0.001 a rate that is 0.015 off is seen with a power of 99 %."""
    wrong = Plant(80_000, (0.3, alpha)).wrong()[40_000:]
    deviation = math.sqrt(alpha * (1 - alpha) / len(wrong))
    assert (3.29 + 2.33) * deviation < 0.015
    assert abs(float(wrong.double().mean()) - (1 - alpha)) < 3.29 * deviation


def test_mistakes_are_independent_of_each_other() -> None:
    """Tokens of a round, over 50,000 rounds or more of γ = 6: their mean within four standard errors (1.5 %)."""
    alpha, gamma, count = 0.7, 6, 200_000
    plant = Plant(count + 10, (alpha,))
    _, accepted, passes = rounds(plant, 0, count, gamma)
    assert passes > 50_000
    mean, most = 1 + accepted / passes, gamma + 1
    second = sum((2 * k + 1) * alpha**k for k in range(most))  # E X² of the tokens of a round: Σ (2k + 1) P(X > k)
    error = math.sqrt((second - expected_tokens(alpha, gamma) ** 2) / passes)
    assert 4 * error < 0.015 * mean
    assert abs(mean - expected_tokens(alpha, gamma)) < 4 * error


def test_what_a_draft_writes_instead_is_never_right() -> None:
    plant = Plant(1000, (0.5, 0.9))
    right, drafted = plant.successors(), plant.drafted()
    assert torch.equal(drafted != right, plant.wrong())
    assert torch.equal(drafted.sort().values, torch.arange(1000))  # each row of the head is one embedding


@pytest.mark.parametrize("drafts", [False, True])
def test_a_planted_model_writes_what_was_planted(drafts: bool) -> None:
    """After any tokens whatever, and with a margin that bfloat16 does not bridge."""
    shape = TINY_DRAFT if drafts else TINY_TARGET
    plant = DRY.plant(shape)
    model = build(shape, plant, drafts=drafts, device=CPU, dtype=torch.bfloat16)
    tokens = torch.randperm(shape.vocab, generator=torch.Generator().manual_seed(3))[None]
    with torch.inference_mode():
        logits = model(tokens).logits[0].float()
    follows = plant.drafted() if drafts else plant.successors()
    best = logits.topk(2)
    assert torch.equal(best.indices[:, 0], follows[tokens[0]])
    assert float((best.values[:, 0] - best.values[:, 1]).min()) > 8 * 2**-8 * float(best.values.max())
    read = sum(weight.numel() for weight in model.parameters()) - (shape.vocab - 1) * shape.hidden
    assert read == shape.weights_read


def test_shapes_are_those_of_the_models_they_are_named_for() -> None:
    """Parameters as published: 1.24, 8.03 and 13.02 thousand millions; 1B's head is its embedding."""
    read = {shape.name: shape.weights_read / 1e9 for shape in (LLAMA_1B, LLAMA_8B, LLAMA_13B)}
    embedding = {shape.name: shape.vocab * shape.hidden / 1e9 for shape in (LLAMA_8B, LLAMA_13B)}
    assert read["1B"] == pytest.approx(1.24, abs=0.005)
    assert read["8B"] + embedding["8B"] == pytest.approx(8.03, abs=0.005)
    assert read["13B"] + embedding["13B"] == pytest.approx(13.02, abs=0.005)


def test_texts_stay_in_the_region_of_their_rate() -> None:
    plant = Plant(1000, (0.5, 0.9))
    for number in range(200):
        prompt = plant.prompt(0.9, number, length=4, output=60)
        assert len(prompt) == 4
        assert all(500 <= token < 1000 for token in (prompt[-1], *written(prompt, 60, 1000)))
    assert len({plant.prompt(0.9, number, length=4, output=60)[-1] for number in range(200)}) == 8  # then again


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda: Plant(1000, (1.2,)), "an alpha is 1.2"),
        (lambda: Plant(31, (0.5, 0.5)), "31 tokens for 2 rates"),
        (lambda: Plant(100, ()), "100 tokens for 0 rates"),
        (lambda: Plant(100, (0.5,)).prompt(0.6, 0, length=2, output=5), "alpha is 0.6"),
        (lambda: Plant(100, (0.5,)).prompt(0.5, 0, length=2, output=100), "100 tokens do not fit a region of 100"),
        (
            lambda: build(TINY_DRAFT, Plant(100, (0.5,)), drafts=True, device=CPU, dtype=torch.float32),
            "tiny draft has 1024 tokens, its plant 100",
        ),
    ],
)
def test_what_cannot_be_planted_is_named(ask: Callable[[], Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ask()


# ----------------------------------------------------------------------------------------------------------- arithmetic


@pytest.mark.parametrize("alpha", [0.0, 0.35, 0.8, 1.0])
def test_alpha_is_found_from_the_tokens_of_a_round(alpha: float) -> None:
    assert alpha_of(expected_tokens(alpha, 4), 4) == pytest.approx(alpha, abs=1e-9)
    with pytest.raises(ValueError, match="tokens a round of 4 drafts"):
        alpha_of(5.5, 4)


def test_time_is_busy_once_however_much_runs_in_it() -> None:
    busy = union([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (3.0, 4.0), (1.5, 1.6)])
    assert busy == [(0.0, 4.0), (5.0, 6.0)]
    assert busy_share(busy) == pytest.approx(5 / 6)
    with pytest.raises(ValueError, match="nothing ran"):
        busy_share(union([]))


def _document(**figures: Json) -> Json:
    key = {"device": {"name": "some GPU"}, "versions": {"torch": "2.11"}, "settings": {}}
    entries = {name: {"figures": found, "key": key, "troubles": []} for name, found in figures.items()}
    return {"command": "", "settings": {"dry_run": False}, "parts": entries}


def _row(ratio: float, *, counts: bool) -> Json:
    return {
        "placement": "there", "way": "greedy", "gamma": 4, "ratio": ratio, "hit_rate": None, "acceptance": 0.5,
        "draft_ms": 1.0, "pass_ms": 1.0, "drafting_counts": counts,
    }  # fmt: skip


def test_aims_are_judged_by_their_worst_case_and_by_what_is_served() -> None:
    contenders = {
        "Outrider, graphs": {"of_bound": 0.65, "tokens_per_second": 65.0},
        "Outrider, eager": {"of_bound": 0.3, "tokens_per_second": 30.0},
        "transformers": {"of_bound": 0.9, "tokens_per_second": 90.0},
    }
    seconds = {"draft_step": 0.001, "verify_pass": 0.01, "round_trip": 0.001}
    pair = {
        f"{alpha:g}": {
            "gamma": 4, "alpha": alpha, "found_alpha": alpha, "tokens_per_second": 250.0, "foretold": 260.0,
            "of_foretold": of, "speed_up": 2.0, "seconds": seconds,
        }
        for alpha, of in ((0.6, 0.95), (0.8, 0.85))
    }  # fmt: skip
    document = _document(
        alone={
            "shapes": {
                "1B": {"pass_seconds": {"1": 0.001}, "contenders": {"Outrider, graphs": {"error": "no"}}},
                "8B": {"pass_seconds": {"5": 0.008}, "contenders": contenders, "bound_tokens_per_second": 100.0},
            }
        },
        pair={"alphas": pair, "alone_tokens_per_second": 100.0},
        cache={"rows": [_row(1.3, counts=True), _row(1.1, counts=False)]},
    )
    summary = document["summary"] = summarise(document)
    found = {aim["aim"].split(",")[0]: (aim["found"], aim["met"]) for aim in summary["aims"]}
    assert found == {
        "1B alone": (None, None),
        "8B alone": (0.65, False),
        "13B alone": (None, None),
        "the pair": (0.85, False),
        "the outcome cache": (1.3, True),
        "the device at work": (None, None),
    }
    bare = 250.0 / (expected_tokens(0.8, 4) / (4 * 0.001 + 0.008))
    assert summary["pair_of_bare_passes"]["0.8"] == pytest.approx(bare)
    text = table(document)
    assert "- **Does not hold**: the pair, 0.9 of Theorem 3.8; 0.85 at worst." in text
    assert "- **Not measured**: 13B alone, 0.8 of the bound by its weights." in text
    assert "some GPU" in text
    assert "dry run" not in text
