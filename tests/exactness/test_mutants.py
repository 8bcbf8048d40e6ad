"""Would these tests notice? Real services with one deliberate fault each must be refuted, and without it must not.

The target is the Markov one, so that every token of 64 texts is a sample; the draft is a good one, only too sure of
itself, since a fault bends the law most where acceptance and rejection both have much to say. Sizes are the smallest
that refute at `REFUTED`, with room to spare. Two faults are in every run, the others are slow.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cluster import Cluster, Service
from tests.exactness import sampling
from tests.exactness.chisquare import Fit
from tests.exactness.laws import Filters
from tests.exactness.sampling import Run
from tests.exactness.worlds import FILTERS, Chain, World

REFUTED = 1e-9
SOUND = 1e-3
PROMPT = (14,)
GAMMA = 2
NARROW = Filters(temperature=1.0, top_k=6, top_p=0.8)


@dataclass(frozen=True, slots=True)
class Mutant:
    """A fault, in which service it is made, and what it takes to see it."""

    fault: str
    service: str
    filters: Filters = NARROW
    length: int = 48


MUTANTS = (
    Mutant("untruncated_q", "draft_service"),
    Mutant("negative_residual", "verifier_service"),
)
MORE_MUTANTS = (
    Mutant("repeated_noise", "verifier_service", length=32),
    Mutant("shared_noise", "draft_service", FILTERS, 96),
    Mutant("shared_resampling", "verifier_service"),
)


def _write(service: Service, filters: Filters, length: int) -> Run:
    return sampling.sample(service.address, PROMPT, length=length, samples=64, filters=filters, gamma=GAMMA, seed=5)


def _fits(run: Run, target: Path, filters: Filters) -> tuple[Fit, Fit]:
    print(run)
    return Chain.of(target, filters).fits(PROMPT, run.tokens)


@pytest.mark.parametrize(
    "mutant",
    [*MUTANTS, *(pytest.param(mutant, marks=pytest.mark.slow) for mutant in MORE_MUTANTS)],
    ids=lambda mutant: mutant.fault,
)
def test_a_fault_is_noticed(mutant: Mutant, cluster: Cluster, markov: World, sharpened: Path) -> None:
    with markov.with_fault(cluster, sharpened, mutant.service, mutant.fault) as service:
        run = _write(service, mutant.filters, mutant.length)
    assert min(fit.p_value for fit in _fits(run, markov.target, mutant.filters)) < REFUTED


@pytest.mark.parametrize(("filters", "length"), [(NARROW, 48), pytest.param(FILTERS, 96, marks=pytest.mark.slow)])
def test_the_same_pair_without_fault_is_not(filters: Filters, length: int, sound: Service, markov: World) -> None:
    run = _write(sound, filters, length)
    assert min(fit.p_value for fit in _fits(run, markov.target, filters)) > SOUND


def test_a_uniform_of_zero_accepts_nothing_without_mass(cluster: Cluster, markov: World) -> None:
    """The edge where u = 0 and p = 0: a draft that proposes little else, and acceptance tests that all draw 0."""
    with markov.with_fault(cluster, markov.drafts["reversed"], "verifier_service", "zero_uniform") as service:
        run = _write(service, FILTERS, 10)
    outcomes, _ = _fits(run, markov.target, FILTERS)
    assert outcomes.impossible == 0
    assert 0 < run.accepted < run.drafted / 2


def test_a_weak_inequality_is_noticed_there(cluster: Cluster, markov: World) -> None:
    fault = "zero_uniform_and_weak_inequality"
    with markov.with_fault(cluster, markov.drafts["reversed"], "verifier_service", fault) as service:
        run = _write(service, FILTERS, 10)
    outcomes, _ = _fits(run, markov.target, FILTERS)
    assert outcomes.impossible > 0
