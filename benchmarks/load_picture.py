"""The figures of load as pictures: one for each pair and loop, a row for each mix of prompts. It computes nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no window: it writes a file
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullFormatter

from benchmarks.load_summary import ALONE, BATCHING, CLOSED, CONTENDERS, LABELS, PAIR, STATIC
from benchmarks.load_tables import machine_line

Json = dict[str, Any]
Figure = Callable[[Json], float | None]

_COLOURS = {BATCHING: "#c98a2b", STATIC: "#c9c2b4", ALONE: "#5d6776", PAIR: "#2f6f9f"}
_MARKERS = {BATCHING: "s", STATIC: "v", ALONE: "^", PAIR: "o"}


def _time(name: str, percent: str) -> Figure:
    return lambda found: None if found[name] is None else found[name][percent]


# Title, the figure of the line, and of the dotted line above it where there is one.
_PANELS: dict[str, list[tuple[str, Figure, Figure | None]]] = {
    CLOSED: [
        ("tokens/s, all streams", lambda found: found["tokens_per_second"], None),
        ("time to first token, ms\np50, dotted p95", _time("ttft_ms", "p50"), _time("ttft_ms", "p95")),
        ("time per output token, ms\np50, dotted p95", _time("tpot_ms", "p50"), _time("tpot_ms", "p95")),
        ("between pieces of text, ms\np50, dotted p99", _time("itl_piece_ms", "p50"), _time("itl_piece_ms", "p99")),
    ],
    "open": [
        ("tokens/s, served", lambda found: found["tokens_per_second"], None),
        ("time to first token, ms\np50, dotted p95", _time("ttft_ms", "p50"), _time("ttft_ms", "p95")),
        ("time per output token, ms\np50, dotted p95", _time("tpot_ms", "p50"), _time("tpot_ms", "p95")),
        ("refused, share of requests", lambda found: found["refused"] / found["requests"], None),
    ],
}


def draw(document: Json, stem: Path) -> list[Path]:
    """Writes one PNG for each pair and loop; returns where they lie."""
    written = []
    for pair, by_mode in document["summary"].items():
        for mode, by_mix in by_mode.items():
            path = stem.with_name(f"{stem.name}-{pair}-{mode}.png")
            _draw(document, pair, mode, by_mix, path)
            written.append(path)
    return written


def _draw(document: Json, pair: str, mode: str, by_mix: Json, path: Path) -> None:
    panels = _PANELS[mode]
    figure, grid = pyplot.subplots(
        len(by_mix), len(panels), figsize=(3.7 * len(panels), 3.3 * len(by_mix) + 1.3), squeeze=False
    )
    for row, (mix, by_level) in zip(grid, by_mix.items(), strict=True):
        for axes, (title, main, dotted) in zip(row, panels, strict=True):
            _draw_panel(axes, mode, by_level, main, dotted)
            if dotted is None:
                axes.set_ylim(bottom=0)
            else:  # times differ by orders of magnitude
                axes.set_yscale("log")
                axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
                axes.yaxis.set_minor_formatter(NullFormatter())
            axes.set_title(title, fontsize=9)
        row[0].set_ylabel(f"{mix} prompts", fontsize=10)
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", ncol=2, frameon=False, fontsize=9, bbox_to_anchor=(0.5, 0.97))
    layers = document["models"][pair]["target_layers"]
    figure.suptitle(f"{pair} pair, target of {layers} layers, {mode} loop", fontsize=11, y=0.995)
    missing = [
        f"not there: {LABELS[name]} ({reason})"
        for name, reason in document.get("unavailable", {}).get(pair, {}).items()
    ]
    note = "\n".join([*missing, machine_line(document)])
    figure.text(0.5, 0.005, note, ha="center", va="bottom", fontsize=7, color="#a03030" if missing else "#555555")
    height = figure.get_size_inches()[1]
    figure.tight_layout(rect=(0, 0.25 * (1 + len(missing)) / height, 1, 1 - 0.68 / height))
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _draw_panel(axes: Axes, mode: str, by_level: Json, main: Figure, dotted: Figure | None) -> None:
    for name in CONTENDERS:
        points = [(float(level), cell[name]) for level, cell in by_level.items() if name in cell]
        for figure_of, style, label in ((main, "-", LABELS[name]), (dotted, ":", None)):
            if figure_of is None:
                continue
            found = [(x, y) for x, cell in points if (y := figure_of(cell)) is not None]
            if found:
                axes.plot(
                    [x for x, _ in found], [y for _, y in found], linestyle=style, label=label, color=_COLOURS[name],
                    marker=_MARKERS[name] if label else None, markersize=4.5, linewidth=1.6 if label else 1.1,
                )  # fmt: skip
    levels = [float(level) for level in by_level]
    if mode == CLOSED:
        axes.set_xscale("log", base=2)
    axes.set_xticks(levels, [f"{level:g}" for level in levels])
    axes.minorticks_off()
    axes.set_xlabel("streams" if mode == CLOSED else "arrivals, share of capacity", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.6)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
