"""How many tokens to draft: policies that choose γ for each round, and what the adaptive one chooses it from.

Invariant 4. A policy knows rounds that were judged: their γ, how many tokens were accepted and with what chance, and
how long they took. It is asked before anything of the next round is drafted, and all that it asks for is drafted and
sent. So it cannot look at a token that it could discard, nor at a draw to come: those are keyed by the length of a text
that the round before has only just brought about (invariant 2).
"""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from prometheus_client import Histogram

from draft_service.drafters.base import Draft, Kind
from kernels.verify import Rule
from outrider.service.best_effort import Component
from outrider.service.cost_model import CostLine, FittedCost
from outrider.service.metrics import Metrics
from protos.outrider.v1 import speculation_pb2

if TYPE_CHECKING:
    from draft_service.request import Generation

GAMMA = Component("gamma_policy")

# γ changes by at most so many tokens from one round to the next.
STEP = 2
# Drafting begins again where it gives so much more text than `Decode`, and ends where it gives less: times are never
# known better. A sequence leaves the common γ for its own where that gives so much more.
BEGIN_GAIN, OWN_GAIN = 1.06, 1.03
# A sequence whose own drafts are this much worse than none writes by `Decode` though others draft.
OWN_MARGIN = 1.2
# A γ that gives so little less than the best one is kept: the outcome cache drafts ahead for the γ before.
SAME = 0.01
# Proposals before a new sequence begins with the γ that others found, and before drafting may be given up: the first
# rounds of a service take several times as long as later ones.
KNOWN_ROUNDS, FIRM_ROUNDS = 8, 16
# Tokens that each sequence writes by `Decode` between two probes: at first, and the most, doubled by each that fails.
FIRST_PAUSE, LONGEST_PAUSE = 32, 512
# Tokens of one `Decode` at most: then the sequence may draft again.
MOST_DECODED = 128
# Of a probe: γ, and proposals.
PROBE_GAMMA, PROBE_ROUNDS = 2, 3
# What is known of each position when a probe begins counts for no more judged tokens than this: it is old.
KEPT_FOR_A_PROBE = 12.0

# The chance of acceptance before anything is known, and how many judged tokens it counts for.
PRIOR_CHANCE, PRIOR_WEIGHT = 0.8, 6.0
# Judged tokens of a position that are remembered, of all sequences and of one; and how many of its own tokens a
# sequence trusts as much as all others'.
REMEMBERED, REMEMBERED_OF_ONE, SHARED_WEIGHT = 512, 64, 24.0
# The line of overhead begins with so many rounds, of which the fastest of each γ count: a service's first are slow.
FIRST_ROUNDS = 16
# A cycle is measured where the others in the step have this share of its own tokens on average, and for `Decode` where
# this share of all took part.
ALIKE = 0.8
# Share of a running mean that the last round is, or the last cycle of all, and the largest ratio that one may show.
RECENT, RECENT_CYCLE, LARGEST_RATIO = 1 / 32, 1 / 16, 2.0


class PolicyKind(StrEnum):
    """The policies there are."""

    FIXED = "fixed"
    HEURISTIC = "heuristic"
    ADAPTIVE = "adaptive"


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


class Policy(ABC):
    """Chooses γ for one sequence.

    Attributes:
        pause: after `next` returned 0 though more was possible: tokens to write by `Decode` before it is asked again.
    """

    pause: int = 0

    @abstractmethod
    def next(self, most: int) -> int:
        """Return γ of the next round, in 0..most; 0 is `Decode`. Called once a round, before anything is drafted.

        `most` is what can be drafted, judged and written now.
        """

    @abstractmethod
    def observe(self, round_: JudgedRound) -> None:
        """Take in a verdict."""


class Fixed(Policy):
    """γ as asked for, in every round."""

    def __init__(self, gamma: int) -> None:
        self._gamma = gamma

    def next(self, most: int) -> int:
        return max(0, min(self._gamma, most))

    def observe(self, round_: JudgedRound) -> None:
        """Nothing follows from it."""


class Heuristic(Policy):
    """Two more where all that was drafted was accepted, one less otherwise [W 4.1]; at least 1."""

    def __init__(self, gamma: int, *, ceiling: int) -> None:
        """`gamma` is that of the first proposal."""
        self._ceiling = ceiling
        self._gamma = max(1, min(gamma, ceiling))

    def next(self, most: int) -> int:
        return max(0, min(self._gamma, most))

    def observe(self, round_: JudgedRound) -> None:
        if not round_.drafted:
            return
        step = 2 if round_.accepted == round_.drafted else -1
        self._gamma = max(1, min(self._gamma + step, self._ceiling))


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


class CostModel:
    """What a round takes, in seconds, where B active sequences all draft γ tokens.

        cycle(γ) = x · (overhead(γ) + step(n)),  cycle(0) = x₀ · step(B),  n = B·(γ + 1)

    overhead is drafting and the round trip, a line in γ fitted to measured rounds: drafting that hides behind a verdict
    takes no time in it. step is the verifier's published cost. A verifier holds a step back for sequences about to
    answer, but no longer than the fixed cost of a step. Where overhead is more than that, one half of the sequences
    drafts while the other half is verified: cycle(γ) = x · max(2·step(n / 2), overhead(γ) + step(n / 2)).
    x and x₀ are measured cycles over these formulas.
    """

    def __init__(self) -> None:
        self.active = 1
        self._step = CostLine(0.0, 0.0)
        self._first: list[tuple[int, float]] = []
        self._overhead: FittedCost | None = None
        self._ratio = {True: 1.0, False: 1.0}  # x and x₀, by whether the round had drafts

    @property
    def known(self) -> bool:
        """Whether enough rounds were measured."""
        return self._overhead is not None

    def add(self, round_: JudgedRound, *, is_probe: bool) -> None:
        """Take in a round. One of a probe, or a `Decode` beside drafts, does not tell how long all alike would wait."""
        self.active = max(1, round_.active)
        self._step = round_.step or CostLine(round_.at_verifier, 0.0)
        if round_.drafted and round_.overhead is not None and math.isfinite(round_.overhead):
            self._add_overhead(round_.drafted, max(round_.overhead, 1e-9))
        width = round_.tokens / round_.sequences
        if round_.drafted:
            is_typical = not is_probe and round_.overhead is not None and width > ALIKE * (round_.drafted + 1)
        else:
            is_typical = width == 1 and round_.sequences > ALIKE * self.active
        measured = round_.at_verifier + (round_.overhead or 0.0)
        if self.known and is_typical and math.isfinite(measured):
            ratio = measured / self._formula(round_.drafted, width)
            ratio = min(max(ratio, 1 / LARGEST_RATIO), LARGEST_RATIO)
            share = RECENT_CYCLE / self.active  # of one cycle of all
            self._ratio[round_.drafted > 0] += share * (ratio - self._ratio[round_.drafted > 0])

    def doubt(self) -> None:
        """Trust the formula more: nobody has drafted for long."""
        self._ratio[True] += 0.5 * (1 - self._ratio[True])

    def cycle(self, gamma: float) -> float:
        """Seconds from one verdict to the next; γ = 0 is `Decode`."""
        return self._ratio[gamma > 0] * self._formula(gamma, gamma + 1)

    def rates(self, chances: Sequence[float], drafted_share: float) -> list[float]:
        """Tokens a second of one sequence at γ = 0, 1, .. `len(chances)`, with β_1, β_2, .. as given."""
        rates = [1 / self.cycle(0)]
        expected = reached = 1.0
        for position, chance in enumerate(chances):
            reached *= chance
            expected += reached
            rates.append(expected / self.cycle(drafted_share * (position + 1)))
        return rates

    def _formula(self, gamma: float, width: float) -> float:
        """The cycle at γ drafted tokens, where each sequence has `width` tokens in a step on average."""
        tokens = self.active * width
        overhead = self._overhead.line.seconds(gamma) if gamma and self._overhead is not None else 0.0
        seconds = overhead + self._step.seconds(tokens)
        if self.active > 1 and overhead > self._step.fixed:
            half = self._step.seconds(tokens / 2)
            seconds = half + max(half, overhead)
        return max(seconds, 1e-9)

    def _add_overhead(self, drafted: int, seconds: float) -> None:
        if self._overhead is not None:
            self._overhead.add(drafted, seconds)
            return
        self._first.append((drafted, seconds))
        if len(self._first) == FIRST_ROUNDS:
            self._overhead = FittedCost(self._first)


class AcceptanceStatistics:
    """What requests of one kind have taught, and whether they draft.

    All draft, or all write by `Decode`: a step that a few make longer is longer for all.

    Attributes:
        accepted: of each position.
        rounds: proposals so far.
        drafted_share: drafted tokens over γ, a running mean: a draft may end a proposal early.
        gamma: the best for all, if they draft; 0 before it is known.
        pays: whether drafting pays.
        pause: tokens that each sequence writes by `Decode` before one of them probes.
        decoded: tokens that all have written by `Decode` since the last probe.
    """

    def __init__(self) -> None:
        self.accepted = Acceptance()
        self.rounds = 0
        self.drafted_share = 1.0
        self.gamma = 0
        self.pays = True
        self.pause = FIRST_PAUSE
        self.decoded = 0
        self._paid_since = 0  # `rounds` when drafting began to pay

    def add(self, round_: JudgedRound) -> None:
        """Take in a round, its acceptance aside."""
        if not round_.gamma:
            self.decoded += 1
            return
        self.rounds += 1
        self.drafted_share += RECENT * (round_.drafted / round_.gamma - self.drafted_share)

    def choose(self, costs: CostModel, ceiling: int) -> int:
        """Return the γ that is best for all, 0 where drafting does not pay."""
        rates = costs.rates(self.accepted.chances(ceiling), self.drafted_share)
        best = max(range(1, ceiling + 1), key=rates.__getitem__)
        if not 0 < self.gamma <= ceiling or rates[best] > (1 + SAME) * rates[self.gamma]:
            self.gamma = best
        if self.rounds >= FIRM_ROUNDS * costs.active:
            self._note(rates[self.gamma] / rates[0], costs.active)
        return self.gamma if self.pays else 0

    def _note(self, gain: float, active: int) -> None:
        if self.pays and gain < 1:
            self.pays, self.decoded = False, 0
            is_soon = self.rounds - self._paid_since < FIRM_ROUNDS * active
            self.pause = min(2 * self.pause, LONGEST_PAUSE) if is_soon else FIRST_PAUSE
        elif not self.pays and gain > BEGIN_GAIN:
            self.pays, self._paid_since = True, self.rounds

    def take_probe(self, costs: CostModel) -> bool:
        """Whether the sequence that asks is to probe."""
        if self.decoded < self.pause * costs.active:
            return False
        self.decoded = 0
        self.pause = min(2 * self.pause, LONGEST_PAUSE)
        self.accepted.forget(KEPT_FOR_A_PROBE)
        costs.doubt()
        return True


class Adaptive(Policy):
    """The γ of most text a second, if all B active sequences drafted alike [L 3.5, with the network and B].

        γ = argmax  (1 + Σ_i Π_{j≤i} β_j) / cycle(γ),    γ = 0 .. ceiling

    The factor B is common to all γ. At γ = 0 nothing is learned of drafts, so one sequence at a time proposes a little
    now and then.
    """

    def __init__(self, gamma: int, *, ceiling: int, statistics: AcceptanceStatistics, costs: CostModel) -> None:
        """`gamma` is that of the first proposal while nothing is known. `statistics` and `costs` learn as well."""
        self._ceiling = ceiling
        self._statistics = statistics
        self._costs = costs
        self._accepted = Acceptance(statistics.accepted)
        self._gamma = min(gamma, ceiling)
        self._has_begun = False
        self._probes = 0  # proposals of a probe that are left
        self._is_probe = False  # whether the round under way is one

    def next(self, most: int) -> int:
        most = min(most, self._ceiling)
        self.pause = 0
        if most < 1:
            return 0
        gamma = self._choose()
        if gamma and (self._has_begun or self._statistics.rounds < KNOWN_ROUNDS):
            gamma = min(max(gamma, self._gamma - STEP), self._gamma + STEP)
        self._gamma, self._has_begun = gamma, True
        if gamma == 0:
            self.pause = min(self._statistics.pause, MOST_DECODED)
        return min(gamma, most)

    def observe(self, round_: JudgedRound) -> None:
        self._costs.add(round_, is_probe=self._is_probe)
        self._statistics.add(round_)
        chances = round_.beta or [float(position < round_.accepted) for position in range(round_.judged)]
        for position, chance in enumerate(chances):
            self._accepted.add(position, chance)
        if round_.accepted == round_.drafted < round_.gamma:  # the next position was asked for, and did not come
            self._accepted.add(round_.drafted, 0.0)

    def _choose(self) -> int:
        """The best γ, before it is held to `STEP`."""
        statistics, costs = self._statistics, self._costs
        self._is_probe = False
        if not costs.known:
            return self._gamma
        if (best := statistics.choose(costs, self._ceiling)) and (gamma := self._own(best)):
            self._probes = 0
            return gamma
        if not self._probes and statistics.take_probe(costs):
            self._probes = PROBE_ROUNDS
        if not self._probes:
            return 0
        self._probes -= 1
        self._is_probe = True
        return min(PROBE_GAMMA, self._ceiling)

    def _own(self, gamma: int) -> int:
        """γ of this sequence where others draft `gamma`: theirs, unless its own acceptance speaks clearly against it.

        Sequences of one γ reach the verifier together.
        """
        rates = self._costs.rates(self._accepted.chances(self._ceiling), self._statistics.drafted_share)
        best = max(range(1, self._ceiling + 1), key=rates.__getitem__)
        if rates[0] > OWN_MARGIN * rates[best] and self._statistics.rounds >= FIRM_ROUNDS * self._costs.active:
            return 0
        return best if rates[best] > OWN_GAIN * rates[gamma] else gamma


class GammaController:
    """All sequences' γ: a policy for each, and what they share. Used on the event loop alone."""

    def __init__(self, metrics: Metrics) -> None:
        self._costs: dict[Kind, CostModel] = {}
        self._statistics: dict[tuple[object, ...], AcceptanceStatistics] = {}
        self._chosen = Histogram(
            "outrider_spec_decode_gamma",
            "Tokens asked for in each round's proposal; 0 for each token that the target wrote alone.",
            ["policy"],
            registry=metrics.registry,
            buckets=(0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 64),
        )

    def of(self, request: "Generation") -> "SequenceGamma":
        """γ of one sequence of a request."""
        fallback: Policy = Fixed(request.first_gamma)
        return SequenceGamma(
            GAMMA.run(lambda: self._policy(request), fallback),
            self._chosen.labels(policy=request.policy),
            default=request.first_gamma,
            has_beta=request.sampling.rule is Rule.TOKENWISE,  # under `block` more is accepted than β says
        )

    def _policy(self, request: "Generation") -> Policy:
        match request.policy:
            case PolicyKind.FIXED:
                return Fixed(request.gamma)
            case PolicyKind.HEURISTIC:
                return Heuristic(request.first_gamma, ceiling=request.gamma)
            case PolicyKind.ADAPTIVE:
                return Adaptive(
                    request.first_gamma,
                    ceiling=request.gamma,
                    statistics=self._statistics_of(request),
                    costs=self._costs.setdefault(request.drafter, CostModel()),
                )

    def _statistics_of(self, request: "Generation") -> AcceptanceStatistics:
        """What this request may know of acceptance: all that requests of its kind have taught, or nothing.

        Where draws decide, γ must not depend on draws to come. Statistics of another request with the same seed do: its
        acceptances further on are those that this one is about to draw. So statistics are shared among requests whose
        draws decide nothing about the text, and those whose seed is fresh. Times depend on lengths alone; all share
        them.
        """
        law = request.sampling.law
        may_share = request.seed_is_fresh or law.is_greedy or request.sampling.rule is Rule.COUPLED
        kind = (
            request.drafter,
            request.sampling.rule,
            law.is_greedy,
            _class_of(law.temperature),
            _class_of(request.draft_temperature),
            _class_of(request.max_entropy),
        )
        fresh = AcceptanceStatistics()
        return self._statistics.setdefault(kind, fresh) if may_share else fresh


class SequenceGamma:
    """γ of one sequence, and the times of its rounds. Whatever its policy does, nothing raises, and γ is within bounds.

    Attributes:
        gamma: of the round under way; 0 where the target writes alone.
    """

    def __init__(self, policy: Policy, histogram: Histogram, *, default: int, has_beta: bool) -> None:
        """`default` is γ where the policy has none; `has_beta` whether a verdict's β are chances of acceptance."""
        self.gamma = 0
        self._default = default
        self._policy = policy
        self._histogram = histogram
        self._has_beta = has_beta
        self._drafted = 0
        self._since: float | None = None  # the verdict before, where nothing but this round came after it
        self._judged_at: float | None = None  # the last verdict, where it was on a proposal

    @property
    def pause(self) -> int:
        """Tokens to write by `Decode` before the next proposal; see `Policy`."""
        return int(GAMMA.bounded(lambda: self._policy.pause, 0, low=0, high=MOST_DECODED))

    def next(self, most: int) -> int:
        """See `Policy`."""
        most = max(0, most)
        default = min(self._default, most)
        self.gamma = int(GAMMA.bounded(lambda: self._policy.next(most), default, low=0, high=most))
        return self.gamma

    @GAMMA.quiet
    def sent(self, draft: Draft | None) -> None:
        """A round leaves: a proposal, or None for `Decode`."""
        if draft is None:
            self.gamma = 0
        self._drafted = 0 if draft is None else len(draft.token_ids)
        self._since = None if draft is None else self._judged_at

    @GAMMA.quiet
    def judged(self, verdict: speculation_pb2.Verdict) -> None:
        """The round's verdict is there; of `Decode` the next of them."""
        now, timings, load = time.perf_counter(), verdict.timings, verdict.load
        at_verifier = (timings.queue_us + timings.forward_us + timings.verify_us) / 1e6
        overhead = None if self._since is None else now - self._since - at_verifier
        self._judged_at = now if self.gamma else None  # after `Decode` the draft has all of it to read
        self._since = None
        self._policy.observe(
            JudgedRound(
                gamma=self.gamma,
                drafted=self._drafted,
                judged=verdict.judged,
                accepted=verdict.accepted,
                beta=verdict.beta if self._has_beta else (),
                overhead=overhead,
                at_verifier=at_verifier,
                step=_step_cost(load),
                active=load.active,
                tokens=max(1, timings.pass_tokens),
                sequences=max(1, timings.pass_sequences),
            )
        )
        self._histogram.observe(self.gamma)

    def disturbed(self) -> None:
        """Something else than the round takes time now, such as a client that does not read."""
        self._since = self._judged_at = None


def _step_cost(load: speculation_pb2.VerifierLoad) -> CostLine | None:
    parts = load.pass_fixed_us, load.pass_token_us
    if not any(parts) or not all(0 <= part < math.inf for part in parts):
        return None
    return CostLine(load.pass_fixed_us / 1e6, load.pass_token_us / 1e6)


def _class_of(value: float | None) -> int | None:
    """Requests whose temperature, or bound on entropy, differs by less than 0.5 share a class; above 4 all do."""
    return None if value is None else round(min(value, 4.0) / 0.5)
