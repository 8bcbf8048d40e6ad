"""What the slow tests measured, as a table and as JSON, with the machine named in both.

Written where `OUTRIDER_EXACTNESS_RESULTS` names a folder, and nowhere else.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.harness import machine
from tests.exactness import chisquare
from tests.exactness.chisquare import Fit
from tests.exactness.sampling import Run

VARIABLE = "OUTRIDER_EXACTNESS_RESULTS"
NAME = "exactness"
LEVEL = 1e-3
POWER = 0.99


@dataclass(frozen=True)
class Row:
    """One sample and its fits: outcome by outcome, and by rank class."""

    what: str
    rule: str
    draft: str
    gamma: str
    run: Run
    outcomes: Fit
    classes: Fit
    seconds: float

    @property
    def detects(self) -> float:
        """The total variation that the outcomes notice at `LEVEL` with `POWER`."""
        return _detects(self.outcomes)

    @property
    def class_detects(self) -> float:
        """The same for the classes."""
        return _detects(self.classes)

    def as_dict(self) -> dict[str, Any]:
        """The row for JSON."""
        return {
            "what": self.what,
            "rule": self.rule,
            "draft": self.draft,
            "gamma": self.gamma,
            "texts": len(self.run.tokens),
            "tokens": int(self.run.tokens.size),
            "rounds": self.run.rounds,
            "drafted": self.run.drafted,
            "accepted": self.run.accepted,
            "outcomes": {**_fit(self.outcomes), "detects_total_variation": round(self.detects, 5)},
            "classes": {**_fit(self.classes), "detects_total_variation": round(self.class_detects, 5)},
            "seconds": round(self.seconds, 1),
        }

    def __str__(self) -> str:
        return f"{self.run}\noutcomes: {self.outcomes}\nclasses:  {self.classes}"


@dataclass
class Recorder:
    """Takes rows, and writes all it has at each: a run that is cut off leaves what it measured."""

    rows: list[Row] = field(default_factory=list)

    def add(self, row: Row) -> None:
        """Takes one, and writes both files, where a folder is named."""
        self.rows.append(row)
        folder = os.environ.get(VARIABLE)
        if not folder:
            return
        report = {
            "machine": machine(),
            "date": datetime.now(UTC).date().isoformat(),
            "level": LEVEL,
            "power": POWER,
            "rows": [row.as_dict() for row in self.rows],
        }
        path = Path(folder) / NAME
        path.with_suffix(".json").write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        path.with_suffix(".md").write_text(as_markdown(report), encoding="utf-8")


def as_markdown(report: dict[str, Any]) -> str:
    """The report for people."""
    machine, versions = report["machine"], report["machine"]["versions"]
    lines = [
        "# Exactness, measured",
        "",
        "Texts written through a draft service and a verifier service over gRPC, against the exact law of the target",
        "alone, by χ². Temperature 1, top-k 20, top-p 0.9, float32, a vocabulary of 24, drafts that are bad on",
        "purpose. N counts texts (first three tokens) or tokens (long texts). *Outcomes* are triples, or",
        "the tokens after each; *classes* put each token into a third of the law it was drawn from. *Detects* is the",
        f"total variation δ that N notices at a level of {report['level']:g} with a power of {report['power']:g}, from",
        "λ = 4 N δ².",
        "",
        f"Again: `{VARIABLE}=benchmarks/results python -m pytest -m slow tests/exactness`",
        "",
        f"{machine['cpu']}, {machine['cores']} cores, {machine['system']}; Python {machine['python']}, "
        f"torch {versions['torch']}, transformers {versions['transformers']}; {report['date']}.",
        "",
        "| what | rule | draft | γ | N | accepted | outcomes: χ² / df | p | detects | classes: χ² / df | p | detects |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
        *map(_as_line, report["rows"]),
    ]
    return "\n".join(lines) + "\n"


def _as_line(row: dict[str, Any]) -> str:
    cells = [row["what"], f"`{row['rule']}`", row["draft"].replace("_", " "), row["gamma"], f"{row['outcomes']['n']:,}"]
    cells.append(f"{row['accepted'] / row['drafted']:.1%}" if row["drafted"] else "none drafted")
    for fit in (row["outcomes"], row["classes"]):
        cells += [f"{fit['chi2']:.1f} / {fit['df']}", f"{fit['p']:.2f}", f"{fit['detects_total_variation']:.4f}"]
    return "| " + " | ".join(cells) + " |"


def _fit(fit: Fit) -> dict[str, Any]:
    return {
        "chi2": round(fit.statistic, 2),
        "df": fit.df,
        "p": float(f"{fit.p_value:.4g}"),
        "n": fit.n,
        "impossible": fit.impossible,
    }


def _detects(fit: Fit) -> float:
    return chisquare.detectable(fit.df, fit.n, level=LEVEL, power=POWER)
