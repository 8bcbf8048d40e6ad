"""What γ is chosen from: acceptance statistics, and the cost of a round."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.service.cost_model import FORGETTING, CostLine, FittedCost

# Drafting begins again where it gives so much more text than `Decode`, and ends where it gives less: times are never
# known better.
BEGIN_GAIN = 1.03
# A γ that gives so little less than the best one is kept: the outcome cache drafts ahead for the γ before.
SAME = 0.01
# Proposals of each active sequence before drafting may be given up: a service's first rounds are slow.
FIRM_ROUNDS = 16
# Tokens that each sequence writes by `Decode` between two probes: at first, and the most, doubled by each that fails.
FIRST_PAUSE, LONGEST_PAUSE = 32, 512
# What is known of each position when a probe begins counts for no more judged tokens than this: it is old.
KEPT_FOR_A_PROBE = 12.0
# The chance of acceptance before anything is known, and how many judged tokens it counts for.
PRIOR_CHANCE, PRIOR_WEIGHT = 0.8, 6.0
# Judged tokens of a position that are remembered, of all sequences and of one; and how many of its own tokens a
# sequence trusts as much as all others'.
REMEMBERED, REMEMBERED_OF_ONE, SHARED_WEIGHT = 512, 64, 24.0
# The line of overhead begins with so many rounds, of which the fastest of each γ count: a service's first are slow.
FIRST_ROUNDS = 16
# A cycle is measured where the tokens of the others in the step, on average, and its own differ by no more than this
# ratio; for `Decode`, where this share of all sequences took part.
ALIKE = 0.7
# Rounds of a kind, proposals or `Decode`, are measured while this share of the last rounds was of that kind.
PURE = 0.6
# Share of a running mean that the last round is.
RECENT = 1 / 32
# Cycles of each sequence that are remembered; how many the formula counts for; and the most that one may take, as a
# multiple of what the formula expects.
REMEMBERED_CYCLES, FORMULA_WEIGHT, LARGEST_RATIO = 128, 4, 4.0


@dataclass(frozen=True, slots=True)
class JudgedRound:
    """A verdict as policies see it. Seconds.

    Attributes:
        gamma: as it was chosen; 0 where the target wrote alone, which makes a round of each token.
        drafted: tokens that came; fewer than γ where the draft was unsure, or had no more.
        judged: those that were looked at: the accepted ones and the first rejected one.
        accepted: those that stood.
        beta: the chance of each judged token to be accepted, where the rule tells; empty where it does not.
        overhead: from the verdict before to this one, less the time at the verifier: drafting and the round trip. None
            where something else fell into it.
        at_verifier: queue, forward and verification.
        step: what a step of the verifier costs; None where it does not tell.
        active: sequences that share its steps.
        tokens: in the step that judged it, of all its sequences.
        sequences: in that step.
        seconds: from the verdict before, or from the sequence's beginning, to this one; None where something else fell
            into it.
    """

    gamma: int
    drafted: int = 0
    judged: int = 0
    accepted: int = 0
    beta: Sequence[float] = ()
    overhead: float | None = None
    at_verifier: float = 0.0
    step: CostLine | None = None
    active: int = 1
    tokens: int = 1
    sequences: int = 1
    seconds: float | None = None


class Acceptance:
    """The chance of each position of a proposal to be accepted, given that all before it were.

    Each position has its own mean, drawn to `shared` where there is one, and else to the position before it: so one
    that was never tried is as good as the last that was.
    """

    def __init__(self, shared: "Acceptance | None" = None) -> None:
        self._shared = shared
        self._prior = PRIOR_CHANCE
        self._kept = 1 - 1 / (REMEMBERED if shared is None else REMEMBERED_OF_ONE)
        self._weight = PRIOR_WEIGHT if shared is None else SHARED_WEIGHT
        self._sums: list[float] = []
        self._counts: list[float] = []

    def add(self, position: int, chance: float) -> None:
        """Take in one judged token of a position, from 0: 1, 0, or the chance that it had."""
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
        """Let each position count for at most `kept` judged tokens."""
        (self._prior,) = self.chances(1)
        for position, count in enumerate(self._counts):
            share = min(1.0, kept / count) if count else 1.0
            self._sums[position] *= share
            self._counts[position] *= share
        if self._shared is not None:
            self._shared.forget(kept)

    def chances(self, gamma: int) -> list[float]:
        """β_1 .. β_γ as they are expected."""
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
class _Cycles:
    """Cycles of one kind, proposals or `Decode`, with about so many active sequences.

    Attributes:
        step: the verifier's cost of a step while they ran, a running mean; None before the first.
        measured: their seconds, a sum in which old ones count less.
        expected: what the formula expected of them.
    """

    step: CostLine | None = None
    measured: float = 0.0
    expected: float = 0.0

    def add_step(self, step: CostLine, active: int) -> None:
        old = self.step or step
        weight = 1 / (REMEMBERED_CYCLES * active)
        self.step = CostLine(
            old.fixed + weight * (step.fixed - old.fixed), old.per_token + weight * (step.per_token - old.per_token)
        )

    def add(self, seconds: float, expected: float, active: int) -> None:
        if not self.expected:
            self.measured = self.expected = FORMULA_WEIGHT * active * expected
        kept = 1 - 1 / (REMEMBERED_CYCLES * active)
        self.measured = kept * self.measured + min(seconds, LARGEST_RATIO * expected)
        self.expected = kept * self.expected + expected

    @property
    def ratio(self) -> float | None:
        return self.measured / self.expected if self.expected else None


class _Measured:
    """What rounds took, with about so many active sequences.

    Attributes:
        overhead: seconds as a line in γ; None before there were enough.
        cycles: by whether they had drafts.
        rounds: proposals.
    """

    def __init__(self, size: int) -> None:
        """`size` is the number of active sequences, as a power of two."""
        self._forgetting = FORGETTING / 2**size
        self._first: list[tuple[int, float]] = []
        self.overhead: FittedCost | None = None
        self.cycles = {True: _Cycles(), False: _Cycles()}
        self.rounds = 0

    def add_overhead(self, drafted: int, seconds: float) -> None:
        if self.overhead is not None:
            self.overhead.add(drafted, seconds)
            return
        self._first.append((drafted, seconds))
        if len(self._first) == FIRST_ROUNDS:
            self.overhead = FittedCost(self._first, forgetting=self._forgetting)

    def ratio(self, drafts: bool) -> float:
        """Return x, or x₀, of `CostModel`."""
        return self.cycles[drafts].ratio or 1.0


class CostModel:
    """What a round takes, in seconds, where B active sequences all draft γ tokens.

        cycle(γ) = x · (overhead(γ) + step(n)),  cycle(0) = x₀ · step(B),  n = B·(γ + 1)

    overhead is drafting and the round trip, a line in γ fitted to measured rounds: drafting that hides behind a verdict
    takes no time in it. step is the verifier's published cost. A verifier holds a step back for sequences about to
    answer, but no longer than the fixed cost of a step. Where overhead is more than that, one half of the sequences
    drafts while the other half is verified: cycle(γ) = x · max(2·step(n / 2), overhead(γ) + step(n / 2)).

    x and x₀ are measured cycles over these formulas, each with the cost of a step as it was published then: a verifier
    beside a busy draft is slower than one alone. A cycle lasts from verdict to verdict, and the first from the
    sequence's beginning, so that x and x₀ hold whatever else a text takes. All that is measured is kept by B, in powers
    of two: sequences that draft at once wait for each other.
    """

    def __init__(self) -> None:
        self.active = 1
        self._step = CostLine(0.0, 0.0)
        self._by_size: dict[int, _Measured] = {}
        self._now = _Measured(0)  # of as many sequences as are active
        self._drafting = 1.0  # share of the last rounds that had drafts
        self._decoded = 0  # tokens that all have written by `Decode` since the last probe
        self._rounds = 0  # proposals since then
        self._pause = FIRST_PAUSE  # tokens that each sequence writes by `Decode` before one of them probes

    @property
    def known(self) -> bool:
        """Whether enough rounds were measured with as many sequences as now."""
        return self._now.overhead is not None

    @property
    def is_firm(self) -> bool:
        """Whether there were rounds enough to give up drafting with as many sequences as now."""
        return self._now.rounds >= FIRM_ROUNDS * self.active

    def add(self, round_: JudgedRound, *, is_probe: bool) -> None:
        """Take in a round. One of a probe, or a `Decode` beside drafts, does not tell how long all alike would wait."""
        self.active = max(1, round_.active)
        self._step = round_.step or CostLine(round_.at_verifier, 0.0)
        size = (self.active - 1).bit_length()
        if size not in self._by_size:
            self._by_size[size] = _Measured(size)
        measured = self._now = self._by_size[size]
        drafts = round_.drafted > 0
        self._drafting += (drafts - self._drafting) / (4 * self.active)
        if not drafts:
            self._decoded += 1
        elif not is_probe:
            self._rounds += 1
        if is_probe or (self._drafting if drafts else 1 - self._drafting) < PURE:
            return
        cycles = measured.cycles[drafts]
        cycles.add_step(self._step, self.active)
        if drafts:
            measured.rounds += 1
            is_typical = ALIKE < (round_.drafted + 1) * round_.sequences / round_.tokens < 1 / ALIKE
            if round_.overhead is None:
                is_typical = True  # its first: prompts are in the step
            elif math.isfinite(round_.overhead) and (is_typical or not self.known):
                measured.add_overhead(round_.drafted, max(round_.overhead, 1e-9))
        else:
            is_typical = round_.sequences > ALIKE * self.active
        if self.known and is_typical and round_.seconds is not None and 0 < round_.seconds < math.inf:
            cycles.add(round_.seconds, self._formula(round_.drafted), self.active)

    def take_probe(self) -> bool:
        """Whether the sequence that asks is to probe: all have written by `Decode` for long."""
        if self._decoded < self._pause * self.active:
            return False
        self._decoded = 0
        has_drafted = self._rounds > FIRM_ROUNDS * self.active
        self._pause, self._rounds = FIRST_PAUSE if has_drafted else min(2 * self._pause, LONGEST_PAUSE), 0
        self._doubt()
        return True

    def _doubt(self) -> None:
        """Trust what drafting took less: it is old."""
        drafts, alone = self._now.cycles[True], self._now.cycles[False]
        drafts.step = None
        if drafts.ratio and alone.ratio:
            ratio = (drafts.ratio + alone.ratio) / 2
            drafts.expected *= FORMULA_WEIGHT / REMEMBERED_CYCLES
            drafts.measured = drafts.expected * ratio

    def cycle(self, gamma: float) -> float:
        """Seconds from one verdict to the next; γ = 0 is `Decode`."""
        return self._now.ratio(gamma > 0) * self._formula(gamma)

    def rates(self, chances: Sequence[float], drafted_share: float) -> list[float]:
        """Tokens a second of one sequence at γ = 0, 1, .. `len(chances)`, with β_1, β_2, .. as given."""
        rates = [1 / self.cycle(0)]
        expected = reached = 1.0
        for position, chance in enumerate(chances):
            reached *= chance
            expected += reached
            rates.append(expected / self.cycle(drafted_share * (position + 1)))
        return rates

    def _formula(self, gamma: float) -> float:
        """The cycle by lines alone."""
        tokens, line = self.active * (gamma + 1), self._now.overhead
        step = self._now.cycles[gamma > 0].step or self._step
        overhead = line.line.seconds(gamma) if gamma and line is not None else 0.0
        seconds = overhead + step.seconds(tokens)
        if self.active > 1 and overhead > step.fixed:
            half = step.seconds(tokens / 2)
            seconds = half + max(half, overhead)
        return max(seconds, 1e-9)


class AcceptanceStatistics:
    """What requests of one kind have taught, and whether they draft.

    All draft, or all write by `Decode`: a step that a few make longer is longer for all.

    Attributes:
        accepted: of each position.
        rounds: proposals so far.
        drafted_share: drafted tokens over γ, a running mean: a draft may end a proposal early.
        gamma: the best for all, if they draft; 0 before it is known.
        pays: whether drafting pays.
    """

    def __init__(self) -> None:
        self.accepted = Acceptance()
        self.rounds = 0
        self.drafted_share = 1.0
        self.gamma = 0
        self.pays = True

    def add(self, round_: JudgedRound) -> None:
        """Take in a round, its acceptance aside."""
        if round_.gamma:
            self.rounds += 1
            self.drafted_share += RECENT * (round_.drafted / round_.gamma - self.drafted_share)

    def choose(self, costs: CostModel, ceiling: int) -> int:
        """Return the γ that is best for all, 0 where drafting does not pay."""
        rates = costs.rates(self.accepted.chances(ceiling), self.drafted_share)
        best = max(range(1, ceiling + 1), key=rates.__getitem__)
        if not 0 < self.gamma <= ceiling or rates[best] > (1 + SAME) * rates[self.gamma]:
            self.gamma = best
        gain = rates[self.gamma] / rates[0]
        self.pays = gain >= 1 or not costs.is_firm if self.pays else gain > BEGIN_GAIN
        return self.gamma if self.pays else 0

    def take_probe(self, costs: CostModel) -> bool:
        """Whether the sequence that asks is to probe."""
        if is_due := costs.take_probe():
            self.accepted.forget(KEPT_FOR_A_PROBE)
        return is_due
