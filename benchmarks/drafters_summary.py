"""From the runs of drafters to figures, and the figures as tables. Pure arithmetic on the JSON of the runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

DRAFTERS = ("none", "model", "staged", "ngram", "lookup", "random")
"""In the order of tables and pictures; the first is what the others are held against."""

Json = dict[str, Any]


def summarise(runs: Sequence[Json]) -> Json:
    """All figures: by pair, kind of prompt, temperature and drafter.

    A rate is the median over repetitions of a repetition's tokens over its seconds, and a ratio is that of two rates of
    the same repetition. α is the mean over judged positions, weighted by what was drafted.
    """
    return {
        pair: {
            kind: {
                temperature: _one(of_temperature)
                for temperature, of_temperature in _grouped(of_kind, "temperature").items()
            }
            for kind, of_kind in _grouped(of_pair, "kind").items()
        }
        for pair, of_pair in _grouped(runs, "pair").items()
    }


def show(document: Json, console: Console) -> None:
    """Draws a table for each pair, kind and temperature."""
    found = document["machine"]
    console.print(f"{found['cpu']}, {found['cores']} cores; {document['command']}", markup=False)
    for pair, by_kind in document["summary"].items():
        layers = document["models"][pair]["target_layers"]
        for kind, by_temperature in by_kind.items():
            for temperature, figures in by_temperature.items():
                console.print(_table(f"{pair} pair ({layers} layers), {kind}, T={temperature}", figures))


def _one(runs: Sequence[Json]) -> Json:
    by_drafter = _grouped(runs, "drafter")
    rates = {name: _rates(own) for name, own in by_drafter.items()}
    alone = rates[DRAFTERS[0]]
    return {
        name: _figures(by_drafter[name], rates[name], alone)
        for name in sorted(by_drafter, key=lambda name: DRAFTERS.index(name))
    }


def _figures(runs: Sequence[Json], rates: dict[int, float], alone: dict[int, float]) -> Json:
    ratios = [rate / alone[repetition] for repetition, rate in rates.items()]
    drafted, guessed = _sum(runs, "drafted"), _sum(runs, "inner_guessed")
    alphas = [run["alpha"] * run["drafted"] for run in runs if run["alpha"] is not None]
    return {
        "tokens_per_second": median(rates.values()),
        "ratio": median(ratios),
        "ratio_range": [min(ratios), max(ratios)],
        "alpha": sum(alphas) / drafted if drafted else None,
        "tokens_per_round": _sum(runs, "tokens") / _sum(runs, "rounds"),
        "drafted": int(drafted),
        "accepted": int(_sum(runs, "accepted")),
        "us_per_drafted_token": 1e6 * sum(run["phases"]["draft"] for run in runs) / drafted if drafted else None,
        "inner_acceptance": _sum(runs, "inner_accepted") / guessed if guessed else None,
        "draft_failures": int(_sum(runs, "draft_failures")),
    }


def _rates(runs: Sequence[Json]) -> dict[int, float]:
    return {
        repetition: _sum(own, "tokens") / _sum(own, "seconds")
        for repetition, own in _grouped(runs, "repetition").items()
    }


def _sum(runs: Iterable[Json], name: str) -> float:
    return float(sum(run[name] for run in runs))


def _grouped(runs: Iterable[Json], key: str) -> dict[Any, list[Json]]:
    groups: dict[Any, list[Json]] = {}
    for run in runs:
        groups.setdefault(run[key], []).append(run)
    return groups


def _table(title: str, figures: Json) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("drafter", no_wrap=True)
    for heading in ("tokens/s", "to none", "α", "tokens/round", "drafted", "accepted", "µs/drafted", "inner"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, found in figures.items():
        low, high = found["ratio_range"]
        table.add_row(
            name,
            f"{found['tokens_per_second']:.1f}",
            f"{found['ratio']:.2f} ({low:.2f}–{high:.2f})",
            _number(found["alpha"], 2),
            _number(found["tokens_per_round"], 2),
            f"{found['drafted']:,}",
            f"{found['accepted']:,}",
            _number(found["us_per_drafted_token"], 0),
            _number(found["inner_acceptance"], 2),
        )
    return table


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"
