"""Distributions: each filter and all together against the reference, ties, extremes, bad rows; and draws from them."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
import torch

from kernels.rng import noise_rows
from kernels.sampling import (
    NO_LOGITS,
    UNSURE,
    Draw,
    Sample,
    SamplingParams,
    bad_rows,
    entropy,
    gumbel_max,
    probabilities,
    sample,
)
from kernels.sparse import SparseConfig, sparsify
from tests.kernels import reference
from tests.kernels.cases import GREEDY, PARAMS, gaussian

GRID = [
    SamplingParams(temperature, top_k, top_p, min_p)
    for temperature, top_k, top_p, min_p in product((0.0, 0.3, 1.0, 2.5), (0, 1, 7, 1000), (1.0, 0.85, 0.2), (0.0, 0.1))
]
INF = math.inf


@pytest.mark.parametrize("V", [1, 2, 33, 700])
def test_distributions_are_those_of_the_reference(V: int) -> None:
    z = torch.randn(3, V, generator=torch.Generator().manual_seed(V), dtype=torch.float64) * 3
    for params in GRID:
        expected = np.stack([reference.standardise(row, params) for row in z.numpy()])
        np.testing.assert_allclose(probabilities(z, params, torch.float64).numpy(), expected, atol=1e-12)
        single = np.stack([reference.standardise(row, params) for row in z.float().double().numpy()])
        np.testing.assert_allclose(probabilities(z.float(), params).numpy(), single, atol=2e-6, err_msg=str(params))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_dtypes_are_widened_and_left_alone(dtype: torch.dtype) -> None:
    z = gaussian(1, 2, 50, scale=4).to(dtype)
    before = z.clone()
    for params in GRID:
        p = probabilities(z, params)
        assert p.dtype == torch.float32
        assert torch.equal(p, probabilities(z.float(), params))
    assert torch.equal(z, before)


def test_a_wide_nucleus_is_found() -> None:
    """90 % of a flat distribution of 20,000 tokens is 18,000 tokens, far beyond any first look."""
    z = torch.randn(1, 20_000, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 0.1
    p = probabilities(z, SamplingParams(top_p=0.9), torch.float64)
    assert int((p > 0).sum()) > 17_000
    np.testing.assert_allclose(p[0].numpy(), reference.standardise(z[0].numpy(), SamplingParams(top_p=0.9)), atol=1e-12)


CLOSE = [1.0, float(np.nextafter(np.float32(1), np.float32(0))), 0.0]
LOGS = np.log([0.4, 0.3, 0.2, 0.1]).tolist()
TIED = np.log([0.4, 0.2, 0.2, 0.2]).tolist()


@pytest.mark.parametrize(
    ("z", "params", "kept"),
    [
        ([1.0, 5.0, 5.0, 0.0], GREEDY, [1]),
        ([2.0, 2.0, 2.0, 2.0], GREEDY, [0]),
        ([3.0, 1.0, 2.0, 2.0, 2.0, 0.0], SamplingParams(top_k=2), [0, 2, 3, 4]),
        (TIED, SamplingParams(top_p=0.5), [0, 1, 2, 3]),
        (TIED, SamplingParams(top_p=0.35), [0]),
        ([math.log(2), 0.0, 0.0], SamplingParams(top_p=0.5), [0]),  # its mass is exactly 0.5, which is enough
        # Of the mass that top-k left, the first token holds 4/7 = 0.57.
        (LOGS, SamplingParams(top_k=2, top_p=0.55), [0]),
        (LOGS, SamplingParams(top_k=2, top_p=0.60), [0, 1]),
        (LOGS, SamplingParams(top_p=0.55), [0, 1]),
        *((CLOSE, params, [0]) for params in (SamplingParams(top_k=1), SamplingParams(top_p=0.1))),
        (CLOSE, SamplingParams(temperature=3.0, top_k=1), [0]),
        # The temperature comes before the nucleus.
        ([2.0, 1.0, 0.0], SamplingParams(temperature=0.2, top_p=0.9), [0]),
        ([2.0, 1.0, 0.0], SamplingParams(temperature=5.0, top_p=0.9), [0, 1, 2]),
        ([0.0, 3.0, 1.0], SamplingParams(top_p=1e-12), [1]),
        *(([0.0, 3.0, 3.0, 2.99], SamplingParams(temperature=t, min_p=1.0), [1, 2]) for t in (0.5, 1.0, 2.0)),
    ],
)
def test_filters_keep_ties_and_cut_in_order(z: list[float], params: SamplingParams, kept: list[int]) -> None:
    assert probabilities(torch.tensor([z]), params)[0].nonzero().flatten().tolist() == kept


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-45, 1e-300])
@pytest.mark.parametrize("filters", [{}, {"top_k": 2}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_tiny_temperatures_do_not_overflow(temperature: float, filters: dict[str, float]) -> None:
    z = torch.tensor([[-3e38, 3e38, 0.0], [1.0, 1.0, 0.5]])
    params = SamplingParams(temperature=temperature, **filters)  # type: ignore[arg-type]
    assert probabilities(z, params).tolist() == [[0, 1, 0], [0.5, 0.5, 0]]


def test_high_temperatures_flatten() -> None:
    p = probabilities(torch.tensor([[60.0, -60.0]]), SamplingParams(temperature=1e6))
    assert p[0].tolist() == pytest.approx([0.5, 0.5], abs=1e-4)


BAD = torch.tensor([[0.0, math.nan, 1.0], [-INF] * 3, [0.0, INF, 1.0], [math.nan] * 3])


@pytest.mark.parametrize("params", GRID, ids=str)
def test_bans_bad_rows_and_no_rows_under_every_filter(params: SamplingParams) -> None:
    banned = probabilities(torch.tensor([[-INF, 1.0, -INF, 0.0]]), params)
    assert banned[0, [0, 2]].tolist() == [0, 0]
    assert float(banned.sum()) == pytest.approx(1)
    good = torch.tensor([[0.5, -1.0, 2.0]])
    for bad in BAD:
        p = probabilities(torch.cat((good, bad[None], good)), params)
        assert p[1].isnan().all()
        assert torch.equal(p[[0, 2]], probabilities(good, params).expand(2, 3))
    assert probabilities(torch.empty(0, 5), params).shape == (0, 5)


def test_bad_rows_are_reported() -> None:
    z = torch.cat((BAD, torch.tensor([[0.0, -INF, 1.0], [3e38, -3e38, 0.0]])))
    assert bad_rows(z).tolist() == [True, True, True, True, False, False]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("temperature", value) for value in (math.nan, INF, -0.1)),
        *(("top_k", value) for value in (-1, 2.5)),
        *(("top_p", value) for value in (0.0, 1.1, math.nan)),
        *(("min_p", value) for value in (-0.5, 2.0, math.nan)),
    ],
)
def test_fields_out_of_range_are_named(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{field} is {value}"):
        SamplingParams(**{field: value})  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------------------------- draws


def tokens(samples: list[Sample]) -> list[int]:
    return [each.token for each in samples]


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=0.6, top_k=30, top_p=0.9)])
def test_q_returned_is_what_was_sampled_from(params: SamplingParams) -> None:
    """Invariant 1: over a sweep of uniforms each token comes as often as its q̂ says, to within one."""
    N = 1000
    z = gaussian(8, 1, 300, scale=2)
    samples = [sample(z, [Draw(params, (k + 0.5) / N)], SparseConfig(keep_mass=0.9))[0] for k in range(N)]
    counts = np.bincount(tokens(samples), minlength=300)
    q = samples[0].q
    assert q is not None
    assert np.abs(counts - N * np.array([q.probability(token) for token in range(300)])).max() < 1.0
    assert (counts > 0).sum() < (probabilities(z, params) > 0).sum()  # the truncation bites


def test_sampling_is_sparsifying_and_the_inverse_cdf() -> None:
    z = gaussian(8, 6, 700, scale=2)
    params = [SamplingParams(), GREEDY, SamplingParams(top_k=3)] * 2
    us = [0.1, 0.3, 0.5, 0.7, 0.9, 0.99]
    samples = sample(z, [Draw(each, u) for each, u in zip(params, us, strict=True)], SparseConfig())
    for row, found in enumerate(samples):
        if params[row].is_greedy:
            assert (found.token, found.q) == (int(z[row].argmax()), None)
            assert found.scores is not None
            assert torch.equal(found.scores, z[row])
            continue
        (expected,) = sparsify(probabilities(z[row : row + 1], params[row]), SparseConfig())
        assert found.q is not None
        assert found.scores is None
        assert np.array_equal(found.q.ids, expected.ids)
        assert np.array_equal(found.q.weights, expected.weights)
        assert found.token == expected.token_at(us[row])


def test_greedy_draws_take_the_lowest_of_equals() -> None:
    (found,) = sample(torch.tensor([[0.0, 2.0, 2.0]], dtype=torch.bfloat16), [Draw(GREEDY, 0.9)], SparseConfig())
    assert (found.token, found.q) == (1, None)


@pytest.mark.parametrize("noise", [None, (5, 7)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [[math.nan, 0.0], [-INF] * 2, [INF, 0.0]])
def test_a_bad_row_draws_nothing(temperature: float, bad: list[float], noise: tuple[int, int] | None) -> None:
    z = torch.tensor([[0.0, 50.0], bad, [50.0, 0.0]])
    draw = Draw(SamplingParams(temperature=temperature), 0.5, noise)
    samples = sample(z, [draw] * 3, SparseConfig())
    assert tokens(samples) == [1, NO_LOGITS, 0]
    assert samples[1] == Sample(NO_LOGITS)
    assert sample(z, [draw._replace(max_entropy=0.0)] * 3, SparseConfig())[1] == Sample(NO_LOGITS)  # and not UNSURE


def test_each_row_needs_a_draw() -> None:
    assert sample(torch.empty(0, 5), [], SparseConfig()) == []
    with pytest.raises(ValueError, match="1 draws for 2 rows"):
        sample(torch.zeros(2, 5), [Draw(SamplingParams())], SparseConfig())


def test_draws_by_noise_are_those_of_the_reference() -> None:
    z = gaussian(4, 60, 300, scale=2)
    params = [PARAMS[row % len(PARAMS)] for row in range(60)]
    places = [(2**64 - 1 - row, 7 * row) for row in range(60)]
    samples = sample(z, [Draw(each, noise=at) for each, at in zip(params, places, strict=True)], SparseConfig())
    for row, (found, each, (seed, position)) in enumerate(zip(samples, params, places, strict=True)):
        q = reference.standardise(z[row].double().numpy(), each)
        assert found.token == reference.coupled_choice(q, seed, position)
        assert found.q is None
        assert found.scores is not None
        assert found.token == int(found.scores.argmax() if each.is_greedy else found.scores.argmin())


def test_a_token_without_mass_is_never_chosen() -> None:
    p = torch.zeros(200, 50)
    p[:, 7], p[:, 9] = 1e-30, 1.0
    places = [(1, at) for at in range(200)]
    draws = [Draw(SamplingParams(), noise=place) for place in places]
    assert set(tokens(sample(p.log(), draws, SparseConfig()))) == {9}
    assert gumbel_max(p, noise_rows(places, 50)) == [9] * 200


def test_noise_outside_its_range_is_refused() -> None:
    with pytest.raises(ValueError, match="position is -1"):
        sample(torch.zeros(1, 4), [Draw(SamplingParams(), noise=(1, -1))], SparseConfig())


@pytest.mark.parametrize(
    ("p", "expected"),
    [
        *((np.full(size, 1 / size), math.log(size)) for size in (1, 2, 256)),
        (np.array([0.5, 0.0, 0.25, 0.25]), 0.5 * math.log(2) + 0.5 * math.log(4)),
    ],
)
def test_entropy_is_the_sum_and_what_has_no_mass_adds_nothing(p: np.ndarray, expected: float) -> None:
    assert entropy(p) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("by_noise", [False, True], ids=["uniforms", "noise"])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(), SamplingParams(temperature=0.5, top_k=5)], ids=str)
def test_a_row_above_its_entropy_bound_draws_nothing_and_leaves_its_neighbours(
    params: SamplingParams, by_noise: bool
) -> None:
    z = gaussian(3, 6, 40, scale=3)
    config = SparseConfig(keep_mass=0.9)
    us = [0.1, 0.3, 0.5, 0.7, 0.9, 0.99]
    draws = [Draw(params, noise=(5, place)) if by_noise else Draw(params, u) for place, u in enumerate(us)]
    free = sample(z, draws, config)
    p = probabilities(z, SamplingParams() if params.is_greedy else params).numpy()
    entropies = [
        entropy(row) if found.q is None else entropy(found.q.weights / found.q.total)
        for row, found in zip(p, free, strict=True)
    ]
    middle = sorted(entropies)[2]
    bounds = [middle, INF, middle, middle, 0.0, middle]
    expected = [
        UNSURE if value > bound + 1e-6 else found.token
        for found, value, bound in zip(free, entropies, bounds, strict=True)
    ]
    bounded = [draw._replace(max_entropy=bound) for draw, bound in zip(draws, bounds, strict=True)]
    assert tokens(sample(z, bounded, config)) == expected
    assert UNSURE in expected
    assert expected != [UNSURE] * 6
