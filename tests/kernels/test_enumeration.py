"""The joint law of what is emitted, by enumeration: equal to the target's, for the oracle and the fast path alike."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from kernels import verify_torch
from kernels.dense import DenseDistribution
from kernels.sparse import SparseConfig
from kernels.verify import Rule
from tests.kernels import reference
from tests.kernels.cases import law_of, proposed_of
from tests.kernels.laws import (
    EXACT,
    ROUGH,
    Verify,
    World,
    accepted_law,
    chance_of,
    emitted_law,
    in_dyads,
    random_world,
    total_variation,
)
from tests.kernels.mutants import (
    WRONG_BLOCKS,
    WRONG_RESIDUALS,
    accepts_without_q,
    stopping_at_the_first_failure,
    wrong_residual,
)
from tests.kernels.paths import verify_by_triton

MODULES = {"reference": reference, "torch": verify_torch}
PATHS: dict[str, tuple[Verify, float, int]] = {
    "reference": (reference.verify, 1e-12, EXACT),
    "torch": (verify_torch.verify, 2e-6, 28),  # a float32 softmax
}
"""The total variation that each may have, and the bisections that place edges far more precisely than that."""
RULES = (Rule.TOKENWISE, Rule.BLOCK)
"""The exact ones that draw uniforms; `test_coupled` and `test_sigmoid` have the others."""


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("rule", RULES)
def test_the_emitted_law_is_the_targets(path: str, rule: Rule) -> None:
    verify, bound, bisections = PATHS[path]
    world = random_world(1, rule=rule)
    assert total_variation(emitted_law(verify, world, bisections=bisections), world.target) < bound


@pytest.mark.gpu
@pytest.mark.parametrize("rule", RULES)
def test_the_law_emitted_by_the_compiled_kernels_is_the_targets(rule: Rule) -> None:
    world = random_world(1, rule=rule)
    assert total_variation(emitted_law(verify_by_triton, world), world.target) < 4e-6


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("rule", RULES)
def test_a_truncated_draft_leaves_the_law_alone(path: str, rule: Rule) -> None:
    verify, bound, bisections = PATHS[path]
    world = random_world(3, config=SparseConfig(max_support=2), rule=rule)
    assert total_variation(emitted_law(verify, world, bisections=bisections), world.target) < bound


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("rule", RULES)
def test_a_mixture_of_dense_and_sparse_drafts_leaves_the_law_alone(path: str, rule: Rule) -> None:
    """After a first token with a dense q̂, the second has a sparse one for two of four tokens, and a dense one else."""
    verify, bound, bisections = PATHS[path]
    world = random_world(7, rule=rule)
    first, second = world.q
    mixed = replace(world, q=(in_dyads(first), (*second[:2], *(in_dyads(each) for each in second[2:]))))
    assert total_variation(emitted_law(verify, mixed, bisections=bisections), world.target) < bound


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("rule", RULES)
def test_a_dense_law_is_judged_as_the_sparse_one_that_says_the_same(path: str, rule: Rule) -> None:
    verify, _, _ = PATHS[path]
    laws = [law_of({0: 4, 1: 3, 2: 1}), law_of({0: 1, 3: 1})]
    dense = [DenseDistribution(torch.tensor(row)) for row in ([0.5, 0.375, 0.125, 0.0], [0.5, 0.0, 0.0, 0.5])]
    z = random_world(8).logits[2][0, :3]
    for u in product((0.0, 0.3, 0.6, 0.9), (0.1, 0.5, 0.95), (0.01, 0.4, 0.99)):
        asked = [proposed_of((0, 3), tuple(q), u[:2], u[2], rule=rule) for q in (laws, dense)]
        sparse, same = verify(torch.cat((z, z)), asked)
        assert (sparse.accepted, sparse.next_token, sparse.status) == (same.accepted, same.next_token, same.status)
        assert sparse.beta == pytest.approx(same.beta, abs=1e-12)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("rule", RULES)
def test_laws_with_zeros_and_disjoint_supports_come_out_exact(path: str, rule: Rule) -> None:
    verify, bound, bisections = PATHS[path]
    world = _with_zeros(random_world(4, rule=rule))
    assert chance_of(world.q[0], 1) > 0  # the disjoint laws are reached
    law = emitted_law(verify, world, bisections=bisections)
    assert total_variation(law, world.target) < bound
    assert (law[world.target == 0] == 0).all()


@pytest.mark.parametrize(("path", "lenience"), [("reference", 0.5), ("torch", 0.5), ("torch", 0.1)])
def test_lenience_keeps_every_token_below_its_bound(path: str, lenience: float) -> None:
    """[L A.5]: the first token has P(x) ≤ p(x)/l; moreover P = p + Σ overshoot of what acceptance alone forces."""
    verify, bound, bisections = PATHS[path]
    world = random_world(5, lenience=lenience)
    first = emitted_law(verify, world, bisections=bisections).sum(axis=(1, 2))
    p = world.target.sum(axis=(1, 2))
    q = np.array([chance_of(world.q[0], x) for x in range(4)])
    assert (first <= p / lenience + bound).all()
    forced = np.maximum(np.minimum(q, p / lenience) - p, 0)
    assert forced.sum() > 0.05
    assert total_variation(first, p) == pytest.approx(forced.sum(), abs=bound)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", WRONG_RESIDUALS)
def test_a_wrong_residual_is_seen(path: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODULES[path], "residual", wrong_residual(path, kind))
    world = random_world(1)
    assert total_variation(emitted_law(PATHS[path][0], world, bisections=ROUGH), world.target) > 0.01


@pytest.mark.parametrize("path", PATHS)
def test_a_draft_law_taken_before_truncation_is_seen(path: str) -> None:
    verify, _, _ = PATHS[path]
    whole = random_world(6)
    cut = random_world(6, config=SparseConfig(max_support=2))
    assert total_variation(emitted_law(verify, whole, drawn_from=cut.q, bisections=ROUGH), whole.target) > 0.01


@pytest.mark.parametrize("path", PATHS)
def test_an_acceptance_test_without_q_is_seen(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODULES[path], "accepts", accepts_without_q)
    world = random_world(1)
    assert total_variation(emitted_law(PATHS[path][0], world, bisections=ROUGH), world.target) > 0.01


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", WRONG_BLOCKS)
def test_a_wrong_block_rule_is_seen(path: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, wrong = WRONG_BLOCKS[kind]
    monkeypatch.setattr(MODULES[path], name, wrong)
    world = random_world(1, rule=Rule.BLOCK)
    assert total_variation(emitted_law(PATHS[path][0], world, bisections=ROUGH), world.target) > 2e-3


def test_a_block_that_stops_at_its_first_failure_is_seen() -> None:
    verify = stopping_at_the_first_failure(reference.verify)
    world = random_world(1, rule=Rule.BLOCK)
    assert total_variation(emitted_law(verify, world, bisections=ROUGH), world.target) > 0.01


def test_block_accepts_no_fewer_tokens_than_tokenwise() -> None:
    """Sun et al. 2024, Theorem 2; and here some more."""
    for seed in (1, 5):
        by_rule = [
            accepted_law(reference.verify, random_world(seed, rule=rule), bisections=20) @ np.arange(3)
            for rule in (Rule.TOKENWISE, Rule.BLOCK)
        ]
        assert by_rule[1] > by_rule[0] + 1e-3


def _with_zeros(world: World) -> World:
    """Return the world with p(0) = 0 at the start, and after token 1 a target whose support the draft never meets."""
    first, second = world.logits[0].clone(), world.logits[1].clone()
    q = random_world(4, config=SparseConfig(max_support=2)).q
    first[0] = -torch.inf
    second[1][torch.tensor([chance_of(q[1][1], x) > 0 for x in range(4)])] = -torch.inf
    return World((first, second, world.logits[2]), q, rule=world.rule)
