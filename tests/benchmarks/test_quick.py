"""Each benchmark runs as its user starts it, through real services, resumes, draws and writes; none judges a speed."""

from __future__ import annotations

import importlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import load
from benchmarks.contenders import PHASES
from benchmarks.load_report import ALONE, BATCHING, CONTENDERS, PAIR, STATIC
from benchmarks.outrider_contender import Services
from models.corpus import Document
from outrider.client import Drafter
from tests.cluster import MODELS
from tests.commands import Command, linux
from tests.fork_server import ForkedService, noting

Json = dict[str, Any]


def check_pair(document: Json, runs: list[Json]) -> None:
    for found in document["summary"]["demo"].values():
        assert set(found["contenders"]) == {"transformers", "outrider-alone", "assisted", "outrider-pair"}
        assert found["contenders"]["outrider-pair"]["predicted_ratio"] > 0
    for run in runs:
        assert run["tokens"] == 8
        assert sum(run["phases"][phase] for phase in PHASES) == pytest.approx(run["seconds"])
        assert (run["drafted"] > 0) == (run["contender"] in ("assisted", "outrider-pair"))


def check_load(document: Json, runs: list[Json]) -> None:
    assert document["busy"]
    assert not document["unavailable"]
    closed, open_ = document["summary"]["demo"]["closed"]["short"], document["summary"]["demo"]["open"]["short"]
    assert set(closed) == {"1", "2"}
    for cell in closed.values():
        assert set(cell) == set(CONTENDERS)
        assert cell[PAIR]["gamma"] > 0
        assert cell[PAIR]["decode_share"] < 1
        assert 0 <= cell[PAIR]["kv_usage"] <= 1
        assert cell[PAIR]["draft_cpu_us"] is not None
        assert cell[ALONE]["gamma"] is None
    assert set(open_["40"]) == {BATCHING, ALONE, PAIR}  # a static batch admits no request while it runs
    assert open_["40"][PAIR]["refused"] == 0, "what cannot run at once waits in the queue of the draft service"
    short = document["summary"]["demo"]["short-texts"]["short"]
    assert set(short["1"]) == set(CONTENDERS)
    assert {run["requests"] for run in runs if run["mode"] == "closed"} == {2}


def check_gamma(document: Json, runs: list[Json]) -> None:
    for found in document["summary"]["demo"].values():
        arms = found["arms"]
        assert list(arms) == [
            "alone",
            "fixed 2",
            "fixed 8",
            "heuristic",
            "adaptive",
            "entropy 2",
            "adaptive, entropy 2",
        ]
        assert 1.5 < arms["fixed 2"]["mean_gamma"] <= 2  # the end of a text shortens its last round
        assert arms["alone"]["ratio_to_alone"] == 1
        assert found["best_fixed"] in ("fixed 2", "fixed 8")


def check_drafters(document: Json, runs: list[Json]) -> None:
    known = {drafter.value for drafter in Drafter if drafter is not Drafter.UNSPECIFIED}
    for by_temperature in document["summary"]["demo"].values():
        for found in by_temperature.values():
            assert set(found) == known
            assert found["none"]["ratio"] == 1
            assert found["none"]["alpha"] is None
            assert 0 <= found["model"]["alpha"] <= 1
    for run in runs:
        assert run["draft_failures"] == 0
        assert (run["inner_guessed"] > 0) <= (run["drafter"] == "staged")


def check_outcome_cache(document: Json, runs: list[Json]) -> None:
    for row in document["results"]:
        assert row["ratio"] > 0
        assert row["same_text"] == [1, 1]  # in float32
        assert row["per_round_ms"]["without"]["saved"] == 0
    assert [row["way"] for row in document["best"]] == ["greedy", "coupled"]


def check_network(document: Json, runs: list[Json]) -> None:
    by_arm = {(row["added_ms"], row["arm"]): row for row in document["rows"]}
    near, far = by_arm[0.0, "sequential"], by_arm[20.0, "sequential"]
    assert far["wire_ms"] >= 20.0, "each round pays the way"
    assert by_arm[0.0, "none"]["ratio"] == by_arm[20.0, "none"]["ratio"] == 1.0
    assert far["tokens_per_round"] == near["tokens_per_round"] > 1.5, "the same texts by the same drafts"
    assert far["foretold_ratio"] < near["foretold_ratio"]


def check_linger(document: Json, runs: list[Json]) -> None:
    assert [row["linger_ms"] for row in document["rows"]] == [0.0, 20.0]
    assert all(1 <= row["sequences_per_pass"] <= 2 for row in document["rows"])


def check_engine(document: Json, runs: list[Json]) -> None:
    for by_streams in document["summary"]["demo"].values():
        assert 0 < by_streams["2"]["share"] < 1
        assert by_streams["2"]["passes"] >= 1


def check_prefix(document: Json, runs: list[Json]) -> None:
    (row,) = document["rows"]
    assert (row["prompt_tokens"], row["cached_tokens"]) == (80, 64)
    assert min(row["known_ms"], row["fresh_ms"], row["ratio"]) > 0


def check_rules(document: Json, runs: list[Json]) -> None:
    assert {run["rule"] for run in runs} == {"tokenwise", "block", "coupled"}
    for run in runs:
        assert run["rounds"] == 2
        assert 0 <= run["accepted"] <= 2 * run["gamma"]
        if run["rule"] != "coupled":
            assert run["redrafted"] == 2  # a seed draws the same drafts again
            assert all(0 <= value <= 2 * run["gamma"] for value in run["expected"].values())


FLOOD = ["--rates", "40", "--open-seconds", "0.05"]  # so many requests at once that most have to wait

CASES: dict[str, tuple[Callable[[Json, list[Json]], None], list[str]]] = {
    "pair": (check_pair, ["--prompts", "1", "--new-tokens", "8"]),
    "load": (check_load, ["--busy", "--new-tokens", "6", *FLOOD]),
    "gamma": (check_gamma, ["--prompts", "1", "--new-tokens", "16"]),
    "drafters": (check_drafters, ["--new-tokens", "8"]),
    "outcome_cache": (check_outcome_cache, ["--prompts", "1", "--tokens", "24", "--dtype", "float32"]),
    "network": (check_network, ["--dtype", "float32", "--tokens", "16"]),
    "linger": (check_linger, ["--seconds", "0.1"]),
    "engine": (check_engine, []),
    "prefix": (check_prefix, ["--repetitions", "1"]),
    "rules": (check_rules, ["--gammas", "2", "--rounds", "2"]),
}


@pytest.mark.timeout(300)  # services and transformers start, on whatever else the machine does
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name == "drafters" else []) for name in CASES]
)
def test_quick_measures_every_contender_and_says_so_in_one_json_document(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # In the place of megabytes, of which the first tenth is counted.
    monkeypatch.setattr("benchmarks.drafters.training_documents", lambda: [Document("a", Path(__file__).read_text())])
    monkeypatch.setattr("benchmarks.engine.LEAST_PASSES", 1)  # on a busy machine few passes hold all sequences
    check, more = CASES[name]
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "out.json"
    prompts.write_text('{"text": "def mean(values):"}\n\n{"text": "import os"}\n')
    asked = ["--quick", *more, "--prompts-file", str(prompts), "--output", str(output)]
    main = importlib.import_module(f"benchmarks.{name}").main
    assert main(asked) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document == json.loads(output.read_text())
    assert document["command"].startswith(f"python -m benchmarks.{name} --quick")
    assert str(tmp_path) not in output.read_text()
    assert any(path.read_bytes().startswith(b"\x89PNG") for path in tmp_path.glob("out*.png"))
    before = (tmp_path / "out.runs.jsonl").read_text()
    runs = [run for run in map(json.loads, before.splitlines()[1:]) if "once" not in run]
    check(document, runs)
    if name in ("pair", "load", "rules"):  # resumed, it has nothing left to measure, and comes to the same figures
        assert main([*asked, "--resume"]) == 0
        assert (tmp_path / "out.runs.jsonl").read_text() == before
        assert json.loads(output.read_text())["summary"] == document["summary"]


@pytest.mark.parametrize("name", CASES)
def test_prompts_that_are_not_there_are_named(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if name in ("linger", "prefix"):
        pytest.skip("it has prompts of its own")
    output = str(tmp_path / "out.json")
    asked = ["--quick", "--prompts-file", str(tmp_path / "none.jsonl"), "--output", output]
    assert importlib.import_module(f"benchmarks.{name}").main(asked) == 2
    assert "none.jsonl" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------- interrupted

LEAST = ["--quick", "--parts", "closed", "--contenders", ALONE, STATIC, "--streams", "1", "--new-tokens", "2"]
ENDLESS = [*LEAST, "--least-texts", "1", "--repetitions", "10000", "--output"]
WITHIN_S = 120.0
INTERRUPTED = "benchmarks.load: interrupted; --resume goes on from here"


@pytest.mark.timeout(300)
def test_a_benchmark_told_to_end_ends_its_services_and_can_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, which gets the signal as soon as a run is on disk."""
    output = tmp_path / "out.json"
    started: list[ForkedService] = []
    monkeypatch.setattr("benchmarks.outrider_contender.ServiceProcess", noting(started))

    def interrupt() -> None:
        end = time.monotonic() + WITHIN_S
        while not _runs(output) and time.monotonic() < end:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # where the benchmark has ended by itself
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        code = load.main([*ENDLESS, str(output)])
    finally:
        thread.join()
        signal.signal(signal.SIGTERM, before)
    assert code == 130
    assert capsys.readouterr().err.splitlines()[-1] == INTERRUPTED
    assert len(started) == 2
    assert None not in [service.returncode for service in started]
    assert _runs(output)


@linux
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_no_process_outlives_a_benchmark_that_is_told_to_end(tmp_path: Path) -> None:
    """As its user runs it: three processes, each with its own imports."""
    output = tmp_path / "out.json"
    command = Command("benchmarks.load", *ENDLESS, str(output))
    end = time.monotonic() + WITHIN_S
    while not _runs(output):
        assert command.process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.1)
    assert len(command.left_behind()) == 3  # itself and the services
    command.process.send_signal(signal.SIGTERM)
    code, _, err = command.ended()
    assert code == 130
    assert err.splitlines()[-1] == INTERRUPTED
    assert command.left_behind() == []


def test_what_a_service_shows_is_found_however_much_it_has_logged() -> None:
    with Services(MODELS / "target", MODELS / "draft") as services:
        for service in (services.verifier, services.draft):
            service._lines.clear()  # a long run pushes the first lines out
            assert services.metrics_of(service)["process_cpu_seconds_total"] > 0


def _runs(output: Path) -> int:
    path = output.with_suffix(".runs.jsonl")
    return len(path.read_text().splitlines()) - 1 if path.is_file() else 0
