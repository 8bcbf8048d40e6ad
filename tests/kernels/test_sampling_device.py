"""Sampling without the host: q̂ and tokens are those of `sampling.sample`, and a CUDA graph can hold it."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
import torch

from kernels import sampling
from kernels.sampling import Draw, Sample, SamplingParams
from kernels.sampling_device import DeviceDraws, sample, sample_greedily, to_samples
from kernels.sparse import SparseConfig
from kernels.verify import Proposed, Uniforms, verify
from tests.kernels.cases import LAST

TEMPERATURES = (0.0, 1e-50, 1e-9, 0.3, 0.7, 1.0, 1.3, 5.0, 1e6, 1e30, 1e300)
CONFIGS = [SparseConfig(mass, most) for mass in (1e-9, 0.5, 0.99, 1.0) for most in (1, 8, 256)]


def _numbers(samples: Sequence[Sample]) -> list[object]:
    return [(token, None if q is None else (q.ids.tolist(), q.weights.tolist(), q.total)) for token, q, _ in samples]


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
        draws = [Draw(SamplingParams(temperature=t), u) for t, u in zip(temperatures, uniforms, strict=True)]
        on_device = DeviceDraws(
            torch.tensor(temperatures, dtype=torch.float64), torch.tensor([int(u * 2**53) for u in uniforms])
        )
        config = CONFIGS[turn % len(CONFIGS)]
        tokens, ids, weights = (each.numpy() for each in sample(z, on_device, config))
        assert _numbers(to_samples(tokens, ids, weights, draws)) == _numbers(sampling.sample(z, draws, config))
        tokens, ids, weights = (each.numpy() for each in sample(z, on_device, None))
        alone = [Proposed((), (), each.params, 0, 0, uniforms=Uniforms((), each.uniform)) for each in draws]
        expected = [(each.next_token, None) for each in verify(z, alone, "torch")]
        assert _numbers(to_samples(tokens, ids, weights, draws)) == expected
        at_zero = [Draw(SamplingParams(temperature=0), 0.5)] * len(z)
        assert sample_greedily(z).tolist() == [each.token for each in sampling.sample(z, at_zero, config)]


@pytest.mark.parametrize("config", [SparseConfig(), SparseConfig(0.5, 8), None], ids=str)
def test_sampling_needs_no_host_sync(config: SparseConfig | None) -> None:
    """On the device meta no value can be read back, and no shape can depend on one."""
    z = torch.randn(4, 50, device="meta")
    temperatures, bits = (torch.zeros(4, dtype=each, device="meta") for each in (torch.float64, torch.int64))
    tokens, ids, weights = sample(z, DeviceDraws(temperatures, bits), config)
    assert tokens.shape == (4,)
    assert ids.shape == weights.shape == (4, min(50, config.max_support) if config else 0)
