"""Draft tokens: that they are sampled from the q̂ returned, chosen by the noise, or not drawn at all."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from kernels.sampling import NO_LOGITS, UNSURE, Draw, Sample, SamplingParams, entropy, gumbel_max, probabilities, sample
from kernels.sparse import SparseConfig, sparsify
from tests.kernels import reference
from tests.kernels.cases import LAWS

BOUNDED = [SamplingParams(temperature=0), SamplingParams(), SamplingParams(temperature=0.5, top_k=5)]


def tokens(samples: list[Sample]) -> list[int]:
    return [each.token for each in samples]


@pytest.mark.parametrize("law", [SamplingParams(), SamplingParams(temperature=0.6, top_k=30, top_p=0.9)])
def test_q_returned_is_what_was_sampled_from(law: SamplingParams) -> None:
    """Invariant 1: over a sweep of uniforms each token comes as often as its q̂ says, to within one."""
    N = 1000
    z = torch.randn(1, 300, generator=torch.Generator().manual_seed(8)) * 2
    samples = [sample(z, [Draw(law, (k + 0.5) / N)], SparseConfig(keep_mass=0.9))[0] for k in range(N)]
    counts = np.bincount(tokens(samples), minlength=300)
    q = samples[0].q
    assert q is not None
    expected = np.array([q.probability(token) for token in range(300)])
    assert np.abs(counts - N * expected).max() < 1.0
    assert (counts > 0).sum() < (probabilities(z, law) > 0).sum()  # the truncation bites


def test_sampling_is_sparsifying_and_the_inverse_cdf() -> None:
    z = torch.randn(6, 700, generator=torch.Generator().manual_seed(8)) * 2
    laws = [SamplingParams(), SamplingParams(temperature=0), SamplingParams(top_k=3)] * 2
    us = [0.1, 0.3, 0.5, 0.7, 0.9, 0.99]
    samples = sample(z, [Draw(law, u) for law, u in zip(laws, us, strict=True)], SparseConfig())
    for row, found in enumerate(samples):
        if laws[row].is_greedy:
            assert (found.token, found.q) == (int(z[row].argmax()), None)
            assert found.scores is not None
            assert torch.equal(found.scores, z[row])
            continue
        (expected,) = sparsify(probabilities(z[row : row + 1], laws[row]), SparseConfig())
        assert found.q is not None
        assert found.scores is None
        assert np.array_equal(found.q.ids, expected.ids)
        assert np.array_equal(found.q.weights, expected.weights)
        assert found.token == expected.token_at(us[row])


def test_greedy_takes_the_lowest_of_equals() -> None:
    z = torch.tensor([[0.0, 2.0, 2.0]], dtype=torch.bfloat16)
    (found,) = sample(z, [Draw(SamplingParams(temperature=0), 0.9)], SparseConfig())
    assert (found.token, found.q) == (1, None)


@pytest.mark.parametrize("noise", [None, (5, 7)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [[math.nan, 0.0], [-math.inf] * 2, [math.inf, 0.0]])
def test_a_row_without_a_distribution_draws_nothing(
    temperature: float, bad: list[float], noise: tuple[int, int] | None
) -> None:
    z = torch.tensor([[0.0, 50.0], bad, [50.0, 0.0]])
    draws = [Draw(SamplingParams(temperature=temperature), 0.5, noise)] * 3
    samples = sample(z, draws, SparseConfig())
    assert tokens(samples) == [1, NO_LOGITS, 0]
    assert samples[1] == Sample(NO_LOGITS)
    bounded = [draw._replace(max_entropy=0.0) for draw in draws]
    assert sample(z, bounded, SparseConfig())[1] == Sample(NO_LOGITS)  # and is not unsure


def test_no_rows_draw_nothing_and_each_row_needs_a_draw() -> None:
    assert sample(torch.empty(0, 5), [], SparseConfig()) == []
    with pytest.raises(ValueError, match="1 draws for 2 rows"):
        sample(torch.zeros(2, 5), [Draw(SamplingParams())], SparseConfig())


# ------------------------------------------------------------------------------------------------------------ by noise


def test_the_draft_chooses_as_the_reference_would() -> None:
    """Rows of different laws and places in one call, each as the float64 reference has it by itself."""
    z = torch.randn(60, 300, generator=torch.Generator().manual_seed(4)) * 2
    laws = [LAWS[row % len(LAWS)] for row in range(60)]
    places = [(2**64 - 1 - row, 7 * row) for row in range(60)]
    samples = sample(z, [Draw(law, noise=place) for law, place in zip(laws, places, strict=True)], SparseConfig())
    for row, (found, law, (seed, position)) in enumerate(zip(samples, laws, places, strict=True)):
        q = reference.standardise(z[row].double().numpy(), law)
        assert found.token == reference.coupled_choice(q, seed, position)
        assert found.q is None
        assert found.scores is not None
        assert found.token == int(found.scores.argmax() if law.is_greedy else found.scores.argmin())


def test_a_token_without_mass_is_never_chosen() -> None:
    p = torch.zeros(200, 50)
    p[:, 7], p[:, 9] = 1e-30, 1.0
    draws = [Draw(SamplingParams(), noise=(1, at)) for at in range(200)]
    assert set(tokens(sample(p.log(), draws, SparseConfig()))) == {9}
    from kernels.rng import noise_rows

    assert gumbel_max(p, noise_rows([(1, at) for at in range(200)], 50)) == [9] * 200


def test_noise_outside_its_range_is_refused() -> None:
    with pytest.raises(ValueError, match="position is -1"):
        sample(torch.zeros(1, 4), [Draw(SamplingParams(), noise=(1, -1))], SparseConfig())


# ------------------------------------------------------------------------------------------------------------- entropy


@pytest.mark.parametrize("size", [1, 2, 256])
def test_equal_chances_have_the_logarithm_of_their_number(size: int) -> None:
    assert entropy(np.full(size, 1 / size)) == pytest.approx(math.log(size), abs=1e-12)


def test_entropy_is_the_sum_and_what_has_no_mass_adds_nothing() -> None:
    assert entropy(np.array([0.5, 0.0, 0.25, 0.25])) == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(4))


@pytest.mark.parametrize("by_noise", [False, True], ids=["uniforms", "noise"])
@pytest.mark.parametrize("law", BOUNDED, ids=str)
def test_a_row_above_its_bound_draws_nothing_and_leaves_its_neighbours(law: SamplingParams, by_noise: bool) -> None:
    """The others draw what they would have drawn without bounds."""
    z = torch.randn(6, 40, generator=torch.Generator().manual_seed(3)) * 3
    config = SparseConfig(keep_mass=0.9)
    draws = [
        Draw(law, noise=(5, place)) if by_noise else Draw(law, u)
        for place, u in enumerate([0.1, 0.3, 0.5, 0.7, 0.9, 0.99])
    ]
    free = sample(z, draws, config)
    p = probabilities(z, SamplingParams() if law.is_greedy else law).numpy()
    entropies = [
        entropy(row) if found.q is None else entropy(found.q.weights / found.q.total)
        for row, found in zip(p, free, strict=True)
    ]
    middle = sorted(entropies)[2]
    bounds = [middle, math.inf, middle, middle, 0.0, middle]
    expected = [
        UNSURE if value > bound + 1e-6 else found.token
        for found, value, bound in zip(free, entropies, bounds, strict=True)
    ]
    bounded = [draw._replace(max_entropy=bound) for draw, bound in zip(draws, bounds, strict=True)]
    assert tokens(sample(z, bounded, config)) == expected
    assert UNSURE in expected
    assert expected != [UNSURE] * 6
