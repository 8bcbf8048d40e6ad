"""A work list has each row and stretch exactly once, fits its size, and stays valid while sequences grow."""

import random
from collections import Counter

import numpy as np
import pytest

from kernels.attention_work import CUT_ITEMS, STRETCH, TILE_ROWS, Work, work_list, work_size

Cells = Counter[tuple[int, int]]
"""How often each (row, stretch) occurs."""


def work_of(counts: list[int], lengths: list[int], growth: int = 0, *, cuts: bool = True) -> Work:
    return work_list(np.cumsum([0, *counts], dtype=np.int32), np.array(lengths, np.int32), growth, cuts=cuts)


def needed(counts: list[int], lengths: list[int]) -> Cells:
    positions = [position for n, length in zip(counts, lengths, strict=True) for position in range(length - n, length)]
    return Counter((row, each) for row, position in enumerate(positions) for each in range(position // STRETCH + 1))


def listed(work: Work, counts: list[int], lengths: list[int]) -> Cells:
    """Return the cells of the list that are needed, after checking its items and slots."""
    starts, found = np.cumsum([0, *counts]), Cells()
    for s, first, rows, stretch, slot in work.items.tolist():
        assert starts[s] <= first < starts[s + 1]
        assert rows == min(TILE_ROWS, starts[s + 1] - first)
        assert (stretch < 0) == (slot < 0)
        for row in range(first, first + rows):
            position = lengths[s] - int(starts[s + 1]) + row
            mine = range(position // STRETCH + 1) if stretch < 0 else {stretch} & {*range(position // STRETCH + 1)}
            found.update((row, each) for each in mine)
            assert work.row_slots[row] == (-1 if stretch < 0 else (slot - stretch) * TILE_ROWS + row - first)
    slots = sorted(slot for slot in work.items[:, 4].tolist() if slot >= 0)
    assert slots == list(range(len(slots)))
    return found


@pytest.mark.parametrize("seed", range(30))
def test_each_stretch_of_each_row_is_done_once(seed: int) -> None:
    rng = random.Random(seed)
    counts = [1, *(rng.choice([0, 1, 1, 2, 8, 9, rng.randint(1, 400)]) for _ in range(rng.randint(0, 39)))]
    lengths = [count + rng.choice([0, 255, 256, 257, rng.randint(0, 9000)]) for count in counts]
    work, whole = (work_of(counts, lengths, cuts=cuts) for cuts in (True, False))
    assert listed(work, counts, lengths) == listed(whole, counts, lengths) == needed(counts, lengths)
    assert (whole.items[:, 3] == -1).all()
    items, slots = work_size(sum(counts), max(lengths))
    assert len(work.items) <= items
    assert work.items[:, 4].max() < max(slots, 1)
    assert {work.items.dtype, work.row_slots.dtype} == {np.dtype(np.int32)}


@pytest.mark.parametrize("seed", range(10))
def test_a_list_with_growth_is_valid_at_every_length_up_to_it(seed: int) -> None:
    rng = random.Random(seed)
    counts = [rng.choice([1, 1, 3]) for _ in range(20)]
    lengths = [count + rng.choice([0, 250, 255, 511, rng.randint(0, 3000)]) for count in counts]
    work = work_of(counts, lengths, growth=7)
    for growth in (0, 1, 6, 7):
        grown = [length + growth for length in lengths]
        assert listed(work, counts, grown) == needed(counts, grown)
    assert len(work.items) <= work_size(sum(counts), max(lengths) + 7)[0]


def test_the_longest_tiles_are_cut_while_there_is_room() -> None:
    work = work_of([1] * 64, [STRETCH * 10 * (1 + i % 8) for i in range(64)])
    whole = {s for s, _, _, stretch, _ in work.items.tolist() if stretch < 0}
    assert len(work.items) - len(whole) == 240
    assert {s for s in range(64) if s not in whole} == {7, 15, 23}
    assert work_of([1, 1], [300 * STRETCH, 3]).items[:, 4].max() == 299, "one sequence is always cut"


def test_short_sequences_are_whole_and_sizes_follow_rows_and_length() -> None:
    assert work_of([1, 9, 0, 3], [STRETCH, 9, 0, 3]).items.tolist() == [
        [0, 0, 1, -1, -1], [1, 1, 8, -1, -1], [1, 9, 1, -1, -1], [3, 10, 3, -1, -1],
    ]  # fmt: skip
    assert work_size(5, STRETCH) == (5, 0), "nothing is ever cut"
    assert work_size(1, 8192) == (33, 32)
    assert work_size(64, 8192) == (64 + CUT_ITEMS, CUT_ITEMS)
    assert work_size(64, 400 * STRETCH) == (464, 400)
