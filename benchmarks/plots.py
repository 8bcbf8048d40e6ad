"""The pictures of all benchmarks: panels with bars or lines, drawn from a result's JSON document.

python -m benchmarks.plots benchmarks/results/pair.json    draw its picture again, beside it
"""

import importlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")  # no window: it writes a file
from matplotlib import pyplot
from matplotlib.axes import Axes

BLUE, ORANGE, GREY, LIGHT, GREEN, VIOLET, SAND = (
    "#2f6f9f", "#c98a2b", "#5d6776", "#9aa3b0", "#1b9e8f", "#7a5ea8", "#c9c2b4",
)  # fmt: skip
COLOURS = (BLUE, ORANGE, GREY, GREEN, VIOLET, LIGHT, SAND, "#a64d79", "#6aa84f")

Point = tuple[float, float, float] | None
"""A median, the least and the most."""


@contextmanager
def picture(
    path: Path, rows: int, columns: int, *, size: tuple[float, float], note: str = "", sharey: bool = False
) -> Iterator[Any]:
    """Yields a grid of panels, `[rows, columns]`; writes a PNG with one legend."""
    width, height = size[0] * columns, size[1] * rows + 0.7
    figure, panels = pyplot.subplots(
        rows, columns, figsize=(width, height), squeeze=False, sharey="row" if sharey else "none"
    )
    yield panels
    for panel in panels.flat:
        if not panel.has_data():
            panel.set_axis_off()
        for side in ("top", "right"):
            panel.spines[side].set_visible(False)
        panel.tick_params(labelsize=8)
    handles, labels = panels[0][0].get_legend_handles_labels()
    inches = 0.0
    if labels:
        shown = min(len(labels), max(1, int(width / (0.35 + 0.075 * max(map(len, labels))))))
        figure.legend(
            handles, labels, loc="upper center", ncol=shown, frameon=False, fontsize=8,
            bbox_to_anchor=(0.5, 1),
        )  # fmt: skip
        inches = 0.12 + 0.19 * -(-len(labels) // shown)
    if note:
        figure.text(0.5, 0.005, note, ha="center", va="bottom", fontsize=7, color="#555555")
    figure.tight_layout(rect=(0, (0.1 + 0.14 * (note.count("\n") + 1)) / height, 1, 1 - inches / height), h_pad=1.4)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def caption(document: dict[str, Any]) -> str:
    return f"{document['machine']['cpu']}, {document['machine']['cores']} cores"


def bars(
    panel: Axes,
    groups: Sequence[str],
    series: Mapping[str, Sequence[Point]],
    *,
    colours: Mapping[str, str],
    text: str = "",
) -> None:
    """Bars of several series at each group, with their ranges; `text` formats what stands at the foot of each."""
    width = 0.86 / max(1, len(series))
    for nth, (name, points) in enumerate(series.items()):
        at = np.arange(len(groups)) + (nth - (len(series) - 1) / 2) * width
        known = [(x, point) for x, point in zip(at, points, strict=True) if point is not None]
        values = [point[0] for _, point in known]
        errors = [
            [max(0.0, m - low) for m, low, _ in (p for _, p in known)],
            [max(0.0, high - m) for m, _, high in (p for _, p in known)],
        ]
        panel.bar(
            [x for x, _ in known], values, width * 0.92, yerr=errors, label=name, color=colours.get(name, LIGHT),
            error_kw={"elinewidth": 0.8, "ecolor": "#333333"},
        )  # fmt: skip
        for (x, _), value in zip(known, values, strict=True) if text else ():
            foot(panel, x, text.format(value))
    panel.set_xticks(range(len(groups)), list(groups))


def comparison(
    path: Path,
    document: dict[str, Any],
    panels: Mapping[str, Mapping[str, Mapping[str, Any]]],
    *,
    label: str,
    note: str = "",
    text: Callable[[Any], str] | None = None,
    predicted: Callable[[Any], float | None] | None = None,
) -> None:
    """A panel a title, a group of bars a key, a bar an arm: its ratio with its range, around a level at 1.

    `text` stands at the foot of a bar; `predicted` is a mark at its height.
    """
    names = list(dict.fromkeys(name for groups in panels.values() for arms in groups.values() for name in arms))
    colours = dict(zip(names, COLOURS * 2, strict=False))
    columns = min(2, len(panels))
    note = f"{caption(document)}{note}"
    size = (max(4.6, 0.16 * len(names) * max(map(len, panels.values())) + 1.5), 3.7)
    with picture(path, -(-len(panels) // columns), columns, size=size, note=note) as grid:
        for panel, (title, groups) in zip(grid.flat, panels.items(), strict=False):
            series = {
                name: [(arms[name]["ratio"], *arms[name]["ratio_range"]) if name in arms else None
                       for arms in groups.values()]
                for name in names
            }  # fmt: skip
            bars(panel, list(groups), series, colours=colours)
            for nth, arms in enumerate(groups.values()):
                at = {name: nth + (names.index(name) - (len(names) - 1) / 2) * 0.86 / len(names) for name in arms}
                for name, arm in arms.items():
                    if text is not None:
                        foot(panel, at[name], text(arm))
                if predicted is not None:
                    line(
                        panel, [(at[name], predicted(arm)) for name, arm in arms.items()], linestyle="none", marker="D",
                        markersize=5, color="black", markerfacecolor="white", label="predicted" if not nth else None,
                    )  # fmt: skip
            level(panel)
            panel.set_title(title, fontsize=10)
            panel.set_ylabel(label)


def foot(panel: Axes, x: float, text: str) -> None:
    """White letters at the foot of a bar."""
    panel.annotate(
        text, (x, panel.get_ylim()[0]), (0, 4), textcoords="offset points", ha="center", fontsize=6.5, color="white",
        rotation=90 if len(text) > 4 else 0,
    )  # fmt: skip


def line(panel: Axes, points: Sequence[tuple[float, float | None]], **how: Any) -> None:
    known = [(x, y) for x, y in points if y is not None]
    if known:
        panel.plot([x for x, _ in known], [y for _, y in known], **({"markersize": 4} | how))


def level(panel: Axes, at: float = 1.0, **how: Any) -> None:
    options: Any = {"color": "#333333", "linewidth": 0.8, "linestyle": ":"} | how
    panel.axhline(at, **options)


def powers_of_two(panel: Axes, levels: Sequence[float]) -> None:
    """An axis of streams or sequences, ticked where something was measured."""
    panel.set_xscale("log", base=2)
    panel.set_xticks(levels, [f"{each:g}" for each in levels])
    panel.minorticks_off()


def main() -> int:
    for name in sys.argv[1:]:
        path = Path(name)
        document = json.loads(path.read_text(encoding="utf-8"))
        importlib.import_module(f"benchmarks.{document['benchmark']}").draw(document, path.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
