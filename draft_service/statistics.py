"""Acceptance statistics, and whether drafting pays."""

import math
import operator
from dataclasses import dataclass
from itertools import accumulate

import structlog

from draft_service.cost_model import FIRM_ROUNDS, CostModel, JudgedRound

_logger = structlog.get_logger()

# γ changes only for a gain above this share: the outcome cache has drafted for the previous γ.
SAME = 0.01
# Texts with proposals before drafting may stop: the first one may be unlike the others.
FIRM_TEXTS = 3
# Pauses of drafting, in tokens that each sequence writes with `Decode`. The first one only measures `Decode`, which may
# cost far less than the formula says. A longer one ends with a trial of drafting. It is as long as makes the trial cost
# TRIAL_SHARE of the time, from LEAST_PAUSE to LONGEST_PAUSE. A trial ends early once it has cost TRIAL_SHARE of
# LONGEST_PAUSE. Where drafting pays, a first pause measures `Decode` again: after a trial, and then for the same share
# of the time.
FIRST_PAUSE, LEAST_PAUSE, LONGEST_PAUSE, TRIAL_SHARE = 32, 64, 4096, 0.0025
# Weight, in judged tokens, that the old statistics of a position keep when drafting is tried again.
KEPT_FOR_A_TRIAL = 16.0
# Prior of a chance of acceptance, and its weight in judged tokens.
PRIOR_CHANCE, PRIOR_WEIGHT = 0.8, 6.0
# Judged tokens of a position that a mean covers: over all sequences, and of one sequence. Then the weight, in a
# sequence's own tokens, of the mean over all sequences.
REMEMBERED, REMEMBERED_OF_ONE, SHARED_WEIGHT = 512, 64, 24.0
# Weight of the last round in a running mean.
RECENT = 1 / 32


class Acceptance:
    """β of each position of a proposal: the chance of acceptance, given that all positions before it were accepted.

    Each position has a mean. Its prior is the mean in `shared`, or without `shared` that of the previous position.
    """

    def __init__(self, shared: "Acceptance | None" = None) -> None:
        self._shared = shared
        self._prior = PRIOR_CHANCE
        self._kept = 1 - 1 / (REMEMBERED if shared is None else REMEMBERED_OF_ONE)
        self._weight = PRIOR_WEIGHT if shared is None else SHARED_WEIGHT
        self._sums: list[float] = []
        self._counts: list[float] = []

    def add(self, position: int, chance: float) -> None:
        """Record a judged token: 1 or 0, or its chance of acceptance. `position` counts from 0."""
        if not 0 <= chance <= 1:
            return
        while len(self._sums) <= position:
            self._sums.append(0.0)
            self._counts.append(0.0)
        self._sums[position] = self._kept * self._sums[position] + chance
        self._counts[position] = self._kept * self._counts[position] + 1
        if self._shared is not None:
            self._shared.add(position, chance)

    def forget(self, kept: float) -> None:
        """Reduce the weight of each position to at most `kept` judged tokens."""
        (self._prior,) = self.chances(1)
        for position, count in enumerate(self._counts):
            share = min(1.0, kept / count) if count else 1.0
            self._sums[position] *= share
            self._counts[position] *= share
        if self._shared is not None:
            self._shared.forget(kept)

    def chances(self, gamma: int) -> list[float]:
        """Return the expected β_1 .. β_γ."""
        expected = [] if self._shared is None else self._shared.chances(gamma)
        chances: list[float] = []
        chance = self._prior
        for position in range(gamma):
            prior = expected[position] if expected else chance
            if position < len(self._sums):
                chance = (self._weight * prior + self._sums[position]) / (self._weight + self._counts[position])
            else:
                chance = prior
            chances.append(chance)
        return chances


@dataclass(slots=True)
class _Choice:
    """Whether drafting pays at one number of active sequences.

    Attributes:
        drafts: the choice.
        left: rounds of each sequence, or tokens of `Decode`, until the next choice; below 0 they count on.
        pause: `left` when drafting stopped the last time; 0 before that.
        lost: measured cost of the last trial to each sequence so far, in tokens of `Decode`.
    """

    drafts: bool = True
    left: float = 0.0
    pause: float = 0.0
    lost: float = 0.0

    def stop(self, lost: float) -> None:
        """Stop drafting. `lost` is the cost of a trial by the formula."""
        has_lasted = -self.left > self.pause
        if has_lasted:
            self.pause = FIRST_PAUSE
        else:
            self.pause = min(max(max(lost, self.lost) / TRIAL_SHARE, LEAST_PAUSE), LONGEST_PAUSE)
        self.left = self.pause
        self.drafts = False

    def measure_decode(self) -> None:
        """Stop drafting, though it pays, for as long as it takes to measure `Decode`."""
        self.left = self.pause = FIRST_PAUSE
        self.drafts = False

    def resume(self) -> None:
        """Draft again: for a trial, or after the first pause only if it pays."""
        self.left = 0.0 if self.pause == FIRST_PAUSE else FIRM_ROUNDS
        self.lost = 0.0
        self.drafts = True


class AcceptanceStatistics:
    """Statistics of the requests of one kind, and their common choice of γ.

    All draft, or all use `Decode`: a step that some sequences make longer is longer for all.

    Attributes:
        accepted: β of each position.
        rounds: proposals so far.
        texts: that had proposals so far.
        drafted_share: running mean of drafted tokens over γ: the drafter, or the text's length limit, may end a
            proposal early.
        gamma: the best γ > 0 for all; 0 before the first choice.
        pause: tokens of `Decode` of each sequence before drafting is tried again.
    """

    def __init__(self) -> None:
        self.accepted = Acceptance()
        self.rounds = 0
        self.texts = 0
        self.drafted_share = 1.0
        self.gamma = 0
        self.pause = 0.0
        self._pays = True
        self._is_shared = True
        self._choices: dict[int, _Choice] = {}  # by `CostModel.size`
        self._choice = _Choice()  # the current one

    @property
    def is_trial(self) -> bool:
        """Whether drafting is being tried again, by all sequences."""
        return self._choice.drafts and self._choice.left > 0

    @classmethod
    def of_one(cls) -> "AcceptanceStatistics":
        """Return statistics for one request."""
        own = cls()
        own.texts = FIRM_TEXTS  # it decides for one text
        own._is_shared = False
        return own

    def add(self, round_: JudgedRound, costs: CostModel) -> None:
        """Record a round, without its acceptance. In a trial, rounds of both kinds count: each delays the others."""
        if self.is_trial and round_.seconds is not None and 0 < round_.seconds < math.inf:
            tokens = round_.accepted + 1 if round_.drafted else round_.decoded
            seconds = round_.seconds - (costs.first_excess(drafts=False) if round_.is_first else 0.0)
            self._choice.lost += (seconds / costs.cycle(0) - tokens) / max(1, round_.active)
        if round_.gamma:
            self.rounds += 1
            self.drafted_share += RECENT * (round_.drafted / max(round_.wanted, round_.gamma) - self.drafted_share)
        if (round_.gamma > 0) is self._choice.drafts:
            self._choice.left -= round_.decoded / max(1, round_.active)

    def choose(self, costs: CostModel, ceiling: int) -> int:
        """Return the best γ for all sequences; 0 if drafting does not pay."""
        choice = self._choice = self._choices.setdefault(costs.size, _Choice())
        if not choice.drafts and choice.left > 0:
            self.pause = choice.left
            return 0
        rates = costs.rates(self.accepted.chances(ceiling), self.drafted_share)
        best = max(range(1, ceiling + 1), key=rates.__getitem__)
        if not 0 < self.gamma <= ceiling or rates[best] > (1 + SAME) * rates[self.gamma]:
            self.gamma = best
        if not choice.drafts:
            choice.resume()
            if choice.left:
                costs.begin_trial(drafts=True)
                self.accepted.forget(KEPT_FOR_A_TRIAL)
        is_over = choice.left <= 0 or choice.lost > TRIAL_SHARE * LONGEST_PAUSE
        if is_over and costs.is_firm and self.texts >= FIRM_TEXTS:
            self._pause(costs, gain=rates[self.gamma] / rates[0])
        self.pause = 0.0 if choice.drafts else choice.left
        return self.gamma if choice.drafts else 0

    def _pause(self, costs: CostModel, gain: float) -> None:
        """Stop drafting if it does not pay, or else if `Decode` is to be measured. `gain` is over `Decode`."""
        choice = self._choice
        self._log(costs, gain)
        tokens = 1 + sum(accumulate(self.accepted.chances(self.gamma), operator.mul))  # of a round
        is_untried = not costs.has_decoded and not choice.pause  # one pause: it may not have counted as typical
        is_trial_over = choice.pause > FIRST_PAUSE  # the machine may have been slower before it
        is_old = -choice.left * tokens > max(LONGEST_PAUSE, FIRST_PAUSE * (gain - 1) / TRIAL_SHARE)
        if gain < 1:
            choice.stop(FIRM_ROUNDS * tokens * (1 / gain - 1))
        elif is_untried or is_trial_over or is_old:
            choice.measure_decode()
            costs.begin_trial(drafts=False)

    def _log(self, costs: CostModel, gain: float) -> None:
        """Log the times behind the decision whether to draft, when it changes."""
        if (pays := gain >= 1) is self._pays or not self._is_shared:
            return
        self._pays = pays
        chances = self.accepted.chances(self.gamma)
        _logger.info(
            "drafting pays" if pays else "drafting does not pay",
            gain=round(gain, 2),
            gamma=self.gamma,
            alpha=round(sum(chances) / len(chances), 2),
            active=costs.active,
            round_ms=round(1e3 * costs.cycle(self.drafted_share * self.gamma), 2),
            decode_ms=round(1e3 * costs.cycle(0), 2),
        )
