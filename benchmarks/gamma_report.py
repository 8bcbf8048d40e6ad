"""From the runs of the policies to figures: rates, ratios, what an oracle would have come to; a table and a picture.

It knows runs as `benchmarks.gamma` records them, and no services.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")  # no window: it writes a file
from matplotlib import pyplot
from matplotlib.axes import Axes

from outrider.theory import fixed_rate, oracle_rate

ALONE = "alone"
_RESAMPLES = 500

Json = dict[str, Any]


def summarise(runs: Sequence[Json]) -> Json:
    """By pair and temperature: each arm's rate and its ratios, and the oracle's."""
    groups: dict[tuple[str, str], list[Json]] = {}
    for run in runs:
        groups.setdefault((run["pair"], run["temperature"]), []).append(run)
    summary: Json = {}
    for (pair, temperature), some in groups.items():
        summary.setdefault(pair, {})[temperature] = _one(some)
    return summary


def _one(runs: Sequence[Json]) -> Json:
    """One pair at one temperature."""
    by_arm: dict[str, list[Json]] = {}
    for run in runs:
        if run["arm"] is not None:
            by_arm.setdefault(run["arm"], []).append(run)
    for some in by_arm.values():
        some.sort(key=lambda run: (run["repetition"], run["prompt"]))
    tokens, seconds = _table(by_arm, "tokens"), _table(by_arm, "seconds")  # [A, N]
    rates = tokens.sum(axis=1) / seconds.sum(axis=1)
    names = list(by_arm)
    fixed = [row for row, name in enumerate(names) if name.startswith("fixed ")]
    best = max(fixed, key=lambda row: rates[row])
    low, high = _ranges(tokens, seconds, names.index(ALONE))
    arms = {
        name: {
            "tokens_per_second": round(float(rates[row]), 2),
            "ratio_to_alone": round(float(rates[row] / rates[names.index(ALONE)]), 3),
            "range": [round(float(low[row]), 3), round(float(high[row]), 3)],
            "ratio_to_best_fixed": round(float(rates[row] / rates[best]), 3),
            "mean_gamma": round(float(np.mean([run["mean_gamma"] for run in by_arm[name]])), 2),
            "tokens_per_round": round(float(tokens[row].sum() / sum(run["rounds"] for run in by_arm[name])), 2),
            "accepted_share": _share(by_arm[name]),
        }
        for row, name in enumerate(names)
    }
    texts = [{run["digest"] for run in some} for some in zip(*by_arm.values(), strict=True)]
    return {
        "best_fixed": names[best],
        "arms": arms,
        "oracle": _oracle(runs, by_arm, float(rates[names.index(ALONE)]), float(rates[best])),
        "texts": len(texts),
        "texts_that_differ": sum(len(digests) > 1 for digests in texts),
    }


def _table(by_arm: dict[str, list[Json]], name: str) -> Any:
    return np.array([[run[name] for run in some] for some in by_arm.values()], dtype=np.float64)


def _share(runs: Sequence[Json]) -> float | None:
    drafted = sum(run["drafted"] for run in runs)
    return round(sum(run["accepted"] for run in runs) / drafted, 3) if drafted else None


def _ranges(tokens: Any, seconds: Any, alone: int) -> tuple[Any, Any]:
    """Where the middle nine tenths of the ratio to the target alone lie, over resampled texts; `[A]` each."""
    generator = np.random.default_rng(1)
    picks = generator.integers(0, tokens.shape[1], size=(_RESAMPLES, tokens.shape[1]))
    rates = tokens[:, picks].sum(axis=2) / seconds[:, picks].sum(axis=2)  # [A, resamples]
    ratios = rates / rates[alone]
    return np.quantile(ratios, 0.05, axis=1), np.quantile(ratios, 0.95, axis=1)


def _oracle(runs: Sequence[Json], by_arm: dict[str, list[Json]], alone: float, best: float) -> Json:
    """What a γ that knows each round's acceptances would have come to, from recorded rounds and measured times.

    A round of γ drafts takes what a line through the fixed arms' seconds a round says; of none, what a token of the
    target alone takes. The same line says what each fixed γ should have come to on those rounds.
    """
    accepted = [count for run in runs if run["arm"] is None for count in run["accepted_of_rounds"]]
    seconds = _seconds_of_rounds(by_arm)
    if not accepted:
        return {"rounds": 0}
    rate = oracle_rate(accepted, seconds)
    foretold = {
        name: round(fixed_rate(accepted, int(name.removeprefix("fixed ")), seconds), 2)
        for name in by_arm
        if name.startswith("fixed ")
    }
    return {
        "rounds": len(accepted),
        "mean_accepted": round(float(np.mean(accepted)), 3),
        "tokens_per_second": round(rate, 2),
        "ratio_to_alone": round(rate / alone, 3),
        "ratio_to_best_fixed": round(rate / best, 3),
        "foretold": foretold,
    }


def _seconds_of_rounds(by_arm: dict[str, list[Json]]) -> Callable[[int], float]:
    lengths, seconds = [], []
    for name, runs in by_arm.items():
        if name.startswith("fixed "):
            rounds = sum(run["rounds"] for run in runs)
            lengths.append(sum(run["drafted"] for run in runs) / rounds)
            seconds.append(sum(run["seconds"] for run in runs) / rounds)
    slope, start = np.polyfit(lengths, seconds, 1) if len(lengths) > 1 else (0.0, seconds[0])
    alone = sum(run["seconds"] for run in by_arm[ALONE]) / sum(run["tokens"] for run in by_arm[ALONE])
    return lambda gamma: float(max(start + slope * gamma, 1e-6)) if gamma else float(alone)


def table(document: Json) -> str:
    """All arms as one table in Markdown."""
    lines = [
        "| pair | T | arm | tokens/s | over alone | over the best fixed | mean γ | tokens a round | accepted |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for pair, by_temperature in document["summary"].items():
        for temperature, found in by_temperature.items():
            for name, arm in found["arms"].items():
                mark = " (best fixed)" if name == found["best_fixed"] else ""
                low, high = arm["range"]
                lines.append(
                    f"| {pair} | {temperature} | {name}{mark} | {arm['tokens_per_second']:.1f} | "
                    f"{arm['ratio_to_alone']:.2f} ({low:.2f} to {high:.2f}) | {arm['ratio_to_best_fixed']:.2f} | "
                    f"{arm['mean_gamma']:.1f} | {arm['tokens_per_round']:.2f} | {arm['accepted_share'] or '-'} |"
                )
            oracle = found["oracle"]
            if oracle["rounds"]:
                lines.append(
                    f"| {pair} | {temperature} | oracle, from {oracle['rounds']} rounds | "
                    f"{oracle['tokens_per_second']:.1f} | {oracle['ratio_to_alone']:.2f} | "
                    f"{oracle['ratio_to_best_fixed']:.2f} | {oracle['mean_accepted']:.1f} | "
                    f"{1 + oracle['mean_accepted']:.2f} | 1 |"
                )
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------------- the picture


def draw(document: Json, path: Path) -> None:
    """Writes a PNG: a panel for each pair and temperature; fixed γ as a curve, the others as lines across it."""
    summary = document["summary"]
    temperatures = list(dict.fromkeys(at for by_temperature in summary.values() for at in by_temperature))
    figure, panels = pyplot.subplots(
        len(summary),
        len(temperatures),
        figsize=(5.4 * len(temperatures), 3.6 * len(summary)),
        squeeze=False,
    )
    for row, (pair, by_temperature) in enumerate(summary.items()):
        for column, temperature in enumerate(temperatures):
            if temperature in by_temperature:
                _draw_panel(panels[row][column], by_temperature[temperature])
                panels[row][column].set_title(f"{pair}, T = {temperature}", fontsize=10)
        panels[row][0].set_ylabel("speed-up over the target alone")
    for panel in panels[-1]:
        panel.set_xlabel("γ, where it is fixed")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", ncol=3, frameon=False, fontsize=8)
    found = document["machine"]
    figure.text(0.5, 0.01, f"{found['cpu']}, {found['cores']} cores", ha="center", fontsize=7, color="#555555")
    figure.tight_layout(rect=(0, 0.03, 1, 0.9))
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _draw_panel(panel: Axes, found: Json) -> None:
    fixed = {int(name.removeprefix("fixed ")): arm for name, arm in found["arms"].items() if name.startswith("fixed ")}
    lengths = sorted(fixed)
    panel.plot(
        lengths, [fixed[gamma]["ratio_to_alone"] for gamma in lengths], marker="o", color="#5d6776", label="fixed γ"
    )
    panel.fill_between(
        lengths,
        [fixed[gamma]["range"][0] for gamma in lengths],
        [fixed[gamma]["range"][1] for gamma in lengths],
        color="#9aa3b0",
        alpha=0.3,
    )
    others = [name for name in found["arms"] if not name.startswith("fixed ") and name != ALONE]
    for name, colour in zip(others, ("#c98a2b", "#2f6f9f", "#6aa84f", "#a64d79"), strict=False):
        panel.axhline(found["arms"][name]["ratio_to_alone"], color=colour, linewidth=1.4, label=name)
    if found["oracle"]["rounds"]:
        panel.axhline(
            found["oracle"]["ratio_to_alone"], color="#333333", linewidth=1.0, linestyle="--", label="oracle (computed)"
        )
    panel.axhline(1.0, color="#333333", linewidth=0.8, linestyle=":")
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
