"""q̂: what is kept, how it is rounded, that it is sampled from exactly, and what is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.sparse import MAX_SUPPORT, SparseConfig, SparseDistribution, sparsify, validate
from tests.kernels.cases import LAST, gaussian, sparse

CONFIGS = [
    SparseConfig(),
    SparseConfig(keep_mass=1.0),
    SparseConfig(keep_mass=0.5),
    SparseConfig(keep_mass=0.9, max_support=8),
    SparseConfig(max_support=1),
    SparseConfig(keep_mass=1e-9),
]


def _softmax(V: int, sharpness: float, rows: int = 4) -> Tensor:
    return torch.softmax(gaussian(V, rows, V, scale=sharpness), -1)


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
    probs = _softmax(V, sharpness)
    for q, p in zip(sparsify(probs, config), probs.numpy(), strict=True):
        assert (q.ids.tolist(), q.weights.tolist()) == _by_sorting(p, config)


def test_equal_tokens_at_the_cut_stay_from_the_lowest_id() -> None:
    p = torch.full((1, 1000), 0.2 / 996)
    p[0, [10, 400, 700, 900]] = 0.2
    for config, ids in (
        (SparseConfig(max_support=6), [0, 1, 10, 400, 700, 900]),
        (SparseConfig(keep_mass=0.59), [10, 400, 700]),
    ):
        assert sparsify(p, config)[0].ids.tolist() == ids


@pytest.mark.parametrize("sharpness", [0.0, 1.0, 8.0])
def test_q_is_valid_and_close_to_the_distribution(sharpness: float) -> None:
    probs = _softmax(3000, sharpness)
    for q, p in zip(sparsify(probs, SparseConfig()), probs.double().numpy(), strict=True):
        assert validate(q.ids, q.weights, 3000).total == q.total < 2**24
        assert (str(q.ids.dtype), str(q.weights.dtype), q.weights.max()) == ("int64", "uint16", 65535)
        np.testing.assert_allclose(q.weights / q.total, p[q.ids] / p[q.ids].sum(), atol=1e-5)
        assert (q.token_at(0.0), q.token_at(LAST)) == (q.ids[0], q.ids[-1])


def test_q_depends_on_its_row_alone() -> None:
    probs = _softmax(500, 2.0, rows=5)
    together, again = sparsify(probs, SparseConfig()), sparsify(probs, SparseConfig())
    for row, (one, other) in enumerate(zip(together, again, strict=True)):
        for q in (other, *sparsify(probs[row : row + 1], SparseConfig())):
            assert np.array_equal(one.ids, q.ids)
            assert np.array_equal(one.weights, q.weights)


def test_weights_that_round_to_zero_are_dropped() -> None:
    (q,) = sparsify(torch.tensor([[0.999995, 4.9e-6, 1e-7]]), SparseConfig(keep_mass=1.0))
    assert q.ids.tolist() == [0]
    assert (q.probability(0), q.probability(1)) == (1.0, 0.0)


def test_a_row_of_nan_is_named() -> None:
    with pytest.raises(ValueError, match="row 1"):
        sparsify(torch.tensor([[0.5, 0.5], [math.nan, math.nan]]), SparseConfig())


def test_every_token_has_exactly_its_weight_of_the_uniforms() -> None:
    q = sparse({3: 7, 5: 1, 900: 92})
    drawn = [q.token_at((k + 0.5) / 100) for k in range(100)]
    assert [drawn.count(token) for token in (3, 5, 900)] == [7, 1, 92]
    assert drawn == sorted(drawn)
    asked = (-1, 0, 3, 4, 5, 900, 901)
    assert [q.probability(token) for token in asked] == [0, 0, 0.07, 0, 0.01, 0.92, 0]


def test_cell_edges_are_exact() -> None:
    """The first uniform of 53 bits at or above c/Σw, and the one before it, fall on either side."""
    weights = np.array([40000, 1, 65535, 3, 17], np.uint16)
    q = SparseDistribution(np.arange(5), weights, int(weights.sum()))
    for token, cumulative in enumerate(np.cumsum(weights.astype(np.int64))[:-1].tolist()):
        edge = -(-cumulative * 2**53 // q.total)
        assert q.token_at((edge - 1) * 2.0**-53) == token
        assert q.token_at(edge * 2.0**-53) == token + 1


@pytest.mark.parametrize("dtype", [np.int64, np.uint32])
def test_a_valid_q_is_returned(dtype: type) -> None:
    q = validate(np.array([0, 7, 299], dtype=dtype), np.array([65535, 1, 9], np.uint16), 300)
    assert q.total == 65545
    assert q.probability(7) == 1 / 65545


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
def test_an_invalid_q_is_refused(ids: list[int], weights: list[int], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        validate(np.array(ids, dtype=np.int64), np.array(weights, dtype=np.uint16), 300)


@pytest.mark.parametrize(
    ("field", "value"),
    [("keep_mass", 0.0), ("keep_mass", 1.5), ("keep_mass", math.nan), ("max_support", 0), ("max_support", 257)],
)
def test_settings_out_of_range_are_named(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{field} is {value}"):
        SparseConfig(**{field: value})  # type: ignore[arg-type]
