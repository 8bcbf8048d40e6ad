"""Where keys and values lie: by head, as attention on a CPU reads them, or in pages, as paged attention on a GPU does.

It knows blocks by number, and nothing of who holds which.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class MemoryShape:
    """How much of what.

    Attributes:
        kv_heads: heads of keys, and of values, by layer.
        head_dim: the size of one, by layer.
        blocks: how many there are.
        block_tokens: positions of each.
    """

    kv_heads: tuple[int, ...]
    head_dim: tuple[int, ...]
    blocks: int
    block_tokens: int

    def alike(self) -> list[list[int]]:
        """Layers by shape: those of one share a tensor, so that one call makes the views of them all."""
        shapes = list(zip(self.kv_heads, self.head_dim, strict=True))
        return [[i for i, own in enumerate(shapes) if own == shape] for shape in dict.fromkeys(shapes)]


class KVMemory(Protocol):
    """What a pool asks of either."""

    def copy(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copies each block of `source` to the one of `target`."""

    @property
    def bytes(self) -> int:
        """Bytes reserved; on a CPU those of positions never written are not taken."""


@dataclass(slots=True)
class SlotViews:
    """One sequence's keys and values for a pass, one entry per layer.

    Attributes:
        keys: `[kv_heads, 1, end, head_dim]` each: heads as a batch, so that attention leaves its result in their order.
        values: like `keys`.
        new: `[2, kv_heads, end - start, head_dim]` each: keys and values of the positions from `start` on, to write.
    """

    keys: list[Tensor]
    values: list[Tensor]
    new: list[Tensor]


class MemoryByHead:
    """All positions of a head in one piece, block after block."""

    def __init__(self, shape: MemoryShape, dtype: torch.dtype, device: torch.device) -> None:
        self._shape = shape
        self._device = device
        self._members = shape.alike()
        positions = shape.blocks * shape.block_tokens
        # [layers, 2, kv_heads, positions, head_dim] each
        self._stores = [
            torch.empty(
                (len(layers), 2, shape.kv_heads[layers[0]], positions, shape.head_dim[layers[0]]),
                dtype=dtype,
                device=device,
            )
            for layers in self._members
        ]

    @property
    def bytes(self) -> int:
        return _bytes(self._stores)

    def copy(self, source: Sequence[int], target: Sequence[int]) -> None:
        """As many blocks at once as follow one another on both sides."""
        at, size = 0, self._shape.block_tokens
        while at < len(source):
            end = at + 1
            while end < len(source) and source[end] == source[end - 1] + 1 and target[end] == target[end - 1] + 1:
                end += 1
            count = (end - at) * size
            for store in self._stores:
                store.narrow(3, target[at] * size, count).copy_(store.narrow(3, source[at] * size, count))
            at = end

    def narrow(self, block: int, end: int) -> list[Tensor]:
        """The first `end` positions from a block on, `[layers, 2, kv_heads, end, head_dim]` for each shape of layer."""
        return [store.narrow(3, block * self._shape.block_tokens, end) for store in self._stores]

    def gather(self, table: Sequence[int], end: int) -> list[Tensor]:
        """A copy of the first `end` positions of the blocks of a table, shaped like `narrow`."""
        index = torch.tensor(table, device=self._device)
        gathered = []
        for store in self._stores:
            layers, two, kv_heads, _, head_dim = store.shape
            blocks = store.view(layers * two * kv_heads, self._shape.blocks, self._shape.block_tokens * head_dim)
            together = blocks.index_select(1, index).view(layers, two, kv_heads, -1, head_dim)
            gathered.append(together.narrow(3, 0, end))
        return gathered

    def scatter(self, gathered: Sequence[Tensor], table: Sequence[int], start: int, end: int) -> None:
        """Writes positions of what was gathered to where they belong."""
        at, size = start, self._shape.block_tokens
        while at < end:
            index, offset = divmod(at, size)
            count = min(size - offset, end - at)
            for store, each in zip(self._stores, gathered, strict=True):
                store.narrow(3, table[index] * size + offset, count).copy_(each.narrow(3, at, count))
            at += count

    def views(self, stores: Sequence[Tensor], start: int, end: int) -> SlotViews:
        """What `narrow` or `gather` gave, layer by layer."""
        if len(stores) == 1:
            return _views(stores[0], start, end)
        keys: list[Tensor] = [torch.empty(0)] * len(self._shape.kv_heads)
        values, new = list(keys), list(keys)
        for store, members in zip(stores, self._members, strict=True):
            part = _views(store, start, end)
            for i, layer in enumerate(members):
                keys[layer], values[layer], new[layer] = part.keys[i], part.values[i], part.new[i]
        return SlotViews(keys, values, new)


class PagedMemory:
    """Block after block, each a page of its positions with all their heads: a table of blocks says where to read.

    Attributes:
        keys: of each layer, `[blocks + 1, block_tokens, kv_heads, head_dim]`. The last block is nobody's: rows that
            only fill a pass up write there.
        values: like `keys`.
        nowhere: a position of that block, among those of all.
        on_copy: who is told of each copy of blocks, if anybody: whoever holds other heads of the same positions.
    """

    def __init__(self, shape: MemoryShape, dtype: torch.dtype, device: torch.device) -> None:
        self._device = device
        self.nowhere = shape.blocks * shape.block_tokens
        self.on_copy: Callable[[Sequence[int], Sequence[int]], None] | None = None
        layers = len(shape.kv_heads)
        self.keys: list[Tensor] = [torch.empty(0)] * layers
        self.values: list[Tensor] = list(self.keys)
        self._stores: list[Tensor] = []
        for members in shape.alike():
            head = (shape.kv_heads[members[0]], shape.head_dim[members[0]])
            size = (2 * len(members), shape.blocks + 1, shape.block_tokens, *head)
            store = torch.empty(size, dtype=dtype, device=device)
            # Attention multiplies what it does not see by 0, and 0 times a number that is none is none.
            store.zero_()
            self._stores.append(store)
            own = store.unbind(0)
            for i, layer in enumerate(members):
                self.keys[layer], self.values[layer] = own[2 * i], own[2 * i + 1]

    @property
    def bytes(self) -> int:
        return _bytes(self._stores)

    def copy(self, source: Sequence[int], target: Sequence[int]) -> None:
        if self.on_copy is not None:
            self.on_copy(source, target)
        there, here = (torch.tensor(list(blocks), device=self._device) for blocks in (target, source))
        for store in self._stores:
            store.index_copy_(1, there, store.index_select(1, here))


def _bytes(stores: Sequence[Tensor]) -> int:
    return sum(store.numel() * store.element_size() for store in stores)


def _views(store: Tensor, start: int, end: int) -> SlotViews:
    # store: [layers, 2, kv_heads, end or more, head_dim]
    store = store.narrow(3, 0, end)
    held = store.flatten(0, 1).unsqueeze(2).unbind(0)
    new = store.narrow(3, start, end - start).unbind(0)
    return SlotViews(list(held[0::2]), list(held[1::2]), list(new))
