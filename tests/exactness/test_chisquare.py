"""The measuring instrument, measured: false alarms as often as stated, and the stated power against the stated bias."""

import numpy as np
import pytest
from scipy import stats

from tests.exactness import chisquare
from tests.exactness.chisquare import Array


def _law(cells: int, seed: int) -> Array:
    law: Array = np.random.default_rng(seed).dirichlet(np.full(cells, 0.7))
    return law


def test_p_values_are_uniform_where_the_law_is_right() -> None:
    """600 samples of 20,000 over a joint law of 216 skewed cells, most of which are merged; Kolmogorov-Smirnov."""
    law, generator = _law(216, 1), np.random.default_rng(2)
    p_values = [chisquare.goodness_of_fit(generator.multinomial(20_000, law), law).p_value for _ in range(600)]
    assert stats.kstest(p_values, "uniform").pvalue > 0.01


def test_p_values_of_a_table_are_uniform_for_a_markov_chain() -> None:
    """400 runs of 3,000 steps over 8 states: rows are met at random, as they are in a long text."""
    generator = np.random.default_rng(3)
    table = np.stack([_law(8, 10 + state) for state in range(8)])
    edges = table.cumsum(axis=1)
    runs, states = np.arange(400), np.zeros(400, dtype=np.int64)
    counts = np.zeros((400, 8, 8), dtype=np.int64)
    for _ in range(3_000):
        following = (generator.random(400)[:, None] * edges[states, -1:] >= edges[states]).sum(axis=1)
        counts[runs, states, following] += 1
        states = following
    p_values = [chisquare.table_fit(run, table).p_value for run in counts]
    assert stats.kstest(p_values, "uniform").pvalue > 0.01


def test_p_values_of_two_samples_are_uniform_where_they_share_a_law() -> None:
    law, generator = _law(60, 4), np.random.default_rng(5)
    p_values = [
        chisquare.two_sample(generator.multinomial(9_000, law), generator.multinomial(6_000, law)).p_value
        for _ in range(600)
    ]
    assert stats.kstest(p_values, "uniform").pvalue > 0.01


@pytest.mark.parametrize("cells", [12, 60, 160])
@pytest.mark.parametrize("distance", [0.03, 0.1])
def test_the_stated_sample_size_has_the_stated_power(cells: int, distance: float) -> None:
    """400 samples from the hardest law at this total variation: at least 97 % are refuted where 99 % are promised."""
    law, generator = _law(cells, cells), np.random.default_rng(6)
    n = chisquare.sample_size(cells - 1, distance, level=1e-3, power=0.99)
    biased = chisquare.hardest_bias(law, distance)
    fits = [chisquare.goodness_of_fit(generator.multinomial(n, biased), law) for _ in range(400)]
    assert np.mean([fit.p_value < 1e-3 for fit in fits]) >= 0.97


def test_sample_size_and_detectable_distance_are_inverse() -> None:
    n = chisquare.sample_size(50, 0.03, level=1e-3, power=0.99)
    assert chisquare.detectable(50, n, level=1e-3, power=0.99) == pytest.approx(0.03, rel=1e-4)


def test_one_count_without_mass_refutes_the_law() -> None:
    fit = chisquare.goodness_of_fit(np.array([500, 499, 1]), np.array([0.5, 0.5, 0.0]))
    assert (fit.p_value, fit.impossible) == (0.0, 1)


def test_cells_are_merged_by_what_they_expect_and_never_by_what_was_counted() -> None:
    law = np.array([0.5, 0.4, 0.097, 0.001, 0.001, 0.001])
    assert chisquare.cells(law, 1_000) == 3  # the three rare ones expect 3: they take the next one in
    assert chisquare.cells(law, 10_000) == 6
    fits = [chisquare.goodness_of_fit(np.eye(6, dtype=np.int64)[cell] * 1000, law) for cell in (0, 3)]
    assert [fit.df for fit in fits] == [2, 2]
