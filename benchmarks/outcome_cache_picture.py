"""`results/outcome-cache.json` as a picture: the gain at each γ, a panel a placement. It computes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no window: it writes a file
from matplotlib import pyplot
from matplotlib.axes import Axes

_COLOURS = {"greedy": "#2f6f9f", "coupled": "#c98a2b", "block": "#5d6776", "tokenwise": "#9aa3b0"}

Json = dict[str, Any]


def draw(document: Json, path: Path) -> None:
    """Writes a PNG."""
    placements = list(dict.fromkeys(row["placement"] for row in document["results"]))
    figure, panels = pyplot.subplots(
        1, len(placements), figsize=(4.4 * len(placements), 4.0), sharey=True, squeeze=False
    )
    for panel, placement in zip(panels[0], placements, strict=True):
        _draw_panel(panel, [row for row in document["results"] if row["placement"] == placement])
        panel.set_title(placement, fontsize=10)
    panels[0][0].set_ylabel("tokens/s with the outcome cache\nover tokens/s without")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", ncol=len(labels), frameon=False, fontsize=9)
    found = document["machine"]
    figure.text(
        0.5,
        0.01,
        f"{found['cpu']}, {found['cores']} cores. White: hit rate. Bars: quartiles over prompts.",
        ha="center",
        fontsize=7,
        color="#555555",
    )
    figure.tight_layout(rect=(0, 0.04, 1, 0.93))
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _draw_panel(panel: Axes, rows: list[Json]) -> None:
    ways = list(dict.fromkeys(row["way"] for row in rows))
    gammas = sorted({row["gamma"] for row in rows})
    width = 0.8 / len(ways)
    for place, way in enumerate(ways):
        some = {row["gamma"]: row for row in rows if row["way"] == way}
        at = [i + (place - (len(ways) - 1) / 2) * width for i in range(len(gammas))]
        ratios = [some[gamma]["ratio"] for gamma in gammas]
        errors = [
            [max(0.0, some[gamma]["ratio"] - some[gamma]["ratio_quartiles"][0]) for gamma in gammas],
            [max(0.0, some[gamma]["ratio_quartiles"][1] - some[gamma]["ratio"]) for gamma in gammas],
        ]
        panel.bar(
            at, ratios, width * 0.92, yerr=errors, label=way, color=_COLOURS[way],
            error_kw={"elinewidth": 0.8, "ecolor": "#333333"},
        )  # fmt: skip
        for x, gamma in zip(at, gammas, strict=True):
            hit = some[gamma]["hit_rate"]
            panel.annotate(
                "" if hit is None else f"{hit:.0%}", (x, 0.72), ha="center", fontsize=6.5, color="white", rotation=90
            )
    panel.axhline(1.0, color="#333333", linewidth=0.8, linestyle=":")
    panel.set_ylim(bottom=0.7)
    panel.set_xticks(range(len(gammas)), [f"γ = {gamma}" for gamma in gammas])
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
