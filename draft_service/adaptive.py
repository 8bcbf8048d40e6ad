"""The γ of most text a second: the expected tokens of a round over what it takes, from what rounds have taught.

    γ = argmax over 0..ceiling of  (1 + Σ_i Π_{j≤i} β_j) / (γ·t_q + t_p(γ + 1) + R)

with β by position, t_q and R as measured and t_p as the verifier tells it [L 3.5, with the network]; of γ·t_q only the
share that was not drafted ahead takes time. At γ = 0 the target writes alone, and R falls away. A pass that grows with
γ bounds the answer; γ moves by at most `STEP` a round.

Where nothing pays the target goes on alone, and nothing is learned of drafts. So now and then a few short proposals are
tried, after pauses that double for as long as they find nothing.
"""

from collections.abc import Iterable
from itertools import accumulate
from operator import mul

from draft_service.experience import Experience, Times
from draft_service.speculation import Policy, Round

STEP = 2
"""Tokens by which γ changes from one round to the next, at most."""

MARGIN = 0.03
"""Speculation is given up, and taken up again, where that gives so much more text: times are never known better."""

FIRST_PAUSE, LONGEST_PAUSE = 32, 512
"""Tokens that the target writes between two tries."""

SAME = 0.01
"""A length that gives so little less than the best one is kept: what is drafted ahead is of the length before."""

TRY_GAMMA, TRY_ROUNDS = 2, 3
"""Of one try: tokens of a proposal, and proposals."""

KEPT_FOR_A_TRY = 12.0
"""Judged tokens of each place that are still believed when one begins: what was known is old."""

LOOK_EVERY = 4
"""Rounds from one search for the best length to the next: it takes some 40 µs, on the event loop."""

KNOWN_ROUNDS = 8
"""Rounds of others after which a sample begins with the γ that they speak for, and not with the one it was given."""


FIRM_ROUNDS = 32
"""Proposals before speculation may be given up: the first rounds of a service take several times what later ones do."""


class Adaptive(Policy):
    """γ by what it is worth."""

    def __init__(self, gamma: int, *, ceiling: int, experience: Experience, times: Times) -> None:
        """`gamma` is that of the first proposal where nothing is known; `experience` and `times` are taught as well."""
        self._ceiling = ceiling
        self._experience = experience
        self._times = times
        self._accepted, self._drafted = experience.of_one()
        self._begun = False
        self._gamma = min(gamma, ceiling)
        self._tries = 0  # proposals of a try that are left
        self._best: int | None = None  # as it was found last
        self._looked = 0  # rounds since

    def next(self, most: int) -> int:
        most = min(most, self._ceiling)
        if most < 1:
            self.pause = 0
            return 0
        self._looked += 1
        if self._looked >= LOOK_EVERY or self._best is None or self._gamma == 0 or self._tries:
            self._best, self._looked = self._find_best(), 0
        if self._best is not None:
            self._move(self._best)
        self._begun = True
        self.pause = max(1, self._experience.pause - self._experience.silent) if self._gamma == 0 else 0
        return min(self._gamma, most)

    def observe(self, round_: Round) -> None:
        self._times.add(round_)
        if not round_.asked:
            self._experience.silent += 1
            return
        self._experience.rounds += 1
        self._experience.comes_short |= round_.drafted < round_.asked
        if self._experience.comes_short:
            for place in range(min(round_.drafted + 1, round_.asked)):
                self._drafted.add(place, float(place < round_.drafted))
        chances = round_.chances or [float(place < round_.accepted) for place in range(round_.judged)]
        for place, chance in enumerate(chances):
            self._accepted.add(place, chance)

    # ------------------------------------------------------------------------------------------------------ the moves

    def _move(self, best: int) -> None:
        """One step towards the best length, or of a try where the best is none."""
        known = self._experience
        known.pays = best > 0
        if known.pays:
            known.pause, known.silent, self._tries = FIRST_PAUSE, 0, 0
        elif known.silent >= known.pause:  # whoever wrote it: one sample tries for all
            known.silent, self._tries = 0, TRY_ROUNDS
            self._accepted.forget(KEPT_FOR_A_TRY)
            self._times.doubt()
        if self._tries:
            self._tries -= 1
            best = min(TRY_GAMMA, self._ceiling)
            if not self._tries:  # the last of a try that has found nothing so far
                known.pause = min(2 * known.pause, LONGEST_PAUSE)
        if self._begun or self._experience.rounds < KNOWN_ROUNDS:
            best = min(max(best, self._gamma - STEP), self._gamma + STEP)
        self._gamma = best

    def _find_best(self) -> int | None:
        """The length of most text a second; None as long as times are not known."""
        if not self._times.known:
            return None
        rates = self._rates()
        best = max(range(len(rates)), key=lambda place: rates[place])
        alone = 1 / self._times.alone()
        pays = rates[best] > (alone / (1 + MARGIN) if self._experience.pays else (1 + MARGIN) * alone)
        if not pays and self._experience.rounds >= FIRM_ROUNDS:
            return 0
        is_as_good = 0 < self._gamma <= len(rates) and rates[self._gamma - 1] > (1 - SAME) * rates[best]
        return self._gamma if is_as_good else best + 1

    def _rates(self) -> list[float]:
        """Tokens a second at γ of 1 to the ceiling."""
        stands: Iterable[float] = self._accepted.of(self._ceiling)
        drafted: Iterable[float] = range(1, self._ceiling + 1)  # expected, at each γ
        if self._experience.comes_short:
            comes = self._drafted.of(self._ceiling)
            stands, drafted = map(mul, comes, stands), accumulate(accumulate(comes, mul))
        accepted = accumulate(accumulate(stands, mul))
        return [(1 + stood) / self._times.round(came) for stood, came in zip(accepted, drafted, strict=True)]
