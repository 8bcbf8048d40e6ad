"""One pass in the making: which rows belong to which sequence, where its keys and values lie, who may see whom.

It knows the KV pool, and nothing of models, layers' weights or tokens.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from outrider.lm.kv_pool import KVPool

_MASK_CACHE_ELEMENTS = 16 << 20
_NEVER = float("-inf")


class CausalMasks:
    """Additive masks for the last `count` positions of a sequence, built once for all lengths and passes.

    Row i may see what lies at or before its own position, so the mask of a shorter sequence is the right-hand end of
    the mask of a longer one: one per number of rows suffices, and a length is a view of it.
    """

    def __init__(self, max_length: int, dtype: torch.dtype, device: torch.device) -> None:
        self._max_length = max_length
        self._dtype = dtype
        self._device = device
        self._masks: dict[tuple[int, int, int | None], Tensor] = {}
        self._elements = 0

    def get(self, count: int, length: int, group: int, window: int | None) -> Tensor:
        """The mask `[group · count, length]` of the last `count` rows over the last `length` positions.

        Args:
            count: rows.
            length: positions, at least `count`.
            group: how many times the rows are repeated, one block after the other.
            window: how many positions a row sees, its own included; None is all.
        """
        key = (count, group, window)
        mask = self._masks.get(key)
        if mask is None or mask.shape[1] < length:
            room = min(self._max_length, max(256, 1 << (length - 1).bit_length()))
            mask = self._build(count, room, group, window)
            self._keep(key, mask)
        return mask.narrow(1, mask.shape[1] - length, length)

    def _keep(self, key: tuple[int, int, int | None], mask: Tensor) -> None:
        if mask.numel() > _MASK_CACHE_ELEMENTS:
            return
        replaced = self._masks.pop(key, None)
        self._elements += mask.numel() - (0 if replaced is None else replaced.numel())
        if self._elements > _MASK_CACHE_ELEMENTS:
            self._masks.clear()
            self._elements = mask.numel()
        self._masks[key] = mask

    def _build(self, count: int, length: int, group: int, window: int | None) -> Tensor:
        position = torch.arange(length, device=self._device)
        row = torch.arange(length - count, length, device=self._device).unsqueeze(1)
        unseen = position > row
        if window is not None:
            unseen |= position <= row - window
        mask = torch.zeros(count, length, dtype=self._dtype, device=self._device).masked_fill_(unseen, _NEVER)
        return mask.repeat(group, 1)


@dataclass(slots=True)
class Segment:
    """The rows of one sequence in a pass.

    Attributes:
        first: its first row.
        count: how many rows.
        start: the position of the first.
        end: one above the position of the last.
        keys, values, new: see `SlotViews`.
    """

    first: int
    count: int
    start: int
    end: int
    keys: Any
    values: Any
    new: Any


@dataclass(slots=True)
class PackedBatch:
    """All segments of a pass; it travels through the model to the attention as a keyword argument.

    Attributes:
        segments: in the order of their rows.
        rows: T, the rows of all.
        dtype: of keys and values.
        masks: shared by the passes of a pool.
        observer: sees each call of the attention; for looking a model over, not for passes.
    """

    segments: list[Segment]
    rows: int
    dtype: torch.dtype
    masks: CausalMasks
    observer: Any = field(default=None)

    def position_ids(self, device: torch.device) -> Tensor:
        """`[T]`: the position of each row in its sequence."""
        if len(self.segments) == 1:
            return torch.arange(self.segments[0].start, self.segments[0].end, device=device)
        positions = [position for segment in self.segments for position in range(segment.start, segment.end)]
        return torch.tensor(positions, device=device)


def pack(spans: Iterable[tuple[int, int, int]], pool: KVPool, masks: CausalMasks) -> PackedBatch:
    """Lays (slot, start, count) spans one after the other."""
    segments = []
    first = 0
    for slot, start, count in spans:
        end = start + count
        views = pool.views(slot, start, end)
        segments.append(Segment(first, count, start, end, views.keys, views.values, views.new))
        first += count
    return PackedBatch(segments, first, pool.dtype, masks)
