"""The work list of paged attention: the rows and positions of each program.

A tile is up to `TILE_ROWS` rows of one sequence; a stretch is `STRETCH` positions. An item is a tile with one stretch,
or with all its stretches in order. `kernels.triton_attention` gives the same bits either way, so the split may depend
on the batch: the longest tiles are split, up to `CUT_ITEMS` items, to keep a GPU busy.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

TILE_ROWS = 8

STRETCH = 128
"""Positions of a stretch."""

CUT_ITEMS = 256
"""The most items of one stretch in a batch (or those of its longest tile, if that has more): enough for any GPU."""

ITEM = 5
"""Columns of `Work.items`."""

_INT = np.dtype(np.int32)


class Work(NamedTuple):
    """The attention of a batch of T rows.

    Attributes:
        items: int32 `[W, 5]`: sequence, first row of the tile, rows of the tile, stretch, and index of the
            partial result. Stretch and index are -1 for a whole tile. An item with 0 rows does nothing.
        row_partials: int32 `[T]`: partial result of the row's first stretch · `TILE_ROWS` + index of the row in its
            tile; those of the next stretches follow. -1 for rows of whole tiles.
    """

    items: np.ndarray
    row_partials: np.ndarray


def work_size(rows: int, max_length: int) -> tuple[int, int]:
    """Return the most items and partial results of `rows` rows, of sequences of at most `max_length` positions."""
    stretches = -(-max_length // STRETCH)
    partials = min(rows * stretches, max(CUT_ITEMS, stretches)) if stretches > 1 else 0
    return rows + partials, partials


def work_list(row_starts: Sequence[int], lengths: Sequence[int], growth: int = 0, *, cuts: bool = True) -> Work:
    """Return the work list of a batch.

    Args:
        row_starts: `[S + 1]`: the first row of each sequence, and T.
        lengths: `[S]`: positions of each sequence, its rows included.
        growth: how many positions sequences may grow by while the list stays valid. Items of stretches that are not
            reached yet do nothing.
    """
    # Lists, not arrays: a batch has few tiles, and a round waits for this.
    tiles = list[tuple[int, int, int]]()
    stretches = list[int]()
    for s, (begin, end, length) in enumerate(zip(row_starts, row_starts[1:], lengths, strict=False)):
        for first in range(begin, end, TILE_ROWS):
            rows = min(TILE_ROWS, end - first)
            tiles.append((s, first, rows))
            stretches.append(-(-(length + growth - (end - first - rows)) // STRETCH))
    longest = max(stretches, default=0)
    cut = set[int]()
    if cuts and longest > 1:
        spent, budget = 0, max(CUT_ITEMS, longest)
        for i in sorted(range(len(tiles)), key=lambda i: -stretches[i]):
            spent += stretches[i]
            if stretches[i] == 1 or spent > budget:
                break
            cut.add(i)
    items = [(*tile, -1, -1) for i, tile in enumerate(tiles) if i not in cut]
    row_partials, partial = list[int](), 0
    for i, (s, first, rows) in enumerate(tiles):
        if i not in cut:
            row_partials += [-1] * rows
            continue
        items += [(s, first, rows, stretch, partial + stretch) for stretch in range(stretches[i])]
        row_partials += range(partial * TILE_ROWS, partial * TILE_ROWS + rows)
        partial += stretches[i]
    return Work(np.array(items, _INT).reshape(-1, ITEM), np.array(row_partials, _INT))
