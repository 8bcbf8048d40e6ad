"""The distributions that tests compare with are exact."""

from pathlib import Path

import numpy as np
import pytest

from outrider.evaluation.chisquare import Fit
from tests.exactness import pairs
from tests.exactness.distributions import (
    CELLS,
    PARAMS,
    along,
    fits_after_each,
    joint_distribution,
    next_distributions,
    quantile_fits,
    quantiles,
)

PROMPT = (15, 12, 14)


def test_the_joint_distribution_is_the_chain_rule(tmp_path: Path) -> None:
    target = pairs.write_target(tmp_path, seed=1)
    joint = joint_distribution(target, PROMPT)
    assert joint.sum() == pytest.approx(1.0)
    a, b, c = (int(i) for i in np.unravel_index(joint.argmax(), joint.shape))
    rows = [next_distributions(target, [[*PROMPT, *more]], PARAMS)[0] for more in ((), (a,), (a, b))]
    assert joint[a, b, c] == pytest.approx(rows[0][a] * rows[1][b] * rows[2][c])
    assert along(target, PROMPT, np.array([[a, b, c]]))[0] == pytest.approx(np.stack(rows))


def test_a_quantile_lies_anywhere_within_the_share_of_its_token() -> None:
    p = np.tile([0.2, 0.5, 0.0, 0.3], (1000, 4, 1))
    tokens = np.tile(np.arange(4), (1000, 1))
    for order, shares in (
        (None, [(0.8, 1.0), (0.0, 0.5), (1.0, 1.0), (0.5, 0.8)]),
        (np.broadcast_to(np.arange(4), p.shape), [(0.8, 1.0), (0.3, 0.8), (1.0, 1.0), (0.0, 0.3)]),
    ):
        found = quantiles(p, tokens, order)
        assert found.min(0) == pytest.approx([low for low, _ in shares], abs=0.01)
        assert found.max(0) == pytest.approx([high for _, high in shares], abs=0.01)


def test_tokens_fit_their_own_distribution_alone() -> None:
    rng = np.random.default_rng(2)
    p = rng.dirichlet(np.ones(24), size=(1000, 6))
    p[..., -1] = 0
    p /= p.sum(-1, keepdims=True)

    def fits(drawn_from: np.ndarray, impossible: bool = False) -> list[Fit]:
        tokens = (drawn_from.cumsum(-1) / drawn_from.sum(-1, keepdims=True) < rng.random((1000, 6, 1))).sum(-1)
        tokens[7, 3] = 23 if impossible else tokens[7, 3]
        found = quantiles(p, tokens)
        return [*quantile_fits(found, 2), *fits_after_each(p, tokens, 14, found)]

    assert min(fit.p_value for fit in fits(p)) > 0.01
    assert [fit.p_value < 1e-4 for fit in fits(p**1.2)] == [True, True, False, True], "no token is more frequent"
    by_parity = p * (1 + 0.4 * (np.arange(24) % 2))
    assert [fit.p_value < 1e-4 for fit in fits(by_parity)] == [False, False, True, False], "no class is"
    found = fits(p, impossible=True)
    assert [fit.p_value for fit in found] == [0] * 4
    assert [fit.df for fit in found][:2] == [CELLS - 1, 8]
