"""Tests of the statistics: exact distributions, false alarms as often as stated, and the stated power."""

from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from tests.exactness import chisquare, pairs
from tests.exactness.chisquare import Array
from tests.exactness.distributions import PARAMS, joint_classes, joint_distribution, next_distributions


def test_the_joint_distribution_is_the_chain_rule(tmp_path: Path) -> None:
    target, prompt = pairs.write_target(tmp_path, seed=1), (15, 12, 14)
    joint = joint_distribution(target, prompt)
    assert joint.sum() == pytest.approx(1.0)
    a, b, c = (int(i) for i in np.unravel_index(joint.argmax(), joint.shape))
    first, second, third = (next_distributions(target, [[*prompt, *more]], PARAMS)[0] for more in ((), (a,), (a, b)))
    assert joint[a, b, c] == pytest.approx(first[a] * second[b] * third[c])
    mass = np.bincount(joint_classes(joint).ravel(), joint.ravel(), minlength=27)
    assert mass.min() > 0
    assert mass.max() < 0.2


def random_distribution(cells: int, seed: int) -> Array:
    p: Array = np.random.default_rng(seed).dirichlet(np.full(cells, 0.7))
    return p


def test_p_values_of_a_table_are_uniform_for_a_markov_chain() -> None:
    """400 runs of 3,000 steps over 8 states: rows are met at random, as in a long text, and many cells are merged."""
    generator = np.random.default_rng(3)
    table = np.stack([random_distribution(8, 10 + state) for state in range(8)])
    edges = table.cumsum(axis=1)
    runs, states = np.arange(400), np.zeros(400, dtype=np.int64)
    counts = np.zeros((400, 8, 8), dtype=np.int64)
    for _ in range(3_000):
        following = (generator.random(400)[:, None] * edges[states, -1:] >= edges[states]).sum(axis=1)
        counts[runs, states, following] += 1
        states = following
    p_values = [chisquare.table_fit(run, table).p_value for run in counts]
    assert stats.kstest(p_values, "uniform").pvalue > 0.01


@pytest.mark.parametrize(("cells", "distance"), [(12, 0.1), (160, 0.03)])
def test_the_stated_sample_size_has_the_stated_power(cells: int, distance: float) -> None:
    """400 samples from the hardest bias of this total variation: 97 % are refuted at least, where 99 % are promised."""
    p, generator = random_distribution(cells, cells), np.random.default_rng(6)
    n = chisquare.sample_size(cells - 1, distance, level=1e-3, power=0.99)
    biased = chisquare.hardest_bias(p, distance)
    fits = [chisquare.goodness_of_fit(generator.multinomial(n, biased), p) for _ in range(400)]
    assert np.mean([fit.p_value < 1e-3 for fit in fits]) >= 0.97
    assert chisquare.detectable(cells - 1, n, level=1e-3, power=0.99) == pytest.approx(distance, rel=1e-2)


def test_one_count_without_mass_refutes() -> None:
    assert chisquare.goodness_of_fit(np.array([500, 499, 1]), np.array([0.5, 0.5, 0.0])).p_value == 0.0
