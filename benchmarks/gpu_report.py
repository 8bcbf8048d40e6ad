"""The figures of `benchmarks.gpu` against what they aim at, and as tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks import gpu_alone, gpu_pair, gpu_profile
from benchmarks.gpu_alone import EAGER, GRAPHS
from benchmarks.gpu_figures import foretold
from benchmarks.gpu_plan import PARTS
from benchmarks.kernel_report import tables as kernel_tables

DRY_RUN = "A dry run with tiny models on a CPU: it shows that the benchmark works. None of its figures means anything."

ONE_DEVICE = (
    "Draft and target share one GPU, which runs one process at a time: on a GPU each, many streams would be faster."
)

Json = dict[str, Any]


def summarise(document: Json) -> Json:
    """What was aimed at and what was found, by its worst case; nothing is judged in a dry run."""
    if "meaning" in document:
        return {"aims": [], "meaning": document["meaning"]}
    figures = figures_of(document)
    aims: list[Json] = []
    for name, wanted in gpu_alone.AIMS.items():
        row = figures.get("alone", {}).get("shapes", {}).get(name, {})
        aims.append(_aim(f"{name} alone, of the bound by its weights", wanted, [served(row)]))
    rows = figures.get("pair", {}).get("alphas", {}).values()
    aims.append(_aim("the pair, of Theorem 3.8", gpu_pair.AIM, [row["of_foretold"] for row in rows]))
    rows = figures.get("cache", {}).get("rows", [])
    counted = [row["ratio"] for row in rows if row["drafting_counts"]]
    aims.append(_aim("the outcome cache, where γ·t_q is half of t_p or more", gpu_pair.CACHE_AIM, counted))
    aims.append(_aim("the device at work", gpu_profile.AIM, [figures.get("profile", {}).get("busy_share")]))
    aims += figures.get("kernel", {}).get("summary", {}).get("aims", [])
    return {"aims": aims, "pair_of_bare_passes": bare(figures)}


def figures_of(document: Json) -> Json:
    """The figures of the parts that have any."""
    return {name: entry["figures"] for name, entry in document["parts"].items() if "figures" in entry}


def served(row: Json) -> float | None:
    """Of the bound, what Outrider reaches as it serves: with graphs where there are any."""
    found = row.get("contenders", {})
    shares = [found.get(name, {}).get("of_bound") for name in (GRAPHS, EAGER)]
    return next((share for share in shares if share is not None), None)


def bare(figures: Json) -> Json:
    """The pair's rates over what the theorem makes of bare passes of its models, with no network at all; by α."""
    shapes = figures.get("alone", {}).get("shapes", {})
    draft, target = (shapes.get(name, {}).get("pass_seconds", {}) for name in ("1B", "8B"))
    found: Json = {}
    for alpha, row in figures.get("pair", {}).get("alphas", {}).items():
        width = str(row["gamma"] + 1)
        if "1" in draft and width in target:
            times = {"draft_step": draft["1"], "verify_pass": target[width], "round_trip": 0.0}
            found[alpha] = row["tokens_per_second"] / foretold(row["found_alpha"], row["gamma"], times)
    return found


def _aim(text: str, wanted: float, values: Sequence[float | None]) -> Json:
    known = [value for value in values if value is not None]
    found = min(known) if known else None
    return {"aim": f"{text}: {wanted:g} or more", "found": found, "met": None if found is None else found >= wanted}


# --------------------------------------------------------------------------------------------------------------- tables


def tables(document: Json) -> str:
    """Everything, in Markdown."""
    figures = figures_of(document)
    parts = [
        "# Outrider on a GPU\n",
        f"**{document['meaning']}**\n" if "meaning" in document else "",
        _places(document),
        _aims(document["summary"]["aims"]),
        _choices(figures.get("choices")),
        _tests(figures.get("tests")),
        _memcheck(figures.get("memcheck")),
        _device(figures.get("device")),
        _alone(figures.get("alone")),
        _pair(figures.get("pair"), document["summary"].get("pair_of_bare_passes", {})),
        _streams(figures.get("streams")),
        _cache(figures.get("cache")),
        _share(figures.get("share")),
        _profile(figures.get("profile")),
        _kernel(document, figures.get("kernel")),
        _troubles(document),
    ]
    return "\n".join(part for part in parts if part)


def _places(document: Json) -> str:
    """The device and the versions of each part: parts of one file may have been measured at different times."""
    keys: dict[str, list[str]] = {}
    for name, entry in document["parts"].items():
        key = entry["key"]
        told = ", ".join(f"{each} {value}" for each, value in (key["device"] | key["versions"]).items() if value)
        keys.setdefault(told, []).append(PARTS[name])
    lines = [f"{told} ({', '.join(names)})." for told, names in keys.items()]
    return "\n".join([*lines, f"`{document['command']}`\n"])


def _aims(aims: Sequence[Json]) -> str:
    """Each aim as a sentence: whether it holds, what it is, and the worst case found."""
    if not aims:
        return ""
    words = {True: "Holds", False: "Does not hold", None: "Not measured"}
    lines = []
    for each in aims:
        found = "" if each["found"] is None else f"; {each['found']:.2f} at worst"
        lines.append(f"- **{words[each['met']]}**: {each['aim']}{found}.")
    return "\n".join(["## Which aims hold\n", *lines]) + "\n"


def _choices(found: Json | None) -> str:
    rows = [
        [row["shape"], row["dtype"], row["error"]]
        if "error" in row
        else [
            row["shape"],
            row["dtype"],
            f"`{row['attention']}`, blocks of {row['block_tokens']}: {row['attention_why']}",
            f"`{row['layers']}`: {row['layers_why']}",
            row["graphs"],
        ]
        for row in (found or {}).get("rows", [])
    ]
    return _table("What runs here, and why", ["shape", "dtype", "attention", "layers", "graphs"], rows)


def _tests(found: Json | None) -> str:
    rows = [
        [name, row["outcome"], _n(row["seconds"], 0), "failed" if row["exit_code"] else "passed"]
        for name, row in (found or {}).get("groups", {}).items()
    ]
    title = "The tests marked gpu" + (", collected and not run" if (found or {}).get("collected_only") else "")
    return _table(title, ["group", "", "s", ""], rows)


def _memcheck(found: Json | None) -> str:
    if not found:
        return ""
    if "error" in found:
        return f"## Memory accesses\n\nNot checked: {found['error']}.\n"
    tool = f"under `{found['tool']}`" if found["tool"] else "compute-sanitizer did not watch"
    outcome = "no error" if not found["exit_code"] else f"exit code {found['exit_code']}"
    return f"## Memory accesses\n\nEvery kernel once, {tool}: {outcome}.\n"


def _device(found: Json | None) -> str:
    if not found:
        return ""
    return (
        f"## The device itself\n\nA copy moves {found['copy_bytes_per_second'] / 1e9:.1f} GB/s, read and written bytes "
        f"together; a product of {found['matrix']}³ in bfloat16 runs at {found['matrix_flops'] / 1e12:.2f} Tflop/s.\n"
    )


def _alone(found: Json | None) -> str:
    rows = []
    for name, row in (found or {}).get("shapes", {}).items():
        for contender, each in row.get("contenders", {}).items():
            aim = _n(gpu_alone.AIMS.get(name), 2) if contender in (GRAPHS, EAGER) else ""
            rows.append(
                [
                    name,
                    contender,
                    _n(each.get("tokens_per_second"), 1),
                    _n(row.get("bound_tokens_per_second"), 1),
                    _n(each.get("of_bound"), 2),
                    aim,
                    each.get("error", ""),
                ]
            )
    head = ["shape", "", "tokens/s", "bound by the weights, tokens/s", "of it", "aim", ""]
    return _table("The target alone, one stream", head, rows)


def _pair(found: Json | None, of_bare: Json) -> str:
    if not found:
        return ""
    rows = []
    for alpha, row in found["alphas"].items():
        times, theirs = row["seconds"], row.get("assisted", {})
        rows.append(
            [
                alpha,
                _n(row["found_alpha"], 3),
                _n(row["tokens_per_second"], 1),
                _n(row["foretold"], 1),
                _n(row["of_foretold"], 2),
                _n(of_bare.get(alpha), 2),
                _n(row["speed_up"], 2),
                *(_n(1e6 * times[name], 0) for name in ("draft_step", "verify_pass", "round_trip")),
                _n(theirs.get("tokens_per_second"), 1),
                _n(theirs.get("found_alpha"), 3),
            ]
        )
    gamma = next((row["gamma"] for row in found["alphas"].values()), 0)
    head = [
        "α planted", "found", "tokens/s", "Thm 3.8", "of it", "of it by bare passes", "over the target alone",
        "t_q, µs", "t_p(γ+1), µs", "R, µs", "assisted generation, tokens/s", "its α",
    ]  # fmt: skip
    title = f"The pair over gRPC at γ = {gamma}; the target alone {found['alone_tokens_per_second']:.1f} tokens/s"
    return _table(title, head, rows)


def _streams(found: Json | None) -> str:
    rows = []
    for level, by_name in (found or {}).get("levels", {}).items():
        for name, row in by_name.items():
            cells = [level, name, _n(row["tokens_per_second"], 1), _n(row["tokens_per_round"], 2)]
            for times in ("ttft_ms", "itl_token_ms", "itl_piece_ms"):
                cells += [_n((row[times] or {}).get(percent), 2) for percent in ("p50", "p99")]
            rows.append(cells)
    head = ["streams", "", "tokens/s", "tokens/round", "TTFT, ms, p50", "p99", "between tokens, ms, p50", "p99"]
    table = _table("Many streams", [*head, "between pieces, ms, p50", "p99"], rows)
    return table and f"{table}\n{ONE_DEVICE}\n"


def _cache(found: Json | None) -> str:
    rows = [
        [
            row["placement"],
            row["way"],
            str(row["gamma"]),
            _n(row["ratio"], 2),
            _n(row["hit_rate"], 2),
            _n(row["acceptance"], 2),
            _n(row["draft_ms"], 2),
            _n(row["pass_ms"], 2),
            "yes" if row["drafting_counts"] else "no",
        ]
        for row in (found or {}).get("rows", [])
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
    return _table("The outcome cache, demo pair, deepened target", head, rows)


def _share(found: Json | None) -> str:
    rows = []
    for batch, row in (found or {}).get("batches", {}).items():
        theirs = row["transformers"]
        cells = [batch, _n(row["forward_us"], 0), _n(row["verify_us"], 0), f"{row['share']:.1%}"]
        shown = [_n(theirs.get("verify_us"), 0), f"{theirs['share']:.1%}" if "share" in theirs else theirs["error"]]
        rows.append(cells + shown)
    head = ["sequences", "forward, µs", "verify, µs", "share", "`_speculative_sampling`, µs", "its share"]
    return _table("Verification's share of a pass", head, rows)


def _profile(found: Json | None) -> str:
    if not found:
        return ""
    return (
        f"## A saturated verifier\n\n{found['streams']} streams: the device works {found['busy_share']:.1%} of "
        f"{found['seconds']:.2f} s ({found['passes']} passes, {found['tokens_per_second']:.0f} tokens/s).\n"
    )


def _kernel(document: Json, found: Json | None) -> str:
    return "" if not found else kernel_tables(found | {"command": document["command"]}).replace("# One", "## One", 1)


def _troubles(document: Json) -> str:
    rows = [
        [PARTS[name], line]
        for name, entry in document["parts"].items()
        for line in [*([entry["error"]] if "error" in entry else []), *entry["troubles"]]
    ]
    return _table("What went wrong", ["part", ""], rows)


def _n(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    lines = [f"## {title}\n", f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"
