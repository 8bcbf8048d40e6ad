"""The figures of `benchmarks.kernel`: what was aimed at, and tables in the layouts of [W Tables 3, 5 and 8].

Pure arithmetic on the JSON of the runs. Bandwidth is what must move, over the time; its share is of what a plain copy
moved in the same run of the benchmark.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

LABELS = {
    "outrider": "Outrider",
    "transformers": "transformers",
    "torch": "torch, unfused",
    "compiled": "torch.compile",
    "flashinfer": "FlashInfer",
}
SHOWN_GAMMAS = (3, 5, 10, 15)  # those of [W Table 8]
_MEASURES = ("eager cold", "eager warm", "graph cold", "graph warm", "whole")

Json = dict[str, Any]


def device_us(run: Json, state: str) -> float:
    """The time on the device, caches `cold` or `warm`: of a graph where there is one, with its launches else."""
    us = run["us"]
    return float(us.get(f"graph {state}", us[f"eager {state}"])["median"])


def share_of_copy(run: Json, bandwidth: float) -> float:
    """What must move, over the time with cold caches, as a share of `bandwidth` in bytes a second."""
    return float(run["must_bytes"]) / (device_us(run, "cold") * 1e-6) / bandwidth


def select(document: Json, **keys: Any) -> list[Json]:
    """The runs with these keys that have figures."""
    return [run for run in document["runs"] if "us" in run and all(run[name] == value for name, value in keys.items())]


def summarise(document: Json) -> Json:
    """The copy bandwidth, and each aim with what was found; `met` is None where nothing that bears on it was measured.

    The aims are for an H200; on a CPU none is judged.
    """
    bandwidth = document["copy"]["bytes_per_second"]
    on_gpu = document["settings"]["device"]["name"] != "cpu"
    aims = _aims(document, bandwidth) if on_gpu else []
    return {"copy_gb_per_second": bandwidth / 1e9, "aims": aims}


def _aims(document: Json, bandwidth: float) -> list[Json]:
    ours = select(document, contender="outrider")
    exact = [run for run in ours if run["rule"] in ("tokenwise", "block")]
    coupled = [run for run in ours if run["rule"] == "coupled"]
    alone = select(document, contender="outrider", part="gamma")

    def shares(runs: Iterable[Json], least: float) -> list[float]:
        return [share_of_copy(run, bandwidth) for run in runs if run["must_bytes"] >= least]

    return [
        _aim("85 % of the copy bandwidth from 100 MB of logits up", shares(exact, 100e6), min, lambda x: x >= 0.85),
        _aim("coupled: 45 % from 200 MB up", shares(coupled, 200e6), min, lambda x: x >= 0.45),
        _aim(
            "at most 8 µs at B = 1, γ = 5, in a graph, warm",
            [run["us"]["graph warm"]["median"] for run in alone if run["gamma"] == 5 and "graph warm" in run["us"]],
            max,
            lambda x: x <= 8,
        ),
        _aim("20 times transformers' path at B = 1", _against(document, "transformers"), min, lambda x: x >= 20),
        _aim("γ = 20 at most 1.5 times γ = 1, at B = 1, warm", _growth(alone), max, lambda x: x <= 1.5),
    ]


def _aim(text: str, values: Sequence[float], worst: Callable[..., float], met: Callable[[float], bool]) -> Json:
    if not values:
        return {"aim": text, "found": None, "met": None}
    found = worst(values)
    return {"aim": text, "found": found, "met": met(found)}


def _against(document: Json, other: str) -> list[float]:
    """How many times as long another takes, with warm caches, wherever both were timed at B = 1."""
    theirs = {(run["V"], run["gamma"]): run for run in select(document, contender=other, part="gamma")}
    return [
        device_us(theirs[key], "warm") / device_us(run, "warm")
        for run in select(document, contender="outrider", part="gamma")
        if (key := (run["V"], run["gamma"])) in theirs
    ]


def _growth(alone: Sequence[Json]) -> list[float]:
    by_size = {(run["V"], run["gamma"]): device_us(run, "warm") for run in alone}
    return [us / by_size[V, 1] for (V, gamma), us in by_size.items() if gamma == 20 and (V, 1) in by_size]


# --------------------------------------------------------------------------------------------------------------- tables


def tables(document: Json) -> str:
    """Everything, in Markdown."""
    device = document["settings"]["device"]
    bandwidth = document["copy"]["bytes_per_second"]
    parts = [
        "# One verification, measured\n",
        f"{', '.join(f'{name} {value}' for name, value in device.items())}; path `{document['settings']['path']}`; "
        f"a copy moves {bandwidth / 1e9:.0f} GB/s. `{document['command']}`. Times are medians in µs.\n",
        _aims_table(document["summary"]["aims"]),
        _bandwidths(document, bandwidth),
        _improvements(document),
        _by_gamma(document),
        _all_times(document, bandwidth),
        _absent(document),
    ]
    return "\n".join(part for part in parts if part)


def _aims_table(aims: Sequence[Json]) -> str:
    rows = [
        [
            aim["aim"],
            "not measured" if aim["met"] is None else f"{aim['found']:.2f}",
            {True: "met", False: "missed", None: ""}[aim["met"]],
        ]
        for aim in aims
    ]
    return _table("Aims, for an H200", ["aim", "worst found", ""], rows)


def _bandwidths(document: Json, bandwidth: float) -> str:
    """[W Table 3]: realised bandwidth, here of what must move; and of ours its share, and moved over must."""
    rows = []
    for run in select(document, part="batch", contender="outrider"):
        cells = [f"{run['V']:,}", str(run["B"]), f"{run['must_bytes'] / 1e6:.1f}"]
        for name in LABELS:
            found = select(document, part="batch", contender=name, V=run["V"], B=run["B"])
            cells.append(f"{found[0]['must_bytes'] / device_us(found[0], 'cold') / 1e3:.1f}" if found else "")
        cells += [f"{share_of_copy(run, bandwidth):.0%}", _ratio(run["moved_bytes"], run["must_bytes"])]
        rows.append(cells)
    head = ["V", "B", "must move, MB", *(f"{label}, GB/s" for label in LABELS.values()), "ours of a copy", "moved/must"]
    return _table("Realised bandwidth, cold caches, as [W Table 3]", head, rows)


def _improvements(document: Json) -> str:
    """[W Table 5]: relative improvement of the wall clock, against transformers, all work of the host included."""
    rows = []
    for base in select(document, part="gamma", contender="transformers", gamma=document["settings"]["gamma"]):
        cells = [f"{base['V']:,}", f"{base['us']['whole']['median']:.1f}"]
        for name in LABELS:
            found = select(document, part="gamma", contender=name, V=base["V"], gamma=base["gamma"])
            cells.append(
                f"{1 - found[0]['us']['whole']['median'] / base['us']['whole']['median']:.1%}" if found else ""
            )
        rows.append(cells)
    head = ["V", "transformers, µs", *LABELS.values()]
    title = f"Relative wall-clock improvement at B = 1, γ = {document['settings']['gamma']}, as [W Table 5]"
    return _table(title, head, rows)


def _by_gamma(document: Json) -> str:
    """[W Table 8]: accepted share and time of each method by γ."""
    shown = [gamma for gamma in document["settings"]["gammas"] if gamma in SHOWN_GAMMAS]
    rows = []
    for V in document["settings"]["vocabularies"]:
        for name, label in LABELS.items():
            found = {run["gamma"]: run for run in select(document, part="gamma", contender=name, V=V)}
            if found:
                accepted = [f"{found[g]['accepted'] / g:.0%}" if g in found else "" for g in shown]
                us = [f"{device_us(found[g], 'warm'):.1f}" if g in found else "" for g in shown]
                rows.append([f"{V:,}", label, *accepted, *us])
    head = ["V", "", *(f"accepted, γ = {g}" for g in shown), *(f"µs, γ = {g}" for g in shown)]
    return _table("Acceptance and time by γ at B = 1, warm caches, as [W Table 8]", head, rows)


def _all_times(document: Json, bandwidth: float) -> str:
    rows = []
    for run in select(document):
        rows.append(
            [
                LABELS[run["contender"]],
                run["rule"],
                f"{run['V']:,}",
                str(run["B"]),
                str(run["gamma"]),
                *(f"{run['us'][name]['median']:.1f}" if name in run["us"] else "" for name in _MEASURES),
                f"{share_of_copy(run, bandwidth):.0%}",
                _ratio(run["moved_bytes"], run["must_bytes"]),
                "" if run["peak_bytes"] is None else f"{run['peak_bytes'] / 2**20:.1f}",
            ]
        )
    head = ["", "rule", "V", "B", "γ", *_MEASURES, "of a copy", "moved/must", "peak, MiB"]
    return _table("Every measurement", head, rows)


def _absent(document: Json) -> str:
    """Who took no part in what, and why."""
    reasons = {(LABELS[run["contender"]], run["refusal"]) for run in document["runs"] if "refusal" in run}
    return _table(
        "Left out", ["who", "why, for some of the cases at least"], [list(reason) for reason in sorted(reasons)]
    )


def _ratio(moved: int | None, must: int) -> str:
    return "" if moved is None else f"{moved / must:.2f}"


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    lines = [f"## {title}\n", f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines) + "\n"
