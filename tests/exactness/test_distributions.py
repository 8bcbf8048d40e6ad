"""The joint distribution that tests compare with is exact."""

from pathlib import Path

import numpy as np
import pytest

from tests.exactness import pairs
from tests.exactness.distributions import PARAMS, joint_classes, joint_distribution, next_distributions


def test_the_joint_distribution_is_the_chain_rule(tmp_path: Path) -> None:
    target, prompt = pairs.write_target(tmp_path, seed=1), (15, 12, 14)
    joint = joint_distribution(target, prompt)
    assert joint.sum() == pytest.approx(1.0)
    a, b, c = (int(i) for i in np.unravel_index(joint.argmax(), joint.shape))
    first, second, third = (next_distributions(target, [[*prompt, *more]], PARAMS)[0] for more in ((), (a,), (a, b)))
    assert joint[a, b, c] == pytest.approx(first[a] * second[b] * third[c])
    mass = np.bincount(joint_classes(joint).ravel(), joint.ravel(), minlength=27)
    assert mass.min() > 0
    assert mass.max() < 0.2
