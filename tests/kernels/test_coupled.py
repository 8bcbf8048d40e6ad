"""The rule `coupled`: the text is the target's alone with its noise, whatever was drafted, and has the target's law.

Given the noise nothing is left to chance, so most of this is equality. The joint law of (accepted, tokens) is known in
closed form up to one integral over the ratio of the two winners' exponentials.
"""

from __future__ import annotations

import random
from itertools import product

import numpy as np
import pytest
import torch
from scipy import integrate, stats

from kernels import rng, verify_torch
from kernels.rng import exponential, gumbel, noise_rows, row_key, words
from kernels.sampling import Draw, SamplingParams, gumbel_max, sample
from kernels.sparse import SparseConfig
from kernels.verify import Proposed, Rule, Status
from tests.kernels import reference
from tests.kernels.cases import LAWS, logits_of
from tests.kernels.paths import HOST, PATHS, verify

LEVEL = 1e-6
V = 4


def _coupled(tokens: tuple[int, ...], seed: int, base_length: int, law: SamplingParams | None = None) -> Proposed:
    return Proposed(tokens, (), law or SamplingParams(), seed, base_length, rule=Rule.COUPLED)


@pytest.mark.parametrize("path", HOST)
@pytest.mark.parametrize("law", LAWS)
def test_the_text_does_not_depend_on_the_drafts(path: str, law: SamplingParams) -> None:
    """A chain of which each token depends on the last, written with any drafts of any length, or with none."""
    z = torch.randn(50, 50, generator=torch.Generator().manual_seed(3)) * 2
    source = random.Random(1)
    texts: list[list[int]] = []
    for most in (0, 1, 4, 7):
        text = [7]
        while len(text) < 30:
            gamma = source.randint(min(most, 1), most)
            # Right now and then, so that the walk goes on.
            tokens = [int(token) for token in (texts[0][len(text) :] if texts else [])[: gamma // 2]]
            tokens += [source.randrange(50) for _ in range(gamma - len(tokens))]
            rows = z[[text[-1], *tokens]]
            (result,) = verify(rows, [_coupled(tuple(tokens), 5, len(text), law)], path)
            assert (result.status, result.beta) == (Status.OK, ())
            text += [*tokens[: result.accepted], result.next_token]
        texts.append(text[:30])
    assert texts[1:] == texts[:1] * 3


@pytest.mark.parametrize("path", PATHS)
def test_the_next_token_is_the_best_of_target_and_noise(path: str) -> None:
    z = torch.randn(2, 300, generator=torch.Generator().manual_seed(8))
    best = (torch.log_softmax(z.double(), -1) + gumbel(9, [20, 21], 300, torch.float64)).argmax(-1).tolist()
    (all_of_it,) = verify(z, [_coupled((best[0],), 9, 20)], path)
    assert (all_of_it.accepted, all_of_it.next_token) == (1, best[1])
    (corrected,) = verify(z, [_coupled((best[0] + 1,), 9, 20)], path)
    assert (corrected.accepted, corrected.next_token) == (0, best[0])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("token", [-1, 4, 2**40])
def test_a_token_outside_the_vocabulary_is_not_taken(path: str, token: int) -> None:
    (result,) = verify(logits_of([[0.25] * 4] * 2), [_coupled((token,), 1, 1)], path)
    assert result.accepted == 0
    assert 0 <= result.next_token < 4


@pytest.mark.parametrize("path", PATHS)
def test_greed_needs_no_noise(path: str) -> None:
    z = logits_of([[0.2, 0.5, 0.3]] * 3)
    for seed in range(5):
        (result,) = verify(z, [_coupled((1, 2), seed, 9, SamplingParams(temperature=0))], path)
        assert (result.accepted, result.next_token, result.beta) == (1, 1, ())


@pytest.mark.parametrize("path", PATHS)
def test_a_bad_row_counts_where_it_is_met(path: str) -> None:
    z = logits_of([[1.0, 0.0], [0.5, 0.5], [0.5, 0.5], [1.0, 0.0], [0.5, 0.5], [0.5, 0.5]])
    z[1], z[4] = float("nan"), float("nan")
    met, spared = verify(z, [_coupled((0, 0), 1, 1), _coupled((1, 0), 1, 1)], path)
    assert met.status is Status.BAD_LOGITS
    assert (spared.status, spared.accepted, spared.next_token) == (Status.OK, 0, 0)


# ----------------------------------------------------------------------------------------------------- the draft's part


@pytest.mark.parametrize("path", HOST)
@pytest.mark.parametrize("law", LAWS)
def test_a_draft_that_is_the_target_is_accepted_whole(path: str, law: SamplingParams) -> None:
    z = torch.randn(9, 500, generator=torch.Generator().manual_seed(6)) * 2
    tokens = [each.token for each in sample(z, [Draw(law, noise=(3, 12 + i)) for i in range(9)], SparseConfig())]
    (result,) = verify(z, [_coupled(tuple(tokens[:8]), 3, 12, law)], path)
    assert (result.accepted, result.next_token) == (8, tokens[8])


@pytest.mark.parametrize("V", [1, 50, 40_000])
def test_noise_is_the_same_in_company(V: int) -> None:
    """Also where so many tokens are made in several pieces."""
    places = [(5, 1), (5, 2), (6, 1), (2**64 - 1, 2**32 - 1)]
    together = noise_rows(places, V)
    assert together.shape == (4, V)
    for place, row in zip(places, together, strict=True):
        assert torch.equal(noise_rows([place], V)[0], row)
        assert torch.equal(row.log1p().neg(), exponential(words([row_key(*place)], V))[0])


# ------------------------------------------------------------------------------------------------------------ its law


def _joint(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Return the chance of (draft x, target y), `[V, V]`, both choosing by the same noise.

    Where x is not y, the exponentials of x and y stand in a ratio r between q_y/q_x and p_y/p_x; all others are larger
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
    return joint


@pytest.mark.parametrize("N", [3_000, pytest.param(6_000, marks=pytest.mark.slow)])
def test_the_joint_law_of_accepted_and_tokens_is_as_enumerated(N: int) -> None:
    """3,000 rounds of γ = 2 over 4 tokens, each with a seed of its own, in 84 cells by χ².

    At a level of 1e-6 a total variation of 0.12 is seen 999 times in 1,000; with the 6,000 of `-m slow` one of 0.08.
    The target's own law, and the acceptance Σ_i 1/Σ_j max(p_j/p_i, q_j/q_i), are sums over it.
    """
    source = torch.Generator().manual_seed(5)
    z = [torch.randn(V**depth, V, generator=source) * 1.2 for depth in range(3)]
    draft = [torch.softmax(each.flip(-1) * 0.5, -1).double().numpy() for each in z[:2]]
    target = [torch.softmax(each.double(), -1).numpy() for each in z]

    expected = np.zeros((3, V, V, V))  # (accepted, tokens), the rest of a shorter round at 0
    first = _joint(target[0][0], draft[0][0])
    assert first.sum() == pytest.approx(1, abs=1e-7)
    assert first.sum(0) == pytest.approx(target[0][0], abs=1e-7)
    assert first.sum(1) == pytest.approx(draft[0][0], abs=1e-7)
    expected[0, :, 0, 0] = (first - np.diag(np.diag(first))).sum(0)
    for x in range(V):
        second = _joint(target[1][x], draft[1][x])
        expected[1, x, :, 0] = first[x, x] * (second - np.diag(np.diag(second))).sum(0)
        expected[2, x] = first[x, x] * np.diag(second)[:, None] * target[2][x * V : (x + 1) * V]

    at = 40
    noises = [noise_rows([(seed, at + i) for seed in range(N)], V) for i in range(2)]
    x1 = np.array(gumbel_max(torch.from_numpy(draft[0]).expand(N, V), noises[0]))
    x2 = np.array(gumbel_max(torch.from_numpy(draft[1][x1]), noises[1]))
    rows = torch.stack((z[0].expand(N, V), z[1][x1], z[2][x1 * V + x2]), dim=1).view(3 * N, V)
    results = verify(rows, [_coupled((int(x1[n]), int(x2[n])), n, at) for n in range(N)])
    counts = np.zeros_like(expected)
    for n, each in enumerate(results):
        tokens = [*(int(x1[n]), int(x2[n]))[: each.accepted], each.next_token, 0, 0]
        counts[each.accepted, tokens[0], tokens[1], tokens[2]] += 1
    possible = expected > 0
    assert expected.sum() == pytest.approx(1, abs=1e-6)
    assert not counts[~possible].any()
    fit = stats.chisquare(counts[possible], expected[possible] / expected[possible].sum() * N)
    assert fit.pvalue > LEVEL


@pytest.mark.parametrize("path", HOST)
def test_noise_keyed_by_the_round_would_be_seen(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With every position of a round drawing the noise of its base, the text would depend on where rounds begin."""

    def of_the_round(seed: int, positions: list[int], size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return rng.gumbel(seed, [0] * len(positions), size, dtype)

    def places_of_the_round(places: list[tuple[int, int]], size: int) -> torch.Tensor:
        return noise_rows([(seed, 0) for seed, _ in places], size)

    if path == "reference":
        monkeypatch.setattr(reference, "gumbel", of_the_round)
    else:
        monkeypatch.setattr(verify_torch, "noise_rows", places_of_the_round)
    drawn = {verify(logits_of([[0.25] * 4]), [_coupled((), 1, at)], path)[0].next_token for at in range(40)}
    assert len(drawn) == 1
