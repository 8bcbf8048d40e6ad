"""Policies that choose γ, the number of tokens to draft, for each round.

Invariant 4. A policy sees judged rounds only: γ, accepted tokens, chances of acceptance, times. It chooses γ before
anything of the next round is drafted, and all drafted tokens are sent. So it never sees a token that it could discard,
nor a future draw: draws are keyed by the length of the text at the start of their round (invariant 2).
"""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from prometheus_client import Histogram

from draft_service.cost_model import FIRM_ROUNDS, CostModel, JudgedRound
from draft_service.drafters.base import DrafterKind
from draft_service.request import CheckedRequest, PolicyKind
from draft_service.sequence import Round
from draft_service.statistics import Acceptance, AcceptanceStatistics
from draft_service.tokens_per_pass import PassChoices
from kernels.verify import Rule
from outrider.service.best_effort import Component
from outrider.service.fitted_cost import CostLine
from outrider.service.metrics import Metrics
from protos.outrider.v1 import speculation_pb2

OnRound = Callable[..., None]
"""Takes the `tokens`, `seconds` and `active` sequences of a round."""

GAMMA = Component("gamma_policy")

# The most that γ changes from one round to the next.
STEP = 2
# A sequence uses its own γ instead of the common one if it is this much faster.
OWN_GAIN = 1.03
# Proposals of all sequences before a new one starts at the common γ.
KNOWN_ROUNDS = 8
# A sequence uses `Decode`, while others draft, if that is this much faster for it.
OWN_MARGIN = 1.2
# The least and the most tokens of one `Decode`. Then γ is chosen again.
LEAST_DECODED, MOST_DECODED = 8, 128


class Policy(ABC):
    """Chooses γ for one sequence.

    Attributes:
        pause: tokens to write with `Decode` after `next` chose 0, before it is called again.
        wanted: γ as `next` chose it, before the text's length limit cut it.
        is_prepared: whether `next` does without the last verdict.
    """

    pause: int = 0
    wanted: int = 0
    is_prepared: bool = False

    @abstractmethod
    def next(self, most: int) -> int:
        """Return γ of the next round, in 0..`most`; 0 is `Decode`. Called once a round, before anything is drafted."""

    @abstractmethod
    def observe(self, round_: JudgedRound) -> None:
        """Record a verdict."""

    def prepare(self) -> None:  # noqa: B027  # most choose at once
        """Choose γ of the next round while the target runs, from the verdicts so far."""


class Fixed(Policy):
    """The same γ in every round."""

    is_prepared = True

    def __init__(self, gamma: int, costs: CostModel | None = None) -> None:
        """`costs` is updated: adaptive policies of other requests use the times of this one."""
        self._gamma = self.wanted = gamma
        self._costs = costs

    def next(self, most: int) -> int:
        return max(0, min(self._gamma, most))

    def observe(self, round_: JudgedRound) -> None:
        if self._costs is not None:
            self._costs.add(round_)


class Heuristic(Policy):
    """γ + 2 after a fully accepted proposal, γ - 1 after any other [W 4.1]; at least 1."""

    def __init__(self, gamma: int, *, ceiling: int) -> None:
        """`gamma` is γ of the first proposal."""
        self._ceiling = ceiling
        self._gamma = max(1, min(gamma, ceiling))

    def next(self, most: int) -> int:
        return max(0, min(self._gamma, most))

    def observe(self, round_: JudgedRound) -> None:
        if not round_.drafted:
            return
        step = 2 if round_.accepted == round_.drafted else -1
        self._gamma = max(1, min(self._gamma + step, self._ceiling))


class Adaptive(Policy):
    """The γ with the most tokens a second, if all B active sequences draft alike [L 3.5, with the network and B].

        γ = argmax  (1 + Σ_i Π_{j≤i} β_j) / cycle(γ),    γ = 0 .. ceiling

    The factor B is common to all γ. `Decode` (γ = 0) teaches nothing about drafts, so after a pause drafting is tried
    again: a few proposals of each sequence.
    """

    def __init__(self, gamma: int, *, ceiling: int, statistics: AcceptanceStatistics, costs: CostModel) -> None:
        """`gamma` is γ of the first proposal without statistics. `statistics` and `costs` are updated too."""
        self._ceiling = ceiling
        self._statistics = statistics
        self._costs = costs
        self._accepted = Acceptance(statistics.accepted)
        self._gamma = min(gamma, ceiling)
        self._choice = 0  # of `prepare`
        self._has_begun = False
        self._rounds = 0  # proposals

    def prepare(self) -> None:
        self._choice, self.is_prepared = self._choose(), True

    def next(self, most: int) -> int:
        most = min(most, self._ceiling)
        self.pause, self.wanted = 0, self._gamma
        if most < 1:  # the text's last token
            return 0
        gamma = self._choice if self.is_prepared else self._choose()
        self.is_prepared = False
        if gamma and (self._has_begun or self._statistics.rounds < KNOWN_ROUNDS):
            gamma = min(max(gamma, self._gamma - STEP), self._gamma + STEP)
        self._gamma, self._has_begun = gamma, True
        if gamma == 0:
            # All sequences end their `Decode` together, and draft together in the trial.
            self.pause = min(max(LEAST_DECODED, round(self._statistics.pause or MOST_DECODED)), MOST_DECODED)
        self.wanted = gamma
        return min(gamma, most)

    def observe(self, round_: JudgedRound) -> None:
        self._costs.add(round_)
        self._statistics.add(round_, self._costs)
        if round_.drafted:
            if not self._rounds:
                self._statistics.texts += 1
            self._rounds += 1
        chances = round_.beta or [float(position < round_.accepted) for position in range(round_.judged)]
        for position, chance in enumerate(chances):
            self._accepted.add(position, chance)
        if round_.accepted == round_.drafted < round_.wanted:
            # The drafter or the text's length limit ended the proposal: count the next position as rejected.
            self._accepted.add(round_.drafted, 0.0)

    def _choose(self) -> int:
        """The best γ, before the limit `STEP`."""
        statistics, costs = self._statistics, self._costs
        if not costs.is_measured:  # only proposals can change that
            return self._gamma or 1
        best = statistics.choose(costs, self._ceiling)
        return self._own(best) if best and not statistics.is_trial else best

    def _own(self, gamma: int) -> int:
        """The sequence's own γ: the common one (`gamma`), unless its own acceptance makes another clearly faster.

        Sequences with the same γ reach the verifier together.
        """
        rates = self._costs.rates(self._accepted.chances(self._ceiling), self._statistics.drafted_share)
        best = max(range(1, self._ceiling + 1), key=rates.__getitem__)
        is_firm = self._costs.is_firm and self._rounds >= FIRM_ROUNDS
        if is_firm and rates[0] > OWN_MARGIN * rates[best]:
            return 0
        return best if rates[best] > OWN_GAIN * rates[gamma] else gamma


class GammaController:
    """Gives each sequence its policy, with the statistics that sequences share. Used on the event loop only."""

    def __init__(self, metrics: Metrics) -> None:
        self._costs: dict[tuple[DrafterKind, int], CostModel] = {}  # by drafter and tokens of a pass
        self._statistics: dict[tuple[object, ...], AcceptanceStatistics] = {}
        self._pass_choices = PassChoices()
        self._chosen = Histogram(
            "outrider_spec_decode_gamma",
            "Gamma as chosen for each verdict; 0 for those of a Decode.",
            ["policy"],
            registry=metrics.registry,
            buckets=(0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 64),
        )

    def of(self, request: CheckedRequest, load: Callable[[], int]) -> "SequenceGamma":
        """Return the γ of one sequence of a request, which begins now. `load` returns the sequences at a verifier."""
        first = request.speculation.first_gamma
        fallback: Policy = Fixed(first)
        return SequenceGamma(
            GAMMA.run(lambda: self._policy(request, load), fallback),
            self._chosen.labels(policy=request.speculation.policy),
            default=first,
            has_beta=request.sampling.rule is Rule.TOKENWISE,  # `block` accepts more than β
            on_round=self._on_round(request),
        )

    def with_tokens_per_pass(self, request: CheckedRequest) -> CheckedRequest:
        """Return the request with its tokens of a pass chosen, if it leaves that to the service.

        If another request may have the same draws, the service's default stays, since rates depend on acceptance.
        """
        if not request.speculation.chooses_tokens_per_pass or not request.draft_sequence.owns_draws:
            return request
        given = request.draft_sequence.tokens_per_pass
        chosen = GAMMA.run(lambda: self._pass_choices.choose(_kind_of(request), given), given)
        return replace(request, draft_sequence=replace(request.draft_sequence, tokens_per_pass=chosen))

    def _on_round(self, request: CheckedRequest) -> OnRound | None:
        if not request.speculation.chooses_tokens_per_pass or not request.draft_sequence.owns_draws:
            return None
        return partial(self._pass_choices.add, _kind_of(request), request.draft_sequence.tokens_per_pass)

    def _policy(self, request: CheckedRequest, load: Callable[[], int]) -> Policy:
        speculation, s = request.speculation, request.draft_sequence.tokens_per_pass
        first, ceiling = speculation.first_gamma, speculation.gamma
        costs = self._costs.setdefault((speculation.drafter, s), CostModel(s))
        match speculation.policy:
            case PolicyKind.FIXED:
                return Fixed(ceiling, costs)
            case PolicyKind.HEURISTIC:
                return Heuristic(first, ceiling=ceiling)
            case PolicyKind.ADAPTIVE:
                costs.expect(load())
                return Adaptive(first, ceiling=ceiling, statistics=self._statistics_of(request), costs=costs)

    def _statistics_of(self, request: CheckedRequest) -> AcceptanceStatistics:
        """Return the shared statistics of requests of this kind, or some of its own.

        If draws decide the text, γ must not depend on future draws. Statistics of another request with the same seed
        do: its later acceptances come from the draws that this request is about to make. A fresh seed may come again,
        too: a client that lost its connection continues with it. So only requests whose draws do not decide the text,
        and requests with a fresh seed, share statistics. Times depend on lengths only; all requests share them.
        """
        if not request.draft_sequence.owns_draws:
            return AcceptanceStatistics.of_one()
        kind = _kind_of(request), request.draft_sequence.tokens_per_pass
        return self._statistics.setdefault(kind, AcceptanceStatistics())


class SequenceGamma:
    """Chooses γ for one sequence and measures its rounds. If the policy fails, no method raises, and γ is in bounds.

    Attributes:
        gamma: as last chosen.
    """

    def __init__(
        self, policy: Policy, histogram: Histogram, *, default: int, has_beta: bool, on_round: OnRound | None = None
    ) -> None:
        """`default` is γ if the policy fails; `has_beta` is whether a verdict's β are chances of acceptance. `on_round`
        is called with each round but the first, which reads the prompt.
        """
        self.gamma = 0
        self._default = default
        self._policy = policy
        self._histogram = histogram
        self._has_beta = has_beta
        self._on_round = on_round
        self._since: float | None = None  # the last verdict or the start; None if other work followed it
        self._last_gamma: int | None = None  # of the last verdict's round
        self._wanted = 0  # of the policy for this round; 0 if it was not asked, since the drafter is not ready
        self._unlearned: JudgedRound | None = None

    @property
    def pause(self) -> int:
        return int(GAMMA.bounded(lambda: self._policy.pause, 0, low=0, high=MOST_DECODED))

    def next(self, most: int) -> int:
        if self._last_gamma is None:
            self._since = time.perf_counter()
        if not self._policy.is_prepared:
            self.learn()
        most = max(0, most)
        default = min(self._default, most)
        self.gamma = int(GAMMA.bounded(lambda: self._policy.next(most), default, low=0, high=most))
        self._wanted = self._policy.wanted
        return self.gamma

    @GAMMA.quiet
    def judged(self, round_: Round, verdict: speculation_pb2.Verdict) -> None:
        """Note a verdict on a round."""
        self.learn()
        now, timings, load = time.perf_counter(), verdict.timings, verdict.load
        at_verifier = (timings.queue_us + timings.forward_us + timings.verify_us) / 1e6
        since, gamma, drafted = self._since, round_.gamma, len(round_.draft_tokens)
        if gamma and self._last_gamma == 0:
            since = None  # the draft first ran the tokens of the `Decode`
        seconds = None if since is None else now - since
        if self._on_round is not None and seconds is not None and self._last_gamma is not None:
            self._on_round(tokens=len(verdict.token_ids), seconds=seconds, active=load.active)
        is_first = self._last_gamma is None
        self._since, self._last_gamma = now, gamma
        self._unlearned = JudgedRound(
            gamma=gamma,
            wanted=max(gamma, self._wanted),
            drafted=drafted,
            judged=verdict.judged,
            accepted=verdict.accepted,
            beta=verdict.beta if self._has_beta else (),
            seconds=seconds,
            is_first=is_first,
            decoded=1 if drafted else len(verdict.token_ids),
            overhead=seconds - at_verifier if seconds is not None and gamma else None,
            drafting=0.0 if since is None else round_.sent - since,
            at_verifier=at_verifier,
            step=_step_cost(load),
            active=load.active,
            tokens=max(1, timings.pass_tokens),
            sequences=max(1, timings.pass_sequences),
        )
        self._wanted = 0

    @GAMMA.quiet
    def learn(self) -> None:
        """Update the policy with the last verdict. A prepared policy does not wait for it."""
        round_, self._unlearned = self._unlearned, None
        if round_ is not None:
            self._histogram.observe(round_.gamma)
            self._policy.observe(round_)

    @GAMMA.quiet
    def prepare(self) -> None:
        """Choose γ of the next round while the target runs."""
        self.learn()
        self._policy.prepare()

    def disturbed(self) -> None:
        """Exclude the current cycle from the measurements: a client that does not read, for example, delays it."""
        self._since = None


def _kind_of(request: CheckedRequest) -> tuple[object, ...]:
    """Requests of one kind have about the same acceptance."""
    sequence = request.draft_sequence
    return (
        request.speculation.drafter,
        sequence.rule,
        sequence.params.is_greedy,
        _class_of(sequence.params.temperature),
        _class_of(sequence.draft_temperature),
        _class_of(sequence.max_entropy),
    )


def _step_cost(load: speculation_pb2.VerifierLoad) -> CostLine | None:
    parts = load.pass_fixed_us, load.pass_token_us
    if not any(parts) or not all(0 <= part < math.inf for part in parts):
        return None
    return CostLine(load.pass_fixed_us / 1e6, load.pass_token_us / 1e6)


def _class_of(value: float | None) -> int | None:
    """Return the class of a temperature or an entropy bound: in steps of 0.5, up to 4."""
    return None if value is None else round(min(value, 4.0) / 0.5)
