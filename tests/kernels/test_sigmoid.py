"""The rule `sigmoid`: its joint distribution against the formula of [W 3.2.2], and the logits that a draft sends.

It is lossy: shown here is that it is that rule, and not that it keeps the target's distribution.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.dense import EXCLUDED, DraftLogits, SigmoidScales
from kernels.sampling import SamplingParams
from kernels.sigmoid import draft_logits
from kernels.verify import Rule
from tests.kernels.enumeration import (
    PATHS,
    World,
    chance_of,
    in_dyads,
    joint_distribution,
    random_world,
    total_variation,
)


def test_draft_logits_are_scaled_filtered_and_in_sixteen_bits() -> None:
    z = torch.tensor([[1.0, 3.0, 2.0, -math.inf], [-1e9, 1e9, 0.0, 0.0]])
    scaled, filtered = (draft_logits(z, each) for each in (SamplingParams(temperature=0.5), SamplingParams(top_k=2)))
    assert scaled[0].values.tolist() == [2.0, 6.0, 4.0, EXCLUDED]
    assert scaled[1].values.tolist() == [-65472.0, 65504.0, 0.0, 0.0]  # what 16 bits hold, and not excluded
    assert filtered[0].values.tolist() == [EXCLUDED, 3.0, 2.0, EXCLUDED]
    assert scaled[0].values.dtype == torch.float16
    with pytest.raises(ValueError, match="temperature is 0"):
        draft_logits(z, SamplingParams(temperature=0))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("scales", "lenience", "params"),
    [
        (SigmoidScales(-1.0, 1.0), 1.0, SamplingParams()),
        (SigmoidScales(-10, 10), 0.7, SamplingParams(temperature=1.5, top_k=3)),
        (SigmoidScales(-1e4, 1e4), 1.0, SamplingParams()),
    ],
    ids=["plain", "lenient and filtered", "wide"],
)
def test_the_joint_distribution_follows_the_formula(
    path: str, scales: SigmoidScales, lenience: float, params: SamplingParams
) -> None:
    verify, bound, bisections = PATHS[path]
    world = _world(scales, lenience, params)
    expected = _formula(world)
    assert expected.sum() == pytest.approx(1, abs=1e-12)
    assert expected.sum(axis=(1, 2, 3)).min() > 1e-5  # each outcome has its share
    # Bisection places each edge of the reference's next token to 1e-13.
    assert total_variation(joint_distribution(verify, world, bisections), expected) < max(bound, 5e-12)


def test_with_the_papers_scales_the_text_is_the_drafts() -> None:
    """[W] uses ±1e4 where it summarises: nearly all is accepted, and the first token is distributed as the draft's."""
    world = _world(SigmoidScales(-1e4, 1e4), 1.0, SamplingParams(), excluded=-3.0)
    joint = _formula(world)
    first = joint[0, :, 0, 0] + joint[1].sum(axis=(1, 2)) + joint[2].sum(axis=(1, 2))
    p = world.target.sum(axis=(1, 2))
    q = np.array([chance_of(world.q[0], x) for x in range(4)])
    assert joint[2].sum() > 0.999
    assert total_variation(q, p) > 0.2
    assert total_variation(first, p) == pytest.approx(total_variation(q, p), abs=1e-3)


def _world(scales: SigmoidScales, lenience: float, params: SamplingParams, excluded: float = EXCLUDED) -> World:
    """Return a world whose draft sends logits that are higher than the target's by 1, and excludes two tokens."""
    world = random_world(11, lenience=lenience, rule=Rule.SIGMOID)
    source = torch.Generator().manual_seed(11)
    first, *second = (DraftLogits((torch.randn(4, generator=source) * 2 + 1).half()) for _ in range(5))
    first.values[3] = second[1].values[0] = excluded
    q = in_dyads(world.q[0]), tuple(in_dyads(each) for each in world.q[1])
    return replace(world, q=q, draft_logits=(first, second), sigmoid=scales, params=params)


def _formula(world: World) -> np.ndarray:
    """Return the chances of (accepted, tokens), `[3, 4, 4, 4]`, from p̂, q̂, q and p, without uniforms."""
    assert world.draft_logits is not None
    stands, rest = _step(world, world.logits[0], world.draft_logits[0])
    joint = np.zeros((3, 4, 4, 4))
    for x1 in range(4):
        q1 = chance_of(world.q[0], x1)
        joint[0, :, 0, 0] += q1 * (1 - stands[x1]) * rest
        second_stands, second_rest = _step(world, world.logits[1][x1], world.draft_logits[1][x1])
        for x2 in range(4):
            both = q1 * stands[x1] * chance_of(world.q[1][x1], x2)
            joint[1, x1, :, 0] += both * (1 - second_stands[x2]) * second_rest
            joint[2, x1, x2] += both * second_stands[x2] * _softmax(world, world.logits[2][x1, x2])
    return joint


def _step(world: World, z: Tensor, draft: DraftLogits) -> tuple[np.ndarray, np.ndarray]:
    """Return the chance that each token is accepted, and the distribution of the next where one is not, `[4]` each."""
    p = np.array([_sigma(each, world.sigmoid) for each in _scaled(world, z)])
    q = np.array([_sigma(-math.inf if each == EXCLUDED else each, world.sigmoid) for each in draft.values.tolist()])
    stands = np.array([min(1.0, a / (b * world.lenience)) if b > 0 else 0.0 for a, b in zip(p, q, strict=True)])
    rest = np.maximum(0, p - q)
    return stands, rest / rest.sum() if rest.sum() > 0 else _softmax(world, z)


def _scaled(world: World, z: Tensor) -> list[float]:
    """Return the logits after top-k and temperature."""
    least = z.sort().values[-world.params.top_k if world.params.top_k else 0].item()
    return [each / world.params.temperature if each >= least else -math.inf for each in z.tolist()]


def _softmax(world: World, z: Tensor) -> np.ndarray:
    e = np.exp(_scaled(world, z))
    return np.asarray(e / e.sum())


def _sigma(z: float, scales: SigmoidScales | None) -> float:
    assert scales is not None
    return 1 / (1 + math.exp(-(z - scales.alpha) / (scales.beta - scales.alpha))) if z > -math.inf else 0.0
