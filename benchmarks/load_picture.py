"""The figures of load as pictures: one for each pair and loop, two rows for each mix. It computes nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no window: it writes a file
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from benchmarks.load_summary import ALONE, BATCHING, CLOSED, CONTENDERS, LABELS, LEVELS, OPEN, PAIR, SHORT, STATIC
from benchmarks.load_tables import machine_line

Json = dict[str, Any]
Figure = Callable[[Json], float | None]

_COLOURS = {BATCHING: "#c98a2b", STATIC: "#c9c2b4", ALONE: "#5d6776", PAIR: "#2f6f9f"}
_MISSED = "#c03030"
_MARKERS = {BATCHING: "s", STATIC: "v", ALONE: "^", PAIR: "o"}


def _time(name: str, percent: str) -> Figure:
    return lambda found: None if found[name] is None else found[name][percent]


@dataclass(frozen=True, slots=True)
class _Panel:
    """A title, the figure of the line, and of the dotted line above it where there is one."""

    title: str
    line: Figure
    dotted: Figure | None = None
    scale: str = "linear"  # or "log", or "share": from 0 to 1


def _times(title: str, name: str, low: str = "p50", high: str = "p95") -> _Panel:
    return _Panel(f"{title}, ms\n{low}, dotted {high}", _time(name, low), _time(name, high), "log")


def _plain(name: str) -> Figure:
    return lambda found: found[name]


_RATIO = _Panel(
    "the pair over the better of the two references", lambda found: found["ratio"] if "aim" in found else None
)
_SPECULATION = [
    _Panel("γ: drafted tokens a round", _plain("gamma")),
    _Panel("acceptance α\ndotted: share of rounds by Decode", _plain("alpha"), _plain("decode_share"), "share"),
]
_PANELS: dict[str, list[_Panel]] = {
    CLOSED: [
        _Panel("tokens/s, all streams", _plain("tokens_per_second")),
        _RATIO,
        _times("time to first token", "ttft_ms"),
        _times("time per output token", "tpot_ms"),
        _times("between pieces of text", "itl_piece_ms", high="p99"),
        *_SPECULATION,
        _Panel("KV use, share of blocks", _plain("kv_usage"), None, "share"),
    ],
    OPEN: [
        _Panel("tokens/s, served", _plain("tokens_per_second")),
        _RATIO,
        _times("time to first token", "ttft_ms"),
        _times("time per output token", "tpot_ms"),
        _times("between pieces of text", "itl_piece_ms", high="p99"),
        *_SPECULATION,
        _Panel("refused, share of requests", lambda found: found["refused"] / found["requests"], None, "share"),
    ],
}
_PANELS[SHORT] = _PANELS[CLOSED]
_COLUMNS = 4


def draw(document: Json, stem: Path) -> list[Path]:
    """Writes one PNG for each pair and loop; returns where they lie."""
    written = []
    for pair, by_mode in document["summary"].items():
        for mode, by_mix in by_mode.items():
            path = stem.with_name(f"{stem.name.removesuffix(f'-{pair}')}-{pair}-{mode}.png")
            _draw(document, pair, mode, by_mix, path)
            written.append(path)
    return written


def _draw(document: Json, pair: str, mode: str, by_mix: Json, path: Path) -> None:
    panels = _PANELS[mode]
    rows = len(panels) // _COLUMNS
    figure, grid = pyplot.subplots(
        rows * len(by_mix), _COLUMNS, figsize=(3.7 * _COLUMNS, 3.1 * rows * len(by_mix) + 1.2), squeeze=False
    )
    for number, (mix, by_level) in enumerate(by_mix.items()):
        some = grid[number * rows : (number + 1) * rows]
        for axes, panel in zip(some.flat, panels, strict=True):
            _draw_panel(axes, mode, by_level, panel)
        for axes in some[:, 0]:
            axes.set_ylabel(f"{mix} prompts", fontsize=10)
    handles, labels = grid[0][0].get_legend_handles_labels()
    height = figure.get_size_inches()[1]
    layers = document["models"][pair]["target_layers"]
    figure.suptitle(f"{pair} pair, target of {layers} layers, {mode}", fontsize=11, y=1 - 0.08 / height)
    below = 1 - 0.3 / height
    figure.legend(handles, labels, loc="upper center", ncol=2, frameon=False, fontsize=9, bbox_to_anchor=(0.5, below))
    missing = [
        f"not there: {LABELS[name]} ({reason})"
        for name, reason in document.get("unavailable", {}).get(pair, {}).items()
    ]
    note = "\n".join([*missing, machine_line(document)])
    figure.text(0.5, 0.005, note, ha="center", va="bottom", fontsize=7, color="#a03030" if missing else "#555555")
    figure.tight_layout(rect=(0, 0.25 * (1 + len(missing)) / height, 1, 1 - 0.75 / height), h_pad=1.6)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _draw_panel(axes: Axes, mode: str, by_level: Json, panel: _Panel) -> None:
    for name in CONTENDERS:
        points = [(float(level), cell[name]) for level, cell in by_level.items() if name in cell]
        for figure_of, style, label in ((panel.line, "-", LABELS[name]), (panel.dotted, ":", None)):
            if figure_of is None:
                continue
            found = [(x, y) for x, cell in points if (y := figure_of(cell)) is not None]
            if found:
                axes.plot(
                    [x for x, _ in found], [y for _, y in found], linestyle=style, label=label, color=_COLOURS[name],
                    marker=_MARKERS[name] if label else None, markersize=4.5, linewidth=1.6 if label else 1.1,
                )  # fmt: skip
    levels = [float(level) for level in by_level]
    if panel is _RATIO:
        _draw_aim(axes, by_level)
    if mode != OPEN:
        axes.set_xscale("log", base=2)
    axes.set_xticks(levels, [f"{level:g}" for level in levels])
    axes.minorticks_off()
    if panel.scale == "log":  # times differ by orders of magnitude
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_ylim(0, 1.03 if panel.scale == "share" else 1.05 * axes.get_ylim()[1])
    axes.set_title(panel.title, fontsize=9)
    axes.set_xlabel(LEVELS[mode], fontsize=8)
    axes.tick_params(labelsize=8)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.6)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _draw_aim(axes: Axes, by_level: Json) -> None:
    """What the pair is to reach at each level, and a cross where it does not."""
    found = [(float(level), cell[PAIR]) for level, cell in by_level.items() if PAIR in cell]
    axes.plot([x for x, _ in found], [cell["aim"] for _, cell in found], color="#888888", linestyle="--", linewidth=1.0)
    behind = [(x, cell["ratio"]) for x, cell in found if cell["missed"]]
    axes.plot([x for x, _ in behind], [y for _, y in behind], "x", color=_MISSED, markersize=10, markeredgewidth=2)
    axes.annotate(
        "dashed: the aim; crosses: missed", (0.02, 0.03), xycoords="axes fraction", fontsize=7, color="#666666"
    )
