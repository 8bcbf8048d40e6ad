"""The figures of `benchmarks.kernel` as a picture, after [W Figures 3 to 5]. It computes nothing but shares."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no window: it writes a file
from matplotlib import pyplot
from matplotlib.axes import Axes

from benchmarks.kernel_report import LABELS, device_us, select, share_of_copy

_COLOURS = dict(zip(LABELS, ("#2f6f9f", "#9aa3b0", "#5d6776", "#c98a2b", "#6a9f58"), strict=True))

Json = dict[str, Any]


def draw(document: Json, path: Path) -> None:
    """Writes a PNG, a column a vocabulary: time by γ, peak memory by γ, and share of the copy bandwidth by B."""
    vocabularies = document["settings"]["vocabularies"]
    bandwidth = document["copy"]["bytes_per_second"]
    figure, panels = pyplot.subplots(
        3, len(vocabularies), figsize=(3.4 * len(vocabularies), 8.2), sharey="row", squeeze=False
    )
    for column, V in enumerate(vocabularies):
        time, memory, share = panels[:, column]
        time.set_title(f"V = {V:,}", fontsize=10)
        _draw_lines(time, document, "gamma", V, lambda run: device_us(run, "warm"))
        _draw_lines(memory, document, "gamma", V, lambda run: run["peak_bytes"] and run["peak_bytes"] / 2**20)
        _draw_lines(share, document, "batch", V, lambda run: share_of_copy(run, bandwidth))
        for panel, named in ((time, "γ (B = 1)"), (memory, "γ (B = 1)"), (share, f"B (γ = {_gamma(document)})")):
            panel.set_xlabel(named, fontsize=8)
            panel.tick_params(labelsize=8)
            for side in ("top", "right"):
                panel.spines[side].set_visible(False)
        time.set_yscale("log")
        if memory.lines:
            memory.set_yscale("log")
        else:
            memory.text(0.5, 0.5, "not told by this device", transform=memory.transAxes, ha="center", fontsize=8)
        share.set_xscale("log", base=2)
        share.axhline(1.0, color="#333333", linewidth=0.8, linestyle=":")
    for row, named in enumerate(("µs, warm caches", "peak memory, MiB", "share of the copy bandwidth, cold caches")):
        panels[row][0].set_ylabel(named, fontsize=8)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", ncol=5, frameon=False, fontsize=8)
    device = document["settings"]["device"]["name"]
    figure.text(0.5, 0.01, f"{device}; path {document['settings']['path']}", ha="center", fontsize=7, color="#555555")
    figure.tight_layout(rect=(0, 0.03, 1, 0.95))
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _draw_lines(panel: Axes, document: Json, part: str, V: int, value: Callable[[Json], float | None]) -> None:
    along = "gamma" if part == "gamma" else "B"
    for name, label in LABELS.items():
        points = [(run[along], value(run)) for run in select(document, part=part, contender=name, V=V)]
        known = sorted((x, y) for x, y in points if y is not None)
        if known:
            panel.plot(*zip(*known, strict=True), marker="o", markersize=3, label=label, color=_COLOURS[name])


def _gamma(document: Json) -> int:
    return int(document["settings"]["gamma"])
