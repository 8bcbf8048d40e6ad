"""Pearson's χ², and the sample size it takes to notice a given bias.

Cells are made from the law alone, before any count is seen: those that expect fewer than five counts are put together,
with the least of the others where that is not enough. A count where the law has no mass at all refutes it at once.

Power. Let the counts follow p' with total variation δ from p, both over the same cells. The statistic is then about
noncentral χ² with λ = N Σ (p' - p)²/p, and Cauchy-Schwarz gives Σ (p' - p)²/p ≥ (Σ |p' - p|)² = 4δ², with equality
for the bias hardest to see: p' = p(1 ± 2δ). So N = λ/(4δ²), with the λ at which a χ² of these degrees of freedom
passes its critical value with the wanted power, is enough for every bias of that size. For a table of several laws,
each met n_s times, δ is the mean over s with weights n_s, and Jensen gives the same bound.
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
    """How well counts fit a law: the statistic, its degrees of freedom, the p-value, and the counts it rests on.

    `impossible` is how many of the counts lie where the law has no mass; one is enough for a p-value of 0.
    """

    statistic: float
    df: int
    p_value: float
    n: int
    impossible: int = 0

    def __str__(self) -> str:
        strays = f", {self.impossible} where the law has no mass" if self.impossible else ""
        return f"χ² = {self.statistic:.1f} at df {self.df}, p = {self.p_value:.2g}, N = {self.n:,}{strays}"


def goodness_of_fit(counts: Array, law: Array) -> Fit:
    """Test counts against a law over the same cells, both `[C]`."""
    return table_fit(np.asarray(counts)[None], np.asarray(law)[None])


def table_fit(counts: Array, laws: Array) -> Fit:
    """Test counts `[S, C]` against a law for each row `[S, C]`, given how often each row was met.

    Holds for the transitions of a Markov chain as it does for independent rows. Rows met too rarely to make two cells
    say nothing and are left out.
    """
    statistic, df, impossible = 0.0, 0, 0
    for observed, law in zip(np.asarray(counts), np.asarray(laws, dtype=np.float64), strict=True):
        impossible += int(observed[law <= 0].sum())
        seen, expected = _merged(observed, law)
        statistic += float(((seen - expected) ** 2 / expected).sum())
        df += max(len(expected) - 1, 0)
    n = int(np.asarray(counts).sum())
    if impossible:
        return Fit(math.inf, df, 0.0, n, impossible)
    return Fit(statistic, df, float(stats.chi2.sf(statistic, df)) if df else 1.0, n)


def two_sample(first: Array, second: Array) -> Fit:
    """Test that two samples of counts `[C]` come from one law."""
    table = np.stack([np.asarray(first), np.asarray(second)]).astype(np.float64)
    n = int(table.sum())
    pooled = table.sum(axis=0) / n
    # The smaller sample expects the least, so it decides what is merged; the law is the pooled one for both.
    smaller = int(table.sum(axis=1).argmin())
    groups = _groups(pooled * table[smaller].sum())
    merged = np.stack([np.bincount(groups, row, minlength=groups.max() + 1) for row in table])
    expected = merged.sum(axis=0) * table.sum(axis=1, keepdims=True) / n
    kept = expected[0] > 0
    statistic = float(((merged - expected)[:, kept] ** 2 / expected[:, kept]).sum())
    df = int(kept.sum()) - 1
    return Fit(statistic, df, float(stats.chi2.sf(statistic, df)) if df else 1.0, n)


def cells(law: Array, n: int) -> int:
    """Return how many cells a law `[C]` makes at `n` counts."""
    return len(_merged(np.zeros(len(law), dtype=np.int64), law, n)[1])


def noncentrality(df: int, level: float, power: float) -> float:
    """Return the λ at which χ² of `df` degrees of freedom passes the critical value of `level` with `power`."""
    critical = stats.chi2.isf(level, df)
    return float(optimize.brentq(lambda x: stats.ncx2.sf(critical, df, x) - power, 1e-6, 1e5))


def sample_size(df: int, distance: float, *, level: float, power: float) -> int:
    """Return the counts it takes to notice any bias of total variation `distance`."""
    return math.ceil(noncentrality(df, level, power) / (4 * distance**2))


def detectable(df: int, n: int, *, level: float, power: float) -> float:
    """Return the total variation that `n` counts notice: the inverse of `sample_size`."""
    return math.sqrt(noncentrality(df, level, power) / (4 * n))


def hardest_bias(law: Array, distance: float) -> Array:
    """Return the law at this total variation that χ² sees worst: about half the mass scaled up, half down."""
    up = np.zeros(len(law), dtype=bool)
    for cell in np.argsort(-law):
        up[cell] = law[up].sum() + law[cell] <= 0.5
    return np.where(up, law * (1 + distance / law[up].sum()), law * (1 - distance / law[~up].sum()))


def _merged(observed: Array, law: Array, n: int | None = None) -> tuple[Array, Array]:
    inside = law > 0
    total = int(np.asarray(observed).sum()) if n is None else n
    expected = law[inside] / law[inside].sum() * total
    if total == 0:
        return np.zeros(0), np.zeros(0)
    groups = _groups(expected)
    size = groups.max() + 1
    return np.bincount(groups, observed[inside], minlength=size), np.bincount(groups, expected, minlength=size)


def _groups(expected: Array) -> Array:
    """Return the group of each cell: its own, or the one of all that expect too little."""
    order = np.argsort(expected, kind="stable")
    small = int((expected < LEAST_EXPECTED).sum())
    while 0 < small < len(expected) and expected[order[:small]].sum() < LEAST_EXPECTED:
        small += 1
    groups = np.zeros(len(expected), dtype=np.int64)
    groups[order[small:]] = np.arange(len(expected) - small) + (small > 0)
    return groups
