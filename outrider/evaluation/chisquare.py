"""Pearson's χ², and the bias that a number of counts detects.

Cells depend on the distribution alone, not on counts: those that expect fewer than five counts are merged, with the
least of the others where that is not enough. A count where there is no mass gives a p-value of 0.

Power. It is that of a bias between the cells: a test does not see what happens within one. Let the counts follow p'
with total variation δ from p, over the same cells. The statistic is then about noncentral χ² with λ = N Σ (p' - p)²/p,
and Cauchy-Schwarz gives Σ (p' - p)²/p ≥ (Σ |p' - p|)² = 4δ², with equality for the bias hardest to see: p' = p(1 ±
2δ). So N = λ/(4δ²), with the λ at which a χ² of these degrees of freedom passes its critical value with the required
power, is enough for every bias of that size. For a table of several distributions, each met n_s times, δ is the mean
over s with weights n_s, and Jensen gives the same bound.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

LEAST_EXPECTED = 5.0

Array: TypeAlias = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Fit:
    """How well `n` counts fit distributions, of `rows` contexts."""

    statistic: float
    df: int
    p_value: float
    n: int
    rows: int = 0

    def __str__(self) -> str:
        return f"χ² = {self.statistic:.1f} at df {self.df}, p = {self.p_value:.2g}, N = {self.n:,}"


def goodness_of_fit(counts: Array, distribution: Array, allowed: float = 0.0) -> Fit:
    """Test counts against a distribution over the same cells, both `[C]`. See `table_fit`."""
    return table_fit(np.asarray(counts)[None], np.asarray(distribution)[None], allowed)


def table_fit(counts: Array, distributions: Array, allowed: float = 0.0) -> Fit:
    """Test counts `[S, C]` against a distribution for each row `[S, C]`, given how often each row was met.

    Holds for the transitions of a Markov chain as it does for independent rows. Rows with too few counts for two cells
    are left out of the degrees of freedom and of `n`.

    Args:
        counts: of each cell.
        distributions: the expected ones.
        allowed: the mean distance Σ (p' - p)²/p of the true distributions from these that is no misfit. The statistic
            is then noncentral, with λ of at most N times this: merging cells makes the distance smaller.
    """
    statistic, df, n, rows = 0.0, 0, 0, 0
    for observed, distribution in zip(np.asarray(counts), np.asarray(distributions, dtype=np.float64), strict=True):
        if observed[distribution <= 0].any():
            statistic = math.inf
        seen, expected = _merged(observed, distribution)
        statistic += float(((seen - expected) ** 2 / expected).sum())
        if len(expected) > 1:
            df += len(expected) - 1
            n += int(observed.sum())
            rows += 1
    p_value = noncentral_sf(statistic, df, n * allowed) if df else float(statistic < math.inf)
    return Fit(statistic, df, p_value, n, rows)


def noncentrality(df: int, level: float, power: float, allowed: float = 0.0) -> float:
    """Return the λ at which χ² of `df` degrees of freedom passes the critical value of `level` with `power`.

    The critical value is that of noncentral χ² with λ = `allowed`.
    """
    critical = _root(lambda x: noncentral_sf(x, df, allowed) - level)
    return _root(lambda x: power - noncentral_sf(critical, df, x))


def detectable(df: int, n: int, *, level: float, power: float, allowed: float = 0.0) -> float:
    """Return the total variation between cells that `n` counts detect; `allowed` is as in `table_fit`."""
    return math.sqrt(noncentrality(df, level, power, n * allowed) / (4 * n))


# ------------------------------------------------------------------------------------------------------ distributions


def chi2_sf(x: float, df: int) -> float:
    """Return the chance that χ² of `df` degrees of freedom exceeds `x`: Γ(df/2, x/2)/Γ(df/2)."""
    return float(_upper_gamma(df / 2, x / 2))


def noncentral_sf(x: float, df: int, noncentrality: float) -> float:
    """Return the chance that noncentral χ² exceeds `x`: a mixture of χ² of df + 2j with Poisson weights, mean λ/2."""
    mean = noncentrality / 2
    if mean == 0:
        return chi2_sf(x, df)
    width = 9 * math.sqrt(mean) + 20
    j = torch.arange(max(0, int(mean - width)), int(mean + width), dtype=torch.float64)
    weights = (j * math.log(mean) - mean - torch.lgamma(j + 1)).exp()
    return min(1.0, float(weights @ _upper_gamma(df / 2 + j, x / 2)))  # rounded weights may sum to more than 1


def _upper_gamma(a: Tensor | float, z: float) -> Tensor:
    """Γ(a, z)/Γ(a); 1 for z ≤ 0."""
    return torch.special.gammaincc(
        torch.as_tensor(a, dtype=torch.float64), torch.tensor(max(z, 0.0), dtype=torch.float64)
    )


def _root(decreasing: Callable[[float], float]) -> float:
    """Return where a function that falls with x ≥ 0 is zero; 0 if it begins below."""
    low, high = 0.0, 1.0
    while decreasing(high) > 0:
        low, high = high, 2 * high
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if decreasing(middle) > 0 else (low, middle)
    return high


# -------------------------------------------------------------------------------------------------------------- cells


def _merged(observed: Array, distribution: Array) -> tuple[Array, Array]:
    inside = distribution > 0
    total = int(observed.sum())
    expected = distribution[inside] / distribution[inside].sum() * total
    if total == 0:
        return np.zeros(0), np.zeros(0)
    groups = groups_of(expected)
    return np.bincount(groups, observed[inside]), np.bincount(groups, expected)


def groups_of(expected: Array) -> Array:
    """Return the group of each cell: its own, or that of all cells that expect too few counts."""
    order = np.argsort(expected, kind="stable")
    small = int((expected < LEAST_EXPECTED).sum())
    while 0 < small < len(expected) and expected[order[:small]].sum() < LEAST_EXPECTED:
        small += 1
    groups = np.zeros(len(expected), dtype=np.int64)
    groups[order[small:]] = np.arange(len(expected) - small) + (small > 0)
    return groups
