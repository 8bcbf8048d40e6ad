"""The joint distribution of what is emitted, by enumeration, for the reference and the fast path alike.

Of the exact rules that draw uniforms; `test_coupled` and `test_sigmoid` have the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from kernels import verify_torch
from kernels.sparse import SparseConfig
from kernels.verify import Rule
from tests.kernels import reference
from tests.kernels.enumeration import (
    EXACT,
    PATHS,
    ROUGH,
    World,
    chance_of,
    emitted,
    in_dyads,
    random_world,
    total_variation,
)
from tests.kernels.mutants import mutants, stopping_at_the_first_failure
from tests.kernels.paths import verify_by_triton

BOTH = pytest.mark.parametrize("rule", [Rule.TOKENWISE, Rule.BLOCK])
ON_HOST = pytest.mark.parametrize("path", PATHS)
TWO = SparseConfig(max_support=2)


def _mixed(rule: Rule) -> World:
    """Return a world with a dense q̂ of the first token, and after two of four first tokens."""
    world = random_world(7, rule=rule)
    first, second = world.q
    return replace(world, q=(in_dyads(first), (*second[:2], *(in_dyads(each) for each in second[2:]))))


def _with_zeros(rule: Rule) -> World:
    """Return a world of truncated drafts with p(0) = 0 at first, and after token 1 a p of disjoint support."""
    world = random_world(4, config=TWO, rule=rule)
    first, second, third = (each.clone() for each in world.logits)
    first[0] = -torch.inf
    second[1][torch.tensor([chance_of(world.q[1][1], x) > 0 for x in range(4)])] = -torch.inf
    assert chance_of(world.q[0], 1) > 0  # disjoint supports are reached
    return replace(world, logits=(first, second, third))


WORLDS: dict[str, Callable[[Rule], World]] = {
    "whole": lambda rule: random_world(1, rule=rule),
    "truncated": lambda rule: random_world(3, config=TWO, rule=rule),
    "dense and sparse": _mixed,
    "zeros and disjoint supports": _with_zeros,
}


@BOTH
@ON_HOST
@pytest.mark.parametrize("kind", WORLDS)
def test_the_emitted_distribution_is_the_targets(kind: str, path: str, rule: Rule) -> None:
    verify, bound, bisections = PATHS[path]
    world = WORLDS[kind](rule)
    found = emitted(verify, world, bisections)
    assert total_variation(found, world.target) < bound
    assert (found[world.target == 0] == 0).all()


@pytest.mark.gpu
@BOTH
def test_the_compiled_kernels_emit_the_targets_distribution(rule: Rule) -> None:
    world = random_world(1, rule=rule)
    assert total_variation(emitted(verify_by_triton, world, EXACT), world.target) < 4e-6


@pytest.mark.parametrize(("path", "lenience"), [("reference", 0.5), ("torch", 0.5), ("torch", 0.1)])
def test_lenience_keeps_every_token_below_its_bound(path: str, lenience: float) -> None:
    """[L A.5]: the first token has P(x) ≤ p(x)/l; moreover P = p + Σ overshoot of what acceptance alone forces."""
    verify, bound, bisections = PATHS[path]
    world = random_world(5, lenience=lenience, rule=Rule.TOKENWISE)
    first = emitted(verify, world, bisections).sum(axis=(1, 2))
    p = world.target.sum(axis=(1, 2))
    q = np.array([chance_of(world.q[0], x) for x in range(4)])
    assert (first <= p / lenience + bound).all()
    forced = np.maximum(np.minimum(q, p / lenience) - p, 0)
    assert forced.sum() > 0.05
    assert total_variation(first, p) == pytest.approx(forced.sum(), abs=bound)


# ------------------------------------------------------------------------------------------------- what must be noticed


@ON_HOST
@pytest.mark.parametrize("name", mutants("reference"))
def test_a_wrong_rule_is_noticed(name: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = mutants(path)[name]
    monkeypatch.setattr(reference if path == "reference" else verify_torch, mutant.function, mutant.wrong)
    world = random_world(1, rule=mutant.rule)
    assert total_variation(emitted(PATHS[path][0], world, ROUGH), world.target) > mutant.distance


@ON_HOST
def test_a_distribution_taken_before_truncation_is_noticed(path: str) -> None:
    world = random_world(6, rule=Rule.TOKENWISE)
    cut = random_world(6, config=TWO, rule=Rule.TOKENWISE)
    assert total_variation(emitted(PATHS[path][0], world, ROUGH, drawn_from=cut.q), world.target) > 0.01


def test_a_block_that_stops_at_its_first_failure_is_noticed() -> None:
    world = random_world(1, rule=Rule.BLOCK)
    found = emitted(stopping_at_the_first_failure(reference.verify), world, ROUGH)
    assert total_variation(found, world.target) > 0.01
