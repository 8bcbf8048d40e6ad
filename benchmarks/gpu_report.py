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
    """What was aimed at and what was found, by its worst case; nothing is judged in a dry run."""
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


def _choices(found: Json) -> str:
    rows = [
        [row["shape"], row["dtype"], row["error"], "", ""]
        if "error" in row
        else [
            row["shape"],
            row["dtype"],
            f"`{row['attention']}`, blocks of {row['block_tokens']}: {row['attention_why']}",
            f"`{row['layers']}`: {row['layers_why']}",
            row["graphs"],
        ]
        for row in found["rows"]
    ]
    return _table(["shape", "dtype", "attention", "layers", "graphs"], rows, "What runs here, and why")


def _tests(found: Json) -> str:
    rows = [
        [name, row["outcome"], number(row["seconds"], 0), "failed" if row["exit_code"] else "passed"]
        for name, row in found["groups"].items()
    ]
    collected = ", collected and not run" if found["collected_only"] else ""
    return _table(["group", "", "s", ""], rows, f"The tests marked gpu{collected}")


def _memcheck(found: Json) -> str:
    if "error" in found:
        return f"## Memory accesses\n\nNot checked: {found['error']}.\n"
    tool = f"under `{found['tool']}`" if found["tool"] else "compute-sanitizer did not watch"
    outcome = f"exit code {found['exit_code']}" if found["exit_code"] else "no error"
    return f"## Memory accesses\n\nEvery kernel once, {tool}: {outcome}.\n"


def _device(found: Json) -> str:
    return (
        f"## The device itself\n\nA copy moves {found['copy_bytes_per_second'] / 1e9:.1f} GB/s, read and written bytes "
        f"together; a product of {found['matrix']}³ in bfloat16 runs at {found['matrix_flops'] / 1e12:.2f} Tflop/s.\n"
    )


def _alone(found: Json) -> str:
    rows = [
        [
            name,
            contender,
            number(each.get("tokens_per_second"), 1),
            number(row.get("bound_tokens_per_second"), 1),
            number(each.get("of_bound")),
            number(OF_BOUND.get(name)) if contender in (GRAPHS, EAGER) else "",
            each.get("error", ""),
        ]
        for name, row in found["shapes"].items()
        for contender, each in row.get("contenders", {}).items()
    ]
    head = ["shape", "", "tokens/s", "bound by the weights, tokens/s", "of it", "aim", ""]
    return _table(head, rows, "The target alone, one stream")


def _pair(found: Json) -> str:
    rows = [
        [
            alpha,
            number(row["found_alpha"], 3),
            number(row["tokens_per_second"], 1),
            number(row["foretold"], 1),
            number(row["of_foretold"]),
            number(row["speed_up"]),
            *(number(1e6 * row["seconds"][name], 0) for name in ("draft_step", "verify_pass", "round_trip")),
            number(row.get("assisted", {}).get("tokens_per_second"), 1),
            number(row.get("assisted", {}).get("found_alpha"), 3),
        ]
        for alpha, row in found["alphas"].items()
    ]
    gamma = next((row["gamma"] for row in found["alphas"].values()), 0)
    head = [
        "α planted", "found", "tokens/s", "Thm 3.8", "of it", "over the target alone", "t_q, µs", "t_p(γ+1), µs",
        "R, µs", "assisted generation, tokens/s", "its α",
    ]  # fmt: skip
    alone = f"the target alone {found['alone_tokens_per_second']:.1f} tokens/s"
    return _table(head, rows, f"The pair over gRPC at γ = {gamma}; {alone}")


def _streams(found: Json) -> str:
    times = ("ttft_ms", "itl_token_ms", "itl_piece_ms")
    rows = [
        [
            level,
            name,
            number(row["tokens_per_second"], 1),
            number(row["tokens_per_round"]),
            *(" / ".join(number((row[each] or {}).get(at)) for at in ("p50", "p99")) for each in times),
        ]
        for level, by_name in found["levels"].items()
        for name, row in by_name.items()
    ]
    head = ["streams", "p50 / p99", "tokens/s", "tokens/round", "TTFT, ms", "between tokens, ms", "between pieces, ms"]
    return f"{_table(head, rows, 'Many streams')}\n{ONE_DEVICE}\n"


def _cache(found: Json) -> str:
    rows = [
        [
            row["placement"],
            row["way"],
            row["gamma"],
            *(number(row[name]) for name in ("ratio", "hit_rate", "acceptance", "draft_ms", "pass_ms")),
            "yes" if row["drafting_counts"] else "no",
        ]
        for row in found["rows"]
    ]
    head = [
        "placement",
        "way",
        "γ",
        "with / without",
        "hit rate",
        "accepted",
        "drafting, ms",
        "pass, ms",
        "half of it?",
    ]
    return _table(head, rows, "The outcome cache, demo pair, deepened target")


def _share(found: Json) -> str:
    rows = []
    for batch, row in found["batches"].items():
        theirs = row["transformers"]
        shown = [number(theirs.get("verify_us"), 0), f"{theirs['share']:.1%}" if "share" in theirs else theirs["error"]]
        rows.append([batch, number(row["forward_us"], 0), number(row["verify_us"], 0), f"{row['share']:.1%}", *shown])
    head = ["sequences", "forward, µs", "verify, µs", "share", "`_speculative_sampling`, µs", "its share"]
    return _table(head, rows, "Verification's share of a pass")


def _profile(found: Json) -> str:
    return (
        f"## A saturated verifier\n\n{found['streams']} streams: the device works {found['busy_share']:.1%} of "
        f"{found['seconds']:.2f} s ({found['passes']} passes, {found['tokens_per_second']:.0f} tokens/s).\n"
    )


_TABLES: dict[str, Callable[[Json], str]] = {
    "choices": _choices,
    "tests": _tests,
    "memcheck": _memcheck,
    "device": _device,
    "alone": _alone,
    "pair": _pair,
    "streams": _streams,
    "cache": _cache,
    "share": _share,
    "profile": _profile,
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


def _draw_cache(panel: Axes, found: Json) -> None:
    groups = [f"{row['way']}\nγ = {row['gamma']}" for row in found["rows"]]
    plots.bars(panel, groups, {"with over without": _points(row["ratio"] for row in found["rows"])}, colours={})
    plots.level(panel)
    panel.set_title("The outcome cache", fontsize=9)


def _draw_share(panel: Axes, found: Json) -> None:
    rows = found["batches"]
    for key, colour in (("forward_us", plots.GREY), ("verify_us", plots.GREEN)):
        below = [row["forward_us"] if key == "verify_us" else 0.0 for row in rows.values()]
        panel.bar(list(rows), [row[key] for row in rows.values()], 0.5, bottom=below, color=colour, label=key[:-3])
    panel.set_xlabel("sequences", fontsize=8)
    panel.set_title("Verification's share of a pass, µs", fontsize=9)


def _draw_profile(panel: Axes, found: Json) -> None:
    """When the device worked, over a stretch in the middle."""
    width = found["window_ms"] / len(found["window"])
    panel.bar([i * width for i in range(len(found["window"]))], found["window"], width, align="edge", color=plots.BLUE)
    panel.set_ylim(0, 1)
    panel.set_xlabel("ms", fontsize=8)
    panel.set_title(f"{found['streams']} streams: the device works {found['busy_share']:.1%} of the time", fontsize=9)


_PAINTERS: tuple[tuple[str, Callable[[Axes, Any], None]], ...] = (
    ("alone", _draw_alone),
    ("pair", _draw_pair),
    ("streams", _by_streams("tokens_per_second", ("",), "Many streams, tokens/s")),
    ("streams", _by_streams("itl_piece_ms", ("p50", "p99"), "Many streams, ms between pieces")),
    ("cache", _draw_cache),
    ("share", _draw_share),
    ("profile", _draw_profile),
)
