"""Every policy of how long to speculate, through both services: the text keeps the target's distribution or tokens.

The target is the Markov one, so that each of the 1,664 tokens of 64 texts is a sample: over the rank classes of each
token before (some 47 degrees of freedom) they notice a total variation of 0.09 at a level of 1 % with a power of 95 %
(`chisquare` has the derivation), and 16,384 (`-m slow`) one of 0.03. `adaptive` runs restlessly
(`faults.restless_lengths`): its γ follows the last few rounds of its own text as closely as it can, on times that are
given, so that it does not settle where nothing shows. The mutants let the length of a proposal depend on what has been
drafted (invariant 4).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outrider.client import Client, Completion, Options, SpeculationPolicy
from tests.cluster import Cluster, Service, wait_healthy
from tests.exactness import chisquare, pairs, sampling
from tests.exactness.chisquare import Fit
from tests.exactness.sampling import Run
from tests.exactness.worlds import FILTERS, World, sampled_fits

PROMPT = (14,)
CEILING = 6
UNSURE = 1.2  # nats; about half of the draft's distributions are above it
LEVEL = 0.01
REFUTED = 1e-9
POLICIES = [policy for policy in SpeculationPolicy if policy is not SpeculationPolicy.UNSPECIFIED]


@pytest.fixture(scope="module")
def restless(markov: World, sharpened: Path) -> Iterator[Service]:
    with markov.with_fault(sharpened, "draft_service", "restless_lengths") as service:
        yield service


def _fits(service: Service, world: World, *, length: int, **asked: Any) -> tuple[Run, Fit, Fit]:
    return sampled_fits(service, world.target, PROMPT, filters=FILTERS, gamma=CEILING, length=length, **asked)


def _write(service: Service, **options: object) -> Completion:
    asked = Options(max_new_tokens=64, ignore_eos=True, seed=41, gamma=CEILING, report_rounds=True)
    asked.update(options)  # type: ignore[typeddict-item]
    with Client(service.address) as client:
        return client.complete(PROMPT, **asked)


def _lengths(done: Completion) -> Counter[int]:
    return Counter(len(round_.drafted_token_ids) for sample in done.samples for round_ in sample.rounds)


@pytest.mark.parametrize(("length", "distance"), [(26, 0.09), pytest.param(256, 0.03, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("options", "rule"),
    [({}, "tokenwise"), ({}, "block"), ({"max_entropy": UNSURE}, "block")],
    ids=["adaptive, tokenwise", "adaptive, block", "with a bound on entropy, block"],
)
def test_the_distribution_is_the_targets_while_lengths_follow_what_was_accepted(
    options: dict[str, Any], rule: str, length: int, distance: float, restless: Service, markov: World
) -> None:
    seed = 900 + 10 * len(options) + (rule == "block")
    asked: dict[str, Any] = {"length": length, "seed": seed, "rule": rule, "speculation": "adaptive", **options}
    run, outcomes, classes = _fits(restless, markov, **asked)
    assert 0.1 * run.drafted < run.accepted < 0.95 * run.drafted
    assert chisquare.detectable(classes.df, classes.n, level=LEVEL, power=0.95) <= distance
    assert min(outcomes.p_value, classes.p_value) > LEVEL


def test_lengths_do_follow_what_was_accepted(restless: Service) -> None:
    """The tests above would say little of a γ that stays where it is."""
    done = _write(restless, speculation="adaptive", rule="tokenwise", n=8)
    lengths = _lengths(done)
    assert len(lengths) >= 4
    assert min(lengths) == 0
    bounded = _write(restless, speculation="fixed", rule="tokenwise", n=8, max_entropy=UNSURE)
    assert len(_lengths(bounded)) >= 4
    assert sum(sample.statistics.num_short_drafts for sample in bounded.samples) > 10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "options"),
    [
        ("unsure_after_sampling", {"rule": "tokenwise", "length": 96, "max_entropy": UNSURE}),
        ("unsure_after_sampling", {"rule": "block", "length": 96, "max_entropy": UNSURE}),
        ("restless_lengths_after_drafting", {"rule": "tokenwise", "length": 200, "speculation": "adaptive"}),
    ],
    ids=str,
)
def test_a_length_that_looks_at_what_was_drafted_is_noticed(
    fault: str, options: dict[str, Any], markov: World, sharpened: Path
) -> None:
    with markov.with_fault(sharpened, "draft_service", fault) as service:
        _, outcomes, classes = _fits(service, markov, seed=5, **options)
    assert min(outcomes.p_value, classes.p_value) < REFUTED


# ----------------------------------------------------------------------------------------------------- the same tokens


@pytest.fixture(scope="module")
def attentive_restless(
    cluster: Cluster, attentive: World, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    draft = pairs.write_draft(tmp_path_factory.mktemp("flattened"), attentive.target, "flattened")
    service = cluster.draft(attentive.verifier, model=draft, fault="restless_lengths", flags=sampling.DRAFT_FLAGS)
    wait_healthy(service)
    yield service
    service.end()


@pytest.mark.parametrize("options", [{"rule": "coupled"}, {"temperature": 0.0, "presence_penalty": 0.5}], ids=str)
def test_the_tokens_are_the_same_with_every_policy(options: dict[str, object], attentive_restless: Service) -> None:
    alone = _write(attentive_restless, **options | {"gamma": 0})
    assert alone.statistics.num_drafts == 0
    accepted, lengths = 0, set[int]()
    for policy in POLICIES:
        for bound in (None, 1.5):
            text = _write(attentive_restless, speculation=policy, max_entropy=bound, **options)
            assert text.token_ids == alone.token_ids
            assert text.statistics.policy == policy
            assert text.statistics.num_drafts > 0
            accepted += text.statistics.num_accepted_tokens
            lengths |= _lengths(text).keys()
    assert accepted > 0
    assert len(lengths) >= 4
