"""What the draft service shows of itself: its sequences, KV cache, drafters and outcome cache, and its verifiers.

Most values come from the limit, the pool, the drafters and the counts when the metrics are read.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import Counter, Gauge
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from draft_service.concurrency import ConcurrencyLimit
from draft_service.drafters.base import Kind
from draft_service.drafters.guard import GuardedDrafter
from draft_service.drafters.outcome_cache import Counts
from draft_service.drafters.staged import StagedCounts, Staging
from draft_service.replicas import Replicas, State
from outrider.runtime.kv_cache import KVPool
from outrider.service.best_effort import Component
from outrider.service.metrics import Metrics

FAILOVER_METRICS = Component("failover_metrics")


def show_held(metrics: Metrics, limit: ConcurrencyLimit, pool: KVPool | None) -> None:
    """Shows what is in these from now on, under the names that the verifier's have; no pool where there is no model."""

    def gauge(name: str, text: str, value: Callable[[], int]) -> None:
        Gauge(f"outrider_{name}", text, registry=metrics.registry).set_function(value)

    gauge("num_requests_running", "Samples and proposed sequences in progress.", lambda: limit.running)
    gauge("num_requests_queued", "Samples and proposed sequences in the queue of this service.", lambda: limit.waiting)
    if pool is not None:
        gauge("kv_blocks", "Blocks of the draft's KV pool.", lambda: pool.blocks.count)
        gauge("kv_blocks_used", "Blocks that sequences hold; the rest is free.", lambda: pool.used_blocks)


def show_drafters(metrics: Metrics, drafters: Mapping[Kind, GuardedDrafter], staging: Staging | None) -> None:
    """Shows from now on what each drafter has cost, by its name; `staging` where there is a draft model."""
    metrics.registry.register(_Drafters(drafters))
    if staging is not None:
        metrics.registry.register(_Staged(staging.counts))


def show_outcome_cache(metrics: Metrics, counts: Counts) -> None:
    """Shows from now on what an outcome cache does."""
    metrics.registry.register(_OutcomeCache(counts))


class _Drafters(Collector):
    def __init__(self, drafters: Mapping[Kind, GuardedDrafter]) -> None:
        self._drafters = drafters

    def collect(self) -> Iterator[Metric]:
        """One family a figure, one series a drafter."""
        costs = {kind: drafter.cost for kind, drafter in self._drafters.items()}
        yield self._family(
            CounterMetricFamily("outrider_draft_proposals", "Proposals that came.", labels=("drafter",)),
            {kind: cost.proposals for kind, cost in costs.items()},
        )
        yield self._family(
            CounterMetricFamily("outrider_spec_decode_num_draft_tokens", "Tokens in them.", labels=("drafter",)),
            {kind: cost.tokens for kind, cost in costs.items()},
        )
        yield self._family(
            CounterMetricFamily(
                "outrider_draft_seconds", "From asking for them to having them, summed.", labels=("drafter",)
            ),
            {kind: cost.seconds for kind, cost in costs.items()},
        )
        yield self._family(
            CounterMetricFamily(
                "outrider_draft_failures",
                "Proposals that did not come: the drafter failed, was late, or answered nonsense.",
                labels=("drafter",),
            ),
            {kind: cost.failures for kind, cost in costs.items()},
        )
        yield self._family(
            GaugeMetricFamily(
                "outrider_drafter_up", "0 while it fails for everybody and is only probed.", labels=("drafter",)
            ),
            {kind: drafter.is_up for kind, drafter in self._drafters.items()},
        )

    @staticmethod
    def _family(family: CounterMetricFamily | GaugeMetricFamily, values: Mapping[Kind, float]) -> Metric:
        for kind, value in values.items():
            family.add_metric([kind.value], float(value))
        return family


class _Staged(Collector):
    def __init__(self, counts: StagedCounts) -> None:
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        """The inner game, under names of its own: none of it has reached a verifier."""
        counts = self._counts
        yield CounterMetricFamily(
            "outrider_staged_passes", "Passes of the draft model that judged guesses, by sequence.", value=counts.passes
        )
        yield CounterMetricFamily(
            "outrider_staged_guessed_tokens", "Tokens guessed for the draft model.", value=counts.guessed
        )
        yield CounterMetricFamily(
            "outrider_staged_accepted_tokens", "Those of them that it let stand.", value=counts.accepted
        )
        yield CounterMetricFamily(
            "outrider_staged_failures", "Sequences that nobody guesses for any more.", value=counts.failures
        )


class _OutcomeCache(Collector):
    def __init__(self, counts: Counts) -> None:
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
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


class FailoverMetrics:
    """What losing verifiers costs."""

    def __init__(self, metrics: Metrics, reasons: Iterable[str]) -> None:
        """`reasons` are those of `switched`."""
        self._switches = Counter(
            "outrider_verifier_switches",
            "Sequences that were opened at another verifier, or anew at the same one, by how the last one was lost.",
            ("reason",),
            registry=metrics.registry,
        )
        for reason in reasons:
            self._switches.labels(reason)
        self._seconds = Counter(
            "outrider_failover_seconds",
            "Seconds that sequences were without a verifier, or being opened at the next, over all of them.",
            registry=metrics.registry,
        )

    @FAILOVER_METRICS.quiet
    def switched(self, reason: str) -> None:
        """A sequence goes on at another verifier."""
        self._switches.labels(reason).inc()

    @FAILOVER_METRICS.quiet
    def paused(self, seconds: float) -> None:
        """A sequence was without a verifier for so long."""
        self._seconds.inc(seconds)


def show_verifiers(metrics: Metrics, replicas: Replicas, budget: Callable[[], float]) -> None:
    """Shows the verifiers from now on, and how many sequences may be opened again at once."""
    metrics.registry.register(_Verifiers(replicas))
    Gauge(
        "outrider_failover_budget", "Sequences that may be opened again at once.", registry=metrics.registry
    ).set_function(budget)


class _Verifiers(Collector):
    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """The verifiers as they are now: addresses come and go."""
        replicas = self._replicas.all()
        counts = GaugeMetricFamily(
            "outrider_verifiers",
            "Verifiers by status: unknown, mismatched (another model), or the state of the breaker.",
            labels=["status"],
        )
        for status in ("unknown", "mismatched", *(state.value for state in State)):
            counts.add_metric([status], sum(replica.status == status for replica in replicas))
        breakers = GaugeMetricFamily(
            "outrider_verifier_breaker_state",
            "The circuit breaker of each verifier: 0 closed, 1 half-open, 2 open.",
            labels=["verifier"],
        )
        sequences = GaugeMetricFamily(
            "outrider_verifier_sequences", "Sequences of this service at each verifier.", labels=["verifier"]
        )
        for replica in replicas:
            breakers.add_metric([replica.address], list(State).index(replica.breaker.state))
            sequences.add_metric([replica.address], replica.num_open)
        yield from (counts, breakers, sequences)
