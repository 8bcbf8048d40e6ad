"""The blocks of a KV pool: which are held, which one is taken next, and the memory they are.

A block is held by one sequence or several, or it is free. A free block may still be cached under a key for what lies in
it, and is found again until a sequence takes it. Blocks without a key are taken first, then the least recently used.

Blocks are reserved in runs: a sequence that grows into its run lies in one piece of memory, which attention likes.
Where nothing else is left, reserved blocks are given to others.

Every method of `BlockPool` takes time in the blocks it is given, save `check_integrity`.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

# How many blocks are looked at for a run, over its length.
_LOOKS = 4
_LOOKS_AT_LEAST = 64


class PoolExhausted(Exception):
    """A KV pool has fewer free blocks than are needed."""


class PoolCorrupted(RuntimeError):
    """The books of a KV pool contradict each other: a bug, not an overload."""


class BlockPool:
    """`count` blocks, numbered from 0. One thread owns them; `find` may be called from any."""

    def __init__(self, count: int) -> None:
        if count < 1:
            raise ValueError(f"count is {count}; a pool has at least 1 block")
        self.count = count
        self._ref_counts = [0] * count
        # Free blocks, those to be taken next first: not reserved, and reserved.
        self._free = OrderedDict.fromkeys(range(count))
        self._reserved: OrderedDict[int, None] = OrderedDict()
        self._is_reserved = bytearray(count)
        self._key_of_block: dict[int, bytes] = {}
        self._block_of_key: dict[bytes, int] = {}
        self._cursor = 0  # where the search for a run goes on
        self._clock = 0  # how many times a block with a key was released
        self._released_at = [0] * count  # the clock when each last was

    @property
    def num_free(self) -> int:
        """How many blocks are free."""
        return len(self._free) + len(self._reserved)

    def ref_count(self, block: int) -> int:
        """How many sequences hold a block."""
        return self._ref_counts[block]

    # -------------------------------------------------------------------------------------------------------- holding

    def take(self, wanted: int | None = None) -> int:
        """Takes a free block: `wanted`, or else the next one. Its key is forgotten.

        Raises:
            PoolExhausted: all are held.
        """
        if wanted is not None and self._ref_counts[wanted] == 0:
            block = wanted
            del self._free_list(block)[block]
        elif self._free:
            block, _ = self._free.popitem(last=False)
        elif self._reserved:
            block, _ = self._reserved.popitem(last=False)
        else:
            raise PoolExhausted(f"all {self.count} blocks of the KV pool are held")
        self.forget(block)
        self._ref_counts[block] = 1
        return block

    def hold(self, block: int) -> None:
        """Holds a block once more; what is in it stays."""
        if self._ref_counts[block] == 0:
            del self._free_list(block)[block]
        self._ref_counts[block] += 1

    def release(self, block: int) -> None:
        """Releases a block.

        Raises:
            ValueError: nobody holds it.
        """
        if self._ref_counts[block] < 1:
            raise ValueError(f"block {block} is released, and nobody holds it")
        self._ref_counts[block] -= 1
        if self._ref_counts[block] == 0:
            if block in self._key_of_block:
                self._clock += 1
                self._released_at[block] = self._clock
            self._put(block)

    # ------------------------------------------------------------------------------------------------------- contents

    def cache(self, block: int, key: bytes) -> None:
        """Caches a block under `key`; the first block of a key keeps it."""
        if key not in self._block_of_key:
            self.forget(block)
            self._block_of_key[key] = block
            self._key_of_block[block] = key

    def forget(self, block: int) -> None:
        """Forgets the key of a block."""
        key = self._key_of_block.pop(block, None)
        if key is not None:
            del self._block_of_key[key]

    def find(self, key: bytes) -> int | None:
        """The block of a key, held or free; None where there is none."""
        return self._block_of_key.get(key)

    # ----------------------------------------------------------------------------------------------------------- runs

    def reserve(self, count: int) -> int | None:
        """Reserves `count` blocks in a row that are free, not reserved, and not used of late.

        Returns:
            The first of them, or None where no such run was met nearby.
        """
        start = at = self._cursor
        for _ in range(_LOOKS * count + _LOOKS_AT_LEAST):
            if at >= self.count:
                start = at = 0
            if not self._may_be_reserved(at):
                start = at + 1
            at += 1
            if at - start == count:
                self._cursor = at
                for block in range(start, at):
                    self._is_reserved[block] = 1
                    self._reserved[block] = self._free.pop(block)
                return start
        return None

    def unreserve(self, reserved: Iterable[int]) -> None:
        """Gives reserved blocks back; those that are held stay held."""
        for block in reserved:
            self._is_reserved[block] = 0
            if self._ref_counts[block] == 0:
                del self._reserved[block]
                # They were to be taken first when they were reserved, and nothing has used them since.
                self._free[block] = None
                self._free.move_to_end(block, last=False)

    def _may_be_reserved(self, block: int) -> bool:
        if self._ref_counts[block] or self._is_reserved[block]:
            return False
        return block not in self._key_of_block or self._clock - self._released_at[block] >= len(self._free) // 2

    def _free_list(self, block: int) -> OrderedDict[int, None]:
        return self._reserved if self._is_reserved[block] else self._free

    def _put(self, block: int) -> None:
        free_list = self._free_list(block)
        free_list[block] = None
        if block not in self._key_of_block:
            free_list.move_to_end(block, last=False)

    # ------------------------------------------------------------------------------------------------------ integrity

    def check_integrity(self, tables: Iterable[Iterable[int]]) -> None:
        """Checks the books against those who hold blocks, each with the blocks it holds.

        Raises:
            PoolCorrupted: a block is lost, is owned by more or fewer than hold it, or is known under two names.
        """
        held = [0] * self.count
        for table in tables:
            for block in table:
                held[block] += 1
        for block in range(self.count):
            if held[block] != self._ref_counts[block]:
                raise PoolCorrupted(
                    f"block {block} counts {self._ref_counts[block]} holders, and {held[block]} hold it"
                )
            free_lists = (block in self._free) + (block in self._reserved)
            if free_lists != (held[block] == 0) or (free_lists and block not in self._free_list(block)):
                raise PoolCorrupted(f"block {block} has {held[block]} holders and lies on {free_lists} free lists")
        if len(self._free) + len(self._reserved) > self.count:
            raise PoolCorrupted("a block that does not exist can be taken")
        if {key: block for block, key in self._key_of_block.items()} != self._block_of_key:
            raise PoolCorrupted("a block is known by a key that does not lead to it")


# --------------------------------------------------------------------------------------------------------------- memory


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

    def gather(self, block_table: Sequence[int], end: int) -> list[Tensor]:
        """A copy of the first `end` positions of the blocks of a block table, shaped like `narrow`."""
        index = torch.tensor(block_table, device=self._device)
        gathered = []
        for store in self._stores:
            layers, two, kv_heads, _, head_dim = store.shape
            blocks = store.view(layers * two * kv_heads, self._shape.blocks, self._shape.block_tokens * head_dim)
            together = blocks.index_select(1, index).view(layers, two, kv_heads, -1, head_dim)
            gathered.append(together.narrow(3, 0, end))
        return gathered

    def scatter(self, gathered: Sequence[Tensor], block_table: Sequence[int], start: int, end: int) -> None:
        """Writes positions of what was gathered to where they belong."""
        at, size = start, self._shape.block_tokens
        while at < end:
            index, offset = divmod(at, size)
            count = min(size - offset, end - at)
            for store, each in zip(self._stores, gathered, strict=True):
                store.narrow(3, block_table[index] * size + offset, count).copy_(each.narrow(3, at, count))
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
    """Block after block, each with all heads of its positions: a block table says where to read.

    Attributes:
        keys: of each layer, `[blocks + 1, block_tokens, kv_heads, head_dim]`. The last block is the null block: padding
            writes there.
        values: like `keys`.
        null_position: the first position of the null block, counted over all blocks.
        on_copy: who is told of each copy of blocks, if anybody: whoever holds other heads of the same positions.
    """

    def __init__(self, shape: MemoryShape, dtype: torch.dtype, device: torch.device) -> None:
        self._device = device
        self.null_position = shape.blocks * shape.block_tokens
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
