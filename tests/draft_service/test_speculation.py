"""Choosing γ: what each policy may do, that the adaptive one finds the best γ for all, and what requests may share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram

from draft_service import speculation
from draft_service.drafters.base import Draft as Proposal
from draft_service.drafters.base import Kind
from draft_service.request import Generation
from draft_service.speculation import (
    MOST_DECODED,
    PROBE_GAMMA,
    STEP,
    Adaptive,
    Fixed,
    GammaController,
    Heuristic,
    Policy,
    PolicyKind,
    SequenceGamma,
)
from draft_service.statistics import FIRM_ROUNDS, AcceptanceStatistics, CostModel, JudgedRound
from kernels.verify import Rule
from outrider.service.cost_model import CostLine
from outrider.service.metrics import Metrics
from protos.outrider.v1 import speculation_pb2
from tests.draft_service.closed_loop import ClosedLoop, Draft
from tests.draft_service.records import generation

CEILING = 16
STEP_COST = CostLine(0.008, 0.0003)


class DecodeOnly(Policy):
    """The target alone."""

    pause = 64

    def next(self, most: int) -> int:
        return 0

    def observe(self, round_: JudgedRound) -> None: ...


def adaptive(streams: int = 1, *, shared: bool = True) -> list[Adaptive]:
    """A policy for each stream: those of one draft service, or each of a service of its own."""
    known = (AcceptanceStatistics(), CostModel())
    policies = []
    for _ in range(streams):
        statistics, costs = known if shared else (AcceptanceStatistics(), CostModel())
        policies.append(Adaptive(5, ceiling=CEILING, statistics=statistics, costs=costs))
    return policies


def rates_of_fixed(
    drafts: Sequence[Draft], seconds: float, cost: CostLine, contention: float = 0.0
) -> dict[int, float]:
    """Tokens a second of all, with each γ; 0 is the target alone."""
    rates = {}
    for gamma in (0, 1, 3, 5, 8):
        policies = [Fixed(gamma) if gamma else DecodeOnly() for _ in drafts]
        loop = ClosedLoop(drafts, policies, cost, contention=contention)
        loop.run(1)
        rates[gamma] = loop.run(seconds)
    return rates


def test_fixed_is_what_was_asked_for_within_what_is_possible() -> None:
    policy = Fixed(5)
    assert [policy.next(most) for most in (16, 5, 3, 0, -1)] == [5, 5, 3, 0, 0]
    policy.observe(JudgedRound(5, 5, 1, 0))
    assert policy.next(16) == 5


def test_the_heuristic_adds_two_after_a_whole_proposal_and_else_takes_one() -> None:
    policy = Heuristic(5, ceiling=9)
    found = []
    for accepted in (5, 7, 9, 8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1):
        gamma = policy.next(CEILING)
        found.append(gamma)
        policy.observe(JudgedRound(gamma, gamma, min(accepted + 1, gamma), min(accepted, gamma)))
    assert found == [5, 7, 9, 9, 8, 7, 6, 5, 4, 3, 2, 1, 1, 1]
    assert policy.next(CEILING) == 3
    assert policy.next(2) == 2  # a limit is no verdict
    policy.observe(JudgedRound(0))  # nor is a token of the target's own
    assert policy.next(CEILING) == 3


CASES: dict[str, tuple[list[Draft], CostLine]] = {
    "one, fair draft": ([Draft(0.7)], STEP_COST),
    "one, useless draft": ([Draft(0.05)], STEP_COST),
    "one, far away": ([Draft(0.8, round_trip=0.03)], STEP_COST),
    "one, drafted ahead": ([Draft(0.8, step=0.003, hidden=0.9)], STEP_COST),
    "eight": ([Draft(0.8)] * 8, STEP_COST),
    "sixteen, good drafts": ([Draft(0.92)] * 16, CostLine(0.004, 0.0004)),
    "32, tokens cost": ([Draft(0.8)] * 32, CostLine(0.004, 0.0004)),
    "64, tokens are free": ([Draft(0.8)] * 64, CostLine(0.02, 0.00002)),
}


@pytest.mark.parametrize("name", CASES)
def test_alike_sequences_find_the_gamma_that_is_best_for_all(name: str) -> None:
    drafts, cost = CASES[name]
    seconds = min(40, max(3, 120 // len(drafts)))
    fixed = rates_of_fixed(drafts, seconds, cost)
    loop = ClosedLoop(drafts, adaptive(len(drafts)), cost)
    loop.run(10)
    rate, best = loop.run(seconds), max(fixed.values())
    print(f"{name}: {rate:.0f}/s; best γ {max(fixed, key=fixed.__getitem__)}: {best:.0f}/s; alone {fixed[0]:.0f}/s")
    assert rate > 0.94 * best
    assert rate > 0.97 * fixed[0]


@pytest.mark.parametrize(
    ("name", "drafts", "shared", "cost"),
    [
        ("acceptance", [Draft(alpha) for alpha in (0.3, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95)], True, STEP_COST),
        (
            "round trips",
            [Draft(0.8, round_trip=0.0005 * (1 + number)) for number in range(32)],
            False,
            CostLine(0.02, 0.0002),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_mixed_sequences_are_near_the_best_common_gamma(
    name: str, drafts: list[Draft], shared: bool, cost: CostLine
) -> None:
    best = max(rates_of_fixed(drafts, 8, cost).values())
    loop = ClosedLoop(drafts, adaptive(len(drafts), shared=shared), cost)
    loop.run(10)
    assert loop.run(12) > 0.94 * best


@pytest.mark.parametrize("cost", [CostLine(0.02, 0.0002), CostLine(0.004, 0.0004)])
def test_beside_sequences_that_never_draft_all_together_write_the_most(cost: CostLine) -> None:
    drafts, others = [Draft(0.8)] * 32, [DecodeOnly() for _ in range(24)]
    best = 0.0
    for gamma in (0, 1, 3, 5):
        loop = ClosedLoop(drafts, [*others, *(Fixed(gamma) if gamma else DecodeOnly() for _ in range(8))], cost)
        loop.run(1)
        best = max(best, loop.run(6))
    loop = ClosedLoop(drafts, [*others, *adaptive(8)], cost)
    loop.run(10)
    assert loop.run(10) > 0.94 * best


@pytest.mark.parametrize("streams", [4, 6, 12])
def test_a_verifier_that_is_slower_beside_drafts_does_not_send_gamma_to_and_fro(streams: int) -> None:
    """As on a machine that both services share: its cost as published follows who drafts."""
    drafts, cost = [Draft(0.8, step=0.003)] * streams, CostLine(0.008, 0.0004)
    best = max(rates_of_fixed(drafts, 10, cost, 0.25).values())
    loop = ClosedLoop(drafts, adaptive(streams), cost, contention=0.25)
    loop.run(10)
    assert loop.run(30) > 0.96 * best


def test_without_acceptance_of_others_a_text_is_written_alone_where_drafts_do_not_pay() -> None:
    """A request that gives a seed shares no acceptance under a rule that draws; its text may be short."""
    drafts, policies = [Draft(0.8)] * 32, adaptive(32)
    ClosedLoop(drafts, policies, CostLine(0.004, 0.0004)).run(10)
    assert Adaptive(5, ceiling=CEILING, statistics=AcceptanceStatistics(), costs=policies[0]._costs).next(CEILING) == 0


@pytest.mark.parametrize("name", CASES)
def test_gamma_moves_by_two_at_most_or_to_none(name: str) -> None:
    drafts, cost = CASES[name]
    loop = ClosedLoop(drafts, adaptive(len(drafts)), cost)
    loop.run(3)
    for stream in loop.streams:
        assert all(after == 0 or abs(after - before) <= STEP for before, after in pairwise(stream.gammas))


def test_a_limit_is_kept_and_forgotten() -> None:
    """What is left to write bounds a proposal; afterwards γ is where it was."""
    (policy,) = policies = adaptive()
    ClosedLoop([Draft(0.9)], policies, STEP_COST).run(10)
    before = policy.next(CEILING)
    for most in (3, 1, 0, 2):
        assert policy.next(most) == most
    assert policy.pause == 0
    assert abs(policy.next(CEILING) - before) <= STEP


def test_drafting_begins_again_where_it_pays_again() -> None:
    policies = adaptive(4)
    drafts = [Draft(0.05) for _ in range(4)]
    loop = ClosedLoop(drafts, policies, STEP_COST)
    loop.run(10)
    assert not policies[0]._statistics.pays
    for draft in drafts:
        draft.alpha = 0.9
    loop.run(60)
    assert min(stream.gammas[-1] for stream in loop.streams) >= 3


def test_drafting_begins_where_sequences_leave() -> None:
    loop = ClosedLoop([Draft(0.8)] * 32, adaptive(32), CostLine(0.004, 0.0004))
    loop.run(5)
    assert max(stream.gammas[-1] for stream in loop.streams) <= PROBE_GAMMA
    loop.keep(2)
    loop.run(30)
    assert min(stream.gammas[-1] for stream in loop.streams) >= 3


def test_a_verifier_that_tells_no_cost_is_drafted_for_all_the_same() -> None:
    (policy,) = adaptive()
    for _ in range(50):
        gamma = policy.next(CEILING)
        assert gamma >= 1
        policy.observe(JudgedRound(gamma, gamma, gamma, gamma - 1, (), 0.001 * gamma, 0.01))


numbers = st.one_of(st.floats(), st.sampled_from([0.0, 1e-3, -1e-3, 5e-324, 1e308, math.nan, math.inf]))
counts = st.integers(0, 17)
rounds = st.builds(
    JudgedRound,
    gamma=counts,
    drafted=counts,
    judged=counts,
    accepted=counts,
    beta=st.lists(numbers, max_size=5),
    overhead=st.none() | numbers,
    at_verifier=numbers,
    step=st.none() | st.builds(CostLine, numbers, numbers),
    active=st.integers(0, 1 << 20),
    tokens=st.integers(1, 1 << 20),
    sequences=st.integers(1, 1 << 10),
)


@settings(max_examples=100, derandomize=True, deadline=None)
@given(
    kind=st.sampled_from(PolicyKind),
    events=st.lists(
        st.tuples(st.sampled_from(["begin", "judged", "asked"]), rounds, st.integers(-2, 20), st.integers(1, 10))
    ),
)
def test_gamma_is_within_bounds_whatever_is_observed(
    kind: PolicyKind, events: list[tuple[str, JudgedRound, int, int]]
) -> None:
    known = (AcceptanceStatistics(), CostModel())

    def begin() -> SequenceGamma:
        policies: dict[PolicyKind, Policy] = {
            PolicyKind.FIXED: Fixed(9),
            PolicyKind.HEURISTIC: Heuristic(5, ceiling=9),
            PolicyKind.ADAPTIVE: Adaptive(5, ceiling=9, statistics=known[0], costs=known[1]),
        }
        histogram = Histogram("gamma", "", registry=CollectorRegistry())
        return SequenceGamma(policies[kind], histogram, default=4, has_beta=True)

    gamma = begin()
    for event, round_, most, burst in events:
        if event == "begin":
            gamma = begin()
        for _ in range(burst):
            if event == "judged":
                speculation.GAMMA.run(lambda: gamma._policy.observe(round_), None)  # noqa: B023
            assert gamma.next(most) in range(max(0, min(most, 9)) + 1)
            assert 0 <= gamma.pause <= MOST_DECODED


class Broken(Policy):
    """A policy that returns or raises a given value."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer
        self.pause = answer

    def next(self, most: int) -> int:
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer

    def observe(self, round_: JudgedRound) -> None:
        raise ValueError("broken")


@pytest.mark.parametrize(
    ("answer", "gamma"),
    [(-3, 0), (99, 6), (math.nan, 4), (ValueError("no median for empty data"), 4), (None, 4)],
)
def test_a_policy_that_fails_leaves_gamma_within_bounds(answer: Any, gamma: int) -> None:
    sequence = sequence_gamma(Broken(answer))
    for _ in range(3):
        assert sequence.next(6) == sequence.gamma == gamma
        sequence.sent(None)
        sequence.judged(speculation_pb2.Verdict(judged=1))
        assert 0 <= sequence.pause <= MOST_DECODED
    assert sequence.next(3) <= 3
    assert sequence.next(0) == sequence.next(-1) == 0


def sequence_gamma(policy: Policy, *, has_beta: bool = True) -> SequenceGamma:
    return SequenceGamma(policy, Histogram("gamma", "", registry=CollectorRegistry()), default=4, has_beta=has_beta)


class Recorder(Policy):
    """Asks for four tokens, and keeps what it observes."""

    pause = 3

    def __init__(self) -> None:
        self.rounds: list[JudgedRound] = []

    def next(self, most: int) -> int:
        return min(4, most)

    def observe(self, round_: JudgedRound) -> None:
        self.rounds.append(round_)


@pytest.mark.parametrize("has_beta", [True, False])
def test_a_round_is_observed_with_the_times_that_are_its_own(monkeypatch: pytest.MonkeyPatch, has_beta: bool) -> None:
    now = 100.0
    monkeypatch.setattr("draft_service.speculation.time.perf_counter", lambda: now)
    policy = Recorder()
    sequence = sequence_gamma(policy, has_beta=has_beta)

    def judge(accepted: int, judged: int) -> None:
        nonlocal now
        now += 0.02
        sequence.judged(
            speculation_pb2.Verdict(
                judged=judged,
                accepted=accepted,
                beta=[0.5] * judged,
                timings=speculation_pb2.VerdictTimings(
                    queue_us=1000, forward_us=8000, verify_us=1000, pass_tokens=9, pass_sequences=3
                ),
                load=speculation_pb2.VerifierLoad(pass_fixed_us=2000.0, pass_token_us=50.0, active=3),
            )
        )

    def propose(drafted: int, accepted: int) -> None:
        nonlocal now
        sequence.next(16)
        now += 0.005
        sequence.sent(Proposal([7] * drafted, [], 0.005))
        judge(accepted, min(accepted + 1, drafted))

    propose(4, 2)  # the first waits for the prompt
    propose(3, 3)
    sequence.sent(None)
    judge(0, 0)
    judge(0, 0)
    propose(4, 0)  # the draft has to read what the target wrote
    propose(4, 0)
    sequence.disturbed()
    propose(4, 0)
    found = policy.rounds
    assert [(each.gamma, each.drafted, each.accepted) for each in found] == [
        (4, 4, 2), (4, 3, 3), (0, 0, 0), (0, 0, 0), (4, 4, 0), (4, 4, 0), (4, 4, 0),
    ]  # fmt: skip
    assert [None if each.overhead is None else round(each.overhead, 6) for each in found] == [
        None, 0.015, None, None, None, 0.015, None,
    ]  # fmt: skip
    assert [None if each.seconds is None else round(each.seconds, 6) for each in found] == [
        0.025, 0.025, 0.02, 0.02, None, 0.025, None,
    ]  # fmt: skip
    assert found[1].at_verifier == pytest.approx(0.01)
    assert found[1].step is not None
    assert (found[1].step.fixed, found[1].step.per_token) == pytest.approx((0.002, 50e-6))
    assert (found[1].active, found[1].tokens, found[1].sequences) == (3, 9, 3)
    assert list(found[1].beta) == ([0.5] * 3 if has_beta else [])


def request(rule: Rule = Rule.BLOCK, *, fresh: bool = True, policy: str = "adaptive", **fields: Any) -> Generation:
    return generation(rule, seed_is_fresh=fresh, policy=PolicyKind(policy), **fields)


def learn(controller: GammaController, asked: Generation) -> None:
    """A sequence of this request finds that its draft is of no use."""
    policy = controller._policy(asked)
    step = CostLine(0.01, 0.0003)
    for _ in range(max(60, 2 * FIRM_ROUNDS)):
        policy.next(16)
        policy.observe(JudgedRound(5, 5, 1, 0, (), 0.015, 0.012, step, 1, 6))
    for _ in range(12):  # and how long the target takes alone
        policy.observe(JudgedRound(0, at_verifier=0.0103, step=step, seconds=0.0103))


def first(controller: GammaController, asked: Generation) -> int:
    return controller._policy(asked).next(16)


@pytest.mark.parametrize(
    ("seeded", "adds"),
    [
        (request(fresh=False), False),
        (request(Rule.TOKENWISE, fresh=False), False),
        (request(Rule.COUPLED, fresh=False), True),
        (request(temperature=0.0, fresh=False), True),
    ],
)
def test_a_request_with_a_seed_adds_no_acceptance_where_draws_decide(seeded: Generation, adds: bool) -> None:
    """Acceptance of another request with that seed depends on draws that this one has yet to make."""
    controller = GammaController(Metrics())
    assert first(controller, seeded) == 5
    learn(controller, seeded)
    assert (first(controller, seeded) == 0) is adds
    learn(controller, replace(seeded, seed_is_fresh=True))
    assert first(controller, seeded) == 0, "it starts from what requests with fresh seeds have found"


@pytest.mark.parametrize(
    "other",
    [
        request(Rule.TOKENWISE),
        request(temperature=0.0),
        request(temperature=0.4),
        request(draft_temperature=0.5),
        request(max_entropy=1.0),
        request(drafter=Kind.LOOKUP),
    ],
)
def test_acceptance_is_shared_by_requests_of_one_kind(other: Generation) -> None:
    controller = GammaController(Metrics())
    learn(controller, request())
    assert first(controller, request()) == 0
    assert first(controller, other) >= 3
