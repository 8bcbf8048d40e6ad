"""A service's metrics, scraped over HTTP as Prometheus does."""

from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families

Samples = dict[str, dict[tuple[tuple[str, str], ...], float]]
"""Values by name, and by their labels in order."""


def scrape(url: str) -> Samples:
    """Read all samples shown at `url`."""
    with urlopen(url, timeout=10) as response:
        return parse(response.read().decode())


def parse(text: str) -> Samples:
    samples: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return samples
