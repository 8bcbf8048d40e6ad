"""What requests have come to: how many, how long each took until when, and where the time of a round goes."""

from prometheus_client import Counter, Gauge, Histogram

from outrider.service.best_effort import Component
from outrider.service.metrics import Metrics

REQUEST_METRICS = Component("request_metrics")
REQUEST_LOG = Component("request_log")

# From what a drafter that copies takes to what a long prompt does, each about twice the one before.
_SHORT = (50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3, 20e-3, 50e-3, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_FIRST_TOKEN = (1e-3, 2e-3, 5e-3, 10e-3, 20e-3, 50e-3, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
_WHOLE = (10e-3, 20e-3, 50e-3, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0)

PHASES = ("draft", "wire", "queue", "pass", "accept")
"""Of a round: drafting its proposal; the way to the verifier and back, with all that waits on it; waiting there for the
pass; the pass; acceptance and sampling. The last three are those of `VerdictTimings`."""


class RequestMetrics:
    """Fed from the event loop alone."""

    def __init__(self, metrics: Metrics) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"outrider_{name}", text, labels, registry=metrics.registry)

        def seconds(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(f"outrider_{name}_seconds", text, labels, registry=metrics.registry, buckets=buckets)

        self._requests = counter("requests", "Calls of Generate that have ended, by their status.", "status")
        for status in ("OK", "CANCELLED"):
            self._requests.labels(status)
        self._prompt = counter("prompt_tokens", "Tokens of their prompts, each counted once, whatever the samples.")
        self._generated = counter("generation_tokens", "Tokens that went out to clients.")
        self._first = seconds(
            "time_to_first_token", "From a request's arrival to a sample's first token.", _FIRST_TOKEN
        )
        self._between = seconds(
            "inter_token_latency",
            "From one token of a sample to the next; where several leave together, each has its share of the time.",
            _SHORT,
        )
        self._whole = seconds(
            "e2e_request_latency", "From a request's arrival to its end, where that was well.", _WHOLE
        )
        self._queued = seconds(
            "request_queue", "From a call's arrival in the queue of this service to its turn.", _FIRST_TOKEN
        )
        rounds = seconds(
            "round", "Where the time of a round went; `draft` is of those alone that had a proposal.", _SHORT, "phase"
        )
        self._phases = [rounds.labels(phase) for phase in PHASES]
        self._waiting = Gauge(
            "outrider_num_requests_waiting",
            "Samples in progress that have had no verdict yet: they wait for a verifier, its queue, or their prompt.",
            registry=metrics.registry,
        )

    def queued(self, seconds: float) -> None:
        """A call has left the queue after so long."""
        self._queued.observe(seconds)

    def ended(self, status: str, seconds: float, *, prompt: int, generated: int) -> None:
        """A request has ended with this status, `seconds` after it came."""
        self._requests.labels(status).inc()
        self._prompt.inc(prompt)
        self._generated.inc(generated)
        if status == "OK":
            self._whole.observe(seconds)

    def first_token(self, seconds: float) -> None:
        """A sample's first token leaves, so long after its request came."""
        self._first.observe(seconds)

    def next_tokens(self, seconds: float, count: int) -> None:
        """So many more leave together, so long after those before."""
        share = seconds / max(1, count)
        for _ in range(count):
            self._between.observe(share)

    def waits(self, change: int) -> None:
        """One more sample waits for its first verdict, or one less."""
        self._waiting.inc(change)

    def judged(self, draft: float | None, *others: float) -> None:
        """A round took so many seconds in each of `PHASES`; the target wrote alone where `draft` is None."""
        if draft is not None:
            self._phases[0].observe(draft)
        for phase, seconds in zip(self._phases[1:], others, strict=True):
            phase.observe(seconds)
