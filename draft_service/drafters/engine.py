"""The draft's engine: all sequences that have a proposal to draft take one step in one packed pass.

It runs on a thread of its own (`outrider.lm.engine`): γ tokens are γ passes, with no way back to the event loop between
them; a sequence that drafts alone takes them in one call. It knows nothing of gRPC or of verdicts: it is told what was
committed, and asked for tokens that may follow.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from draft_service.drafters.base import Draft, DraftError, DraftSequence
from kernels import coupled
from kernels.adjustments import Adjuster, apply
from kernels.dense import DraftLogits
from kernels.distribution import SamplingLaw
from kernels.philox import Domain, uniform
from kernels.sigmoid import draft_logits
from kernels.sparse import SparseConfig, SparseLaw, draw
from kernels.verify import Rule
from outrider.lm.engine import Engine
from outrider.lm.packed import Chunk, PackedModel
from outrider.lm.room import make_room
from outrider.lm.writing import Sampling

# Tokens that a sequence is expected to write: room in one piece is sought for so many.
EXPECTED_OUTPUT = 512

TokenLaw = SparseLaw | DraftLogits | None
Done = Callable[[Draft | DraftError], None]


@dataclass(slots=True, eq=False)
class ModelSequence:
    """A sequence and its state. Belongs to the engine's thread.

    Law 5: from an `Ask` on the cache holds a prefix of `tokens` without the last, which is run to draft the first one.

    Attributes:
        rule: how the proposals are judged.
        tokens: prompt, committed tokens, and those drafted in the round under way.
        base: how many of them are committed.
        tells_logits: whether the logits of each drafted token are told, and not its law.
        gamma: how many to draft in the round under way; 0 between rounds.
        laws: what is told of the drafted ones: what they were sampled from, or the logits (`tells_logits`).
        done: takes the round's result; any thread may call it.
        slot: its place in the KV pool; None before its first pass and after its end.
    """

    law: SamplingLaw
    seed: int
    rule: Rule
    tokens: list[int]
    base: int
    adjuster: Adjuster | None
    tells_logits: bool = False
    slot: int | None = None
    gamma: int = 0
    laws: list[TokenLaw] = field(default_factory=list)
    done: Done | None = None
    asked: float = 0.0
    closed: bool = False

    @staticmethod
    def begin(sequence: DraftSequence, vocab_size: int) -> "ModelSequence":
        """A sequence at its opening, with nothing in the cache."""
        adjuster = None
        if not sequence.logit_rules.is_identity:
            adjuster = Adjuster(sequence.logit_rules, sequence.prompt, vocab_size)
            for token in sequence.committed:
                adjuster.push(token)
        tokens = [*sequence.prompt, *sequence.committed]
        return ModelSequence(
            sequence.draft_law, sequence.seed, sequence.rule, tokens, len(tokens), adjuster, sequence.needs_logits
        )

    @property
    def shares_noise(self) -> bool:
        """Whether its tokens are chosen by the noise of their positions, and not drawn by uniforms of the round."""
        return self.rule is Rule.COUPLED and not self.law.is_greedy

    @property
    def may_be_written(self) -> bool:
        """Whether its tokens can be drawn in one call: there, logits are neither adjusted nor kept."""
        return self.adjuster is None and not self.tells_logits

    @property
    def drafted(self) -> int:
        """Tokens drafted in this round."""
        return len(self.tokens) - self.base

    def commit(self, committed: Sequence[int]) -> int:
        """Puts what was committed in place of what was drafted; how many of its tokens had been drafted."""
        base, kept = self.base, 0
        for token, drafted in zip(committed, self.tokens[base:], strict=False):
            if token != drafted:
                break
            kept += 1
        self.tokens[base:] = committed
        self.base = len(self.tokens)
        if self.adjuster is not None:
            self.adjuster.truncate(self.adjuster.n_generated - len(self.laws) + kept)
            for token in committed[kept:]:
                self.adjuster.push(token)
        self.laws = []
        return kept

    def add(self, token: int, law: TokenLaw) -> None:
        """Takes in a drafted token."""
        self.tokens.append(token)
        self.laws.append(law)
        if self.adjuster is not None:
            self.adjuster.push(token)

    def finish(self, error: DraftError | None = None) -> None:
        """Ends the round and hands out its result."""
        done, self.done, self.gamma = self.done, None, 0
        if done is not None:
            laws = [] if self.rule is Rule.COUPLED else self.laws
            done(error or Draft(self.tokens[self.base :], laws, time.perf_counter() - self.asked))


@dataclass(frozen=True, slots=True)
class Ask:
    """What was committed since the last round, and how many tokens to draft behind it."""

    sequence: ModelSequence
    committed: Sequence[int]
    gamma: int
    done: Done


@dataclass(frozen=True, slots=True)
class Close:
    """The sequence is gone: free what it held."""

    sequence: ModelSequence


@dataclass(frozen=True, slots=True)
class DraftWork:
    """One sequence's share of a pass; `draws` is False where it is prompt alone, with more to come."""

    sequence: ModelSequence
    chunk: Chunk
    draws: bool


Drawn = list[tuple[int, TokenLaw]]
"""Tokens and their laws."""


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
        self._target_size = vocab_size
        self._vocab_size = min(vocab_size, packed.loaded.vocab_size)  # a draft may lack rows that the target has
        self._config = config
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
            return [self._write(work[0])]
        logits = self.packed.forward([item.chunk for item in work])
        drawing = [item.sequence for item in work if item.draws]
        drawn = iter(self._draw(drawing, logits) if drawing else ())
        return [[next(drawn)] if item.draws else [] for item in work]

    def process(self, work: Sequence[DraftWork], output: Sequence[Drawn]) -> None:
        for item, drawn in zip(work, output, strict=True):
            self._take(item.sequence, drawn)

    def _take(self, sequence: ModelSequence, drawn: Drawn) -> None:
        for token, law in drawn:
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

    def _write(self, work: DraftWork) -> Drawn:
        sequence = work.sequence
        places = range(sequence.drafted, sequence.gamma)
        uniforms = [_uniform(sequence, place) for place in places]
        noise = None
        if sequence.shares_noise:
            noise = coupled.noise_of([(sequence.seed, sequence.base + place) for place in places], self._vocab_size)
        sampling = Sampling(sequence.law, self._config, uniforms, self._vocab_size, noise)
        return list(zip(*self.packed.write(work.chunk, sampling), strict=True))

    def _draw(self, drawing: Sequence[ModelSequence], logits: torch.Tensor) -> Drawn:
        # logits: [B, V or more], one row for each sequence
        z = logits[:, : self._vocab_size]
        if any(sequence.adjuster is not None for sequence in drawing):
            z = apply(z, [None if each.adjuster is None else each.adjuster.row() for each in drawing])
        drawn: dict[int, tuple[int, TokenLaw]] = {}
        for by_noise, how in ((False, self._by_uniforms), (True, self._by_noise)):
            rows = [row for row, sequence in enumerate(drawing) if sequence.shares_noise is by_noise]
            if rows:
                some = z if len(rows) == len(drawing) else z[rows]
                drawn.update(zip(rows, how([drawing[row] for row in rows], some), strict=True))
        return [drawn[row] for row in range(len(drawing))]

    def _by_uniforms(self, drawing: Sequence[ModelSequence], z: torch.Tensor) -> Drawn:
        laws = [sequence.law for sequence in drawing]
        uniforms = [_uniform(sequence, sequence.drafted) for sequence in drawing]
        tokens, drawn = draw(z, laws, self._config, uniforms)
        told = [
            draft_logits(z[row : row + 1], sequence.law, self._target_size)[0] if sequence.tells_logits else law
            for row, (sequence, law) in enumerate(zip(drawing, drawn, strict=True))
        ]
        return list(zip(tokens, told, strict=True))

    def _by_noise(self, drawing: Sequence[ModelSequence], z: torch.Tensor) -> Drawn:
        noise = coupled.noise_of([(each.seed, len(each.tokens)) for each in drawing], self._vocab_size)
        return [(token, None) for token in coupled.draw(z, [each.law for each in drawing], noise)]

    def _end(self, sequence: ModelSequence, error: Exception) -> None:
        if sequence in self._busy:
            self._busy.remove(sequence)
        sequence.finish(error if isinstance(error, DraftError) else DraftError(f"{type(error).__name__}: {error}"))


def _uniform(sequence: ModelSequence, place: int) -> float:
    """The draw at a place of the proposal (Law 2): keyed by that and the round's base."""
    if sequence.law.is_greedy or sequence.shares_noise:
        return 0.0
    return uniform(sequence.seed, sequence.base, place, Domain.DRAFT)
