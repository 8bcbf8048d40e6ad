"""The blocks of a KV pool: reference counts, free lists, and the memory.

A block is free, or held by one or several sequences. A free block may stay cached under the key of its content until a
sequence takes it. Free blocks without a key are taken first, then the least recently used.

Runs of consecutive blocks are reserved for a sequence, so that it stays contiguous in memory as it grows. When nothing
else is free, other sequences take reserved blocks.

Every method of `BlockPool` takes time proportional to the blocks it is given, except `check_integrity`.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# How many blocks the search for a run inspects: this many times its length, and a minimum.
_LOOKS = 4
_LOOKS_AT_LEAST = 64


class PoolExhausted(Exception):
    """A KV pool has too few free blocks."""


class PoolCorrupted(RuntimeError):
    """The records of a KV pool are inconsistent: a bug, not an overload."""


class BlockPool:
    """`count` blocks, numbered from 0. One thread owns the pool; `find` may be called from any thread."""

    def __init__(self, count: int) -> None:
        if count < 1:
            raise ValueError(f"count is {count}; it must be at least 1")
        self.count = count
        self._ref_counts = [0] * count
        # Free blocks in the order in which they are taken: not reserved, and reserved.
        self._free = OrderedDict.fromkeys(range(count))
        self._reserved: OrderedDict[int, None] = OrderedDict()
        self._is_reserved = bytearray(count)
        self._key_of_block: dict[int, bytes] = {}
        self._block_of_key: dict[bytes, int] = {}
        self._cursor = 0  # where the next search for a run begins
        self._clock = 0  # the number of releases of blocks with a key
        self._released_at = [0] * count  # the clock at the last release of each block

    @property
    def num_free(self) -> int:
        return len(self._free) + len(self._reserved)

    def ref_count(self, block: int) -> int:
        return self._ref_counts[block]

    # -------------------------------------------------------------------------------------------------------- holding

    def take(self, wanted: int | None = None) -> int:
        """Takes a free block: `wanted` if it is free, else the next one. Its key is removed.

        Raises:
            PoolExhausted: no block is free.
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
        """Adds a holder to a block; its content and key stay."""
        if self._ref_counts[block] == 0:
            del self._free_list(block)[block]
        self._ref_counts[block] += 1

    def release(self, block: int) -> None:
        """Removes a holder from a block.

        Raises:
            ValueError: the block has no holder.
        """
        if self._ref_counts[block] < 1:
            raise ValueError(f"block {block} has no holder to release")
        self._ref_counts[block] -= 1
        if self._ref_counts[block] == 0:
            if block in self._key_of_block:
                self._clock += 1
                self._released_at[block] = self._clock
            self._put(block)

    # ------------------------------------------------------------------------------------------------------- contents

    def cache(self, block: int, key: bytes) -> None:
        """Caches a block under `key`, unless another block has that key."""
        if key not in self._block_of_key:
            self.forget(block)
            self._block_of_key[key] = block
            self._key_of_block[block] = key

    def forget(self, block: int) -> None:
        key = self._key_of_block.pop(block, None)
        if key is not None:
            del self._block_of_key[key]

    def find(self, key: bytes) -> int | None:
        """The block of a key, held or free, or None."""
        return self._block_of_key.get(key)

    # ----------------------------------------------------------------------------------------------------------- runs

    def reserve(self, count: int) -> int | None:
        """Reserves `count` consecutive blocks that are free, not reserved, and not released recently.

        Returns:
            The first block, or None if the search found no such run.
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
        """Ends the reservation of blocks; held blocks stay held."""
        for block in reserved:
            self._is_reserved[block] = 0
            if self._ref_counts[block] == 0:
                del self._reserved[block]
                # They were first in the free list when they were reserved, and are unused since.
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

    def check_integrity(self, block_tables: Iterable[Iterable[int]]) -> None:
        """Checks reference counts and free lists against the block tables of all sequences.

        Raises:
            PoolCorrupted: a block is lost, has a wrong reference count, or has two keys.
        """
        held = [0] * self.count
        for table in block_tables:
            for block in table:
                held[block] += 1
        for block in range(self.count):
            if held[block] != self._ref_counts[block]:
                raise PoolCorrupted(
                    f"block {block} has reference count {self._ref_counts[block]} and {held[block]} holders"
                )
            free_lists = (block in self._free) + (block in self._reserved)
            if free_lists != (held[block] == 0) or (free_lists and block not in self._free_list(block)):
                raise PoolCorrupted(f"block {block} has {held[block]} holders and is on {free_lists} free lists")
        if len(self._free) + len(self._reserved) > self.count:
            raise PoolCorrupted("a free list has a block that does not exist")
        if {key: block for block, key in self._key_of_block.items()} != self._block_of_key:
            raise PoolCorrupted("the key of a block leads to another block")


# --------------------------------------------------------------------------------------------------------------- memory


@dataclass(frozen=True, slots=True)
class MemoryShape:
    """The size of a KV pool.

    Attributes:
        kv_heads: heads of keys, and of values, per layer.
        head_dim: the size of a head, per layer.
        blocks: the number of blocks.
        block_tokens: positions of a block.
    """

    kv_heads: tuple[int, ...]
    head_dim: tuple[int, ...]
    blocks: int
    block_tokens: int

    def alike(self) -> list[list[int]]:
        """Layers grouped by shape. A group shares one tensor, so that one call makes all its views."""
        shapes = list(zip(self.kv_heads, self.head_dim, strict=True))
        return [[i for i, own in enumerate(shapes) if own == shape] for shape in dict.fromkeys(shapes)]


class MemoryByHead:
    """Memory with all positions of a head contiguous, block after block.

    Attributes:
        stores: `[layers, 2, kv_heads, positions, head_dim]`, keys and values of all blocks, one per shape of layer.
        layers: `[2, kv_heads, positions, head_dim]` of each layer, views of `stores`.
    """

    def __init__(self, shape: MemoryShape, dtype: torch.dtype, device: torch.device) -> None:
        self._shape = shape
        self.stores: list[Tensor] = []
        self.layers: list[Tensor] = [torch.empty(0)] * len(shape.kv_heads)
        for members in shape.alike():
            heads, size = shape.kv_heads[members[0]], shape.head_dim[members[0]]
            positions = shape.blocks * shape.block_tokens
            store = torch.empty((len(members), 2, heads, positions, size), dtype=dtype, device=device)
            self.stores.append(store)
            for layer, own in zip(members, store.unbind(0), strict=True):
                self.layers[layer] = own

    @property
    def bytes(self) -> int:
        """Bytes reserved. A CPU commits only those of written positions."""
        return _bytes(self.stores)

    def copy(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copies each block of `source` to that of `target` at the same index; consecutive ones at once."""
        at, size = 0, self._shape.block_tokens
        while at < len(source):
            end = at + 1
            while end < len(source) and source[end] == source[end - 1] + 1 and target[end] == target[end - 1] + 1:
                end += 1
            count = (end - at) * size
            for store in self.stores:
                store.narrow(3, target[at] * size, count).copy_(store.narrow(3, source[at] * size, count))
            at = end


class PagedMemory:
    """Memory for block tables: block after block, each with all heads of its positions.

    Attributes:
        keys: of each layer, `[blocks + 1, block_tokens, kv_heads, head_dim]`. The last block is the null block: padding
            rows write there.
        values: like `keys`.
        block_tokens: positions of a block.
        null_position: the first position of the null block, counted over all blocks.
        on_copy: called before each copy of blocks, for tensor-parallel ranks with other heads; or None.
    """

    def __init__(self, shape: MemoryShape, dtype: torch.dtype, device: torch.device) -> None:
        self._device = device
        self.block_tokens = shape.block_tokens
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
            # Attention multiplies masked values by 0, and 0 times NaN is NaN.
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
