"""Adaptive γ against sequences in simulated time: the speed it reaches, and when drafting stops and begins again."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import pytest
from structlog.testing import capture_logs

from draft_service.cost_model import FIRM_ROUNDS, CostModel, JudgedRound
from draft_service.speculation import STEP, Adaptive, Fixed, Policy
from draft_service.statistics import FIRM_TEXTS, AcceptanceStatistics
from outrider.service.fitted_cost import CostLine
from tests.draft_service.closed_loop import CEILING, ClosedLoop, DecodeOnly, Draft, adaptive

STEP_COST, DEAR_TOKENS = CostLine(0.008, 0.0003), CostLine(0.004, 0.0004)


@dataclass(frozen=True)
class Case:
    """Sequences at one verifier.

    Attributes:
        seconds: of each run with a fixed γ, and of the adaptive run, which begins with as many more, at most ten.
        others: sequences more that never draft.
        is_shared: whether all sequences are of one draft service.
        floor: least speed, as a share of the best common γ.
    """

    drafts: Sequence[Draft]
    cost: CostLine
    seconds: tuple[float, float] = (10, 20)
    others: int = 0
    is_shared: bool = True
    contention: float = 0.0
    floor: float = 0.94

    def loop(self, policies: Sequence[Policy]) -> ClosedLoop:
        return ClosedLoop(
            [*[Draft(0.8)] * self.others, *self.drafts],
            [*(DecodeOnly() for _ in range(self.others)), *policies],
            self.cost,
            contention=self.contention,
        )

    def rates_of_fixed(self) -> dict[int, float]:
        """Tokens a second of all sequences, by the γ of those that draft; 0 is the target alone."""
        rates = {}
        for gamma in (0, 1, 2, 3, 5, 8):
            loop = self.loop([Fixed(gamma) if gamma else DecodeOnly() for _ in self.drafts])
            loop.run(1)
            rates[gamma] = loop.run(self.seconds[0])
        return rates


MASKS = (0.74, 0.58, 0.43, 0.35, 0.31, 0.3, 0.3)  # α of mask tokens of the demo pair at temperature 0
MIXED_ALPHA = [Draft(alpha) for alpha in (0.3, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95)]
MIXED_TRIPS = [Draft(0.8, round_trip=0.0005 * (1 + number)) for number in range(32)]
ALIKE = {
    "one, fair draft": Case([Draft(0.7)], STEP_COST),
    "one, useless draft": Case([Draft(0.05)], STEP_COST),
    "one, far away": Case([Draft(0.8, round_trip=0.03)], STEP_COST),
    **{
        f"one, {name}": Case([Draft(0.94, 0.006, later=MASKS[: s - 1])], STEP_COST)
        for name, s in (("one slow pass", 8), ("slow passes of two", 2))
    },
    "one, drafted ahead": Case([Draft(0.8, step=0.003, hidden=0.9)], STEP_COST, (10, 40)),
    "eight": Case([Draft(0.8)] * 8, STEP_COST, (3, 8)),
    "sixteen, good drafts": Case([Draft(0.92)] * 16, DEAR_TOKENS, (2, 4)),
    "32, tokens cost": Case([Draft(0.8)] * 32, DEAR_TOKENS, (1, 3)),
    "64, tokens are free": Case([Draft(0.8)] * 64, CostLine(0.02, 0.00002), (1, 4)),
}
CASES = ALIKE | {
    "mixed α": Case(MIXED_ALPHA, STEP_COST, (2, 6)),
    "mixed round trips": Case(MIXED_TRIPS, CostLine(0.02, 0.0002), (2, 6), is_shared=False),
    "24 decode, 8 draft": Case([Draft(0.8)] * 8, CostLine(0.02, 0.0002), (2, 6), others=24),
    "24 decode, 8 draft, tokens cost": Case([Draft(0.8)] * 8, DEAR_TOKENS, (2, 6), others=24),
    # Services on one machine: the verifier is slower while others draft, and so is its published cost.
    **{
        f"{count}, contention": Case(
            [Draft(0.8, step=0.003)] * count, CostLine(0.008, 0.0004), (3, 15), contention=0.25, floor=0.96
        )
        for count in (6, 12)
    },
}


@pytest.mark.parametrize("name", CASES)
def test_adaptive_gamma_is_near_the_best_common_gamma_in_small_steps(name: str) -> None:
    case = CASES[name]
    fixed = case.rates_of_fixed()
    s = case.drafts[0].tokens_per_pass
    loop = case.loop(adaptive(len(case.drafts), is_shared=case.is_shared, tokens_per_pass=s))
    loop.run(min(10, case.seconds[1]))
    rate, best = loop.run(case.seconds[1]), max(fixed.values())
    print(f"{name}: {rate:.0f}/s; best γ {max(fixed, key=fixed.__getitem__)}: {best:.0f}/s; alone {fixed[0]:.0f}/s")
    assert rate > case.floor * best
    if name in ALIKE:
        assert rate > 0.97 * fixed[0]
    for stream in loop.streams[case.others :]:
        assert all(after == 0 or abs(after - before) <= STEP for before, after in pairwise(stream.gammas))


def test_without_shared_acceptance_a_text_is_written_alone_where_drafts_do_not_pay() -> None:
    """A request with a seed shares no acceptance under a rule that draws; its text may be short."""
    drafts, policies = [Draft(0.8)] * 32, adaptive(32)
    ClosedLoop(drafts, policies, DEAR_TOKENS).run(4)
    own = AcceptanceStatistics.of_one()
    assert Adaptive(5, ceiling=CEILING, statistics=own, costs=policies[0]._costs).next(CEILING) == 0


def test_drafting_begins_again_when_acceptance_rises() -> None:
    drafts = [Draft(0.05) for _ in range(4)]
    loop = ClosedLoop(drafts, adaptive(4), STEP_COST)
    loop.run(10)
    assert loop.run(5) > 0.97 * alone(4, STEP_COST)
    for draft in drafts:
        draft.alpha = 0.9
    loop.run(15)
    assert loop.run(5) > 1.5 * alone(4, STEP_COST)


def test_drafting_begins_again_when_sequences_end() -> None:
    loop = ClosedLoop([Draft(0.8)] * 32, adaptive(32), DEAR_TOKENS)
    loop.run(3)
    assert loop.run(3) > 0.97 * alone(32, DEAR_TOKENS)
    loop.keep(2)
    loop.run(15)
    assert loop.run(5) > 1.2 * alone(2, DEAR_TOKENS)


def test_drafting_begins_again_after_a_slow_start() -> None:
    """A new service is slow, and looks as if drafting did not pay."""
    draft = Draft(0.8, step=0.006)
    loop = ClosedLoop([draft], adaptive(), STEP_COST)
    loop.run(1)
    draft.step = 0.001
    loop.run(3)
    assert loop.run(10) > 1.5 * alone(1, STEP_COST)


@pytest.mark.parametrize(("later", "drafts"), [(5, True), (0, False)])
def test_a_first_text_with_poor_acceptance_does_not_stop_drafting(later: int, drafts: bool) -> None:
    """It may be unlike the others. If three texts are like it, drafting does stop, and the log says why."""
    statistics, costs, proposals = AcceptanceStatistics(), CostModel(), list[int]()
    with capture_logs() as logged:
        for text in range(8):
            policy = Adaptive(5, ceiling=5, statistics=statistics, costs=costs)
            proposals.append(0)
            for _ in range(30):
                gamma = policy.next(5)
                accepted = min(gamma, later if text else 0)
                policy.observe(judged(gamma, accepted))
                proposals[-1] += gamma > 0
    assert all(proposals[:FIRM_TEXTS])
    assert all(proposals) if drafts else sum(proposals[FIRM_TEXTS + 1 :]) <= FIRM_ROUNDS, proposals  # one trial
    assert [each["event"] for each in logged] == ([] if drafts else ["drafting does not pay"])
    assert all(each["gain"] < 1 and each["alpha"] < 0.5 and each["round_ms"] > each["decode_ms"] for each in logged)


def judged(gamma: int, accepted: int) -> JudgedRound:
    """A round of one sequence: 2 ms for each drafted token, and 2 ms of round trip."""
    step, overhead = STEP_COST.seconds(gamma + 1), 0.002 * (gamma + 1) if gamma else 0.0
    return JudgedRound(
        gamma, gamma, min(gamma, accepted + 1), accepted, overhead=overhead or None, at_verifier=step, step=STEP_COST,
        tokens=gamma + 1, seconds=step + overhead, drafting=0.002 * gamma,
    )  # fmt: skip


def alone(sequences: int, cost: CostLine) -> float:
    """Tokens a second of the target alone."""
    return sequences / cost.seconds(sequences)


def test_the_end_of_a_text_counts_as_a_rejection() -> None:
    """Short texts end inside a proposal so often that the formula promised 9 % more than they got."""
    (policy,) = adaptive()
    policy._gamma = 4
    assert policy.next(2) == 2
    before = policy._accepted.chances(3)
    policy.observe(JudgedRound(2, 2, 2, 2, wanted=policy.wanted))
    after = policy._accepted.chances(3)
    assert after[1] > before[1]
    assert after[2] < before[2]
    assert policy._statistics.drafted_share < 1
    policy.observe(JudgedRound(0, wanted=policy.wanted))  # the last token
    assert policy._accepted.chances(1)[0] < after[0]


def test_gamma_is_positive_for_a_verifier_without_published_cost() -> None:
    (policy,) = adaptive()
    for _ in range(50):
        gamma = policy.next(CEILING)
        assert gamma >= 1
        policy.observe(JudgedRound(gamma, gamma, gamma, gamma - 1, (), 0.001 * gamma, 0.01))
