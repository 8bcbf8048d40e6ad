"""Progress of a long command on stderr: a bar on a terminal; elsewhere a plain line now and then, for logs."""

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

INTERVAL_S = 30.0
"""Between two lines about one stage."""


class Update(Protocol):
    """Called with a stage, its steps done, all its steps (0: not known), and what is being done, in words."""

    def __call__(self, stage: str, done: int, total: int, detail: str = "") -> None: ...


@contextmanager
def progress(unit: str = "", *, with_lines: bool = True) -> Iterator[Update]:
    """Shows the progress of stages, of which one is current. `unit` names the steps, in the plural. Without
    `with_lines` nothing is written where there is no terminal.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield Lines(unit, lambda line: click.echo(line, err=True) if with_lines else None)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[count]}"),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    # What goes to a terminal on stdout stands above the bar.
    with Progress(*columns, console=console, transient=True, redirect_stdout=sys.stdout.isatty()) as bars:
        tasks: dict[str, TaskID] = {}

        def update(stage: str, done: int, total: int, detail: str = "") -> None:
            if stage not in tasks:
                for task in tasks.values():
                    bars.update(task, visible=False)
                tasks[stage] = bars.add_task("", total=None, count="")
            count = _count(done, total, unit) if total else ""
            bars.update(tasks[stage], total=total or None, completed=done, description=detail or stage, count=count)

        yield update


class Lines:
    """Writes a line when a stage begins, every `INTERVAL_S` of it, and when all steps are done."""

    def __init__(self, unit: str, write: Callable[[str], None], now: Callable[[], float] = time.monotonic) -> None:
        self._unit = unit
        self._write = write
        self._now = now
        self._began = now()
        self._stage = ""
        self._next = 0.0

    def __call__(self, stage: str, done: int, total: int, detail: str = "") -> None:
        now, is_done = self._now(), 0 < total <= done
        is_due = stage != self._stage or now >= self._next
        if not is_due and not (is_done and self._next < math.inf):
            return
        self._stage, self._next = stage, math.inf if is_done else now + INTERVAL_S
        count = f": {_count(done, total, self._unit)}" if total else ""
        doing = f" ({detail})" if detail and not is_done else ""
        self._write(f"outrider: {now - self._began:.0f} s: {stage}{count}{doing}")


def _count(done: int, total: int, unit: str) -> str:
    return f"{done:,} of {total:,} {unit}".rstrip()
