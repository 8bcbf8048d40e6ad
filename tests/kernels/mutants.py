"""Parts of verification made wrong on purpose: what the tests must notice, so that their power stays proven.

Each stands in for the function of the same name; a test patches it in and asserts that its statistic then fails.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor

from kernels import rng
from kernels.rng import Domain
from kernels.verify import Proposed, Uniforms, VerifyResult
from tests.kernels.cases import Verify


def accepts_equality(u: float, lenience: float, q: float, p: float) -> bool:
    """Test with `<=`, which lets p = 0 pass at u = 0."""
    return q > 0 and u * lenience * q <= p


def accepts_without_q(u: float, lenience: float, q: float, p: float) -> bool:
    """Test against p alone, as if the draft had been a point mass."""
    return q > 0 and u * lenience < p


def shared_noise(seed: int, base_length: int, index: int, domain: Domain, draw: int = 0) -> float:
    """Draw acceptance and resampling from the numbers that drafting used."""
    return rng.uniform(seed, base_length, index, Domain.DRAFT, draw)


def by_absolute_position(seed: int, base_length: int, index: int, domain: Domain, draw: int = 0) -> float:
    """Draw by absolute position, with the round left out: numbers of a rejected draft come again in the next round."""
    return rng.uniform(seed, base_length + index, 0, domain, draw)


WRONG_BLOCKS: dict[str, tuple[str, Callable[..., float]]] = {
    "forgetful": ("block_step", lambda P, p, q: min(1.0, p / q)),
    "reach of the token alone": ("block_reach", lambda P, p, q: P),
    "reach without the complement": ("block_reach", lambda P, p, q: max(0.0, P - float(np.minimum(P * p, q).sum()))),
}
"""For each wrong way, the function of the paths that it stands in for."""


def stopping_at_the_first_failure(verify: Verify) -> Verify:
    """Return a `verify` of two drafts that accepts the second only where it also accepts the first alone."""

    def wrong(logits: Tensor, proposals: Sequence[Proposed]) -> list[VerifyResult]:
        alone = [
            replace(each, uniforms=Uniforms((each.accept_uniform(0), 1 - 2**-53), each.resample_uniform(0)))
            for each in proposals
        ]
        both = zip(verify(logits, proposals), verify(logits, alone), strict=True)
        return [result if first.accepted > 0 else first for result, first in both]

    return wrong


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
