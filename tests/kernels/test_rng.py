"""Philox: equal to the published vectors, the same in both forms, and draws that know nothing of each other."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from scipy import stats

from kernels.rng import MAX_SEED, MAX_WORD, Domain, philox4x32, philox4x32_torch, uniform, uniforms

# Random123 1.14, tests/kat_vectors, philox4x32 with 10 rounds: counter, key, output.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((MAX_WORD,) * 4, (MAX_WORD,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
LEVEL = 1e-6  # of every test below; seeds are fixed, so a failure is a defect and no bad luck


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_the_published_answers_come_out(
    counter: tuple[int, int, int, int], key: tuple[int, int], answer: tuple[int, int, int, int]
) -> None:
    assert philox4x32(counter, key) == answer
    assert philox4x32_torch(torch.tensor(counter), torch.tensor(key)).tolist() == list(answer)


def test_both_forms_agree_word_for_word() -> None:
    source = torch.Generator().manual_seed(3)
    counters = torch.randint(0, 2**32, (200, 4), generator=source)
    keys = torch.randint(0, 2**32, (200, 2), generator=source)
    scalar = [
        list(philox4x32((a, b, c, d), (k, m)))
        for (a, b, c, d), (k, m) in zip(counters.tolist(), keys.tolist(), strict=True)
    ]
    assert philox4x32_torch(counters, keys).tolist() == scalar


def test_leading_shapes_broadcast() -> None:
    source = torch.Generator().manual_seed(4)
    counters = torch.randint(0, 2**32, (5, 1, 4), generator=source)
    keys = torch.randint(0, 2**32, (3, 2), generator=source)
    out = philox4x32_torch(counters, keys)
    assert out.shape == (5, 3, 4)
    assert torch.equal(out[4, 2], philox4x32_torch(counters[4, 0], keys[2]))


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1, 2**63, MAX_SEED])
def test_uniforms_are_uniform_for_each_element(seed: int) -> None:
    lengths, places = torch.tensor([[0], [7], [MAX_WORD]]), torch.arange(4)
    for domain, draw in ((Domain.DRAFT, 0), (Domain.RESAMPLE, 5)):
        drawn = uniforms(seed, lengths, places, domain, draw)
        assert drawn.tolist() == [
            [uniform(seed, int(length), place, domain, draw) for place in range(4)] for length in lengths
        ]
    each = uniforms(torch.tensor([seed - 2**64 if seed >= 2**63 else seed]), 7, 2, Domain.ACCEPT)
    assert each.tolist() == [uniform(seed, 7, 2, Domain.ACCEPT)]


def test_every_part_of_the_counter_and_of_the_key_makes_another_draw() -> None:
    drawn = {
        uniform(seed, base_length, index, domain, draw)
        for seed, base_length, index, domain, draw in product(
            (0, 1, 2**32, 2**63), (0, 1, 2, 2**31), range(4), Domain, range(3)
        )
    }
    assert len(drawn) == 4 * 4 * 4 * len(Domain) * 3


def test_draws_lie_in_the_unit_interval_with_53_bits() -> None:
    drawn = uniforms(5, torch.arange(20_000), 0, Domain.ACCEPT).numpy()
    assert drawn.min() >= 0
    assert drawn.max() < 1
    scaled = drawn * 2.0**53
    assert (scaled == np.rint(scaled)).all()
    assert (np.rint(scaled).astype(np.int64) % 2).mean() == pytest.approx(0.5, abs=0.02)  # the last bit lives


@pytest.mark.parametrize("domain", Domain)
def test_draws_are_uniform(domain: Domain) -> None:
    """χ² over 64 cells of 65,536 draws: a total variation of 0.02 would be seen nearly always."""
    drawn = uniforms(77, torch.arange(8192)[:, None], torch.arange(8), domain).flatten().numpy()
    counts = np.bincount((drawn * 64).astype(int), minlength=64)
    assert stats.chisquare(counts).pvalue > LEVEL


@pytest.mark.parametrize(
    "other",
    [
        {"domain": Domain.DRAFT},
        {"domain": Domain.RESAMPLE},
        {"shift": 1},
        {"index": 1},
        {"seed": 78},
        {"seed": 77 + 2**32},
        {"draw": 1},
    ],
    ids=str,
)
def test_draws_know_nothing_of_each_other(other: dict[str, int]) -> None:
    """χ² of 16 × 16 cells over 65,536 pairs, against the same draw for another purpose, round, place or seed."""
    lengths = torch.arange(65_536)
    mine = uniforms(77, lengths, 0, Domain.ACCEPT).numpy()
    theirs = uniforms(
        other.get("seed", 77),
        lengths + other.get("shift", 0),
        other.get("index", 0),
        Domain(other.get("domain", Domain.ACCEPT)),
        other.get("draw", 0),
    ).numpy()
    cells = np.bincount((mine * 16).astype(int) * 16 + (theirs * 16).astype(int), minlength=256)
    assert stats.chisquare(cells).pvalue > LEVEL
    assert abs(np.corrcoef(mine, theirs)[0, 1]) < 5 / np.sqrt(len(mine))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**64}, f"seed is {2**64}"),
        ({"base_length": -1}, "base_length is -1"),
        ({"base_length": 2**32}, f"base_length is {2**32}"),
        ({"index": -1}, "index is -1"),
        ({"draw": 2**32}, f"draw is {2**32}"),
    ],
)
def test_numbers_out_of_range_are_named(arguments: dict[str, int], named: str) -> None:
    given = {"seed": 1, "base_length": 2, "index": 3, "draw": 0} | arguments
    with pytest.raises(ValueError, match=named):
        uniform(domain=Domain.DRAFT, **given)
    with pytest.raises(ValueError, match=named):
        uniforms(domain=Domain.DRAFT, **given)
