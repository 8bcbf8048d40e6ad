"""The outcome cache: while a verdict is under way, the next proposal is drafted for the likeliest verdicts.

A branch is a sequence of its own: what was committed, the drafted tokens that one outcome accepts, the token that
follows them, and what is drafted behind it. It draws by the base that it would have (invariant 2), so it is the very
proposal that would be drafted after that verdict. Which branches are drafted, and how far, depends on tokens that were
sent and on time alone (invariant 4). Where a call fails, `reset` leaves no branch, and nothing else is lost.
"""

import math
import random
import statistics
from collections import defaultdict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from draft_service.drafters.base import Foresight
from draft_service.drafters.sequence import Ask, DraftWork, Drawn, ModelSequence, Place
from kernels.sampling import UNSURE
from outrider.runtime.kv_cache import KVPool

MOST_BRANCHES = 12  # of a sequence at a time
LEAST_CHANCE = 0.04  # branches less likely are not begun: they disturb more than they save
CANDIDATES = 5  # tokens for each place of a proposal, among which branches are found
RESERVE = 1 / 8  # of all blocks; so many stay free for sequences
END = -1  # in place of the token that follows a proposal of which all is accepted, until it is known what may
# A proposal leaves before anything is drafted ahead: the event loop, which sends it, shares the interpreter and perhaps
# the processor (measured: 1.1 ms a round).
LEAVING_SECONDS = 0.5e-3

# Of scores, what is chosen among; the demo pair's is 0.45, under `coupled` and at temperature 0 alike.
TEMPERATURES = np.array([0.15, 0.3, 0.45, 0.7, 1.0, 1.5, 2.5])
MEMORY, PRIOR = 0.99, 8.0  # what is left of a verdict after the next; as many count as the first guesses of τ and α
UNSEEN, LEAST_SCORE = 0.02, -1e3  # the chance of a token that was no candidate; a score so far below the best has none

NEWEST = 0.2  # weight of the newest wait or step
OUTLIER = 4.0  # what takes so many times the mean is a pause of the machine, or a slow client
MOST_STEPS = 1024  # that are planned at once

TRIAL_PAIRS, PAIRS_KEPT = 24, 128  # of rounds that a trial needs, and that it remembers
FIRST_EVERY, EVERY = 4, 24  # one round of so many is done the other way, until there are as many pairs and then
CERTAIN, HELD_UP = 2.0, 3.0  # standard errors that decide; a round that took so many times the other was held up


class Guess(NamedTuple):
    """An outcome: `accepted` drafted tokens stand, and `token` follows them."""

    chance: float
    accepted: int
    token: int


class Forecast:
    """Learns from verdicts how near target and draft are.

    Where both choose by scores (log q and shared noise, or logits at temperature 0) the target's lie near: its choice
    is j with a chance of about softmax(scores / τ)_j, with the τ that has explained the verdicts best. So it is known
    which places of *this* proposal are risky, and what would stand there instead. Where tokens are drawn, each place
    has the mean acceptance rate, and what follows a rejection goes by q.
    """

    def __init__(self, *, by_scores: bool) -> None:
        self._by_scores = by_scores
        self._evidence = np.where(TEMPERATURES == 0.45, PRIOR * 0.1, 0.0)  # log-likelihoods, forgotten slowly
        self._accepted, self._judged = 0.7 * PRIOR, PRIOR

    def guesses(self, places: Sequence[Place], drafted: Sequence[int]) -> list[Guess]:
        """The outcomes that begin with a rejection, and one for all others (`END`); `places` are of `drafted`."""
        found, chance = list[Guess](), 1.0
        for accepted, (place, token) in enumerate(zip(places, drafted, strict=True)):
            stands = self._softmax(place.scores)[0] if self._by_scores else self._accepted / self._judged
            found += self.followers(place, accepted, chance * (1 - stands), without=token)
            chance *= stands
        return [*found, Guess(chance, len(drafted), END)]

    def followers(self, place: Place, accepted: int, chance: float, *, without: int | None = None) -> list[Guess]:
        """The outcomes where `accepted` tokens stand and one of this place follows; together they have that chance."""
        kept = [i for i, token in enumerate(place.tokens) if token != without and place.scores[i] > -math.inf]
        shares = self._softmax([place.scores[i] for i in kept])
        return [Guess(chance * share, accepted, place.tokens[i]) for share, i in zip(shares, kept, strict=True)]

    def learn(self, places: Sequence[Place], drafted: Sequence[int], accepted: int, token: int | None) -> None:
        """Takes in a verdict: so many were accepted, and this came next; None where nothing did."""
        if not (judged := min(accepted + 1, len(drafted))):
            return
        self._accepted = MEMORY * self._accepted + min(accepted, judged)
        self._judged = MEMORY * self._judged + judged
        self._evidence *= MEMORY
        for place, chosen in zip(places, [*drafted[:accepted], token][:judged], strict=False):
            if chosen is not None and chosen in place.tokens and math.isfinite(best := max(place.scores)):
                scaled = np.maximum(np.array(place.scores) - best, LEAST_SCORE)[None, :] / TEMPERATURES[:, None]
                logs = scaled[:, list(place.tokens).index(chosen)] - np.log(np.exp(scaled).sum(axis=1))
                self._evidence += np.fmax(logs, math.log(UNSEEN))

    def _softmax(self, scores: Sequence[float]) -> list[float]:
        z = np.array(scores, dtype=np.float64)
        if not len(z) or not math.isfinite(best := z.max()):
            return [1 / len(z) for _ in scores]
        temperature = TEMPERATURES[int(self._evidence.argmax())] if self._by_scores else 1.0
        weights = np.exp(np.maximum(z - best, LEAST_SCORE) / temperature)
        return [float(share) for share in weights / weights.sum()]


class SpareTime:
    """How many steps are done before somebody is likely to ask for a proposal, who would have to wait for them."""

    def __init__(self) -> None:
        self._wait = self._spread = 0.0  # from a proposal's leaving to the next asking, and its mean deviation
        self._step: dict[int, float] = {}  # seconds, by the sequences that take it together
        self.left: dict[Hashable, float] = {}  # who is expected to ask, and when their proposals left

    def step_seconds(self, width: int) -> float:
        """What a step of so many sequences takes; 0 before the first. Until a width is measured, as if one by one."""
        if width in self._step:
            return self._step[width]
        return min((seconds * max(1.0, width / known) for known, seconds in self._step.items()), default=0.0)

    def spent(self, width: int, steps: int, seconds: float) -> None:
        """So many steps of so many sequences took so long."""
        if width < 1 or steps < 1 or not 0 < (each := seconds / steps) < math.inf:
            return
        before = self._step.get(width, each)
        self._step[width] = before + NEWEST * (min(each, OUTLIER * before) - before)

    def asked(self, who: Hashable, now: float) -> None:
        wait = now - self.left.pop(who, now)
        if wait > 0 and not self._wait:
            self._wait, self._spread = wait, wait / 2
        elif 0 < wait < OUTLIER * self._wait:
            self._spread += NEWEST * (abs(wait - self._wait) - self._spread)
            self._wait += NEWEST * (wait - self._wait)

    def steps(self, now: float, width: int) -> int:
        """How many steps of `width` are done in time; 0 while nothing is known."""
        step, wait = self.step_seconds(width), self._wait - self._spread / 2
        rest = min((since + wait - now for since in self.left.values() if now - since < OUTLIER * wait), default=0.0)
        return max(0, int(min(rest / step, MOST_STEPS))) if step > 0 else 0


class Trial:
    """Whether rounds are shorter with branches than without. Now and then one is done the other way, and compared with
    the round before it. It looks at times alone, so its choice depends on no token.
    """

    def __init__(self) -> None:
        self.best = True
        self._last: float | None = None  # seconds of the last round that was done so
        self._gains = deque[float](maxlen=PAIRS_KEPT)  # of the other way, as logarithms
        self._coin = random.Random(0)

    def choose(self) -> bool:
        """Whether a round that begins now has branches."""
        every = FIRST_EVERY if len(self._gains) < TRIAL_PAIRS else EVERY
        return self.best if self._coin.random() >= 1 / every else not self.best

    def add(self, seconds: float, *, on: bool) -> None:
        """A round took so long, with them or without."""
        if not 0 < seconds < math.inf:
            return
        if on is self.best:
            self._last = seconds
        elif self._last is not None:
            gain, most = math.log(self._last) - math.log(seconds), math.log(HELD_UP)
            self._gains.append(min(max(gain, -most), most))
            self._last = None
            error = statistics.stdev(self._gains) / math.sqrt(len(self._gains)) if len(self._gains) > 1 else 0.0
            if len(self._gains) >= TRIAL_PAIRS and statistics.fmean(self._gains) > CERTAIN * error:
                self.best = not self.best
                self._gains.clear()


@dataclass(slots=True)
class Counts:
    """What the cache has done so far, over all sequences."""

    hits: int = 0  # verdicts whose outcome was in it
    misses: int = 0  # those whose was not, though others were
    drafted: int = 0  # tokens drafted ahead
    used: int = 0  # those that became part of a proposal
    saved_seconds: float = 0.0  # what drafting those would have taken, had it begun with the verdict

    def add(self, foresight: Foresight) -> None:
        self.hits += foresight.hit
        self.misses += not foresight.hit
        self.drafted += foresight.drafted
        self.used += foresight.used
        self.saved_seconds += foresight.saved_seconds


@dataclass(slots=True)
class Lookahead:
    """What is drafted ahead for one sequence, the trunk."""

    trunk: ModelSequence
    drafted: list[int]  # its last proposal
    forecast: Forecast
    places: list[Place]  # what may stand at each place of it
    guesses: list[Guess]  # outcomes whose branches have not begun, the likeliest last
    end: ModelSequence | None = None  # the trunk run to its end, to see what may follow where all of it is accepted
    end_chance: float = 0.0
    # Those begun, the end among them, by how much they accept and what follows; and those that are being drafted.
    branches: dict[tuple[int, int], ModelSequence] = field(default_factory=dict)
    open: list[ModelSequence] = field(default_factory=list)
    goes_on_in_place: bool = False  # a branch has the trunk's own slot
    tokens: int = 0  # drafted, of all branches

    @property
    def next_chance(self) -> float:
        """Of what would be begun next; 0 where nothing would."""
        return self.guesses[-1].chance if self.guesses and len(self.branches) <= MOST_BRANCHES else 0.0

    def wanted(self, branch: ModelSequence) -> int:
        """How many tokens to draft of a branch in all."""
        return 1 if branch is self.end else len(self.drafted)

    def add(self, guesses: Sequence[Guess]) -> None:
        self.guesses = sorted((*self.guesses, *(guess for guess in guesses if guess.chance >= LEAST_CHANCE)))


class OutcomeCache:
    """Branches of all sequences that wait for a verdict. Belongs to the engine's thread."""

    def __init__(self, pool: KVPool, *, width: int) -> None:
        """`width` branches take a step together."""
        self.counts, self.spare, self.width = Counts(), SpareTime(), width
        self.lookaheads: dict[ModelSequence, Lookahead] = {}
        self.leaving: dict[ModelSequence, float] = {}  # those whose proposals leave, and since when
        self._pool = pool
        self._slots: set[int] = set()  # of branches
        self._forecasts: dict[Hashable, Forecast] = {}
        self._trials = defaultdict[Hashable, Trial](Trial)

    def left(self, trunk: ModelSequence, now: float) -> None:
        """A proposal leaves: the time since the last one is what branches cost and save."""
        if trunk.told.looks_ahead and trunk.was_ahead is not None:
            self._trials[_kind(trunk)].add(now - trunk.left, on=trunk.was_ahead)
        trunk.left = self.leaving[trunk] = self.spare.left[trunk] = now

    def asked(self, ask: Ask, drafted: int, kept: int) -> ModelSequence | None:
        """A verdict has come, and `kept` of the `drafted` tokens stand; returns the branch that it asks for, if any.

        Its slot is the trunk's from now on. The other branches are gone.
        """
        trunk, committed, branch = ask.sequence, ask.committed, None
        self.leaving.pop(trunk, None)
        self.spare.asked(trunk, ask.posted)
        look = self.lookaheads.pop(trunk, None)
        is_next = drafted > 0 and len(committed) <= kept + 1  # otherwise the target has written alone since
        trunk.was_ahead = look is not None if is_next else None
        if look is None:
            return None
        if is_next:
            token = committed[kept] if len(committed) > kept else None
            look.forecast.learn(look.places, look.drafted, kept, token)
            if token is not None and (found := look.branches.get((kept, token))) is not None and found.drafted:
                branch = look.branches.pop((kept, token))
        self._free(look)
        if branch is not None and branch.slot in self._slots:  # otherwise it went on in place
            assert trunk.slot is not None
            self._slots.remove(branch.slot)
            self._pool.free(trunk.slot)
            trunk.slot = branch.slot
        if look.tokens:
            used = 0 if branch is None else branch.drafted
            saved = used * self.spare.step_seconds(1)
            trunk.foresight = Foresight(look.tokens, used, branch is not None, saved)
            self.counts.add(trunk.foresight)
        return branch

    def drop(self, trunk: ModelSequence) -> None:
        """It will ask no more, or its branches cannot be had."""
        self.leaving.pop(trunk, None)
        self.spare.left.pop(trunk, None)
        if (look := self.lookaheads.pop(trunk, None)) is not None:
            self._free(look)

    def reset(self) -> None:
        """Drops all branches, whatever state an error has left them in."""
        self.lookaheads.clear()
        self.leaving.clear()
        while self._slots:
            self._pool.free(self._slots.pop())

    def work(self, now: float) -> list[DraftWork]:
        """What to draft ahead in the next step, and how far: as much as is done before the first is likely to ask."""
        for trunk, since in list(self.leaving.items()):
            if now - since < LEAVING_SECONDS:
                return []
            del self.leaving[trunk]
            self._look(trunk)
        if not self.spare.steps(now, 1):
            return []
        chosen = [(look, branch) for look in self.lookaheads.values() for branch in look.open]
        while len(chosen) < self.width and self.lookaheads:
            look = max(self.lookaheads.values(), key=lambda each: each.next_chance)
            if look.next_chance < LEAST_CHANCE:
                break
            if (begun := self._begin(look, look.guesses.pop())) is not None:
                chosen.append((look, begun))
        del chosen[self.width :]
        steps = max(1, self.spare.steps(now, len(chosen)))
        for look, branch in chosen:
            branch.gamma = min(look.wanted(branch), branch.drafted + steps)
        return [DraftWork(branch, branch.chunk(self._pool), draws=True) for _, branch in chosen]

    def took(self, work: Sequence[DraftWork], output: Sequence[Drawn], seconds: float) -> None:
        """A step of the engine is done: what it drafted of branches, and how long it took."""
        for item, drawn in zip(work, output, strict=True):
            trunk = item.sequence.trunk  # its branches may have been dropped in this same step
            if trunk is not None and (look := self.lookaheads.get(trunk)) is not None:
                self._take(look, item.sequence, drawn)
        if all(item.draws for item in work):
            self.spare.spent(len(work), max(map(len, output), default=0), seconds)

    def _take(self, look: Lookahead, branch: ModelSequence, drawn: Drawn) -> None:
        is_done = False
        for token, law, scores in drawn:
            if token == UNSURE:  # the proposal ends here, as whoever goes on with it will find
                is_done = True
            elif token < 0:
                return self.drop(look.trunk)
            else:
                branch.add(token, law, scores)
                look.tokens += 1
        if is_done or branch.drafted >= look.wanted(branch):
            look.open.remove(branch)
            if branch is look.end:
                look.add(look.forecast.followers(branch.candidates(CANDIDATES)[0], len(look.drafted), look.end_chance))

    def _look(self, trunk: ModelSequence) -> None:
        """Thinks of what may follow a proposal that has left."""
        has_scores = not trunk.chooses_by_scores or all(row is not None for row in trunk.scores)  # a device keeps none
        if not trunk.told.looks_ahead or not has_scores or not self._trials[_kind(trunk)].choose():
            return
        assert trunk.slot is not None
        held = self._pool.length(trunk.slot)  # the last token too, where the draft was unsure of what follows it
        self._pool.rollback(trunk.slot, min(held, len(trunk.tokens) - 1))
        forecast = self._forecasts.setdefault(_kind(trunk), Forecast(by_scores=trunk.chooses_by_scores))
        places, drafted = trunk.candidates(CANDIDATES), trunk.tokens[trunk.base :]
        look = self.lookaheads[trunk] = Lookahead(trunk, drafted, forecast, places, [])
        look.add(forecast.guesses(places, drafted))

    def _begin(self, look: Lookahead, guess: Guess) -> ModelSequence | None:
        """Begins a branch and reserves its blocks; where the pool has no room, no more is begun for its trunk."""
        trunk, slot = look.trunk, look.trunk.slot
        assert slot is not None
        if guess.token == END:
            branch = look.end = trunk.ended()
            look.end_chance = guess.chance
        else:
            branch = trunk.branch(guess.accepted, guess.token)
            # What follows the end goes on in place, at first: in blocks that lie in a row.
            is_in_place = guess.accepted == len(look.drafted) and not look.goes_on_in_place
            look.goes_on_in_place |= is_in_place
            if not is_in_place:
                held, slot = self._pool.length(slot), self._pool.fork(slot)
                self._slots.add(slot)
                self._pool.rollback(slot, min(held, trunk.base + guess.accepted))
        branch.slot = slot
        look.branches[guess.accepted, guess.token] = branch
        end = branch.base + look.wanted(branch) - 1
        free = self._pool.blocks.num_free - RESERVE * self._pool.blocks.count
        if end > self._pool.max_length or self._pool.blocks_needed(slot, end) > free:
            look.guesses = []
            return None
        self._pool.grow(slot, end)
        look.open.append(branch)
        return branch

    def _free(self, look: Lookahead) -> None:
        for branch in look.branches.values():
            if branch.slot in self._slots:  # and not the trunk's own
                self._slots.remove(branch.slot)
                self._pool.free(branch.slot)


def _kind(sequence: ModelSequence) -> Hashable:
    """Rounds are alike under one rule, with tokens chosen by scores or not."""
    return sequence.told.rule, sequence.chooses_by_scores
