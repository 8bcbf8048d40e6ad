"""Figures in the pages' tables are those of the benchmarks' results: a result that is measured again renews its tables.

A table below `<!-- figures: NAME.json -->` has figures of `benchmarks/results/NAME.json`: values, their sums over a
round, half widths of intervals, and keys. Rows of the papers, which begin with `[L]` or `[W]`, have no result.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import PAGES, name
from tests.project.tree import ROOT

RESULTS = ROOT / "benchmarks" / "results"
TABLE = re.compile(r"<!-- figures: (?P<files>[\w., -]+?)(?: \([^)]*\))? -->\n(?P<rows>(?:\|.*\n)+)")
NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?")
SCALES = {"": 1, "%": 100, "ms": 1e-3}
"""From a result to a cell with this unit."""
QUOTIENTS = ("c",)
"""Columns of quotients of two figures: c is a draft step over a step of the target alone."""


def _figures(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        numbers = [each for each in value.values() if isinstance(each, float)]
        yield sum(numbers)
        yield from (float(text.replace(",", "")) for key in value for text in NUMBER.findall(key))
        value = list(value.values())
    elif isinstance(value, list) and len(value) == 2 and all(isinstance(each, float) for each in value):
        yield (value[1] - value[0]) / 2
    if isinstance(value, list):
        for each in value:
            yield from _figures(each)
    elif isinstance(value, int | float):
        yield float(value)


def _cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip().strip("|").split("|")]


def _strange(rows: str, known: list[float]) -> list[str]:
    """The figures of a table that no known one rounds to."""
    head, _, *body = map(_cells, rows.splitlines())
    found = []
    for cells in body:
        if cells[0].startswith(("[L]", "[W]")):
            continue
        for column, cell in zip(head, cells, strict=True):
            scales = [scale for unit, scale in SCALES.items() if unit in cell]
            for text in NUMBER.findall(cell) if column not in QUOTIENTS else ():
                digits, shown = len(text.partition(".")[2]), float(text.replace(",", ""))
                # Half of the last digit, and what eight digits of a result leave out.
                near = 0.5 * 10**-digits * (1 + 1e-6)
                if not any(abs(abs(each * scale) - shown) <= near for each in known for scale in scales):
                    found.append(f"{text} in | {' | '.join(cells)} |")
    return found


TABLES = [
    pytest.param(found["files"], found["rows"], id=f"{name(page)}-{nth}")
    for page in (*PAGES, ROOT / "benchmarks" / "README.md")
    for nth, found in enumerate(TABLE.finditer(page.read_text(encoding="utf-8")), 1)
]


@pytest.mark.parametrize(("files", "rows"), TABLES)
def test_figures_are_those_of_the_results(files: str, rows: str) -> None:
    paths = [RESULTS / each.strip() for each in files.split(",")]
    known = [each for path in paths for each in _figures(json.loads(Path(path).read_text(encoding="utf-8")))]
    assert _strange(rows, known) == []


def test_each_mark_has_a_table() -> None:
    pages = (*PAGES, ROOT / "benchmarks" / "README.md")
    marks = sum(page.read_text(encoding="utf-8").count("<!-- figures:") for page in pages)
    assert len(TABLES) == marks > 20
