"""The figures of `benchmarks.rules`: from counts by text to means with intervals, a table and a picture.

A prompt is the unit: rounds of one text are not independent, texts of different prompts are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no window: it writes a file
from matplotlib import pyplot
from matplotlib.axes import Axes

from benchmarks.acceptance import EXPECTED, estimate

_COLOURS = {"tokenwise": "#5d6776", "block": "#2f6f9f", "coupled": "#c98a2b"}
_ORDER = tuple(_COLOURS)
_BARS = 0.8  # of the distance between groups

Json = dict[str, Any]


def summarise(runs: Sequence[Json]) -> Json:
    """By temperature, then γ: each rule's accepted tokens a round, and what `block` accepts more than `tokenwise`.

    `counted` is what the services did, `expected` the mean of the formula over the same rounds. The difference is given
    twice: of the counts, prompt by prompt, and of the formulas, on the drafts of both rules' texts.
    """
    cells: dict[str, dict[str, list[Json]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        cells[run["temperature"]][str(run["gamma"])].append(run)
    return {
        temperature: {gamma: _cell(of_gamma) for gamma, of_gamma in by_gamma.items()}
        for temperature, by_gamma in cells.items()
    }


def _cell(runs: Sequence[Json]) -> Json:
    by_rule: dict[str, dict[int, Json]] = defaultdict(dict)
    for run in sorted(runs, key=lambda run: _ORDER.index(run["rule"])):
        by_rule[run["rule"]][run["prompt"]] = run
    cell: Json = {"rules": {rule: _figures(rule, list(by_prompt.values())) for rule, by_prompt in by_rule.items()}}
    pairs = [
        (text, by_rule["block"][prompt])
        for prompt, text in by_rule.get("tokenwise", {}).items()
        if prompt in by_rule.get("block", {})
    ]
    if pairs:
        cell["block_minus_tokenwise"] = {
            "counted": estimate([_accepted(second) - _accepted(first) for first, second in pairs]),
            "expected": estimate([_gain(*pair) for pair in pairs]),
        }
    return cell


def _figures(rule: str, texts: Sequence[Json]) -> Json:
    counted = estimate([_accepted(text) for text in texts])
    figures: Json = {
        "rounds": sum(text["rounds"] for text in texts),
        "counted": counted,
        "tokens_per_round": 1 + counted["mean"],  # each verdict adds one of the target's own
    }
    if rule in EXPECTED:
        figures["expected"] = estimate([text["expected"][rule] / text["rounds"] for text in texts])
        figures["redrafted"] = sum(text["redrafted"] for text in texts)
    return figures


def _accepted(text: Json) -> float:
    return float(text["accepted"] / text["rounds"])


def _gain(*texts: Json) -> float:
    """What `block` accepts more a round in expectation, over the rounds of all `texts`."""
    gains = [text["expected"]["block"] - text["expected"]["tokenwise"] for text in texts]
    return float(sum(gains) / sum(text["rounds"] for text in texts))


def table(document: Json) -> str:
    """The figures in Markdown."""
    lines = [
        "| T | γ | rule | rounds | accepted a round, counted | expected | tokens a round "
        "| `block` - `tokenwise`, counted | expected, on the same drafts | told from 0 at |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for temperature, by_gamma in document["summary"].items():
        for gamma, cell in by_gamma.items():
            difference = cell.get("block_minus_tokenwise")
            for rule, found in cell["rules"].items():
                compared = ["", "", ""]
                if rule == "block" and difference:
                    detectable = difference["expected"]["detectable"]
                    compared = [
                        _told(difference["counted"], sign="+"),
                        _told(difference["expected"], sign="+"),
                        "" if detectable is None else f"{detectable:.3f}",
                    ]
                cells = [
                    temperature,
                    gamma,
                    f"`{rule}`",
                    f"{found['rounds']:,}",
                    _told(found["counted"]),
                    _told(found["expected"]) if "expected" in found else "",
                    f"{found['tokens_per_round']:.2f}",
                    *compared,
                ]
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _told(found: Json, sign: str = "") -> str:
    interval = found["interval"]
    mean = f"{found['mean']:{sign}.3f}"
    return mean if interval is None else f"{mean} ± {(interval[1] - interval[0]) / 2:.3f}"


def draw(document: Json, path: Path) -> None:
    """Writes a PNG: above, accepted tokens a round of each rule; below, what `block` gains on the same drafts."""
    summary = document["summary"]
    figure, panels = pyplot.subplots(
        2, len(summary), figsize=(4.6 * len(summary), 5.8), sharey="row", squeeze=False, height_ratios=(3, 2)
    )
    for column, (temperature, by_gamma) in enumerate(summary.items()):
        _draw_counts(panels[0][column], by_gamma)
        _draw_gains(panels[1][column], by_gamma)
        panels[0][column].set_title(f"T = {temperature}", fontsize=10)
        for panel in panels[:, column]:
            panel.set_xticks(range(len(by_gamma)), [f"γ = {gamma}" for gamma in by_gamma])
            for side in ("top", "right"):
                panel.spines[side].set_visible(False)
    panels[0][0].set_ylabel("accepted tokens a round")
    panels[1][0].set_ylabel("block - tokenwise")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", ncol=4, frameon=False, fontsize=8)
    figure.text(
        0.5,
        0.01,
        "demo pair; bars: 95 % over prompts; below: expected on the same drafts",
        ha="center",
        fontsize=7,
        color="#555555",
    )
    figure.tight_layout(rect=(0, 0.03, 1, 0.94))
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _draw_counts(panel: Axes, by_gamma: Json) -> None:
    rules = list(dict.fromkeys(rule for cell in by_gamma.values() for rule in cell["rules"]))
    width = _BARS / len(rules)
    for place, rule in enumerate(rules):
        at = [group + (place - (len(rules) - 1) / 2) * width for group in range(len(by_gamma))]
        found = [cell["rules"][rule]["counted"] for cell in by_gamma.values()]
        panel.bar(
            at, [each["mean"] for each in found], width * 0.9, yerr=_errors(found), label=rule,
            color=_COLOURS.get(rule, "#9aa3b0"), error_kw={"elinewidth": 0.8, "ecolor": "#333333"},
        )  # fmt: skip
        for x, each in zip(at, found, strict=True):
            panel.annotate(
                f"{each['mean']:.2f}", (x, 0), (0, 4), textcoords="offset points", ha="center", fontsize=7,
                color="white",
            )  # fmt: skip


def _draw_gains(panel: Axes, by_gamma: Json) -> None:
    found = [
        (group, cell["block_minus_tokenwise"]["expected"])
        for group, cell in enumerate(by_gamma.values())
        if "block_minus_tokenwise" in cell
    ]
    panel.axhline(0.0, color="#333333", linewidth=0.8, linestyle=":")
    panel.errorbar(
        [group for group, _ in found], [each["mean"] for _, each in found],
        yerr=_errors([each for _, each in found]), fmt="o", color=_COLOURS["block"], capsize=3,
    )  # fmt: skip
    for group, each in found:
        panel.annotate(f"{each['mean']:+.3f}", (group, each["mean"]), (8, -3), textcoords="offset points", fontsize=7)
    panel.set_xlim(-0.5, len(by_gamma) - 0.5)


def _errors(found: Sequence[Json]) -> list[list[float]] | None:
    if any(each["interval"] is None for each in found):
        return None
    return [
        [each["mean"] - each["interval"][0] for each in found],
        [each["interval"][1] - each["mean"] for each in found],
    ]
