"""Laws: every filter and all of them together against the oracle's, ties, extremes and rows that are no law."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
import torch

from kernels.sampling import SamplingParams, bad_rows, probabilities
from tests.kernels.reference import standardise

LAWS = [
    SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    for temperature, top_k, top_p, min_p in product((0.0, 0.3, 1.0, 2.5), (0, 1, 7, 1000), (1.0, 0.85, 0.2), (0.0, 0.1))
]


@pytest.mark.parametrize("V", [1, 2, 33, 700])
def test_laws_are_the_oracles(V: int) -> None:
    z = torch.randn(3, V, generator=torch.Generator().manual_seed(V), dtype=torch.float64) * 3
    for law in LAWS:
        expected = np.stack([standardise(row, law) for row in z.numpy()])
        np.testing.assert_allclose(probabilities(z, law, torch.float64).numpy(), expected, atol=1e-12)
        single = np.stack([standardise(row, law) for row in z.float().double().numpy()])
        np.testing.assert_allclose(probabilities(z.float(), law).numpy(), single, atol=2e-6, err_msg=str(law))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_dtypes_are_widened_first(dtype: torch.dtype) -> None:
    z = (torch.randn(2, 50, generator=torch.Generator().manual_seed(1)) * 4).to(dtype)
    for law in LAWS:
        p = probabilities(z, law)
        assert p.dtype == torch.float32
        assert torch.equal(p, probabilities(z.float(), law))


def test_the_logits_are_left_alone() -> None:
    z = torch.randn(2, 50, generator=torch.Generator().manual_seed(1))
    before = z.clone()
    for law in LAWS:
        probabilities(z, law)
    assert torch.equal(z, before)


def test_a_wide_nucleus_is_found() -> None:
    """A flat law of 20,000 tokens: 90 % of it is 18,000 tokens, far beyond any first look."""
    z = torch.randn(1, 20_000, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 0.1
    law = SamplingParams(top_p=0.9)
    p = probabilities(z, law, torch.float64)
    assert int((p > 0).sum()) > 17_000
    np.testing.assert_allclose(p[0].numpy(), standardise(z[0].numpy(), law), atol=1e-12)


# ---------------------------------------------------------------------------------------------------------- ties


def test_argmax_takes_the_lowest_id() -> None:
    z = torch.tensor([[1.0, 5.0, 5.0, 0.0], [2.0, 2.0, 2.0, 2.0]])
    assert probabilities(z, SamplingParams(temperature=0)).tolist() == [[0, 1, 0, 0], [1, 0, 0, 0]]


def test_top_k_keeps_all_equal_to_the_kth() -> None:
    z = torch.tensor([[3.0, 1.0, 2.0, 2.0, 2.0, 0.0]])
    kept = probabilities(z, SamplingParams(top_k=2)) > 0
    assert kept.tolist() == [[True, False, True, True, True, False]]


def test_top_p_keeps_all_equal_to_its_cut() -> None:
    z = torch.tensor([[0.4, 0.2, 0.2, 0.2]]).log()
    kept = probabilities(z, SamplingParams(top_p=0.5)) > 0
    assert kept.tolist() == [[True, True, True, True]]
    kept = probabilities(z, SamplingParams(top_p=0.35)) > 0
    assert kept.tolist() == [[True, False, False, False]]


def test_top_p_counts_the_mass_that_top_k_left() -> None:
    z = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    # Of the first two, renormalised, the first holds 4/7 = 0.57.
    assert (probabilities(z, SamplingParams(top_k=2, top_p=0.55)) > 0).sum() == 1
    assert (probabilities(z, SamplingParams(top_k=2, top_p=0.60)) > 0).sum() == 2
    assert (probabilities(z, SamplingParams(top_p=0.55)) > 0).sum() == 2


def test_close_logits_are_not_taken_for_equal() -> None:
    z = torch.tensor([[1.0, float(np.nextafter(np.float32(1), np.float32(0))), 0.0]])
    assert z[0, 0] > z[0, 1]
    for law in (SamplingParams(top_k=1), SamplingParams(top_p=0.1), SamplingParams(temperature=3.0, top_k=1)):
        assert (probabilities(z, law) > 0).tolist() == [[True, False, False]]


def test_temperature_comes_before_the_nucleus() -> None:
    z = torch.tensor([[2.0, 1.0, 0.0]])
    assert (probabilities(z, SamplingParams(temperature=0.2, top_p=0.9)) > 0).sum() == 1
    assert (probabilities(z, SamplingParams(temperature=5.0, top_p=0.9)) > 0).sum() == 3


def test_a_nucleus_is_never_empty() -> None:
    z = torch.tensor([[0.0, 3.0, 1.0]])
    assert probabilities(z, SamplingParams(top_p=1e-12)).tolist() == [[0, 1, 0]]


def test_min_p_of_one_keeps_the_best_alone() -> None:
    z = torch.tensor([[0.0, 3.0, 3.0, 2.99]])
    for temperature in (0.5, 1.0, 2.0):
        assert probabilities(z, SamplingParams(temperature=temperature, min_p=1.0)).tolist() == [[0, 0.5, 0.5, 0]]


# ------------------------------------------------------------------------------------------------------- extremes


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-45, 1e-300])
@pytest.mark.parametrize("filters", [{}, {"top_k": 2}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_tiny_temperatures_do_not_overflow(temperature: float, filters: dict[str, float]) -> None:
    z = torch.tensor([[-3e38, 3e38, 0.0], [1.0, 1.0, 0.5]])
    law = SamplingParams(temperature=temperature, **filters)  # type: ignore[arg-type]
    assert probabilities(z, law).tolist() == [[0, 1, 0], [0.5, 0.5, 0]]


def test_high_temperatures_flatten() -> None:
    p = probabilities(torch.tensor([[60.0, -60.0]]), SamplingParams(temperature=1e6))
    assert p[0].tolist() == pytest.approx([0.5, 0.5], abs=1e-4)


def test_banned_tokens_stay_out_of_every_law() -> None:
    z = torch.tensor([[-math.inf, 1.0, -math.inf, 0.0]])
    for law in LAWS:
        p = probabilities(z, law)
        assert p[0, [0, 2]].tolist() == [0, 0]
        assert float(p.sum()) == pytest.approx(1)


BAD = [[0.0, math.nan, 1.0], [-math.inf] * 3, [0.0, math.inf, 1.0], [math.nan] * 3]


def test_rows_that_are_no_law_are_reported() -> None:
    z = torch.tensor([*BAD, [0.0, -math.inf, 1.0], [3e38, -3e38, 0.0]])
    assert bad_rows(z).tolist() == [True, True, True, True, False, False]


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_a_bad_row_comes_out_as_nan_and_alone(law: SamplingParams) -> None:
    good = torch.tensor([[0.5, -1.0, 2.0]])
    for bad in BAD:
        p = probabilities(torch.cat((good, torch.tensor([bad]), good)), law)
        assert p[1].isnan().all()
        assert torch.equal(p[[0]], probabilities(good, law))
        assert torch.equal(p[0], p[2])


def test_no_rows_make_no_laws() -> None:
    for law in LAWS:
        assert probabilities(torch.empty(0, 5), law).shape == (0, 5)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_k": 2.5}, "top_k is 2.5"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"top_p": math.nan}, "top_p is nan"),
        ({"min_p": -0.5}, "min_p is -0.5"),
        ({"min_p": 2.0}, "min_p is 2.0"),
        ({"min_p": math.nan}, "min_p is nan"),
    ],
)
def test_fields_out_of_range_are_named(fields: dict[str, float], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        SamplingParams(**fields)  # type: ignore[arg-type]
