"""The outcome cache: what would be asked for next is drafted while a verdict is under way, for the likeliest verdicts.

A branch is a sequence of its own: what was committed, the drafted tokens that one outcome lets stand, the token that
follows them, and what is drafted behind it. Its draws are those of the base that it would have (invariant 2), so a
branch is the very proposal that would be drafted after that verdict, and at most one of a sequence's branches lives.
Which are drafted, and how far, depends on tokens that were sent and on time alone (invariant 4).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from draft_service.drafters.base import Foresight
from draft_service.drafters.outcomes import Forecast, Guess, Place
from draft_service.drafters.sequence import Drawn, ModelSequence, TokenLaw
from draft_service.drafters.spare_time import SpareTime
from draft_service.drafters.trial import Trial
from kernels.dense import DraftLogits
from kernels.sampling import UNSURE
from kernels.sparse import SparseDistribution
from kernels.verify import Rule
from outrider.runtime.kv_cache import KVPool
from outrider.runtime.model_runner import Chunk

RUNNERS_UP = 4
"""Tokens that are thought of behind each place."""

MOST_BRANCHES = 12
"""Of a sequence at a time."""

LEAST_CHANCE = 0.04
"""Branches that are less likely are not begun: they disturb more than they save."""

# This share of the pool's blocks stays free for sequences themselves.
_RESERVE = 1 / 8


_Kind = tuple[Rule, bool]
"""Sequences whose verdicts are alike: the rule, and whether tokens are chosen by scores."""


@dataclass(slots=True)
class Counts:
    """What the cache has done so far, over all sequences.

    Attributes:
        hits: verdicts whose outcome was in it.
        misses: verdicts whose outcome was not, though others were.
        drafted: tokens drafted ahead.
        used: those that became part of a proposal.
        saved_seconds: what drafting those would have taken, had it begun with the verdict.
    """

    hits: int = 0
    misses: int = 0
    drafted: int = 0
    used: int = 0
    saved_seconds: float = 0.0

    def add(self, foresight: Foresight) -> None:
        """A verdict has come."""
        self.hits += foresight.hit
        self.misses += not foresight.hit
        self.drafted += foresight.drafted
        self.used += foresight.used
        self.saved_seconds += foresight.saved_seconds


@dataclass(slots=True)
class _Lookahead:
    """What is drafted ahead for one sequence, whose last proposal is `drafted`.

    Attributes:
        places: what may stand at each place of it.
        guesses: outcomes whose branches have not begun, the likeliest last.
        end: the sequence run to its end, to see what may follow where all is accepted; None until it begins.
        all_stand: the chance that all is accepted.
        end_chance: the same until the end has begun to run, then 0.
        branches: those begun, by how much they accept and what follows.
        open: those that are being drafted, the end among them.
        goes_on_in_place: whether a branch has the sequence's own slot.
        drafted_tokens: of all branches so far.
    """

    drafted: list[int]
    forecast: Forecast
    places: list[Place]
    guesses: list[Guess]
    all_stand: float
    end_chance: float
    end: ModelSequence | None = None
    branches: dict[tuple[int, int], ModelSequence] = field(default_factory=dict)
    open: list[ModelSequence] = field(default_factory=list)
    goes_on_in_place: bool = False
    drafted_tokens: int = 0

    @property
    def next_chance(self) -> float:
        """Of what would be begun next; 0 where nothing would."""
        best = self.guesses[-1].chance if self.guesses and len(self.branches) < MOST_BRANCHES else 0.0
        return max(best, self.end_chance)


class OutcomeCache:
    """Branches of all sequences that wait for a verdict. Belongs to the engine's thread."""

    def __init__(self, pool: KVPool, spare: SpareTime) -> None:
        self.counts = Counts()
        self._pool = pool
        self._spare = spare
        self._lookaheads: dict[ModelSequence, _Lookahead] = {}
        self._forecasts: dict[_Kind, Forecast] = {}
        self._trials: dict[_Kind, Trial] = {}
        self._slots: set[int] = set()  # of branches, but for those in their sequence's own

    def begin(self, trunk: ModelSequence) -> None:
        """The sequence's proposal has left."""
        kind = _kind(trunk)
        if not trunk.looks_ahead or not self._trials.setdefault(kind, Trial()).choose():
            return
        if trunk.chooses_by_scores and any(row is None for row in trunk.scores):  # a device told none
            return
        forecast = self._forecasts.setdefault(kind, Forecast(by_scores=trunk.chooses_by_scores))
        assert trunk.slot is not None
        held = self._pool.length(trunk.slot)  # the last token too, where the draft was unsure of what follows it
        self._pool.rollback(trunk.slot, min(held, len(trunk.tokens) - 1))
        places = _places(trunk)
        drafted = trunk.tokens[trunk.base :]
        guesses, all_stand = forecast.guesses(places, drafted)
        guesses = sorted((each for each in guesses if each.chance >= LEAST_CHANCE), key=lambda guess: guess.chance)
        self._lookaheads[trunk] = _Lookahead(drafted, forecast, places, guesses, all_stand, all_stand)

    def settle(
        self, trunk: ModelSequence, committed: Sequence[int], kept: int
    ) -> tuple[ModelSequence | None, Foresight | None]:
        """The verdict has come, and `kept` drafted tokens stand.

        Returns:
            The branch that it asks for, if there is one, and how it went, where anything was drafted. All other
            branches are gone; the caller takes this one's slot (`hand_over`), unless it is the sequence's own.
        """
        look = self._lookaheads.pop(trunk, None)
        if look is None:
            return None, None
        branch = None
        if len(committed) <= kept + 1:  # otherwise the target has written alone since
            token = committed[kept] if len(committed) > kept else None
            look.forecast.learn(look.places, look.drafted, kept, token)
            if token is not None and (found := look.branches.get((kept, token))) is not None and found.drafted:
                branch = look.branches.pop((kept, token))
        drafted = look.drafted_tokens
        used = 0 if branch is None else branch.drafted
        self._free(look, trunk)
        if not drafted:
            return None, None
        foresight = Foresight(drafted, used, branch is not None, used * self._spare.step_seconds(1))
        self.counts.add(foresight)
        return branch, foresight

    def hand_over(self, branch: ModelSequence) -> None:
        """The slot of a branch that `settle` has returned is the caller's from now on."""
        if branch.slot is not None:
            self._slots.discard(branch.slot)

    def serves(self, trunk: ModelSequence) -> bool:
        """Whether branches of the sequence are thought of."""
        return trunk in self._lookaheads

    def took(self, trunk: ModelSequence, seconds: float, *, on: bool) -> None:
        """From one proposal's leaving to the next one's it took so long, with branches in between or without: what
        they cost while the verdict was under way, and what they save after it.
        """
        self._trials.setdefault(_kind(trunk), Trial()).add(seconds, on=on)

    def drop(self, trunk: ModelSequence) -> None:
        """Nothing will be asked of this sequence, or its branches cannot be had."""
        self._free(self._lookaheads.pop(trunk, None), trunk)

    def reset(self) -> None:
        """Drops all branches. Gives back what they hold, whatever state an error has left them in."""
        self._lookaheads.clear()
        while self._slots:
            self._pool.free(self._slots.pop())

    # ------------------------------------------------------------------------------------------- what to draft next

    def next(self, width: int) -> list[ModelSequence]:
        """The branches that are worth a step now, `width` of them at most, likeliest first; room is made for them.

        The caller says how far each is to go (`ModelSequence.gamma`), within `wanted`.
        """
        chosen: list[ModelSequence] = []
        for trunk, look in self._lookaheads.items():
            for branch in list(look.open):  # what has begun comes first
                if self._has_room(branch):
                    chosen.append(branch)
                else:
                    self._give_up(trunk, look, branch)
        while len(chosen) < width and self._lookaheads:
            trunk, look = max(self._lookaheads.items(), key=lambda item: item[1].next_chance)
            if look.next_chance < LEAST_CHANCE:
                break
            branch = self._begin(trunk, look)
            if self._has_room(branch):
                chosen.append(branch)
            else:
                self._give_up(trunk, look, branch)
        return chosen[:width]

    def wanted(self, branch: ModelSequence) -> int:
        """How many tokens are to be drafted of a branch in all."""
        assert branch.trunk is not None
        look = self._lookaheads[branch.trunk]
        return 1 if branch is look.end else len(look.drafted)

    def chunk(self, branch: ModelSequence) -> Chunk:
        """What of it is still to run, before the next token can be drawn."""
        assert branch.slot is not None
        start = self._pool.length(branch.slot)
        tokens = branch.tokens[start:]
        return Chunk(branch.slot, tokens, start, len(tokens) - 1)

    def take(self, branch: ModelSequence, drawn: Drawn) -> None:
        """Takes in what was drafted of a branch."""
        trunk = branch.trunk
        look = None if trunk is None else self._lookaheads.get(trunk)
        if trunk is None or look is None:  # dropped in the same step, for another branch of its sequence
            return
        is_done = False
        for token, law, scores in drawn:
            if token == UNSURE:  # the proposal ends here, as whoever goes on with it will find
                is_done = True
            elif token < 0:
                self.drop(trunk)
                return
            else:
                branch.add(token, law, scores)
                look.drafted_tokens += 1
        if branch.drafted < self.wanted(branch) and not is_done:
            return
        look.open.remove(branch)
        if branch is look.end:
            (place,) = _places(branch)
            look.guesses += look.forecast.after_all(place, len(look.drafted), look.all_stand)
            look.guesses.sort(key=lambda guess: guess.chance)

    def _begin(self, trunk: ModelSequence, look: _Lookahead) -> ModelSequence:
        """Begins what is likeliest: a branch, or the sequence's end, to see what may follow."""
        if look.guesses and look.guesses[-1].chance >= look.end_chance and len(look.branches) < MOST_BRANCHES:
            guess = look.guesses.pop()
            branch = look.branches[guess.accepted, guess.token] = self._fork(trunk, look, guess)
        else:
            branch = look.end = trunk.ended()
            look.all_stand, look.end_chance = look.end_chance, 0.0
        look.open.append(branch)
        return branch

    def _has_room(self, branch: ModelSequence) -> bool:
        assert branch.slot is not None
        end = branch.base + self.wanted(branch) - 1
        if end > self._pool.max_length:
            return False
        return (
            self._pool.blocks_needed(branch.slot, end)
            <= self._pool.blocks.num_free - _RESERVE * self._pool.blocks.count
        )

    def _give_up(self, trunk: ModelSequence, look: _Lookahead, branch: ModelSequence) -> None:
        """Begins nothing more, and lets this one go."""
        look.open.remove(branch)
        look.guesses, look.end_chance = [], 0.0
        for outcome, each in list(look.branches.items()):
            if each is branch:
                self._free_branch(look.branches.pop(outcome), trunk)

    def _fork(self, trunk: ModelSequence, look: _Lookahead, guess: Guess) -> ModelSequence:
        assert trunk.slot is not None
        at = trunk.base + guess.accepted
        branch = trunk.branch(guess.accepted, guess.token)
        held = self._pool.length(trunk.slot)
        if guess.accepted == len(look.drafted) and not look.goes_on_in_place:
            branch.slot = trunk.slot  # what follows the end first goes on in place; where it is not it, it is cut off
            look.goes_on_in_place = True
        else:
            branch.slot = self._pool.fork(trunk.slot)
            self._slots.add(branch.slot)
            self._pool.rollback(branch.slot, min(held, at))
        return branch

    def _free(self, look: _Lookahead | None, trunk: ModelSequence) -> None:
        for branch in () if look is None else look.branches.values():
            self._free_branch(branch, trunk)

    def _free_branch(self, branch: ModelSequence, trunk: ModelSequence) -> None:
        if branch.slot is not None and branch.slot != trunk.slot:
            self._slots.discard(branch.slot)
            self._pool.free(branch.slot)


def _kind(sequence: ModelSequence) -> _Kind:
    return sequence.rule, sequence.chooses_by_scores


def _places(sequence: ModelSequence) -> list[Place]:
    """What may stand at each place that the sequence has drafted."""
    count = RUNNERS_UP + 1
    if not sequence.chooses_by_scores:
        return [_of_law(law, count) for law in sequence.laws]
    rows = torch.stack([row for row in sequence.scores if row is not None])  # [γ, V]
    if sequence.shares_noise:
        least, tokens = rows.topk(min(count, rows.shape[-1]), largest=False)
        found = tokens.tolist(), least.neg().log().tolist()  # log p + g, see `kernels.sampling.race`
    else:
        scores, tokens = rows.topk(min(count, rows.shape[-1]))
        found = tokens.tolist(), scores.tolist()
    return [Place(*each) for each in zip(*found, strict=True)]


def _of_law(law: TokenLaw, count: int) -> Place:
    if isinstance(law, DraftLogits):
        scores, tokens = law.values.float().topk(min(count, law.values.shape[-1]))
        return Place(tokens.tolist(), scores.tolist())
    assert isinstance(law, SparseDistribution)
    best = np.argsort(law.weights)[: -count - 1 : -1]
    return Place(law.ids[best].tolist(), np.log(law.weights[best].astype(np.float64)).tolist())
