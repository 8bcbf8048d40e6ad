"""The benchmark of load runs, with real services and models, and its arithmetic holds; no test judges its speeds."""

import io
import sys
from itertools import islice, pairwise
from pathlib import Path
from statistics import fmean, pvariance
from typing import Any

import pytest
from rich.console import Console

from benchmarks.arguments import DEMO
from benchmarks.contenders import Task, WrongLength
from benchmarks.load import main
from benchmarks.load_batching import ContinuousBatching
from benchmarks.load_contenders import Outcome, Served, Unavailable, check
from benchmarks.load_engine import LEAST_PASSES, Pass
from benchmarks.load_engine import figures as engine_figures
from benchmarks.load_picture import draw
from benchmarks.load_plan import FULL, QUICK, Workload, arrivals
from benchmarks.load_summary import ALONE, BATCHING, CONTENDERS, PAIR, STATIC, figures, missed, percentiles, summarise
from benchmarks.load_tables import show
from benchmarks.load_tuning import TRIES, Factory, LoadTuner, Setting
from benchmarks.local import Local
from benchmarks.pair import Models
from outrider.cli.processes import processors
from tests.benchmarks import quick

# So many requests at once that most have to wait, however fast the machine is.
FLOOD = ("--rates", "40", "--open-seconds", "0.05")
ARGUMENTS = ("--quick", "--busy", "--new-tokens", "6", *FLOOD)


@pytest.mark.timeout(300)  # two services and transformers start, on whatever else the machine does
def test_quick_measures_every_contender_and_says_so_in_one_json_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document, runs = quick.run(main, ARGUMENTS, tmp_path, capsys)
    assert document["busy"]
    assert not document["unavailable"]
    for mode in ("closed", "short-texts", "open"):
        assert (tmp_path / f"out-demo-{mode}.png").read_bytes().startswith(b"\x89PNG")

    for kind in ("Decode", "proposals"):
        assert 0 < document["engine"]["demo"][kind]["share"] < 1
        assert document["engine"]["demo"][kind]["sequences"] == QUICK.engine_streams + (kind == "proposals")

    closed, open_ = document["summary"]["demo"]["closed"]["short"], document["summary"]["demo"]["open"]["short"]
    assert set(closed) == {"1", "2"}
    for cell in closed.values():
        assert set(cell) == set(CONTENDERS)
        assert cell[PAIR]["gamma"] > 0
        assert cell[PAIR]["decode_share"] < 1
        assert cell[PAIR]["draft_cpu_us"] > 0
        assert 0 <= cell[PAIR]["kv_usage"] <= 1  # of the step before: that may have ended the only text
        assert cell[ALONE]["gamma"] is None
        assert not any(found["refused"] for found in cell.values())
    assert set(open_["40"]) == {BATCHING, ALONE, PAIR}  # a static batch takes nobody in while it runs
    assert open_["40"][PAIR]["refused"] == 0, "what cannot run at once waits in the queue of the draft service"
    assert open_["40"][BATCHING]["refused"] == 0
    short = document["summary"]["demo"]["short-texts"]["short"]
    assert set(short) == {"1"}
    for cell in short.values():
        assert set(cell) == set(CONTENDERS)
    for run in runs:
        tokens = int(run["level"]) if run["mode"] == "short-texts" else 6
        assert run["requests"] == len(run["served"])
        assert run["tokens"] == tokens * (run["requests"] - run["refused"])


def test_arrivals_are_a_poisson_process() -> None:
    """Gaps of 20,000 arrivals at 50 a second: their mean within four standard errors (2.8 %) of 1/50, and their
    variance within 8 % of 1/50², as of no other law with that mean in use (constant: 0; uniform: a third).
    """
    times = list(islice(arrivals(50.0, 1e9, seed=7), 20_000))
    gaps = [after - before for before, after in pairwise(times)]
    assert fmean(gaps) == pytest.approx(1 / 50, rel=4 / len(gaps) ** 0.5)
    assert pvariance(gaps) == pytest.approx(1 / 50**2, rel=0.08)


def test_rates_differ_in_the_pace_of_arrivals_alone() -> None:
    slow, fast = list(arrivals(2.0, 30.0, seed=3)), list(arrivals(6.0, 10.0, seed=3))
    assert fast == pytest.approx([at / 3 for at in slow])
    assert slow[-1] < 30.0
    assert list(arrivals(1e-9, 1.0, seed=3))  # never none


def test_long_prompts_are_as_long_as_asked_and_short_ones_as_they_are() -> None:
    work = Workload(["aaa", "bb", "c"], FULL, lambda text: list(text.encode()))
    assert [len(task.token_ids) for task in work.closed("short", 1, 0)[:4]] == [3, 2, 1, 3]
    assert [len(task.token_ids) for task in work.closed("long", 1, 0)[:4]] == [384, 192, 288, 384]
    assert work.closed("long", 1, 0)[0].token_ids[:7] == tuple(b"aaabbca")
    assert work.longest() == 384 + max(FULL.new_tokens, FULL.engine_tokens)
    short = work.short("short", 4, 1)
    assert {task.new_tokens for task in short} == {4}
    assert len(short) == FULL.short_texts_per_stream * max(FULL.streams)
    seeds = {task.seed for repetition in range(3) for task in work.closed("short", 8, repetition)}
    assert len(seeds) == 3 * 16


def test_tokens_of_one_piece_have_not_waited_for_each_other() -> None:
    served = Served(due=1.0, stamps=((1.5, 2), (1.8, 3)), rounds=2, drafted=6, accepted=3, alpha=0.5)
    found = figures(Outcome([served]))
    assert found["ttft_ms"]["p50"] == pytest.approx(500.0)
    assert found["tpot_ms"]["p50"] == pytest.approx(300.0 / 4)
    # by token: 0 within the first piece, then 300, 0, 0; by piece: 300
    assert found["itl_token_ms"] == pytest.approx({"p50": 0.0, "p95": 255.0, "p99": 291.0})
    assert found["itl_piece_ms"]["p50"] == pytest.approx(300.0)
    assert (found["gamma"], found["accepted_share"], found["tokens_per_round"]) == (3.0, 0.5, 2.5)
    assert found["tokens_per_second"] == pytest.approx(5 / 0.8)


def test_refused_requests_are_counted_and_have_no_times() -> None:
    served = Served(due=0.0, stamps=((1.0, 4),))
    found = figures(Outcome([served, Served(due=0.5, refused=True)]))
    assert (found["requests"], found["refused"], found["tokens"]) == (2, 1, 4)
    assert found["ttft_ms"]["p99"] == pytest.approx(1000.0)
    assert figures(Outcome([Served(due=0.5, refused=True)]))["ttft_ms"] is None


def test_percentiles_lie_between_neighbours() -> None:
    assert percentiles([3.0, 1.0, 2.0]) == pytest.approx({"p50": 2.0, "p95": 2.9, "p99": 2.98})
    assert percentiles([]) is None


def test_a_text_of_another_length_is_no_result() -> None:
    task = Task(0, (1,), 4, 0.0, 1)
    whole, short = Served(0.0, ((1.0, 4),)), Served(0.0, ((1.0, 3),))
    check("it", [task, task], Outcome([whole, Served(0.0, refused=True)]))
    with pytest.raises(WrongLength, match="wrote 3 tokens of text 0, not 4"):
        check("it", [task], Outcome([short]))
    with pytest.raises(WrongLength, match="served 1 requests of 2"):
        check("it", [task, task], Outcome([whole]))


def test_the_engines_share_is_what_lies_between_passes() -> None:
    first = Pass(outside=5.0, forward=1.0, verify=1.0, sequences=9, tokens=9)  # waited for its Decode to arrive
    full = Pass(outside=0.1, forward=0.7, verify=0.2, sequences=9, tokens=49)
    part = Pass(outside=3.0, forward=0.1, verify=0.1, sequences=4, tokens=4)
    found = engine_figures([first, *[full] * LEAST_PASSES, part], 9)
    assert found["share"] == pytest.approx(0.1)
    assert (found["passes"], found["sequences"]) == (LEAST_PASSES, 9)
    with pytest.raises(ValueError, match=f"{LEAST_PASSES - 1} passes held all 9 sequences"):
        engine_figures([first, *[full] * (LEAST_PASSES - 1), part], 9)


def _run(contender: str, repetition: int, rate: float) -> dict[str, Any]:
    found = figures(Outcome([Served(0.0, ((1.0, 1), (2.0, 1)))]))
    where = {"pair": "demo", "mode": "closed", "mix": "short", "level": "1", "repetition": repetition}
    return {**where, "contender": contender, **found, "tokens_per_second": rate}


def test_the_pair_is_held_against_the_better_reference_of_its_repetition() -> None:
    rates = {BATCHING: (10.0, 30.0), STATIC: (90.0, 90.0), ALONE: (20.0, 20.0), PAIR: (40.0, 45.0)}
    cell = summarise([_run(name, i, rate) for name, found in rates.items() for i, rate in enumerate(found)])
    pair = cell["demo"]["closed"]["short"]["1"][PAIR]
    assert pair["ratio"] == pytest.approx((40 / 20 + 45 / 30) / 2)
    assert pair["ratio_range"] == pytest.approx([1.5, 2.0])


def _cell(streams: str, mode: str, rate: float) -> dict[str, Any]:
    runs = [_run(ALONE, 0, 100.0), _run(PAIR, 0, rate)]
    summary = summarise([{**run, "level": streams, "mode": mode} for run in runs])
    assert (
        bool(missed(summary, {"deepened": {"Decode": {"share": 0.1}}}))
        is summary["demo"][mode]["short"][streams][PAIR]["missed"]
    )
    pair: dict[str, Any] = summary["demo"][mode]["short"][streams][PAIR]
    return pair


@pytest.mark.parametrize(
    ("streams", "mode", "rate", "misses"),
    [
        ("1", "closed", 100.0, True),
        ("4", "closed", 100.1, False),
        ("8", "closed", 95.0, False),
        ("8", "closed", 94.9, True),
        ("1", "short-texts", 95.0, False),
        ("1", "short-texts", 94.9, True),
        ("0.5", "open", 95.0, False),
        ("0.5", "open", 94.9, True),
    ],
)
def test_an_aim_is_missed_where_the_pair_is_not_ahead_or_too_far_behind(
    streams: str, mode: str, rate: float, misses: bool
) -> None:
    assert _cell(streams, mode, rate)["missed"] is misses


def test_an_engine_that_takes_too_much_is_named() -> None:
    (line,) = missed({}, {"demo": {"Decode": {"share": 0.2}}, "deepened": {"Decode": {"share": 0.11}}})
    assert line == "deepened pair, Decode: 11.0% of the engine's time is its own; aimed at 10%"


def test_rounds_of_decode_are_told_from_proposals_and_cost_from_rates() -> None:
    served = Served(due=0.0, stamps=((1.0, 5),), rounds=4, proposals=1, drafted=2, accepted=1, alpha=0.5)
    told = {"verifier_cpu_seconds": 0.01, "draft_cpu_seconds": 0.02}
    found = figures(Outcome([served], told))
    assert (found["decode_share"], found["gamma"]) == (0.75, 0.5)
    assert (found["verifier_cpu_us"], found["draft_cpu_us"]) == (pytest.approx(2000.0), pytest.approx(4000.0))


def test_settings_are_tried_and_the_fastest_is_taken() -> None:
    work = Workload(["import os"], QUICK, lambda text: [5, 6, 7])
    factory = Factory(Models("demo", DEMO / "target", DEMO / "draft"), QUICK, work)
    tuner = LoadTuner(factory, work, lambda line: None)
    setting = tuner.tune((STATIC,))
    best = max(tuner.tried, key=lambda each: max(each["tokens_per_second"]))
    assert len(tuner.tried) == len({1, len(processors())})
    assert all(len(each["tokens_per_second"]) == TRIES for each in tuner.tried)
    assert setting == Setting(static=Local(**best["settings"]))


def test_transformers_without_continuous_batching_is_named_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers.generation", None)
    with pytest.raises(Unavailable, match="this transformers has no continuous batching") as told:
        ContinuousBatching(DEMO / "target", Local(), longest=64, most=2)
    document = {
        "machine": {"cpu": "a processor", "cores": 2, "memory_gib": 1.0},
        "busy": False,
        "command": "",
        "models": {"demo": {"target_layers": 12}},
        "contenders": {},
        "unavailable": {"demo": {BATCHING: str(told.value)}},
        "summary": summarise([_run(ALONE, 0, 10.0), _run(PAIR, 0, 20.0)]),
    }
    out = io.StringIO()
    show(document, Console(file=out, width=200))
    assert f"continuous batching is not there: {told.value}" in out.getvalue()
    assert "All aims are met, as far as measured." in out.getvalue()
    (picture,) = draw(document, tmp_path / "load")
    assert picture.name == "load-demo-closed.png"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--prompts-file", "none.jsonl"), "none.jsonl"),
        (("--streams", "0"), "streams is 0; it must be above 0"),
        (("--rates", "-1"), "rates is -1.0; it must be above 0"),
    ],
)
def test_what_cannot_be_measured_is_named(
    arguments: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--quick", "--output", str(tmp_path / "out.json"), *arguments]) == 2
    assert said in capsys.readouterr().err
