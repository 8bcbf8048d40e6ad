"""Sampling without the host: q̂ and tokens are those of `sampling.sample`, and a CUDA graph can hold it."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from kernels import sampling
from kernels.sampling import Draw, Sample, SamplingParams
from kernels.sampling_device import DeviceDraws, DeviceSamples, obstacle, sample, to_samples
from kernels.sparse import SparseConfig
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


@pytest.mark.parametrize(
    ("draw", "reason"),
    [
        (Draw(SamplingParams(temperature=0.0, top_k=3)), None),
        *(
            (Draw(SamplingParams(**each)), "top-k, top-p or min-p")
            for each in ({"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1})
        ),
        (Draw(SamplingParams(), max_entropy=2.0), "an entropy to stop at"),
    ],
)
def test_draws_that_need_the_host_are_named(draw: Draw, reason: str | None) -> None:
    assert obstacle(draw) == reason


@pytest.mark.parametrize("config", [SparseConfig(), SparseConfig(0.5, 8)], ids=str)
def test_sampling_needs_no_host_sync(config: SparseConfig) -> None:
    """On the device meta no value can be read back, and no shape can depend on one."""
    z = torch.randn(4, 50, device="meta")
    temperatures, bits = (torch.zeros(4, dtype=each, device="meta") for each in (torch.float64, torch.int64))
    tokens, ids, weights = sample(z, DeviceDraws(temperatures, bits), config)
    assert tokens.shape == (4,)
    assert ids.shape == weights.shape == (4, min(50, config.max_support))


@pytest.mark.gpu
def test_a_graph_draws_what_eager_draws_from_the_distribution_it_returns() -> None:
    """Replayed for other logits and uniforms."""
    B, config = 8, SparseConfig(max_support=64)
    z = torch.zeros(B, 32000, device="cuda")
    temperatures = torch.tensor([1.0, 0.7, 0.0, 1.5] * 2, dtype=torch.float64, device="cuda")
    bits = torch.zeros(B, dtype=torch.int64, device="cuda")
    warm_up = torch.cuda.Stream()
    warm_up.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm_up):
        sample(z, DeviceDraws(temperatures, bits), config)
    torch.cuda.current_stream().wait_stream(warm_up)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = sample(z, DeviceDraws(temperatures, bits), config)
    for seed in range(3):
        z.copy_(gaussian(seed, B, 32000, scale=3))
        uniforms = torch.rand(B, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        bits.copy_((uniforms * 2.0**53).long())
        graph.replay()
        eager = sample(z, DeviceDraws(temperatures, bits), config)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(held, eager, strict=True))
        for row, (token, q, _) in enumerate(_on_host(held, temperatures.tolist())):
            assert token == (int(z[row].argmax()) if q is None else q.token_at(float(uniforms[row])))
