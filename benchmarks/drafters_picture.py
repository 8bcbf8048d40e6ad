"""The drafters as a picture: what each is worth beside the target alone, with its α. It computes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no window: it writes a file
from matplotlib import pyplot
from matplotlib.axes import Axes

from benchmarks.drafters_summary import DRAFTERS

_COLOURS = dict(zip(DRAFTERS, ("#9aa3b0", "#2f6f9f", "#1b9e8f", "#c98a2b", "#7a5ea8", "#c9c2b4"), strict=True))
_WIDTH = 0.14

Json = dict[str, Any]


def draw(document: Json, path: Path) -> None:
    """Writes a PNG: one panel for each pair and temperature, one group of bars for each kind of prompt."""
    panels = [
        (pair, temperature)
        for pair, by_kind in document["summary"].items()
        for temperature in next(iter(by_kind.values()))
    ]
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = pyplot.subplots(rows, columns, figsize=(5.4 * columns, 3.8 * rows), sharey="row", squeeze=False)
    for axis, (pair, temperature) in zip(axes.flat, panels, strict=False):
        _panel(axis, document, pair, temperature)
    for row in axes:
        row[0].set_ylabel("tokens/s, to the target alone")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", ncol=len(DRAFTERS), frameon=False, fontsize=8)
    found = document["machine"]
    figure.text(0.5, 0.01, f"{found['cpu']}, {found['cores']} cores", ha="center", fontsize=7, color="#555555")
    figure.tight_layout(rect=(0, 0.03, 1, 0.94))
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _panel(axis: Axes, document: Json, pair: str, temperature: str) -> None:
    by_kind = document["summary"][pair]
    for place, name in enumerate(DRAFTERS):
        offset = (place - (len(DRAFTERS) - 1) / 2) * _WIDTH
        found = [(i + offset, by_temperature[temperature][name]) for i, by_temperature in enumerate(by_kind.values())]
        ratios = [each["ratio"] for _, each in found]
        low = [each["ratio"] - each["ratio_range"][0] for _, each in found]
        high = [each["ratio_range"][1] - each["ratio"] for _, each in found]
        axis.bar(
            [x for x, _ in found], ratios, _WIDTH * 0.9, yerr=[low, high], label=name, color=_COLOURS[name],
            error_kw={"elinewidth": 0.8, "ecolor": "#333333"},
        )  # fmt: skip
        for x, each in found:
            if each["alpha"] is not None:
                axis.annotate(
                    f"α {each['alpha']:.2f}", (x, 0), (0, 4), textcoords="offset points", ha="center", fontsize=6,
                    color="white", rotation=90,
                )  # fmt: skip
    axis.axhline(1.0, color="#333333", linewidth=0.8, linestyle=":")
    axis.set_xticks(range(len(by_kind)), list(by_kind))
    axis.set_title(f"{pair} pair ({document['models'][pair]['target_layers']} layers), T = {temperature}", fontsize=10)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
