"""Writes `components/monitoring/rules.yaml` from `alerts/outrider.yaml`: the rules, for the Prometheus operator.

kustomize cannot put one file into another. Run this after the rules have changed; a test compares the two.
"""

from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCE = HERE / "alerts" / "outrider.yaml"
TARGET = HERE / "components" / "monitoring" / "rules.yaml"

_HEAD = """\
# Written by deploy/rules.py from deploy/alerts/outrider.yaml. Change that one, and run this.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: outrider
  labels: {app.kubernetes.io/name: outrider}
spec:
"""


def wrapped(rules: str) -> str:
    """The object that holds a file of rules."""
    lines = (line for line in rules.splitlines() if not line.startswith("#"))
    return _HEAD + "".join(f"  {line}\n" if line else "\n" for line in lines)


if __name__ == "__main__":
    TARGET.write_text(wrapped(SOURCE.read_text(encoding="utf-8")), encoding="utf-8")
