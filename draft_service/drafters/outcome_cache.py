"""The outcome cache: while a verdict is under way, the next proposal is drafted for the likeliest verdicts.

A branch is a sequence of its own: the committed tokens, the drafted tokens that one outcome accepts, the token that
follows them, and the tokens drafted after it. It draws with the base that the next round would have (invariant 2), so
it equals the proposal that would be drafted after that verdict. The choice of branches and their lengths depends only
on tokens that were sent and on time (invariant 4). Where a call fails, `reset` drops all branches and nothing else.
"""

import math
import random
from collections import defaultdict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import NamedTuple

import numpy as np

from draft_service.drafters.base import CacheUse
from draft_service.drafters.sequence import Candidates, DraftWork, Drawn, ModelSequence, Propose
from kernels.sampling import UNSURE
from outrider.runtime.block_pool import PoolExhausted
from outrider.runtime.kv_cache import KVPool
from outrider.service.fitted_cost import FittedCost

MOST_BRANCHES = 12  # of one sequence, when another one begins
MOST_FORKS = MOST_BRANCHES + 1  # of one sequence
LEAST_CHANCE = 0.04  # a less likely outcome gets no branch: it would cost more than it saves
CANDIDATES = 5  # tokens at each position of a proposal, from which branches are chosen
RESERVE = 1 / 8  # of all blocks: free blocks that branches leave to sequences
END = -1  # in place of the token after a fully accepted proposal, until the candidates for it are known

# Temperatures that `Predictor` chooses among. 0.45 fits the demo pair, under `coupled` and at temperature 0.
TEMPERATURES = np.array([0.15, 0.3, 0.45, 0.7, 1.0, 1.5, 2.5])
MEMORY, PRIOR = 0.99, 8.0  # weight that a verdict keeps with each newer one; verdicts that the prior counts for
UNSEEN, LEAST_SCORE = 0.02, -1e3  # chance of a token that is no candidate; scores this far below the best have none

WAITS_KEPT = 32
OVERDUE = 4.0  # times the usual wait: from then on a sequence is not expected any more

TRIAL_PAIRS, PAIRS_KEPT = 24, 128  # pairs of rounds that a decision needs, and that are kept
OTHER_WAY = 1 / 24  # share of rounds done the other way, after a decision or PAIRS_KEPT pairs; before them a half
CERTAIN, HELD_UP = 2.0, 3.0  # standard errors that decide; ratio of two rounds at which a gain is cut off


class Outcome(NamedTuple):
    """A possible verdict: `accepted` drafted tokens, followed by `token`."""

    chance: float
    accepted: int
    token: int


class Predictor:
    """Learns from verdicts how close target and draft are, and predicts the next verdict.

    Where scores decide (log q and shared noise, or logits at temperature 0), the target's scores are close to the
    draft's: the target takes token j with a probability of about softmax(scores / τ)_j. τ is the one of `TEMPERATURES`
    that explains past verdicts best. So each position of this proposal has its own risk and its own alternatives. Where
    tokens are drawn, every position has the mean acceptance rate, and the token after a rejection is predicted by q̂.
    """

    def __init__(self, *, by_scores: bool) -> None:
        self._by_scores = by_scores
        self._evidence = np.where(TEMPERATURES == 0.45, PRIOR * 0.1, 0.0)  # log-likelihoods of `TEMPERATURES`
        self._accepted, self._judged = 0.7 * PRIOR, PRIOR

    def outcomes(self, candidates: Sequence[Candidates], drafted: Sequence[int]) -> list[Outcome]:
        """The outcomes with a rejection, and one (`END`) without. `candidates`: at each position of `drafted`."""
        found, chance = list[Outcome](), 1.0
        for accepted, (here, token) in enumerate(zip(candidates, drafted, strict=True)):
            accept = self._softmax(here.scores)[0] if self._by_scores else self._accepted / self._judged
            found += self.followers(here, accepted, chance * (1 - accept), token)
            chance *= accept
        return [*found, Outcome(chance, len(drafted), END)]

    def followers(self, here: Candidates, accepted: int, chance: float, without: int | None = None) -> list[Outcome]:
        """Outcomes that accept `accepted` tokens, one for each candidate after them. Their chances sum to `chance`."""
        tokens, scores = here
        kept = [i for i, token in enumerate(tokens) if token != without and scores[i] > -math.inf]
        shares = self._softmax([scores[i] for i in kept])
        return [Outcome(chance * share, accepted, tokens[i]) for share, i in zip(shares, kept, strict=True)]

    def learn(self, candidates: Sequence[Candidates], drafted: Sequence[int], accepted: int, token: int | None) -> None:
        """Learns from a verdict. `token` follows the accepted ones; None where the text ended."""
        judged = min(accepted + 1, len(drafted))
        self._accepted = MEMORY * self._accepted + min(accepted, judged)
        self._judged = MEMORY * self._judged + judged
        self._evidence *= MEMORY
        for (tokens, scores), chosen in zip(candidates, [*drafted[:accepted], token][:judged], strict=False):
            if chosen is not None and chosen in tokens and math.isfinite(best := max(scores)):
                scaled = np.maximum(np.array(scores) - best, LEAST_SCORE)[None, :] / TEMPERATURES[:, None]
                logs = scaled[:, list(tokens).index(chosen)] - np.log(np.exp(scaled).sum(axis=1))
                self._evidence += np.fmax(logs, math.log(UNSEEN))

    def _softmax(self, scores: Sequence[float]) -> list[float]:
        z = np.array(scores, dtype=np.float64)
        if not len(z) or not math.isfinite(best := z.max()):
            return [1 / len(z) for _ in scores]
        temperature = TEMPERATURES[int(self._evidence.argmax())] if self._by_scores else 1.0
        weights = np.exp(np.maximum(z - best, LEAST_SCORE) / temperature)
        return [float(share) for share in weights / weights.sum()]


class SpareTime:
    """Estimates how many steps end before the next proposal is requested. A request would have to wait for a step."""

    def __init__(self) -> None:
        self._waits = deque[float](maxlen=WAITS_KEPT)  # from sending a proposal to the next request
        self._cost: FittedCost | None = None  # of a step, by its number of sequences
        self.sent: dict[Hashable, float] = {}  # sequences that will request a proposal, and when their last one left

    def step_seconds(self, width: int) -> float:
        """Seconds of a step of `width` sequences; 0 before the first step."""
        return 0.0 if self._cost is None else self._cost.line.seconds(width)

    def add_steps(self, width: int, steps: int, seconds: float) -> None:
        """Records `steps` steps of `width` sequences, `seconds` in all."""
        if not steps:
            return
        if self._cost is None:  # until other widths are measured, each sequence costs as much
            self._cost = FittedCost([(width, seconds / steps), (2 * width, 2 * seconds / steps)])
        self._cost.add(width, seconds / steps)

    def requested(self, sequence: Hashable, now: float) -> None:
        if (since := self.sent.pop(sequence, None)) is not None:
            self._waits.append(now - since)

    def steps(self, now: float, width: int) -> int:
        """How many steps of `width` sequences end in time; 0 without measurements. Two of three waits are longer."""
        if not self._waits or self._cost is None:
            return 0
        wait = sorted(self._waits)[len(self._waits) // 3]
        rest = min((since + wait - now for since in self.sent.values() if now - since < OVERDUE * wait), default=0.0)
        return max(0, int(rest / self.step_seconds(max(1, width))))


class Trial:
    """Decides whether rounds are shorter with branches, by times alone, so that it depends on no token.

    It compares pairs of rounds, one with branches and one without, with proposals of the same length: a pass over more
    tokens takes longer. The first round of a text is in no pair: its pass holds the prompt. Without a measured gain
    there are no branches.
    """

    def __init__(self) -> None:
        self._best = self._is_certain = False
        self._last: dict[int, tuple[float, bool]] = {}  # by γ: the last round that is in no pair
        self._gains = deque[float](maxlen=PAIRS_KEPT)  # log ratios of times, above 0 where branches were faster
        self._coin = random.Random(0)

    def choose(self) -> bool:
        """Whether the round that begins now gets branches."""
        is_decided = self._is_certain or len(self._gains) == PAIRS_KEPT
        return self._best is not (self._coin.random() < (OTHER_WAY if is_decided else 1 / 2))

    def add(self, seconds: float, gamma: int, *, on: bool) -> None:
        """Records the time of a round whose verdict was on `gamma` tokens; `on` is whether it had branches."""
        last, was_on = self._last.pop(gamma, (seconds, on))
        if on is was_on:
            self._last[gamma] = seconds, on
            return
        gains = self._gains
        gain = math.log(min(max(last / seconds, 1 / HELD_UP), HELD_UP))
        gains.append(gain if on else -gain)
        if len(gains) >= TRIAL_PAIRS:
            mean = fmean(gains)
            self._is_certain = abs(mean) > CERTAIN * stdev(gains) / len(gains) ** 0.5
            if self._is_certain:
                self._best = mean > 0


@dataclass(slots=True)
class Entry:
    """The branches of one sequence that waits for a verdict."""

    sequence: ModelSequence
    drafted: list[int]  # its last proposal
    predictor: Predictor
    candidates: list[Candidates]  # at each position of the proposal
    outcomes: list[Outcome]  # without a branch yet, the likeliest last
    end: ModelSequence | None = None  # the sequence run to the end of its proposal: it shows which tokens may follow
    end_chance: float = 0.0
    # Branches, `end` among them, by accepted tokens and next token; and those that are still drafted.
    branches: dict[tuple[int, int], ModelSequence] = field(default_factory=dict)
    open: list[ModelSequence] = field(default_factory=list)
    uses_own_slot: bool = False  # a branch continues in the sequence's own slot
    tokens: int = 0  # drafted, in all branches

    @property
    def next_chance(self) -> float:
        """Chance of the outcome that gets the next branch; 0 where there is none."""
        return self.outcomes[-1].chance if self.outcomes and len(self.branches) <= MOST_BRANCHES else 0.0

    def wanted(self, branch: ModelSequence) -> int:
        """Tokens to draft in a branch, in all."""
        return 1 if branch is self.end else len(self.drafted)

    def add(self, outcomes: Sequence[Outcome]) -> None:
        self.outcomes = sorted((*self.outcomes, *(each for each in outcomes if each.chance >= LEAST_CHANCE)))


class OutcomeCache:
    """The branches of all sequences that wait for a verdict. Belongs to the engine's thread."""

    def __init__(self, pool: KVPool, *, width: int, max_length: int) -> None:
        """`width` is the most branches in one step, `max_length` the most tokens of a sequence."""
        self.spare, self.width = SpareTime(), width
        self.entries: dict[ModelSequence, Entry] = {}
        self.leaving: dict[ModelSequence, None] = {}  # sequences whose proposals have left, without an entry yet
        self._pool, self._max_length = pool, max_length
        self._slots: set[int] = set()  # of branches
        self._predictors: dict[Hashable, Predictor] = {}
        self.trials = defaultdict[Hashable, Trial](Trial)

    def sent(self, sequence: ModelSequence, now: float) -> None:
        """A proposal leaves. The time since the last one shows the cost and the gain of branches."""
        if sequence.opening.uses_outcome_cache and sequence.judged:
            self.trials[_kind(sequence)].add(now - sequence.sent, sequence.judged, on=sequence.had_branches)
        sequence.sent = self.spare.sent[sequence] = now
        self.leaving[sequence] = None

    def take(self, message: Propose, drafted: int, kept: int) -> ModelSequence | None:
        """Drops the sequence's entry, and returns the branch that the verdict matches. The sequence gets its slot.

        `kept` of the `drafted` tokens were accepted.
        """
        sequence, committed, branch = message.sequence, message.committed, None
        self.spare.requested(sequence, message.posted)
        entry = self.entries.get(sequence)
        is_next = drafted > 0 and len(committed) <= kept + 1  # otherwise a `Decode` came between
        sequence.had_branches = entry is not None
        is_first = sequence.base - len(committed) == len(sequence.opening.prompt) + len(sequence.opening.committed)
        sequence.judged = drafted if is_next and not is_first else 0
        if entry is not None and is_next:
            token = committed[kept] if len(committed) > kept else None
            entry.predictor.learn(entry.candidates, entry.drafted, kept, token)
            if token is not None and (found := entry.branches.get((kept, token))) is not None and found.drafted:
                branch = entry.branches.pop((kept, token))
        self.drop(sequence)
        if branch is not None and branch.slot in self._slots:  # otherwise it is the sequence's own
            assert sequence.slot is not None
            self._slots.remove(branch.slot)
            self._pool.free(sequence.slot)
            sequence.slot = branch.slot
        if entry is not None and entry.tokens:
            used = 0 if branch is None else min(branch.drafted, message.gamma)
            sequence.cache_use = CacheUse(entry.tokens, used, branch is not None, used * self.spare.step_seconds(1))
        return branch

    def drop(self, sequence: ModelSequence) -> None:
        """Drops a sequence's branches, and expects no request of it."""
        self.leaving.pop(sequence, None)
        self.spare.sent.pop(sequence, None)
        if (entry := self.entries.pop(sequence, None)) is not None:
            for branch in entry.branches.values():
                if branch.slot in self._slots:  # and not the sequence's own
                    self._slots.remove(branch.slot)
                    self._pool.free(branch.slot)

    def reset(self) -> None:
        """Drops all branches, whatever state an error left them in."""
        self.entries.clear()
        self.leaving.clear()
        while self._slots:
            self._pool.free(self._slots.pop())

    def work(self, now: float) -> list[DraftWork]:
        """The branches of the next step. They draft as many tokens as end before the next request is expected."""
        while self.leaving:
            self._enter(self.leaving.popitem()[0])
        if not self.spare.steps(now, 1):
            return []
        chosen = [(entry, branch) for entry in self.entries.values() for branch in entry.open]
        while len(chosen) < self.width and self.entries:
            entry = max(self.entries.values(), key=lambda each: each.next_chance)
            if entry.next_chance < LEAST_CHANCE:
                break
            if (begun := self._begin(entry, entry.outcomes.pop())) is not None:
                chosen.append((entry, begun))
        steps = max(1, self.spare.steps(now, len(chosen)))
        for entry, branch in chosen:
            branch.gamma = min(entry.wanted(branch), branch.drafted + steps)
        return [DraftWork(branch, branch.chunk(self._pool), draws=True) for _, branch in chosen]

    def add_step(self, work: Sequence[DraftWork], output: Sequence[Drawn], seconds: float) -> None:
        """Takes the tokens that a step of the engine drafted in branches, and the step's time."""
        for item, drawn in zip(work, output, strict=True):
            parent = item.sequence.parent  # its branches may have been dropped in this same step
            if parent is not None and (entry := self.entries.get(parent)) is not None:
                self._add(entry, item.sequence, drawn)
        if all(item.draws for item in work):
            self.spare.add_steps(len(work), max(map(len, output), default=0), seconds)

    def _add(self, entry: Entry, branch: ModelSequence, drawn: Drawn) -> None:
        is_done = False
        for token, distribution, scores in drawn:
            if token == UNSURE:  # the proposal ends here, as it would without the cache
                is_done = True
            elif token < 0:
                return self.drop(entry.sequence)
            else:
                branch.add(token, distribution, scores)
                entry.tokens += 1
        if is_done or branch.drafted >= entry.wanted(branch):
            entry.open.remove(branch)
            if branch is entry.end and branch.has_scores:
                candidates = branch.candidates(CANDIDATES)[0]
                entry.add(entry.predictor.followers(candidates, len(entry.drafted), entry.end_chance))

    def _enter(self, sequence: ModelSequence) -> None:
        """Predicts the verdicts on a proposal that has left."""
        if not (sequence.opening.uses_outcome_cache and sequence.has_scores and self.trials[_kind(sequence)].choose()):
            return
        assert sequence.slot is not None
        held = self._pool.length(sequence.slot)  # with the last token, where the draft was unsure of the next one
        self._pool.rollback(sequence.slot, min(held, len(sequence.tokens) - 1))
        predictor = self._predictors.setdefault(_kind(sequence), Predictor(by_scores=sequence.chooses_by_scores))
        candidates, drafted = sequence.candidates(CANDIDATES), sequence.tokens[sequence.base :]
        entry = self.entries[sequence] = Entry(sequence, drafted, predictor, candidates, [])
        entry.add(predictor.outcomes(candidates, drafted))

    def _begin(self, entry: Entry, outcome: Outcome) -> ModelSequence | None:
        """Begins a branch and reserves its blocks. Without enough free blocks the sequence gets no more branches."""
        sequence, slot = entry.sequence, entry.sequence.slot
        assert slot is not None
        if outcome.token == END:
            branch = entry.end = sequence.ended()
            entry.end_chance = outcome.chance
        else:
            branch = sequence.branch(outcome.accepted, outcome.token)
            # The first branch after `end` continues in the same slot, whose blocks are consecutive.
            is_in_place = outcome.accepted == len(entry.drafted) and not entry.uses_own_slot
            entry.uses_own_slot |= is_in_place
            if not is_in_place:
                try:
                    held, slot = self._pool.length(slot), self._pool.fork(slot)
                except PoolExhausted:  # of llama.cpp's sequences
                    entry.outcomes = []
                    return None
                self._slots.add(slot)
                self._pool.rollback(slot, min(held, sequence.base + outcome.accepted))
        branch.slot = slot
        entry.branches[outcome.accepted, outcome.token] = branch
        end = branch.base + entry.wanted(branch) - 1
        free = self._pool.blocks.num_free - RESERVE * self._pool.blocks.count
        if end > self._max_length or self._pool.blocks_needed(slot, end) > free:
            entry.outcomes = []
            return None
        self._pool.grow(slot, end)
        entry.open.append(branch)
        return branch


def _kind(sequence: ModelSequence) -> Hashable:
    """Rounds are compared with others of the same rule and the same way to choose tokens."""
    return sequence.opening.rule, sequence.chooses_by_scores
