"""What a request's policy knows, and what it is told of the rounds: times that are of a round alone, and all of it."""

import time
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Histogram

from draft_service.adaptive import Adaptive
from draft_service.drafters.base import Draft, Foresight, Kind
from draft_service.lengths import Lengths, SampleLengths
from draft_service.privacy import RoundSizes
from draft_service.request import Generation
from draft_service.speculation import Fixed, Heuristic, Policy, PolicyKind, Round
from kernels.adjustments import LogitRules
from kernels.sampling import SamplingParams
from kernels.verify import Rule
from outrider.service.cost_model import CostLine
from outrider.service.metrics import Metrics
from outrider.service.sampling import Sampling
from protos.outrider.v1 import sampling_pb2, speculation_pb2


def request(
    rule: Rule = Rule.BLOCK, *, fresh: bool = True, temperature: float = 1.0, policy: str = "adaptive", **fields: Any
) -> Generation:
    sampling = Sampling(SamplingParams(temperature=temperature), LogitRules(), rule, 1.0, 7)
    plain = Generation(
        request_id="r",
        prompt=[1],
        committed=[],
        held=0,
        sampling=sampling,
        params=sampling_pb2.SamplingParams(),
        seed=7,
        max_new_tokens=64,
        min_new_tokens=0,
        stop_token_ids=[],
        stop=(),
        ignore_eos=True,
        samples=1,
        top_logprobs=None,
        time_limit=None,
        policy=PolicyKind(policy),
        gamma=12,
        first_gamma=5,
        max_entropy=None,
        drafter=Kind.MODEL,
        draft_temperature=None,
        outcome_cache=True,
        seed_is_fresh=fresh,
        report_rounds=False,
        keep_special_tokens=False,
        weights_fingerprint="",
        cache_salt="",
        emission=None,
        round_sizes=RoundSizes(),
    )
    return replace(plain, **fields)


def learn(lengths: Lengths, asked: Generation) -> None:
    """A sample of this request finds that its draft is of no use."""
    policy = lengths._policy(asked)
    policy.next(16)
    for _ in range(60):
        policy.observe(Round(5, 5, 1, 0, (), 0.005, 0.02, 6, CostLine(0.01, 0.001)))


def first(lengths: Lengths, asked: Generation) -> int:
    return lengths._policy(asked).next(16)


def test_each_policy_is_the_one_named() -> None:
    lengths = Lengths(Metrics())
    kinds: dict[str, type[Policy]] = {"fixed": Fixed, "heuristic": Heuristic, "adaptive": Adaptive}
    for name, kind in kinds.items():
        policy = lengths._policy(request(policy=name))
        assert isinstance(policy, kind)
        assert policy.next(16) == (12 if name == "fixed" else 5)


@pytest.mark.parametrize(
    ("asked", "knows"),
    [
        (request(), True),
        (request(fresh=False), False),
        (request(Rule.TOKENWISE, fresh=False), False),
        (request(Rule.COUPLED, fresh=False), True),
        (request(temperature=0.0, fresh=False), True),
    ],
)
def test_where_a_seed_may_have_been_had_before_nothing_is_known_of_acceptance(asked: Generation, knows: bool) -> None:
    """Under rules that draw: what others taught depends on draws to come, if one of them had that seed."""
    lengths = Lengths(Metrics())
    assert first(lengths, asked) == 5
    learn(lengths, replace(asked, seed_is_fresh=True))
    assert (first(lengths, asked) == 0) is knows
    learn(lengths, replace(asked, seed_is_fresh=False))
    assert (first(lengths, asked) == 0) is knows


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
def test_what_is_learned_is_of_one_kind_of_requests(other: Generation) -> None:
    lengths = Lengths(Metrics())
    learn(lengths, request())
    assert first(lengths, request()) == 0
    assert first(lengths, other) >= 3


class Watched(Policy):
    """Asks for four tokens, and keeps what it is told."""

    pause = 3

    def __init__(self) -> None:
        self.rounds: list[Round] = []

    def next(self, most: int) -> int:
        return min(4, most)

    def observe(self, round_: Round) -> None:
        self.rounds.append(round_)


def verdict(accepted: int, judged: int, **fields: Any) -> speculation_pb2.Verdict:
    return speculation_pb2.Verdict(
        judged=judged,
        accepted=accepted,
        beta=[0.5] * judged,
        timings=speculation_pb2.VerdictTimings(pass_tokens=9),
        load=speculation_pb2.VerifierLoad(**fields),
    )


def test_a_policy_is_told_of_each_round_and_of_times_that_are_its_own() -> None:
    histogram = Histogram("gamma", "of a test", registry=CollectorRegistry(), buckets=(0, 4, 8))
    policy = Watched()
    lengths = SampleLengths(policy, histogram, tells_chances=True)
    assert lengths.pause == 3

    def proposal(drafted: int, accepted: int, foresight: Foresight | None = None, **fields: Any) -> None:
        assert lengths.next(16) == 4
        time.sleep(0.01)
        lengths.sent(Draft([7] * drafted, [], 0.01, foresight))
        time.sleep(0.02)
        lengths.observe(verdict(accepted, min(accepted + 1, drafted), **fields))

    begun = time.perf_counter()
    proposal(4, 2)  # has waited for the prompt
    proposal(3, 3, pass_fixed_us=2000.0, pass_token_us=50.0)
    both_took = time.perf_counter() - begun
    lengths.sent(None)
    for _ in range(2):
        time.sleep(0.01)
        lengths.observe(verdict(0, 0))
    proposal(4, 0, Foresight(9, 3, hit=True, saved_seconds=0.01))  # the draft has read what the target wrote
    proposal(4, 0, Foresight(9, 6, hit=True, saved_seconds=0.01))  # more was there than was asked for
    rounds = policy.rounds
    assert [(each.asked, each.drafted, each.accepted) for each in rounds] == [
        (4, 4, 2), (4, 3, 3), (0, 0, 0), (0, 0, 0), (4, 4, 0), (4, 4, 0),
    ]  # fmt: skip
    assert [each.foreseen for each in rounds] == [0, 0, 0, 0, 3, 4]
    assert [each.drafting is None for each in rounds] == [True, False, True, True, True, False]
    assert [each.waited is None for each in rounds] == [True, False, True, False, False, False]
    assert rounds[1].drafting is not None
    assert rounds[1].waited is not None
    # At least what was slept; and no more than there was from the verdict before, of which each is a part of its own.
    assert rounds[1].drafting >= 0.01
    assert rounds[1].waited >= 0.02
    assert rounds[1].drafting + rounds[1].waited <= both_took - 0.03
    assert rounds[1].pass_cost is not None
    assert (rounds[1].pass_cost.fixed, rounds[1].pass_cost.per_token) == pytest.approx((0.002, 50e-6))
    assert rounds[0].pass_cost is None
    assert (list(rounds[1].chances), rounds[1].pass_tokens) == ([0.5] * 3, 9)
    counts = {sample.labels.get("le"): sample.value for metric in histogram.collect() for sample in metric.samples}
    assert (counts["0.0"], counts["4.0"], counts["8.0"]) == (2, 6, 6)


def test_where_the_chances_are_not_those_of_the_rule_they_are_not_told() -> None:
    histogram = Histogram("gamma", "of a test", registry=CollectorRegistry())
    policy = Watched()
    lengths = SampleLengths(policy, histogram, tells_chances=False)
    lengths.next(2)
    lengths.sent(Draft([7, 8], [], 0.01))
    lengths.observe(verdict(1, 2))
    assert list(policy.rounds[0].chances) == []
