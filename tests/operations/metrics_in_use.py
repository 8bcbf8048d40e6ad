"""Metrics in use: those that a service shows, those of the dashboard and the alerts, and those of the docs."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import promql_parser
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.project.tree import ROOT

DASHBOARD = ROOT / "deploy" / "dashboards" / "outrider.json"
ALERTS = ROOT / "deploy" / "alerts" / "outrider.yaml"
OPERATOR_RULES = ALERTS.with_name("prometheus-rule.yaml")
TABLE = ROOT / "docs" / "reference" / "metrics.md"

GIVEN = frozenset({"job", "instance", "le"})
"""Labels that Prometheus gives each target, or a histogram its buckets."""

OPERATORS = frozenset({"container", "endpoint", "namespace", "pod", "service"})
"""Labels that Prometheus' operator gives each target of a ServiceMonitor. They replace a metric's own of that name."""

Labels = dict[str, set[str]]
"""Labels, with the values they have."""


@dataclass
class Shown:
    """The metrics of some services.

    Attributes:
        samples: labels by the name of a sample.
        families: labels by the documented name, which a histogram's samples share, without `le`.
        kinds: types by the documented name.
    """

    samples: dict[str, Labels] = field(default_factory=dict)
    families: dict[str, Labels] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)

    def add(self, url: str) -> None:
        with urlopen(url, timeout=10) as response:
            self.read(response.read().decode())

    def read(self, text: str) -> None:
        """Add the metrics in Prometheus' text format."""
        self.kinds |= dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                name = family.name if family.type == "histogram" else sample.name
                for labels in (self.samples.setdefault(sample.name, {}), self.families.setdefault(name, {})):
                    for label, value in sample.labels.items():
                        labels.setdefault(label, set()).add(value)
                self.families[name].pop("le", None)


def expressions(*, front: bool = False) -> Iterator[tuple[str, str]]:
    """Title and expression of each query of the dashboard, its variables filled in, and of each alert.

    Those of the services' metrics, or of the HTTP front's.
    """
    return (each for each in _expressions() if ("outrider_http_" in each[1]) == front)


def _expressions() -> Iterator[tuple[str, str]]:
    for panel in json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]:
        for target in panel.get("targets", ()):
            # Without the operator no target has a namespace; the variable's `All` selects those too.
            text = target["expr"].replace('namespace=~"$namespace", ', "")
            yield panel["title"], text.replace("$__rate_interval", "5m").replace("$job", "outrider")
    for group in read_rules(ALERTS)["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]


def read_rules(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def query(expression: str) -> tuple[list[tuple[str, list[tuple[str, str]]]], set[str]]:
    """Return the metrics in an expression with the labels and values that they are matched by, and the labels that
    results are grouped or joined by. Raises if it is no PromQL.
    """
    promql_parser.parse(expression)
    metrics = re.findall(r"\b((?:outrider|process)_\w+|up\b)(?:\{([^}]*)\})?", expression)
    matchers = [(name, list(_matchers(inside))) for name, inside in metrics]
    grouped = re.findall(r"\b(?:by|on|group_left) \(([^)]*)\)", expression)
    return matchers, {label for each in grouped for label in re.findall(r"\w+", each)}


def _matchers(inside: str) -> Iterator[tuple[str, str]]:
    for label, values in re.findall(r'(\w+)[=!]~?=?"([^"]*)"', inside):
        yield from ((label, value) for value in values.split("|"))


@dataclass(frozen=True)
class Documented:
    """A row of the tables of metrics."""

    kind: str
    labels: frozenset[str]
    services: frozenset[str]


SERVICES = {"Both services": ("draft", "verifier"), "Draft service": ("draft",), "Verifier": ("verifier",)}


def documented() -> dict[str, Documented]:
    """The rows by name. The heading of a table says which services show its metrics, before a colon."""
    rows: dict[str, Documented] = {}
    heading = ""
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            heading = line.removeprefix("## ").partition(":")[0]
        if found := re.match(r"\| `(outrider_\w+)(?:\{([\w,]+)\})?` \| (\w+) \|", line):
            name, labels, kind = found.groups()
            assert name not in rows, f"{name} is there twice"
            rows[name] = Documented(kind, frozenset((labels or "").split(",")) - {""}, frozenset(SERVICES[heading]))
    return rows
