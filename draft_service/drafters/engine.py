"""The draft's engine: all sequences that have a proposal to draft take their steps together, one forward pass a step.

A step gives each of them one token, or several: all that its guesses let stand (`Staging`), or all that is left of its
proposal, where steps are captured on a device (`outrider.runtime.decode_loop`). While no proposal is asked for, the
engine drafts ahead (`OutcomeCache`). It runs on a thread of its own (`outrider.runtime.engine`).
"""

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from draft_service.drafters.base import DraftError
from draft_service.drafters.outcome_cache import LEAVING_SECONDS, OutcomeCache
from draft_service.drafters.sequence import Ask, Close, DraftWork, Drawn, DrawnToken, ModelSequence
from draft_service.drafters.staged import Staging, row_adjustments, row_draws
from kernels.adjustments import RowAdjustment, apply
from kernels.sampling import UNSURE, Draw, sample
from kernels.sigmoid import draft_logits
from kernels.sparse import SparseConfig
from outrider.runtime.decode_loop import DecodeLoop
from outrider.runtime.engine import Engine
from outrider.runtime.kv_cache import grow_with_preemption
from outrider.runtime.model_runner import Chunk, ModelRunner
from outrider.service.best_effort import Component

OUTCOME_CACHE = Component("outcome_cache")

Result = TypeVar("Result")

# Tokens that a sequence is expected to write: room in one piece is sought for so many.
EXPECTED_OUTPUT = 512

# Branches of the outcome cache that take a step together. On a CPU a step of four took 1.6 times as long as one of one,
# and one of eight 2.4 times; elsewhere it takes about as long.
BRANCHES_ON_CPU, BRANCHES_ELSEWHERE = 4, 8


class DraftEngine(Engine[Ask | Close, DraftWork, list[Drawn]]):
    """All sequences of one draft model.

    Attributes:
        cache: the outcome cache.
        loop: draws with the model.
        staging: None where no sequence has a guesser.
    """

    def __init__(
        self,
        model_runner: ModelRunner,
        *,
        vocab_size: int,
        config: SparseConfig,
        prefill_tokens: int,
        staging: Staging | None = None,
        threads: int | None = None,
    ) -> None:
        """`vocab_size` is the target's: ids from there on are padding, and never drafted. `staging` serves sequences
        that have a guesser.
        """
        super().__init__(model_runner, name="draft-engine", threads=threads)
        self.loop = DecodeLoop(model_runner, min(vocab_size, model_runner.loaded.vocab_size), config)
        self._target_size = vocab_size
        self.staging = staging
        self._prefill_tokens = prefill_tokens
        self._busy: list[ModelSequence] = []  # those with a round under way, in the order they asked
        self._held: dict[ModelSequence, None] = {}  # those with a slot, those who have not asked for longest first
        width = BRANCHES_ON_CPU if model_runner.loaded.device.type == "cpu" else BRANCHES_ELSEWHERE
        self.cache = OutcomeCache(model_runner.pool, width=width)

    # ------------------------------------------------------------------------------------------------------- receive

    def receive(self, message: Ask | Close) -> None:
        sequence = message.sequence
        if isinstance(message, Close):
            self._close(sequence)
        elif not sequence.closed:
            try:
                self._begin(message)
            except Exception as error:  # no room, or a bug: this sequence has no draft, and the others go on
                sequence.done = message.done
                self._end(sequence, error)

    def _begin(self, ask: Ask) -> None:
        sequence, pool = ask.sequence, self.model_runner.pool
        base, drafted = sequence.base, sequence.drafted
        sequence.asked = ask.posted
        kept = sequence.commit(ask.committed)
        if sequence.slot is None:
            sequence.slot = pool.allocate(len(sequence.tokens) + EXPECTED_OUTPUT)
        self._held.pop(sequence, None)
        self._held[sequence] = None
        sequence.done = ask.done
        sequence.gamma = ask.gamma
        self._busy.append(sequence)
        branch = self._ahead(lambda: self.cache.asked(ask, drafted, kept), None)
        if branch is None:
            pool.rollback(sequence.slot, min(pool.length(sequence.slot), base + kept, sequence.base - 1))
            return
        sequence.adopt(branch, ask.gamma)
        pool.rollback(sequence.slot, min(pool.length(sequence.slot), len(sequence.tokens) - 1))
        self._finish_if_done(sequence)

    def _close(self, sequence: ModelSequence) -> None:
        sequence.closed = True
        sequence.done = None
        if sequence in self._busy:
            self._busy.remove(sequence)
        self._ahead(lambda: self.cache.drop(sequence), None)
        if sequence.slot is not None:
            self.model_runner.pool.free(sequence.slot)
            sequence.slot = None
            del self._held[sequence]

    def _ahead(self, call: Callable[[], Result], default: Result) -> Result:
        """What a call of the outcome cache returns. Where it fails no branch is left, and none holds a slot."""
        returned = OUTCOME_CACHE.run(lambda: (call(),), None)
        if returned is not None:
            return returned[0]
        self.cache.reset()
        return default

    # --------------------------------------------------------------------------------------- schedule, forward, process

    def schedule(self) -> list[DraftWork]:
        work: list[DraftWork] = []
        budget = self._prefill_tokens
        for sequence in list(self._busy):
            try:
                item = self._work_of(sequence, budget)
            except Exception as error:
                self._end(sequence, error)
                continue
            if item is not None:
                budget -= item.chunk.logits_from
                work.append(item)
        if not work:
            return self._ahead(lambda: self.cache.work(time.perf_counter()), [])
        return work if self.staging is None else self.staging.add_guesses(work)

    def _work_of(self, sequence: ModelSequence, budget: int) -> DraftWork | None:
        """A sequence's share of the next pass, with `budget` tokens of prompt at most; None where it has to wait."""
        assert sequence.slot is not None
        start = self.model_runner.pool.length(sequence.slot)
        behind = len(sequence.tokens) - start  # at least 1: the last token is always still to run
        piece = min(behind - 1, budget)
        draws = piece == behind - 1
        # Room for all of the round, but for the last drafted token, which is never run.
        end = sequence.base + sequence.gamma - 1 if draws else start + piece
        if end == start or not self._has_room(sequence, end):
            return None
        tokens = sequence.tokens[start:] if draws else sequence.tokens[start : start + piece]
        return DraftWork(sequence, Chunk(sequence.slot, tokens, start, piece), draws)

    def idle(self) -> float | None:
        return LEAVING_SECONDS if self.cache.leaving else None

    def _has_room(self, sequence: ModelSequence, end: int) -> bool:
        """Grows the sequence; where the pool is full, those give way that wait for a verdict, then those behind it."""
        assert sequence.slot is not None
        if self.model_runner.pool.blocks_needed(sequence.slot, end) <= self.model_runner.pool.blocks.num_free:
            self.model_runner.pool.grow(sequence.slot, end)
            return True
        self.cache.reset()
        idle = [each for each in self._held if each.done is None]
        later = self._busy[self._busy.index(sequence) + 1 :]
        victims = [each.slot for each in (*idle, *reversed(later)) if each.slot is not None]
        return grow_with_preemption(self.model_runner.pool, sequence.slot, end, victims) is not None

    def forward(self, work: Sequence[DraftWork]) -> list[Drawn]:
        """What each work has drawn: nothing, a token, or what is left of its proposal."""
        try:
            return self.draw(work)
        except Exception:  # where the pass went well and drawing did not
            pool = self.model_runner.pool
            for item in work:
                pool.rollback(item.chunk.slot, min(pool.length(item.chunk.slot), item.chunk.start))
            raise

    def draw(self, work: Sequence[DraftWork]) -> list[Drawn]:
        """As `forward`; where it raises, slots may have changed their length."""
        decoded = self._decode(work)
        if decoded is not None:
            return decoded
        z = self.model_runner.logits([item.chunk for item in work])[:, : self.loop.vocab_size]
        draws, changes = list[Draw](), list[RowAdjustment | None]()
        for item in work:
            if item.draws:
                draws += row_draws(item.sequence, item.guesses, item.rows)
                changes += row_adjustments(item.sequence, item.guesses, item.rows)
        z = apply(z, changes)
        samples = sample(z, draws, self.loop.config)
        drawn, row = list[Drawn](), 0
        for item in work:
            own = samples[row : row + item.rows]
            if item.guesses:
                assert self.staging is not None
                own = self.staging.judge(item, own, self.model_runner.pool)
            told = [DrawnToken(*each) for each in own]
            if item.sequence.told.needs_logits:
                laws = draft_logits(z[row : row + len(own)], item.sequence.law, self._target_size)
                told = [each._replace(law=law) for each, law in zip(told, laws, strict=True)]
            drawn.append(told)
            row += item.rows
        return drawn

    def _decode(self, work: Sequence[DraftWork]) -> list[Drawn] | None:
        """All that is left of the proposals, in one call of the decode loop; None where it cannot draw them."""
        if not all(item.draws and not item.guesses and item.sequence.may_be_decoded for item in work):
            return None
        draws = [[item.sequence.draw(i) for i in range(item.sequence.drafted, item.sequence.gamma)] for item in work]
        if self.loop.obstacle(draws) is not None:
            return None
        decoded = self.loop.decode([item.chunk for item in work], draws)
        return [[DrawnToken(*token) for token in each] for each in decoded]

    def process(self, work: Sequence[DraftWork], output: Sequence[Drawn]) -> None:
        for item, drawn in zip(work, output, strict=True):
            if item.sequence.trunk is None:
                try:
                    self._take(item.sequence, drawn)
                except Exception as error:
                    self._end(item.sequence, error)
        self._ahead(lambda: self.cache.took(work, output, self.forward_seconds), None)

    def _take(self, sequence: ModelSequence, drawn: Drawn) -> None:
        for token, law, scores in drawn:
            if token == UNSURE:  # nothing was sampled, and what was before is the proposal
                sequence.gamma = sequence.drafted
                break
            if token < 0:
                text = f"the draft's logits after {len(sequence.tokens)} tokens are NaN or infinite"
                self._end(sequence, DraftError(text, reason="BAD_LOGITS"))
                return
            sequence.add(token, law, scores)
        self._finish_if_done(sequence)

    def _finish_if_done(self, sequence: ModelSequence) -> None:
        if sequence.drafted < sequence.gamma:
            return
        self._busy.remove(sequence)
        sequence.finish()
        self._ahead(lambda: self.cache.left(sequence, time.perf_counter()), None)

    def fail(self, work: DraftWork, error: Exception, *, is_own: bool) -> None:
        if (trunk := work.sequence.trunk) is not None:
            self._ahead(lambda: self.cache.drop(trunk), None)
        elif work.sequence in self._busy:
            self._end(work.sequence, error)

    def _end(self, sequence: ModelSequence, error: Exception) -> None:
        if sequence in self._busy:
            self._busy.remove(sequence)
        sequence.finish(error if isinstance(error, DraftError) else DraftError(f"{type(error).__name__}: {error}"))
