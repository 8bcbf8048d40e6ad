"""What the draft service shows of itself: the sequences it holds, its KV cache, and what its outcome cache does.

It knows nothing of sequences: places, the pool and the counts are asked when the metrics are read.
"""

from collections.abc import Callable, Iterator

from prometheus_client import Gauge
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from draft_service.drafters.ahead import Counts
from draft_service.pair import Places
from outrider.lm.kv_pool import KVPool
from outrider.metrics import Metrics


def show_held(metrics: Metrics, places: Places, pool: KVPool | None) -> None:
    """Shows what is in these from now on, under the names that the verifier's have; no pool where there is no model."""

    def gauge(name: str, text: str, value: Callable[[], int]) -> None:
        Gauge(f"outrider_{name}", text, registry=metrics.registry).set_function(value)

    gauge("num_requests_running", "Samples and proposed sequences in progress.", lambda: places.taken)
    if pool is not None:
        gauge("kv_blocks", "Blocks of the draft's KV pool.", lambda: pool.blocks.count)
        gauge("kv_blocks_used", "Blocks that sequences hold; the rest is free.", lambda: pool.used_blocks)


class OutcomeCacheMetrics(Collector):
    """Shows what an outcome cache has done so far."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts

    def collect(self) -> Iterator[CounterMetricFamily]:
        """The counters as they are now."""
        counts = self._counts
        for name, text, value in (
            ("queries", "Verdicts for whose likely outcomes something had been drafted.", counts.hits + counts.misses),
            ("hits", "Those whose outcome was among them.", counts.hits),
            ("drafted_tokens", "Tokens drafted for likely outcomes.", counts.drafted),
            ("used_tokens", "Those that became part of a proposal; the others were wasted.", counts.used),
            ("saved_seconds", "What drafting the used ones would have taken.", counts.saved_seconds),
        ):
            yield CounterMetricFamily(f"outrider_outcome_cache_{name}", text, value)
