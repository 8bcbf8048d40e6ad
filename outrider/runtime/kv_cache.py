"""The KV cache of many sequences: who has which positions, and prefixes that sequences share.

A slot is one sequence: a block table, and how many positions are held. Blocks are taken as a sequence grows, given back
as it is rolled back, shared by sequences that begin alike, and copied before they are written where they are shared.
Paged attention on a GPU reads a sequence by its block table. Attention on a CPU wants it in one piece of memory: where
its blocks follow one another (nearly always, see `outrider.runtime.block_pool`) it gets views, elsewhere the blocks are
gathered for the pass, and what was written goes back.

One thread owns a pool; no method locks, and `PrefixCache.find` alone may be called from any thread.
"""

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import torch
from torch import Tensor

from outrider.runtime.block_pool import (
    BlockPool,
    KVMemory,
    MemoryByHead,
    MemoryShape,
    PagedMemory,
    PoolCorrupted,
    PoolExhausted,
    SlotViews,
)

BLOCK_TOKENS = 32
"""Positions of a block."""


@dataclass(slots=True)
class _Slot:
    """A sequence: its blocks in order, of which the first `contiguous` follow one another in memory."""

    expected: int
    block_table: list[int] = field(default_factory=list)
    length: int = 0
    contiguous: int = 0
    reserved: range = field(default_factory=lambda: range(0))
    gathered: list[Tensor] = field(default_factory=list)  # for the pass under way, one for each store

    def append(self, block: int) -> None:
        if self.contiguous == len(self.block_table) and (not self.block_table or block == self.block_table[-1] + 1):
            self.contiguous += 1
        self.block_table.append(block)

    def replace(self, index: int, block: int) -> None:
        """Puts another block at an index of the block table."""
        rest = self.block_table[index + 1 :]
        del self.block_table[index:]
        self.contiguous = min(self.contiguous, index)
        for each in (block, *rest):
            self.append(each)


class KVPool:
    """Blocks of keys and values, reserved at once, and the sequences that hold them.

    On a CPU the memory is only reserved here, and taken as positions are written.

    Args:
        layers: how many layers hold keys and values.
        kv_heads: heads per layer; a sequence where layers differ.
        head_dim: size of a head; a sequence where layers differ.
        blocks: how many there are.
        max_length: positions of a sequence at most.
        dtype: of the stored keys and values.
        device: where they lie.
        block_tokens: positions of a block.
        paged: whether attention reads by block tables; else it reads `views`.

    Attributes:
        paged: the memory, where attention reads by block tables.
    """

    def __init__(
        self,
        layers: int,
        kv_heads: int | Sequence[int],
        head_dim: int | Sequence[int],
        *,
        blocks: int,
        max_length: int,
        dtype: torch.dtype,
        device: torch.device | str,
        block_tokens: int = BLOCK_TOKENS,
        paged: bool = False,
    ) -> None:
        sizes = {"layers": layers, "blocks": blocks, "max_length": max_length, "block_tokens": block_tokens}
        for name, value in sizes.items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        self.layers = layers
        self.max_length = max_length
        self.block_tokens = block_tokens
        self.dtype = dtype
        self.device = torch.device(device)
        shape = MemoryShape(
            _per_layer("kv_heads", kv_heads, layers), _per_layer("head_dim", head_dim, layers), blocks, block_tokens
        )
        self.paged = PagedMemory(shape, dtype, self.device) if paged else None
        self._by_head = None if paged else MemoryByHead(shape, dtype, self.device)
        self.blocks = BlockPool(blocks)
        self._slots: dict[int, _Slot] = {}
        self._next_slot = 0

    def reset(self) -> None:
        """Forgets every sequence and all that is known: for books that no longer agree."""
        self.blocks = BlockPool(self.blocks.count)
        self._slots = {}

    # ---------------------------------------------------------------------------------------------------------- slots

    def allocate(self, expected: int = 0) -> int:
        """A new sequence, empty. Blocks in a row are reserved for the `expected` positions."""
        slot = self._next_slot
        self._next_slot += 1
        self._slots[slot] = _Slot(min(expected, self.max_length))
        return slot

    def fork(self, slot: int) -> int:
        """A new sequence that holds what `slot` does: the same blocks, until either writes.

        Raises:
            ValueError: there is no such slot.
        """
        held = self._of(slot)
        fork = self.allocate(held.expected)
        self.share(fork, held.block_table[: self._blocks_for(held.length)], held.length)
        return fork

    def free(self, slot: int) -> None:
        """Ends a sequence, and gives its blocks back.

        Raises:
            ValueError: there is no such slot.
        """
        self.rollback(slot, 0)
        del self._slots[slot]

    # -------------------------------------------------------------------------------------------------------- lengths

    def length(self, slot: int) -> int:
        """How many positions of a slot are held.

        Raises:
            ValueError: there is no such slot.
        """
        return self._of(slot).length

    @property
    def holders(self) -> int:
        """How many slots have blocks."""
        return sum(1 for held in self._slots.values() if held.block_table)

    def is_empty(self, slot: int) -> bool:
        """Whether a slot has no blocks."""
        return not self._of(slot).block_table

    def blocks_needed(self, slot: int, length: int) -> int:
        """How many blocks `grow` would take."""
        held = self._of(slot)
        lacking = max(0, self._blocks_for(length) - len(held.block_table))
        inside, offset = divmod(held.length, self.block_tokens)
        shared = offset and length > held.length and self.blocks.ref_count(held.block_table[inside]) > 1
        return lacking + bool(shared)

    def grow(self, slot: int, length: int) -> None:
        """Takes the blocks that positions up to `length` need, and copies a shared one that is to be written.

        Raises:
            PoolExhausted: there are not as many free blocks; the slot is as it was.
            ValueError: there is no such slot, or a sequence is never that long.
        """
        held = self._of(slot)
        if length > self.max_length:
            raise ValueError(f"slot {slot} cannot grow to {length} positions: a sequence has {self.max_length} at most")
        if length <= held.length:
            return
        lacking = self.blocks_needed(slot, length)
        if lacking > self.blocks.num_free:
            raise PoolExhausted(
                f"slot {slot} needs {lacking} more blocks for {length} positions; {self.blocks.num_free} of "
                f"{self.blocks.count} are free"
            )
        if not held.block_table and lacking:
            self._reserve(held, self._blocks_for(max(held.expected, length)))
        if held.block_table:
            self._own(held)
        while len(held.block_table) < self._blocks_for(length):
            held.append(self._take(held, len(held.block_table)))

    def extend(self, slot: int, length: int) -> None:
        """Says that positions up to `length` have been written.

        Raises:
            ValueError: there is no such slot, it is already longer, or has too few blocks.
        """
        held = self._of(slot)
        most = min(len(held.block_table) * self.block_tokens, self.max_length)
        if not held.length <= length <= most:
            raise ValueError(
                f"slot {slot} holds {held.length} positions in blocks for {most}: it cannot be extended to {length}"
            )
        if held.gathered and self._by_head is not None:
            self._by_head.scatter(held.gathered, held.block_table, held.length, length)
            held.gathered = []
        held.length = length

    def rollback(self, slot: int, length: int) -> None:
        """Forgets the positions from `length` on, and gives back the blocks that held nothing else.

        Raises:
            ValueError: there is no such slot, or it holds fewer.
        """
        held = self._of(slot)
        if not 0 <= length <= held.length:
            raise ValueError(f"slot {slot} holds {held.length} positions: it cannot be rolled back to {length}")
        held.length = length
        held.gathered = []
        kept = self._blocks_for(length)
        if not kept and held.reserved:  # before its blocks are released, so that they line up by age
            self.blocks.unreserve(held.reserved)
            held.reserved = range(0)
        while len(held.block_table) > kept:  # the last first: a beginning is worth more than what follows it
            self.blocks.release(held.block_table.pop())
        held.contiguous = min(held.contiguous, kept)

    # -------------------------------------------------------------------------------------------------------- sharing

    def block_table(self, slot: int) -> tuple[int, ...]:
        """The blocks of a slot, in order.

        Raises:
            ValueError: there is no such slot.
        """
        return tuple(self._of(slot).block_table)

    def share(self, slot: int, blocks: Sequence[int], length: int) -> None:
        """Lets an empty slot hold the first `length` positions of these blocks, whoever holds them besides.

        Raises:
            ValueError: the slot is not empty, or the blocks are not as many as `length` takes.
        """
        held = self._of(slot)
        if held.block_table:
            raise ValueError(f"slot {slot} holds {held.length} positions; only an empty one shares blocks")
        if len(blocks) != self._blocks_for(length):
            raise ValueError(f"{length} positions lie in {self._blocks_for(length)} blocks, not {len(blocks)}")
        for block in blocks:
            self.blocks.hold(block)
            held.append(block)
        held.length = length

    # ---------------------------------------------------------------------------------------------------------- memory

    def stores(self, slot: int, end: int) -> list[Tensor]:
        """Positions 0 to `end` of a slot, to attend to, and to write behind those held; `extend` ends what this begins.

        Returns:
            See `MemoryByHead.narrow`.

        Raises:
            PoolExhausted: see `grow`.
            ValueError: see `grow`; or the pool is paged.
        """
        if self._by_head is None:
            raise ValueError("a paged pool has no views: its sequences are read by their block tables")
        held = self._of(slot)
        held.gathered = []  # of a pass that broke
        self.grow(slot, end)
        if held.contiguous < self._blocks_for(end):
            self._make_contiguous(held)
        if held.contiguous >= self._blocks_for(end):
            return self._by_head.narrow(held.block_table[0] if held.block_table else 0, end)
        held.gathered = self._by_head.gather(held.block_table[: self._blocks_for(end)], end)
        return held.gathered

    def split(self, stores: Sequence[Tensor], start: int, end: int) -> SlotViews:
        """What `stores` gave, layer by layer; `start` to `end` is to be written.

        Raises:
            ValueError: the pool is paged.
        """
        if self._by_head is None:
            raise ValueError("a paged pool has no views: its sequences are read by their block tables")
        return self._by_head.views(stores, start, end)

    def views(self, slot: int, start: int, end: int) -> SlotViews:
        """`stores` and `split` in one; `start` is what the slot holds, or less where nothing is to be written."""
        return self.split(self.stores(slot, end), start, end)

    @property
    def memory_bytes(self) -> int:
        """Bytes reserved; on a CPU those of positions never written are not taken."""
        return self._memory.bytes

    @property
    def used_blocks(self) -> int:
        """Blocks that sequences hold."""
        return self.blocks.count - self.blocks.num_free

    def check_integrity(self) -> None:
        """Checks that the books agree: no block is lost, none owned twice, and every sequence has what it claims.

        Raises:
            PoolCorrupted: they do not.
        """
        self.blocks.check_integrity(held.block_table for held in self._slots.values())
        for slot, held in self._slots.items():
            if len(set(held.block_table)) < len(held.block_table):
                raise PoolCorrupted(f"slot {slot} holds a block twice: {held.block_table}")
            if not 0 <= held.length <= min(len(held.block_table) * self.block_tokens, self.max_length):
                raise PoolCorrupted(f"slot {slot} claims {held.length} positions in {len(held.block_table)} blocks")
            if any(block != held.block_table[0] + i for i, block in enumerate(held.block_table[: held.contiguous])):
                raise PoolCorrupted(f"slot {slot} claims to be contiguous, and is not: {held.block_table}")

    @property
    def _memory(self) -> KVMemory:
        memory = self._by_head or self.paged
        assert memory is not None
        return memory

    # --------------------------------------------------------------------------------------------------- one sequence

    def _of(self, slot: int) -> _Slot:
        held = self._slots.get(slot)
        if held is None:
            raise ValueError(f"slot {slot} is not taken (the pool has {len(self._slots)} sequences)")
        return held

    def _blocks_for(self, length: int) -> int:
        return -(-length // self.block_tokens)

    def _take(self, held: _Slot, index: int) -> int:
        """A block for an index of the block table: the one that was reserved for it, while there is a choice."""
        return self.blocks.take(held.reserved[index] if index < len(held.reserved) else None)

    def _reserve(self, held: _Slot, count: int) -> bool:
        start = self.blocks.reserve(count)
        if start is not None:
            self.blocks.unreserve(held.reserved)
            held.reserved = range(start, start + count)
        return start is not None

    def _own(self, held: _Slot) -> None:
        """Makes the block that the next position lies in the slot's own, known to nobody."""
        index, offset = divmod(held.length, self.block_tokens)
        if not offset:
            return
        block = held.block_table[index]
        if self.blocks.ref_count(block) == 1:
            self.blocks.forget(block)
            return
        copy = self._take(held, index)
        self._memory.copy([block], [copy])
        self.blocks.release(block)
        held.replace(index, copy)

    def _make_contiguous(self, held: _Slot) -> None:
        """Moves a sequence whose blocks lie apart into a run of its own, where enough blocks are free.

        It costs as much as one pass that gathers, and spares all that follow.
        """
        count = self._blocks_for(max(held.expected, len(held.block_table) * self.block_tokens))
        if self.blocks.num_free < 2 * count or not self._reserve(held, count):
            return
        old, held.block_table, held.contiguous = held.block_table, [], 0
        for index in range(len(old)):
            held.append(self._take(held, index))
        self._memory.copy(old, held.block_table)
        for block in reversed(old):
            self.blocks.release(block)


def _per_layer(name: str, value: int | Sequence[int], layers: int) -> tuple[int, ...]:
    values = (value,) * layers if isinstance(value, int) else tuple(value)
    if len(values) != layers:
        raise ValueError(f"{name} names {len(values)} layers of {layers}")
    if min(values) < 1:
        raise ValueError(f"{name} must be at least 1, not {min(values)}")
    return values


def grow_with_preemption(
    pool: KVPool, slot: int, length: int, victims: Iterable[int] = (), *, spare: int = 0
) -> list[int] | None:
    """Grows a slot to `length` positions; where the pool is full, `victims` are preempted, in order, as far as need be.

    `spare` blocks are to be left over.

    Returns:
        The slots that were preempted; None where all of them would not have sufficed, and nothing was changed.
    """
    lacking = pool.blocks_needed(slot, length) + spare - pool.blocks.num_free
    chosen: list[int] = []
    if lacking > 0:
        given: Counter[int] = Counter()
        for victim in victims:
            chosen.append(victim)
            for block in pool.block_table(victim):
                given[block] += 1
                lacking -= given[block] == pool.blocks.ref_count(block)  # the last holder's release frees it
            if lacking <= 0:
                break
        else:
            return None
        for victim in chosen:
            pool.rollback(victim, 0)
    pool.grow(slot, length)
    return chosen


# ------------------------------------------------------------------------------------------------------------- prefixes


_DIGEST_BYTES = 32  # nobody finds two texts of one key


class PrefixCache:
    """The known blocks of a pool. `find` may be called from any thread, all else from the pool's.

    Args:
        pool: whose blocks are shared.
        enabled: whether anything is remembered.
    """

    def __init__(self, pool: KVPool, *, enabled: bool = True) -> None:
        self._pool = pool
        self._enabled = enabled

    def find(self, tokens: Sequence[int], salt: str = "") -> int:
        """How many of `tokens` are known now, from the first on; never the last of them: that one has to be run."""
        return len(self._known(tokens, salt)) * self._pool.block_tokens

    def adopt(self, slot: int, tokens: Sequence[int], salt: str = "") -> int:
        """Let an empty slot hold the longest known prefix of `tokens` without the last; returns its length.

        Raises:
            ValueError: the slot is not empty.
        """
        known = self._known(tokens, salt)
        length = len(known) * self._pool.block_tokens
        self._pool.share(slot, known, length)
        return length

    def keep(self, slot: int, tokens: Sequence[int], salt: str = "") -> None:
        """Remember the full blocks of what a slot holds; `tokens` are those of its positions, or more."""
        if self._enabled:
            table = self._pool.block_table(slot)
            for block, key in zip(table, self._keys(tokens, self._pool.length(slot), salt), strict=False):
                self._pool.blocks.cache(block, key)

    def _known(self, tokens: Sequence[int], salt: str) -> list[int]:
        found: list[int] = []
        if self._enabled:
            for key in self._keys(tokens, len(tokens) - 1, salt):
                block = self._pool.blocks.find(key)
                if block is None:
                    break
                found.append(block)
        return found

    def _keys(self, tokens: Sequence[int], end: int, salt: str) -> Iterator[bytes]:
        """Yield the key of each full block of the first `end` tokens."""
        count = self._pool.block_tokens
        key = blake2b(salt.encode(), person=b"salt", digest_size=_DIGEST_BYTES).digest()
        for at in range(0, min(end, len(tokens)) - count + 1, count):
            key = blake2b(array("I", tokens[at : at + count]).tobytes(), key=key, digest_size=_DIGEST_BYTES).digest()
            yield key
