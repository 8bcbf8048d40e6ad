"""The figures of load as tables for people."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.load_summary import CONTENDERS, LABELS, LEVELS, missed

Json = dict[str, Any]

_RATES = (
    "tokens/s", "ratio", "requests/s", "refused", "α", "γ", "Decode", "tokens/round", "rounds/pass", "KV use", "CPU µs",
)  # fmt: skip
_TIMES = {
    "TTFT ms": "ttft_ms",
    "time per token ms": "tpot_ms",
    "between tokens ms": "itl_token_ms",
    "between pieces ms": "itl_piece_ms",
}


def show(document: Json, console: Console) -> None:
    """Draws everything: the machine, the engine's share, and each run of the grid."""
    console.print(machine_line(document), markup=False, soft_wrap=True)
    console.print(document["command"], markup=False, soft_wrap=True)
    if document.get("engine"):
        console.print(_engine(document["engine"]))
    behind = missed(document["summary"], document.get("engine", {}))
    console.print(
        "\n".join(f"AIM MISSED: {line}" for line in behind) or "All aims are met, as far as measured.",
        markup=False,
        soft_wrap=True,
    )
    for pair, by_mode in document["summary"].items():
        for name, reason in document.get("unavailable", {}).get(pair, {}).items():
            console.print(f"{pair} pair: {LABELS[name]} is not there: {reason}", markup=False, soft_wrap=True)
        for mode, by_mix in by_mode.items():
            for mix, by_level in by_mix.items():
                console.print(_rates(f"{pair} pair, {mix} prompts, {mode}", mode, by_level))
                console.print(_times(mode, by_level))
        for name in CONTENDERS:
            told = document["contenders"].get(pair, {}).get(name)
            if told is not None:
                settings = ", ".join(f"{key} {value}" for key, value in told.items())
                console.print(f"{LABELS[name]}: {settings}", style="dim", markup=False, soft_wrap=True)


def machine_line(document: Json) -> str:
    """The machine in a line, and how busy it was."""
    found = document["machine"]
    line = f"{found['cpu']}, {found['cores']} cores, {found['memory_gib']} GiB"
    return line + (", BUSY WITH OTHER WORK" if document["busy"] else "")


def _engine(by_pair: Json) -> Table:
    table = Table(title="what the engine itself costs", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("pair", "rounds", "sequences", "share", "forward µs", "verify µs", "outside µs", "passes"):
        table.add_column(heading, justify="left" if heading in ("pair", "rounds") else "right", no_wrap=True)
    for pair, by_kind in by_pair.items():
        for kind, found in by_kind.items():
            table.add_row(
                pair,
                kind,
                str(found["sequences"]),
                f"{found['share']:.1%}",
                *(f"{found[key]:.0f}" for key in ("forward_us", "verify_us", "outside_us")),
                str(found["passes"]),
            )
    return table


def _rates(title: str, mode: str, by_level: Json) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(LEVELS[mode], justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for heading in _RATES:
        table.add_column(heading, justify="right", no_wrap=True)
    for level, cell in by_level.items():
        for place, (name, found) in enumerate(cell.items()):
            refused = found["refused"] or 0
            table.add_row(
                "" if place else level,
                LABELS[name],
                f"{found['tokens_per_second']:.1f}",
                _number(found["ratio"], 2) + (" MISSED" if found.get("missed") else ""),
                f"{found['requests_per_second']:.2f}",
                f"{refused:.0f}/{found['requests']:.0f}" if refused else "0",
                _number(found["alpha"], 3),
                _number(found["gamma"], 1),
                _share(found["decode_share"]),
                _number(found["tokens_per_round"], 2),
                _number(found["rounds_per_pass"], 1),
                _share(found["kv_usage"]),
                _sum(found["verifier_cpu_us"], found["draft_cpu_us"]),
                end_section=place == len(cell) - 1,
            )
    return table


def _times(mode: str, by_level: Json) -> Table:
    table = Table(title="p50 / p95 / p99", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(LEVELS[mode], justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for heading in _TIMES:
        table.add_column(heading, justify="right", no_wrap=True)
    for level, cell in by_level.items():
        for place, (name, found) in enumerate(cell.items()):
            table.add_row("" if place else level, LABELS[name], *(_three(found[key]) for key in _TIMES.values()))
    return table


def _three(found: Json | None) -> str:
    return "–" if found is None else " / ".join(f"{value:.{0 if value >= 100 else 1}f}" for value in found.values())


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


def _sum(verifier: float | None, draft: float | None) -> str:
    return "–" if verifier is None or draft is None else f"{verifier:.0f} + {draft:.0f}"


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"
