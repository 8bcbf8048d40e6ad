"""The verifier's engine: one forward pass and one call of `verify` a step, for all sequences with work.

If each of them has a `Decode`, a step is one call of the decode loop, for several tokens of each.

A step: forward and verify; commit and rollback for each sequence (an error ends that sequence only); replies, in one
call. Its accounting follows under the forward pass of the next step, or when the engine is idle. Code that only speeds
up or observes runs in a `Component` (`outrider.service.best_effort`), so it cannot fail a sequence. Loop
and thread are those of `outrider.runtime.engine`.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

import structlog

from kernels.verify import Proposed, Status, VerifyResult
from outrider.rpc.errors import RequestError, counted, internal, unavailable, yielded
from outrider.runtime.block_pool import PoolCorrupted
from outrider.runtime.engine import Engine
from outrider.runtime.model_runner import Chunk, ModelRunner
from outrider.service.best_effort import Component
from outrider.service.fitted_cost import FittedCost
from outrider.service.wire import round_micros
from protos.outrider.v1 import model_pb2, speculation_pb2, verifier_service_pb2
from verifier_service.request import Round
from verifier_service.scheduler import IDLE_SECONDS, TURN_SECONDS, Plan, Scheduler, TargetWork
from verifier_service.sequence import TargetSequence, seconds_to_linger
from verifier_service.target_runner import ScoredTokens, StepResult, TargetRunner


@dataclass(frozen=True)
class _OfSequence:
    sequence: TargetSequence


class Open(_OfSequence):
    """A new sequence."""


@dataclass(frozen=True)
class Submit(_OfSequence):
    """A round of a sequence."""

    round: Round


class Read(_OfSequence):
    """The client has read so many replies that the sequence, if it was paused, goes on."""


class Remind(_OfSequence):
    """Repeat the notice QUEUED if the sequence waits."""


class HalfClose(_OfSequence):
    """The client sends no more rounds."""


class Close(_OfSequence):
    """The stream has ended: free the sequence."""


class Drain:
    """The service drains: send every sequence a notice."""


_log = structlog.get_logger()

Message = Open | Submit | Read | Remind | HalfClose | Close | Drain
Result = TypeVar("Result")

_DRAINING = verifier_service_pb2.Notice(
    kind=verifier_service_pb2.NOTICE_KIND_DRAINING, message="the verifier is shutting down; continue at another one"
)

# Seconds without a step before the pool is checked.
QUIET_SECONDS = 1.0
# Timed forward passes of each width at the start: the first one costs several times the next.
TRIALS = 3


COST_MODEL = Component("cost_model")
DECODE_LOOP = Component("decode_loop")
LINGER = Component("linger")
LOAD = Component("load")
NOTICES = Component("queued_notices")
POOL_CHECK = Component("kv_check")


class Observer(Protocol):
    """`metrics.SpeculationMetrics`, on the engine's thread. No method raises. Engines may not import Prometheus."""

    def planned(self, plan: Plan) -> None: ...
    def stepped(self, step: "StepSummary") -> None: ...
    def checked(self, intact: bool) -> None: ...


@dataclass(frozen=True, slots=True)
class VerifiedRound:
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


class StepSummary:
    """What verdicts and metrics report of a step.

    Attributes:
        tokens: tokens in its forward pass, or in the first of several.
        later_tokens: tokens in the others: one of a sequence in each.
        judged: committed rounds, in order.
        is_of_rounds: whether it had rounds, and neither prompt tokens nor an encoder.
        observer: of the engine when it ran: a step of the warm-up has none, also if it is accounted for later.
    """

    def __init__(self, work: Sequence[TargetWork], output: StepResult, observer: Observer | None) -> None:
        self.observer = observer
        self.tokens = sum(len(item.chunk.tokens) for item in work)
        self.sequences = len(work)
        self.later_tokens = sum(map(len, output.earlier))
        self.passes = output.passes
        self.forward_seconds = output.forward_seconds
        self.verify_seconds = output.verify_seconds
        self.judged: list[VerifiedRound] = []
        self.has_rounds = bool(output.results)
        self.is_of_rounds = self.has_rounds and all(
            item.round is not None and item.chunk.logits_from == 0 and not item.encodes for item in work
        )

    def timings(self, queued: float) -> speculation_pb2.VerdictTimings:
        """Timings for the verdict of a round that waited `queued` seconds."""
        return speculation_pb2.VerdictTimings(
            queue_us=round_micros(queued),
            forward_us=round_micros(self.forward_seconds),
            verify_us=round_micros(self.verify_seconds),
            pass_tokens=self.tokens,
            pass_sequences=self.sequences,
        )


class VerifierEngine(Engine[Message, TargetWork, StepResult]):
    """All sequences of one target model.

    Attributes:
        observer: counts the engine's work; None during the warm-up.
        flush: sends all delivered replies; called once a step, after all commits.
    """

    def __init__(
        self,
        model_runner: ModelRunner,
        model: model_pb2.ModelInfo,
        *,
        max_batch_tokens: int,
        max_linger: float = 0.0,
        threads: int | None = None,
        verify_path: str | None = None,
        prefix_cache: bool = True,
    ) -> None:
        """`max_linger` is the longest time, in seconds, that a step waits for sequences that are about to send a round.
        `verify_path` names an implementation of `kernels.verify`; None is the fastest on the device.
        """
        super().__init__(model_runner, name="verifier-engine", threads=threads)
        self._model = model
        self._max_linger = max_linger
        self.target_runner = TargetRunner(model_runner, vocab_size=model.vocab_size, verify_path=verify_path)
        self.observer: Observer | None = None
        self.flush: Callable[[], None] = lambda: None
        self.prefixes = model_runner.prefix_cache(enabled=prefix_cache)
        self.cost: FittedCost  # of steps; set by `prepare`
        self.scheduler = Scheduler(
            model_runner.pool,
            self.prefixes,
            max_batch_tokens=max_batch_tokens,
            max_sequences=model.limits.max_sequences,
        )
        self._load = speculation_pb2.VerifierLoad(active=1)  # at the end of the last step, or when idle
        self._unaccounted: StepSummary | None = None  # the last step
        self._draining = False
        self._unchecked = False  # whether there was a sequence since the last check of the pool

    def prepare(self) -> None:
        """Times forward passes of one token and of the longest round, on the engine's thread."""
        widths = {1, min(self._model.limits.max_gamma + 1, self.model_runner.max_length)}
        self.cost = FittedCost([(width, self._trial(width)) for width in widths for _ in range(TRIALS)])

    def _trial(self, width: int) -> float:
        """Seconds of a forward pass over `width` tokens of one sequence."""
        slot = self.model_runner.allocate_for_trial()
        try:
            return self.target_runner([Chunk(slot, [0] * width, 0, 0)], []).forward_seconds
        finally:
            self.model_runner.pool.free(slot)

    # ------------------------------------------------------------------------------------------------------- receive

    def post(self, message: Message) -> None:
        super().post(message)
        if not _can_wait(message):
            self.target_runner.interrupt.set()

    def receive(self, message: Message) -> None:
        match message:
            case Open(sequence):
                self._open(sequence)
            case Submit(sequence, round_):
                sequence.received += 1
                if not sequence.finished:
                    _run_for(sequence, lambda: sequence.submit(round_))
            case Read():
                pass  # it woke the engine
            case Remind(sequence):
                NOTICES.run(lambda: self._remind(sequence), None)
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
        if (first := sequence.opening.first_round) is not None:
            self.receive(Submit(sequence, first))
        if not self.scheduler.add(sequence):
            NOTICES.run(lambda: self._remind(sequence), None)
        if self._draining:  # it was accepted just before the drain
            sequence.notify(_DRAINING)

    def _remind(self, sequence: TargetSequence) -> None:
        """Sends QUEUED to a sequence that waits. Sent from the engine's thread: a stuck engine sends none."""
        if sequence.finished:
            return
        if sequence.slot is None:
            position = self.scheduler.waiting.index(sequence)
            running = counted(self._model.limits.max_sequences, "sequence")
            text = f"waiting in the queue: at most {running} at once (--max-sequences)"
        elif sequence.awaits_turn:
            before = [each for each in self.scheduler.running if each.awaits_turn and each.arrival < sequence.arrival]
            position, text = len(before), "waiting for a step alone, after a step with this sequence failed elsewhere"
        elif sequence.rounds or sequence.owes_prompt_logprobs:
            position, text = 0, "waiting for the next step of the target"
        else:
            return
        sequence.notify(
            verifier_service_pb2.Notice(
                kind=verifier_service_pb2.NOTICE_KIND_QUEUED, queue_position=position, message=text
            )
        )

    # ------------------------------------------------------------------------------------------------------ the loop

    def run_once(self) -> float | None:
        self.target_runner.interrupt.clear()  # before the messages are received
        try:
            return super().run_once()
        finally:
            self.flush()

    def linger(self) -> float:
        if not self._max_linger:
            return 0.0
        return LINGER.bounded(self._linger, 0.0, low=0.0, high=self._max_linger)

    def _linger(self) -> float:
        running = self.scheduler.running
        waiting = [sequence for sequence in running if sequence.rounds and not sequence.is_paused]
        arrived = [sequence.owed_since(sequence.rounds[0]) for sequence in waiting]
        if not arrived:
            return 0.0
        due = [at for sequence in running if (at := sequence.due()) is not None]
        since = max(self.step_ended, min(arrived))
        return seconds_to_linger(time.perf_counter(), since, due, min(self._max_linger, self.cost.line.fixed))

    def schedule(self) -> list[TargetWork]:
        self._begin_turn()
        rounds = [
            (sequence, _run_for(sequence, sequence.next_round) if sequence.rounds and not sequence.is_paused else None)
            for sequence in self.scheduler.running
        ]
        plan = self.scheduler.plan(rounds)
        if self.observer is not None:
            self.observer.planned(plan)
        self.flush()  # STALE verdicts
        return plan.work

    def _begin_turn(self) -> None:
        """Begins the turn of the next isolated sequence: it may now send a round."""
        if (overdue := self.scheduler.overdue()) is not None:
            text = (
                f"the sequence runs alone, after a step with it failed elsewhere, and sent no round within "
                f"{TURN_SECONDS:g} s of its turn"
            )
            overdue.end(yielded(text, retry_after=TURN_SECONDS))
        isolated = self.scheduler.next_isolated()
        if isolated is not None and isolated.opened is not None:
            isolated.deliver(isolated.opened)
            isolated.opened = None

    def forward(self, work: Sequence[TargetWork]) -> StepResult:
        proposals = [item.sequence.proposed(item.round) for item in work if item.round is not None]
        encoder_inputs = [
            (item.chunk.slot, inputs)
            for item in work
            if item.encodes and (inputs := item.sequence.opening.encoder_input) is not None
        ]
        decoded = DECODE_LOOP.run(lambda: self._decode(work, proposals), None)
        if decoded is not None:
            return decoded
        pool = self.model_runner.pool
        for item in work:
            if pool.length(item.chunk.slot) > item.chunk.start:  # the decode loop failed after its last step
                pool.rollback(item.chunk.slot, item.chunk.start)
        scored = [ScoredTokens(item.scored_tokens, item.sequence.opening.top_prompt_logprobs) for item in _scored(work)]
        return self.target_runner([item.chunk for item in work], proposals, encoder_inputs, scored, self._account)

    def _decode(self, work: Sequence[TargetWork], proposals: Sequence[Proposed]) -> StepResult | None:
        """Several tokens of each sequence, by the decode loop; None for an ordinary step."""
        now = time.perf_counter()
        left = min(item.sequence.send_by(now) for item in work) - now
        most = self.target_runner.max_decode_tokens(self.cost.line.seconds(len(work)), left)
        counts = self.scheduler.decode_counts(work, most)
        if counts is None:
            return None
        self._account()
        stops = [item.sequence.opening.stop_token_ids for item in work]
        adjusters = [item.sequence.adjuster for item in work]
        return self.target_runner.decode([item.chunk for item in work], proposals, counts, stops, adjusters)

    def fail(self, work: TargetWork, error: Exception, *, is_at_fault: bool) -> None:
        if is_at_fault:
            work.sequence.end(
                internal(
                    "STEP_FAILED",
                    "the target's step failed for this sequence, in a batch and alone; see the verifier's log",
                )
            )
        else:  # every sequence failed: the verifier is broken, so they move to another one
            work.sequence.end(
                unavailable("NO_VERIFIER", "the target's step failed for every sequence; see the verifier's log")
            )

    # ------------------------------------------------------------------------------------------------------- process

    def process(self, work: Sequence[TargetWork], output: StepResult) -> None:
        self._account()
        self._unaccounted = step = StepSummary(work, output, self.observer)
        for item, logprobs in zip(_scored(work), output.scores, strict=True):
            _run_for(item.sequence, lambda: item.sequence.add_prompt_logprobs(logprobs))  # noqa: B023
        rounds = [(item.sequence, item.round) for item in work if item.round is not None]
        earlier = output.earlier or [()] * len(rounds)
        for (sequence, round_), result, before in zip(rounds, output.results, earlier, strict=True):
            judged = _run_for(sequence, lambda: self._commit(sequence, round_, result, before, step))  # noqa: B023
            if judged is not None:
                step.judged.append(judged)
        self._send_joined()
        self.flush()

    def _commit(
        self, sequence: TargetSequence, round_: Round, result: VerifyResult, earlier: Sequence[int], step: StepSummary
    ) -> VerifiedRound:
        """Commits a round's tokens, and rolls the KV cache back to them.

        Raises:
            RequestError: INTERNAL: its logits are NaN or infinite.
        """
        if result.status is Status.BAD_LOGITS:
            raise internal(
                "BAD_LOGITS",
                f"the target's logits after {len(sequence.tokens)} tokens are NaN or infinite; try another --dtype",
            )
        queued = max(0.0, self.step_started - sequence.owed_since(round_))
        drafted = len(sequence.drafted(round_))
        accepted = sequence.commit(round_, result, earlier, partial(step.timings, queued), self._load)
        self.scheduler.settle(sequence)
        return VerifiedRound(sequence, drafted, accepted, queued)

    def _send_joined(self) -> None:
        """Sends tokens that would wait for too long at the end of another pass, with all that may wait as long."""
        unsent = [sequence for sequence in self.scheduler.running if sequence.unsent is not None]
        next_end = time.perf_counter() + self.cost.line.seconds(len(unsent))
        ended = {each.opening.seconds_joined for each in unsent if each.send_by(next_end) < next_end}
        for sequence in unsent:
            if sequence.opening.seconds_joined in ended:
                sequence.send()

    def has_work(self) -> bool:
        return any(sequence.rounds or sequence.prefills for sequence in self.scheduler.running)

    # ---------------------------------------------------------------------------------------------------- accounting

    def _account(self) -> None:
        """Updates metrics, cost model and load after the last step, once. Cannot fail a step."""
        step, self._unaccounted = self._unaccounted, None
        if step is None:
            return
        if step.observer is not None:
            step.observer.stepped(step)
        if step.is_of_rounds:  # steps with prompts cost more; γ does not depend on them
            seconds = step.forward_seconds + step.verify_seconds
            COST_MODEL.run(lambda: self.cost.add(step.tokens, seconds / step.passes), None)
        self._load = LOAD.run(self._measure_load, self._load)

    def _measure_load(self) -> speculation_pb2.VerifierLoad:
        now = time.perf_counter()
        return speculation_pb2.VerifierLoad(
            active=max(1, sum(sequence.is_active(now) for sequence in self.scheduler.running)),
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            kv_usage=self.model_runner.pool.used_blocks / self.model_runner.pool.blocks.count,
            pass_fixed_us=self.cost.line.fixed * 1e6,
            pass_token_us=self.cost.line.per_token * 1e6,
        )

    # ---------------------------------------------------------------------------------------------------------- idle

    def idle(self) -> float | None:
        for sequence in self.scheduler.running:
            sequence.send()
        self._account()
        self._load = LOAD.run(self._measure_load, self._load)
        if self._unchecked and not self.scheduler.running:
            quiet = time.perf_counter() - self.step_ended
            if 0 <= quiet < QUIET_SECONDS:  # a check takes milliseconds, which would delay the next request
                return QUIET_SECONDS - quiet
            self._unchecked = False
            POOL_CHECK.run(self._check_pool, None)
        # No message announces that a sequence is idle for long enough to lose its blocks, or that an isolated sequence
        # has held its turn for too long. So look again soon.
        return IDLE_SECONDS if self.scheduler.is_short or self.scheduler.isolated is not None else None

    def _check_pool(self) -> None:
        """Checks the pool after the last sequence has ended: no block may be in use."""
        try:
            self.model_runner.pool.check_integrity()
            if self.model_runner.pool.used_blocks:
                raise PoolCorrupted(f"{self.model_runner.pool.used_blocks} blocks are in use without a sequence")
        except PoolCorrupted as error:
            _log.error("KV pool corrupted", reason=str(error), effect="the pool was reset")
            self.model_runner.pool.reset()
            intact = False
        else:
            intact = True
        if self.observer is not None:
            self.observer.checked(intact)


def _can_wait(message: Message) -> bool:
    """Whether a message can wait until the decode loop ends."""
    is_of_ended = isinstance(message, Close) and message.sequence.finished
    return is_of_ended or isinstance(message, Read | Remind | HalfClose)


def _scored(work: Sequence[TargetWork]) -> list[TargetWork]:
    """The pieces of prompts whose tokens are scored."""
    return [item for item in work if item.scored_tokens]


def _run_for(sequence: TargetSequence, action: Callable[[], Result]) -> Result | None:
    """Runs an action of one sequence; an error ends only that sequence."""
    try:
        return action()
    except RequestError as error:
        sequence.end(error)
    except Exception:
        _log.exception("sequence failed", request_id=sequence.opening.request_id)
        sequence.end(internal("INTERNAL", "internal error; the service's log has the cause"))
    return None
