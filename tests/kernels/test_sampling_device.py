"""Sampling without the host: q̂ and tokens are those of `sampling.sample`, and a CUDA graph can hold it."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels import sampling
from kernels.sampling import Draw, Sample, SamplingParams, probabilities
from kernels.sampling_device import DeviceDraws, DeviceSamples, obstacle, sample, to_samples
from kernels.sparse import SparseConfig, sparsify
from tests.kernels.capturable import OnlyCapturable
from tests.kernels.cases import LAST, gaussian

TEMPERATURES = (0.0, 1e-50, 1e-9, 0.3, 0.7, 1.0, 1.3, 5.0, 1e6, 1e30, 1e300)
CONFIGS = [SparseConfig(mass, most) for mass in (1e-9, 0.5, 0.99, 1.0) for most in (1, 8, 256)]


def _draw(z: Tensor, temperatures: Sequence[float], uniforms: Sequence[float], config: SparseConfig) -> DeviceSamples:
    bits = [int(u * 2**53) for u in uniforms]
    return sample(z, DeviceDraws(torch.tensor(temperatures, dtype=torch.float64), torch.tensor(bits)), config)


def _on_host(drawn: DeviceSamples, temperatures: Sequence[float]) -> list[Sample]:
    tokens, ids, weights = (each.cpu().numpy() for each in drawn)
    return to_samples(tokens, ids, weights, [Draw(SamplingParams(temperature=each)) for each in temperatures])


def _numbers(samples: Sequence[Sample]) -> list[object]:
    return [(token, None if q is None else (q.ids.tolist(), q.weights.tolist(), q.total)) for token, q, _ in samples]


def _assert_as_on_the_host(
    z: Tensor, temperatures: Sequence[float], uniforms: Sequence[float], config: SparseConfig
) -> None:
    draws = [Draw(SamplingParams(temperature=t), u) for t, u in zip(temperatures, uniforms, strict=True)]
    found = _on_host(_draw(z, temperatures, uniforms, config), temperatures)
    assert _numbers(found) == _numbers(sampling.sample(z, draws, config))


@pytest.mark.parametrize("V", [1, 2, 33, 257, 1025, 3001])
def test_q_and_tokens_are_those_of_the_host(V: int) -> None:
    """768 rows a vocabulary, of every sharpness and dtype: ties, bans, bad rows, and the ends of u."""
    source, generator = random.Random(V), torch.Generator().manual_seed(V)
    for turn in range(24):
        z = torch.randn(32, V, generator=generator) * (0.0, 0.5, 2.0, 6.0, 40.0)[turn % 5]
        z[8:16] = (z[8:16] * 2).round() / 2
        z[12:20] = z[12:20].masked_fill(torch.rand(8, V, generator=generator) < 0.5, -math.inf)
        z[3, source.randrange(V)], z[17, source.randrange(V)] = math.nan, math.inf
        z = z.to((torch.float32, torch.bfloat16, torch.float16)[turn % 3])
        temperatures = [source.choice(TEMPERATURES) for _ in range(32)]
        uniforms = [source.choice((0.0, LAST, source.getrandbits(53) * 2**-53)) for _ in range(32)]
        _assert_as_on_the_host(z, temperatures, uniforms, CONFIGS[turn % len(CONFIGS)])


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_equal_tokens_at_the_cut_stay_from_the_lowest_id(config: SparseConfig) -> None:
    """Whole rows of equals, and equals on both sides of every cut, more of them than fit."""
    z = torch.full((4, 1000), -3.0)
    z[0] = 0.0
    z[1, [10, 400, 700, 900]] = 4.0
    z[2, 500:] = 1.0
    z[3, ::3] = 2.0
    for u in (0.0, 0.4, LAST):
        _assert_as_on_the_host(z, [1.0] * 4, [u] * 4, config)


def test_q_returned_is_what_was_sampled_from() -> None:
    """Invariant 1: of evenly spaced uniforms each token takes its q̂, to within one; the ends of each cell are exact."""
    N = 2000
    z = gaussian(8, 1, 300, scale=2).expand(N, 300)
    grid = [(k + 0.5) / N for k in range(N)]
    samples = _on_host(_draw(z, [1.0] * N, grid, SparseConfig(0.9)), [1.0] * N)
    tokens, q = [each.token for each in samples], samples[0].q
    assert q is not None
    expected = np.array([q.probability(token) for token in range(300)])
    assert np.abs(np.bincount(tokens, minlength=300) - N * expected).max() < 1.0
    assert 1 < len(q.ids) < 300
    edges = [-(-cumulative * 2**53 // q.total) for cumulative in q.weights.cumsum(dtype=np.int64)[:-1].tolist()]
    uniforms = [bits * 2.0**-53 for edge in edges for bits in (edge - 1, edge)]
    found = _draw(z[: len(uniforms)], [1.0] * len(uniforms), uniforms, SparseConfig(0.9)).tokens.tolist()
    assert found == [q.token_at(u) for u in uniforms]
    assert len(set(found)) == len(q.ids)


def test_padding_past_the_support_is_no_token() -> None:
    z = torch.full((4, 6), -math.inf)
    z[:2, 4] = z[0, 1] = 0.0
    z[3] = torch.arange(6.0)
    drawn = _draw(z, [1.0, 1.0, 1.0, 0.0], [0.75, 0.0, 0.0, 0.0], SparseConfig(max_support=3))
    assert drawn.tokens.tolist() == [4, 4, -1, 5]
    assert drawn.ids.tolist() == [[1, 4, 6], [4, 6, 6], [6, 6, 6], [5, 6, 6]]
    assert drawn.weights.tolist() == [[65535, 65535, 0], [65535, 0, 0], [0, 0, 0], [65535, 0, 0]]


def test_a_row_does_not_depend_on_its_batch() -> None:
    z = gaussian(1, 6, 400, scale=3)
    z[2, 5] = math.nan
    temperatures, uniforms = [1.0, 0.0, 0.5, 0.5, 2.0, 1.0], [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    together = _draw(z, temperatures, uniforms, SparseConfig())
    for row in range(6):
        alone = _draw(z[row : row + 1], temperatures[row : row + 1], uniforms[row : row + 1], SparseConfig())
        for mine, theirs in zip(alone, together, strict=True):
            assert torch.equal(mine[0], theirs[row])


@pytest.mark.parametrize(
    ("draw", "reason"),
    [
        *((Draw(SamplingParams(temperature=t, top_k=k)), None) for t, k in ((1.0, 0), (0.3, 0), (0.0, 3))),
        (Draw(SamplingParams(top_k=3)), "top-k, top-p or min-p"),
        (Draw(SamplingParams(top_p=0.9)), "top-k, top-p or min-p"),
        (Draw(SamplingParams(min_p=0.1)), "top-k, top-p or min-p"),
        (Draw(SamplingParams(), max_entropy=2.0), "an entropy to stop at"),
    ],
)
def test_draws_that_need_the_host_are_named(draw: Draw, reason: str | None) -> None:
    assert obstacle(draw) == reason


@pytest.mark.parametrize("config", [SparseConfig(), SparseConfig(0.5, 8)], ids=str)
def test_sampling_needs_no_host_sync(config: SparseConfig) -> None:
    """Nothing reads a value back and no shape depends on one, on the host's tensors and on the device meta."""
    z = torch.randn(4, 50)
    temperatures, bits = torch.ones(4, dtype=torch.float64), torch.zeros(4, dtype=torch.int64)
    with OnlyCapturable() as operations:
        drawn = sample(z, DeviceDraws(temperatures, bits), config)
    assert {"topk", "searchsorted", "_softmax"} <= set(operations.seen)
    empty = sample(z.to("meta"), DeviceDraws(temperatures.to("meta"), bits.to("meta")), config)
    assert [each.shape for each in empty] == [each.shape for each in drawn]


@pytest.mark.gpu
def test_a_graph_of_several_steps_draws_as_the_host_does() -> None:
    """Replayed for other logits and uniforms; weights within one unit, and the token is that of the q̂ returned."""
    steps, B, V, config = 3, 8, 32000, SparseConfig(max_support=64)
    z = torch.zeros(steps, B, V, device="cuda")
    temperatures = torch.tensor([1.0, 0.7, 0.0, 1.5] * 2, dtype=torch.float64, device="cuda")
    bits = torch.zeros(steps, B, dtype=torch.int64, device="cuda")
    warm_up = torch.cuda.Stream()
    warm_up.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm_up):
        sample(z[0], DeviceDraws(temperatures, bits[0]), config)
    torch.cuda.current_stream().wait_stream(warm_up)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = [sample(z[step], DeviceDraws(temperatures, bits[step]), config) for step in range(steps)]
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        z.copy_(torch.randn(steps, B, V, generator=generator) * 3)
        uniforms = torch.rand(steps, B, generator=generator, dtype=torch.float64)
        bits.copy_((uniforms * 2.0**53).long())
        graph.replay()
        for step in range(steps):
            eager = sample(z[step], DeviceDraws(temperatures, bits[step]), config)
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(held[step], eager, strict=True))
            for row, (token, q, _) in enumerate(_on_host(held[step], temperatures.tolist())):
                if q is None:
                    assert token == int(z[step, row].argmax())
                    continue
                params = SamplingParams(temperature=float(temperatures[row]))
                (expected,) = sparsify(probabilities(z[step, row : row + 1].cpu(), params), config)
                assert token == q.token_at(float(uniforms[step, row]))
                shared, mine, theirs = np.intersect1d(q.ids, expected.ids, return_indices=True)
                assert len(shared) >= min(len(q.ids), len(expected.ids)) - 1
                assert np.abs(q.weights[mine].astype(int) - expected.weights[theirs].astype(int)).max() <= 1
