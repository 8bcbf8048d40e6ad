"""The figures of `benchmarks.gpu`: the aims, a page of tables, and a picture with a panel for each part."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from benchmarks import kernel, plots
from benchmarks.gpu_bench import PARTS
from benchmarks.gpu_device import EAGER, GRAPHS
from benchmarks.gpu_pair import ALONE, PAIR
from benchmarks.harness import Json, number
from benchmarks.harness import table as _table
from outrider.theory import tokens_per_second

DRY_RUN = "A dry run with tiny models on a CPU: it shows that the benchmark works. None of its figures means anything."
ONE_DEVICE = (
    "Draft and target share one GPU, which runs one process at a time: on a GPU each, many streams would be faster."
)
OF_BOUND = {"1B": 0.5, "8B": 0.7, "13B": 0.8}
"""Aims: of the bound by the weights, for Outrider as it serves."""


def summarise(document: Json) -> Json:
    """What was aimed at and what was found, by its worst case; no aim holds or fails in a dry run."""
    if "meaning" in document:
        return {"aims": [], "meaning": document["meaning"]}
    figures = figures_of(document)
    shapes = figures.get("alone", {}).get("shapes", {})
    pairs = figures.get("pair", {}).get("alphas", {}).values()
    cached = [row["ratio"] for row in figures.get("cache", {}).get("rows", []) if row["drafting_counts"]]
    at_work = [figures.get("profile", {}).get("busy_share")]
    aims = [
        *(
            kernel.aim(
                f"{name} alone, {least:g} of the bound by its weights", [_served(shapes.get(name, {}))], least=least
            )
            for name, least in OF_BOUND.items()
        ),
        kernel.aim("the pair, 0.9 of Theorem 3.8", [row["of_foretold"] for row in pairs], least=0.9),
        kernel.aim("the outcome cache, 1.25 where γ·t_q is half of t_p or more", cached, least=1.25),
        kernel.aim("the device at work, 0.9 of the time", at_work, least=0.9),
        *figures.get("kernel", {}).get("aims", []),
    ]
    return {"aims": aims, "pair_of_bare_passes": _of_bare_passes(figures)}


def figures_of(document: Json) -> Json:
    """The figures of the parts that have any."""
    return {name: entry["figures"] for name, entry in document["parts"].items() if "figures" in entry}


def _served(row: Json) -> float | None:
    """Of the bound, what Outrider reaches as it serves: with graphs where there are any."""
    shares = [row.get("contenders", {}).get(name, {}).get("of_bound") for name in (GRAPHS, EAGER)]
    return next((share for share in shares if share is not None), None)


def _of_bare_passes(figures: Json) -> Json:
    """The pair's rates over what the theorem makes of bare passes of its models, with no network at all; by α."""
    shapes = figures.get("alone", {}).get("shapes", {})
    draft, target = (shapes.get(name, {}).get("pass_seconds", {}) for name in ("1B", "8B"))
    found: Json = {}
    for alpha, row in figures.get("pair", {}).get("alphas", {}).items():
        width = str(row["gamma"] + 1)
        if "1" in draft and width in target:
            bare = tokens_per_second(row["found_alpha"], row["gamma"], draft["1"], target[width], 0.0)
            found[alpha] = row["tokens_per_second"] / bare
    return found


# ------------------------------------------------------------------------------------------------------------- tables


def table(document: Json) -> str:
    """Everything, in Markdown."""
    figures = figures_of(document)
    parts = [
        "# Outrider on a GPU\n",
        f"**{document['meaning']}**\n" if "meaning" in document else "",
        _places(document),
    ]
    if document["summary"]["aims"]:
        parts.append(f"## Which aims hold\n\n{kernel.aims_list(document['summary']['aims'])}\n")
    for name, tabled in _TABLES.items():
        if name in figures:
            parts.append(tabled(figures[name]))
    bare = document["summary"].get("pair_of_bare_passes", {})
    parts.append(_table(["α", "of Theorem 3.8 by bare passes"], [[alpha, number(of)] for alpha, of in bare.items()]))
    troubles = [
        [PARTS[name], line]
        for name, entry in document["parts"].items()
        for line in [*([entry["error"]] if "error" in entry else []), *entry["troubles"]]
    ]
    parts.append(_table(["part", ""], troubles, "What went wrong"))
    return "\n".join(part for part in parts if part)


def _places(document: Json) -> str:
    """The device and the versions of each part: parts of one file may have been measured at different times."""
    keys: dict[str, list[str]] = {}
    for name, entry in document["parts"].items():
        key = entry["key"]
        told = ", ".join(f"{each} {value}" for each, value in (key["device"] | key["versions"]).items() if value)
        keys.setdefault(told, []).append(PARTS[name])
    return "\n".join([*(f"{told} ({', '.join(names)})." for told, names in keys.items()), f"`{document['command']}`\n"])


def _memcheck(found: Json) -> str:
    if "error" in found:
        return f"## Memory accesses\n\nNot checked: {found['error']}.\n"
    tool = f"under `{found['tool']}`" if found["tool"] else "compute-sanitizer did not watch"
    outcome = f"exit code {found['exit_code']}" if found["exit_code"] else "no error"
    return f"## Memory accesses\n\nEvery kernel once, {tool}: {outcome}.\n"


def _rows(rows: Iterable[Json]) -> Callable[[str], str]:
    """A table of flat objects, by its title: their numbers and words as they are named in the JSON document."""

    def cell(value: Any) -> str:
        if isinstance(value, float):
            return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
        return "–" if value is None else str(value)

    listed = [{key: value for key, value in row.items() if not isinstance(value, dict | list)} for row in rows]
    head = list(dict.fromkeys(key for row in listed for key in row))
    return lambda title: _table(head, [[cell(row.get(key)) for key in head] for row in listed], title)


def _flat(row: Json) -> Json:
    """The same with the entries of inner objects as its own, named after both."""
    inner = {f"{key} {name}": value for key, own in row.items() if isinstance(own, dict) for name, value in own.items()}
    return row | inner


_TABLES: dict[str, Callable[[Json], str]] = {
    "choices": lambda found: _rows(found["rows"])("What runs here, and why"),
    "tests": lambda found: _rows({"group": name, **row} for name, row in found["groups"].items())(
        "The tests marked gpu" + (", collected and not run" if found["collected_only"] else "")
    ),
    "memcheck": _memcheck,
    "device": lambda found: _rows([found])("The device itself"),
    "alone": lambda found: _rows(
        {"shape": name, "contender": contender, "bound": row.get("bound_tokens_per_second"), **each}
        for name, row in found["shapes"].items()
        for contender, each in row.get("contenders", {}).items()
    )("The target alone, one stream; the bound is that by its weights"),
    "pair": lambda found: _rows(map(_flat, found["alphas"].values()))(
        f"The pair over gRPC; the target alone {found['alone_tokens_per_second']:.1f} tokens/s"
    ),
    "streams": lambda found: _rows(
        _flat({"streams": level, "contender": name, **row})
        for level, by_name in found["levels"].items()
        for name, row in by_name.items()
    )(f"Many streams. {ONE_DEVICE}"),
    "cache": lambda found: _rows(found["rows"])("The outcome cache, demo pair, deepened target"),
    "share": lambda found: _rows(_flat({"sequences": batch, **row}) for batch, row in found["batches"].items())(
        "Verification's share of a pass"
    ),
    "profile": lambda found: _rows([found])("A saturated verifier: the share of the time that the device works"),
    "kernel": kernel.table,
}


# ------------------------------------------------------------------------------------------------------------ picture


def draw(document: Json, path: Path) -> list[Path]:
    """Writes the picture, and `STEM-kernel.png` where the kernel was measured; returns what was written."""
    figures = figures_of(document)
    shown = [(part, paint) for part, paint in _PAINTERS if part in figures]
    drawn = []
    if shown:
        columns = min(4, len(shown))
        devices = {entry["key"]["device"]["name"] for entry in document["parts"].values()}
        note = "\n".join([*([document["meaning"]] if "meaning" in document else []), ", ".join(sorted(devices))])
        drawn.append(path)
        with plots.picture(path, -(-len(shown) // columns), columns, note=note, shared_legend=False) as panels:
            for panel, (part, paint) in zip(panels.flat, shown, strict=False):
                paint(panel, figures[part])
                if "meaning" in document:
                    panel.set_facecolor("#fbeeee")
    if "kernel" in figures:
        drawn.append(path.with_name(f"{path.stem}-kernel.png"))
        device = figures["kernel"]["device"]
        named = device | {"name": f"{document.get('meaning', '')} {device['name']}"}
        kernel.draw(figures["kernel"] | {"device": named}, drawn[-1])
    return drawn


def _points(values: Iterable[float | None]) -> list[plots.Point]:
    return [None if value is None else (value, value, value) for value in values]


def _draw_alone(panel: Axes, found: Json) -> None:
    """Each contender's share of the bound, a group a shape; dotted is what is aimed at."""
    shapes = {name: row["contenders"] for name, row in found["shapes"].items() if "contenders" in row}
    names = list(dict.fromkeys(name for row in shapes.values() for name in row if "of_bound" in row[name]))
    series = {name: _points(row.get(name, {}).get("of_bound") for row in shapes.values()) for name in names}
    plots.bars(panel, list(shapes), series, colours=dict(zip(names, plots.COLOURS, strict=False)))
    for nth, name in enumerate(shapes):
        if name in OF_BOUND:
            panel.plot([nth - 0.45, nth + 0.45], [OF_BOUND[name]] * 2, color="black", linewidth=0.8, linestyle=":")
    panel.set_title("The target alone, one stream: of the bound by the weights", fontsize=9)


def _draw_pair(panel: Axes, found: Json) -> None:
    rows = list(found["alphas"].values())
    for key, label, how in (
        ("tokens_per_second", "the pair", {"color": plots.BLUE, "marker": "o"}),
        ("foretold", "Theorem 3.8", {"color": "black", "marker": "D", "linestyle": ":"}),
    ):
        plots.line(panel, [(row["alpha"], row[key]) for row in rows], label=label, **how)
    theirs = [(row["alpha"], row["assisted"]["tokens_per_second"]) for row in rows if "assisted" in row]
    plots.line(panel, theirs, marker="s", color=plots.ORANGE, label="assisted generation")
    plots.level(panel, found["alone_tokens_per_second"], color=plots.GREY, linestyle="--", label="target alone")
    panel.set_ylim(bottom=0)
    panel.set_xlabel("α", fontsize=8)
    panel.set_title(f"The pair over gRPC at γ = {rows[0]['gamma']}, tokens/s", fontsize=9)


def _by_streams(key: str, percents: Sequence[str], title: str) -> Callable[[Axes, Json], None]:
    def paint(panel: Axes, found: Json) -> None:
        for name, colour in ((ALONE, plots.GREY), (PAIR, plots.BLUE)):
            for percent, style in zip(percents, ("-", ":"), strict=False):
                values = [(float(n), cell[name][key]) for n, cell in found["levels"].items()]
                points = [(n, (value or {}).get(percent, math.nan) if percent else value) for n, value in values]
                plots.line(panel, points, marker="o", linestyle=style, color=colour, label=f"{name} {percent}".strip())
        plots.powers_of_two(panel, [float(n) for n in found["levels"]])
        panel.set_ylim(bottom=0)
        panel.set_xlabel("streams", fontsize=8)
        panel.set_title(title, fontsize=9)

    return paint


_PAINTERS: tuple[tuple[str, Callable[[Axes, Any], None]], ...] = (
    ("alone", _draw_alone),
    ("pair", _draw_pair),
    ("streams", _by_streams("tokens_per_second", ("",), "Many streams, tokens/s")),
    ("streams", _by_streams("itl_piece_ms", ("p50", "p99"), "Many streams, ms between pieces")),
)
