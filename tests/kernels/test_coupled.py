"""The rule `coupled`: each token is the best of target and noise, and the acceptance has its distribution.

Given the noise nothing is left to chance, so that equality decides. The joint distribution of (accepted, tokens) has a
closed form up to one integral over the ratio of the two winners' exponentials.
"""

from functools import cache
from itertools import product

import numpy as np
import pytest
import torch
from scipy import integrate
from torch import Tensor

from kernels import rng, verify_torch
from kernels.rng import gumbel, noise_rows
from kernels.sampling import gumbel_max
from kernels.verify import Proposed
from outrider.evaluation.chisquare import goodness_of_fit
from tests.kernels import reference
from tests.kernels.cases import coupled, gaussian
from tests.kernels.paths import HOST, PATHS, C, verify

V = 4


@pytest.mark.parametrize("path", PATHS)
def test_the_next_token_is_the_best_of_target_and_noise(path: str) -> None:
    """So a text is the target's alone with its noise: it depends neither on drafts nor on where rounds begin."""
    z = gaussian(8, 2, 300)
    best = (torch.log_softmax(z.double(), -1) + gumbel(9, [20, 21], 300, torch.float64)).argmax(-1).tolist()
    right, wrong = verify(z.repeat(2, 1), [coupled((token,), 9, 20) for token in (best[0], best[0] + 1)], path)
    assert (right.accepted, right.next_token, right.beta) == (1, best[1], ())
    assert (wrong.accepted, wrong.next_token, wrong.beta) == (0, best[0], ())


@pytest.mark.parametrize("path", HOST)
def test_noise_keyed_by_the_round_is_detected(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if path == "reference":
        monkeypatch.setattr(reference, "gumbel", lambda seed, at, *rest: rng.gumbel(seed, [20] * len(at), *rest))
    else:
        monkeypatch.setattr(verify_torch, "noise_rows", lambda at, size: noise_rows([(s, 20) for s, _ in at], size))
    with pytest.raises(AssertionError):
        test_the_next_token_is_the_best_of_target_and_noise(path)


def joint_of_winners(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Return the chance of (draft x, target y), `[V, V]`, both choosing by the same noise.

    Where x is not y, the exponentials of x and y have a ratio r between q_y/q_x and p_y/p_x; all others are larger
    than both winners allow.
    """
    joint = np.diag([1 / np.maximum(p / p[i], q / q[i]).sum() for i in range(V)])
    for x, y in product(range(V), repeat=2):
        low, high = q[y] / q[x], p[y] / p[x]
        if x == y or low >= high:
            continue
        others = [k for k in range(V) if k not in (x, y)]

        def density(r: float, x: int = x, y: int = y, others: list[int] = others) -> float:
            rest = sum(max(q[k] / q[x], r * p[k] / p[y]) for k in others)
            return float(1 / (1 + r + rest) ** 2)

        kinks = sorted(q[k] / q[x] * p[y] / p[k] for k in others)
        joint[x, y] = integrate.quad(density, low, high, points=[k for k in kinks if low < k < high] or None)[0]
    assert joint.sum(0) == pytest.approx(p, abs=1e-7)
    assert joint.sum(1) == pytest.approx(q, abs=1e-7)
    return joint


N, AT = 3_000, 40


@cache
def rounds() -> tuple[np.ndarray, Tensor, list[Proposed]]:
    """Return the chances of (accepted, tokens), the rest of a shorter round at 0; and the target's rows `[3 N, V]` and
    proposals of N rounds of γ = 2, each with its own seed.
    """
    source = torch.Generator().manual_seed(5)
    z = [torch.randn(V**depth, V, generator=source) * 1.2 for depth in range(3)]
    draft = [torch.softmax(each.flip(-1) * 0.5, -1).double().numpy() for each in z[:2]]
    target = [torch.softmax(each.double(), -1).numpy() for each in z]

    expected = np.zeros((3, V, V, V))
    first = joint_of_winners(target[0][0], draft[0][0])
    expected[0, :, 0, 0] = (first - np.diag(np.diag(first))).sum(0)
    for x in range(V):
        second = joint_of_winners(target[1][x], draft[1][x])
        expected[1, x, :, 0] = first[x, x] * (second - np.diag(np.diag(second))).sum(0)
        expected[2, x] = first[x, x] * np.diag(second)[:, None] * target[2][x * V : (x + 1) * V]

    noises = noise_rows([(seed, AT + i) for seed in range(N) for i in range(2)], V).view(N, 2, V)
    x1 = np.array(gumbel_max(torch.from_numpy(draft[0]).expand(N, V), noises[:, 0]))
    x2 = np.array(gumbel_max(torch.from_numpy(draft[1][x1]), noises[:, 1]))
    rows = torch.stack((z[0].expand(N, V), z[1][x1], z[2][x1 * V + x2]), dim=1).view(3 * N, V)
    drafts = zip(x1.tolist(), x2.tolist(), strict=True)
    return expected, rows, [coupled(tokens, seed, AT) for seed, tokens in enumerate(drafts)]


@pytest.mark.parametrize("path", ["torch", C])
def test_the_joint_distribution_of_accepted_and_tokens(path: str) -> None:
    """3,000 rounds over 4 tokens, in up to 84 cells by χ².

    At a level of 1e-6 they detect a total variation of 0.12 with 99.9 %. The target's distribution, and the acceptance
    Σ_i 1/Σ_j max(p_j/p_i, q_j/q_i), are sums over it.
    """
    expected, rows, proposals = rounds()
    counts = np.zeros_like(expected)
    for proposal, each in zip(proposals, verify(rows, proposals, path), strict=True):
        tokens = [*proposal.tokens[: each.accepted], each.next_token, 0, 0]
        counts[each.accepted, tokens[0], tokens[1], tokens[2]] += 1
    assert expected.sum() == pytest.approx(1, abs=1e-6)
    assert goodness_of_fit(counts.ravel(), expected.ravel()).p_value > 1e-6
