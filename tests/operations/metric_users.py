"""Metrics as they are shown, asked for and written down: live, in the dashboard and the alerts, and in the docs."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.request import urlopen

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
