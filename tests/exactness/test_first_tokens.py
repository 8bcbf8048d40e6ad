"""The joint distribution of the first three tokens, through both services over gRPC, against exact enumeration.

Random weights over 24 tokens, temperature 1, top-k 20, top-p 0.9; three bad drafts; γ of 1, 2 and 4, so that three
tokens take one to three rounds. N = 2,112 texts, 704 for each draft.

Power (`chisquare` has the derivation): over the 27 rank classes, at a level of 1 %, λ = 42.5 is passed with 95 %; so
N = λ/(4 · 0.072²) = 2,050 texts detect any total variation of 0.072 there, and one draft's 704 detect 0.13. Over the
single outcomes, some 250 cells, the same N detects 0.11. `-m slow` goes down to 0.01. Enumeration in `tests/kernels`
proves the other rules; here 448 texts, which detect 0.16, show that the services use them.
"""

from __future__ import annotations

import numpy as np
import pytest

from outrider.evaluation import chisquare
from outrider.evaluation.chisquare import Array
from tests.exactness import sampling
from tests.exactness.distributions import first_token_fits, joint_distribution
from tests.exactness.pairs import BAD_DRAFTS
from tests.exactness.sampling import SAMPLES, Run
from tests.exactness.services import PairServices

PROMPT = (15, 12, 14)
LENGTHS = {1: 3, 2: 3, 4: 5}
"""Tokens to write for each γ: a proposal is at most as long as the rest of the text, less one."""
REQUESTS = {1: 4, 2: 4, 4: 3}
"""Of each draft for each γ: those at γ = 4 cost twice as much."""
LEVEL = 0.01


def write(services: PairServices, kind: str, gamma: int, samples: int, *, seed: int, rule: str = "tokenwise") -> Run:
    service, length = services.draft(kind), LENGTHS.get(gamma, 3)
    return sampling.sample(service, PROMPT, length=length, samples=samples, gamma=gamma, seed=seed, rule=rule)


@pytest.fixture(scope="module")
def joint(attentive: PairServices) -> Array:
    return joint_distribution(attentive.target, PROMPT)


def test_the_first_three_tokens_are_distributed_as_the_targets(attentive: PairServices, joint: Array) -> None:
    """With each of the drafts as well, at a tenth of the level, since there are several."""
    tokens = {}
    for number, kind in enumerate(BAD_DRAFTS):
        # Each has its own seed: texts of one seed share the verifier's draws.
        runs = [
            write(attentive, kind, gamma, SAMPLES * requests, seed=10 * number + gamma)
            for gamma, requests in REQUESTS.items()
        ]
        for run in runs:  # several rounds, with drafts accepted and rejected
            assert run.rounds > 1.4 * len(run.tokens)
            assert 0.005 * run.drafted < run.accepted < 0.9 * run.drafted
        tokens[kind] = np.concatenate([run.tokens[:, :3] for run in runs])
    outcomes, classes = first_token_fits(joint, np.concatenate(list(tokens.values())))
    assert chisquare.detectable(classes.df, classes.n, level=LEVEL, power=0.95) <= 0.072
    assert min(classes.p_value, outcomes.p_value) > LEVEL
    for kind in BAD_DRAFTS:
        assert min(fit.p_value for fit in first_token_fits(joint, tokens[kind])) > LEVEL / 10, kind


def test_without_a_draft_the_distribution_is_the_same(attentive: PairServices, joint: Array) -> None:
    run = write(attentive, "uniform", 0, 7 * SAMPLES, seed=99)
    assert run.drafted == 0
    assert min(fit.p_value for fit in first_token_fits(joint, run.tokens)) > LEVEL


@pytest.mark.parametrize(("requests", "distance"), [(7, 0.16), pytest.param(70, 0.05, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("rule", "seed"), [("block", 300), ("coupled", 500)])
def test_the_distribution_is_the_same_by_other_rules(
    rule: str, seed: int, requests: int, distance: float, attentive: PairServices, joint: Array
) -> None:
    run = write(attentive, "uniform", 4, requests * SAMPLES, seed=seed, rule=rule)
    outcomes, classes = first_token_fits(joint, run.tokens)
    assert 0.1 * run.drafted < run.accepted < 0.9 * run.drafted
    assert chisquare.detectable(classes.df, classes.n, level=LEVEL, power=0.95) <= distance
    assert min(outcomes.p_value, classes.p_value) > LEVEL


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_the_distribution_is_the_targets_to_a_hundredth(attentive: PairServices, joint: Array) -> None:
    """162,432 texts: by class they detect 0.01 at a level of 0.1 % with a power of 99 %."""
    tokens = [
        write(attentive, kind, gamma, 18_048, seed=1000 + 10 * number + gamma).tokens[:, :3]
        for number, kind in enumerate(BAD_DRAFTS)
        for gamma in LENGTHS
    ]
    outcomes, classes = first_token_fits(joint, np.concatenate(tokens))
    assert chisquare.detectable(classes.df, classes.n, level=1e-3, power=0.99) <= 0.01
    assert min(classes.p_value, outcomes.p_value) > 1e-3
