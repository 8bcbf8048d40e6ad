"""The KV cache of many sequences: block tables and lengths.

A slot is one sequence: a block table and a length. A sequence takes blocks as it grows, and releases them when it is
rolled back. Sequences with a common prefix share blocks; a shared block is copied before a write. Attention reads a
sequence by its block table. On a CPU, torch's attention reads consecutive blocks in place (nearly all are, see
`outrider.runtime.block_pool`) and gathers the others.

A sequence of an encoder–decoder model has a second slot: that of its encoder, with the keys and values of
cross-attention. The encoder's slot is freed when the sequence is freed or rolled back to nothing.

One thread owns a pool, and no method locks.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from outrider.runtime.block_pool import BlockPool, MemoryByHead, MemoryShape, PagedMemory, PoolCorrupted, PoolExhausted

BLOCK_TOKENS = 32
"""Positions of a block."""


@dataclass(slots=True)
class _Slot:
    """A sequence. The first `contiguous` entries of its block table are consecutive blocks."""

    expected: int
    block_table: list[int] = field(default_factory=list)
    length: int = 0
    contiguous: int = 0
    reserved: range = field(default_factory=lambda: range(0))
    encoder: int | None = None

    def append(self, block: int) -> None:
        if self.contiguous == len(self.block_table) and (not self.block_table or block == self.block_table[-1] + 1):
            self.contiguous += 1
        self.block_table.append(block)

    def replace(self, index: int, block: int) -> None:
        """Replaces the block at an index of the block table."""
        rest = self.block_table[index + 1 :]
        del self.block_table[index:]
        self.contiguous = min(self.contiguous, index)
        for each in (block, *rest):
            self.append(each)


class KVPool:
    """Blocks of keys and values, and the sequences that hold them.

    All memory is reserved at once; a CPU commits it when positions are written. Methods raise `ValueError` for a slot
    that does not exist.

    Args:
        kv_heads: heads per layer; a list if layers differ.
        head_dim: size of a head; a list if layers differ.
        max_length: the longest sequence, in positions.
        paged: whether the memory is for paged attention.

    Attributes:
        paged: the memory of a paged pool, or None.
        by_head: the memory of a pool that is not paged, or None.
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
                raise ValueError(f"{name} is {value}; it must be at least 1")
        self.layers = layers
        self.max_length = max_length
        self.block_tokens = block_tokens
        self.dtype = dtype
        self.device = torch.device(device)
        shape = MemoryShape(
            _per_layer("kv_heads", kv_heads, layers), _per_layer("head_dim", head_dim, layers), blocks, block_tokens
        )
        memory = PagedMemory(shape, dtype, self.device) if paged else MemoryByHead(shape, dtype, self.device)
        self._memory = memory
        self.paged = memory if isinstance(memory, PagedMemory) else None
        self.by_head = memory if isinstance(memory, MemoryByHead) else None
        self.blocks = BlockPool(blocks)
        self._slots: dict[int, _Slot] = {}
        self._next_slot = 0

    def reset(self) -> None:
        """Drops all sequences and cached prefixes, after `PoolCorrupted`."""
        self.blocks = BlockPool(self.blocks.count)
        self._slots = {}

    # ---------------------------------------------------------------------------------------------------------- slots

    def allocate(self, expected: int = 0) -> int:
        """Return the slot of a new, empty sequence; consecutive blocks are reserved for `expected` positions."""
        slot = self._next_slot
        self._next_slot += 1
        self._slots[slot] = _Slot(min(expected, self.max_length))
        return slot

    def fork(self, slot: int) -> int:
        """Return the slot of a new sequence with the same positions as `slot`. They share blocks until one writes."""
        held = self._of(slot)
        fork = self.allocate(held.expected)
        self.share(fork, held.block_table[: self.blocks_for(held.length)], held.length)
        if held.encoder is not None:
            self._of(fork).encoder = self.fork(held.encoder)
        return fork

    def free(self, slot: int) -> None:
        """Ends a sequence and releases its blocks."""
        self.rollback(slot, 0)
        del self._slots[slot]

    def add_encoder(self, slot: int, length: int) -> int:
        """Takes blocks for `length` positions of a sequence's encoder. Returns the encoder's slot, which is empty.

        Raises:
            PoolExhausted: there are too few free blocks; nothing is changed.
            ValueError: the slot has an encoder already, or `length` is above `max_length`.
        """
        held = self._of(slot)
        if held.encoder is not None:
            raise ValueError(f"slot {slot} has an encoder already")
        encoder = self.allocate(length)
        try:
            self.grow(encoder, length)
        except (PoolExhausted, ValueError):
            self.free(encoder)
            raise
        held.encoder = encoder
        return encoder

    def encoder_slot(self, slot: int) -> int | None:
        """The slot of a sequence's encoder; None without one."""
        return self._of(slot).encoder

    def lacks_encoder(self, slot: int) -> bool:
        """Whether the encoder of a sequence that has one has not run."""
        encoder = self._of(slot).encoder
        return encoder is None or not self.length(encoder)

    # -------------------------------------------------------------------------------------------------------- lengths

    def length(self, slot: int) -> int:
        """The number of positions that a slot holds."""
        return self._of(slot).length

    @property
    def holders(self) -> int:
        """The number of slots with blocks, those of encoders left out."""
        encoders = {held.encoder for held in self._slots.values()}
        return sum(1 for slot, held in self._slots.items() if held.block_table and slot not in encoders)

    def is_empty(self, slot: int) -> bool:
        """Whether a slot has no blocks."""
        return not self._of(slot).block_table

    def blocks_for(self, length: int) -> int:
        return -(-length // self.block_tokens)

    def blocks_needed(self, slot: int, length: int) -> int:
        """The number of free blocks that `grow` would take."""
        held, size = self._of(slot), self.block_tokens
        lacking = max(0, -(-length // size) - len(held.block_table))
        if held.length < length and held.length % size:
            lacking += self.blocks.ref_count(held.block_table[held.length // size]) > 1  # it is copied
        return lacking

    def grow(self, slot: int, length: int) -> None:
        """Takes blocks for positions up to `length`, and copies a shared block before it is written.

        Raises:
            PoolExhausted: there are too few free blocks; the slot is unchanged.
            ValueError: `length` is above `max_length`.
        """
        held = self._of(slot)
        if length > self.max_length:
            raise ValueError(f"slot {slot} cannot grow to {length} positions; max_length is {self.max_length}")
        if length <= held.length:
            return
        lacking = self.blocks_needed(slot, length)
        if lacking > self.blocks.num_free:
            raise PoolExhausted(
                f"slot {slot} needs {lacking} more blocks for {length} positions; {self.blocks.num_free} of "
                f"{self.blocks.count} are free"
            )
        if not held.block_table and lacking:
            self._reserve(held, self.blocks_for(max(held.expected, length)))
        if held.block_table:
            self._copy_on_write(held)
        while len(held.block_table) < self.blocks_for(length):
            held.append(self._take(held, len(held.block_table)))

    def extend(self, slot: int, length: int) -> None:
        """Sets the length of a slot, after positions up to `length` were written.

        Raises:
            ValueError: the slot is already longer, or it has too few blocks.
        """
        held = self._of(slot)
        most = min(len(held.block_table) * self.block_tokens, self.max_length)
        if not held.length <= length <= most:
            raise ValueError(
                f"slot {slot} holds {held.length} positions in blocks for {most}; it cannot be extended to {length}"
            )
        held.length = length

    def rollback(self, slot: int, length: int) -> None:
        """Shortens a slot to `length` positions, and releases the blocks it no longer needs; at 0 its encoder's, too.

        Raises:
            ValueError: the slot is shorter.
        """
        held = self._of(slot)
        if not 0 <= length <= held.length:
            raise ValueError(f"slot {slot} holds {held.length} positions; it cannot be rolled back to {length}")
        held.length = length
        if not length and held.encoder is not None:
            encoder, held.encoder = held.encoder, None
            self.free(encoder)
        kept = self.blocks_for(length)
        if not kept and held.reserved:  # before its blocks are released, so that the free list stays ordered by age
            self.blocks.unreserve(held.reserved)
            held.reserved = range(0)
        while len(held.block_table) > kept:  # the last first: the beginning of a prefix is reused more often
            self.blocks.release(held.block_table.pop())
        held.contiguous = min(held.contiguous, kept)

    # -------------------------------------------------------------------------------------------------------- sharing

    def block_table(self, slot: int) -> tuple[int, ...]:
        """The blocks of a slot, in order."""
        return tuple(self._of(slot).block_table)

    def share(self, slot: int, blocks: Sequence[int], length: int) -> None:
        """Lets an empty slot hold the first `length` positions of these blocks, shared with other slots.

        Raises:
            ValueError: the slot is not empty, or the number of blocks does not fit `length`.
        """
        held = self._of(slot)
        if held.block_table:
            raise ValueError(f"slot {slot} holds {held.length} positions; only an empty one shares blocks")
        if len(blocks) != self.blocks_for(length):
            raise ValueError(f"{length} positions need {self.blocks_for(length)} blocks; {len(blocks)} were given")
        for block in blocks:
            self.blocks.hold(block)
            held.append(block)
        held.length = length

    # ---------------------------------------------------------------------------------------------------------- memory

    def grow_contiguous(self, slot: int, end: int) -> None:
        """As `grow`; and copies the sequence into consecutive blocks if it can."""
        self.grow(slot, end)
        held = self._of(slot)
        if held.contiguous < self.blocks_for(end):
            self._make_contiguous(held)

    def blocks_to(self, slot: int, end: int) -> tuple[list[int], bool]:
        """The blocks of positions 0 to `end` of a slot, and whether they are consecutive."""
        held, count = self._of(slot), self.blocks_for(end)
        return held.block_table[:count], held.contiguous >= count

    def slot_mapping(self, slot: int, start: int, end: int) -> list[int]:
        """Where positions `start` to `end` of a slot are in memory: block · block_tokens + offset."""
        table, size = self._of(slot).block_table, self.block_tokens
        found = list[int]()
        while start < end:
            index, offset = divmod(start, size)
            count = min(size - offset, end - start)
            found += range(table[index] * size + offset, table[index] * size + offset + count)
            start += count
        return found

    @property
    def memory_bytes(self) -> int:
        """Bytes reserved. A CPU commits only those of written positions."""
        return self._memory.bytes

    @property
    def used_blocks(self) -> int:
        return self.blocks.count - self.blocks.num_free

    def check_integrity(self) -> None:
        """Checks that no block is lost or held twice, and that block tables and lengths agree.

        Raises:
            PoolCorrupted: a check fails.
        """
        self.blocks.check_integrity(held.block_table for held in self._slots.values())
        for slot, held in self._slots.items():
            if len(set(held.block_table)) < len(held.block_table):
                raise PoolCorrupted(f"slot {slot} holds a block twice: {held.block_table}")
            if not 0 <= held.length <= min(len(held.block_table) * self.block_tokens, self.max_length):
                raise PoolCorrupted(f"slot {slot} has length {held.length} and {len(held.block_table)} blocks")
            if any(block != held.block_table[0] + i for i, block in enumerate(held.block_table[: held.contiguous])):
                raise PoolCorrupted(f"slot {slot} is not contiguous: {held.block_table}")

    # --------------------------------------------------------------------------------------------------- one sequence

    def _of(self, slot: int) -> _Slot:
        held = self._slots.get(slot)
        if held is None:
            raise ValueError(f"slot {slot} does not exist; the pool has {len(self._slots)} sequences")
        return held

    def _take(self, held: _Slot, index: int) -> int:
        """Takes a block for an index of the block table: the reserved one if it is free."""
        return self.blocks.take(held.reserved[index] if index < len(held.reserved) else None)

    def _reserve(self, held: _Slot, count: int) -> bool:
        start = self.blocks.reserve(count)
        if start is not None:
            self.blocks.unreserve(held.reserved)
            held.reserved = range(start, start + count)
        return start is not None

    def _copy_on_write(self, held: _Slot) -> None:
        """Prepares the block of the next position for a write: not shared, and not in the prefix cache."""
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
        """Copies a sequence into consecutive blocks, if enough are free.

        It costs as much as gathering in one pass, and saves that in all later ones.
        """
        count = self.blocks_for(max(held.expected, len(held.block_table) * self.block_tokens))
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
        raise ValueError(f"{name} has {len(values)} values for {layers} layers")
    if min(values) < 1:
        raise ValueError(f"{name} is {min(values)}; it must be at least 1")
    return values


def grow_with_preemption(
    pool: KVPool, slot: int, length: int, victims: Iterable[int] = (), *, spare: int = 0, encoder_length: int = 0
) -> list[int] | None:
    """Grows a slot to `length` positions, and preempts `victims` in order if the pool is full.

    `spare` free blocks remain, one less for each victim. With an `encoder_length` a slot without encoder gets one.

    Returns:
        The preempted slots; None if all victims would not be enough, and then nothing is changed.
    """
    adds_encoder = encoder_length > 0 and pool.encoder_slot(slot) is None
    needed = pool.blocks_needed(slot, length) + (pool.blocks_for(encoder_length) if adds_encoder else 0)
    lacking = needed + spare - pool.blocks.num_free
    chosen: list[int] = []
    if lacking > 0:
        given: Counter[int] = Counter()
        for victim in victims:
            chosen.append(victim)
            if spare:
                spare, lacking = spare - 1, lacking - 1
            encoder = pool.encoder_slot(victim)
            for block in pool.block_table(victim) + (() if encoder is None else pool.block_table(encoder)):
                given[block] += 1
                # It becomes free once all its holders are preempted.
                lacking -= given[block] == pool.blocks.ref_count(block)
            if lacking <= 0:
                break
        else:
            return None
        for victim in chosen:
            pool.rollback(victim, 0)
    if adds_encoder:
        pool.add_encoder(slot, encoder_length)
    pool.grow(slot, length)
    return chosen
