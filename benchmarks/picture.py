"""The figures as a picture: speed-up over the target alone, measured beside foretold. It computes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no window: it writes a file
from matplotlib import pyplot
from matplotlib.axes import Axes

from benchmarks.summary import CONTENDERS, LABELS

_COLOURS = dict(zip(CONTENDERS, ("#9aa3b0", "#5d6776", "#c98a2b", "#2f6f9f"), strict=True))
_WIDTH = 0.2

Json = dict[str, Any]


def draw(document: Json, path: Path) -> None:
    """Writes a PNG: one panel a temperature, one group of bars a pair."""
    summary = document["summary"]
    temperatures = list(dict.fromkeys(at for by_temperature in summary.values() for at in by_temperature))
    figure, panels = pyplot.subplots(
        1, len(temperatures), figsize=(5.2 * len(temperatures), 4.2), sharey=True, squeeze=False
    )
    for panel, temperature in zip(panels[0], temperatures, strict=True):
        _draw_panel(panel, document, temperature)
    panels[0][0].set_ylabel("speed-up over the faster target alone")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", ncol=3, frameon=False, fontsize=8)
    found = document["machine"]
    figure.text(0.5, 0.01, f"{found['cpu']}, {found['cores']} cores", ha="center", fontsize=7, color="#555555")
    figure.tight_layout(rect=(0, 0.03, 1, 0.86))
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _draw_panel(panel: Axes, document: Json, temperature: str) -> None:
    pairs = [pair for pair, by_temperature in document["summary"].items() if temperature in by_temperature]
    for place, name in enumerate(CONTENDERS):
        offset = (place - (len(CONTENDERS) - 1) / 2) * _WIDTH
        figures = [document["summary"][pair][temperature]["contenders"].get(name) for pair in pairs]
        bars = [(i + offset, each) for i, each in enumerate(figures) if each is not None]
        ratios = [each["ratio"] for _, each in bars]
        errors = [
            [each["ratio"] - each["ratio_range"][0] for _, each in bars],
            [each["ratio_range"][1] - each["ratio"] for _, each in bars],
        ]
        panel.bar(
            [x for x, _ in bars], ratios, _WIDTH * 0.9, yerr=errors, label=LABELS[name], color=_COLOURS[name],
            error_kw={"elinewidth": 0.8, "ecolor": "#333333"},
        )  # fmt: skip
        for (x, _), ratio in zip(bars, ratios, strict=True):
            panel.annotate(
                f"{ratio:.2f}", (x, 0), (0, 4), textcoords="offset points", ha="center", fontsize=7, color="white"
            )
    foretold = [
        (i + (CONTENDERS.index(name) - (len(CONTENDERS) - 1) / 2) * _WIDTH, each["predicted_ratio"])
        for i, pair in enumerate(pairs)
        for name, each in document["summary"][pair][temperature]["contenders"].items()
        if each["predicted_ratio"] is not None
    ]
    panel.plot(
        [x for x, _ in foretold], [y for _, y in foretold], linestyle="none", marker="D", markersize=5,
        markerfacecolor="white", markeredgecolor="black", label="Theorem 3.8 from measured α and times",
    )  # fmt: skip
    panel.axhline(1.0, color="#333333", linewidth=0.8, linestyle=":")
    panel.set_xticks(
        range(len(pairs)), [f"{pair} pair\n{document['models'][pair]['target_layers']} layers" for pair in pairs]
    )
    panel.set_title(f"T = {temperature}", fontsize=10)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
