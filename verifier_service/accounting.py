"""The results of a step, for the timings in its verdicts, for the cost model and for metrics."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outrider.service.wire import round_micros
from protos.outrider.v1 import speculation_pb2
from verifier_service.scheduler import TargetWork
from verifier_service.sequence import TargetSequence
from verifier_service.target_runner import StepResult

if TYPE_CHECKING:
    from verifier_service.metrics import SpeculationMetrics


@dataclass(frozen=True, slots=True)
class JudgedRound:
    """A round whose verdict is committed.

    Attributes:
        drafted: its γ.
        accepted: how many of them are in the text.
        queued: seconds that it waited for its step.
    """

    sequence: TargetSequence
    drafted: int
    accepted: int
    queued: float


class Step:
    """Results of a step, for verdicts and for accounting.

    Attributes:
        tokens: tokens in its forward pass, or in the first of several.
        judged: committed rounds, in order.
        is_of_rounds: whether it had rounds, and neither prompt tokens nor an encoder.
        observer: of the engine when it ran: a step of the warm-up has none, also if it is accounted for later.
    """

    def __init__(self, work: Sequence[TargetWork], output: StepResult, observer: "SpeculationMetrics | None") -> None:
        self.observer = observer
        self.tokens = sum(len(item.chunk.tokens) for item in work)
        self.sequences = len(work)
        self.passes = output.passes
        self.forward_seconds = output.forward_seconds
        self.verify_seconds = output.verify_seconds
        self.judged: list[JudgedRound] = []
        self.has_rounds = bool(output.results)
        self.is_of_rounds = self.has_rounds and all(
            item.round is not None and item.chunk.logits_from == 0 and not item.encodes for item in work
        )

    @property
    def seconds(self) -> float:
        """Of forward pass and verification."""
        return self.forward_seconds + self.verify_seconds

    def timings(self, queued: float) -> speculation_pb2.VerdictTimings:
        """Timings for the verdict of a round that waited `queued` seconds."""
        return speculation_pb2.VerdictTimings(
            queue_us=round_micros(queued),
            forward_us=round_micros(self.forward_seconds),
            verify_us=round_micros(self.verify_seconds),
            pass_tokens=self.tokens,
            pass_sequences=self.sequences,
        )
