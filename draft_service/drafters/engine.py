"""The draft's engine: one forward pass a step, for all sequences that have a proposal to draft.

A step adds one token to each proposal, or reads pieces of long prompts. It adds more tokens in staged drafting (the
guesses that the model accepts: `Staging`), in parallel drafting (one more for each mask token after the text), and in
one call of the decode loop (the rest of the proposal: `outrider.runtime.decode_loop`). While no proposal is requested,
the engine drafts for likely verdicts (`OutcomeCache`). It runs on a thread of its own (`outrider.runtime.engine`).
"""

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from draft_service.drafters.base import DraftError
from draft_service.drafters.outcome_cache import OutcomeCache
from draft_service.drafters.sequence import Close, DraftWork, Drawn, ModelSequence, Propose
from draft_service.drafters.staged import Staging, row_draws
from kernels.adjustments import RowAdjustment, apply
from kernels.sampling import UNSURE, Draw, sample
from kernels.sigmoid import draft_logits
from kernels.sparse import SparseConfig
from outrider.runtime.decode_loop import DecodeLoop
from outrider.runtime.encoder_decoder import encoder_length
from outrider.runtime.engine import Engine
from outrider.runtime.kv_cache import grow_with_preemption
from outrider.runtime.model_runner import Chunk, ModelRunner
from outrider.service.best_effort import Component

OUTCOME_CACHE = Component("outcome_cache")
PREFIX_CACHE = Component("draft_prefix_cache")

Result = TypeVar("Result")

# Output tokens for which the pool looks for consecutive blocks.
EXPECTED_OUTPUT = 512

# Branches of the outcome cache in one step. On a CPU a step of four took 1.6 times as long as a step of one, and a step
# of eight 2.4 times. On a GPU it takes about as long.
BRANCHES_ON_CPU, BRANCHES_ELSEWHERE = 4, 8


class DraftEngine(Engine[Propose | Close, DraftWork, Sequence[Drawn]]):
    """All sequences of one draft model.

    Attributes:
        vocab_size: the target's: higher ids are padding and never drafted.
        mask_token: of the model, for parallel drafting; None without one. It is never drafted.
        staging: adds guesses to the work of sequences with a guesser.
        prefix_queries: prompt and committed tokens that were looked up in the prefix cache.
        prefix_hits: those that were found.
    """

    leaving_seconds = 0.5e-3  # the event loop also checks a proposal

    def __init__(
        self,
        model_runner: ModelRunner,
        *,
        vocab_size: int,
        config: SparseConfig,
        prefill_tokens: int,
        staging: Staging,
        threads: int | None = None,
        prefix_cache: bool = True,
    ) -> None:
        super().__init__(model_runner, name="draft-engine", threads=threads)
        self.mask_token = model_runner.loaded.mask_token
        self._config = config
        self.decode_loop = DecodeLoop(model_runner, min(vocab_size, model_runner.loaded.vocab_size), config)
        self.vocab_size = vocab_size
        self.staging = staging
        self._prefill_tokens = prefill_tokens
        self._busy: list[ModelSequence] = []  # with a round in progress, in the order of requests
        self._held: dict[ModelSequence, None] = {}  # with a slot, by the time of the last request
        self._prefixes = model_runner.prefix_cache(enabled=prefix_cache)
        self.prefix_queries = self.prefix_hits = 0
        self._was_of_pieces = False  # whether the last step was of pieces of prompts
        self._goes_first: set[ModelSequence] = set()  # their proposals end before the next such step
        self._finished: list[tuple[ModelSequence, float]] = []  # proposals not yet accounted for, and when they left
        width = BRANCHES_ON_CPU if model_runner.loaded.device.type == "cpu" else BRANCHES_ELSEWHERE
        self.cache = OutcomeCache(model_runner.pool, width=width, max_length=model_runner.max_length)

    # ------------------------------------------------------------------------------------------------------- receive

    def receive(self, message: Propose | Close) -> None:
        self._account()
        sequence = message.sequence
        if isinstance(message, Close):
            self._close(sequence)
        elif not sequence.closed:
            try:
                self._begin(message)
            except Exception as error:  # no free blocks, or a bug: only this sequence fails
                sequence.done = message.done
                self._end(sequence, error)

    def _begin(self, message: Propose) -> None:
        sequence, pool = message.sequence, self.model_runner.pool
        base, drafted = sequence.base, sequence.drafted
        sequence.requested = message.posted
        kept = sequence.commit(message.committed)
        if sequence.slot is None:
            sequence.slot = pool.allocate(len(sequence.tokens) + EXPECTED_OUTPUT)
        self._held.pop(sequence, None)
        self._held[sequence] = None
        sequence.done = message.done
        sequence.gamma = message.gamma
        self._busy.append(sequence)
        self._goes_first.discard(sequence)
        branch = self._call_cache(lambda: self.cache.take(message, drafted, kept), None)
        if branch is None:
            pool.rollback(sequence.slot, min(pool.length(sequence.slot), base + kept, sequence.base - 1))
            return
        sequence.adopt(branch, message.gamma)
        pool.rollback(sequence.slot, min(pool.length(sequence.slot), len(sequence.tokens) - 1))
        self._finish_if_done(sequence)

    def _close(self, sequence: ModelSequence) -> None:
        sequence.closed = True
        sequence.done = None
        if sequence in self._busy:
            self._busy.remove(sequence)
        self._call_cache(lambda: self.cache.drop(sequence), None)
        if sequence.slot is not None:
            self._keep_prefix(sequence)
            self.model_runner.pool.free(sequence.slot)
            sequence.slot = None
            del self._held[sequence]

    def _adopt_prefix(self, sequence: ModelSequence) -> None:
        """Fills the empty slot of a sequence with its cached prefix."""
        slot, salt = sequence.slot, sequence.opening.cache_salt
        if slot is None or salt is None or not self._prefixes.enabled:
            return
        found = PREFIX_CACHE.run(lambda: self._prefixes.adopt(slot, sequence.tokens, salt), None)
        if found is None:
            self.model_runner.pool.rollback(slot, 0)
        if found or not sequence.is_looked_up:  # while it waits for its prompt or for blocks, each step looks it up
            sequence.is_looked_up = True
            self.prefix_queries += len(sequence.tokens)
            self.prefix_hits += found or 0

    def _keep_prefix(self, sequence: ModelSequence) -> None:
        """Caches what the slot of a sequence holds. At any time that is a prefix of its tokens (invariant 5)."""
        slot, salt = sequence.slot, sequence.opening.cache_salt
        if slot is not None and salt is not None and not sequence.failed:
            PREFIX_CACHE.run(lambda: self._prefixes.keep(slot, sequence.tokens, salt), None)

    def _call_cache(self, call: Callable[[], Result], default: Result) -> Result:
        """The result of a call of the outcome cache. If it fails, all branches are dropped and their slots freed."""
        returned = OUTCOME_CACHE.run(lambda: (call(),), None)
        if returned is not None:
            return returned[0]
        self.cache.reset()
        return default

    # --------------------------------------------------------------------------------------- schedule, forward, process

    def schedule(self) -> list[DraftWork]:
        self._account()
        drawing: list[DraftWork] = []
        pieces: list[DraftWork] = []
        to_draw = to_read = self._prefill_tokens
        has_encoder = False
        for sequence in list(self._busy):
            try:
                item = self._work_of(sequence, to_draw, to_read, may_encode=not has_encoder)
            except Exception as error:
                self._end(sequence, error)
                continue
            if item is None:
                continue
            has_encoder |= item.encodes
            if item.draws:
                to_draw -= item.chunk.logits_from
                drawing.append(item)
            else:
                to_read -= item.chunk.logits_from
                pieces.append(item)
        work = self._in_turn(drawing, pieces)
        if not work:
            return self._call_cache(lambda: self.cache.work(time.perf_counter()), [])
        return [self.staging.with_guesses(item) for item in work]

    def _in_turn(self, drawing: list[DraftWork], pieces: list[DraftWork]) -> list[DraftWork]:
        """Pieces of long prompts run in steps of their own. Every proposal waits for one of them at most."""
        if self._was_of_pieces:
            self._goes_first = {item.sequence for item in drawing}
        if pieces and not any(item.sequence in self._goes_first for item in drawing):
            drawing = []
        self._was_of_pieces = not drawing
        return drawing or pieces

    def _work_of(self, sequence: ModelSequence, to_draw: int, to_read: int, *, may_encode: bool) -> DraftWork | None:
        """A sequence's share of the next step: it draws after at most `to_draw` tokens of prompt, or else reads at most
        `to_read`. None if it has to wait.
        """
        assert sequence.slot is not None
        encodes = self.model_runner.lacks_encoder(sequence.slot)
        if encodes and not may_encode:
            return None
        if self.model_runner.pool.is_empty(sequence.slot):
            self._adopt_prefix(sequence)
        start = self.model_runner.pool.length(sequence.slot)
        behind = len(sequence.tokens) - start  # at least 1: the last token has never run
        draws = behind - 1 <= to_draw
        piece = behind - 1 if draws else min(behind - 1, to_read)
        # Blocks for the whole round, without the last drafted token, which never runs.
        end = sequence.base + sequence.gamma - 1 if draws else start + piece
        if end == start or not self._has_blocks(sequence, end):
            return None
        tokens = sequence.tokens[start:] if draws else sequence.tokens[start : start + piece]
        masks = sequence.masks if draws else 0
        if masks:
            assert self.mask_token is not None
            tokens = [*tokens, *[self.mask_token] * masks]
        return DraftWork(sequence, Chunk(sequence.slot, tokens, start, piece), draws, encodes=encodes, masks=masks)

    def _has_blocks(self, sequence: ModelSequence, end: int) -> bool:
        """Grows the sequence. If the pool is full, preempts sequences that wait for a verdict, then later requests."""
        assert sequence.slot is not None
        slot, positions = sequence.slot, encoder_length(sequence.opening.encoder_input)
        if grow_with_preemption(self.model_runner.pool, slot, end, encoder_length=positions) is not None:
            return True
        self.cache.reset()
        idle = [each for each in self._held if each.done is None]
        later = self._busy[self._busy.index(sequence) + 1 :]
        victims = [each.slot for each in (*idle, *reversed(later)) if each.slot is not None]
        pool = self.model_runner.pool
        return grow_with_preemption(pool, slot, end, victims, encoder_length=positions) is not None

    def forward(self, work: Sequence[DraftWork]) -> Sequence[Drawn]:
        """The tokens drawn for each work: none, one, or the rest of its proposal."""
        try:
            return self.draw(work)
        except Exception:  # the forward pass may have lengthened the slots
            pool = self.model_runner.pool
            for item in work:
                pool.rollback(item.chunk.slot, min(pool.length(item.chunk.slot), item.chunk.start))
            raise

    def draw(self, work: Sequence[DraftWork]) -> Sequence[Drawn]:
        """As `forward`. If it raises, slots may have changed their length."""
        for item in work:
            if item.encodes and item.sequence.opening.encoder_input is not None:
                self.model_runner.encode(item.chunk.slot, item.sequence.opening.encoder_input)
        decoded = self._decode(work)
        if decoded is not None:
            return decoded
        z = self.decode_loop.without_mask(self.model_runner.logits([item.chunk for item in work]))
        draws, changes = list[Draw](), list[RowAdjustment | None]()
        pool = self.model_runner.pool
        for item in work:
            if item.masks:  # back to the real tokens
                pool.rollback(item.chunk.slot, pool.length(item.chunk.slot) - item.masks)
            if item.draws:
                draws += row_draws(item.sequence, item.guesses, item.rows)
                # Guesses count as generated. So do masks, in place of tokens of the same pass: those are not known yet.
                counted = item.chunk.tokens[item.chunk.logits_from + 1 :]
                adjuster = item.sequence.adjuster
                changes += [None] * item.rows if adjuster is None else adjuster.rows(counted)
        # The target may know more tokens than the draft.
        z = apply(z, [None if each is None else each.within(z.size(1)) for each in changes])
        samples = sample(z, draws, self._config)
        drawn, row = list[Drawn](), 0
        for item in work:
            own = samples[row : row + item.rows]
            if item.guesses:
                own = self.staging.judge(item, own, pool)
            if item.sequence.opening.needs_logits:
                logits = draft_logits(z[row : row + len(own)], item.sequence.params, self.vocab_size)
                drawn.append([(each.token, values, each.scores) for each, values in zip(own, logits, strict=True)])
            else:
                drawn.append(own)
            row += item.rows
        return drawn

    def _decode(self, work: Sequence[DraftWork]) -> Sequence[Drawn] | None:
        """The rest of each proposal, in one call of the decode loop; None if it cannot draw them."""
        if not all(item.may_be_decoded for item in work):
            return None
        draws = [[item.sequence.draw(i) for i in range(item.sequence.drafted, item.sequence.gamma)] for item in work]
        adjusters = [item.sequence.adjuster for item in work]
        if self.decode_loop.obstacle(draws, adjusters) is not None:
            return None
        return self.decode_loop.decode([item.chunk for item in work], draws, adjusters=adjusters)

    def process(self, work: Sequence[DraftWork], output: Sequence[Drawn]) -> None:
        for item, drawn in zip(work, output, strict=True):
            if item.sequence.parent is None:
                try:
                    self._take(item.sequence, drawn)
                except Exception as error:
                    self._end(item.sequence, error)
        self._call_cache(lambda: self.cache.add_step(work, output, self.forward_seconds), None)

    def _take(self, sequence: ModelSequence, drawn: Drawn) -> None:
        for token, distribution, scores in drawn:
            if token == UNSURE:  # nothing was sampled; the proposal ends here
                sequence.gamma = sequence.drafted
                break
            if token < 0:
                text = f"the draft's logits after {len(sequence.tokens)} tokens are NaN or infinite"
                return self._end(sequence, DraftError(text, reason="BAD_LOGITS"))
            sequence.add(token, distribution, scores)
        self._finish_if_done(sequence)

    def _finish_if_done(self, sequence: ModelSequence) -> None:
        if sequence.drafted < sequence.gamma:
            return
        self._busy.remove(sequence)
        sequence.finish()
        self._finished.append((sequence, time.perf_counter()))

    def has_work(self) -> bool:
        return bool(self._busy) or not self._finished

    def _account(self) -> None:
        """Tells the caches of the proposals that have left since the last call."""
        finished, self._finished = self._finished, []
        for sequence, at in finished:
            if not sequence.prefix_kept:  # early, for sequences with the same prefix that come meanwhile
                sequence.prefix_kept = True
                self._keep_prefix(sequence)
            self._call_cache(lambda: self.cache.sent(sequence, at), None)  # noqa: B023

    def fail(self, work: DraftWork, error: Exception, *, is_at_fault: bool) -> None:
        if (parent := work.sequence.parent) is not None:
            self._call_cache(lambda: self.cache.drop(parent), None)
        elif work.sequence in self._busy:
            self._end(work.sequence, error)

    def _end(self, sequence: ModelSequence, error: Exception) -> None:
        """Ends a round that fails. Tokens that it has sampled are sent: whether the pass after them fails may depend on
        them (invariant 4).
        """
        if sequence in self._busy:
            self._busy.remove(sequence)
        sequence.failed = True
        sequence.finish(error if isinstance(error, DraftError) else DraftError(f"{type(error).__name__}: {error}"))
