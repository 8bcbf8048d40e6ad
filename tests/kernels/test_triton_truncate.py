"""Draft tokens sampled by the kernels: q̂ is that of the host up to rounding, and is what the tokens are drawn from."""

import math
import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels import sampling
from kernels.sampling import NO_LOGITS, Draw, SamplingParams
from kernels.sparse import SparseConfig
from kernels.verify_pack import numbers_of_draw
from outrider.evaluation.chisquare import goodness_of_fit
from tests.kernels.cases import LAST, gaussian
from tests.kernels.paths import DEVICE, TRITON

pytestmark = TRITON.marks


PLAIN = SamplingParams()
FILTERS = [
    SamplingParams(top_k=5),
    SamplingParams(top_p=0.6),
    SamplingParams(min_p=0.5),
    SamplingParams(top_k=7, top_p=0.8, min_p=0.03),
    SamplingParams(top_k=1),
    SamplingParams(top_p=1e-9),
    SamplingParams(min_p=1.0),
]


def sampled(
    z: Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float], config: SparseConfig
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    from kernels.triton_truncate import sample_truncated

    draws = [Draw(each, u) for each, u in zip(params, uniforms, strict=True)]
    ints, floats = zip(*(numbers_of_draw(draw, row, row) for row, draw in enumerate(draws)), strict=True)
    found = sample_truncated(
        z.to(DEVICE),
        torch.tensor(ints, device=DEVICE),
        torch.tensor(floats, dtype=torch.float64, device=DEVICE),
        torch.tensor(uniforms, dtype=torch.float64, device=DEVICE),
        config,
    )
    tokens, ids, weights = (each.cpu().numpy() for each in found)
    return tokens, ids, weights


@pytest.mark.parametrize("config", [SparseConfig(), SparseConfig(0.5, 8), SparseConfig(1.0, 64), SparseConfig(0.9, 1)])
@pytest.mark.parametrize("V", [2, 33, 2100])
def test_q_is_that_of_the_host_and_tokens_are_drawn_from_it(V: int, config: SparseConfig) -> None:
    """Weights within 1 of 65,535; the last tokens may differ: where the mass ends, and of those with weights of 1."""
    source, rows = random.Random(V), 8
    filters = [replace(each, temperature=t) for each in FILTERS for t in (1.0, 0.8)]
    temperatures = [source.choice((1e-9, 0.3, 1.0, 1.3, 5.0)) for _ in range(rows)]
    params = [replace(PLAIN, temperature=t) for t in temperatures] + (filters if config.max_support > 1 else [])
    spread = torch.tensor([source.choice((0.5, 2.0, 6.0, 40.0)) for _ in temperatures] + [2.0] * len(filters))
    spread = spread[: len(params)]
    z = gaussian(V, len(params), V) * spread[:, None]
    z[2, : V // 2] = -math.inf
    uniforms = [source.choice((0.0, LAST, source.getrandbits(53) * 2**-53)) for _ in params]
    tokens, ids, weights = sampled(z, params, uniforms, config)
    for row, (how, u) in enumerate(zip(params, uniforms, strict=True)):
        size = int(np.count_nonzero(weights[row]))
        kept, own = ids[row, :size], weights[row, :size]
        assert (np.diff(kept) > 0).all()
        assert (ids[row, size:] == V).all()
        assert (weights[row, size:] == 0).all()
        bounds = list(accumulate(map(int, own)))
        assert tokens[row] == kept[bisect_right(bounds, int(u * 2**53) * bounds[-1] >> 53)]

        q = sampling.sample(z[row : row + 1], [Draw(how, u)], config)[0].q
        assert q is not None
        wanted = dict(zip(q.ids.tolist(), q.weights.tolist(), strict=True))
        found = dict(zip(kept.tolist(), own.tolist(), strict=True))
        assert max(abs(found[each] - wanted[each]) for each in found.keys() & wanted.keys()) <= 1
        assert sum((found | wanted)[each] > 1 for each in found.keys() ^ wanted.keys()) <= 1


def test_uniforms_on_an_edge_draw_the_next_token() -> None:
    """All 53 bits count: each edge between two tokens, and the uniform just below it."""
    z = gaussian(4, 1, 24)
    _, ids, weights = sampled(z, [PLAIN], [0.5], SparseConfig())
    kept = ids[0, : np.count_nonzero(weights[0])]
    *bounds, total = accumulate(map(int, weights[0, : len(kept)]))
    edges = [-(-bound * 2**53 // total) for bound in bounds]
    uniforms = [bits * 2**-53 for edge in edges for bits in (edge - 1, edge)]
    tokens, _, _ = sampled(z.expand(len(uniforms), -1).contiguous(), [PLAIN] * len(uniforms), uniforms, SparseConfig())
    assert tokens.tolist() == [each for pair in pairwise(kept) for each in pair]


def test_bad_rows_have_no_token() -> None:
    z = gaussian(1, 4, 40)
    z[0, 7], z[1, 7], z[2] = math.nan, math.inf, -math.inf
    tokens, ids, weights = sampled(z, [PLAIN] * 4, [0.5] * 4, SparseConfig())
    assert tokens[:3].tolist() == [NO_LOGITS] * 3
    assert tokens[3] >= 0
    assert (ids[:3] == 40).all()
    assert (weights[:3] == 0).all()


def test_of_equal_logits_as_many_are_kept_as_on_the_host() -> None:
    z = torch.zeros(1, 300)
    tokens, ids, weights = sampled(z, [PLAIN], [LAST], SparseConfig(0.5, 256))
    assert np.count_nonzero(weights) in (150, 151)  # half of 300, up to rounding
    assert len(set(ids[weights > 0])) == np.count_nonzero(weights)
    assert (weights[weights > 0] == 65535).all()
    assert tokens[0] == ids[weights > 0].max()


@pytest.mark.gpu
def test_tokens_follow_q() -> None:
    """χ² of 20,000 tokens from one row: finds a share of 2 % that goes to another token."""
    count = 20_000
    source = random.Random(5)
    z = gaussian(3, 1, 12, scale=1.5).expand(count, -1).contiguous()
    uniforms = [source.getrandbits(53) * 2**-53 for _ in range(count)]
    tokens, ids, weights = sampled(z, [PLAIN] * count, uniforms, SparseConfig(0.95, 8))
    size = int(np.count_nonzero(weights[0]))
    counts = np.array([(tokens == each).sum() for each in ids[0, :size]])
    expected = weights[0, :size] / weights[0].sum() * count
    assert counts.sum() == count
    assert goodness_of_fit(counts, expected / count).p_value > 1e-6
