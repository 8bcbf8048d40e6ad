"""Runs are on disk at once and an interrupted benchmark goes on; figures follow from runs by plain arithmetic."""

import argparse
import json
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks import gamma, harness, pair
from benchmarks.contenders import Task, Unavailable, WrongText, take_turns, text_run
from benchmarks.harness import PHASES, Bench, compared, read_prompts, shuffled
from benchmarks.llama_cpp import find_server
from outrider.theory import improvement

RESULTS = sorted(harness.RESULTS.glob("*.json"))


def bench(tmp_path: Path, *, resume: bool = False, **settings: Any) -> Bench:
    known = {"quick": True, "command": "it", "output": tmp_path / "sub" / "r.json", "resume": resume}
    return Bench("it", argparse.Namespace(**known, **settings))


def test_a_resumed_benchmark_knows_what_was_measured(tmp_path: Path) -> None:
    before = bench(tmp_path, prompts=2)
    before.add({"prompt": 0, "temperature": "1"})
    assert before.once("capacity", lambda: 4.0) == 4.0
    after = bench(tmp_path, prompts=2, resume=True)
    assert after.has(prompt=0, temperature="1")
    assert not after.has(prompt=1)
    assert after.once("capacity", lambda: pytest.fail("it was made already")) == 4.0
    with pytest.raises(ValueError, match=r"r\.runs\.jsonl cannot be resumed: it was made with other settings"):
        bench(tmp_path, prompts=3, resume=True)
    assert bench(tmp_path, prompts=2).runs == []  # not resumed it begins anew


@pytest.mark.parametrize("changed", ["weights", "prompts", "revision"])
def test_runs_of_another_model_or_tree_are_not_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    weights, prompts = tmp_path / harness.WEIGHTS, tmp_path / "prompts.jsonl"
    for path in (weights, prompts, tmp_path / "config.json"):
        path.write_text("one")
    revisions = {tmp_path: "a1", harness.ROOT: "b1"}
    monkeypatch.setattr(harness, "revision", revisions.get)
    inputs: dict[str, Any] = {"target": tmp_path, "prompts_file": prompts, "old": str(tmp_path)}
    bench(tmp_path, **inputs)
    bench(tmp_path, **inputs, resume=True)
    if changed == "revision":
        revisions[tmp_path] = "a2"
    else:
        (weights if changed == "weights" else prompts).write_text("another")
    with pytest.raises(ValueError, match="cannot be resumed: it was made with other settings, models or trees"):
        bench(tmp_path, **inputs, resume=True)


def test_the_document_holds_the_summary_and_no_runs(tmp_path: Path) -> None:
    one = bench(tmp_path, prompts=2)
    one.add({"prompt": 0})
    written = one.write({"summary": {"rate": 1 / 3}})
    assert json.loads(one.output.read_text()) == written
    assert written["summary"] == {"rate": 0.33333333}
    assert (written["settings"], len(written["load_average"])) == ({"prompts": 2}, 2)
    assert "prompt" not in one.output.read_text().replace("prompts", "")


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_committed_result_is_small(path: Path) -> None:
    assert path.stat().st_size < 150_000
    assert "runs" not in json.loads(path.read_text())


def test_quick_changes_defaults_and_not_what_was_asked() -> None:
    def parsed(*arguments: str) -> Any:
        parser = harness.parser("it", "It.", quick="less")
        parser.add_argument("--prompts", type=int, default=12)
        return harness.parse(parser, arguments, {"prompts": 2})

    assert (parsed().prompts, parsed("--quick").prompts, parsed("--quick", "--prompts", "5").prompts) == (12, 2, 5)
    assert parsed("--output", "/home/me/x.json").command == "python -m benchmarks.it --output x.json"


def test_a_line_without_a_prompt_is_named(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"text": "x =\u2028"}\n\n{"prompt": "y"}\n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"line 3 of prompts\.jsonl has no text"):
        read_prompts(path)


def test_a_text_of_another_length_is_no_result() -> None:
    with pytest.raises(WrongText, match="it wrote 3 tokens of prompt 7, not 4"):
        text_run("it", Task(7, (1,), 4, 0.0, 1), [1, 2, 3], {}, seconds=1.0, rounds=3)


def test_each_arm_writes_each_text_once(tmp_path: Path) -> None:
    order, written = list[str](), list[int]()

    def writer(name: str) -> Any:
        def write(task: Task) -> dict[str, float]:
            written.append(task.new_tokens)
            if task.new_tokens == 20:
                order.append(name)
            return {"tokens": task.new_tokens, "seconds": 1.0}

        return write

    tasks = [({"prompt": nth}, Task(nth, (1,), 20, 0.0, nth)) for nth in range(3)]
    one, arms = bench(tmp_path), {name: writer(name) for name in "abc"}
    take_turns(one, {"pair": "demo"}, iter(tasks), arms, skips=lambda name, keys: name == "c" and keys["prompt"] > 0)
    assert sorted(order[:3]) == ["a", "b", "c"]
    assert sorted(order[3:5]) == sorted(order[5:7]) == ["a", "b"]
    take_turns(one, {"pair": "demo"}, iter(tasks), arms)
    assert len(order) == len(one.runs) == 7, "existing runs are not measured again"
    assert written == [8, 20] * 7, "each begins with tokens that are not measured"
    assert {run["tokens"] for run in one.runs} == {20}


def test_each_text_has_an_order_and_its_reverse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Temperatures alternate, as in `texts`: a cell of one temperature is balanced all the same."""
    tasks = [
        ({"temperature": at, "repetition": repetition, "prompt": nth}, Task(nth, (1,), 20, at, nth))
        for repetition in range(4)
        for nth in range(3)
        for at in (0.0, 1.0)
    ]
    monkeypatch.setattr("benchmarks.contenders.PAUSE_S", 0)
    one = bench(tmp_path)
    take_turns(one, {}, tasks, dict.fromkeys("abcd", lambda task: {"tokens": task.new_tokens, "seconds": 1.0}))
    orders: dict[Any, list[str]] = {}
    for run in one.runs:
        orders.setdefault((run["temperature"], run["prompt"], run["repetition"]), []).append(run["arm"])
    for at, nth, repetition in orders:
        if repetition % 2 == 0:
            assert orders[at, nth, repetition] == orders[at, nth, repetition + 1][::-1]
    assert len({tuple(order) for order in orders.values()}) > 8


def test_no_arm_always_goes_first_or_follows_the_same() -> None:
    orders = [shuffled("abcd", turn) for turn in range(40)]
    assert all(sorted(order) == ["a", "b", "c", "d"] for order in orders)
    assert orders[1::2] == [order[::-1] for order in orders[::2]], "each is as often before another as behind it"
    followers = Counter(pair for order in orders for pair in pairwise(order))
    assert len(followers) == 12
    assert max(followers.values()) < 20
    assert {order[0] for order in orders} == set("abcd")


# ------------------------------------------------------------------------------------------------------------ figures


def text(arm: str, seconds: float, *, repetition: int = 0, **figures: Any) -> dict[str, Any]:
    phases = dict.fromkeys(PHASES, 0.0) | {"forward": seconds}
    plain = {"prompt": 0, "tokens": 100, "rounds": 100, "drafted": 0, "accepted": 0, "digest": "same", "alpha": None}
    return {"arm": arm, "repetition": repetition, "seconds": seconds, "phases": phases, **plain, **figures}


def drafted(arm: str, seconds: float, **figures: Any) -> dict[str, Any]:
    phases = {"draft": 0.08, "wire": 0.02, "queue": 0.01, "forward": 0.15, "verify": 0.01, "other": seconds - 0.27}
    known: dict[str, Any] = {"rounds": 40, "drafted": 160, "accepted": 60, "alpha": 0.6, "phases": phases}
    return text(arm, seconds, **known | figures)


def test_ratios_are_of_the_same_repetition() -> None:
    runs = [text("alone", seconds, repetition=nth) for nth, seconds in enumerate((0.5, 0.4, 0.8))]
    runs += [drafted("it", seconds, repetition=nth, digest=nth) for nth, seconds in enumerate((0.25, 0.25, 0.3))]
    found = compared(runs, "alone", ["alone", "it", "absent"])
    assert list(found) == ["alone", "it"]
    assert found["alone"]["ratio"] == 1.0
    assert found["it"]["tokens_per_second"] == pytest.approx(400)
    assert found["it"]["ratio"] == pytest.approx(2.0)  # of 2.0, 1.6 and 2.67
    assert found["it"]["ratio_range"] == pytest.approx([1.6, 8 / 3])
    assert (found["alone"]["same_text"], found["it"]["same_text"]) == (1.0, 0.0)
    assert (found["it"]["gamma"], found["it"]["tokens_per_round"]) == (4.0, 2.5)


def test_the_pair_is_held_against_the_faster_target_alone_and_theorem_3_8() -> None:
    runs = [text("generate", 1.0), text("Decode", 0.5), drafted("pair, γ = 4", 0.3)]
    runs += [drafted("pair, γ = 10", 0.3, alpha=0.4), drafted("assisted, 8", 0.3, alpha=None)]
    found = pair.figures(runs)
    ours = found["pair, γ = 4"]
    assert ours["ratio"] == pytest.approx(0.5 / 0.3)
    assert (ours["draft_step_us"], ours["target_pass_us"]) == (pytest.approx(500), pytest.approx(3750))
    assert ours["round_trip_us"] == pytest.approx(1750), "with all other work of a round"
    # Each arm has its own α. Assisted generation tells none, and takes that of the pair.
    for arm, alpha in (("pair, γ = 4", 0.6), ("pair, γ = 10", 0.4), ("assisted, 8", 0.5)):
        predicted = improvement(alpha, 4, c=500e-6, round_trip=1750e-6, verify_cost=3750e-6)
        assert found[arm]["predicted_ratio"] == pytest.approx(predicted / 200)
    assert found["Decode"]["predicted_ratio"] is None


def test_ours_by_llama_cpp_is_held_against_the_better_of_its_own() -> None:
    theirs = [(0.50, 0.40), (0.50, 0.80)]  # its target alone, and its speculation, in two repetitions
    runs = [
        text(arm, seconds, repetition=nth)
        for nth, (alone, drafting) in enumerate(theirs)
        for arm, seconds in (("llama.cpp alone", alone), ("llama.cpp drafting", drafting), ("Decode", 0.625))
    ]
    found = pair.figures([*runs, *(drafted("pair, γ = 4", 0.32, repetition=nth) for nth in range(2))])
    assert list(found) == ["Decode", "llama.cpp alone", "llama.cpp drafting", "pair, γ = 4"]
    assert found["Decode"]["over_llama"] == pytest.approx(0.8), "to its target alone"
    assert found["pair, γ = 4"]["over_llama_range"] == pytest.approx([0.40 / 0.32, 0.50 / 0.32])
    assert "over_llama" not in found["llama.cpp drafting"]


def test_a_missing_server_of_llama_cpp_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("gguf", "llama_cpp"):
        monkeypatch.setitem(sys.modules, module, ModuleType(module))
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("LLAMA_SERVER", raising=False)
    with pytest.raises(Unavailable, match=r"no program llama-server; see docs/how-to/llama-cpp\.md, or set LLAMA_S"):
        find_server()
    monkeypatch.setenv("LLAMA_SERVER", "/nowhere/llama-server")
    with pytest.raises(Unavailable, match="no program /nowhere/llama-server"):
        find_server()
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(Unavailable, match="the extra llama is not installed"):
        find_server()


def test_policies_are_held_against_the_best_fixed_length() -> None:
    runs = [text("alone", 4.0), text("fixed 2", 2.0), text("fixed 8", 1.0), text("adaptive", 1.25)]
    found = gamma.figures(runs, ["alone", "fixed 2", "fixed 8", "adaptive"])
    assert found["adaptive"]["over_best_fixed"] == pytest.approx(0.8)
    assert found["adaptive"]["ratio"] == pytest.approx(3.2)
