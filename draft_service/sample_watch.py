"""What is told of a sample while it is written: to the metrics of all requests, and to its trace where it has one.

It looks at lengths and times, and changes nothing.
"""

import time

from draft_service.request_metrics import REQUEST_METRICS, RequestMetrics
from outrider.service.tracing import CallTrace
from protos.outrider.v1 import speculation_pb2


class SampleWatch:
    """Of one sample; none of its methods raises. Used on the event loop alone."""

    def __init__(self, metrics: RequestMetrics, trace: CallTrace, index: int) -> None:
        """`index` is which sample of its request it is."""
        self._metrics = metrics
        self._trace = trace
        self._index = index
        self._waits = False

    @REQUEST_METRICS.quiet
    def begins(self) -> None:
        """It waits for its first verdict from now on."""
        self._waits = True
        self._metrics.waits(1)

    @REQUEST_METRICS.quiet
    def ends(self) -> None:
        """It is over, or has its first verdict."""
        if self._waits:
            self._waits = False
            self._metrics.waits(-1)

    @REQUEST_METRICS.quiet
    def first_token(self, seconds: float) -> None:
        """Its first token leaves, so long after the request came."""
        self._metrics.first_token(seconds)

    @REQUEST_METRICS.quiet
    def next_tokens(self, seconds: float, count: int) -> None:
        """So many more leave together, so long after those before."""
        self._metrics.next_tokens(seconds, count)

    @REQUEST_METRICS.quiet
    def judged(
        self, verdict: speculation_pb2.Verdict, *, asked: int, drafted: int, draft: float | None, waited: float
    ) -> None:
        """A verdict is there.

        Args:
            verdict: what it says.
            asked: γ, as it was chosen; 0 where the target wrote alone.
            drafted: tokens that were proposed.
            draft: seconds that drafting them took; None where nothing was drafted.
            waited: seconds from the proposal to the verdict, less those without a verifier.
        """
        self.ends()
        timings = verdict.timings
        queue, forward, accept = timings.queue_us / 1e6, timings.forward_us / 1e6, timings.verify_us / 1e6
        wire = max(0.0, waited - queue - forward - accept)
        self._metrics.judged(draft, wire, queue, forward, accept)
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
                    "outrider.gamma": asked,
                    "outrider.drafted": drafted,
                    "outrider.accepted": verdict.accepted,
                    "outrider.committed": len(verdict.token_ids),
                    "outrider.draft_seconds": draft or 0.0,
                    "outrider.wire_seconds": wire,
                    "outrider.queue_seconds": queue,
                    "outrider.pass_seconds": forward,
                    "outrider.accept_seconds": accept,
                },
            )
