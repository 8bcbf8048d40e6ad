"""Pearson's χ², and the sample size that detects a given bias.

Cells depend on the distribution alone, not on counts: those that expect fewer than five counts are merged, with the
least of the others where that is not enough. A count where there is no mass gives a p-value of 0.

Power. Let the counts follow p' with total variation δ from p, over the same cells. The statistic is then about
noncentral χ² with λ = N Σ (p' - p)²/p, and Cauchy-Schwarz gives Σ (p' - p)²/p ≥ (Σ |p' - p|)² = 4δ², with equality
for the bias hardest to see: p' = p(1 ± 2δ). So N = λ/(4δ²), with the λ at which a χ² of these degrees of freedom
passes its critical value with the required power, is enough for every bias of that size. For a table of several
distributions, each met n_s times, δ is the mean over s with weights n_s, and Jensen gives the same bound.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, stats

LEAST_EXPECTED = 5.0

Array: TypeAlias = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Fit:
    """How well `n` counts fit a distribution."""

    statistic: float
    df: int
    p_value: float
    n: int

    def __str__(self) -> str:
        return f"χ² = {self.statistic:.1f} at df {self.df}, p = {self.p_value:.2g}, N = {self.n:,}"


def goodness_of_fit(counts: Array, distribution: Array) -> Fit:
    """Test counts against a distribution over the same cells, both `[C]`."""
    return table_fit(np.asarray(counts)[None], np.asarray(distribution)[None])


def table_fit(counts: Array, distributions: Array) -> Fit:
    """Test counts `[S, C]` against a distribution for each row `[S, C]`, given how often each row was met.

    Holds for the transitions of a Markov chain as it does for independent rows. Rows with too few counts for two cells
    are left out.
    """
    statistic, df, n = 0.0, 0, int(np.asarray(counts).sum())
    for observed, distribution in zip(np.asarray(counts), np.asarray(distributions, dtype=np.float64), strict=True):
        if observed[distribution <= 0].any():
            statistic = math.inf
        seen, expected = _merged(observed, distribution)
        statistic += float(((seen - expected) ** 2 / expected).sum())
        df += max(len(expected) - 1, 0)
    return Fit(statistic, df, float(stats.chi2.sf(statistic, df)) if df else float(statistic < math.inf), n)


def noncentrality(df: int, level: float, power: float) -> float:
    """Return the λ at which χ² of `df` degrees of freedom passes the critical value of `level` with `power`."""
    critical = stats.chi2.isf(level, df)
    return float(optimize.brentq(lambda x: stats.ncx2.sf(critical, df, x) - power, 1e-6, 1e5))


def sample_size(df: int, distance: float, *, level: float, power: float) -> int:
    """Return the number of counts that detects any bias of total variation `distance`."""
    return math.ceil(noncentrality(df, level, power) / (4 * distance**2))


def detectable(df: int, n: int, *, level: float, power: float) -> float:
    """Return the total variation that `n` counts detect: the inverse of `sample_size`."""
    return math.sqrt(noncentrality(df, level, power) / (4 * n))


def hardest_bias(p: Array, distance: float) -> Array:
    """Return the bias of this total variation that is hardest to detect: half the mass scaled up, half down."""
    up = np.zeros(len(p), dtype=bool)
    for cell in np.argsort(-p):
        up[cell] = p[up].sum() + p[cell] <= 0.5
    return np.where(up, p * (1 + distance / p[up].sum()), p * (1 - distance / p[~up].sum()))


def _merged(observed: Array, distribution: Array) -> tuple[Array, Array]:
    inside = distribution > 0
    total = int(observed.sum())
    expected = distribution[inside] / distribution[inside].sum() * total
    if total == 0:
        return np.zeros(0), np.zeros(0)
    groups = _groups(expected)
    return np.bincount(groups, observed[inside]), np.bincount(groups, expected)


def _groups(expected: Array) -> Array:
    """Return the group of each cell: its own, or that of all cells that expect too few counts."""
    order = np.argsort(expected, kind="stable")
    small = int((expected < LEAST_EXPECTED).sum())
    while 0 < small < len(expected) and expected[order[:small]].sum() < LEAST_EXPECTED:
        small += 1
    groups = np.zeros(len(expected), dtype=np.int64)
    groups[order[small:]] = np.arange(len(expected) - small) + (small > 0)
    return groups
