"""The metrics that are named in rules, dashboards and scalers, and those that operators are told to look at."""

import json
import re
from functools import cache

from tests.deploy.manifests import composed
from tests.project.tree import ROOT

COMPONENTS = ("hpa", "keda", "monitoring")


@cache
def metric_names() -> frozenset[str]:
    """Their names, as a scrape has them. Whatever begins with `outrider_` is one: nothing else of ours does."""
    found = set(re.findall(r"\boutrider_\w+", (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")))
    for component in COMPONENTS:
        # Objects and not text, so that comments do not count.
        text = json.dumps(composed("plaintext", component))
        found |= set(re.findall(r"\boutrider_\w+", text))
    return frozenset(found)
