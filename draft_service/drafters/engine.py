"""The draft's engine: all sequences that have a proposal to draft take one step in one packed pass.

It runs on a thread of its own (`outrider.lm.engine`): γ tokens are γ passes, with no way back to the event loop between
them; a sequence that drafts alone takes them in one call. It knows nothing of gRPC or of verdicts: it is told what was
committed, and asked for tokens that may follow.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from draft_service.drafters.base import DraftError
from draft_service.drafters.drawing import Drawing, Drawn
from draft_service.drafters.sequence import Ask, Close, ModelSequence
from kernels.entropy import UNSURE
from kernels.sparse import SparseConfig
from outrider.lm.engine import Engine
from outrider.lm.packed import Chunk, PackedModel
from outrider.lm.room import make_room

# Tokens that a sequence is expected to write: room in one piece is sought for so many.
EXPECTED_OUTPUT = 512


@dataclass(frozen=True, slots=True)
class DraftWork:
    """One sequence's share of a pass; `draws` is False where it is prompt alone, with more to come."""

    sequence: ModelSequence
    chunk: Chunk
    draws: bool


class DraftEngine(Engine[Ask | Close, DraftWork, list[Drawn]]):
    """All sequences of one draft model."""

    def __init__(
        self,
        packed: PackedModel,
        *,
        vocab_size: int,
        config: SparseConfig,
        prefill_tokens: int,
        threads: int | None = None,
    ) -> None:
        """`vocab_size` is the target's: ids from there on are padding, and never drafted."""
        super().__init__(packed, name="draft-engine", threads=threads)
        self._drawing = Drawing(target_size=vocab_size, draft_size=packed.loaded.vocab_size, config=config)
        self._prefill_tokens = prefill_tokens
        self._busy: list[ModelSequence] = []  # those with a round under way, in the order they asked
        self._held: dict[ModelSequence, None] = {}  # those with a slot, those who have not asked for longest first

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
        sequence, pool = ask.sequence, self.packed.pool
        sequence.asked = time.perf_counter()
        base = sequence.base
        kept = sequence.commit(ask.committed)
        if sequence.slot is None:
            sequence.slot = pool.allocate(len(sequence.tokens) + EXPECTED_OUTPUT)
        self._held.pop(sequence, None)
        self._held[sequence] = None
        pool.rollback(sequence.slot, min(pool.length(sequence.slot), base + kept, sequence.base - 1))
        sequence.done = ask.done
        sequence.gamma = ask.gamma
        self._busy.append(sequence)

    def _close(self, sequence: ModelSequence) -> None:
        sequence.closed = True
        sequence.done = None
        if sequence in self._busy:
            self._busy.remove(sequence)
        if sequence.slot is not None:
            self.packed.pool.free(sequence.slot)
            sequence.slot = None
            del self._held[sequence]

    # --------------------------------------------------------------------------------------- schedule, forward, process

    def schedule(self) -> list[DraftWork]:
        work: list[DraftWork] = []
        budget = self._prefill_tokens
        for sequence in self._busy:
            assert sequence.slot is not None
            start = self.packed.pool.length(sequence.slot)
            behind = len(sequence.tokens) - start  # at least 1: the last token is always still to run
            piece = min(behind - 1, budget)
            draws = piece == behind - 1
            # Room for all of the round, but for the last drafted token, which is never run.
            end = sequence.base + sequence.gamma - 1 if draws else start + piece
            if end == start or not self._has_room(sequence, end):
                continue
            budget -= piece
            tokens = sequence.tokens[start:] if draws else sequence.tokens[start : start + piece]
            work.append(DraftWork(sequence, Chunk(sequence.slot, tokens, start, piece), draws))
        return work

    def _has_room(self, sequence: ModelSequence, end: int) -> bool:
        """Grows the sequence; where the pool is full, those give way that wait for a verdict, then those behind it."""
        assert sequence.slot is not None
        if self.packed.pool.lacking(sequence.slot, end) <= self.packed.pool.blocks.unheld:
            self.packed.pool.grow(sequence.slot, end)
            return True
        idle = [each for each in self._held if each.done is None]
        later = self._busy[self._busy.index(sequence) + 1 :]
        victims = [each.slot for each in (*idle, *reversed(later)) if each.slot is not None]
        return make_room(self.packed.pool, sequence.slot, end, victims) is not None

    def forward(self, work: Sequence[DraftWork]) -> list[Drawn]:
        """What each work has drawn: nothing, a token, or the whole proposal where it drafts alone."""
        if len(work) == 1 and work[0].draws and work[0].sequence.may_be_written and self.packed.can_write:
            tokens, laws = self.packed.write(work[0].chunk, self._drawing.sampling(work[0].sequence))
            return [list(zip(tokens, laws, strict=True))]
        logits = self.packed.forward([item.chunk for item in work])
        drawing = [item.sequence for item in work if item.draws]
        drawn = iter(self._drawing.draw(drawing, logits) if drawing else ())
        return [[next(drawn)] if item.draws else [] for item in work]

    def process(self, work: Sequence[DraftWork], output: Sequence[Drawn]) -> None:
        for item, drawn in zip(work, output, strict=True):
            self._take(item.sequence, drawn)

    def _take(self, sequence: ModelSequence, drawn: Drawn) -> None:
        for token, law in drawn:
            if token == UNSURE:  # nothing was sampled, and what was before is the proposal
                sequence.gamma = sequence.drafted
                break
            if token < 0:
                text = f"the draft's logits after {len(sequence.tokens)} tokens are no numbers"
                self._end(sequence, DraftError(text, reason="BAD_LOGITS"))
                return
            sequence.add(token, law)
        if sequence.drafted == sequence.gamma:
            self._busy.remove(sequence)
            sequence.finish()

    def fail(self, work: Sequence[DraftWork], error: Exception) -> None:
        for item in work:
            if item.sequence in self._busy:
                self._end(item.sequence, error)

    def _end(self, sequence: ModelSequence, error: Exception) -> None:
        if sequence in self._busy:
            self._busy.remove(sequence)
        sequence.finish(error if isinstance(error, DraftError) else DraftError(f"{type(error).__name__}: {error}"))
