"""Metrics of the verifier service.

The engine updates them. Gauges read pool and queue when Prometheus scrapes.
"""

from typing import TYPE_CHECKING

from prometheus_client import Gauge, Histogram

from outrider.runtime.kv_cache import BLOCK_TOKENS, KVPool
from outrider.service.best_effort import Component
from outrider.service.metrics import Metrics, Times, VllmMetrics
from verifier_service.scheduler import Plan, Scheduler

if TYPE_CHECKING:
    from verifier_service.engine import StepSummary

STREAM_METRICS = Component("stream_metrics")
ENGINE_METRICS = Component("engine_metrics")

# From a kernel on a GPU to a slow CPU; each bucket about twice the one before.
_SECONDS = (10e-6, 20e-6, 50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3, 20e-3, 50e-3, 0.1, 0.2, 0.5, 1.0)


class SequenceMetrics:
    """Counts ended streams. Used on the event loop only."""

    def __init__(self, metrics: Metrics) -> None:
        self._ended = metrics.counter(
            "sequences",
            "Verify streams that ended, by gRPC status; CANCELLED: the draft service ended the stream.",
            status=("OK", "CANCELLED"),
        )

    @STREAM_METRICS.quiet
    def ended(self, status: str) -> None:
        self._ended.labels(status).inc()


class SpeculationMetrics:
    """Metrics of the engine. `planned`, `stepped` and `checked` are called on its thread, and never raise."""

    def __init__(self, metrics: Metrics, verify_path: str) -> None:
        def seconds(name: str, text: str, *labels: str) -> Histogram:
            return Histogram(f"outrider_{name}_seconds", text, labels, buckets=_SECONDS, registry=metrics.registry)

        counter = metrics.counter
        self._metrics = metrics
        self._drafts = counter("spec_decode_num_drafts", "Proposals of at least one token that were judged.", rule=())
        self._draft_tokens = counter("spec_decode_num_draft_tokens", "Drafted tokens in judged proposals.", rule=())
        self._accepted = counter("spec_decode_num_accepted_tokens", "Drafted tokens that were accepted.", rule=())
        self._accepted_at = counter(
            "spec_decode_num_accepted_tokens_per_pos",
            "Accepted tokens by position in the proposal, from 0.",
            rule=(),
            position=(),
        )
        self._queried = counter("prefix_cache_queries", "Prompt and committed tokens looked up in the prefix cache.")
        self._hit = counter(
            "prefix_cache_hits", "Looked-up tokens that were found, so that the target did not run them again."
        )
        self._preemptions = counter(
            "preemptions", "Sequences whose KV blocks were given to others; the target runs them again later."
        )
        self._checks = counter(
            "kv_integrity_checks",
            "Consistency checks of the KV block tables, made when no sequence is in progress.",
            outcome=("intact", "corrupted"),
        )
        self._verify = seconds("verify", "Time of one verification, for all sequences of a step.", "path").labels(
            verify_path
        )
        self._forward = Times(
            "outrider_step_forward_seconds",
            "Time of a forward pass of the target, for all sequences in it; in a step of several passes with sampling.",
            _SECONDS,
            metrics.registry,
        )
        self._step_tokens = counter("step_tokens", "Tokens in the target's forward passes, of prompts and rounds.")
        self._step_sequences = counter(
            "step_sequences", "Sequences in the target's forward passes; each counts once for each pass."
        )
        self._queue = seconds(
            "queue", "From the arrival of a round to the start of its step; within a Decode, from the verdict before."
        )

    def watch(self, pool: KVPool, scheduler: Scheduler) -> None:
        """Registers gauges of pool and queue."""
        gauge = self._metrics.gauge
        gauge("kv_blocks", "Blocks of the KV cache.", lambda: pool.blocks.count)
        used = "Blocks of the KV cache that sequences hold; the others are free."
        gauge("kv_blocks_used", used, lambda: pool.used_blocks)
        gauge("num_requests_running", "Sequences in progress.", lambda: len(scheduler.running))
        gauge("num_requests_waiting", "Sequences in the queue.", lambda: len(scheduler.waiting))

    def show_vllm(self, shown: VllmMetrics, pool: KVPool, scheduler: Scheduler) -> None:
        """Shows the metrics of load and speculation, and the size of the KV cache, under vLLM's names too."""
        shown.gauge("num_requests_running", "Sequences in progress.", lambda: len(scheduler.running))
        shown.gauge("num_requests_waiting", "Sequences in the queue.", lambda: len(scheduler.waiting))
        shown.gauge(
            "kv_cache_usage_perc",
            "Share of the KV cache that sequences hold; 1 is all of it.",
            lambda: pool.used_blocks / pool.blocks.count,
        )
        shown.add("spec_decode_num_drafts", self._drafts)
        shown.add("spec_decode_num_draft_tokens", self._draft_tokens)
        shown.add("spec_decode_num_accepted_tokens", self._accepted)
        shown.add("spec_decode_num_accepted_tokens_per_pos", self._accepted_at, "position")
        sizes = {"block_size": str(BLOCK_TOKENS), "num_gpu_blocks": str(pool.blocks.count)}
        info = Gauge("cache_config_info", "Always 1; the labels are the KV cache's.", tuple(sizes), registry=None)
        info.labels(**sizes).set(1)
        shown.add("cache_config_info", info, *sizes)

    @ENGINE_METRICS.quiet
    def planned(self, plan: Plan) -> None:
        for sequence, cached in plan.looked_up:
            self._queried.inc(len(sequence.tokens))
            self._hit.inc(cached)
        self._preemptions.inc(len(plan.preempted))

    @ENGINE_METRICS.quiet
    def stepped(self, step: "StepSummary") -> None:
        self._forward.observe(step.forward_seconds / step.passes, step.passes)
        self._step_tokens.inc(step.tokens + step.later_tokens)
        self._step_sequences.inc(step.sequences + step.later_tokens)
        if step.has_rounds:
            self._verify.observe(step.verify_seconds)
        for each in step.judged:
            self._queue.observe(each.queued)
            if each.drafted:
                self._judged(each.sequence.opening.sampling.rule.value, each.drafted, each.accepted)

    def _judged(self, rule: str, drafted: int, accepted: int) -> None:
        self._drafts.labels(rule).inc()
        self._draft_tokens.labels(rule).inc(drafted)
        self._accepted.labels(rule).inc(accepted)
        for position in range(accepted):
            self._accepted_at.labels(rule, str(position)).inc()

    @ENGINE_METRICS.quiet
    def checked(self, intact: bool) -> None:
        self._checks.labels("intact" if intact else "corrupted").inc()
