"""q̂: truncation, rounding, exact sampling, and validation."""

from itertools import chain

import numpy as np
import pytest
import torch

from kernels.sparse import MAX_SUPPORT, SparseConfig, SparseDistribution, truncate, validate
from kernels.verify_c import is_available, valid_supports
from tests.kernels.cases import gaussian, sparsify

CONFIGS = [
    SparseConfig(),
    SparseConfig(keep_mass=1.0),
    SparseConfig(keep_mass=0.9, max_support=8),
    SparseConfig(max_support=1),
    SparseConfig(keep_mass=1e-9),
]


def _by_sorting(p: np.ndarray, config: SparseConfig) -> tuple[list[int], list[int]]:
    """Return ids and weights by sorting, truncating and rounding."""
    order = np.argsort(-p, kind="stable")
    mass = p[order].astype(np.float64).cumsum()
    size = min(int((mass < config.keep_mass).sum()) + 1, config.max_support, len(p))
    ids = np.sort(order[:size])
    weights = np.rint(p[ids].astype(np.float64) * (65535 / float(p.max())))
    return ids[weights > 0].tolist(), weights[weights > 0].astype(int).tolist()


@pytest.mark.parametrize("V", [1, 2, 1023, 1024, 1025, 5003])
@pytest.mark.parametrize("sharpness", [0.0, 2.0, 6.0])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_the_fewest_best_tokens_with_the_mass_are_kept(V: int, sharpness: float, config: SparseConfig) -> None:
    probs = torch.softmax(gaussian(V, 4, V, scale=sharpness), -1)
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


@pytest.mark.parametrize("weight", [0.3, 0.45, 0.55, 1.5])
def test_tokens_whose_weight_rounds_to_0_are_dropped(weight: float) -> None:
    p = np.array([weight, 65535 - 3 - weight, 3], np.float64).astype(np.float32) / np.float32(65535)
    q = truncate(p, SparseConfig(keep_mass=1.0))
    assert (q.ids.tolist(), q.weights.tolist()) == _by_sorting(p, SparseConfig(keep_mass=1.0))
    assert len(q.ids) == 2 + (weight > 0.5)
    assert q.total == q.weights.sum(dtype=np.int64)


def test_cell_edges_are_exact() -> None:
    """The first uniform of 53 bits at or above c/Σw, and the one before it, fall on either side."""
    weights = np.array([40000, 1, 65535, 3, 17], np.uint16)
    q = SparseDistribution(np.arange(5), weights, int(weights.sum()))
    for token, cumulative in enumerate(np.cumsum(weights.astype(np.int64))[:-1].tolist()):
        edge = -(-cumulative * 2**53 // q.total)
        assert q.token_at((edge - 1) * 2.0**-53) == token
        assert q.token_at(edge * 2.0**-53) == token + 1


INVALID: list[tuple[list[int], list[int], str]] = [
    ([1, 2, 3], [1, 2], "token_ids has length 3 and weights 2"),
    ([], [], "token_ids has length 0"),
    (list(range(257)), [1] * 257, f"token_ids has length 257; it must be 1 to {MAX_SUPPORT}"),
    ([1, 5, 3], [1, 1, 1], "5 at index 1 is followed by 3"),
    ([1, 5, 5], [1, 1, 1], "token_ids has 5 twice, at indices 1 and 2"),
    ([1, 300], [1, 1], "token_ids has 300; ids must be below 300"),
    ([-2, 3], [1, 1], "token_ids has -2; ids must be below 300"),
    ([1, 2], [0, 0], "all 2 weights are 0"),
    ([1, 2, 7], [3, 0, 1], "weight of token 2 is 0"),
]


@pytest.mark.parametrize(("ids", "weights", "named"), INVALID)
def test_an_invalid_q_is_refused(ids: list[int], weights: list[int], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        validate(np.array(ids, dtype=np.int64), np.array(weights, dtype=np.uint16), 300)


GOOD = [([3, 4, 299], [5, 1, 9], 4), ([0, 1], [65535, 65535], 0), ([0, 7, 8, 299], [1, 1, 2, 1], 299)]
"""Ids, weights and a token of each."""


needs_c = pytest.mark.skipif(not is_available(), reason="there is no library in C for this processor")


def _totals(several: list[tuple[list[int], list[int], int]]) -> list[int] | None:
    ids, weights, drafted = zip(*several, strict=True)
    every = np.array(list(chain(*ids)), np.int64).astype(np.uint32), np.array(list(chain(*weights)), np.uint16)
    return valid_supports(every[0].tobytes(), every[1].tobytes(), list(map(len, ids)), drafted, 300)


@needs_c
def test_several_valid_q_are_found_in_one_go() -> None:
    assert _totals(GOOD) == [sum(weights) for _, weights, _ in GOOD]


@needs_c
@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize(("ids", "weights"), [each[:2] for each in INVALID[1:]])
def test_several_q_are_refused_if_one_is_invalid(at: int, ids: list[int], weights: list[int]) -> None:
    assert _totals([*GOOD[:at], (ids, weights, ids[0] if ids else 0), *GOOD[at + 1 :]]) is None


@needs_c
@pytest.mark.parametrize("token", [0, 2, 5, 298])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_several_q_are_refused_if_a_token_is_outside_its_own(at: int, token: int) -> None:
    ids, weights, _ = GOOD[at]
    found = _totals([*GOOD[:at], (ids, weights, token), *GOOD[at + 1 :]])
    assert (found is None) == (token not in ids)


@pytest.mark.parametrize("dtype", [np.int64, np.uint32])
def test_probabilities_are_weights_in_proportion_and_0_elsewhere(dtype: type[np.generic]) -> None:
    ids, weights = [2, 3, 9, 2**31 + 5], [5, 1, 65535, 9]
    q = SparseDistribution(np.array(ids, dtype), np.array(weights, np.uint16), sum(weights))
    assert [q.probability(each) for each in ids] == [weight / sum(weights) for weight in weights]
    assert [q.probability(each) for each in (-1, 0, 1, 4, 8, 10, 2**31 + 4, 2**31 + 6, 2**32)] == [0.0] * 9
