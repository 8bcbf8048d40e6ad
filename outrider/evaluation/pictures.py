"""Pictures: a grid of panels with bars or lines, as a PNG or SVG file, or as SVG for a page."""

import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

BLUE, ORANGE, GREY, LIGHT, GREEN, VIOLET, SAND = (
    "#2f6f9f", "#c98a2b", "#5d6776", "#9aa3b0", "#1b9e8f", "#7a5ea8", "#c9c2b4",
)  # fmt: skip
COLOURS = (BLUE, ORANGE, GREY, GREEN, VIOLET, LIGHT, SAND, "#a64d79", "#6aa84f")

Destination = Path | io.StringIO
"""A file, whose suffix gives the format, or text, which becomes SVG."""

Point = tuple[float, float, float] | None
"""A median, the least and the most."""

# One salt: the same picture has the same ids. Letters stay text, which is smaller, and can be searched.
_SVG: Any = {
    "svg.hashsalt": "outrider",
    "svg.fonttype": "none",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "sans-serif"],
}


@contextmanager
def picture(
    destination: Destination,
    rows: int,
    columns: int,
    *,
    size: tuple[float, float],
    note: str = "",
    sharey: bool = False,
) -> Iterator[Any]:
    """Yields a grid of panels, `[rows, columns]`; writes it with one legend, that of the first panel, above.

    A legend that the first panel has stays where it is. `size` is the width and height of a panel in inches; `note`
    stands below.
    """
    width, height = size[0] * columns, size[1] * rows + 0.7
    figure = Figure(figsize=(width, height))
    panels = figure.subplots(rows, columns, squeeze=False, sharey="row" if sharey else "none")
    yield panels
    for panel in panels.flat:
        if not panel.has_data():
            panel.set_axis_off()
        for side in ("top", "right"):
            panel.spines[side].set_visible(False)
        panel.tick_params(labelsize=8)
    handles, labels = panels[0][0].get_legend_handles_labels()
    inches = 0.0
    if labels and panels[0][0].get_legend() is None:
        shown = min(len(labels), max(1, int(width / (0.35 + 0.075 * max(map(len, labels))))))
        figure.legend(
            handles, labels, loc="upper center", ncol=shown, frameon=False, fontsize=8,
            bbox_to_anchor=(0.5, 1),
        )  # fmt: skip
        inches = 0.12 + 0.19 * -(-len(labels) // shown)
    if note:
        figure.text(0.5, 0.005, note, ha="center", va="bottom", fontsize=7, color="#555555")
    figure.tight_layout(rect=(0, (0.1 + 0.14 * (note.count("\n") + 1)) / height, 1, 1 - inches / height), h_pad=1.4)
    if isinstance(destination, Path) and destination.suffix != ".svg":
        figure.savefig(destination, dpi=130)
        return
    with matplotlib.rc_context(_SVG):
        figure.savefig(destination, format="svg", metadata={"Date": None})


def svg(draw: Callable[[io.StringIO], None]) -> str:
    """Returns the picture of `draw` as one `<svg>` element, to be part of a page."""
    text = io.StringIO()
    draw(text)
    whole = text.getvalue()
    return whole[whole.index("<svg") :]


def bars(
    panel: Axes,
    groups: Sequence[str],
    series: Mapping[str, Sequence[Point]],
    *,
    colours: Mapping[str, str],
    text: str = "",
) -> None:
    """Draws bars of several series at each group, with their ranges; `text` formats the label at the foot of each."""
    width = 0.86 / max(1, len(series))
    for nth, (name, points) in enumerate(series.items()):
        offset = (nth - (len(series) - 1) / 2) * width
        known = [(group + offset, point) for group, point in enumerate(points) if point is not None]
        known = known or [(0.0, (math.nan,) * 3)]  # the legend shows the colour of a bar
        values = [point[0] for _, point in known]
        errors = [
            [max(0.0, m - low) for m, low, _ in (p for _, p in known)],
            [max(0.0, high - m) for m, _, high in (p for _, p in known)],
        ]
        panel.bar(
            [x for x, _ in known], values, width * 0.92, yerr=errors, label=name, color=colours.get(name, LIGHT),
            error_kw={"elinewidth": 0.8, "ecolor": "#333333"},
        )  # fmt: skip
        for (x, _), value in zip(known, values, strict=True) if text and not math.isnan(values[0]) else ():
            foot(panel, x, text.format(value))
    panel.set_xticks(range(len(groups)), list(groups))


def stacked(
    panel: Axes, names: Sequence[str], rounds: Sequence[Mapping[str, float]], labels: Mapping[str, str]
) -> list[float]:
    """Draws the parts of a mean round, in microseconds, end to end; returns the sums in milliseconds."""
    left = [0.0] * len(rounds)
    for part, colour in zip(labels, (ORANGE, SAND, LIGHT, BLUE, GREEN, GREY), strict=True):
        values = [each[part] / 1e3 for each in rounds]
        panel.barh(range(len(rounds)), values, left=left, height=0.6, color=colour, label=labels[part])
        left = [before + value for before, value in zip(left, values, strict=True)]
    panel.set_yticks(range(len(rounds)), list(names))
    panel.invert_yaxis()
    panel.set_xlabel("ms of a round", fontsize=8)
    return left


def foot(panel: Axes, x: float, text: str) -> None:
    """Writes white letters at the foot of a bar, with an outline: a low bar does not hold them."""
    panel.annotate(
        text, (x, panel.get_ylim()[0]), (0, 4), textcoords="offset points", ha="center", fontsize=6.5, color="white",
        rotation=90 if len(text) > 4 else 0, path_effects=[withStroke(linewidth=1.8, foreground="#333333")],
    )  # fmt: skip


def line(panel: Axes, points: Sequence[tuple[float, float | None]], **how: Any) -> None:
    """Draws a line through the points that are known; `how` is as in `Axes.plot`."""
    known = [(x, y) for x, y in points if y is not None]
    if known:
        panel.plot([x for x, _ in known], [y for _, y in known], **({"markersize": 4} | how))


def level(panel: Axes, at: float = 1.0, **how: Any) -> None:
    """Draws a dotted horizontal line."""
    options: Any = {"color": "#333333", "linewidth": 0.8, "linestyle": ":"} | how
    panel.axhline(at, **options)
