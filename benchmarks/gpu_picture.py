"""The figures of `benchmarks.gpu` as one picture, a panel a part."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no window: it writes files
from matplotlib import pyplot
from matplotlib.axes import Axes

from benchmarks import gpu_alone, kernel_picture
from benchmarks.gpu_report import figures_of

_BLUE, _ORANGE, _GREY, _GREEN = "#2f6f9f", "#c98a2b", "#5d6776", "#6a9f58"
_COLOURS = (_BLUE, "#8fb6d3", _GREY, _ORANGE)

Json = dict[str, Any]


def draw(document: Json, stem: Path) -> list[Path]:
    """Writes `STEM.png`, and `STEM-kernel.png` where the kernel was measured; returns what was written."""
    figures = figures_of(document)
    shown = [(part, paint) for part, paint in _PAINTERS if part in figures]
    drawn = []
    if shown:
        columns = min(4, len(shown))
        rows = -(-len(shown) // columns)
        figure, panels = pyplot.subplots(rows, columns, figsize=(4.6 * columns, 3.8 * rows), squeeze=False)
        for panel, (part, paint) in zip(panels.flat, shown, strict=False):
            paint(panel, figures[part])
            for side in ("top", "right"):
                panel.spines[side].set_visible(False)
        for panel in panels.flat[len(shown) :]:
            panel.set_axis_off()
        figure.tight_layout(rect=(0, 0.06, 1, 1))
        figure.text(0.5, 0.01, _caption(document), ha="center", fontsize=7, color="#555555", wrap=True)
        if "meaning" in document:
            figure.text(0.5, 0.5, "DRY RUN", ha="center", va="center", fontsize=60, color="#cc0000", alpha=0.25)
        drawn.append(stem.with_suffix(".png"))
        figure.savefig(drawn[-1], dpi=110)
        pyplot.close(figure)
    if "kernel" in figures:
        drawn.append(stem.with_name(f"{stem.name}-kernel.png"))
        kernel_picture.draw(_named(document, figures["kernel"]), drawn[-1])
    return drawn


def _caption(document: Json) -> str:
    told = {
        f"{key['device']['name']}; {', '.join(f'{name} {value}' for name, value in key['versions'].items() if value)}"
        for key in (entry["key"] for entry in document["parts"].values())
    }
    return "\n".join([*([document["meaning"]] if "meaning" in document else []), *sorted(told)])


def _named(document: Json, kernel: Json) -> Json:
    """That part's document, in which a dry run's device says what it is."""
    if "meaning" not in document:
        return kernel
    device = kernel["settings"]["device"]
    named = device | {"name": f"{document['meaning']} {device['name']}"}
    return kernel | {"settings": kernel["settings"] | {"device": named}}


def _alone(panel: Axes, found: Json) -> None:
    """Bars: each contender's share of the bound, a group a shape; dotted is what is aimed at."""
    shapes = {name: row["contenders"] for name, row in found["shapes"].items() if "contenders" in row}
    names = list(dict.fromkeys(name for row in shapes.values() for name in row if "of_bound" in row[name]))
    width = 0.8 / max(1, len(names))
    for place, name in enumerate(names):
        points = [
            (i + (place - (len(names) - 1) / 2) * width, row[name]["of_bound"])
            for i, row in enumerate(shapes.values())
            if "of_bound" in row.get(name, {})
        ]
        colour = _COLOURS[place % len(_COLOURS)]
        panel.bar([at for at, _ in points], [share for _, share in points], width * 0.9, label=name, color=colour)
    for i, name in enumerate(shapes):
        if name in gpu_alone.AIMS:
            panel.plot([i - 0.45, i + 0.45], [gpu_alone.AIMS[name]] * 2, color="black", linewidth=0.8, linestyle=":")
    panel.set_xticks(range(len(shapes)), list(shapes))
    panel.set_ylabel("of the bound by the weights")
    panel.set_title("The target alone, one stream", fontsize=10)
    panel.legend(frameon=False, fontsize=8)


def _pair(panel: Axes, found: Json) -> None:
    """Lines over α: measured, foretold, assisted generation, and the target alone."""
    rows = list(found["alphas"].values())
    panel.plot([r["alpha"] for r in rows], [r["tokens_per_second"] for r in rows], "o-", color=_BLUE, label="the pair")
    panel.plot([r["alpha"] for r in rows], [r["foretold"] for r in rows], "D:", color="black", label="Theorem 3.8")
    theirs = [(r["alpha"], r["assisted"]["tokens_per_second"]) for r in rows if "assisted" in r]
    if theirs:
        panel.plot(*zip(*theirs, strict=True), "s-", color=_ORANGE, label="assisted generation, transformers")
    panel.axhline(found["alone_tokens_per_second"], color=_GREY, linewidth=0.8, linestyle="--", label="target alone")
    panel.set_ylim(bottom=0)
    panel.set_xlabel("α")
    panel.set_ylabel("tokens/s")
    panel.set_title(f"The pair over gRPC at γ = {rows[0]['gamma']}", fontsize=10)
    panel.legend(frameon=False, fontsize=8)


def _rates(panel: Axes, found: Json) -> None:
    """Tokens a second by streams."""
    _by_streams(panel, found, "tokens/s", lambda row: {"": row["tokens_per_second"]})


def _gaps(panel: Axes, found: Json) -> None:
    """Time between pieces by streams."""
    _by_streams(panel, found, "ms between pieces", lambda row: row["itl_piece_ms"] or {})


def _by_streams(panel: Axes, found: Json, label: str, values: Callable[[Json], Json]) -> None:
    levels = [int(level) for level in found["levels"]]
    for name, colour in (("target alone", _GREY), ("the pair", _BLUE)):
        rows = [values(by_name[name]) for by_name in found["levels"].values()]
        for key, line in (("", "-"), ("p50", "-"), ("p99", ":")):
            if any(key in row for row in rows):
                told = f"{name}, {key}" if key else name
                shown = [row.get(key, math.nan) for row in rows]
                panel.plot(levels, shown, f"o{line}", color=colour, label=told)
    panel.set_xscale("log", base=2)
    panel.set_xlabel("streams")
    panel.set_ylabel(label)
    panel.set_ylim(bottom=0)
    panel.set_title("Many streams", fontsize=10)
    panel.legend(frameon=False, fontsize=8)


def _cache(panel: Axes, found: Json) -> None:
    labels = [f"{row['way']}, γ = {row['gamma']}\n{row['placement']}" for row in found["rows"]]
    panel.barh(labels, [row["ratio"] for row in found["rows"]], color=_BLUE, height=0.5)
    panel.axvline(1.0, color="#333333", linewidth=0.8, linestyle=":")
    panel.tick_params(axis="y", labelsize=7)
    panel.set_xlabel("tokens/s, with over without")
    panel.set_title("The outcome cache", fontsize=10)


def _share(panel: Axes, found: Json) -> None:
    batches = list(found["batches"])
    for name, colour, place in (("forward_us", _GREY, 0), ("verify_us", _GREEN, 1)):
        below = [row["forward_us"] if place else 0.0 for row in found["batches"].values()]
        values = [row[name] for row in found["batches"].values()]
        panel.bar(batches, values, 0.5, bottom=below, color=colour, label=name.removesuffix("_us"))
    panel.set_xlabel("sequences")
    panel.set_ylabel("µs of a pass")
    panel.set_title("Verification's share of a pass", fontsize=10)
    panel.legend(frameon=False, fontsize=8)


def _profile(panel: Axes, found: Json) -> None:
    """When the device worked, over a stretch in the middle."""
    width = found["window_ms"] / len(found["window"])
    panel.bar([i * width for i in range(len(found["window"]))], found["window"], width, align="edge", color=_BLUE)
    panel.set_xlim(0, found["window_ms"])
    panel.set_ylim(0, 1)
    panel.set_ylabel("at work")
    panel.set_xlabel("ms")
    panel.set_title(f"{found['streams']} streams: the device works {found['busy_share']:.1%} of the time", fontsize=10)


_PAINTERS: tuple[tuple[str, Callable[[Axes, Json], None]], ...] = (
    ("alone", _alone),
    ("pair", _pair),
    ("streams", _rates),
    ("streams", _gaps),
    ("cache", _cache),
    ("share", _share),
    ("profile", _profile),
)
