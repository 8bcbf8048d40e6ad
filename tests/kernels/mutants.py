"""Verification made wrong on purpose, to prove that the tests notice it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor

from kernels import rng
from kernels.rng import Domain
from kernels.verify import Proposed, Rule, Uniforms, VerifyResult
from tests.kernels.cases import LAST, Verify


def accepts_equality(u: float, lenience: float, q: float, p: float) -> bool:
    """Test with `<=`, which lets p = 0 pass at u = 0."""
    return q > 0 and u * lenience * q <= p


def shared_noise(seed: int, base_length: int, index: int, domain: Domain, draw: int = 0) -> float:
    """Draw acceptance and resampling from the numbers that drafting used."""
    return rng.uniform(seed, base_length, index, Domain.DRAFT, draw)


def by_absolute_position(seed: int, base_length: int, index: int, domain: Domain, draw: int = 0) -> float:
    """Leave out the round: numbers of a rejected draft come again in the next round."""
    return rng.uniform(seed, base_length + index, 0, domain, draw)


@dataclass(frozen=True)
class Mutant:
    """A function of a path, what stands in for it, and the total variation that must then be exceeded."""

    function: str
    wrong: Callable[..., Any]
    rule: Rule = Rule.TOKENWISE
    distance: float = 0.01


def mutants(path: str) -> dict[str, Mutant]:
    """Return wrong parts of the rules, with the arguments that those of the path take."""
    residuals: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
        "residual without max": lambda p, q: p - q,
        "absolute residual": lambda p, q: np.abs(p - q),
        "all of p as residual": lambda p, q: p.astype(np.float64),
        "reversed residual": lambda p, q: np.maximum(0.0, q - p),
    }
    blocks: dict[str, tuple[str, Callable[..., float]]] = {
        "forgetful block": ("block_step", lambda P, p, q: min(1.0, p / q)),
        "reach of the token alone": ("block_reach", lambda P, p, q: P),
        "reach without the complement": (
            "block_reach",
            lambda P, p, q: max(0.0, P - float(np.minimum(P * p, q).sum())),
        ),
    }
    return {
        "acceptance without q": Mutant("accepts", lambda u, lenience, q, p: q > 0 and u * lenience < p),
        **{name: Mutant("residual", _residual(path, wrong)) for name, wrong in residuals.items()},
        **{name: Mutant(function, wrong, Rule.BLOCK, 2e-3) for name, (function, wrong) in blocks.items()},
    }


def _residual(path: str, wrong: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Callable[..., np.ndarray]:
    def of_sparse(p: np.ndarray, ids: np.ndarray, q: np.ndarray) -> np.ndarray:
        dense = np.zeros(len(p))
        dense[ids] = q
        return wrong(p, dense)

    return wrong if path == "reference" else of_sparse


def stopping_at_the_first_failure(verify: Verify) -> Verify:
    """Return a `verify` of two drafts that accepts the second only where it also accepts the first alone."""

    def wrong(logits: Tensor, proposals: Sequence[Proposed]) -> list[VerifyResult]:
        alone = [
            replace(each, uniforms=Uniforms((each.accept_uniform(0), LAST), each.resample_uniform(0)))
            for each in proposals
        ]
        both = zip(verify(logits, proposals), verify(logits, alone), strict=True)
        return [result if first.accepted > 0 else first for result, first in both]

    return wrong
