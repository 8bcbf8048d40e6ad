"""Parts of verification made wrong on purpose: what the tests must notice, so that their power stays proven.

Each stands in for the function of the same name; a test patches it in and asserts that its statistic then fails.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kernels import philox
from kernels.philox import Domain


def accepts_equality(u: float, lenience: float, q: float, p: float) -> bool:
    """Test with `<=`, which lets p = 0 pass at u = 0."""
    return q > 0 and u * lenience * q <= p


def accepts_without_q(u: float, lenience: float, q: float, p: float) -> bool:
    """Test against p alone, as if the draft had been a point mass."""
    return q > 0 and u * lenience < p


def shared_noise(seed: int, base_length: int, index: int, domain: Domain, draw: int = 0) -> float:
    """Draw acceptance and resampling from the numbers that drafting used."""
    return philox.uniform(seed, base_length, index, Domain.DRAFT, draw)


def _dense(ids: np.ndarray, q: np.ndarray, V: int) -> np.ndarray:
    law = np.zeros(V)
    law[ids] = q
    return law


_WRONG: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "without max": lambda p, q: p - q,
    "absolute": lambda p, q: np.abs(p - q),
    "all of p": lambda p, q: p.astype(np.float64),
    "reversed": lambda p, q: np.maximum(0.0, q - p),
}

WRONG_RESIDUALS = tuple(_WRONG)


def wrong_residual(path: str, kind: str) -> Callable[..., np.ndarray]:
    """Return a residual that is wrong in this way, with the arguments that the path's own takes."""
    wrong = _WRONG[kind]
    if path == "reference":
        return wrong
    return lambda p, ids, q: wrong(p, _dense(ids, q, len(p)))
