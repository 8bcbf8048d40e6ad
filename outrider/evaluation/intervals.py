"""Intervals of 95 %, without NumPy."""

import math
from collections.abc import Sequence

LEAST_OBSERVATIONS = 5
"""Fewer give no interval worth reading: it covers nearly everything."""


def ratio_error(sums: Sequence[float], counts: Sequence[float]) -> float | None:
    """Return the standard error of the ratio Σ S_g / Σ N_g over G clusters; None for one cluster.

    With α the ratio and N = Σ N_g its variance is about G/(G - 1) · Σ (S_g - α N_g)² / N².
    """
    G, N = len(counts), sum(counts)
    if G < 2 or not N:
        return None
    alpha = sum(sums) / N
    squares = sum((S - alpha * n) ** 2 for S, n in zip(sums, counts, strict=True))
    return math.sqrt(G / (G - 1) * squares) / N


def interval_of_share(alpha: float, error: float, clusters: int) -> tuple[float, float]:
    """Return the interval, within 0 and 1: (α̂ - α)/error is about Student's t of `clusters` - 1 degrees."""
    margin = student_quantile(clusters - 1) * error
    return max(0.0, alpha - margin), min(1.0, alpha + margin)


def student_quantile(degrees: int) -> float:
    """Return the 97.5 % quantile of Student's t; the error is below 0.2 %.

    The first terms of the expansion in 1/degrees (Abramowitz and Stegun, 26.7.5); exact for 1 and 2 degrees.
    """
    if degrees == 1:
        return math.tan(0.475 * math.pi)
    if degrees == 2:
        return 0.95 * math.sqrt(2 / (1 - 0.95**2))
    z, n = 1.959963985, degrees
    return (
        z
        + (z**3 + z) / (4 * n)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
        + (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * n**4)
    )
