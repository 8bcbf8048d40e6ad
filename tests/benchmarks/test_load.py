"""Requests arrive as they should, and their figures follow by plain arithmetic; no test judges speeds."""

import argparse
from itertools import islice, pairwise
from pathlib import Path
from statistics import fmean, pvariance
from typing import Any

import pytest

from benchmarks import engine, load
from benchmarks.contenders import _with_first
from benchmarks.load import AIM, ALONE, BATCHING, PAIR, SERVER, arrivals, cell, figures, tasks
from outrider.client import Finished
from outrider.evaluation.streams import Served
from protos.outrider.v1 import draft_service_pb2 as pb


def test_arrivals_are_a_poisson_process() -> None:
    """Gaps of 20,000 arrivals at 50 a second: their mean within four standard errors (2.8 %) of 1/50, and their
    variance within 8 % of 1/50², as of no other distribution with that mean in use (constant: 0; uniform: a third).
    """
    times = list(islice(arrivals(50.0, 1e9, seed=7), 20_000))
    gaps = [after - before for before, after in pairwise(times)]
    assert fmean(gaps) == pytest.approx(1 / 50, rel=4 / len(gaps) ** 0.5)
    assert pvariance(gaps) == pytest.approx(1 / 50**2, rel=0.08)
    slow, fast = list(arrivals(2.0, 30.0, seed=3)), list(arrivals(6.0, 10.0, seed=3))
    assert fast == pytest.approx([at / 3 for at in slow]), "rates differ in their pace alone"


def test_repetitions_have_other_prompts_and_seeds() -> None:
    repetitions = [tasks([(1,), (2, 2), (3,), (4,), (5,)], 3, nth, 64) for nth in range(2)]
    assert [[task.token_ids[0] for task in own] for own in repetitions] == [[1, 2, 3], [4, 5, 1]]
    assert len({task.seed for own in repetitions for task in own}) == 6


def test_tokens_of_one_piece_have_not_waited_for_each_other() -> None:
    statistics = pb.SpeculationStatistics(num_rounds=2, num_drafts=1, num_draft_tokens=6, alpha=0.5)
    finished = Finished.of(pb.GenerateFinished(statistics=statistics))
    served = Served(due=1.0, stamps=((1.5, 2), (1.8, 3)), finished=finished)
    found = figures(([served], {"passes": 1, "verifier_cpu_seconds": 0.01, "draft_cpu_seconds": 0.02}))
    assert found["ttft_ms"]["p50"] == pytest.approx(500.0)
    assert found["tpot_ms"]["p50"] == pytest.approx(300.0 / 3), "without the first piece"
    assert (found["gamma"], found["decode_share"], found["tokens_per_round"]) == (3.0, 0.5, 2.5)
    assert found["tokens_per_second"] == pytest.approx(5 / 0.8)
    assert (found["verifier_cpu_us"], found["draft_cpu_us"]) == (pytest.approx(2000.0), pytest.approx(4000.0))


@pytest.mark.parametrize(("drafts", "stamps"), [(0, ((1.2, 1), (1.9, 3))), (1, ((1.2, 4),))])
def test_the_first_token_of_a_text_in_one_message_is_that_of_the_service(
    drafts: int, stamps: tuple[tuple[float, int], ...]
) -> None:
    statistics = pb.SpeculationStatistics(num_rounds=1, num_drafts=drafts)
    timings = pb.GenerateTimings(time_to_first_token_us=200_000)
    finished = Finished.of(pb.GenerateFinished(statistics=statistics, timings=timings))
    assert _with_first(Served(due=1.0, stamps=((1.9, 4),), finished=finished)).stamps == stamps


def test_refused_requests_are_counted_and_have_no_times() -> None:
    found = figures(([Served(due=0.0, stamps=((1.0, 4),)), Served(due=0.5, refused=True)], {}))
    assert (found["requests"], found["refused"], found["tokens_per_second"]) == (2, 1, 4.0)
    assert found["ttft_ms"]["p99"] == pytest.approx(1000.0)
    assert found["gamma"] is found["decode_share"] is found["tokens_per_round"] is None, "without our statistics"


def run(contender: str, repetition: int, rate: float) -> dict[str, Any]:
    found = figures(([Served(0.0, ((1.0, 1), (2.0, 1)))], {}))
    return {"repetition": repetition, "contender": contender, **found, "tokens_per_second": rate}


def test_the_pair_is_held_against_the_better_reference_of_its_repetition() -> None:
    rates = {BATCHING: (10.0, 30.0), ALONE: (20.0, 20.0), PAIR: (40.0, 45.0)}
    found = cell([run(name, nth, rate) for name, own in rates.items() for nth, rate in enumerate(own)])[PAIR]
    assert found["ratio"] == pytest.approx((40 / 20 + 45 / 30) / 2)
    assert found["ratio_range"] == pytest.approx([1.5, 2.0])
    assert found["tokens_per_second"] == 42.5


def test_both_ways_by_llama_cpp_are_held_against_its_server() -> None:
    rates = {SERVER: 40.0, ALONE: 50.0, PAIR: 60.0}
    found = cell([run(name, 0, rate) for name, rate in rates.items()])
    assert list(found) == list(rates)
    over = [each["over_server"] for each in found.values()]
    assert over == [None, pytest.approx(1.25), pytest.approx(1.5)]
    assert found[PAIR]["ratio"] == pytest.approx(1.2), "to the better of the others"


def test_a_repetition_without_drafts_counts() -> None:
    drafting = run(PAIR, 0, 1.0) | {"gamma": 4.0, "decode_share": 0.0, "drafted": 40, "alpha": 0.5}
    without = run(PAIR, 1, 1.0) | {"gamma": 0.0, "decode_share": 1.0}
    found = cell([drafting, without])[PAIR]
    assert (found["gamma"], found["decode_share"], found["alpha"]) == (2.0, 0.5, 0.5)


@pytest.mark.parametrize(("rate", "lines"), [(100 * AIM, 0), (100 * AIM - 0.1, 1)])
def test_a_pair_that_falls_behind_is_named_and_who_is_missing(rate: float, lines: int) -> None:
    summary = {"demo": {"closed": {"1": cell([run(ALONE, 0, 100.0), run(PAIR, 0, rate)])}}}
    text = load.table({"unavailable": {"demo": {BATCHING: "no such thing"}}, "summary": summary})
    assert text.count("BEHIND") == lines
    assert "batching is not there: no such thing" in text


def test_the_engines_share_is_what_lies_between_passes() -> None:
    def verdict(outside: float, forward: float, verify: float, sequences: int, tokens: int = 1) -> argparse.Namespace:
        known = {"queue_us": outside, "forward_us": forward, "verify_us": verify}
        timings = argparse.Namespace(**known, pass_sequences=sequences)
        return argparse.Namespace(token_ids=[7] * tokens, timings=timings)

    first, full, part = verdict(5, 1, 1, 9), verdict(0.1, 0.7, 0.2, 9), verdict(3, 0.1, 0.1, 4)
    text = [first, *[full] * engine.LEAST_PASSES, part]  # the first waited for its Decode
    assert engine.figures([text], 9)["share"] == pytest.approx(0.1)
    slow = verdict(1.9, 0.7, 0.2, 9)
    found = engine.figures([text, [first, *[slow] * engine.LEAST_PASSES]], 9)
    assert (found["share"], found["passes"]) == (pytest.approx(2.0 / 3.8), engine.LEAST_PASSES), "of both texts' sums"
    row = verdict(0.1, 2.8, 0.1, 9, tokens=engine.LEAST_PASSES)  # of all its passes
    found = engine.figures([[first, row, part]], 9)
    assert (found["passes"], found["share"]) == (engine.LEAST_PASSES, pytest.approx(0.1 / 3))
    assert found["forward_us"] == pytest.approx(2.8 / engine.LEAST_PASSES)
    with pytest.raises(ValueError, match=f"{engine.LEAST_PASSES - 1} passes held three quarters of the 9 sequences"):
        engine.figures([[first, *[full] * (engine.LEAST_PASSES - 1), part]], 9)


def test_what_cannot_be_measured_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert load.main(["--quick", "--output", str(tmp_path / "out.json"), "--streams", "0"]) == 2
    assert "streams is [0]; it must be above 0" in capsys.readouterr().err
