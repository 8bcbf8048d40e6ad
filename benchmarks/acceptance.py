"""How many drafted tokens a rule accepts in expectation, given a drafted path, and means of such numbers over texts.

The uniforms are integrated out: what is left is chance of the draft's alone, so that rules can be compared on the same
drafts with little noise. Pure arithmetic; it knows nothing of models, services or files.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

import numpy as np

_TWO_SIDED = 1.96  # 95 % of a normal law
_POWER = 1.645  # and what a power of 95 % takes beside it


@dataclass(frozen=True, slots=True)
class Drafted:
    """One drafted token x and the laws at its place.

    Attributes:
        p: p(x).
        q: q̂(x).
        masses: p on the support of q̂, `[K]`.
        weights: q̂ there, `[K]`.
    """

    p: float
    q: float
    masses: np.ndarray
    weights: np.ndarray


def tokenwise(path: Sequence[Drafted]) -> float:
    """Σ_i Π_{j≤i} min(1, p_j/q̂_j): tokens of `path` that [L Alg. 1] accepts in expectation."""
    total, kept = 0.0, 1.0
    for at in path:
        kept *= min(1.0, at.p / at.q)
        total += kept
    return total


def block(path: Sequence[Drafted]) -> float:
    """Σ_i (1 - Π_{k≥i} (1 - h_k)): the same of the rule `block`, which keeps all up to its last success.

    P_i = min(1, P_{i-1} · p_i/q̂_i) and h_i = Z/(Z + 1 - P_i) with Z = Σ max(P_i · p_{i+1} - q̂_{i+1}, 0); h_γ = P_γ
    (Sun et al. 2024, Algorithm 2).
    """
    reaches = []
    P = 1.0
    for i, at in enumerate(path):
        P = min(1.0, P * at.p / at.q)
        if i + 1 == len(path):
            reaches.append(P)
            break
        after = path[i + 1]
        Z = P - float(np.minimum(P * after.masses, after.weights).sum())
        reaches.append(Z / (Z + 1 - P) if Z > 0 else 0.0)
    total, none_from = 0.0, 1.0
    for h in reversed(reaches):
        none_from *= 1 - h
        total += 1 - none_from
    return total


EXPECTED = {"tokenwise": tokenwise, "block": block}
"""The rules whose expectation has a formula; under `coupled` the draft's own noise decides."""


def estimate(values: Sequence[float]) -> dict[str, Any]:
    """Mean of independent values with its 95 % interval, and the mean that so many would have told from 0.

    `detectable` is that of a two-sided test at 5 % with a power of 95 %. One value has no interval.
    """
    mean = fmean(values)
    if len(values) < 2:
        return {"mean": mean, "interval": None, "detectable": None}
    error = stdev(values) / math.sqrt(len(values))
    return {
        "mean": mean,
        "interval": [mean - _TWO_SIDED * error, mean + _TWO_SIDED * error],
        "detectable": (_TWO_SIDED + _POWER) * error,
    }
