"""One pass in the making: which rows belong to which sequence, where its keys and values lie, who may see whom.

It knows the KV pool, and nothing of models, layers' weights or tokens.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from outrider.runtime.block_pool import SlotViews
from outrider.runtime.kv_cache import KVPool


@dataclass(slots=True)
class Chunk:
    """The next tokens of one sequence.

    Attributes:
        slot: a sequence of the pool.
        tokens: at least one.
        start: the position of the first; must equal the pool's length of the slot.
        logits_from: index within the chunk from which on logits are wanted; `len(tokens)` is none.
    """

    slot: int
    tokens: Sequence[int]
    start: int
    logits_from: int


BLOCK = 256
"""Rows of scores that share a mask; longer chunks are attended in blocks, each blind to what comes after it."""

_MASK_CACHE_ELEMENTS = 16 << 20
_NEVER = float("-inf")


class CausalMasks:
    """Additive masks for the last rows of a sequence, built once for all lengths and passes.

    A row may see what lies at or before its own position, so the mask of a shorter sequence is the right-hand end of
    the mask of a longer one: one per number of rows suffices, and a length is a view of it.

    Attributes:
        none: what needs no mask gets, `[0, 0]`.
    """

    def __init__(self, max_length: int, dtype: torch.dtype, device: torch.device) -> None:
        self._max_length = max_length
        self._dtype = dtype
        self._device = device
        self._masks: dict[tuple[int, int, int], Tensor] = {}
        self._elements = 0
        self.none = torch.empty(0, 0, dtype=dtype, device=device)

    def for_rows(self, count: int, length: int, group: int, window: int) -> Tensor:
        """What the last `count` of `length` positions need: a mask, or nothing.

        Args:
            count: rows.
            length: positions, at least `count`.
            group: how many times each row is repeated.
            window: how many positions a row sees, its own included; 0 is all.

        Returns:
            `[b · group, W]` with b = `count`, or less where that would be more than `BLOCK` rows, and W at least what
            the rows of a block see; `[0, 0]` for a single row, and for rows that are all of the sequence.
        """
        if count == 1 or (count == length and not 0 < window < length):
            return self.none
        rows = min(count, max(1, BLOCK // group))
        width = length if window == 0 else min(length, window + rows - 1)
        key = (rows, group, window)
        mask = self._masks.get(key)
        if mask is None or mask.shape[1] < width:
            mask = self._build(rows, min(self._max_length, max(256, 1 << (width - 1).bit_length())), group, window)
            self._keep(key, mask)
        return mask

    def _keep(self, key: tuple[int, int, int], mask: Tensor) -> None:
        if mask.numel() > _MASK_CACHE_ELEMENTS:
            return
        replaced = self._masks.pop(key, None)
        self._elements += mask.numel() - (0 if replaced is None else replaced.numel())
        if self._elements > _MASK_CACHE_ELEMENTS:
            self._masks.clear()
            self._elements = mask.numel()
        self._masks[key] = mask

    def _build(self, rows: int, width: int, group: int, window: int) -> Tensor:
        position = torch.arange(width, device=self._device)
        row = torch.arange(width - rows, width, device=self._device).unsqueeze(1)
        unseen = position > row
        if window:
            unseen |= position <= row - window
        mask = torch.zeros(rows, width, dtype=self._dtype, device=self._device).masked_fill_(unseen, _NEVER)
        return mask.repeat_interleave(group, 0)


@dataclass(slots=True)
class PackedBatch:
    """The chunks of a pass; it travels through the model to the attention as a keyword argument.

    Attributes:
        starts: the position of the first row of each chunk.
        counts: the rows of each, one chunk after the other.
        rows: T, the rows of all.
        stores: of each chunk, its keys and values for each shape of layer, see `MemoryByHead.narrow`; they may reach
            beyond its rows.
        dtype: of keys and values.
        masks: shared by the passes of a pool.
        observer: sees each call of the attention; for looking a model over, not for passes.
    """

    starts: list[int]
    counts: list[int]
    rows: int
    stores: list[list[Tensor]]
    dtype: torch.dtype
    masks: CausalMasks
    pool: KVPool | None = None
    observer: Any = None
    _needed: dict[tuple[int, int], list[Tensor]] = field(default_factory=dict)
    _views: list[SlotViews] = field(default_factory=list)

    @property
    def views(self) -> list[SlotViews]:
        """Keys and values of each chunk, layer by layer."""
        if not self._views and self.pool is not None:
            self._views = [
                self.pool.split(stores, start, start + count)
                for stores, start, count in zip(self.stores, self.starts, self.counts, strict=True)
            ]
        return self._views

    def next_rows(self, chunks: Sequence[int]) -> "PackedBatch":
        """The batch of one more row of each of these chunks, which lie in `stores` already."""
        starts = [self.starts[i] + self.counts[i] for i in chunks]
        stores = [self.stores[i] for i in chunks]
        return PackedBatch(starts, [1] * len(chunks), len(chunks), stores, self.dtype, self.masks, self.pool)

    def masks_for(self, group: int, window: int) -> list[Tensor]:
        """What each chunk needs (`CausalMasks.for_rows`), made once a pass."""
        found = self._needed.get((group, window))
        if found is None:
            found = [
                self.masks.for_rows(count, start + count, group, window)
                for start, count in zip(self.starts, self.counts, strict=True)
            ]
            self._needed[group, window] = found
        return found

    def position_ids(self, device: torch.device) -> Tensor:
        """`[T]`: the position of each row in its sequence."""
        if len(self.starts) == 1:
            return torch.arange(self.starts[0], self.starts[0] + self.rows, device=device)
        spans = zip(self.starts, self.counts, strict=True)
        return torch.tensor(
            [position for start, count in spans for position in range(start, start + count)], device=device
        )


def pack(
    spans: Iterable[tuple[int, int, int]], pool: KVPool, masks: CausalMasks, ahead: Sequence[int] = ()
) -> PackedBatch:
    """Lays (slot, start, count) spans one after the other; `ahead` is how many rows each will have in later batches."""
    batch = PackedBatch([], [], 0, [], pool.dtype, masks, pool)
    for i, (slot, start, count) in enumerate(spans):
        batch.stores.append(pool.stores(slot, start + count + (ahead[i] if ahead else 0)))
        batch.starts.append(start)
        batch.counts.append(count)
        batch.rows += count
    return batch
