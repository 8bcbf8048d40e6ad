"""Metrics as they are shown, asked for and written down: live, in the dashboard and the alerts, and in the docs."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.request import urlopen

import promql_parser as ast
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.project.tree import ROOT

DASHBOARD = ROOT / "deploy" / "dashboards" / "outrider.json"
ALERTS = ROOT / "deploy" / "alerts" / "outrider.yaml"
OPERATOR_RULES = ALERTS.with_name("prometheus-rule.yaml")
TABLE = ROOT / "docs" / "observability.md"


@dataclass
class Shown:
    """The labels of a name, with the values they have."""

    labels: dict[str, set[str]] = field(default_factory=dict)


def live(url: str) -> tuple[dict[str, Shown], dict[str, Shown]]:
    """What is shown at `url`: by the name of each sample, and by the name that a family goes by, without `le`."""
    with urlopen(url, timeout=10) as response:
        text = response.read().decode()
    samples: dict[str, Shown] = {}
    families: dict[str, Shown] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = family.name if family.type == "histogram" else sample.name
            for found in (samples.setdefault(sample.name, Shown()), families.setdefault(name, Shown())):
                for label, value in sample.labels.items():
                    found.labels.setdefault(label, set()).add(value)
            families[name].labels.pop("le", None)
    return samples, families


def panels() -> Iterator[tuple[str, str]]:
    """Title and expression of each query of the dashboard, its variables filled in."""
    for panel in json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"].replace("$__rate_interval", "5m").replace("$job", "outrider")


def alerts() -> list[dict[str, Any]]:
    """The alert rules."""
    groups = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


@dataclass(frozen=True)
class Documented:
    """A row of the table of metrics."""

    labels: frozenset[str]
    services: frozenset[str]


def documented() -> dict[str, Documented]:
    """The table of metrics, by name."""
    rows: dict[str, Documented] = {}
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("| `outrider_") or len(cells) != 4:
            continue
        names, labels, services = (re.findall(r"`([a-z_0-9]+)`", cell) for cell in cells[:3])
        for name in names:
            assert name not in rows, f"{name} is there twice"
            rows[name] = Documented(frozenset(labels), frozenset(services))
    return rows


# ------------------------------------------------------------------------------------------------------------- PromQL

GIVEN = frozenset({"job", "instance", "le"})
"""Labels that Prometheus gives each target, or a histogram its buckets."""


@dataclass(frozen=True)
class MetricQuery:
    """A metric, the labels that it must have, and the values of them that it is matched by."""

    name: str
    labels: frozenset[str]
    values: tuple[tuple[str, str], ...]


def metric_queries(expression: str) -> list[MetricQuery]:
    """All that an expression asks for.

    Raises:
        ValueError: it is no PromQL.
    """
    return list(_walk(ast.parse(expression), frozenset()))


def _walk(node: ast.Expr, labels: frozenset[str]) -> Iterator[MetricQuery]:
    """`labels` are those that all of it must have."""
    match node:
        case ast.VectorSelector():
            assert node.name, "every selector names its metric"
            matchers = node.matchers.matchers
            values = tuple((each.name, value) for each in matchers for value in each.value.split("|"))
            yield MetricQuery(node.name, labels | {each.name for each in matchers}, values)
        case ast.MatrixSelector():
            yield from _walk(node.vector_selector, labels)
        case ast.AggregateExpr():
            by = node.modifier
            assert by is None or by.type == ast.AggModifierType.By, "groups are named"
            yield from _walk(node.expr, frozenset(by.labels if by else ()))
        case ast.BinaryExpr():
            brought, matched = _join(node)
            yield from _walk(node.lhs, (labels - brought) | matched)
            yield from _walk(node.rhs, (labels & brought if brought else labels) | brought | matched)
        case ast.Call():
            for argument in node.args:
                yield from _walk(argument, labels)
        case ast.ParenExpr() | ast.UnaryExpr():
            yield from _walk(node.expr, labels)
        case ast.NumberLiteral() | ast.StringLiteral():
            return
        case _:
            raise AssertionError(f"{type(node).__name__} is not known here")


def _join(node: ast.BinaryExpr) -> tuple[frozenset[str], frozenset[str]]:
    """Labels that the right side brings (`group_left`), and those that both sides are matched by (`on`)."""
    how = node.modifier
    if how is None:
        return frozenset(), frozenset()
    assert how.card != ast.VectorMatchCardinality.OneToMany, "the one side stands on the right"
    on = how.matching
    matched = on.labels if on is not None and on.type == ast.LabelModifierType.Include else ()
    return frozenset(how.group_labels or ()), frozenset(matched)
