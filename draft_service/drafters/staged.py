"""The drafter that is a model with a cheaper drafter before it [L 6]: one pass judges several guesses.

Its engine drafts for both kinds of sequences, with and without guesses, in the same passes: there is one model, on one
thread. It knows nothing of how guesses are judged (`staging`), nor of which drafter makes them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from draft_service.drafters.base import DraftSequence
from draft_service.drafters.bounded import BoundedGuessers, Guessing, LateGuesser
from draft_service.drafters.drawing import Drawn
from draft_service.drafters.engine import DraftEngine, DraftWork
from draft_service.drafters.guessing import GuessingDrafter
from draft_service.drafters.model import ModelDrafter
from draft_service.drafters.sequence import ModelSequence
from draft_service.drafters.staging import Guessed, StagedSequence, Staging
from kernels.philox import Domain
from kernels.sparse import SparseConfig
from outrider.best_effort import Component
from outrider.runtime.packed import Chunk, PackedModel

GUESSES = Component("staged_guesses")

_log = structlog.get_logger()


@dataclass(slots=True)
class StagedCounts:
    """How the inner game goes, over all sequences.

    Attributes:
        passes: of the draft model that judged guesses, counted for each sequence in them.
        guessed: tokens guessed.
        accepted: of them, those that the draft's law let stand.
        failures: guessers that broke; their sequences are drafted by the model alone.
    """

    passes: int = 0
    guessed: int = 0
    accepted: int = 0
    failures: int = 0


@dataclass(frozen=True, slots=True)
class StagedWork(DraftWork):
    """A share of a pass that has guesses in it."""

    game: Guessed


class StagedDrafter(ModelDrafter):
    """Drafts with a model that a cheaper drafter guesses for."""

    def __init__(self, engine: "StagedEngine", cheap: GuessingDrafter, *, vocab_size: int) -> None:
        """`vocab_size` is the target's."""
        super().__init__(engine, vocab_size=vocab_size)
        self._target_size = vocab_size
        self._cheap = cheap

    def begin(self, sequence: DraftSequence) -> ModelSequence:
        guesser = LateGuesser(lambda: self._cheap.guesser(sequence, Domain.STAGED_DRAFT))
        return StagedSequence.with_guesser(sequence, self._target_size, guesser)


class StagedEngine(DraftEngine):
    """The draft's engine, which also takes sequences with guesses.

    Attributes:
        counts: of the inner game.
    """

    def __init__(
        self,
        packed: PackedModel,
        *,
        vocab_size: int,
        config: SparseConfig,
        prefill_tokens: int,
        guesses: int,
        threads: int | None = None,
    ) -> None:
        """`guesses` is how many tokens are guessed at once at most; never more than are left to draft but one."""
        super().__init__(packed, vocab_size=vocab_size, config=config, prefill_tokens=prefill_tokens, threads=threads)
        self.counts = StagedCounts()
        self._staging = Staging(target_size=vocab_size, draft_size=packed.loaded.vocab_size, config=config)
        self._guesses = guesses
        self._guessers = BoundedGuessers("draft-guesses")

    def schedule(self) -> list[DraftWork]:
        work = super().schedule()
        guessed = GUESSES.run(lambda: self._add_guesses(work), None)
        if guessed is None:
            for item in work:
                if isinstance(item.sequence, StagedSequence):
                    item.sequence.guesser = None  # what it has read is unknown
        return work if guessed is None else guessed

    def _add_guesses(self, work: list[DraftWork]) -> list[DraftWork]:
        turns = {item.sequence: turn for item in work if (turn := self._turn(item)) is not None}
        if not turns:
            return work
        self._guessers.run([*turns.values()])
        return [self._with_guesses(item, turns[item.sequence]) if item.sequence in turns else item for item in work]

    def _turn(self, item: DraftWork) -> Guessing | None:
        """What is asked of a sequence's guesser before the pass; None for nothing.

        It reads as far as the pass does, so that a long prompt is taken in pieces, and guesses before any draw.
        """
        sequence, chunk = item.sequence, item.chunk
        if not isinstance(sequence, StagedSequence) or sequence.guesser is None:
            return None
        end = min(chunk.start + len(chunk.tokens), sequence.base)
        unread = sequence.tokens[sequence.read : end]
        count = min(self._guesses, sequence.gamma - sequence.drafted - 1)
        if not item.draws or count < 1 or sequence.silent == sequence.base:
            count = 0
        return Guessing(sequence.guesser, unread, count, sequence.tokens[sequence.base :]) if unread or count else None

    def _with_guesses(self, item: DraftWork, turn: Guessing) -> DraftWork:
        """The work with what was guessed for it.

        Where nothing is guessed, the rest of the round is drafted as without a guesser. That is settled by the text
        alone, so that the same round comes out in any company.
        """
        sequence, chunk = item.sequence, item.chunk
        assert isinstance(sequence, StagedSequence)
        if turn.error is not None:  # what is guessed decides nothing but speed
            _log.error("guessing failed; the draft model goes on alone", reason=repr(turn.error))
            self.counts.failures += 1
            sequence.guesser = None
            return item
        if turn.guesses is None:  # another one hangs
            return item
        sequence.read += len(turn.unread)
        if not turn.guesses:
            sequence.silent = sequence.base if turn.count else sequence.silent
            return item
        guesses, known = turn.guesses, self.packed.loaded.vocab_size
        run = [token for token, _ in guesses]
        unknown = next((place for place, token in enumerate(run) if token >= known), len(run))
        # A token that the draft lacks was guessed all the same (Law 4): the law rejects it, so it need not be run.
        game = Guessed(sequence, guesses[: unknown + 1], unknown + 1)
        tokens = [*chunk.tokens, *run[:unknown]]
        return StagedWork(sequence, Chunk(chunk.slot, tokens, chunk.start, chunk.logits_from), True, game)

    def draw(self, work: Sequence[DraftWork]) -> list[Drawn]:
        staged = [item for item in work if isinstance(item, StagedWork)]
        if not staged:
            return super().draw(work)
        logits = self.packed.logits([item.chunk for item in work])
        plain_rows, staged_rows, row = list[int](), list[int](), 0
        for item in work:
            count = len(item.chunk.tokens) - item.chunk.logits_from
            (staged_rows if isinstance(item, StagedWork) else plain_rows).extend(range(row, row + count))
            row += count
        drawing = [item.sequence for item in work if item.draws and not isinstance(item, StagedWork)]
        plain = iter(self._drawing.draw(drawing, logits[plain_rows]) if drawing else ())
        judged = iter(self._staging.judge([item.game for item in staged], logits[staged_rows]))
        drawn = list[Drawn]()
        for item in work:
            if isinstance(item, StagedWork):
                drawn.append(next(judged))
                self._settle(item, len(drawn[-1]) - 1)
            else:
                drawn.append([next(plain)] if item.draws else [])
        return drawn

    def _settle(self, item: StagedWork, accepted: int) -> None:
        """Takes back what was run and does not stand."""
        self.packed.pool.rollback(item.chunk.slot, len(item.sequence.tokens) + accepted)
        self.counts.passes += 1
        self.counts.guessed += len(item.game.guesses)
        self.counts.accepted += accepted
