"""Metrics of the draft service: requests, rounds, drafters, verifiers, memory."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from prometheus_client import Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from draft_service.circuit_breaker import State
from draft_service.concurrency import ConcurrencyLimit
from draft_service.drafters.base import RUN_A_MODEL, DrafterKind
from draft_service.drafters.engine import DraftEngine
from draft_service.drafters.guard import Cost, GuardedDrafter
from draft_service.replicas import LOAD_SECONDS, STATUSES, Replica, Replicas
from draft_service.sequence import Round
from outrider.runtime.kv_cache import KVPool
from outrider.service.best_effort import Component
from outrider.service.metrics import FIRST_TOKEN_S, SHORT_S, Collected, Metrics, TextMetrics, VllmMetrics
from outrider.service.tracing import CallTrace
from protos.outrider.v1 import speculation_pb2

REQUEST_METRICS = Component("request_metrics")
REQUEST_LOG = Component("request_log")

PHASES = ("draft", "wire", "queue", "forward", "verify")
"""Of a round: drafting; the network, with waits on both event loops; the queue at the verifier; the forward pass;
acceptance and sampling. The last three are fields of `VerdictTimings`."""


class RequestMetrics:
    """Metrics of requests. Used on the event loop only."""

    def __init__(self, metrics: Metrics) -> None:
        self.texts = TextMetrics(metrics.registry, "outrider_", "Generate calls")
        # The last three are those of alerts: `rate` does not see the first rise of a counter that appears with it.
        statuses = ("OK", "CANCELLED", "INTERNAL", "RESOURCE_EXHAUSTED", "UNAVAILABLE")
        self._requests = metrics.counter("requests", "Generate calls that ended, by gRPC status.", status=statuses)
        self.queued = Histogram(
            "outrider_request_queue_seconds",
            "Time of a call in the queue of this service; 0 if it did not wait.",
            registry=metrics.registry,
            buckets=FIRST_TOKEN_S,
        )
        rounds = Histogram(
            "outrider_round_seconds",
            "Time of a round by phase: draft (rounds with a proposal only), wire, queue, forward, verify.",
            ("phase",),
            registry=metrics.registry,
            buckets=SHORT_S,
        )
        self.phases = [rounds.labels(phase) for phase in PHASES]
        self.waiting = Gauge(
            "outrider_num_requests_waiting",
            "Samples in progress without a verdict yet: they wait for a verifier, in its queue, or for their prompt.",
            registry=metrics.registry,
        )
        self.counts_speculation = False

    def ended(self, status: str, seconds: float, *, prompt: int, generated: int) -> None:
        """Records a request that ended `seconds` after its arrival."""
        self._requests.labels(status).inc()
        self.texts.ended(prompt=prompt, generated=generated)
        if status == "OK":
            self.texts.whole.observe(seconds)

    def show_vllm(self, shown: VllmMetrics) -> None:
        """Shows them, and from now on the counters of verdicts, under vLLM's names too."""
        self.counts_speculation = True
        self.texts.show_vllm(shown)


class SampleWatch:
    """Metrics and trace of one sample. No method raises. Used on the event loop only."""

    def __init__(self, metrics: RequestMetrics, trace: CallTrace, index: int) -> None:
        """`index` is that of the sample in its request."""
        self.texts = metrics.texts
        self._metrics = metrics
        self._trace = trace
        self._index = index
        self._waits = False

    @REQUEST_METRICS.quiet
    def begins(self) -> None:
        """The sample starts to wait for its first verdict."""
        self._waits = True
        self._metrics.waiting.inc()

    @REQUEST_METRICS.quiet
    def ends(self) -> None:
        """The sample has its first verdict, or has ended."""
        if self._waits:
            self._waits = False
            self._metrics.waiting.dec()

    @REQUEST_METRICS.quiet
    def judged(self, round_: Round, verdict: speculation_pb2.Verdict) -> None:
        """Records the last verdict of a round."""
        self.ends()
        drafted, draft = len(round_.draft_tokens), None if round_.draft is None else round_.draft.seconds
        waited, timings = round_.waited, verdict.timings
        queue, forward, verify = timings.queue_us / 1e6, timings.forward_us / 1e6, timings.verify_us / 1e6
        wire = max(0.0, waited - queue - forward - verify)
        for phase, seconds in zip(self._metrics.phases, (draft, wire, queue, forward, verify), strict=True):
            if seconds is not None:
                phase.observe(seconds)
        if drafted and self._metrics.counts_speculation:
            self._metrics.texts.judged(1, drafted, [1] * verdict.accepted)
        if self._trace.is_recorded:
            now = time.perf_counter()
            self._trace.span(
                "round",
                now - waited - (draft or 0.0),
                now,
                {
                    "outrider.sample": self._index,
                    "outrider.round": verdict.round,
                    "outrider.base_length": verdict.base_length,
                    "outrider.gamma": round_.gamma,
                    "outrider.drafted": drafted,
                    "outrider.accepted": verdict.accepted,
                    "outrider.committed": len(verdict.token_ids),
                    "outrider.draft_seconds": draft or 0.0,
                    "outrider.wire_seconds": wire,
                    "outrider.queue_seconds": queue,
                    "outrider.forward_seconds": forward,
                    "outrider.verify_seconds": verify,
                },
            )


FAILOVER_METRICS = Component("failover_metrics")


def show_held(metrics: Metrics, limit: ConcurrencyLimit, pool: KVPool | None) -> None:
    """Registers gauges of sequences and KV blocks. `pool` is None without a draft model."""
    metrics.gauge("num_requests_running", "Samples and Propose streams in progress.", lambda: limit.running)
    queued = "Samples and Propose streams in the queue of this service."
    metrics.gauge("num_requests_queued", queued, lambda: limit.waiting)
    if pool is not None:
        metrics.gauge("kv_blocks", "Blocks of the KV cache.", lambda: pool.blocks.count)
        used = "Blocks of the KV cache that sequences hold; the others are free."
        metrics.gauge("kv_blocks_used", used, lambda: pool.used_blocks)


def verifiers_load(replicas: Replicas) -> speculation_pb2.VerifierLoad:
    """The load of ready verifiers by their last verdicts: `waiting` in sum, `kv_usage` on average; 0 without a recent
    verdict. Any thread may call it.
    """
    now = time.monotonic()
    ready = [replica for replica in replicas.all() if replica.status == "ready"]
    loads = [replica.reported for replica in ready if now - replica.reported_at < LOAD_SECONDS]
    return speculation_pb2.VerifierLoad(
        waiting=sum(load.waiting for load in loads), kv_usage=sum(load.kv_usage for load in loads) / max(1, len(loads))
    )


def show_vllm(shown: VllmMetrics, requests: RequestMetrics, limit: ConcurrencyLimit, replicas: Replicas) -> None:
    """Shows requests, speculation and load under vLLM's names too.

    A router of requests reads the load of the pods that it chooses from. Most of a draft service's load is at its
    verifiers, so their queues and their KV cache count here.
    """
    requests.show_vllm(shown)
    shown.gauge("num_requests_running", "Samples and Propose streams in progress.", lambda: limit.running)
    shown.gauge(
        "num_requests_waiting",
        "Samples and Propose streams in the queue of this service, and sequences in those of its verifiers.",
        lambda: limit.waiting + verifiers_load(replicas).waiting,
    )
    shown.gauge(
        "kv_cache_usage_perc",
        "Share of the verifiers' KV cache that sequences hold, as last reported; 0 if unknown, 1 is all of it.",
        lambda: verifiers_load(replicas).kv_usage,
    )
    source = Collected(lambda: cache_config(replicas.all()))
    shown.add("cache_config_info", source, "block_size", "num_gpu_blocks")


def cache_config(replicas: Iterable[Replica]) -> Iterator[Metric]:
    """Sizes of the KV caches of all ready verifiers together, whose usage the draft service shows as its own.

    One series, or none while no verifier has told its size.
    """
    family = GaugeMetricFamily(
        "cache_config_info",
        "Always 1; the labels are those of the verifiers' KV caches together.",
        labels=("block_size", "num_gpu_blocks"),
    )
    ready = [replica.model for replica in replicas if replica.status == "ready"]
    limits = [model.limits for model in ready if model is not None and model.limits.kv_blocks]
    if limits:
        sizes = limits[0].kv_block_tokens, sum(each.kv_blocks for each in limits)
        family.add_metric([str(size) for size in sizes], 1.0)
    yield family


def show_drafters(metrics: Metrics, drafters: Mapping[DrafterKind, GuardedDrafter], engine: DraftEngine | None) -> None:
    """Registers the totals of each drafter, and of a draft model if there is one."""
    metrics.registry.register(Collected(lambda: _of_drafters(drafters)))
    if engine is not None:
        costs = [drafter.cost for kind, drafter in drafters.items() if kind in RUN_A_MODEL]
        metrics.registry.register(Collected(lambda: _of_model(engine, costs)))


def _of_drafters(drafters: Mapping[DrafterKind, GuardedDrafter]) -> Iterator[Metric]:
    failures = "Proposals that were missing, late or invalid, or that an error ended."
    for name, text, field in (
        ("draft_proposals", "Proposals that the drafter gave.", "proposals"),
        ("spec_decode_num_draft_tokens", "Drafted tokens.", "tokens"),
        ("draft_seconds", "Seconds of drafting, summed over proposals.", "seconds"),
        ("draft_failures", failures, "failures"),
    ):
        family = CounterMetricFamily(f"outrider_{name}", text, labels=("drafter",))
        for kind, drafter in drafters.items():
            family.add_metric([kind.value], getattr(drafter.cost, field))
        yield family
    text = "1 while the drafter is in use; 0 while it is off after failures and only probed."
    is_up = GaugeMetricFamily("outrider_drafter_up", text, labels=("drafter",))
    for kind, drafter in drafters.items():
        is_up.add_metric([kind.value], float(drafter.is_up))
    yield is_up


def _of_model(engine: DraftEngine, costs: Sequence[Cost]) -> Iterator[Metric]:
    """`costs` are of the drafters that run the model. Verifiers have metrics of their own prefix caches. Guesses have
    metrics of their own, too: they never reach a verifier.
    """
    looked_up = "Prompt and committed tokens looked up in the prefix cache of the draft model."
    found = "Looked-up tokens that were found, so that the draft model did not run them again."
    steps = "Steps of the draft model that judged guessed tokens; each counts once for each sequence."
    failures = "Sequences for which guessing failed, so that the draft model drafts without guesses."
    staging = engine.staging
    totals: list[tuple[str, str, float]] = [
        ("draft_prefix_cache_queries", looked_up, engine.prefix_queries),
        ("draft_prefix_cache_hits", found, engine.prefix_hits),
        ("staged_steps", steps, staging.steps),
        ("staged_guessed_tokens", "Guessed tokens.", staging.guessed),
        ("staged_accepted_tokens", "Guessed tokens that the draft model accepted.", staging.accepted),
        ("staged_failures", failures, staging.failures),
    ]
    for name, text, field in (
        ("queries", "Verdicts before which tokens were drafted for likely outcomes.", "cache_queries"),
        ("hits", "Verdicts whose outcome was among those drafted for.", "cache_hits"),
        ("drafted_tokens", "Tokens drafted for likely outcomes.", "cache_drafted"),
        ("used_tokens", "Tokens drafted for likely outcomes that became part of a proposal.", "cache_used"),
        ("saved_seconds", "Seconds that drafting the used tokens would have taken.", "cache_saved_seconds"),
    ):
        totals.append((f"outcome_cache_{name}", text, sum(getattr(cost, field) for cost in costs)))
    for name, text, value in totals:
        yield CounterMetricFamily(f"outrider_{name}", text, value)


class FailoverMetrics:
    """Metrics of failover."""

    def __init__(self, metrics: Metrics, reasons: Iterable[str]) -> None:
        """`reasons` are the labels of `switched`."""
        self._switches = metrics.counter(
            "verifier_switches",
            "Sequences opened again, at another verifier or the same, by the reason why the last one was left.",
            reason=reasons,
        )
        self._seconds = metrics.counter(
            "failover_seconds", "Seconds that sequences were without a verifier, summed over sequences."
        )

    @FAILOVER_METRICS.quiet
    def switched(self, reason: str) -> None:
        self._switches.labels(reason).inc()

    @FAILOVER_METRICS.quiet
    def paused(self, seconds: float) -> None:
        self._seconds.inc(seconds)


def show_verifiers(metrics: Metrics, replicas: Replicas, budget: Callable[[], float]) -> None:
    """Registers the status of all verifiers, and the failover budget."""
    metrics.registry.register(Collected(lambda: _of_verifiers(replicas.all())))
    metrics.gauge("failover_budget", "Sequences that may be opened again now.", budget)


def _of_verifiers(replicas: Sequence[Replica]) -> Iterator[Metric]:
    counts = GaugeMetricFamily(
        "outrider_verifiers",
        "Verifiers by status: unknown, mismatched (another model), ready, recovering (on trial) or failing.",
        labels=["status"],
    )
    for status in STATUSES:
        counts.add_metric([status], sum(replica.status == status for replica in replicas))
    breakers = GaugeMetricFamily(
        "outrider_verifier_breaker_state",
        "Circuit breaker of each verifier: 0 closed (ready), 1 half-open (recovering), 2 open (failing).",
        labels=["verifier"],
    )
    sequences = GaugeMetricFamily(
        "outrider_verifier_sequences", "Sequences of this service at the verifier.", labels=["verifier"]
    )
    for replica in replicas:
        breakers.add_metric([replica.address], list(State).index(replica.breaker.state))
        sequences.add_metric([replica.address], replica.num_open)
    yield from (counts, breakers, sequences)
