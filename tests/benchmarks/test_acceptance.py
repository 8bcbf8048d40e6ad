"""The formulas of the benchmark of rejection sampling and lenience, against the rules themselves."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.acceptance import greatest_ratio, lenient, lenient_greedily
from kernels.sampling import SamplingParams
from kernels.verify import Proposed, Rule, verify
from tests.kernels import reference
from tests.kernels.enumeration import ROUGH, joint_distribution, random_pair, total_variation


@pytest.mark.parametrize("lenience", [1.0, 0.5, 0.1])
def test_a_lenient_tokens_distribution_is_that_of_the_rule(lenience: float) -> None:
    """The first of two drafted tokens, by bisection of the reference and by formula."""
    world = random_pair(12, rule=Rule.TOKENWISE)
    joint = joint_distribution(reference.verify, replace(world, lenience=lenience), 2 * ROUGH)
    first = joint[0, :, 0, 0] + joint[1].sum(axis=(1, 2)) + joint[2].sum(axis=(1, 2))
    p = torch.softmax(world.logits[0].double(), -1)[None]
    drafted = torch.tensor([[world.q[0].probability(x) for x in range(4)]], dtype=torch.float64)
    found = lenient(p, drafted, lenience)[0].numpy()
    assert total_variation(first, found) < 1e-6
    assert (found <= p[0].numpy() / lenience + 1e-12).all(), "the bound of [L A.5]"


def test_greedy_lenience_is_that_of_the_rule() -> None:
    generator = torch.Generator().manual_seed(3)
    z, v = torch.randn(200, 6, generator=generator), torch.randn(200, 6, generator=generator)
    greedy = SamplingParams(temperature=0.0)
    for lenience in (1.0, 0.5, 0.1):
        accepted = []
        for row, drafted in zip(z, v.argmax(-1).tolist(), strict=True):
            proposal = Proposed((drafted,), (None,), greedy, 1, 5, lenience=lenience)
            accepted.append(verify(torch.stack([row, row]), [proposal])[0].accepted)
        found = lenient_greedily(z, v, lenience)
        other = (v.argmax(-1) != z.argmax(-1)).numpy()
        assert found["alpha"] == pytest.approx(np.mean(accepted))
        assert found["tv"] == pytest.approx(np.mean(np.array(accepted) * other))


def test_rejection_sampling_accepts_as_drawn() -> None:
    """100,000 draws: the share lies within 4.5 standard errors, 7 chances in a million."""
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.3, 0.5])
    rng = np.random.default_rng(1)
    ratio = float(greatest_ratio(torch.from_numpy(p)[None], torch.from_numpy(q)[None]))
    assert ratio == 2.5
    x = rng.choice(3, 100_000, p=q)
    share = (rng.random(len(x)) < p[x] / (ratio * q[x])).mean()
    assert abs(share - 1 / ratio) < 4.5 * np.sqrt(0.24 / len(x))
    assert float(greatest_ratio(torch.tensor([[0.5, 0.5]]), torch.tensor([[1.0, 0.0]]))) == np.inf
