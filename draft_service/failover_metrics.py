"""What the draft service shows of its verifiers: which there are, how they do, and what losing them has cost."""

from collections.abc import Iterator

from prometheus_client import Counter, Gauge
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from draft_service.breaker import State
from draft_service.losses import Loss
from draft_service.verifier_link import VerifierLink
from outrider.service.best_effort import Component
from outrider.service.metrics import Metrics

FAILOVER_METRICS = Component("failover_metrics")

_BREAKER = {State.CLOSED: 0, State.HALF_OPEN: 1, State.OPEN: 2}


class FailoverMetrics:
    """Counts what sequences go through (`draft_service.failover.Observer`)."""

    def __init__(self, metrics: Metrics) -> None:
        self._switches = Counter(
            "outrider_verifier_switches",
            "Sequences that were opened at another verifier, or anew at the same one, by how the last one was lost.",
            ("reason",),
            registry=metrics.registry,
        )
        for loss in Loss:
            self._switches.labels(loss.value)
        self._seconds = Counter(
            "outrider_failover_seconds",
            "Seconds that sequences were without a verifier, or being opened at the next, over all of them.",
            registry=metrics.registry,
        )

    @FAILOVER_METRICS.quiet
    def switched(self, loss: Loss) -> None:
        """A sequence has another verifier, since it has lost the one before."""
        self._switches.labels(loss.value).inc()

    @FAILOVER_METRICS.quiet
    def paused(self, seconds: float) -> None:
        """It was without one for so long."""
        self._seconds.inc(seconds)


class _Verifiers(Collector):
    """The verifiers as they are when somebody looks: addresses come and go."""

    def __init__(self, link: VerifierLink) -> None:
        self._link = link

    def collect(self) -> Iterator[GaugeMetricFamily]:
        replicas = self._link.replicas.all()
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
            breakers.add_metric([replica.address], _BREAKER[replica.breaker.state])
            sequences.add_metric([replica.address], replica.num_open)
        yield from (counts, breakers, sequences)


def show_verifiers(metrics: Metrics, link: VerifierLink) -> None:
    """Shows the verifiers behind a link from now on."""
    metrics.registry.register(_Verifiers(link))
    budget = Gauge(
        "outrider_failover_budget",
        "Sequences that may be opened again at once.",
        registry=metrics.registry,
    )
    budget.set_function(lambda: link.budget.tokens)
