"""The random numbers of Triton's kernels are those of torch: uniforms bit for bit, noise within rounding."""

from __future__ import annotations

import pytest
import torch

from kernels.rng import Domain, exponential, row_key, uniform, words
from tests.kernels.paths import DEVICE, TRITON

pytestmark = TRITON.marks
triton = pytest.importorskip("triton", reason="triton has no build for this platform")

from triton import language as tl  # noqa: E402

from kernels.triton_rows import accept_uniforms, exponentials, resample_uniforms  # noqa: E402

N = 4096


@triton.jit
def _noise_kernel(out, seed, position, N: tl.constexpr):
    ids = tl.arange(0, N)
    tl.store(out + ids, exponentials(tl.load(seed), tl.load(position), ids))


@triton.jit
def _uniform_kernel(accept, resample, seed, base_length, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(accept + at, accept_uniforms(tl.load(seed), tl.load(base_length), at))
    tl.store(resample + at, resample_uniforms(tl.load(seed), tl.load(base_length), at))


def _word(value: int) -> torch.Tensor:
    return torch.tensor([value - 2**64 if value >= 2**63 else value], device=DEVICE)


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (7, 5000), (2**63 + 5, 2**31 + 1), (2**64 - 1, 2**32 - 1)])
def test_noise_is_that_of_torch(seed: int, position: int) -> None:
    """To one part in a million where it decides who wins; the largest have lost bits, in torch as well."""
    out = torch.empty(N, device=DEVICE)
    _noise_kernel[(1,)](out, _word(seed), _word(position), N=N)
    expected = exponential(words([row_key(seed, position)], N)[0], torch.float64)
    error = (out.cpu().double() / expected - 1).abs()
    assert expected.min() < 1e-3
    assert error[expected < 1].max() < 1e-6
    assert error.max() < 0.05


@pytest.mark.parametrize(("seed", "base_length"), [(0, 0), (7, 5000), (2**63 + 5, 2**32 - 1)])
def test_uniforms_are_those_of_torch(seed: int, base_length: int) -> None:
    accept, resample = (torch.empty(16, dtype=torch.float64, device=DEVICE) for _ in range(2))
    _uniform_kernel[(1,)](accept, resample, _word(seed), _word(base_length), N=16)
    for domain, drawn in ((Domain.ACCEPT, accept), (Domain.RESAMPLE, resample)):
        assert drawn.tolist() == [uniform(seed, base_length, i, domain) for i in range(16)]
