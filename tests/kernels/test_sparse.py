"""q̂: what is kept, how it is rounded, that it is sampled from exactly, and what is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.sparse import MAX_SUPPORT, SparseConfig, SparseDistribution, sparsify, validate

JUST_BELOW_1 = 1 - 2**-53
CONFIGS = [
    SparseConfig(),
    SparseConfig(keep_mass=1.0),
    SparseConfig(keep_mass=0.5),
    SparseConfig(keep_mass=0.9, max_support=8),
    SparseConfig(max_support=1),
    SparseConfig(keep_mass=1e-9),
]


def _laws(V: int, sharpness: float, rows: int = 4) -> Tensor:
    z = torch.randn(rows, V, generator=torch.Generator().manual_seed(V))
    return torch.softmax(z * sharpness, -1)


def _by_sorting(p: np.ndarray, config: SparseConfig) -> tuple[list[int], list[int]]:
    """Return ids and weights the plain way: sort everything, cut, round."""
    order = np.argsort(-p, kind="stable")
    mass = p[order].astype(np.float64).cumsum()
    size = min(int((mass < config.keep_mass).sum()) + 1, config.max_support, len(p))
    ids = np.sort(order[:size])
    weights = np.rint(p[ids].astype(np.float64) * (65535 / float(p.max())))
    return ids[weights > 0].tolist(), weights[weights > 0].astype(int).tolist()


@pytest.mark.parametrize("V", [1, 2, 33, 1023, 1024, 1025, 4097, 5003])
@pytest.mark.parametrize("sharpness", [0.0, 0.3, 2.0, 6.0])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_the_fewest_best_tokens_with_the_mass_are_kept(V: int, sharpness: float, config: SparseConfig) -> None:
    probs = _laws(V, sharpness)
    for law, p in zip(sparsify(probs, config), probs.numpy(), strict=True):
        assert (law.ids.tolist(), law.weights.tolist()) == _by_sorting(p, config)


def test_equal_tokens_at_the_cut_stay_from_the_lowest_id() -> None:
    p = torch.full((1, 1000), 0.2 / 996)
    p[0, [10, 400, 700, 900]] = 0.2
    (law,) = sparsify(p, SparseConfig(max_support=6))
    assert law.ids.tolist() == [0, 1, 10, 400, 700, 900]
    (three,) = sparsify(p, SparseConfig(keep_mass=0.59))
    assert three.ids.tolist() == [10, 400, 700]


@pytest.mark.parametrize("sharpness", [0.0, 1.0, 8.0])
def test_laws_are_sound_and_close(sharpness: float) -> None:
    probs = _laws(3000, sharpness)
    for law, p in zip(sparsify(probs, SparseConfig()), probs.double().numpy(), strict=True):
        assert validate(law.ids, law.weights, 3000).total == law.total
        assert law.ids.dtype == np.int64
        assert law.weights.dtype == np.uint16
        assert law.weights.max() == 65535
        assert law.total < 2**24
        kept = p[law.ids] / p[law.ids].sum()
        np.testing.assert_allclose(law.weights / law.total, kept, atol=1e-5)


def test_sparsifying_is_a_function_of_the_row() -> None:
    probs = _laws(500, 2.0, rows=5)
    together, again = sparsify(probs, SparseConfig()), sparsify(probs, SparseConfig())
    for row, (one, other) in enumerate(zip(together, again, strict=True)):
        (alone,) = sparsify(probs[row : row + 1], SparseConfig())
        for law in (other, alone):
            assert np.array_equal(one.ids, law.ids)
            assert np.array_equal(one.weights, law.weights)


def test_what_rounds_to_zero_is_dropped() -> None:
    p = torch.tensor([[0.999995, 4.9e-6, 1e-7]])
    (law,) = sparsify(p, SparseConfig(keep_mass=1.0))
    assert law.ids.tolist() == [0]
    assert law.probability(0) == 1.0
    assert law.probability(1) == 0.0


def test_a_row_that_is_no_law_is_named() -> None:
    with pytest.raises(ValueError, match="row 1"):
        sparsify(torch.tensor([[0.5, 0.5], [math.nan, math.nan]]), SparseConfig())


# ------------------------------------------------------------------------------------------------------- sampling


def test_every_token_has_exactly_its_weight_of_the_uniforms() -> None:
    law = SparseDistribution(np.array([3, 5, 900]), np.array([7, 1, 92], np.uint16), 100)
    drawn = [law.token_at((k + 0.5) / 100) for k in range(100)]
    assert [drawn.count(token) for token in (3, 5, 900)] == [7, 1, 92]
    assert drawn == sorted(drawn)


def test_cell_edges_are_exact() -> None:
    """The first uniform of 53 bits at or above c/Σw, and the one before it, fall on either side."""
    weights = np.array([40000, 1, 65535, 3, 17], np.uint16)
    law = SparseDistribution(np.arange(5), weights, int(weights.sum()))
    for token, cumulative in enumerate(np.cumsum(weights.astype(np.int64))[:-1].tolist()):
        edge = -(-cumulative * 2**53 // law.total)
        assert law.token_at((edge - 1) * 2.0**-53) == token
        assert law.token_at(edge * 2.0**-53) == token + 1


@pytest.mark.parametrize("sharpness", [0.0, 3.0])
def test_the_ends_of_the_uniform_stay_in_the_support(sharpness: float) -> None:
    for law in sparsify(_laws(2000, sharpness), SparseConfig()):
        assert law.token_at(0.0) == law.ids[0]
        assert law.token_at(JUST_BELOW_1) == law.ids[-1]


def test_probability_is_the_weights_share() -> None:
    law = SparseDistribution(np.array([3, 5, 900], dtype=np.uint32), np.array([7, 1, 92], np.uint16), 100)
    asked = (-1, 0, 3, 4, 5, 900, 901)
    assert [law.probability(token) for token in asked] == [0, 0, 0.07, 0, 0.01, 0.92, 0]


# ------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("ids", "weights", "named"),
    [
        ([1, 2, 3], [1, 2], "3 token ids for 2 weights"),
        ([], [], "support holds 0 tokens"),
        (list(range(257)), [1] * 257, f"support holds 257 tokens; 1 to {MAX_SUPPORT}"),
        ([1, 5, 3], [1, 1, 1], "5 at place 1 comes before 3"),
        ([1, 5, 5], [1, 1, 1], "token id 5 is repeated at places 1 and 2"),
        ([1, 300], [1, 1], "token id 300 is outside the vocabulary of 300"),
        ([-2, 3], [1, 1], "token id -2 is outside the vocabulary of 300"),
        ([1, 2], [0, 0], "all 2 weights are 0"),
        ([1, 2, 7], [3, 0, 1], "weight of token 2 is 0"),
    ],
)
def test_what_makes_no_law_is_named(ids: list[int], weights: list[int], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        validate(np.array(ids, dtype=np.int64), np.array(weights, dtype=np.uint16), 300)


@pytest.mark.parametrize("dtype", [np.int64, np.uint32])
def test_a_sound_law_is_returned(dtype: type) -> None:
    law = validate(np.array([0, 7, 299], dtype=dtype), np.array([65535, 1, 9], np.uint16), 300)
    assert law.total == 65545


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"keep_mass": 0.0}, "keep_mass is 0.0"),
        ({"keep_mass": 1.5}, "keep_mass is 1.5"),
        ({"keep_mass": math.nan}, "keep_mass is nan"),
        ({"max_support": 0}, "max_support is 0"),
        ({"max_support": 257}, "max_support is 257"),
    ],
)
def test_settings_out_of_range_are_named(fields: dict[str, float], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        SparseConfig(**fields)  # type: ignore[arg-type]
