"""The joint distribution of the first three tokens, through both services over gRPC, against exact enumeration.

Random weights over 24 tokens, temperature 1, top-k 20, top-p 0.9; three drafts that are bad on purpose; γ of 1, 2 and
4, so that three tokens take one to three rounds. N = 2,112 texts, 704 for each draft.

Power (`chisquare` has the derivation): over the 27 rank classes, at a level of 1 %, λ = 42.5 is passed with 95 %; so
N = λ/(4 · 0.072²) = 2,050 texts notice any total variation of 0.072 there, and one draft's 704 notice 0.13. Over the
single outcomes, some 250 cells, the same N notices 0.11. `-m slow` goes down to 0.01. The rules beside `tokenwise` are
proven by enumeration beside the kernels; here 448 texts, which notice 0.16, show that the services carry them.
"""

from __future__ import annotations

import numpy as np
import pytest

from outrider.client import AcceptanceRule, Client, Started
from tests.exactness import chisquare, sampling
from tests.exactness.chisquare import Array
from tests.exactness.pairs import BAD_DRAFTS
from tests.exactness.sampling import Run
from tests.exactness.worlds import FILTERS, World, first_token_fits, joint_distribution

PROMPT = (15, 12, 14)
LENGTHS = {1: 3, 2: 3, 4: 5}
"""Tokens to write for each γ: a proposal is never longer than what may still be written, less one."""
SAMPLES = {gamma: requests * sampling.SAMPLES_PER_REQUEST for gamma, requests in {1: 4, 2: 4, 4: 3}.items()}
"""Texts of each draft for each γ: those at γ = 4 cost twice as much."""
LEVEL = 0.01
POWER = 0.95
DISTANCE = 0.072

Runs = dict[tuple[str, int], Run]


def _write(world: World, kind: str, gamma: int, samples: int, *, seed: int, rule: str = "tokenwise") -> Run:
    return sampling.sample(
        world.service(kind).address,
        PROMPT,
        length=LENGTHS.get(gamma, 3),
        samples=samples,
        filters=FILTERS,
        gamma=gamma,
        seed=seed,
        rule=rule,
    )


@pytest.fixture(scope="module")
def joint(attentive: World) -> Array:
    return joint_distribution(attentive.target, PROMPT)


@pytest.fixture(scope="module")
def runs(attentive: World) -> Runs:
    """What every draft and γ wrote, with seeds of their own: texts of one seed share the verifier's draws."""
    return {
        (kind, gamma): _write(attentive, kind, gamma, SAMPLES[gamma], seed=10 * number + gamma)
        for number, kind in enumerate(BAD_DRAFTS)
        for gamma in LENGTHS
    }


def test_the_first_three_tokens_are_distributed_as_the_targets(runs: Runs, joint: Array) -> None:
    """With each of the drafts as well: at a tenth of the level, being one of several."""
    tokens = {kind: np.concatenate([runs[kind, gamma].tokens[:, :3] for gamma in LENGTHS]) for kind in BAD_DRAFTS}
    outcomes, classes = first_token_fits(joint, np.concatenate(list(tokens.values())))
    assert chisquare.detectable(classes.df, classes.n, level=LEVEL, power=POWER) <= DISTANCE
    assert min(classes.p_value, outcomes.p_value) > LEVEL
    for kind in BAD_DRAFTS:
        assert min(fit.p_value for fit in first_token_fits(joint, tokens[kind])) > LEVEL / 10, kind


def test_the_texts_took_several_rounds_of_drafts_accepted_and_rejected(runs: Runs) -> None:
    for (kind, gamma), run in runs.items():
        print(f"{kind}, γ = {gamma}: {run}")
        assert run.rounds > 1.4 * len(run.tokens)
        assert 0.005 * run.drafted < run.accepted < 0.9 * run.drafted


def test_without_a_draft_the_distribution_is_the_same(attentive: World, joint: Array) -> None:
    run = _write(attentive, "uniform", 0, 7 * sampling.SAMPLES_PER_REQUEST, seed=99)
    assert run.drafted == 0
    assert min(fit.p_value for fit in first_token_fits(joint, run.tokens)) > LEVEL


@pytest.mark.parametrize(("requests", "distance"), [(7, 0.16), pytest.param(70, 0.05, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("rule", "seed"), [("block", 300), ("coupled", 500)])
def test_the_distribution_is_the_same_by_other_rules(
    rule: str, seed: int, requests: int, distance: float, attentive: World, joint: Array
) -> None:
    samples = requests * sampling.SAMPLES_PER_REQUEST
    run = _write(attentive, "uniform", 4, samples, seed=seed, rule=rule)
    print(run)
    outcomes, classes = first_token_fits(joint, run.tokens)
    assert 0.1 * run.drafted < run.accepted < 0.9 * run.drafted
    assert chisquare.detectable(classes.df, classes.n, level=LEVEL, power=POWER) <= distance
    assert min(outcomes.p_value, classes.p_value) > LEVEL


def test_the_rule_is_the_one_asked_for(attentive: World) -> None:
    with Client(attentive.service("uniform").address) as client:
        for rule in (AcceptanceRule.BLOCK, AcceptanceRule.TOKENWISE):
            events = list(client.generate(PROMPT, max_new_tokens=2, seed=1, rule=rule))
            assert [event.rule for event in events if isinstance(event, Started)] == [rule]


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_the_distribution_is_the_targets_to_a_hundredth(attentive: World, joint: Array) -> None:
    """162,432 texts: by class they notice 0.01 at a level of 0.1 % with a power of 99 %."""
    written = []
    for number, kind in enumerate(BAD_DRAFTS):
        for gamma in LENGTHS:
            run = _write(attentive, kind, gamma, 18_048, seed=1000 + 10 * number + gamma)
            print(f"{kind}, γ = {gamma}: {run}")
            written.append(run.tokens[:, :3])
    outcomes, classes = first_token_fits(joint, np.concatenate(written))
    assert chisquare.detectable(classes.df, classes.n, level=1e-3, power=0.99) <= 0.01
    assert min(classes.p_value, outcomes.p_value) > 1e-3
