"""Distributions against the reference, with ties and bad rows; and draws from them."""

import math
from itertools import product

import numpy as np
import pytest
import torch

from kernels.sampling import NO_LOGITS, UNSURE, Draw, Sample, SamplingParams, probabilities, sample
from kernels.sigmoid import EXCLUDED, draft_logits
from kernels.sparse import SparseConfig
from tests.kernels import reference
from tests.kernels.cases import GREEDY, PARAMS, gaussian

GRID = [
    SamplingParams(temperature, top_k, top_p, min_p)
    for temperature, top_k, top_p, min_p in product((0.0, 0.3, 1.0, 2.5), (0, 1, 7, 1000), (1.0, 0.85, 0.2), (0.0, 0.1))
]
INF = math.inf


@pytest.mark.parametrize("V", [1, 33, 700, 20_000])
def test_distributions_are_those_of_the_reference(V: int) -> None:
    z = torch.randn(3, V, generator=torch.Generator().manual_seed(V), dtype=torch.float64) * 3
    for params in GRID:
        expected = np.stack([reference.standardise(row, params) for row in z.numpy()])
        np.testing.assert_allclose(probabilities(z, params, torch.float64).numpy(), expected, atol=1e-12)
        single = np.stack([reference.standardise(row, params) for row in z.float().double().numpy()])
        np.testing.assert_allclose(probabilities(z.float(), params).numpy(), single, atol=2e-6, err_msg=str(params))


CLOSE = [1.0, float(np.nextafter(np.float32(1), np.float32(0))), 0.0]
LOGS = np.log([0.4, 0.3, 0.2, 0.1]).tolist()
TIED = np.log([0.4, 0.2, 0.2, 0.2]).tolist()


@pytest.mark.parametrize(
    ("z", "params", "kept"),
    [
        ([1.0, 5.0, 5.0, 0.0], GREEDY, [1]),
        ([3.0, 1.0, 2.0, 2.0, 2.0, 0.0], SamplingParams(top_k=2), [0, 2, 3, 4]),
        (TIED, SamplingParams(top_p=0.5), [0, 1, 2, 3]),
        ([math.log(2), 0.0, 0.0], SamplingParams(top_p=0.5), [0]),  # its mass is exactly 0.5, which is enough
        # Of the mass that top-k left, the first token holds 4/7 = 0.57.
        (LOGS, SamplingParams(top_k=2, top_p=0.55), [0]),
        (LOGS, SamplingParams(top_p=0.55), [0, 1]),
        (CLOSE, SamplingParams(top_k=1), [0]),
        # The temperature comes before the nucleus.
        ([2.0, 1.0, 0.0], SamplingParams(temperature=0.2, top_p=0.9), [0]),
        ([2.0, 1.0, 0.0], SamplingParams(temperature=5.0, top_p=0.9), [0, 1, 2]),
        *(([0.0, 3.0, 3.0, 2.99], SamplingParams(temperature=t, min_p=1.0), [1, 2]) for t in (0.5, 1.0, 2.0)),
    ],
)
def test_filters_keep_ties_and_cut_in_order(z: list[float], params: SamplingParams, kept: list[int]) -> None:
    assert probabilities(torch.tensor([z]), params)[0].nonzero().flatten().tolist() == kept


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


def test_draws_by_noise_are_those_of_the_reference() -> None:
    z = gaussian(4, 60, 300, scale=2)
    params = [PARAMS[row % len(PARAMS)] for row in range(60)]
    positions = [(2**64 - 1 - row, 7 * row) for row in range(60)]
    samples = sample(z, [Draw(each, noise=at) for each, at in zip(params, positions, strict=True)], SparseConfig())
    for row, (found, each, (seed, position)) in enumerate(zip(samples, params, positions, strict=True)):
        q = reference.standardise(z[row].double().numpy(), each)
        assert found.token == reference.coupled_choice(q, seed, position)
        assert found.q is None
        assert found.scores is not None
        assert found.token == int(found.scores.argmax() if each.is_greedy else found.scores.argmin())


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(), SamplingParams(temperature=0.5, top_k=5)], ids=str)
def test_a_row_above_its_entropy_bound_draws_nothing_and_leaves_its_neighbours(params: SamplingParams) -> None:
    """The entropy of a greedy token is that of the unscaled distribution; else it is that of q̂."""
    z, config = gaussian(3, 6, 40, scale=3), SparseConfig(keep_mass=0.9)
    draws = [Draw(params, u) for u in (0.1, 0.3, 0.5, 0.7, 0.9, 0.99)]
    free = sample(z, draws, config)
    p = torch.softmax(z.double(), -1).numpy()
    q = [row if found.q is None else found.q.weights / found.q.total for row, found in zip(p, free, strict=True)]
    entropies = [float(-(each[each > 0] * np.log(each[each > 0])).sum()) for each in q]
    bound = sorted(entropies)[2] + 1e-6
    expected = [UNSURE if value > bound else found.token for found, value in zip(free, entropies, strict=True)]
    assert tokens(sample(z, [draw._replace(max_entropy=bound) for draw in draws], config)) == expected


def test_draft_logits_are_scaled_filtered_and_in_sixteen_bits() -> None:
    z = torch.tensor([[1.0, 3.0, 2.0, -math.inf], [-1e9, 1e9, 0.0, 0.0]])
    scaled, filtered = (draft_logits(z, each) for each in (SamplingParams(temperature=0.5), SamplingParams(top_k=2)))
    assert scaled[0].values.tolist() == [2.0, 6.0, 4.0, EXCLUDED]
    assert scaled[1].values.tolist() == [-65472.0, 65504.0, 0.0, 0.0]  # the range of 16 bits without EXCLUDED
    assert filtered[0].values.tolist() == [EXCLUDED, 3.0, 2.0, EXCLUDED]
    assert scaled[0].values.dtype == torch.float16
    with pytest.raises(ValueError, match="temperature is 0"):
        draft_logits(z, GREEDY)
