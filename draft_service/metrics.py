"""What the draft service shows of itself: how many sequences it holds.

It knows nothing of sequences: whoever holds them is asked when the metrics are read.
"""

from collections.abc import Callable

from prometheus_client import Gauge

from outrider.metrics import Metrics


def show_held(metrics: Metrics, *, running: Callable[[], int], cached: Callable[[], int]) -> None:
    """Shows how many sequences have a place, and how many the draft's KV pool holds.

    Both are called on whatever thread reads the metrics, so they must be quick, and change nothing.
    """
    for name, text, value in (
        ("outrider_num_requests_running", "Sequences in progress.", running),
        ("outrider_kv_sequences", "Sequences with keys and values in the draft's pool.", cached),
    ):
        Gauge(name, text, registry=metrics.registry).set_function(value)
