"""From a request to the lengths of its proposals: which policy it gets, what that one knows, and what it is told."""

import math
import time

from prometheus_client import Histogram

from draft_service.adaptive import FIRST_PAUSE, Adaptive
from draft_service.drafters.base import Draft, Kind
from draft_service.experience import Experience, Times
from draft_service.request import Generation
from draft_service.speculation import Fixed, Heuristic, Policy, PolicyKind, Round
from kernels.verify import Rule
from outrider.service.best_effort import Component
from outrider.service.cost_model import CostLine
from outrider.service.metrics import Metrics
from protos.outrider.v1 import speculation_pb2

# Requests that differ less than this in temperature, or in the bound on entropy, share what is learned of acceptance;
# above the most of them all do.
CLASS_WIDTH, MOST_CLASS = 0.5, 4.0

GAMMA_POLICY = Component("gamma_policy")

# Tokens that a policy may have the target write alone before it is asked again.
MOST_PAUSE = 4096

_BUCKETS = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 64)


class Lengths:
    """What all samples share: what was learned, and the histogram of what was chosen. One thread uses it."""

    def __init__(self, metrics: Metrics) -> None:
        self._times: dict[Kind, Times] = {}
        self._experiences: dict[tuple[object, ...], Experience] = {}
        self._chosen = Histogram(
            "outrider_spec_decode_gamma",
            "Length chosen for each round's proposal; 0 for each token that the target wrote alone.",
            ["policy"],
            registry=metrics.registry,
            buckets=_BUCKETS,
        )

    def of(self, request: Generation) -> "SampleLengths":
        """Those of one sample of a request."""
        fixed: Policy = Fixed(request.first_gamma)
        return SampleLengths(
            GAMMA_POLICY.run(lambda: self._policy(request), fixed),
            self._chosen.labels(policy=request.policy),
            default=request.first_gamma,
            tells_chances=_tells_chances(request),
        )

    def _policy(self, request: Generation) -> Policy:
        match request.policy:
            case PolicyKind.FIXED:
                return Fixed(request.gamma)
            case PolicyKind.HEURISTIC:
                return Heuristic(request.first_gamma, ceiling=request.gamma)
            case PolicyKind.ADAPTIVE:
                return Adaptive(
                    request.first_gamma,
                    ceiling=request.gamma,
                    experience=self._experience(request),
                    times=self._times.setdefault(request.drafter, Times()),
                )

    def _experience(self, request: Generation) -> Experience:
        """What this request may know of acceptance: all that requests of its kind have taught, or nothing.

        Where draws decide, γ must not depend on the draws to come. What other requests taught does, if one of them had
        the same seed: its acceptances at a later place are those that this one is about to draw. So it is for those
        whose draws decide nothing about the text, and for those whose seed nobody has had. (Times are for all: they are
        of lengths, whatever the tokens.)
        """
        law = request.sampling.law
        may_know = request.seed_is_fresh or law.is_greedy or request.sampling.rule is Rule.COUPLED
        kind = (
            request.drafter,
            request.sampling.rule,
            law.is_greedy,
            _class(law.temperature),
            _class(request.draft_temperature),
            _class(request.max_entropy),
        )
        fresh = Experience(first_pause=FIRST_PAUSE)
        return self._experiences.setdefault(kind, fresh) if may_know else fresh


class SampleLengths:
    """The lengths of one sample's proposals. Whatever its policy does, none of its methods raises, and every length is
    within its bounds.

    Attributes:
        asked: what was chosen for the round on its way; 0 where the target writes alone.
    """

    def __init__(self, policy: Policy, histogram: Histogram, *, default: int = 0, tells_chances: bool) -> None:
        """`default` is the length where the policy has none."""
        self.asked = 0
        self._default = default
        self._policy = policy
        self._histogram = histogram
        self._tells_chances = tells_chances
        self._drafted = 0
        self._foreseen = 0
        self._drafting: float | None = None
        self._since: float | None = None  # the wait began then; None where it is not of one round alone
        self._verdict_at: float | None = None  # of the last round, where it was a proposal
        self._is_first = True

    @property
    def pause(self) -> int:
        """See `Policy`."""
        return int(GAMMA_POLICY.bounded(lambda: self._policy.pause, 0, low=0, high=MOST_PAUSE))

    def next(self, most: int) -> int:
        """See `Policy`."""
        default = max(0, min(self._default, most))
        self.asked = int(GAMMA_POLICY.bounded(lambda: self._policy.next(most), default, low=0, high=max(0, most)))
        return self.asked

    @GAMMA_POLICY.quiet
    def sent(self, draft: Draft | None) -> None:
        """A round leaves now: a proposal, or None where the target is to write alone."""
        now = time.perf_counter()
        is_alone = draft is None
        self.asked = 0 if is_alone else self.asked
        self._drafted, self._foreseen = (0, 0) if draft is None else (len(draft.token_ids), draft.foreseen)
        # After a `Decode` the draft has all of it to read, and the first round waits for the prompt.
        self._drafting = None if is_alone or self._verdict_at is None else now - self._verdict_at
        self._since = None if is_alone or self._is_first else now
        self._is_first = False

    @GAMMA_POLICY.quiet
    def observe(self, verdict: speculation_pb2.Verdict) -> None:
        """Its verdict is there, or the next of them."""
        now = time.perf_counter()
        since, self._since = self._since, now  # of a `Decode` the next verdict's wait begins here
        self._verdict_at = now if self.asked else None
        self._policy.observe(
            Round(
                asked=self.asked,
                drafted=self._drafted,
                judged=verdict.judged,
                accepted=verdict.accepted,
                chances=verdict.beta if self._tells_chances else (),
                drafting=self._drafting,
                waited=None if since is None else now - since,
                pass_tokens=max(1, verdict.timings.pass_tokens),
                pass_cost=_pass_cost(verdict.load),
                foreseen=self._foreseen,
            )
        )
        self._histogram.observe(self.asked)


def _tells_chances(request: Generation) -> bool:
    """Whether a verdict's β are the chances of acceptance. Under `block` more is accepted than they say."""
    return request.sampling.rule is Rule.TOKENWISE


def _pass_cost(load: speculation_pb2.VerifierLoad) -> CostLine | None:
    parts = load.pass_fixed_us, load.pass_token_us
    if not any(parts) or not all(0 <= part < math.inf for part in parts):
        return None
    return CostLine(load.pass_fixed_us / 1e6, load.pass_token_us / 1e6)


def _class(value: float | None) -> int | None:
    return None if value is None else round(min(value, MOST_CLASS) / CLASS_WIDTH)
