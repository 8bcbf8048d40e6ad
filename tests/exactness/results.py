"""What the slow tests measured, as a table and as JSON, with the machine named in both.

Written where `OUTRIDER_EXACTNESS_RESULTS` names a folder, and nowhere else. It knows nothing of how it was measured.
"""

from __future__ import annotations

import json
import os
import platform
import re
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.exactness import chisquare
from tests.exactness.chisquare import Fit
from tests.exactness.sampling import Run

VARIABLE = "OUTRIDER_EXACTNESS_RESULTS"
LEVEL = 1e-3
POWER = 0.99


@dataclass(frozen=True)
class Row:
    """One sample and its fits: outcome by outcome, and by rank class."""

    what: str
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

    def as_markdown(self) -> str:
        """The row for the table."""
        share = self.run.accepted / self.run.drafted if self.run.drafted else 0.0
        cells = [self.what, self.draft.replace("_", " "), self.gamma, f"{self.outcomes.n:,}", f"{share:.1%}"]
        for fit, detects in ((self.outcomes, self.detects), (self.classes, self.class_detects)):
            cells += [f"{fit.statistic:.1f} / {fit.df}", f"{fit.p_value:.2f}", f"{detects:.4f}"]
        return "| " + " | ".join(cells) + " |"

    def __str__(self) -> str:
        return f"{self.run}\noutcomes: {self.outcomes}\nclasses:  {self.classes}"


@dataclass
class Recorder:
    """Takes rows, and writes them at the end."""

    rows: list[Row] = field(default_factory=list)

    def add(self, row: Row) -> None:
        """Takes one."""
        self.rows.append(row)

    def write(self) -> None:
        """Writes both files, where a folder is named and there is something to write."""
        folder = os.environ.get(VARIABLE)
        if not folder or not self.rows:
            return
        machine = _machine()
        path = Path(folder) / f"exactness-{_slug(machine['cpu'])}"
        rows = [row.as_dict() for row in self.rows]
        report = {"machine": machine, "level": LEVEL, "power": POWER, "rows": rows}
        path.with_suffix(".json").write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        path.with_suffix(".md").write_text(_markdown(machine, self.rows), encoding="utf-8")


def _markdown(machine: dict[str, Any], rows: list[Row]) -> str:
    lines = [
        "# Exactness, measured",
        "",
        "Texts written through a draft and a verifier service over gRPC, against the exact law of the target alone,",
        "by χ². Temperature 1, top-k 20, top-p 0.9, float32, 24 tokens, rule `tokenwise`; bad drafts.",
        "N counts tokens (long texts) or texts (first three tokens). *Outcomes* are the tokens after each token, or",
        "the triples; *classes* put each token into a third of the law that it was drawn from. *Detects* is the total",
        f"variation δ that so many notice at a level of {LEVEL:g} with a power of {POWER:g}, from λ = 4 N δ².",
        "",
        "Again: `OUTRIDER_EXACTNESS_RESULTS=benchmarks/results python -m pytest -m slow tests/exactness`",
        "",
        f"{machine['cpu']}, {machine['cores']} cores, {machine['system']}; Python {machine['python']}, "
        f"torch {machine['torch']}, transformers {machine['transformers']}; {machine['date']}.",
        "",
        "| what | draft | γ | N | accepted | outcomes: χ² / df | p | detects | classes: χ² / df | p | detects |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
        *(row.as_markdown() for row in rows),
    ]
    return "\n".join(lines) + "\n"


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


def _machine() -> dict[str, Any]:
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "outrider": version("outrider"),
        "date": datetime.now(UTC).date().isoformat(),
    }


def _cpu() -> str:
    path = Path("/proc/cpuinfo")
    if path.is_file():
        found = re.search(r"^model name\s*:\s*(.+)$", path.read_text(), re.MULTILINE)
        if found:
            return found.group(1).strip()
    return platform.processor() or platform.machine()


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
