"""How long proposals may be for the most text of all sequences together: the cap on γ, down to 0 where none pays.

A draft service sees what a longer proposal costs its own sequence; the verifier sees what it costs everybody. With B
sequences the text of all grows by

    B · E(γ, α) / C(γ)  a second,  with  E = (1 - α^(γ+1)) / (1 - α)  [L Eq. 1]  and  C the cycle of a sequence,

from one verdict to the next. The cap is the γ that maximises it, from 0, where the target writes alone, to what drafts
propose. Drafting, then a pass over what all have drafted, make C = T(γ) + F + s·B·(γ+1), with T the turnaround of a
draft and F and s those of the fitted pass; T(0) is 0, for a `Decode` needs none. How much of T hides behind the passes
of others, and what else there is to wait for, no formula tells; so cycles are measured, and the formula says only how
they change with γ and B.

Invariant 4. All that is counted here is history, of rounds that have been judged and answered: how long they were, how
long they took, how many of their tokens were accepted. A cap is told for proposals that are yet to be drafted, and a
longer one that comes all the same is judged whole. So no choice of length looks at a token that it could discard, nor
at a draw of a round to come: those are keyed by a length of the text that the round before has only just brought about
(invariant 2). Only sequences of one and the same seed share draws, under `tokenwise` and `block`; what one of them adds
to means of a hundred rounds is all that the other's cap can know of it.
"""

import statistics
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from outrider.service.cost_model import CostLine, FittedCost
from outrider.theory import expected_tokens

# The cap moves only where the best γ gives so much more text than the γ in use, and by so many tokens at once at most.
MARGIN, STEP = 0.05, 2
# From one look to the next: rounds of each sequence, on average, and at least so many of all. Those under way when a
# cap is told still have the old γ, so that the first half tells nothing of cycles.
ROUNDS_PER_LOOK, LEAST_ROUNDS = 4, 32
# Share of a running mean of acceptance that the last round is, and of a running mean of cycles that the last look is.
RECENT_ROUND, RECENT_LOOK = 1 / 128, 1 / 4
# Cycles of more than so many medians are left out: who reads slowly is no measure of the verifier.
CREDIBLE = 4.0
# Seconds between which a measured time is believed: rates divide by a cycle.
LEAST_CYCLE, LONGEST_CYCLE = 1e-9, 3600.0
# Turnarounds that the line begins with: the first ones are slow.
FIRST_ROUNDS = 8
# With the cap at 0 nothing is learned of drafts. So every so many tokens of each sequence, on average, one of them may
# propose a little, for so many rounds at the most and while the others write no more than so many tokens each: one
# alone costs them next to nothing.
PROBE_AFTER, PROBE_GAMMA, PROBE_ROUNDS, PROBE_TOKENS = 1024, 2, 16, 32


class GammaCap:
    """The cap of one verifier. One thread feeds it and asks it.

    Attributes:
        cap: the longest proposal worth sending, for all sequences but one that probes; None: there is no cap.
    """

    def __init__(self) -> None:
        self.cap: int | None = None
        self._judged = self._accepted = 0.0  # tokens of the last rounds
        self._first: list[tuple[int, float]] = []  # turnarounds, by γ
        self._turnaround: FittedCost | None = None  # the same as a line in γ, from `FIRST_ROUNDS` on
        self._excess = {False: _Mean(), True: _Mean()}  # what cycles take over the formula: with drafts, and without
        self._cycles: list[float] = []  # since the last look
        self._line = CostLine(0.0, 0.0)
        self._sequences = 0
        self._rounds = self._drafted = 0  # since the last look, of those that keep to the cap
        self._proposed = 0  # γ where there is no cap
        self._goal: int | None = None  # of a move that takes several steps
        self._prober: Hashable | None = None
        self._probed = 0  # its rounds
        self._silent = 0  # tokens of the others since it began; without one, since the last

    def of(self, sequence: Hashable) -> int | None:
        """The cap of one sequence."""
        return PROBE_GAMMA if sequence == self._prober else self.cap

    @property
    def alpha(self) -> float:
        """The share of judged tokens that were accepted, in the last rounds of all sequences."""
        return min(1.0, self._accepted / self._judged) if self._judged > 0 else 0.0

    # ------------------------------------------------------------------------------------------------- what is known

    def add(
        self, sequence: Hashable, *, drafted: int, judged: int, accepted: int, turnaround: float, whole: float
    ) -> None:
        """Takes in a round that has been judged and answered.

        Args:
            sequence: whose it was.
            drafted: its γ; 0 for a token of the target's own.
            judged: how many of them were judged.
            accepted: how many of them were accepted.
            turnaround: seconds from the verdict before to its arrival; below 0 where it was sent ahead.
            whole: seconds from the verdict before to its own.
        """
        if drafted and abs(turnaround) < LONGEST_CYCLE:
            self._learn(drafted, judged, accepted, turnaround)
        if sequence == self._prober:
            self._note_probe(drafted)
        elif (drafted == 0) == (self.cap == 0) and (self.cap is None or drafted <= self.cap):
            self._rounds += 1
            self._drafted += drafted
            self._silent += self.cap == 0
            if self._rounds > self._rounds_to_look() // 2 and abs(whole) < LONGEST_CYCLE:
                self._cycles.append(max(whole, LEAST_CYCLE))

    def _learn(self, drafted: int, judged: int, accepted: int, turnaround: float) -> None:
        self._judged += judged - RECENT_ROUND * self._judged
        self._accepted += accepted - RECENT_ROUND * self._accepted
        seconds = max(turnaround, 1e-6)
        if self._turnaround is not None:
            self._turnaround.add(drafted, seconds)
            return
        self._first.append((drafted, seconds))
        if len(self._first) >= FIRST_ROUNDS:  # of one γ only, they say that a shorter proposal comes no sooner
            self._turnaround = FittedCost(self._first)

    def _note_probe(self, drafted: int) -> None:
        if drafted:
            if not self._probed:  # until now it wrote what it had asked for before
                self._silent = 0
            self._probed += 1

    # --------------------------------------------------------------------------------------------------- what follows

    def look(self, running: Mapping[Any, int], line: CostLine) -> None:
        """Sets the cap anew, where enough has been heard since the last time.

        Args:
            running: the sequences that take part in passes, with their lengths in tokens.
            line: what a pass costs.
        """
        self._sequences, self._line = len(running), line
        if len(running) <= 1:  # the γ of a lone sequence is its draft's affair
            self.cap = self._goal = None
            self._begin()
        elif self._rounds >= self._rounds_to_look() and self._cycles:  # fewer sequences need fewer rounds to look
            gamma = self._drafted / self._rounds
            self._excess[self.cap == 0].add(_typical(self._cycles) / self._formula(gamma))
            if self.cap is None:
                self._proposed = round(gamma)
            self._move()
            self._begin()
        if self.cap == 0:
            self._probe(running)
        else:
            self._end_probe()

    def _begin(self) -> None:
        self._rounds = self._drafted = 0
        self._cycles.clear()

    def _rounds_to_look(self) -> int:
        return max(LEAST_ROUNDS, ROUNDS_PER_LOOK * self._sequences)

    def _move(self) -> None:
        """A step towards the best γ, where it is worth a move or one has begun."""
        now = self._proposed if self.cap is None else self.cap
        best = max(range(self._proposed + 1), key=self._rate)
        if self._rate(best) > (1 + MARGIN) * self._rate(now):
            self._goal = best
        elif self._goal is None or self._rate(self._goal) < self._rate(now):
            self._goal = None
            return
        cap = now + min(max(self._goal - now, -STEP), STEP)
        self.cap = cap if cap < self._proposed else None
        if cap == self._goal:
            self._goal = None

    def _rate(self, gamma: int) -> float:
        """Tokens a second of one sequence, if all had this γ."""
        return expected_tokens(self.alpha, gamma) / (self._excess[gamma == 0].value * self._formula(gamma))

    def _formula(self, gamma: float) -> float:
        """The cycle, T(γ) + F + s·B·(γ+1), in seconds."""
        turnaround = self._turnaround.line.seconds(gamma) if gamma and self._turnaround is not None else 0.0
        return max(turnaround + self._line.seconds(self._sequences * (gamma + 1)), LEAST_CYCLE)

    def _probe(self, running: Mapping[Any, int]) -> None:
        """Begins or ends a probe: the youngest sequence has the least for its draft to catch up with."""
        over = self._silent >= (PROBE_TOKENS if self._probed else PROBE_AFTER) * len(running)
        if self._prober is not None and (over or self._probed >= PROBE_ROUNDS or self._prober not in running):
            self._end_probe()
        elif self._prober is None and over:
            self._prober, self._silent = min(running, key=lambda each: running[each]), 0
            kept = PROBE_GAMMA * PROBE_ROUNDS / max(self._judged, PROBE_GAMMA * PROBE_ROUNDS)  # old statistics
            self._judged, self._accepted = kept * self._judged, kept * self._accepted

    def _end_probe(self) -> None:
        self._prober, self._probed, self._silent = None, 0, 0


def _typical(cycles: Sequence[float]) -> float:
    """The mean of what is not far beyond the median."""
    bound = CREDIBLE * statistics.median(cycles)
    return statistics.fmean(each for each in cycles if each <= bound)


class _Mean:
    """A running mean, of looks, that begins as the plain mean of what it is told; 1 before that."""

    def __init__(self) -> None:
        self.value = 1.0
        self._count = 0

    def add(self, value: float) -> None:
        """Takes in one more."""
        self._count += 1
        self.value += max(RECENT_LOOK, 1 / self._count) * (value - self.value)
