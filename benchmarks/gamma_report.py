"""From the runs of the policies to figures: rates, ratios, what an oracle would have come to; a table and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")  # no window: it writes a file
from matplotlib import pyplot
from matplotlib.axes import Axes

from benchmarks.gamma_replay import GivenTimes, agreements, counted_rate, rates

ALONE = "alone"
_RESAMPLES = 500
_COLOURS = ("#c98a2b", "#2f6f9f", "#6aa84f", "#a64d79", "#45818e", "#b45f06")

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
    by_arm = {name: by_arm[name] for name in sorted(by_arm, key=_place)}
    for some in by_arm.values():
        some.sort(key=lambda run: (run["repetition"], run["prompt"]))
    tokens, seconds = _table(by_arm, "tokens"), _table(by_arm, "seconds")  # [A, N]
    speeds = tokens.sum(axis=1) / seconds.sum(axis=1)
    names = list(by_arm)
    fixed = [row for row, name in enumerate(names) if name.startswith("fixed ")]
    best = max(fixed, key=lambda row: speeds[row])
    low, high = _ranges(tokens, seconds, names.index(ALONE))
    arms = {
        name: {
            "tokens_per_second": round(float(speeds[row]), 2),
            "ratio_to_alone": round(float(speeds[row] / speeds[names.index(ALONE)]), 3),
            "range": [round(float(low[row]), 3), round(float(high[row]), 3)],
            "ratio_to_best_fixed": round(float(speeds[row] / speeds[best]), 3),
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
        "replayed": _replayed(runs, by_arm),
        "texts": len(texts),
        "texts_that_differ": sum(len(digests) > 1 for digests in texts),
    }


def _place(arm: str) -> tuple[int, int, str]:
    """Where an arm stands in the table: the target alone, fixed γ from the shortest, the others."""
    if arm.startswith("fixed "):
        return 1, int(arm.removeprefix("fixed ")), arm
    return (0 if arm == ALONE else 2), 0, arm


def _table(by_arm: dict[str, list[Json]], name: str) -> Any:
    return np.array([[run[name] for run in some] for some in by_arm.values()], dtype=np.float64)


def _share(runs: Sequence[Json]) -> float | None:
    drafted = sum(run["drafted"] for run in runs)
    return round(sum(run["accepted"] for run in runs) / drafted, 3) if drafted else None


def _ranges(tokens: Any, seconds: Any, alone: int) -> tuple[Any, Any]:
    """Where the middle nine tenths of the ratio to the target alone lie, over resampled texts; `[A]` each."""
    generator = np.random.default_rng(1)
    picks = generator.integers(0, tokens.shape[1], size=(_RESAMPLES, tokens.shape[1]))
    speeds = tokens[:, picks].sum(axis=2) / seconds[:, picks].sum(axis=2)  # [A, resamples]
    ratios = speeds / speeds[alone]
    return np.quantile(ratios, 0.05, axis=1), np.quantile(ratios, 0.95, axis=1)


def _replayed(runs: Sequence[Json], by_arm: dict[str, list[Json]]) -> Json:
    """What each policy, and an oracle, come to on the recorded rounds and the times of the fixed arms."""
    texts = [agreements(run["rounds_recorded"]) for run in runs if run["arm"] is None]
    times = _times(by_arm)
    fixed = sorted(int(name.removeprefix("fixed ")) for name in by_arm if name.startswith("fixed "))
    found = rates([text for text in texts if text], times, fixed, max(fixed))
    found |= {
        name: round(
            counted_rate(times, *(sum(run[count] for run in some) for count in ("tokens", "rounds", "drafted"))), 2
        )
        for name, some in by_arm.items()
        if name.startswith("entropy ")  # where γ is fixed, rounds are the same whatever the clock
    }
    best = max(found[f"fixed {gamma}"] for gamma in fixed)
    return {
        "times": times.document(),
        "tokens_per_second": found,
        "ratio_to_alone": {name: round(rate / found[ALONE], 3) for name, rate in found.items()},
        "ratio_to_best_fixed": {name: round(rate / best, 3) for name, rate in found.items()},
    }


def _times(by_arm: dict[str, list[Json]]) -> GivenTimes:
    """Lines through the fixed arms: of each the median text, so that a stall of the machine counts for nothing."""
    lengths, drafting, passes, rest = [], [], [], []
    for name, runs in by_arm.items():
        if name.startswith("fixed "):
            lengths.append(float(np.median([run["drafted"] / run["rounds"] for run in runs])))
            drafting.append(_per_round(runs, "draft"))
            passes.append(_per_round(runs, "forward", "verify"))
            rest.append(_per_round(runs, "wire", "queue", "other"))
    draft_token, draft_fixed = _line(lengths, drafting)
    pass_token, pass_fixed = _line([length + 1 for length in lengths], passes)
    alone = float(np.median([run["seconds"] / run["tokens"] for run in by_arm[ALONE]]))
    return GivenTimes(draft_fixed, draft_token, pass_fixed, pass_token, float(np.median(rest)), alone)


def _per_round(runs: Sequence[Json], *phases: str) -> float:
    return float(np.median([sum(run["phases"][phase] for phase in phases) / run["rounds"] for run in runs]))


def _line(lengths: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Slope and start of the line of least squares; neither below 0."""
    slope, start = np.polyfit(lengths, seconds, 1)
    if slope < 0:
        return 0.0, float(np.mean(seconds))
    if start < 0:
        return float(np.dot(lengths, seconds) / np.dot(lengths, lengths)), 0.0
    return float(slope), float(start)


def table(document: Json) -> str:
    """All arms as one table in Markdown."""
    lines = [
        "| pair | T | arm | tokens/s | over alone | replayed | over best fixed | replayed | mean γ | tokens a round |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for pair, by_temperature in document["summary"].items():
        for temperature, found in by_temperature.items():
            replayed = found["replayed"]
            for name, arm in found["arms"].items():
                mark = " (best fixed)" if name == found["best_fixed"] else ""
                low, high = arm["range"]
                lines.append(
                    f"| {pair} | {temperature} | {name}{mark} | {arm['tokens_per_second']:.1f} | "
                    f"{arm['ratio_to_alone']:.2f} ({low:.2f} to {high:.2f}) | "
                    f"{_of(replayed, 'ratio_to_alone', name)} | {arm['ratio_to_best_fixed']:.2f} | "
                    f"{_of(replayed, 'ratio_to_best_fixed', name)} | "
                    f"{arm['mean_gamma']:.1f} | {arm['tokens_per_round']:.2f} |"
                )
            lines.append(
                f"| {pair} | {temperature} | oracle | | | {_of(replayed, 'ratio_to_alone', 'oracle')} | | "
                f"{_of(replayed, 'ratio_to_best_fixed', 'oracle')} | | |"
            )
    return "\n".join(lines)


def _of(replayed: Json, name: str, arm: str) -> str:
    value = replayed[name].get(arm)
    return "-" if value is None else f"{value:.2f}"


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
    for name, colour in zip(others, _COLOURS, strict=False):
        panel.axhline(found["arms"][name]["ratio_to_alone"], color=colour, linewidth=1.4, label=name)
    oracle = found["replayed"]["ratio_to_alone"]["oracle"]
    panel.axhline(oracle, color="#333333", linewidth=1.0, linestyle="--", label="oracle (replayed)")
    replayed = [found["replayed"]["ratio_to_alone"][f"fixed {gamma}"] for gamma in lengths]
    panel.plot(lengths, replayed, color="#5d6776", linewidth=0.9, linestyle=":", label="fixed γ (replayed)")
    panel.axhline(1.0, color="#333333", linewidth=0.8, linestyle=":")
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
