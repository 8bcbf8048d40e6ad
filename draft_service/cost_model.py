"""The cost of a round, from which γ is chosen."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from outrider.service.fitted_cost import FORGETTING, CostLine, FittedCost

# Proposals of each sequence before drafting may stop, also in a later trial.
FIRM_ROUNDS = 10
# Rounds before overhead is known, in all, and of each sequence, since a pause delays all sequences at once. Overhead
# begins as a line through the medians of their round trips and drafting times, at these numbers of passes.
FIRST_ROUNDS, FIRST_ROUNDS_OF_ONE = 16, 5
FITTED_PASSES = (1, 16)
# The overhead of a proposal counts if its tokens and the mean tokens of a sequence in its step differ by at most this
# ratio. So does its cycle, but prompts in the step do not matter. A cycle of `Decode` counts if the sequences in the
# step and the active ones differ by at most this ratio.
ALIKE = 0.7
# Cycles of a kind, proposals or `Decode`, are measured while at least this share of the last rounds is of that kind.
# Each token of a `Decode` counts as a round.
PURE = 0.9
# Rounds of each sequence that the mean number of active sequences covers: of short texts several may end at once. Each
# token of a `Decode` counts as a round here too.
REMEMBERED_ACTIVE = 8
# Cycles of each sequence that a mean covers; the weight of the formula, in cycles; and the longest cycle that counts,
# as a multiple of the mean.
REMEMBERED_CYCLES, FORMULA_WEIGHT, LARGEST_RATIO = 128, 4, 2.0
# First cycles of each sequence that a mean covers; and the weight, in first cycles, of the mean of both kinds: a pause
# holds few of them.
REMEMBERED_FIRST, SHARED_FIRST = 32, 2
# The least time of a token of a text, as a share of that after the first cycle: the mean length may be old.
LEAST_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class JudgedRound:
    """The data of one verdict that policies use. Times are in seconds.

    Attributes:
        gamma: the chosen γ; 0 for a `Decode`.
        decoded: tokens of a `Decode` in the verdict.
        drafted: tokens in the proposal; fewer than γ if the drafter ended it early.
        judged: tokens that were tested: the accepted ones and the first rejected one.
        beta: chance of acceptance of each judged token; empty if the rule gives none.
        overhead: of a proposal: `seconds` without `at_verifier`, which is drafting and the round trip. In the first
            round the draft reads the prompt, too.
        at_verifier: queue, forward pass and verification.
        step: the verifier's published cost of a step; None if it published none.
        active: sequences that share the verifier's steps.
        tokens: in the step of this verdict, over all sequences.
        sequences: in the step of this verdict.
        seconds: from the previous verdict, or from the start of the sequence, to this one. None if something else took
            time in between.
        drafting: the part of `overhead` until the proposal was sent.
        wanted: γ before the text's length limit cut it; not below `gamma`.
        is_first: of its sequence; the step may hold its prompt.
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
    drafting: float = 0.0
    decoded: int = 1
    wanted: int = 0
    is_first: bool = False

    @property
    def drafts(self) -> bool:
        """Whether the policy chose to draft. The drafter may have had no tokens, or the text one token left."""
        return self.drafted > 0 or self.wanted > 0


@dataclass(slots=True)
class _Cycles:
    """Cycles of one kind (proposals, or `Decode`) at one number of active sequences. All sums decay.

    Attributes:
        step: running mean of the published cost of a step; None before the first cycle.
        measured: seconds of all but the first cycles of texts.
        expected: the formula's seconds for the same cycles.
        texts: the number of first cycles.
        first_measured: their seconds.
        first_expected: the formula's seconds for them.
    """

    step: CostLine | None = None
    measured: float = 0.0
    expected: float = 0.0
    texts: float = 0.0
    first_measured: float = 0.0
    first_expected: float = 0.0

    def add_step(self, step: CostLine, active: int) -> None:
        old = self.step or step
        weight = 1 / (REMEMBERED_CYCLES * active)
        self.step = CostLine(
            old.fixed + weight * (step.fixed - old.fixed), old.per_token + weight * (step.per_token - old.per_token)
        )

    def add(self, count: int, seconds: float, expected: float, active: int, prior: float) -> None:
        """Adds `count` cycles, of as many seconds together. `prior` is the ratio before the first one."""
        if not self.expected:
            self.expected = FORMULA_WEIGHT * active * expected / count
            self.measured = prior * self.expected
        kept = (1 - 1 / (REMEMBERED_CYCLES * active)) ** count
        self.measured = kept * self.measured + min(seconds, LARGEST_RATIO * self.measured / self.expected * expected)
        self.expected = kept * self.expected + expected

    def add_first(self, seconds: float, expected: float, active: int) -> None:
        if self.texts:
            seconds = min(seconds, LARGEST_RATIO * self.first_measured / self.texts)
        kept = 1 - 1 / (REMEMBERED_FIRST * active)
        self.texts = kept * self.texts + 1
        self.first_measured = kept * self.first_measured + seconds
        self.first_expected = kept * self.first_expected + expected

    def forget(self) -> None:
        """Reduce the weight of all measurements to that of the formula."""
        kept = FORMULA_WEIGHT / REMEMBERED_CYCLES
        self.step = None
        self.measured, self.expected = kept * self.measured, kept * self.expected
        self.texts *= kept
        self.first_measured, self.first_expected = kept * self.first_measured, kept * self.first_expected

    @property
    def ratio(self) -> float | None:
        """x, of all but first cycles, or else of those: a text of one verdict has no others."""
        if self.expected:
            return self.measured / self.expected
        return self.first_measured / self.first_expected if self.texts else None

    @property
    def first_excess(self) -> float:
        """Seconds by which the first cycles together were longer than as many others."""
        return self.first_measured - (self.ratio or 1.0) * self.first_expected


class _Measured:
    """Measured times at one number of active sequences.

    Attributes:
        overhead: seconds, fitted as a line in the draft's passes; None before the first proposals.
        cycles: of proposals (True) and of `Decode` (False).
        rounds: proposals.
    """

    def __init__(self, size: int) -> None:
        """There are at most 2**`size` active sequences."""
        self._forgetting = FORGETTING / 2**size
        self._first_rounds = max(FIRST_ROUNDS, FIRST_ROUNDS_OF_ONE << size)
        self._first: list[tuple[float, float]] = []  # round trips, and times to draft a token
        self.overhead: FittedCost | None = None
        self.cycles = {True: _Cycles(), False: _Cycles()}
        self.rounds = 0

    def add_overhead(self, passes: int, seconds: float, drafting: float) -> None:
        if self.overhead is not None:
            self.overhead.add(passes, seconds)
            return
        drafting = min(max(drafting, 0.0), seconds)
        self._first.append((seconds - drafting, drafting / (passes + 1)))  # it also reads the verdict
        if len(self._first) == self._first_rounds:
            trip, one = (median(values) for values in zip(*self._first, strict=True))
            trials = [(n, max(trip + one * (n + 1), 1e-9)) for n in FITTED_PASSES]
            self.overhead = FittedCost(trials, forgetting=self._forgetting)


class CostModel:
    """Seconds of a round in which all B active sequences draft γ tokens.

        cycle(γ) = x · (overhead(γ) + step(n)),  cycle(0) = x₀ · step(B),  n = B·(γ + 1)

    overhead(γ) is drafting and the round trip: a line in the passes of the draft model, ⌈γ/s⌉, that follows measured
    rounds. More tokens of one pass cost nothing there, and nor does drafting during a verdict. step is the cost that
    the verifier publishes. Where overhead is long, the sequences do not share one step; x shows what that changes.

    x and x₀ are measured cycles divided by these formulas, each with the cost of a step published at that time: a
    verifier is slower beside a busy draft, and its steps hold prompts of other sequences. A cycle lasts from verdict to
    verdict. The first one of a text lasts from its start, and reads the prompt: the mean by which it is longer is known
    with drafts and without, so that short texts draft only if the whole text is written faster. Measurements are kept
    for each power of two of B, since sequences that draft together wait for each other. Where overhead was not
    measured, or no cycle, those of the nearest B that has them count.

    Attributes:
        active: B, a running mean: texts begin and end all the time.
        size: the smallest n with B <= 2**n.
    """

    def __init__(self, tokens_per_pass: int = 1) -> None:
        """`tokens_per_pass` is s, of the draft."""
        self._tokens_per_pass = tokens_per_pass
        self.active = 1
        self.size = 0
        self._mean_active = 0.0
        self._most_active = 1
        self._step = CostLine(0.0, 0.0)
        self._by_size: dict[int, _Measured] = {}
        self._now = _Measured(0)  # at the current number of active sequences
        self._drafting = 1.0  # share of the last rounds that were proposals
        self._texts = self._tokens = 0.0  # sums with decay: their ratio is the mean length of a text

    @property
    def is_measured(self) -> bool:
        """Whether overhead is known, at some number of active sequences."""
        return self._overhead() is not None

    @property
    def is_firm(self) -> bool:
        """Whether there are enough proposals, at some number of active sequences, to decide against drafting."""
        return any(measured.rounds >= FIRM_ROUNDS << size for size, measured in self._by_size.items())

    @property
    def has_decoded(self) -> bool:
        """Whether a cycle of `Decode` was measured."""
        return self._cycles(drafts=False).ratio is not None

    def add(self, round_: JudgedRound) -> None:
        """Record a round. Only typical rounds are measured: no `Decode` beside proposals, for example."""
        self._count(round_)
        self._step = round_.step or CostLine(round_.at_verifier, 0.0)
        if (self._drafting if round_.drafts else 1 - self._drafting) < PURE:
            return
        self._now.cycles[round_.drafts].add_step(self._step, self.active)
        if round_.drafted:
            self._add_proposal(round_)
        if round_.drafts:
            is_typical = (round_.drafted + 1) * round_.sequences / round_.tokens < 1 / ALIKE
        else:
            is_typical = ALIKE < round_.sequences / self.active < 1 / ALIKE
        if is_typical and self._now.overhead is not None:
            self._add_cycle(round_)

    def _count(self, round_: JudgedRound) -> None:
        """Update the number of active sequences and the share of proposals."""
        active = max(1, round_.active)
        weight = 1 - (1 - 1 / (REMEMBERED_ACTIVE * active)) ** round_.decoded if self._mean_active else 1.0
        self._most_active = max(self._most_active, active)
        self._set_active(self._mean_active + weight * (active - self._mean_active))
        kept = (1 - 1 / (4 * self.active)) ** round_.decoded
        self._drafting += (1 - kept) * (round_.drafts - self._drafting)
        if round_.is_first:
            kept = 1 - 1 / (REMEMBERED_FIRST * self.active)
            self._texts, self._tokens = kept * self._texts + 1, kept * self._tokens
        self._tokens += round_.accepted + 1 if round_.drafted else round_.decoded

    def _add_proposal(self, round_: JudgedRound) -> None:
        """Measure the overhead of a proposal."""
        measured = self._now
        had_overhead = measured.overhead is not None
        measured.rounds += had_overhead
        is_alike = ALIKE < (round_.drafted + 1) * round_.sequences / round_.tokens < 1 / ALIKE
        is_usual = is_alike and not round_.is_first
        if round_.overhead is not None and math.isfinite(round_.overhead) and (is_usual or not had_overhead):
            passes = -(-round_.drafted // self._tokens_per_pass)
            measured.add_overhead(passes, max(round_.overhead, 1e-9), round_.drafting)

    def _add_cycle(self, round_: JudgedRound) -> None:
        """Measure the time from verdict to verdict, beside that of the formula."""
        if round_.seconds is not None and 0 < round_.seconds < math.inf:
            cycles, expected = self._now.cycles[round_.drafts], self._formula(drafts=round_.drafts)(round_.drafted)
            if round_.is_first:
                cycles.add_first(round_.seconds, round_.decoded * expected, self.active)
            else:
                prior = self._cycles(drafts=round_.drafts).ratio or 1.0
                cycles.add(round_.decoded, round_.seconds, round_.decoded * expected, self.active, prior)

    def expect(self, active: int) -> None:
        """Raise B at once if a sequence begins at a verifier with more than twice as many. Not above the largest B so
        far: some of them may wait in its queue.
        """
        active = min(active, self._most_active)
        if active > 2 * self._mean_active:
            self._set_active(active)

    def begin_trial(self, *, drafts: bool) -> None:
        """Give the old measurements of proposals, or of `Decode`, little weight: they are tried again."""
        self._now.cycles[drafts].forget()

    def cycle(self, gamma: float) -> float:
        """Return the seconds from one verdict to the next; at γ = 0 those of one token of a `Decode`."""
        return self.cycle_by_gamma(drafts=gamma > 0)(gamma)

    def first_excess(self, *, drafts: bool) -> float:
        """Return the seconds by which the first cycle of a text, which reads the prompt, is longer than another."""
        measured = self._nearest(lambda each: any(cycles.texts for cycles in each.cycles.values()))
        own = measured.cycles[drafts]
        known = [cycles for cycles in measured.cycles.values() if cycles.texts and cycles.expected]
        if not known or (own.texts and not own.expected):  # x holds them
            return 0.0
        shared = sum(cycles.first_excess for cycles in known) / sum(cycles.texts for cycles in known)
        weight = SHARED_FIRST * self.active
        return (weight * shared + own.first_excess) / (weight + own.texts)

    def cycle_by_gamma(self, *, drafts: bool) -> Callable[[float], float]:
        """Return `cycle` for γ > 0, or for γ = 0."""
        ratio, formula = self._cycles(drafts=drafts).ratio or 1.0, self._formula(drafts=drafts)
        return lambda gamma: ratio * formula(gamma)

    def rates(self, chances: Sequence[float], drafted_share: float) -> list[float]:
        """Return tokens/s of a text of mean length at γ = 0, 1, .. `len(chances)`, where `chances` are β_1, β_2, .."""
        texts_per_token = self._texts / self._tokens if self._tokens else 0.0
        rates = [_rate(self.cycle(0), texts_per_token * self.first_excess(drafts=False))]
        cycle, excess = self.cycle_by_gamma(drafts=True), texts_per_token * self.first_excess(drafts=True)
        expected = reached = 1.0
        for position, chance in enumerate(chances):
            reached *= chance
            expected += reached
            rates.append(_rate(cycle(drafted_share * (position + 1)) / expected, excess))
        return rates

    def _set_active(self, mean: float) -> None:
        self._mean_active = mean
        self.active = max(1, round(mean))
        self.size = (self.active - 1).bit_length()
        if self.size not in self._by_size:
            self._by_size[self.size] = _Measured(self.size)
        self._now = self._by_size[self.size]

    def _cycles(self, *, drafts: bool) -> _Cycles:
        """Return cycles of proposals or of `Decode`, at the nearest number of active sequences that has any."""
        return self._nearest(lambda each: each.cycles[drafts].ratio is not None).cycles[drafts]

    def _overhead(self) -> FittedCost | None:
        """Return overhead, at the nearest number of active sequences that has it."""
        return self._nearest(lambda each: each.overhead is not None).overhead

    def _nearest(self, has: Callable[[_Measured], bool]) -> _Measured:
        """Return what was measured at the number of active sequences nearest to B for which `has`; else at B."""
        if has(self._now):
            return self._now
        sizes = [size for size, measured in self._by_size.items() if has(measured)]
        nearest = min(sizes, key=lambda size: abs(size - self.size), default=self.size)
        return self._by_size.get(nearest, self._now)

    def _formula(self, *, drafts: bool) -> Callable[[float], float]:
        """Return cycle(γ) without x, for γ > 0 or for γ = 0."""
        step = self._cycles(drafts=drafts).step or self._step
        fitted = self._overhead() if drafts else None
        line = CostLine(0.0, 0.0) if fitted is None else fitted.line
        # Numbers, not objects: it is called for each γ of each choice.
        fixed, per_pass, per_token = line.fixed + step.fixed, line.per_token, step.per_token * self.active
        tokens_per_pass = self._tokens_per_pass

        def seconds(gamma: float) -> float:
            # γ may be a mean: only whole passes of several tokens are rounded up.
            passes = gamma if tokens_per_pass == 1 else math.ceil(gamma / tokens_per_pass)
            seconds = fixed + per_pass * passes + per_token * (gamma + 1)
            return seconds if seconds > 1e-9 else 1e-9

        return seconds


def _rate(seconds: float, excess: float) -> float:
    """Return tokens/s. `seconds` are of a token after the first cycle, and `excess` is what that cycle adds to each."""
    return 1 / max(seconds + excess, LEAST_SHARE * seconds)
