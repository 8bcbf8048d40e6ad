"""What the draft service shows of itself: how many sequences it holds, and how much of its KV cache they take.

It knows nothing of sequences: places and the pool are asked when the metrics are read.
"""

from collections.abc import Callable

from prometheus_client import Gauge

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
