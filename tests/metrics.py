"""A service's metrics, scraped over HTTP as Prometheus does."""

from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families

Samples = dict[str, dict[tuple[tuple[str, str], ...], float]]
"""Values by name, and by their labels in order."""


def scrape(url: str, *names: str) -> Samples:
    """Read the samples shown at `url`: all, or those with these names."""
    with urlopen(url, timeout=10) as response:
        text = response.read().decode()
    if names:  # to parse all of them takes longer than to write them
        text = "".join(
            line for line in text.splitlines(keepends=True) if line.replace("{", " ").partition(" ")[0] in names
        )
    return parse(text)


def parse(text: str) -> Samples:
    samples: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return samples
