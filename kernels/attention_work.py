"""The work list of paged attention: the rows and positions of each program.

A tile is up to `TILE_ROWS` rows of one sequence; a stretch is `STRETCH` positions. An item is a tile with one stretch,
or with all its stretches in order. `kernels.triton_attention` gives the same bits either way, so the split may depend
on the batch: the longest tiles are split, up to `CUT_ITEMS` items, to keep a GPU busy.
"""

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
        items: int32 `[W, 5]`: sequence, first row of the tile, rows of the tile, stretch, and slot of the partial
            result. Stretch and slot are -1 for a whole tile. An item with 0 rows does nothing.
        row_slots: int32 `[T]`: slot of the row's first stretch · `TILE_ROWS` + index of the row in its tile; the slots
            of the next stretches follow. -1 for rows of whole tiles.
    """

    items: np.ndarray
    row_slots: np.ndarray


def work_size(rows: int, max_length: int) -> tuple[int, int]:
    """Return the most items and slots of a batch of `rows` rows, with sequences of at most `max_length` positions."""
    stretches = -(-max_length // STRETCH)
    slots = min(rows * stretches, max(CUT_ITEMS, stretches)) if stretches > 1 else 0
    return rows + slots, slots


def work_list(row_starts: np.ndarray, lengths: np.ndarray, growth: int = 0, *, cuts: bool = True) -> Work:
    """Return the work list of a batch.

    Args:
        row_starts: `[S + 1]`: the first row of each sequence, and T.
        lengths: `[S]`: positions of each sequence, its rows included.
        growth: how many positions sequences may grow by while the list stays valid. Items of stretches that are not
            reached yet do nothing.
        cuts: whether tiles may be split.
    """
    counts = np.diff(row_starts)
    tiles = -(-counts // TILE_ROWS)
    owner = np.arange(len(counts)).repeat(tiles)  # per tile, as are the next arrays
    first = row_starts[owner] + (np.arange(len(owner)) - (tiles.cumsum() - tiles)[owner]) * TILE_ROWS
    rows = np.minimum(row_starts[owner + 1] - first, TILE_ROWS)
    seen = lengths[owner] + growth - (row_starts[owner + 1] - first - rows)
    stretches = -(-seen // STRETCH)

    longest = np.argsort(-stretches, kind="stable")
    is_cut = np.zeros(len(owner), bool)
    budget = max(CUT_ITEMS, stretches.max(initial=0)) if cuts else 0
    is_cut[longest] = (stretches[longest] > 1) & (stretches[longest].cumsum() <= budget)
    whole, cut = np.flatnonzero(~is_cut), np.flatnonzero(is_cut)
    cut_tile, slots = cut.repeat(stretches[cut]), np.arange(stretches[cut].sum())
    first_slot = np.full(len(owner), -1)
    first_slot[cut] = stretches[cut].cumsum() - stretches[cut]

    items = np.full((len(whole) + len(slots), ITEM), -1, _INT)
    order = np.concatenate((whole, cut_tile))
    items[:, 0], items[:, 1], items[:, 2] = owner[order], first[order], rows[order]
    items[len(whole) :, 3], items[len(whole) :, 4] = slots - first_slot[cut_tile], slots
    own = first_slot.repeat(rows)
    row_slots = np.where(own < 0, -1, own * TILE_ROWS + np.arange(len(own)) - first.repeat(rows))
    return Work(items, row_slots.astype(_INT))
