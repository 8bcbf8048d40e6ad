"""Figures follow from runs by arithmetic that can be checked by hand."""

from typing import Any

import pytest

from benchmarks.contenders import PHASES
from benchmarks.summary import summarise
from outrider.theory import tokens_per_second


def run(contender: str, repetition: int, seconds: float, **changes: Any) -> dict[str, Any]:
    return {
        "pair": "demo",
        "temperature": "0",
        "repetition": repetition,
        "prompt": 0,
        "contender": contender,
        "settings": {},
        "seconds": seconds,
        "tokens": 100,
        "rounds": 100,
        "drafted": 0,
        "accepted": 0,
        "alpha": None,
        "digest": "same",
        "phases": dict.fromkeys(PHASES, 0.0) | {"forward": seconds},
    } | changes


def speculative(contender: str, repetition: int, seconds: float, **changes: Any) -> dict[str, Any]:
    phases = {"draft": 0.08, "wire": 0.02, "queue": 0.01, "forward": 0.15, "verify": 0.01, "other": seconds - 0.27}
    known = {"rounds": 40, "drafted": 160, "accepted": 60, "alpha": 0.6, "phases": phases}
    return run(contender, repetition, seconds, **(known | changes))


def test_ratios_are_against_the_faster_target_alone_in_the_same_repetition() -> None:
    runs = [run("transformers", i, 1.0) for i in range(3)]
    runs += [run("outrider-alone", i, seconds) for i, seconds in enumerate((0.5, 0.4, 0.8))]
    runs += [speculative("outrider-pair", i, seconds) for i, seconds in enumerate((0.25, 0.25, 0.3))]
    found = summarise(runs)["demo"]["0"]
    assert found["best_alone"] == "outrider-alone"
    pair = found["contenders"]["outrider-pair"]
    assert pair["tokens_per_second"] == pytest.approx(400)
    assert pair["ratio"] == pytest.approx(2.0)  # of 2.0, 1.6 and 2.67
    assert pair["ratio_range"] == pytest.approx([1.6, 8 / 3])
    assert found["contenders"]["outrider-alone"]["ratio"] == 1.0


def test_a_repetition_counts_all_its_tokens_and_all_its_seconds() -> None:
    runs = [run("transformers", 0, 1.0), run("transformers", 0, 3.0, prompt=1)]
    found = summarise(runs)["demo"]["0"]["contenders"]["transformers"]
    assert found["tokens_per_second"] == pytest.approx(50)
    assert found["texts"] == 2


def test_the_prediction_is_theorem_3_8_with_what_was_measured() -> None:
    runs = [run("outrider-alone", 0, 0.5), speculative("outrider-pair", 0, 0.3)]
    found = summarise(runs)["demo"]["0"]["contenders"]
    pair = found["outrider-pair"]
    assert pair["draft_step_us"] == pytest.approx(500)
    assert pair["target_pass_us"] == pytest.approx(3750)
    assert pair["round_trip_us"] == pytest.approx(1000)
    foretold = tokens_per_second(0.6, 4, draft_step=500e-6, verify_pass=3750e-6, round_trip=1000e-6)
    assert pair["predicted_ratio"] == pytest.approx(foretold / 200)
    assert found["outrider-alone"]["predicted_ratio"] is None


def test_a_contender_that_tells_no_alpha_is_foretold_with_that_of_the_pair() -> None:
    runs = [run("transformers", 0, 0.5), speculative("outrider-pair", 0, 0.3)]
    runs += [speculative("assisted", 0, 0.3, alpha=None)]
    found = summarise(runs)["demo"]["0"]["contenders"]
    assert found["assisted"]["alpha"] is None
    assert found["assisted"]["predicted_ratio"] == pytest.approx(found["outrider-pair"]["predicted_ratio"])


def test_pairs_and_temperatures_are_kept_apart() -> None:
    runs = [run("transformers", 0, 1.0), run("transformers", 0, 2.0, temperature="1")]
    runs += [run("transformers", 0, 4.0, pair="deepened")]
    found = summarise(runs)
    rates = {
        (pair, temperature): of["contenders"]["transformers"]["tokens_per_second"]
        for pair, by_temperature in found.items()
        for temperature, of in by_temperature.items()
    }
    assert rates == {("demo", "0"): 100, ("demo", "1"): 50, ("deepened", "0"): 25}


def test_texts_are_compared_with_those_of_the_target_alone() -> None:
    runs = [run("outrider-alone", i, 0.5, digest=f"text {i}") for i in range(4)]
    runs += [speculative("outrider-pair", i, 0.3, digest="other" if i == 3 else f"text {i}") for i in range(4)]
    assert summarise(runs)["demo"]["0"]["contenders"]["outrider-pair"]["same_text"] == 0.75
