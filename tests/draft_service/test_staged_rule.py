"""The acceptance rule between two drafts, against the oracle in float64, and at its edges."""

from __future__ import annotations

import numpy as np
import pytest

from draft_service.drafters.staged import accepts, resample
from kernels.sparse import SparseDistribution
from tests.kernels import reference

V = 12


def law(weights: dict[int, int]) -> SparseDistribution:
    ids = np.array(sorted(weights))
    return SparseDistribution(ids, np.array([weights[token] for token in ids], np.uint16), sum(weights.values()))


def some(generator: np.random.Generator) -> SparseDistribution:
    ids = generator.choice(V, int(generator.integers(1, 7)), replace=False)
    return law({int(token): int(generator.integers(1, 65536)) for token in ids})


def dense(sparse: SparseDistribution) -> np.ndarray:
    p = np.zeros(V)
    p[sparse.ids] = sparse.weights / sparse.total
    return p


@pytest.mark.parametrize("is_point_mass", [False, True])
def test_it_is_algorithm_1_with_the_quantised_law_for_a_target(is_point_mass: bool) -> None:
    generator = np.random.default_rng(1)
    kept = 0
    for _ in range(3000):
        guessed, told = (None if is_point_mass else some(generator)), some(generator)
        token = int(generator.integers(V)) if guessed is None else int(generator.choice(guessed.ids))
        q, r = dense(told), np.eye(V)[token] if guessed is None else dense(guessed)
        u, w = generator.random(2)
        stands = reference.accepts(u, 1.0, r[token], q[token])
        assert accepts(u, guessed, told, token) == stands
        kept += stands
        if not stands:
            cdf = reference.residual(q, r).cumsum()
            assert resample(w, guessed, told, token) == np.searchsorted(cdf, w * cdf[-1], side="right")
    assert 200 < kept < 2800


def test_what_comes_out_has_the_law_to_the_last_bit() -> None:
    """Enumerated: the masses of the tests and of the residual, in whole numbers, add up to the draft's own weights."""
    guessed, told = law({0: 5, 1: 3, 4: 8}), law({0: 7, 2: 2, 4: 1})
    for token in range(V):
        r, q = (round(dense(each)[token] * each.total) for each in (guessed, told))
        least = min(r * told.total, q * guessed.total)
        rest = q * guessed.total - least
        assert least + rest == q * guessed.total
        # A grid of uniforms fine enough that every threshold lies on it.
        grid = [i / 64 for i in range(64)]
        if r:
            stands = sum(accepts(u, guessed, told, token) for u in grid)
            assert stands == sum(i * r * told.total < 64 * q * guessed.total for i in range(64))
    drawn = {resample(u, guessed, told, 1) for u in np.linspace(0, 1, 999, endpoint=False)}
    assert drawn == {0, 2}, "where the draft says more than the guesser, and nowhere else"


def test_a_token_without_mass_never_stands_and_equality_does_not_suffice() -> None:
    told = law({1: 1, 2: 3})
    assert not accepts(0.0, None, told, 0)
    assert not accepts(0.0, law({0: 1}), told, 0)
    assert accepts(0.0, law({1: 1}), told, 1)
    assert not accepts(0.25, None, told, 1), "u = q̂ exactly"
    assert accepts(np.nextafter(0.25, 0), None, told, 1)
    assert not accepts(0.0, law({2: 1}), told, 1), "a guess that its own law excludes"
    assert resample(0.999, None, told, 2) == 1


def test_equal_laws_reject_nothing() -> None:
    told, same = law({1: 10, 2: 30}), law({1: 1, 2: 3})
    assert all(accepts(1 - 2.0**-53, same, told, token) for token in (1, 2))
    with pytest.raises(ValueError, match="token 1 was rejected, and q̂ has nothing else"):
        resample(0.5, same, told, 1)


def test_large_laws_stay_within_whole_numbers() -> None:
    """256 weights of 16 bits on either side: no product overflows."""
    generator = np.random.default_rng(2)
    ids = np.arange(256)
    told = SparseDistribution(ids, np.full(256, 65535, np.uint16), 256 * 65535)
    weights = generator.integers(1, 65536, 256).astype(np.uint16)
    guessed = SparseDistribution(ids, weights, int(weights.sum(dtype=np.int64)))
    q, r = 1 / 256, weights / guessed.total
    cdf = np.maximum(0, q - r).cumsum()
    for w in generator.random(200):
        at = int(np.searchsorted(cdf, w * cdf[-1], side="right"))
        assert resample(float(w), guessed, told, int(weights.argmax())) == at
