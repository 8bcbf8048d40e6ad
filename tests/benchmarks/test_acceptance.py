"""What a rule accepts in expectation, by formula, is what the oracle accepts on average over its uniforms."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.acceptance import EXPECTED, Drafted, estimate
from kernels.distribution import SamplingLaw
from kernels.ruling import Proposed, Rule, Uniforms
from kernels.sparse import SparseConfig, sparsify
from kernels.verify_reference import verify

V, GRID = 6, 40
LAW = SamplingLaw()


@pytest.mark.parametrize("rule", EXPECTED)
@pytest.mark.parametrize("seed", range(6))
def test_it_is_the_oracles_mean_over_all_uniforms(rule: str, seed: int) -> None:
    """γ = 2, a grid of 40 x 40 uniforms: each of the four cells' edges is off by 1/80 at most."""
    source = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, V, generator=source, dtype=torch.float64)
    laws = sparsify(torch.softmax(1.5 * torch.randn(2, V, generator=source), dim=-1), SparseConfig(max_support=5))
    tokens = tuple(int(law.ids[torch.randint(len(law.ids), (1,), generator=source)]) for law in laws)
    p = torch.softmax(logits, dim=-1).numpy()
    path = [
        Drafted(float(p[i, x]), law.probability(x), p[i][law.ids], law.weights / law.total)
        for i, (x, law) in enumerate(zip(tokens, laws, strict=True))
    ]
    grid = (np.arange(GRID) + 0.5) / GRID
    accepted = [
        verify(logits, [Proposed(tokens, tuple(laws), LAW, 0, 1, Rule(rule), uniforms=Uniforms((u, v), 0.5))])[
            0
        ].accepted
        for u in grid
        for v in grid
    ]
    assert EXPECTED[rule](path) == pytest.approx(np.mean(accepted), abs=4 / 80)


def test_an_estimate_has_its_interval_and_what_it_tells_from_0() -> None:
    found = estimate([1.0, 3.0, 2.0, 2.0])
    error = (2 / 3) ** 0.5 / 2
    assert found["mean"] == 2
    assert found["interval"] == pytest.approx([2 - 1.96 * error, 2 + 1.96 * error])
    assert found["detectable"] == pytest.approx((1.96 + 1.645) * error)
    assert estimate([5.0]) == {"mean": 5.0, "interval": None, "detectable": None}
