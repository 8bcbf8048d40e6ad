"""The joint distribution of the emitted tokens, by enumeration: it is the target's, and mutants of the rules change it.

Under `tokenwise` and `block`; `test_coupled` has the other exact rule.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels import verify_torch
from kernels.sparse import SparseConfig
from kernels.verify import Proposed, Rule, Uniforms, VerifyResult
from tests.kernels import reference
from tests.kernels.cases import LAST
from tests.kernels.enumeration import (
    EXACT,
    PATHS,
    ROUGH,
    TinyPair,
    emitted,
    random_pair,
    total_variation,
)
from tests.kernels.paths import HOST, C, verify_by_triton

EXACT_RULES = pytest.mark.parametrize("rule", [Rule.TOKENWISE, Rule.BLOCK])
ON_HOST = pytest.mark.parametrize("path", [*HOST, C])
IN_PYTHON = pytest.mark.parametrize("path", HOST)
TWO = SparseConfig(max_support=2)


def with_zeros(rule: Rule) -> TinyPair:
    """Return a pair of truncated drafts with p(0) = 0 at first, and after token 1 a p of disjoint support."""
    pair = random_pair(4, config=TWO, rule=rule)
    first, second, third = (each.clone() for each in pair.logits)
    first[0] = -torch.inf
    second[1][torch.tensor([pair.q[1][1].probability(x) > 0 for x in range(4)])] = -torch.inf
    assert pair.q[0].probability(1) > 0  # disjoint supports are reached
    return replace(pair, logits=(first, second, third))


PAIRS: dict[str, Callable[[Rule], TinyPair]] = {
    "whole": lambda rule: random_pair(1, rule=rule),
    "truncated, with zeros and disjoint supports": with_zeros,
}


@EXACT_RULES
@ON_HOST
@pytest.mark.parametrize("kind", PAIRS)
def test_the_emitted_distribution_is_the_targets(kind: str, path: str, rule: Rule) -> None:
    verify, bound, bisections = PATHS[path]
    pair = PAIRS[kind](rule)
    found = emitted(verify, pair, bisections)
    assert total_variation(found, pair.target) < bound
    assert (found[pair.target == 0] == 0).all()


@pytest.mark.gpu
@EXACT_RULES
def test_the_compiled_kernels_emit_the_targets_distribution(rule: Rule) -> None:
    pair = random_pair(1, rule=rule)
    assert total_variation(emitted(verify_by_triton, pair, EXACT), pair.target) < 4e-6


@pytest.mark.parametrize(
    ("path", "lenience"), [("reference", 0.5), ("torch", 0.5), ("torch", 0.1), pytest.param("c", 0.1, marks=C.marks)]
)
def test_lenience_keeps_every_token_below_its_bound(path: str, lenience: float) -> None:
    """[L A.5]: the first token has P(x) ≤ p(x)/l; moreover P - p is the excess that acceptance alone causes."""
    verify, bound, bisections = PATHS[path]
    pair = random_pair(5, lenience=lenience, rule=Rule.TOKENWISE)
    first = emitted(verify, pair, bisections).sum(axis=(1, 2))
    p = pair.target.sum(axis=(1, 2))
    q = np.array([pair.q[0].probability(x) for x in range(4)])
    assert (first <= p / lenience + bound).all()
    forced = np.maximum(np.minimum(q, p / lenience) - p, 0)
    assert forced.sum() > 0.05
    assert total_variation(first, p) == pytest.approx(forced.sum(), abs=bound)


# -------------------------------------------------------------------------------------------------------------- mutants


@dataclass(frozen=True)
class Mutant:
    """A function of a path, its wrong replacement, and the total variation that must then be exceeded."""

    function: str
    wrong: Callable[..., Any]
    rule: Rule = Rule.TOKENWISE
    distance: float = 0.01


def mutants(path: str) -> dict[str, Mutant]:
    """Return mutants of the rules, with the arguments of the path's functions."""
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


@IN_PYTHON
@pytest.mark.parametrize("name", mutants("reference"))
def test_a_wrong_rule_is_detected(name: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = mutants(path)[name]
    monkeypatch.setattr(reference if path == "reference" else verify_torch, mutant.function, mutant.wrong)
    pair = random_pair(1, rule=mutant.rule)
    assert total_variation(emitted(PATHS[path][0], pair, ROUGH), pair.target) > mutant.distance


@ON_HOST
def test_a_distribution_from_before_truncation_is_detected(path: str) -> None:
    whole, cut = (random_pair(6, config=config, rule=Rule.TOKENWISE) for config in (SparseConfig(keep_mass=1.0), TWO))
    assert total_variation(emitted(PATHS[path][0], whole, ROUGH, drawn_from=cut.q), whole.target) > 0.01


def test_a_block_that_stops_at_its_first_failure_is_detected() -> None:
    def wrong(logits: Tensor, proposals: Sequence[Proposed]) -> list[VerifyResult]:
        alone = [
            replace(each, uniforms=Uniforms((each.accept_uniform(0), LAST), each.resample_uniform(0)))
            for each in proposals
        ]
        both = zip(reference.verify(logits, proposals), reference.verify(logits, alone), strict=True)
        return [result if first.accepted > 0 else first for result, first in both]

    pair = random_pair(1, rule=Rule.BLOCK)
    assert total_variation(emitted(wrong, pair, ROUGH), pair.target) > 0.01
