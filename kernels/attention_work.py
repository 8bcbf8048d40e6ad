"""The work list of attention over pages: which rows of a pass a program takes, and which of their positions.

A tile is up to `TILE_ROWS` rows of one sequence; a stretch is `STRETCH` positions of it. An item is a tile with one
stretch, or with all that it sees, one after the other. `kernels.triton_attention` gives the same bits either way, so
how tiles are cut may follow the rest of the pass: the longest are cut while there is room, so that a GPU has work.
"""

from typing import NamedTuple

import numpy as np

TILE_ROWS = 8

STRETCH = 256
"""Positions, in every sequence and pass."""

CUT_ITEMS = 256
"""Items of one stretch that a pass has at most, or as many as its longest tile has: enough for any GPU."""

ITEM = 5
"""Numbers of an item."""

_INT = np.dtype(np.int32)


class Work(NamedTuple):
    """What attention over a pass of T rows consists of.

    Attributes:
        items: int32 `[W, 5]`: sequence, first row of the tile, its rows, stretch, and the slot of the stretch's
            result; stretch and slot are -1 where the item is the whole tile. An item of no rows does nothing.
        row_slots: int32 `[T]`: slot of a row's first stretch, those of the next follow it, times `TILE_ROWS`, plus the
            row's number in its tile; -1 of rows in whole tiles.
    """

    items: np.ndarray
    row_slots: np.ndarray


def work_size(rows: int, max_length: int) -> tuple[int, int]:
    """How many items and slots any pass of so many rows has at most, of sequences of at most so many positions."""
    stretches = -(-max_length // STRETCH)
    slots = min(rows * stretches, max(CUT_ITEMS, stretches)) if stretches > 1 else 0
    return rows + slots, slots


def work_list(row_starts: np.ndarray, lengths: np.ndarray, growth: int = 0, *, cuts: bool = True) -> Work:
    """Lists the work of a pass.

    Args:
        row_starts: `[S + 1]`: the first row of each sequence, and where the last one's end.
        lengths: `[S]`: positions of each, those of its rows included.
        growth: how many positions further on the rows of a sequence may be while the list stays valid. Items of
            stretches that are not reached yet do nothing.
        cuts: whether tiles are cut at all.
    """
    counts = np.diff(row_starts)
    tiles = -(-counts // TILE_ROWS)
    owner = np.arange(len(counts)).repeat(tiles)  # of each tile, as what follows
    first = row_starts[owner] + (np.arange(len(owner)) - (tiles.cumsum() - tiles)[owner]) * TILE_ROWS
    rows = np.minimum(row_starts[owner + 1] - first, TILE_ROWS)
    seen = lengths[owner] + growth - (row_starts[owner + 1] - first - rows)
    stretches = -(-seen // STRETCH)

    longest = np.argsort(-stretches, kind="stable")
    is_cut = np.zeros(len(owner), bool)
    room = max(CUT_ITEMS, stretches.max(initial=0)) if cuts else 0
    is_cut[longest] = (stretches[longest] > 1) & (stretches[longest].cumsum() <= room)
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
