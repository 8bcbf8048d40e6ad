"""The verifier's engine: packs what is ready of all sequences into one pass, judges it with one `verify`, and answers.

It runs on a thread of its own (`outrider.lm.engine`). It knows nothing of gRPC: replies leave through each sequence's
`deliver`.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import structlog

from kernels.verify import Rule
from outrider.cost_line import FittedCost
from outrider.lm.engine import Engine
from outrider.lm.errors import PoolCorrupted
from outrider.lm.packed import Chunk, PackedModel
from outrider.lm.prefix_cache import PrefixCache
from outrider.rpc.errors import RequestError, internal
from protos.outrider.v1 import model_pb2, speculation_pb2, verifier_service_pb2
from verifier_service.gamma_cap import GammaCap
from verifier_service.judging import Judge, Judged
from verifier_service.linger import seconds_to_linger
from verifier_service.rounds import Round
from verifier_service.scheduler import IDLE_SECONDS, Scheduler, TargetWork
from verifier_service.sequence import TargetSequence, is_sound


@dataclass(frozen=True, slots=True)
class Open:
    """A sequence begins."""

    sequence: TargetSequence


@dataclass(frozen=True, slots=True)
class Submit:
    """A round of a sequence."""

    sequence: TargetSequence
    round: Round


@dataclass(frozen=True, slots=True)
class Read:
    """The client has read this many replies."""

    sequence: TargetSequence
    replies: int


@dataclass(frozen=True, slots=True)
class Remind:
    """Say again that a sequence waits, if it does."""

    sequence: TargetSequence


@dataclass(frozen=True, slots=True)
class HalfClose:
    """The client sends no more rounds."""

    sequence: TargetSequence


@dataclass(frozen=True, slots=True)
class Close:
    """The stream is gone: free what it held."""

    sequence: TargetSequence


@dataclass(frozen=True, slots=True)
class Drain:
    """The server is going away: tell every sequence."""


_log = structlog.get_logger()

Message = Open | Submit | Read | Remind | HalfClose | Close | Drain
Result = TypeVar("Result")

_DRAINING = verifier_service_pb2.Notice(
    kind=verifier_service_pb2.NOTICE_KIND_DRAINING, message="the verifier is going away"
)

# How long nothing has run before the pool is looked over.
QUIET_SECONDS = 1.0
# How often a pass of each width is tried before the first message: the first costs several times the next.
TRIALS = 3


class Observer(Protocol):
    """Who is told what was judged. Called on the engine's thread, so it must be quick, and must not raise."""

    def verified(self, seconds: float) -> None:
        """One call of `verify` took so long."""

    def judged(self, rule: Rule, drafted: int, accepted: int) -> None:
        """A round of `drafted` tokens was judged, and `accepted` of them are in the text."""

    def passed(self, tokens: int, sequences: int, seconds: float) -> None:
        """The model ran once, over so many tokens of so many sequences."""

    def waited(self, seconds: float) -> None:
        """A round waited so long for its pass."""

    def begun(self, tokens: int, cached: int) -> None:
        """A sequence is to be run; `cached` of its `tokens` need not be."""

    def preempted(self) -> None:
        """A sequence gave its blocks to others, and will be run again."""

    def checked(self, intact: bool) -> None:
        """The books of the KV pool were checked."""

    def capped(self, gamma: int) -> None:
        """The cap on γ is this from now on."""


class VerifierEngine(Engine[Message, TargetWork, Judged]):
    """All sequences of one target model.

    Attributes:
        observer: who is told from now on, if anybody.
    """

    def __init__(
        self,
        packed: PackedModel,
        model: model_pb2.ModelInfo,
        *,
        pass_tokens: int,
        max_linger: float = 0.0,
        threads: int | None = None,
        verify_path: str | None = None,
        observer: Observer | None = None,
        prefix_cache: bool = True,
        gamma_cap: bool = True,
    ) -> None:
        """`max_linger` is how long a pass may be held back for sequences about to answer, in seconds.
        `gamma_cap` is whether the longest proposal worth sending is told.
        `verify_path` names an implementation of `kernels.verify`; None takes the fastest on the device.
        """
        super().__init__(packed, name="verifier-engine", threads=threads)
        self._model = model
        self._max_linger = max_linger
        self.judge = Judge(packed, vocab_size=model.vocab_size, verify_path=verify_path)
        self.observer = observer
        self.prefixes = PrefixCache(packed.pool, enabled=prefix_cache)
        self.cost: FittedCost  # of the passes so far; from `prepare` on
        self._caps = GammaCap() if gamma_cap else None
        self.scheduler = Scheduler(
            packed.pool, self.prefixes, pass_tokens=pass_tokens, max_sequences=model.limits.max_sequences
        )
        self._draining = False
        self._unchecked = False  # whether a sequence was here since the pool was last checked

    def prepare(self) -> None:
        """Times passes of one token and of the longest round: on this thread, as those that serve will run."""
        widths = {1, min(self._model.limits.max_gamma + 1, self.packed.pool.max_length)}
        self.cost = FittedCost([(width, self._trial(width)) for width in widths for _ in range(TRIALS)])

    def _trial(self, width: int) -> float:
        """Seconds of a pass over so many tokens of one sequence."""
        slot = self.packed.pool.allocate()
        try:
            return self.judge([Chunk(slot, [0] * width, 0, 0)], []).forward_seconds
        finally:
            self.packed.pool.free(slot)

    # ------------------------------------------------------------------------------------------------------- receive

    def receive(self, message: Message) -> None:
        match message:
            case Open(sequence):
                self._open(sequence)
                self._tell_cap(sequence)
            case Submit(sequence, round_):
                if not sequence.finished:
                    _guard(sequence, lambda: sequence.submit(round_))
            case Read(sequence, replies):
                sequence.backlog -= replies
            case Remind(sequence):
                self._remind(sequence)
            case HalfClose(sequence):
                sequence.half_close()
            case Close(sequence):
                sequence.finished = True
                self.scheduler.remove(sequence)
            case Drain():
                self._draining = True
                for sequence in (*self.scheduler.running, *self.scheduler.waiting):
                    sequence.notify(_DRAINING)

    def _open(self, sequence: TargetSequence) -> None:
        self._unchecked = True
        if not self.scheduler.add(sequence):
            self._remind(sequence)
        if self._draining:  # it slipped in before the gate was shut
            sequence.notify(_DRAINING)

    def _remind(self, sequence: TargetSequence) -> None:
        """Tells a sequence that it waits, for a place or for a pass; from this thread, as long as it makes passes."""
        if sequence.finished:
            return
        if sequence.slot is None:
            position = self.scheduler.waiting.index(sequence)
            text = f"all {self._model.limits.max_sequences} places are taken"
        elif sequence.rounds:
            position, text = 0, "its round waits for what is to be run before it"
        else:
            return
        sequence.notify(
            verifier_service_pb2.Notice(
                kind=verifier_service_pb2.NOTICE_KIND_QUEUED, queue_position=position, message=text
            )
        )

    # ----------------------------------------------------------------------------- linger, schedule, forward, process

    def linger(self) -> float:
        running = self.scheduler.running
        arrived = [sequence.owed_since(sequence.rounds[0]) for sequence in running if sequence.rounds]
        if not arrived or not self._max_linger:
            return 0.0
        due = [at for sequence in running if (at := sequence.due()) is not None]
        since = max(self.pass_ended, min(arrived))
        return seconds_to_linger(time.perf_counter(), since, due, min(self._max_linger, self.cost.line.fixed))

    def schedule(self) -> list[TargetWork]:
        rounds = [(sequence, _guard(sequence, sequence.next_round)) for sequence in self.scheduler.running]
        plan = self.scheduler.plan(rounds)
        if self.observer is not None:
            for sequence, cached in plan.begun:
                self.observer.begun(len(sequence.tokens), cached)
            for _ in plan.preempted:
                self.observer.preempted()
        return plan.work

    def forward(self, work: Sequence[TargetWork]) -> Judged:
        proposals = [item.sequence.proposed(item.round) for item in work if item.round is not None]
        return self.judge([item.chunk for item in work], proposals)

    def process(self, work: Sequence[TargetWork], output: Judged) -> None:
        judged = [(item.sequence, item.round) for item in work if item.round is not None]
        pass_tokens = sum(len(item.chunk.tokens) for item in work)
        forward_seconds, verify_seconds = output.forward_seconds, output.verify_seconds
        if self.observer is not None:
            self.observer.passed(pass_tokens, len(work), forward_seconds)
        if not judged:
            return
        if self.observer is not None:
            self.observer.verified(verify_seconds)
        if all(item.chunk.logits_from == 0 for item in work):  # prompts cost other than rounds, and γ does not ask
            self.cost.add(pass_tokens, forward_seconds + verify_seconds)
        load = self._load()
        for (sequence, round_), proposed, ruling in zip(judged, output.proposals, output.rulings, strict=True):
            if not is_sound(ruling):
                sequence.end(
                    internal("BAD_LOGITS", f"the target's logits after {len(sequence.tokens)} tokens are no numbers")
                )
                continue
            queued = max(0.0, self.pass_started - sequence.owed_since(round_))
            timings = speculation_pb2.VerdictTimings(
                queue_us=_micros(queued),
                forward_us=_micros(forward_seconds),
                verify_us=_micros(verify_seconds),
                pass_tokens=pass_tokens,
                pass_sequences=len(work),
            )
            before = sequence.judged_at
            verdict = sequence.commit(round_, ruling, timings, load)
            if self._caps is not None and before:
                self._caps.add(
                    sequence,
                    drafted=len(proposed.tokens),
                    judged=verdict.judged,
                    accepted=verdict.accepted,
                    turnaround=round_.arrived - before,
                    whole=sequence.judged_at - before,
                )
            if self.observer is not None:
                self.observer.judged(proposed.rule, len(proposed.tokens), verdict.accepted)
                self.observer.waited(queued)
            self.scheduler.settle(sequence)
        self._look_at_cap()

    def _look_at_cap(self) -> None:
        """Sets the cap on γ anew, and tells each sequence for which it has changed."""
        if self._caps is None:
            return
        now = time.perf_counter()
        running = {sequence: len(sequence.tokens) for sequence in self.scheduler.running if sequence.takes_part(now)}
        self._caps.look(running, self.cost.line)
        if self.observer is not None:
            self.observer.capped(self._longest(self._caps.cap))
        for sequence in (*self.scheduler.running, *self.scheduler.waiting):
            self._tell_cap(sequence)

    def _tell_cap(self, sequence: TargetSequence) -> None:
        cap = None if self._caps is None else self._caps.of(sequence)
        if cap != sequence.gamma_cap and not sequence.finished:
            sequence.gamma_cap = cap
            sequence.notify(
                verifier_service_pb2.Notice(
                    kind=verifier_service_pb2.NOTICE_KIND_GAMMA_CAP,
                    gamma_cap=self._longest(cap),
                    message="longer proposals pay again" if cap is None else "the verifier is busy",
                )
            )

    def _longest(self, cap: int | None) -> int:
        return self._model.limits.max_gamma if cap is None else cap

    def fail(self, work: Sequence[TargetWork], error: Exception) -> None:
        for item in work:
            item.sequence.end(internal("INTERNAL", "the target's pass failed; the server's log has the rest"))

    def idle(self) -> float | None:
        if self._unchecked and not self.scheduler.running:
            quiet = time.perf_counter() - self.pass_ended
            if quiet < QUIET_SECONDS:  # the next request may be on its way, and a check takes milliseconds
                return QUIET_SECONDS - quiet
            self._unchecked = False
            self._check_pool()
        # Who waits for blocks may take those of a sequence that is silent for long enough: nobody else would say so.
        return IDLE_SECONDS if self.scheduler.is_short else None

    def _check_pool(self) -> None:
        """Looks the pool over, once all sequences have gone: nothing may be held then."""
        try:
            self.packed.pool.check_integrity()
            if self.packed.pool.used_blocks:
                raise PoolCorrupted(f"{self.packed.pool.used_blocks} blocks are held, and there is no sequence")
        except PoolCorrupted as error:
            _log.error("the KV pool is corrupted; it starts anew", reason=str(error))
            self.packed.pool.reset()
            intact = False
        else:
            intact = True
        if self.observer is not None:
            self.observer.checked(intact)

    def _load(self) -> speculation_pb2.VerifierLoad:
        return speculation_pb2.VerifierLoad(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            kv_usage=self.packed.pool.used_blocks / self.packed.pool.blocks.count,
            pass_fixed_us=self.cost.line.fixed * 1e6,
            pass_token_us=self.cost.line.per_token * 1e6,
        )


def _guard(sequence: TargetSequence, action: Callable[[], Result]) -> Result | None:
    """Runs one sequence's action; an error in its input ends that sequence and no other."""
    try:
        return action()
    except RequestError as error:
        sequence.end(error)
        return None


def _micros(seconds: float) -> int:
    return round(seconds * 1e6)
