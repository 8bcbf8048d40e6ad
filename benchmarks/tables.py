"""The figures as tables for people."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.contenders import PHASES
from benchmarks.summary import LABELS

Json = dict[str, Any]

_COLUMNS = ("tokens/s", "ratio", "Thm 3.8", "α", "tokens/round", "rounds", "γ", "t_q µs", "t_p(γ+1) µs", "R µs")


def show(document: Json, console: Console) -> None:
    """Draws everything: the machine, and for each pair and temperature what each contender came to."""
    console.print(_machine(document["machine"]), markup=False)
    console.print(document["command"], markup=False)
    for pair, by_temperature in document["summary"].items():
        models = document["models"][pair]
        for temperature, summary in by_temperature.items():
            console.print()
            title = f"{pair} pair ({models['target_layers']} layers, {models['target_mib']} MiB), T={temperature}"
            console.print(_speeds(title, summary))
            console.print(_rounds(summary))
            for name, figures in summary["contenders"].items():
                told = ", ".join(f"{key} {value}" for key, value in figures["settings"].items())
                console.print(f"{LABELS[name]}: {told}", style="dim", markup=False)


def _machine(found: Json) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items() if version)
    return (
        f"{found['cpu']}, {found['cores']} cores ({', '.join(found['instructions'])}), {found['memory_gib']} GiB, "
        f"{found['system']}, Python {found['python']}, {versions}"
    )


def _speeds(title: str, summary: Json) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", no_wrap=True)
    for heading in _COLUMNS:
        table.add_column(heading, justify="right", no_wrap=True)
    for name, figures in summary["contenders"].items():
        low, high = figures["ratio_range"]
        table.add_row(
            LABELS[name],
            f"{figures['tokens_per_second']:.1f}",
            f"{figures['ratio']:.2f} ({low:.2f}–{high:.2f})",
            _number(figures["predicted_ratio"], 2),
            _number(figures["alpha"], 3),
            _number(figures["tokens_per_round"], 2),
            str(figures["rounds"]),
            _number(figures["gamma"] or None, 1),
            _number(figures["draft_step_us"], 0),
            _number(figures["target_pass_us"], 0),
            _number(figures["round_trip_us"] or None, 0),
        )
    return table


def _rounds(summary: Json) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("µs of a round", no_wrap=True)
    for phase in PHASES:
        table.add_column(phase, justify="right", no_wrap=True)
    for name, figures in summary["contenders"].items():
        table.add_row(LABELS[name], *(f"{figures['round_us'][phase]:.0f}" for phase in PHASES))
    return table


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"
