"""Choosing γ: limits of each policy, what a sequence measures of its rounds, and which requests share statistics."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram

from draft_service import speculation
from draft_service.cost_model import CostModel, JudgedRound
from draft_service.drafters.base import Draft as Proposal
from draft_service.drafters.base import DrafterKind
from draft_service.request import CheckedRequest, PolicyKind
from draft_service.sequence import Round
from draft_service.speculation import (
    MOST_DECODED,
    Adaptive,
    Fixed,
    GammaController,
    Heuristic,
    Policy,
    SequenceGamma,
)
from draft_service.statistics import FIRM_TEXTS, AcceptanceStatistics
from kernels.verify import Rule
from outrider.service.fitted_cost import CostLine
from outrider.service.metrics import Metrics
from protos.outrider.v1 import speculation_pb2
from tests.draft_service.closed_loop import CEILING, adaptive
from tests.draft_service.records import generation


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
    policy.observe(JudgedRound(0))  # nor is a token of a Decode
    assert policy.next(CEILING) == 3


def sequence_gamma(policy: Policy, *, has_beta: bool = True) -> SequenceGamma:
    return SequenceGamma(policy, Histogram("gamma", "", registry=CollectorRegistry()), default=4, has_beta=has_beta)


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
    seconds=st.none() | numbers,
    decoded=st.integers(0, 64),
    wanted=counts,
    is_first=st.booleans(),
)


@settings(max_examples=100, derandomize=True, deadline=None)
@given(
    kind=st.sampled_from(PolicyKind),
    events=st.lists(
        st.tuples(st.sampled_from(["begin", "judged", "next"]), rounds, st.integers(-2, 20), st.integers(1, 10))
    ),
)
def test_gamma_is_within_bounds_after_any_rounds(
    kind: PolicyKind, events: list[tuple[str, JudgedRound, int, int]]
) -> None:
    shared = (AcceptanceStatistics(), CostModel())

    def begin() -> SequenceGamma:
        policies: dict[PolicyKind, Policy] = {
            PolicyKind.FIXED: Fixed(9),
            PolicyKind.HEURISTIC: Heuristic(5, ceiling=9),
            PolicyKind.ADAPTIVE: Adaptive(5, ceiling=9, statistics=shared[0], costs=shared[1]),
        }
        return sequence_gamma(policies[kind])

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
        sequence.judged(Round(1), speculation_pb2.Verdict(judged=1))
        assert 0 <= sequence.pause <= MOST_DECODED
    assert sequence.next(3) <= 3
    assert sequence.next(0) == sequence.next(-1) == 0


def play(policy: Policy, gammas: Sequence[int]) -> Iterator[int]:
    """γ of rounds whose whole proposals are accepted; 0 is a `Decode`."""
    sequence = sequence_gamma(policy)
    for drafted in gammas:
        yield sequence.next(16)
        if drafted:
            sequence.prepare()
        verdict = speculation_pb2.Verdict(judged=drafted, accepted=drafted, token_ids=[7] * (drafted + 1))
        sequence.judged(round_of(drafted, gamma=drafted), verdict)


def round_of(drafted: int, *, gamma: int = 0, sent: float = 0.0) -> Round:
    """A round with so many drafted tokens; 0 is a `Decode`."""
    return (
        Round(1, draft=Proposal([7] * drafted, [], 0.005), gamma=gamma, sent=sent) if drafted else Round(1, sent=sent)
    )


class Counting(Policy):
    """γ is the number of verdicts that the choice could see."""

    def __init__(self) -> None:
        self._seen = self._choice = 0

    def prepare(self) -> None:
        self._choice, self.is_prepared = self._seen, True

    def next(self, most: int) -> int:
        gamma, self.is_prepared = self._choice if self.is_prepared else self._seen, False
        return gamma

    def observe(self, round_: JudgedRound) -> None:
        self._seen += 1


def test_gamma_is_chosen_while_the_target_runs_and_after_a_decode_from_all_verdicts() -> None:
    assert [*play(Counting(), [0, 3, 3, 3, 0, 0, 3])] == [0, 1, 1, 2, 3, 5, 6]
    assert [*play(Heuristic(5, ceiling=16), [5, 7, 9])] == [5, 7, 9], "it sees the last verdict"


def test_the_adaptive_policy_uses_a_prepared_choice_once() -> None:
    (policy,) = adaptive()
    policy.prepare()
    policy._gamma = 2  # the choice before the first measurement, and γ changes by 2 at most
    assert (policy.is_prepared, policy.next(CEILING), policy.is_prepared) == (True, 4, False)


class Recorder(Fixed):
    """Four tokens a round; keeps the rounds that it observes."""

    def __init__(self) -> None:
        super().__init__(4)
        self.rounds: list[JudgedRound] = []

    def observe(self, round_: JudgedRound) -> None:
        self.rounds.append(round_)


@pytest.mark.parametrize("has_beta", [True, False])
def test_a_round_is_measured_without_the_time_of_other_work(monkeypatch: pytest.MonkeyPatch, has_beta: bool) -> None:
    now = 100.0
    monkeypatch.setattr("draft_service.speculation.time.perf_counter", lambda: now)
    policy = Recorder()
    sequence = sequence_gamma(policy, has_beta=has_beta)
    cases = [  # drafted and accepted tokens; measured overhead and seconds
        (4, 2, 0.015, 0.025),  # the first, which may hold the prompt
        (3, 3, 0.015, 0.025),
        (0, 0, None, 0.02),
        (0, 0, None, 0.02),
        (4, 0, None, None),  # the draft first reads the tokens of the Decode
        (4, 0, 0.015, 0.025),
        (4, 0, None, None),  # after `disturbed`
    ]
    for number, (drafted, accepted, _, _) in enumerate(cases):
        if number == len(cases) - 1:
            sequence.disturbed()
        if drafted:
            sequence.next(16)
            now += 0.005
        round_ = round_of(drafted, gamma=4 if drafted else 0, sent=now)
        now += 0.02
        judged = min(accepted + 1, drafted)
        timings = speculation_pb2.VerdictTimings(
            queue_us=1000, forward_us=8000, verify_us=1000, pass_tokens=9, pass_sequences=3
        )
        load = speculation_pb2.VerifierLoad(pass_fixed_us=2000.0, pass_token_us=50.0, active=3)
        beta = [0.5] * judged
        verdict = speculation_pb2.Verdict(judged=judged, accepted=accepted, beta=beta, timings=timings, load=load)
        sequence.judged(round_, verdict)
    sequence.learn()
    for found, (drafted, accepted, overhead, seconds) in zip(policy.rounds, cases, strict=True):
        assert (found.gamma, found.drafted, found.accepted) == (4 if drafted else 0, drafted, accepted)
        assert found.is_first is (found is policy.rounds[0])
        assert found.wanted == (4 if drafted else 0), (
            "the policy is not asked for a Decode while a drafter is in backoff"
        )
        assert found.overhead == (None if overhead is None else pytest.approx(overhead))
        assert found.seconds == (None if seconds is None else pytest.approx(seconds))
        assert seconds is None or found.drafting == pytest.approx(0.005 if drafted else 0.0)
        assert found.at_verifier == pytest.approx(0.01)
        assert found.step is not None
        assert (found.step.fixed, found.step.per_token) == pytest.approx((0.002, 50e-6))
        assert (found.active, found.tokens, found.sequences) == (3, 9, 3)
        assert list(found.beta) == ([0.5] * found.judged if has_beta else [])


def request(rule: Rule = Rule.BLOCK, *, fresh: bool = True, **fields: Any) -> CheckedRequest:
    return generation(rule, seed_is_fresh=fresh, **fields)


def learn(controller: GammaController, request_: CheckedRequest) -> None:
    """Observe rounds that accept nothing, so that drafting does not pay for such requests."""
    step = CostLine(0.01, 0.0003)
    for _ in range(FIRM_TEXTS):
        policy = controller._policy(request_, lambda: 0)
        for _ in range(20):
            policy.next(16)
            policy.observe(JudgedRound(5, 5, 1, 0, (), 0.015, 0.012, step, 1, 6))
    for _ in range(12):  # and the target alone
        policy.observe(JudgedRound(0, at_verifier=0.0103, step=step, seconds=0.0103))


def first(controller: GammaController, request_: CheckedRequest) -> int:
    return controller._policy(request_, lambda: 0).next(16)


def test_adaptive_policies_use_the_times_of_requests_with_a_fixed_gamma() -> None:
    controller, step = GammaController(Metrics()), CostLine(0.01, 0.0003)
    fixed, alone = (request(policy=PolicyKind.FIXED, gamma=gamma) for gamma in (4, 0))
    assert first(controller, request()) == 5
    for _ in range(60):  # a draft of 100 ms
        controller._policy(fixed, lambda: 0).observe(JudgedRound(4, 4, 4, 4, (), 0.1, 0.012, step, 1, 5, 1, 0.112))
    for _ in range(12):
        controller._policy(alone, lambda: 0).observe(JudgedRound(0, step=step, seconds=0.0103))
    assert first(controller, request(fresh=False)) == 0
    assert first(controller, request()) > 0, "acceptance is not known"


@pytest.mark.parametrize(
    ("seeded", "shares"),
    [
        (request(fresh=False), False),
        (request(Rule.TOKENWISE, fresh=False), False),
        (request(Rule.COUPLED, fresh=False), True),
        (request(temperature=0.0, fresh=False), True),
    ],
)
def test_a_request_with_a_seed_shares_no_acceptance_where_draws_decide(seeded: CheckedRequest, shares: bool) -> None:
    """Acceptance of a request depends on draws that another one with its seed makes later. A seed that was fresh is
    given when the client continues.
    """
    controller = GammaController(Metrics())
    assert first(controller, seeded) == 5
    learn(controller, seeded)
    assert (first(controller, seeded) == 0) is shares
    learn(controller, replace(seeded, draft_sequence=replace(seeded.draft_sequence, seed_is_fresh=True)))
    assert (first(controller, seeded) == 0) is shares


@pytest.mark.parametrize(
    "other",
    [
        request(Rule.TOKENWISE),
        request(temperature=0.0),
        request(temperature=0.4),
        request(draft_temperature=0.5),
        request(max_entropy=1.0),
        request(drafter=DrafterKind.LOOKUP),
    ],
)
def test_requests_of_another_kind_share_no_acceptance(other: CheckedRequest) -> None:
    controller = GammaController(Metrics())
    learn(controller, request())
    assert first(controller, request()) == 0
    assert first(controller, other) >= 3
