"""Texts of a target that attends, through both services over gRPC: the joint distribution of each three tokens.

Random weights over 24 tokens, temperature 1, top-k 20, top-p 0.9; three bad drafts; γ of 1, 2 and 4. The target's own
distribution along each text says in which of three classes, of equal mass, each token lies (`distributions`).

Power (`chisquare` has the derivation): over the 27 classes of three tokens, at a level of 1 %, λ = 42.5 is passed with
95 %; so N = λ/(4 · 0.072²) = 2,050 times three tokens detect any total variation of 0.072 there, and one draft's 768
detect 0.13. After each token the same texts detect a mean of 0.05 by class and of 0.08 token by token; over 24 cells of
all tokens 0.04. `-m slow` goes down to 0.01. Enumeration in `tests/kernels` proves the other rules; here 448 times
three tokens, which detect 0.16, show that the services use them.
"""

from typing import Any

import numpy as np
import pytest

from outrider.evaluation import chisquare
from outrider.evaluation.chisquare import Fit
from tests.exactness import sampling
from tests.exactness.distributions import along, fits_after_each, quantile_fits, quantiles
from tests.exactness.pairs import BAD_DRAFTS
from tests.exactness.sampling import SAMPLES, Run
from tests.exactness.services import PairServices

PROMPT = (15, 12, 14)
GAMMAS = (1, 2, 4)
LENGTH, LONGER = 12, 21
LEVEL = 0.01


def write(services: PairServices, kind: str, gamma: int, *, seed: int, length: int = LENGTH, **options: Any) -> Run:
    return sampling.sample(services.draft(kind), PROMPT, length=length, gamma=gamma, seed=seed, **options)


def fits(services: PairServices, *runs: Run) -> tuple[Fit, Fit]:
    tokens = np.concatenate([run.tokens for run in runs])
    return quantile_fits(quantiles(along(services.target, PROMPT, tokens), tokens), 3)


def test_each_three_tokens_are_distributed_as_the_targets(attentive: PairServices) -> None:
    """Each draft's and the first three as well, at a tenth of the level, since there are several."""
    # Each has its own seed: texts of one seed share the verifier's draws.
    runs = [
        write(attentive, kind, gamma, seed=10 * number + gamma)
        for number, kind in enumerate(BAD_DRAFTS)
        for gamma in GAMMAS
    ]
    for run in runs:  # several rounds, with drafts accepted and rejected
        assert run.rounds > 1.4 * len(run.tokens)
        assert 0.005 * run.drafted < run.accepted < 0.9 * run.drafted
    tokens = np.concatenate([run.tokens for run in runs])
    p = along(attentive.target, PROMPT, tokens)
    found = quantiles(p, tokens)
    (cells, classes), after_each = quantile_fits(found, 3), fits_after_each(p, tokens, PROMPT[-1], found)
    for fit, distance in zip((cells, classes, *after_each), (0.04, 0.072, 0.08, 0.05), strict=True):
        assert chisquare.detectable(fit.df, fit.n, level=LEVEL, power=0.95) <= distance
        assert fit.p_value > LEVEL
    for part in (*np.split(found, len(BAD_DRAFTS)), found[:, :3]):
        assert min(fit.p_value for fit in quantile_fits(part, 3)) > LEVEL / 10


def test_without_a_draft_the_distribution_is_the_same(attentive: PairServices) -> None:
    run = write(attentive, "uniform", 0, seed=99, length=LONGER)
    assert run.drafted == 0
    assert min(fit.p_value for fit in fits(attentive, run)) > LEVEL


@pytest.mark.parametrize(("requests", "distance"), [(1, 0.16), pytest.param(10, 0.05, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("rule", "seed"), [("block", 300), ("coupled", 500)])
def test_the_distribution_is_the_same_by_other_rules(
    rule: str, seed: int, requests: int, distance: float, attentive: PairServices
) -> None:
    run = write(attentive, "uniform", 4, seed=seed, length=LONGER, samples=requests * SAMPLES, rule=rule)
    cells, classes = fits(attentive, run)
    assert 0.1 * run.drafted < run.accepted < 0.9 * run.drafted
    assert chisquare.detectable(classes.df, classes.n, level=LEVEL, power=0.95) <= distance
    assert min(cells.p_value, classes.p_value) > LEVEL


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_the_distribution_is_the_targets_to_a_hundredth(attentive: PairServices) -> None:
    """163,584 times three tokens: by class they detect 0.01 at a level of 0.1 % with a power of 99 %."""
    runs = [
        write(attentive, kind, gamma, seed=1000 + 10 * number + gamma, samples=4544)
        for number, kind in enumerate(BAD_DRAFTS)
        for gamma in GAMMAS
    ]
    cells, classes = fits(attentive, *runs)
    assert chisquare.detectable(classes.df, classes.n, level=1e-3, power=0.99) <= 0.01
    assert min(cells.p_value, classes.p_value) > 1e-3
