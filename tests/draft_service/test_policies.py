"""Policies of how long to speculate, asked for at the draft service: which one a request gets, and what is refused."""

import math
from typing import Any

import pytest

from outrider.client import Client, SpeculationPolicy
from tests.draft_service import oracle
from tests.draft_service.calls import PROMPT

TOKENS = 28


@pytest.fixture(scope="module")
def client(pair_process: Any) -> Any:
    with Client(pair_process.address) as client:
        yield client


def _lengths(sample: Any) -> list[int]:
    return [len(round_.drafted_token_ids) for round_ in sample.rounds]


@pytest.mark.parametrize(
    ("asked", "policy"),
    [
        ({}, SpeculationPolicy.ADAPTIVE),
        ({"gamma": 3}, SpeculationPolicy.FIXED),
        ({"speculation": "fixed"}, SpeculationPolicy.FIXED),
        ({"gamma": 3, "speculation": "heuristic"}, SpeculationPolicy.HEURISTIC),
        ({"speculation": "adaptive"}, SpeculationPolicy.ADAPTIVE),
    ],
)
def test_a_policy_is_what_is_named_and_gamma_alone_is_kept(
    asked: dict[str, Any], policy: SpeculationPolicy, client: Client
) -> None:
    done = client.complete(PROMPT, max_new_tokens=TOKENS, ignore_eos=True, temperature=0, report_rounds=True, **asked)
    assert done.statistics.policy == policy
    assert list(done.token_ids) == oracle.greedy(oracle.encode(PROMPT), TOKENS)
    lengths = _lengths(done.samples[0])
    assert max(lengths) <= asked.get("gamma", 16)
    if policy is SpeculationPolicy.FIXED:
        left = [TOKENS - round_.output_length - 1 for round_ in done.samples[0].rounds]
        assert lengths == [min(asked.get("gamma", 5), most) for most in left]
        assert done.statistics.mean_gamma == pytest.approx(sum(lengths) / len(lengths))
        assert lengths[0] == asked.get("gamma", 5)


def test_a_seed_under_a_rule_that_draws_is_the_same_text_again(client: Client) -> None:
    """So its lengths are fixed, unless the request says otherwise; under `coupled` they do not matter."""
    how: dict[str, Any] = {"max_new_tokens": TOKENS, "ignore_eos": True, "seed": 12}
    for rule in ("tokenwise", "block"):
        texts = [client.complete(PROMPT, rule=rule, **how) for _ in range(2)]
        assert texts[0].token_ids == texts[1].token_ids
        assert {text.statistics.policy for text in texts} == {SpeculationPolicy.FIXED}
        named = client.complete(PROMPT, rule=rule, speculation="adaptive", **how)
        assert named.statistics.policy == SpeculationPolicy.ADAPTIVE
    assert client.complete(PROMPT, **how).statistics.policy == SpeculationPolicy.ADAPTIVE
    assert client.complete(PROMPT, max_new_tokens=4).statistics.policy == SpeculationPolicy.ADAPTIVE


def test_a_bound_on_entropy_shortens_proposals_and_says_so(client: Client) -> None:
    how: dict[str, Any] = {"max_new_tokens": TOKENS, "ignore_eos": True, "gamma": 8, "report_rounds": True, "seed": 3}
    samplings: list[dict[str, Any]] = [{"temperature": 1.0}, {"temperature": 0.0}, {"presence_penalty": 0.2}]
    for sampling in samplings:
        free = client.complete(PROMPT, **how, **sampling)
        bounded = client.complete(PROMPT, max_entropy=0.5, **how, **sampling)
        unbounded = client.complete(PROMPT, max_entropy=math.inf, **how, **sampling)
        assert bounded.token_ids == free.token_ids == unbounded.token_ids
        assert unbounded.statistics.num_short_drafts == free.statistics.num_short_drafts == 0
        assert bounded.statistics.num_short_drafts > 2
        assert bounded.statistics.num_draft_tokens < free.statistics.num_draft_tokens
        assert bounded.statistics.draft_acceptance_rate > free.statistics.draft_acceptance_rate
        assert min(_lengths(bounded.samples[0])[:-2]) >= 1
