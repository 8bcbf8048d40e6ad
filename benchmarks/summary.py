"""From runs to figures: rates, ratios, acceptance, where the time of a round went, and what Theorem 3.8 foretells.

Pure arithmetic on the JSON of the runs; it knows nothing of how they came about.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from benchmarks.contenders import PHASES
from outrider.theory import improvement

ALONE = ("transformers", "outrider-alone")
PAIR = "outrider-pair"
ASSISTED = "assisted"
CONTENDERS = (*ALONE, ASSISTED, PAIR)
LABELS = {
    "transformers": "target alone, transformers",
    "outrider-alone": "target alone, Outrider",
    "assisted": "assisted generation, transformers",
    "outrider-pair": "the pair over gRPC, Outrider",
}

Json = dict[str, Any]


def summarise(runs: Sequence[Json]) -> Json:
    """All figures: by pair, then temperature, then contender.

    The rate of a contender is the median over repetitions of (tokens / seconds) over the repetition's texts; ratios are
    medians over repetitions too, each against the faster way of running the target alone, in the same repetition.
    """
    return {
        pair: {
            temperature: _summarise_one(list(of_temperature))
            for temperature, of_temperature in _grouped(of_pair, "temperature").items()
        }
        for pair, of_pair in _grouped(runs, "pair").items()
    }


def _summarise_one(runs: Sequence[Json]) -> Json:
    by_contender = _grouped(runs, "contender")
    rates = {name: _rates(of_contender) for name, of_contender in by_contender.items()}
    best_alone = max((name for name in ALONE if name in rates), key=lambda name: median(rates[name].values()))
    reference = rates[best_alone]
    alpha = _alpha(by_contender.get(PAIR, ()))
    texts = {(run["repetition"], run["prompt"]): run["digest"] for run in by_contender.get("outrider-alone", ())}
    figures = {}
    for name in sorted(by_contender, key=CONTENDERS.index):
        of_contender = by_contender[name]
        ratios = [rate / reference[repetition] for repetition, rate in rates[name].items() if repetition in reference]
        figures[name] = _figures(of_contender) | {
            "tokens_per_second": median(rates[name].values()),
            "repetitions": len(rates[name]),
            "ratio": median(ratios),
            "ratio_range": [min(ratios), max(ratios)],
            "predicted_ratio": _predicted(of_contender, alpha, 1 / median(reference.values())),
            "same_text": _share(texts.get((run["repetition"], run["prompt"])) == run["digest"] for run in of_contender),
            "settings": of_contender[-1]["settings"],
        }
    return {"best_alone": best_alone, "contenders": figures}


def _figures(runs: Sequence[Json]) -> Json:
    """Means over all rounds of all runs, those that read the prompt included. Times in microseconds."""
    rounds, drafted = sum(run["rounds"] for run in runs), sum(run["drafted"] for run in runs)
    tokens = sum(run["tokens"] for run in runs)
    per_round = {phase: 1e6 * sum(run["phases"][phase] for run in runs) / rounds for phase in PHASES}
    return {
        "texts": len(runs),
        "tokens": tokens,
        "rounds": rounds,
        "gamma": drafted / rounds,
        "alpha": _alpha(runs),
        "accepted_share": sum(run["accepted"] for run in runs) / drafted if drafted else None,
        "tokens_per_round": tokens / rounds,
        "round_us": {phase: round(time, 1) for phase, time in per_round.items()},
        "draft_step_us": per_round["draft"] * rounds / drafted if drafted else None,  # t_q
        "target_pass_us": per_round["forward"],  # t_p(γ+1)
        "round_trip_us": sum(per_round[phase] for phase in ("wire", "queue", "verify")),  # R, acceptance included
    }


def _predicted(runs: Sequence[Json], alpha: float | None, step: float) -> float | None:
    """The speed-up of [L Thm 3.8] from what was measured, against a target alone that takes `step` seconds a token.

    None for the target alone. Where a contender does not tell its α, it is that of the same two models elsewhere.
    """
    figures = _figures(runs)
    if not figures["draft_step_us"] or alpha is None:
        return None
    step_us = 1e6 * step
    return improvement(
        alpha,
        round(figures["gamma"]),
        c=figures["draft_step_us"] / step_us,
        round_trip=figures["round_trip_us"] / step_us,
        verify_cost=figures["target_pass_us"] / step_us,
    )


def _alpha(runs: Iterable[Json]) -> float | None:
    """Mean over texts, each with the weight of its drafted tokens."""
    known = [(run["alpha"], run["drafted"]) for run in runs if run["alpha"] is not None]
    weight = sum(drafted for _, drafted in known)
    return sum(alpha * drafted for alpha, drafted in known) / weight if weight else None


def _rates(runs: Sequence[Json]) -> dict[int, float]:
    """Tokens per second of each repetition."""
    return {
        repetition: sum(run["tokens"] for run in of_repetition) / sum(run["seconds"] for run in of_repetition)
        for repetition, of_repetition in _grouped(runs, "repetition").items()
    }


def _share(truths: Iterable[bool]) -> float:
    values = list(truths)
    return sum(values) / len(values)


def _grouped(runs: Iterable[Json], key: str) -> dict[Any, list[Json]]:
    groups: dict[Any, list[Json]] = defaultdict(list)
    for run in runs:
        groups[run[key]].append(run)
    return dict(groups)
