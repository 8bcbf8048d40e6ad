"""The shared noise: its law, its independence of all that is near, and that its words are what they were.

Seeds are fixed, so a failure is a defect and no bad luck. N below is the number of draws.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from kernels import rng
from kernels.rng import exponential, gumbel, row_key, words

LEVEL = 1e-6
V = 1 << 16


def _uniforms(keys: list[tuple[int, int, int]], size: int = V) -> np.ndarray:
    u: np.ndarray = (words(keys, size).numpy() + 0.5) / 2**32
    return u


def _keys(seeds: list[int], positions: list[int]) -> list[tuple[int, int, int]]:
    return [row_key(seed, position) for seed in seeds for position in positions]


def test_the_words_are_what_they_were() -> None:
    """A seed promises its text: these may change with the version of the noise alone."""
    assert words([row_key(7, 11)], 3)[0].tolist() == KNOWN
    assert row_key(2**64 - 1, 2**32 - 1) != row_key(0, 0)


KNOWN = [1217067566, 907694354, 4115037466]


def test_no_word_occurs_twice_in_a_row() -> None:
    assert len(set(words([row_key(3, 5)], 1 << 18)[0].tolist())) == 1 << 18


@pytest.mark.parametrize("positions", [range(8), range(5000, 40000, 4999), [2**32 - 1, 2**31, 0, 1]])
def test_the_noise_has_the_gumbel_law(positions: range) -> None:
    """χ² over 1,024 equal cells at N = 260,000 and more: a total variation of 0.016 is seen 999 times in 1,000."""
    g = gumbel(12345678901234567890, list(positions), V, torch.float64).numpy()
    cells = (stats.gumbel_r.cdf(g.ravel()) * 1024).astype(np.int64)
    assert stats.chisquare(np.bincount(cells, minlength=1024)).pvalue > LEVEL


def test_the_tail_that_wins_has_the_right_law() -> None:
    """The least of 65,536 exponentials, times 65,536, is exponential again: 4,000 rows, by Kolmogorov and Smirnov.

    A distance of 0.055 is seen 999 times in 1,000.
    """
    least = np.array([float(exponential(words([key], V), torch.float64).min()) for key in _keys([1, 2], [*range(100)])])
    assert stats.kstest(least * V, "expon").pvalue > LEVEL


@pytest.mark.parametrize("lag", [1, 2, 3, 16, 256, 1024, 4096, 8192, 32768])
def test_neighbouring_tokens_are_independent(lag: int) -> None:
    """χ² over 32 × 32 cells at N = 520,000: a total variation of 0.011 is seen 999 times in 1,000."""
    u = _uniforms(_keys([11], list(range(8))))
    assert _independent(u[:, :-lag].ravel(), u[:, lag:].ravel())


@pytest.mark.parametrize("step", [1, 2, 256])
def test_neighbouring_positions_are_independent(step: int) -> None:
    u = _uniforms(_keys([99], list(range(0, 9 * step, step))))
    assert _independent(u[:-1].ravel(), u[1:].ravel())


@pytest.mark.parametrize("step", [1, 2, 2**32, 2**60])
def test_neighbouring_seeds_are_independent(step: int) -> None:
    u = _uniforms(_keys([(5 + step * i) % 2**64 for i in range(9)], [17]))
    assert _independent(u[:-1].ravel(), u[1:].ravel())


def test_every_bit_moves_every_bit() -> None:
    """One bit of a token changed: each bit of its word changes half the time, within 5 standard errors over 32,768."""
    w = words(_keys([4], [1]), V)[0].numpy()
    n = V // 2
    for bit in range(16):
        at = np.arange(V)[(np.arange(V) >> bit) & 1 == 0]
        flipped = w[at] ^ w[at | (1 << bit)]
        share = np.array([((flipped >> out) & 1).mean() for out in range(32)])
        assert np.abs(share - 0.5).max() < 5.5 * 0.5 / n**0.5, (bit, share)


def test_the_best_of_law_and_noise_has_the_law() -> None:
    """100,000 positions of one seed, V = 16: χ² sees a total variation of 0.016, and for pairs of neighbours 0.03."""
    N = 100_000
    p = torch.softmax(torch.randn(16, generator=torch.Generator().manual_seed(12), dtype=torch.float64) * 1.3, -1)
    race = exponential(words(_keys([77], list(range(N))), 16)).double() / p
    drawn, law = race.argmin(-1).numpy(), p.numpy()
    assert stats.chisquare(np.bincount(drawn, minlength=16), law * N).pvalue > LEVEL
    pairs = np.bincount(drawn[:-1:2] * 16 + drawn[1::2], minlength=256)
    assert stats.chisquare(pairs, np.outer(law, law).ravel() * N / 2).pvalue > LEVEL


@pytest.mark.parametrize(("multiplier", "lag"), [("SPREAD", 4096), ("SECOND_MULTIPLIER", 1024)])
def test_a_hash_with_a_multiplication_less_is_seen(multiplier: str, lag: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rng, multiplier, 1)
    u = _uniforms(_keys([11], list(range(8))))
    assert not _independent(u[:, :-lag].ravel(), u[:, lag:].ravel())


def test_rows_of_one_key_are_seen() -> None:
    u = _uniforms([(*row_key(99, 0)[:2], row_key(99, position)[2]) for position in range(9)])
    assert not _independent(u[:-1].ravel(), u[1:].ravel())


def test_single_precision_differs_by_rounding_alone() -> None:
    narrow, wide = gumbel(1, [2], V, torch.float32)[0], gumbel(1, [2], V, torch.float64)[0]
    winners = wide > -1  # the rest is what loses
    assert (narrow.double() - wide)[winners].abs().max() < 2e-6
    assert torch.isfinite(narrow).all()
    assert narrow.argmax() == wide.argmax()
    assert torch.isfinite(exponential(torch.tensor([0, 2**32 - 1]))).all()
    assert (exponential(torch.tensor([0, 2**32 - 1])) > 0).all()


@pytest.mark.parametrize(("seed", "position", "named"), [(-1, 0, "seed"), (2**64, 0, "seed"), (0, 2**32, "position")])
def test_what_is_out_of_range_is_named(seed: int, position: int, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        row_key(seed, position)


def _independent(a: np.ndarray, b: np.ndarray, cells: int = 32) -> bool:
    pairs = (a * cells).astype(np.int64) * cells + (b * cells).astype(np.int64)
    return bool(stats.chisquare(np.bincount(pairs, minlength=cells**2)).pvalue > LEVEL)
