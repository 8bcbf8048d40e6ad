"""χ² by its tails, false alarms as often as stated, and the stated power."""

import math

import numpy as np
import pytest
from scipy import stats

from outrider.evaluation import chisquare
from outrider.evaluation.chisquare import Array


@pytest.mark.parametrize("df", [1, 2, 26, 700, 3000])
def test_tails_are_those_of_scipy(df: int) -> None:
    for level in (0.9, 0.1, 1e-4, 1e-12):
        x = float(stats.chi2.isf(level, df))
        assert chisquare.chi2_sf(x, df) == pytest.approx(level, rel=1e-9)
        for noncentrality in (1e-3, 3.0, 400.0):
            exact = float(stats.ncx2.sf(x, df, noncentrality))
            assert chisquare.noncentral_sf(x, df, noncentrality) == pytest.approx(exact, rel=1e-6, abs=1e-13)


def hardest_bias(p: Array, distance: float) -> Array:
    """Return the bias of this total variation that is hardest to detect: half the mass scaled up, half down."""
    up = np.zeros(len(p), dtype=bool)
    for cell in np.argsort(-p):
        up[cell] = p[up].sum() + p[cell] <= 0.5
    return np.where(up, p * (1 + distance / p[up].sum()), p * (1 - distance / p[~up].sum()))


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
    n = math.ceil(chisquare.noncentrality(cells - 1, 1e-3, 0.99) / (4 * distance**2))
    biased = hardest_bias(p, distance)
    fits = [chisquare.goodness_of_fit(generator.multinomial(n, biased), p) for _ in range(400)]
    assert np.mean([fit.p_value < 1e-3 for fit in fits]) >= 0.97
    assert chisquare.detectable(cells - 1, n, level=1e-3, power=0.99) == pytest.approx(distance, rel=1e-2)


def test_one_count_without_mass_refutes() -> None:
    assert chisquare.goodness_of_fit(np.array([500, 499, 1]), np.array([0.5, 0.5, 0.0])).p_value == 0.0


def test_an_allowed_distance_is_no_misfit_and_a_larger_one_is() -> None:
    """400 samples at a level of 1 %. Within the distance at most 3 % are refuted; without the allowance 30 % would be.

    At the distance that is stated as detectable 95 % are promised, and 90 % at least are refuted.
    """
    p, generator = random_distribution(40, 7), np.random.default_rng(8)
    n, within = 50_000, 0.01

    def refuted(distance: float, allowed: float) -> float:
        biased = hardest_bias(p, distance)
        fits = [chisquare.goodness_of_fit(generator.multinomial(n, biased), p, allowed) for _ in range(400)]
        return float(np.mean([fit.p_value < 0.01 for fit in fits]))

    allowed = 4 * within**2
    assert refuted(within, allowed) <= 0.03
    assert refuted(within, 0.0) >= 0.3
    assert refuted(chisquare.detectable(39, n, level=0.01, power=0.95, allowed=allowed), allowed) >= 0.9
