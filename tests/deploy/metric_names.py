"""The metrics that manifests name, in rules, dashboards and scalers."""

import json
import re
from functools import cache

from tests.deploy.manifests import composed

COMPONENTS = ("hpa", "keda", "monitoring")


@cache
def metric_names() -> frozenset[str]:
    """Their names, as a scrape has them. Whatever begins with `outrider_` is one: nothing else of ours does."""
    found: set[str] = set()
    for component in COMPONENTS:
        # Objects and not text, so that comments do not count.
        text = json.dumps(composed("plaintext", component))
        found |= set(re.findall(r"\boutrider_\w+", text))
    return frozenset(found)
