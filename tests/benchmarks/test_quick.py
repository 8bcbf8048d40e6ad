"""Each benchmark runs as its user starts it, through real services, and resumes; no test judges a speed."""

import importlib
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import load, plots, verification
from benchmarks.harness import PHASES, Bench, flat
from benchmarks.load import ALONE, BATCHING, PAIR, SERVER
from tests.fork_server import ForkedService, noting
from tests.project.tree import ROOT

Json = dict[str, Any]


def check_pair(summary: Json, runs: list[Json]) -> None:
    for name, own in summary.items():
        theirs = ["generate", "assisted, 8", "prompt lookup, 4"]
        if name != "demo":
            theirs = ["llama.cpp alone", "llama.cpp drafting"]
        for found in own.values():
            assert list(found) == [theirs[0], "Decode", *theirs[1:], "pair, γ = 4", "pair, adaptive"]
            assert found["pair, γ = 4"]["predicted_ratio"] > 0
    assert summary.keys() in ({"demo"}, {"demo", "demo, llama.cpp"}), "without its server"
    for run in runs:
        assert run["tokens"] == 8
        assert sum(run["phases"][phase] for phase in PHASES) == pytest.approx(run["seconds"])
        assert run["drafted"] >= run["accepted"]
        assert run["drafted"] == 0 or run["arm"] not in ("generate", "Decode", "llama.cpp alone")
        # The policy `adaptive` may draft nothing where drafting does not pay.
        assert run["drafted"] > 0 or not run["arm"].startswith(("assisted", "llama.cpp drafting", "pair, γ"))


def check_load(summary: Json, runs: list[Json]) -> None:
    closed, short, open_ = (summary["demo"][part] for part in load.LEVELS)
    assert set(closed) == {"1", "2"}
    for found in (*closed.values(), short["1"], open_["40"]):
        others = [] if found is open_["40"] else [BATCHING]  # llama.cpp's server is seldom there
        assert [name for name in found if name != SERVER] == [*others, ALONE, PAIR]
        assert found[PAIR]["draft_cpu_us"] is not None
        assert (found[ALONE]["gamma"], found[ALONE]["decode_share"]) == (0, 1)
    assert all(found[PAIR]["gamma"] > 0 for found in closed.values())
    assert open_["40"][PAIR]["refused"] == 0, "texts above the limit wait in the queue of the draft service"


def check_gamma(summary: Json, runs: list[Json]) -> None:
    for arms in summary["demo"].values():
        assert list(arms) == ["alone", "fixed 2", "fixed 8", "heuristic", "adaptive"]
        assert 1.5 < arms["fixed 2"]["gamma"] <= 2  # the end of a text shortens its last round
        assert 1.0 in (arms["fixed 2"]["over_best_fixed"], arms["fixed 8"]["over_best_fixed"])


def check_http_front(summary: Json, runs: list[Json]) -> None:
    found = summary["demo"]["2"]
    assert list(found) == ["gRPC client", "HTTP front", "floor: read and write", "floor: read"]
    assert found["HTTP front"]["us_per_chunk_in_all"] > 0
    assert "us_per_chunk" not in found["gRPC client"]
    assert {(run["arm"], run["tokens"]) for run in runs} == {(arm, 8) for arm in found} | {
        (arm, 16) for arm in found if arm != "gRPC client"
    }
    assert all(run["chunks"] > 0 for run in runs), "each server sends the text"


def check_drafters(summary: Json, runs: list[Json]) -> None:
    for _, found in flat(summary, 3):
        assert list(found) == ["none", "model", "staged", "ngram", "lookup", "random"]
        assert found["none"]["alpha"] is None
        assert 0 <= found["model"]["alpha"] <= 1
    assert all((run["inner_guessed"] > 0) <= (run["arm"] == "staged") for run in runs)


def check_outcome_cache(summary: Json, runs: list[Json]) -> None:
    for _, found in flat(summary, 3):
        assert found["with"]["same_text"] == 1  # in float32
        assert found["without"]["hit_rate"] is None


def check_network(summary: Json, runs: list[Json]) -> None:
    near, far = (summary["demo"][delay]["sequential"] for delay in ("0", "20"))
    assert far["round_us"]["wire"] >= 20e3, "each round pays the way"
    assert far["tokens_per_round"] == near["tokens_per_round"] > 1.5, "the same texts by the same drafts"


def check_network_tax(summary: Json, runs: list[Json]) -> None:
    for arms in summary["demo"].values():
        assert arms["one process"]["same_text"], "in float32 both run the same rounds"
        assert arms["gRPC"]["rounds"] == arms["one process"]["rounds"] > 0
        assert arms["minimal program"]["rounds"] > 0, "it plays rounds too"
        assert arms["minimal program"]["times"] == 1
        assert all(0 < arm["share"] < 1 for arm in arms.values())


def check_linger(summary: Json, runs: list[Json]) -> None:
    assert list(summary["demo"]["2"]) == ["0", "20"]
    assert all(1 <= found["sequences_per_pass"] <= 2 for found in summary["demo"]["2"].values())


def check_engine(summary: Json, runs: list[Json]) -> None:
    assert {keys[1] for keys, found in flat(summary, 3) if 0 < found["share"] < 1} == {"Decode", "proposals"}


def check_prefix(summary: Json, runs: list[Json]) -> None:
    assert (summary["64"]["prompt_tokens"], summary["64"]["cached_tokens"]) == (80, 64)


def check_encoder_decoder(summary: Json, runs: list[Json]) -> None:
    for arms in summary["translation"].values():
        assert list(arms) == ["generate", "Decode", "assisted, 3", "pair, γ = 3"]
        assert arms["pair, γ = 3"]["predicted_ratio"] > 0
    scores = [run for run in runs if run["part"] == "rules"]
    assert len({run["arm"] for run in scores}) == 5
    assert all(run["words"] > 2 for run in scores)


def check_rules(summary: Json, runs: list[Json]) -> None:
    assert [run["rule"] for run in runs] == [rule for rule in ("tokenwise", "block", "coupled") for _ in range(2)]
    for run in runs:
        assert run["rounds"] == 2
        assert 0 <= run["accepted"] <= 2 * run["gamma"]
        if run["rule"] != "coupled":
            assert run["redrafted"] == 2  # a seed draws the same drafts again
            assert all(0 <= value <= 2 * run["gamma"] for value in run["expected"].values())


def check_alpha(summary: Json, runs: list[Json]) -> None:
    for found in summary["demo"].values():
        assert list(found) == ["unigram", "bigram", "model", "ngram", "lookup", "random", "parallel"]
        for leniences in found.values():
            alphas = [each["alpha"] or 0.0 for each in leniences.values()]  # None without a drafted token
            assert list(leniences) == ["1", "0.5", "0.3", "0.1"]
            assert alphas == sorted(alphas)
        assert found["unigram"]["1"]["alpha"] < found["model"]["1"]["alpha"]


def check_acceptance(summary: Json, runs: list[Json]) -> None:
    for _, found in flat(summary, 2):
        assert list(found) == ["Decode", "l = 1", "l = 0.5", "l = 0.3", "l = 0.1"]
        assert found["Decode"]["alpha"] is None
        assert found["l = 0.1"]["alpha"] >= found["l = 1"]["alpha"] > 0


def check_skip_layers(summary: Json, runs: list[Json]) -> None:
    for _, found in flat(summary, 2):
        assert list(found) == ["Decode", "1 left out"]
        assert 0.5 < found["1 left out"]["alpha"] <= 1


def check_beams(summary: Json, runs: list[Json]) -> None:
    assert {keys for keys, _ in flat(summary, 4)} == {
        (draft, "2", wider, "2") for draft in ("model", "bigram") for wider in "12"
    }
    assert all(run["same"] and run["passes"] <= run["steps"] == 8 for run in runs)


def check_verification(document: Json, runs: list[Json]) -> None:
    for _, found in flat(document["alone"], 3):
        assert tuple(found) == verification.ARMS
        assert all(each["us"] > 0 for each in found.values())
    for _, found in flat(document["texts"], 2):
        assert list(found) == ["transformers", "tokenwise", "block", "sigmoid"]
        assert found["transformers"]["text_saved"] == 0
        assert all(0 < each["verify_us"] < each["round_us"] for each in found.values())
        assert found["sigmoid"]["accepted"] >= found["tokenwise"]["accepted"] > 0


def check_parallel(summary: Json, runs: list[Json]) -> None:
    for temperature, found in summary["demo"].items():
        assert {"plain draft, γ = 3", "s = 1, γ = 3", "s = 2, γ = 4", "s = γ = 4", "chosen"} < set(found)
        assert max(arm["ratio"] for name, arm in found.items() if name.startswith("s = 1, γ")) == 1, temperature
        assert found["no outcome cache, s = 1"]["hit_rate"] is found["s = γ = 4"]["hit_rate"] is None


def check_revisions(summary: Json, runs: list[Json]) -> None:
    for _, found in flat(summary, 2):
        assert list(found) == ["old, Decode", "new, Decode", "old, pair", "new, pair"]
        for name in ("new, Decode", "new, pair"):
            low, high = found[name]["interval"]
            assert 0 < low < high


CASES: dict[str, tuple[Callable[[Json, list[Json]], None], list[str]]] = {
    "pair": (check_pair, ["--prompts", "1", "--new-tokens", "8"]),
    "load": (check_load, []),
    "gamma": (check_gamma, ["--prompts", "1", "--new-tokens", "16"]),
    "drafters": (check_drafters, ["--new-tokens", "8"]),
    "outcome_cache": (check_outcome_cache, ["--prompts", "1", "--new-tokens", "24", "--dtype", "float32"]),
    "network": (check_network, ["--dtype", "float32", "--new-tokens", "16"]),
    "network_tax": (check_network_tax, ["--dtype", "float32"]),
    "linger": (check_linger, []),
    "engine": (check_engine, []),
    "prefix": (check_prefix, []),
    "encoder_decoder": (check_encoder_decoder, []),
    "alpha": (check_alpha, []),
    "rules": (check_rules, []),
    "acceptance": (check_acceptance, []),
    "http_front": (check_http_front, []),
    "skip_layers": (check_skip_layers, []),
    "beams": (check_beams, []),
    "verification": (check_verification, []),
    "parallel": (check_parallel, ["--new-tokens", "8"]),
    "revisions": (check_revisions, ["--new-tokens", "8", "--old", str(ROOT)]),
}


@pytest.mark.timeout(300)  # services and transformers start, on whatever else the machine does
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "rules" else [pytest.mark.slow]) for name in CASES]
)
def test_quick_measures_every_contender_and_says_so_in_one_json_document(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # In place of megabytes, of which the first tenth is counted.
    for module in ("drafters", "alpha"):
        monkeypatch.setattr(f"benchmarks.{module}.training_text", lambda _: Path(__file__).read_text())
    monkeypatch.setattr("benchmarks.engine.LEAST_PASSES", 1)  # on a busy machine few passes hold all sequences
    check, more = CASES[name]
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "out.json"
    prompts.write_text('{"text": "def mean(values):"}\n\n{"text": "import os"}\n')
    arguments = ["--quick", *more, "--prompts-file", str(prompts), "--output", str(output)]
    main, kept = importlib.import_module(f"benchmarks.{name}").main, ""
    if name == "rules":  # resumed, it goes on where it was interrupted
        kept = interrupted(main, arguments, capsys, output)
        assert len(kept.splitlines()) > 1
        arguments.append("--resume")
    assert main(arguments) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document == json.loads(output.read_text())
    assert document["command"].startswith(f"python -m benchmarks.{name} --quick")
    assert str(tmp_path) not in output.read_text()
    pictures = [path.read_bytes()[:4] for path in tmp_path.glob("out*.png")]
    assert set(pictures) == (set() if name == "revisions" else {b"\x89PNG"})
    before = (tmp_path / "out.runs.jsonl").read_text()
    assert before.startswith(kept)
    runs = [run for run in map(json.loads, before.splitlines()[1:]) if "once" not in run]
    check(document.get("summary", document), runs)
    if name == "load":  # resumed, it has nothing left to measure, and comes to the same figures
        assert main([*arguments, "--resume"]) == 0
        assert (tmp_path / "out.runs.jsonl").read_text() == before
        assert json.loads(output.read_text())["summary"] == document["summary"]
    if name in ("load", "rules"):
        monkeypatch.setattr("sys.argv", ["benchmarks.plots", str(output)])
        assert plots.main() == 0


def interrupted(
    main: Callable[[list[str]], int], arguments: list[str], capsys: pytest.CaptureFixture[str], output: Path
) -> str:
    """The runs of a benchmark that gets SIGTERM after its first one. It ends its two services."""
    started: list[ForkedService] = []
    add = Bench.add

    def add_and_interrupt(bench: Bench, *runs: Json) -> None:
        add(bench, *runs)
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # if the benchmark has no handler
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("benchmarks.services.ServiceProcess", noting(started))
            patch.setattr(Bench, "add", add_and_interrupt)
            code = main(arguments)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert code == 130
    assert capsys.readouterr().err.splitlines()[-1] == "benchmarks.rules: interrupted; --resume goes on from here"
    assert len(started) == 2
    assert None not in [service.returncode for service in started]
    return output.with_suffix(".runs.jsonl").read_text()
