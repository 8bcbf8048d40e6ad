"""Random numbers: Philox's published vectors, distributions, independence, and the shared noise.

Seeds are fixed, so a failure is a defect and no bad luck. N is a number of draws.
"""

import numpy as np
import pytest
import torch
from scipy import stats

from kernels import rng
from kernels.rng import (
    MAX_SEED,
    MAX_WORD,
    Domain,
    exponential,
    gumbel,
    noise_rows,
    philox4x32,
    row_key,
    uniform,
    words,
)
from tests.kernels.uniforms import philox4x32_torch, uniforms

LEVEL = 1e-6
V = 1 << 16


def _is_independent(a: np.ndarray, b: np.ndarray, cells: int = 32) -> bool:
    """χ² over cells × cells; at N = 520,000 a total variation of 0.011 is detected with 99.9 %."""
    pairs = (a * cells).astype(np.int64) * cells + (b * cells).astype(np.int64)
    return bool(stats.chisquare(np.bincount(pairs.ravel(), minlength=cells**2)).pvalue > LEVEL)


# --------------------------------------------------------------------------------------------------------------- Philox

# Random123 1.14, tests/kat_vectors, philox4x32 with 10 rounds: counter, key, output.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((MAX_WORD,) * 4, (MAX_WORD,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], answer: tuple[int, int, int, int]
) -> None:
    assert philox4x32(counter, key) == answer
    assert philox4x32_torch(torch.tensor(counter), torch.tensor(key)).tolist() == list(answer)


@pytest.mark.parametrize("seed", [0, 2**63, MAX_SEED])
def test_uniforms_equal_uniform_of_each_element(seed: int) -> None:
    lengths, indices = torch.tensor([[0], [7], [MAX_WORD]]), torch.arange(4)
    for domain, draw in ((Domain.DRAFT, 0), (Domain.RESAMPLE, 5)):
        drawn = uniforms(seed, lengths, indices, domain, draw)
        assert drawn.tolist() == [
            [uniform(seed, int(length), index, domain, draw) for index in range(4)] for length in lengths
        ]
    each = uniforms(torch.tensor([seed - 2**64 if seed >= 2**63 else seed]), 7, 2, Domain.ACCEPT)
    assert each.tolist() == [uniform(seed, 7, 2, Domain.ACCEPT)]


@pytest.mark.parametrize("domain", Domain)
def test_draws_are_uniform(domain: Domain) -> None:
    """χ² over 64 cells of 65,536 draws: a total variation of 0.02 is detected with 99.9 %."""
    drawn = uniforms(77, torch.arange(8192)[:, None], torch.arange(8), domain).flatten().numpy()
    assert stats.chisquare(np.bincount((drawn * 64).astype(int), minlength=64)).pvalue > LEVEL


@pytest.mark.parametrize(
    "other",
    [
        {"domain": Domain.DRAFT},
        {"domain": Domain.RESAMPLE},
        {"base_length": torch.arange(1, 65_537)},
        {"index": 1},
        {"seed": 77 + 2**32},
        {"draw": 1},
    ],
    ids=lambda other: "-".join(other),
)
def test_draws_are_independent(other: dict[str, int]) -> None:
    """65,536 pairs of draws that differ in one argument."""
    fields = {"seed": 77, "base_length": torch.arange(65_536), "index": 0, "domain": Domain.ACCEPT}
    mine, theirs = uniforms(**fields).numpy(), uniforms(**fields | other).numpy()  # type: ignore[arg-type]
    assert _is_independent(mine, theirs, cells=16)
    assert abs(np.corrcoef(mine, theirs)[0, 1]) < 5 / np.sqrt(len(mine))


# --------------------------------------------------------------------------------------------------------- shared noise


def _noise(seeds: list[int], positions: list[int]) -> np.ndarray:
    """Return the noise as uniforms, one row of V for each seed and position."""
    keys = [row_key(seed, position) for seed in seeds for position in positions]
    u: np.ndarray = (words(keys, V).numpy() + 0.5) / 2**32
    return u


def test_the_words_of_a_seed_never_change() -> None:
    """A seed has one text: only a new version of the noise may change them."""
    assert words([row_key(7, 11)], 3)[0].tolist() == [1217067566, 907694354, 4115037466]


@pytest.mark.parametrize("size", [1, 50, 40_000])  # the last is made in several pieces
def test_noise_does_not_depend_on_the_batch(size: int) -> None:
    positions = [(5, 1), (5, 2), (6, 1), (2**64 - 1, 2**32 - 1)]
    together = noise_rows(positions, size)
    assert together.shape == (4, size)
    for position, row in zip(positions, together, strict=True):
        assert torch.equal(noise_rows([position], size)[0], row)
        assert torch.equal(row.log1p().neg(), exponential(words([row_key(*position)], size))[0])


@pytest.mark.parametrize("positions", [range(8), [2**32 - 1, 2**31, 0, 1]])
def test_the_noise_is_gumbel_distributed(positions: range) -> None:
    """χ² over 1,024 equal cells at N = 260,000 and more: a total variation of 0.016 is detected with 99.9 %."""
    g = gumbel(12345678901234567890, list(positions), V, torch.float64).numpy()
    cells = (stats.gumbel_r.cdf(g.ravel()) * 1024).astype(np.int64)
    assert stats.chisquare(np.bincount(cells, minlength=1024)).pvalue > LEVEL


def test_the_tail_that_wins_is_exponential() -> None:
    """The least of 65,536 exponentials, times 65,536, is exponential again: 1,000 rows, by Kolmogorov and Smirnov.

    A distance of 0.14 is detected with 99.9 %.
    """
    keys = [row_key(seed, position) for seed in (1, 2) for position in range(500)]
    least = np.array([float(exponential(words([key], V), torch.float64).min()) for key in keys])
    assert stats.kstest(least * V, "expon").pvalue > LEVEL


@pytest.mark.parametrize("lag", [1, 16, 1024, 4096, 32768])
def test_neighbouring_tokens_are_independent(lag: int) -> None:
    u = _noise([11], list(range(8)))
    assert _is_independent(u[:, :-lag], u[:, lag:])


@pytest.mark.parametrize(
    ("seeds", "positions"),
    [
        *(([99], list(range(0, 9 * step, step))) for step in (1, 256)),
        *(([(5 + step * i) % 2**64 for i in range(9)], [17]) for step in (1, 2**32, 2**60)),
    ],
)
def test_neighbouring_positions_and_seeds_are_independent(seeds: list[int], positions: list[int]) -> None:
    u = _noise(seeds, positions)
    assert _is_independent(u[:-1], u[1:])


def test_the_best_of_target_and_noise_is_distributed_as_the_target() -> None:
    """100,000 positions of one seed, V = 16: they detect a total variation of 0.016, and for pairs 0.03."""
    N = 100_000
    z = torch.randn(16, generator=torch.Generator().manual_seed(12), dtype=torch.float64) * 1.3
    p = torch.softmax(z, -1).numpy()
    drawn = (exponential(words([row_key(77, at) for at in range(N)], 16)).double().numpy() / p).argmin(-1)
    assert stats.chisquare(np.bincount(drawn, minlength=16), p * N).pvalue > LEVEL
    pairs = np.bincount(drawn[:-1:2] * 16 + drawn[1::2], minlength=256)
    assert stats.chisquare(pairs, np.outer(p, p).ravel() * N / 2).pvalue > LEVEL


@pytest.mark.parametrize(("multiplier", "lag"), [("SPREAD", 4096), ("SECOND_MULTIPLIER", 1024)])
def test_a_hash_without_a_multiplication_is_detected(
    multiplier: str, lag: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rng, multiplier, 1)
    u = _noise([11], list(range(8)))
    assert not _is_independent(u[:, :-lag], u[:, lag:])
