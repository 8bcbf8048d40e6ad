"""A law's entropy, and the rows from which nothing is drawn for it."""

import math

import numpy as np
import pytest
import torch

from kernels import coupled
from kernels.distribution import SamplingLaw, probabilities
from kernels.entropy import UNSURE, entropy, entropy_of_greedy, entropy_of_weights
from kernels.sparse import SparseConfig, draw

LAWS = [SamplingLaw(temperature=0), SamplingLaw(), SamplingLaw(temperature=0.5, top_k=5)]


@pytest.mark.parametrize("size", [1, 2, 256])
def test_equal_chances_have_the_logarithm_of_their_number(size: int) -> None:
    assert entropy(torch.full((size,), 1 / size)) == pytest.approx(math.log(size), abs=1e-6)
    assert entropy_of_weights(torch.full((size,), 65535)) == pytest.approx(math.log(size), abs=1e-12)
    assert entropy_of_greedy(torch.full((size,), -3.0)) == pytest.approx(math.log(size), abs=1e-6)


def test_it_is_the_sum_and_what_has_no_mass_adds_nothing() -> None:
    p = np.array([0.5, 0.0, 0.25, 0.25])
    expected = 0.5 * math.log(2) + 0.5 * math.log(4)
    assert entropy(torch.tensor(p)) == pytest.approx(expected)
    assert entropy_of_weights(torch.tensor([2, 1, 1])) == pytest.approx(expected)
    assert entropy_of_greedy(torch.tensor(p).log()) == pytest.approx(expected)
    assert math.isnan(entropy(torch.tensor([math.nan, 1.0])))


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_a_row_above_its_bound_draws_nothing_and_leaves_its_neighbours(law: SamplingLaw) -> None:
    """Of uniforms and of noise alike; what is drawn of the others is what would have been drawn without bounds."""
    z = torch.randn(6, 40, generator=torch.Generator().manual_seed(3)) * 3
    config, us = SparseConfig(keep_mass=0.9), [0.1, 0.3, 0.5, 0.7, 0.9, 0.99]
    noise = coupled.noise_of([(5, place) for place in range(6)], 40)
    free, laws = draw(z, law, config, us)
    chosen = coupled.draw(z, [law] * 6, noise)
    full = probabilities(z, SamplingLaw() if law.is_greedy else law)
    of_q = [entropy(row) for row in full]
    of_sent = [
        entropy_of_greedy(row) if told is None else entropy_of_weights(torch.tensor(told.weights.astype(np.int64)))
        for row, told in zip(z, laws, strict=True)
    ]
    for entropies, drawn, bounded in (
        (of_sent, free, lambda bounds: draw(z, law, config, us, bounds)[0]),
        (of_q, chosen, lambda bounds: coupled.draw(z, [law] * 6, noise, bounds)),
    ):
        middle = sorted(entropies)[2]
        bounds = [middle, math.inf, middle, middle, 0.0, middle]
        expected = [
            UNSURE if value > bound + 1e-6 else token
            for token, value, bound in zip(drawn, entropies, bounds, strict=True)
        ]
        assert bounded(bounds) == expected
        assert UNSURE in expected
        assert expected != [UNSURE] * 6


def test_a_row_that_is_no_law_is_that_and_not_unsure() -> None:
    z = torch.tensor([[math.nan, 0.0], [0.0, 0.0]])
    for law in LAWS:
        assert draw(z, law, SparseConfig(), [0.5] * 2, [0.0, 0.0])[0] == [-1, UNSURE]
        assert coupled.draw(z, [law] * 2, torch.full((2, 2), -0.5), [0.0, 0.0]) == [-1, UNSURE]


def test_there_is_one_bound_for_each_row() -> None:
    with pytest.raises(ValueError, match="1 bounds for 2 rows"):
        draw(torch.zeros(2, 3), SamplingLaw(), SparseConfig(), [0.5] * 2, [1.0])
    with pytest.raises(ValueError, match="1 bounds for 2 rows"):
        coupled.draw(torch.zeros(2, 3), [SamplingLaw()] * 2, torch.zeros(2, 3), [1.0])
