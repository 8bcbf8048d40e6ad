"""The results of a step, for the timings in its verdicts, for the cost model and for metrics."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kernels.verify import Rule
from protos.outrider.v1 import speculation_pb2
from verifier_service.scheduler import Plan, TargetWork
from verifier_service.sequence import TargetSequence
from verifier_service.target_runner import StepResult


class Observer(Protocol):
    """Counts the engine's work. Called on the engine's thread, so it must be quick."""

    def verified(self, seconds: float) -> None:
        """One call of `verify` ended."""

    def judged(self, rule: Rule, drafted: int, accepted: int) -> None:
        """A round was judged; `accepted` of its `drafted` tokens are in the text."""

    def forwarded(self, tokens: int, sequences: int, seconds: float) -> None:
        """A forward pass ended."""

    def waited(self, seconds: float) -> None:
        """A round waited for its step."""

    def begun(self, tokens: int, cached: int) -> None:
        """A sequence starts to run; `cached` of its `tokens` are in the prefix cache."""

    def preempted(self) -> None:
        """A sequence was preempted; it will run again."""

    def checked(self, intact: bool) -> None:
        """The KV pool was checked."""


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
        passes: its forward passes.
        sequences: sequences in it.
        judged: committed rounds, in order.
        is_of_rounds: whether it had rounds, and neither prompt tokens nor an encoder.
        observer: of the engine when it ran: a step of the warm-up has none, also if it is accounted for later.
    """

    def __init__(self, work: Sequence[TargetWork], output: StepResult, observer: Observer | None) -> None:
        self.observer = observer
        self.tokens = sum(len(item.chunk.tokens) for item in work)
        self.sequences = len(work)
        self.passes = output.passes
        self.forward_seconds = output.forward_seconds
        self.verify_seconds = output.verify_seconds
        self.judged: list[JudgedRound] = []
        self.has_rounds = bool(output.proposals)
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
            queue_us=_micros(queued),
            forward_us=_micros(self.forward_seconds),
            verify_us=_micros(self.verify_seconds),
            pass_tokens=self.tokens,
            pass_sequences=self.sequences,
        )


def count_plan(observer: Observer, plan: Plan) -> None:
    """Counts the sequences that a plan starts and preempts."""
    for sequence, cached in plan.begun:
        observer.begun(len(sequence.tokens), cached)
    for _ in plan.preempted:
        observer.preempted()


def count_step(observer: Observer, step: Step) -> None:
    """Counts a step and its rounds."""
    observer.forwarded(step.tokens, step.sequences, step.forward_seconds)
    if step.has_rounds:
        observer.verified(step.verify_seconds)
    for each in step.judged:
        observer.judged(each.sequence.opening.sampling.rule, each.drafted, each.accepted)
        observer.waited(each.queued)


def _micros(seconds: float) -> int:
    return max(0, round(seconds * 1e6))
