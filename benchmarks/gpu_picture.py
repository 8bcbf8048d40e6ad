"""The figures of `benchmarks.gpu` as pictures, one a part. It knows the JSON, and computes nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no window: it writes files
from matplotlib import pyplot
from matplotlib.figure import Figure

from benchmarks import gpu_alone, kernel_picture
from benchmarks.gpu_report import figures_of

_BLUE, _ORANGE, _GREY, _GREEN = "#2f6f9f", "#c98a2b", "#5d6776", "#6a9f58"
_COLOURS = (_BLUE, "#8fb6d3", _GREY, _ORANGE)

Json = dict[str, Any]


def draw(document: Json, stem: Path) -> list[Path]:
    """Writes `STEM-PART.png` of each part that has something to draw, and returns them."""
    figures = figures_of(document)
    drawn = []
    for part, painter in _PAINTERS.items():
        if part not in figures:
            continue
        figure = painter(figures[part])
        if figure is None:
            continue
        path = stem.with_name(f"{stem.name}-{part}.png")
        figure.text(0.5, 0.01, _caption(document, part), ha="center", fontsize=7, color="#555555", wrap=True)
        if "meaning" in document:
            figure.text(0.5, 0.5, "DRY RUN", ha="center", va="center", fontsize=60, color="#cc0000", alpha=0.25)
        figure.savefig(path, dpi=150)
        pyplot.close(figure)
        drawn.append(path)
    if "kernel" in figures:
        drawn.append(stem.with_name(f"{stem.name}-kernel.png"))
        kernel_picture.draw(_named(document, figures["kernel"]), drawn[-1])
    return drawn


def _caption(document: Json, part: str) -> str:
    key = document["parts"][part]["key"]
    versions = ", ".join(f"{name} {value}" for name, value in key["versions"].items() if value)
    told = f"{key['device']['name']}; {versions}"
    return f"{document['meaning']}\n{told}" if "meaning" in document else told


def _named(document: Json, kernel: Json) -> Json:
    """That part's document, in which a dry run's device says what it is."""
    if "meaning" not in document:
        return kernel
    device = kernel["settings"]["device"]
    named = device | {"name": f"{document['meaning']} {device['name']}"}
    return kernel | {"settings": kernel["settings"] | {"device": named}}


def _plain(width: float = 6.4, height: float = 4.2) -> tuple[Figure, Any]:
    figure, panel = pyplot.subplots(figsize=(width, height))
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
    figure.subplots_adjust(bottom=0.2)
    return figure, panel


def _alone(found: Json) -> Figure | None:
    """Bars: each contender's share of the bound, a group a shape."""
    shapes = {name: row["contenders"] for name, row in found["shapes"].items() if "contenders" in row}
    names = list(dict.fromkeys(name for row in shapes.values() for name in row if "of_bound" in row[name]))
    if not names:
        return None
    figure, panel = _plain()
    width = 0.8 / len(names)
    for place, name in enumerate(names):
        points = [
            (i + (place - (len(names) - 1) / 2) * width, row[name]["of_bound"])
            for i, row in enumerate(shapes.values())
            if "of_bound" in row.get(name, {})
        ]
        panel.bar(*zip(*points, strict=True), width * 0.9, label=name, color=_COLOURS[place % len(_COLOURS)])
    for i, name in enumerate(shapes):
        if name in gpu_alone.AIMS:
            panel.plot([i - 0.45, i + 0.45], [gpu_alone.AIMS[name]] * 2, color="black", linewidth=0.8, linestyle=":")
    panel.set_xticks(range(len(shapes)), list(shapes))
    panel.set_ylabel("of the bound by the weights")
    panel.set_title("The target alone, one stream (dotted: what is aimed at)", fontsize=10)
    panel.legend(frameon=False, fontsize=8)
    return figure


def _pair(found: Json) -> Figure:
    """Lines over α: measured, foretold, assisted generation, and the target alone."""
    rows = list(found["alphas"].values())
    figure, panel = _plain()
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
    return figure


def _streams(found: Json) -> Figure:
    """Rates by streams, and the time between pieces beside it."""
    figure, panels = pyplot.subplots(1, 2, figsize=(9.0, 4.2))
    figure.subplots_adjust(bottom=0.22)
    levels = [int(level) for level in found["levels"]]
    for name, colour in (("target alone", _GREY), ("the pair", _BLUE)):
        rows = [by_name[name] for by_name in found["levels"].values()]
        panels[0].plot(levels, [row["tokens_per_second"] for row in rows], "o-", color=colour, label=name)
        for percent, line in (("p50", "-"), ("p99", ":")):
            shown = [(row["itl_piece_ms"] or {}).get(percent) for row in rows]
            panels[1].plot(levels, shown, f"o{line}", color=colour, label=f"{name}, {percent}")
    for panel, label in zip(panels, ("tokens/s", "ms between pieces"), strict=True):
        panel.set_xscale("log", base=2)
        panel.set_xlabel("streams")
        panel.set_ylabel(label)
        panel.set_ylim(bottom=0)
        panel.legend(frameon=False, fontsize=8)
        for side in ("top", "right"):
            panel.spines[side].set_visible(False)
    return figure


def _cache(found: Json) -> Figure | None:
    if not found["rows"]:
        return None
    figure, panel = _plain()
    labels = [f"{row['way']}, γ = {row['gamma']}\n{row['placement']}" for row in found["rows"]]
    panel.barh(labels, [row["ratio"] for row in found["rows"]], color=_BLUE, height=0.5)
    panel.axvline(1.0, color="#333333", linewidth=0.8, linestyle=":")
    panel.tick_params(axis="y", labelsize=7)
    panel.set_xlabel("tokens/s with the outcome cache over without")
    figure.subplots_adjust(left=0.32)
    return figure


def _share(found: Json) -> Figure:
    figure, panel = _plain()
    batches = list(found["batches"])
    for name, colour, place in (("forward_us", _GREY, 0), ("verify_us", _GREEN, 1)):
        below = [row["forward_us"] if place else 0.0 for row in found["batches"].values()]
        values = [row[name] for row in found["batches"].values()]
        panel.bar(batches, values, 0.5, bottom=below, color=colour, label=name.removesuffix("_us"))
    panel.set_xlabel("sequences")
    panel.set_ylabel("µs of a pass")
    panel.legend(frameon=False, fontsize=8)
    return figure


def _profile(found: Json) -> Figure:
    """When the device worked, over a stretch in the middle."""
    figure, panel = _plain(9.0, 2.4)
    width = found["window_ms"] / len(found["window"])
    panel.bar([i * width for i in range(len(found["window"]))], found["window"], width, align="edge", color=_BLUE)
    panel.set_xlim(0, found["window_ms"])
    panel.set_ylim(0, 1)
    panel.set_ylabel("at work")
    panel.set_xlabel("ms")
    panel.set_title(f"{found['streams']} streams: the device works {found['busy_share']:.1%} of the time", fontsize=10)
    figure.subplots_adjust(bottom=0.38)
    return figure


_PAINTERS: dict[str, Callable[[Json], Figure | None]] = {
    "alone": _alone,
    "pair": _pair,
    "streams": _streams,
    "cache": _cache,
    "share": _share,
    "profile": _profile,
}
