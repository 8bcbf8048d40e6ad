"""The batch of one forward pass: the next tokens of each sequence, and the locations of their keys and values.

A `PackedBatch` is for attention on a CPU, sequence by sequence. A `PagedBatch` uses block tables, on its device; a
`HostBatch` is the same in numpy arrays, or as bytes between tensor-parallel ranks.
"""

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from kernels.attention_work import ITEM, work_list
from kernels.packed_arrays import Field, PackedArrays
from outrider.runtime.block_pool import PagedMemory
from outrider.runtime.kv_cache import KVPool
from outrider.runtime.sdpa import CausalMasks, Location, Scoring, biased_mask


@dataclass(slots=True)
class Chunk:
    """The next tokens of one sequence.

    Attributes:
        slot: a sequence of the pool.
        tokens: at least one.
        start: the position of the first token; must equal the pool's length of the slot.
        logits_from: index in the chunk of the first token whose logits are returned; `len(tokens)` returns none.
    """

    slot: int
    tokens: Sequence[int]
    start: int
    logits_from: int


def last_rows(chunks: Sequence[Chunk]) -> list[Chunk]:
    """The chunks, with logits of their last rows alone."""
    return [Chunk(each.slot, each.tokens, each.start, len(each.tokens) - 1) for each in chunks]


@dataclass(slots=True)
class PackedBatch:
    """The chunks of a forward pass. The model hands it to the attention as a keyword argument.

    Attributes:
        starts: the position of the first row of each chunk.
        counts: the number of rows of each chunk.
        rows: T, the number of rows of all chunks.
        slots: of each chunk.
        masks: shared by all batches of a pool.
    """

    starts: list[int]
    counts: list[int]
    rows: int
    slots: list[int]
    masks: CausalMasks
    pool: KVPool
    _masks: dict[tuple[int, int], list[Tensor]] = field(default_factory=dict)
    _biased: dict[int, list[Tensor]] = field(default_factory=dict)
    _locations: list[Location] = field(default_factory=list)
    _encoded: list[Location] = field(default_factory=list)
    _slot_mapping: Tensor | None = None

    def memory(self, layer: int) -> Tensor:
        """Keys and values of all blocks of a layer, `[2, kv_heads, positions, head_dim]`."""
        assert self.pool.by_head is not None
        return self.pool.by_head.layers[layer]

    @property
    def store(self) -> Tensor:
        """Those of all layers, `[layers, 2, kv_heads, positions, head_dim]`; the layers must have one shape."""
        assert self.pool.by_head is not None
        (store,) = self.pool.by_head.stores
        return store

    def causal_masks(self, group: int, window: int) -> list[Tensor]:
        """The mask of each chunk, for `sdpa.attend_causal`, computed once per batch.

        Args:
            group: query heads of each KV head.
            window: how many positions a row sees, its own included; 0 is all.
        """
        found = self._masks.get((group, window))
        if found is None:
            ends = map(operator.add, self.starts, self.counts)
            found = [self.masks.for_rows(*span, group, window) for span in zip(self.counts, ends, strict=True)]
            self._masks[group, window] = found
        return found

    def biased_masks(self, bias: Tensor) -> list[Tensor]:
        """The mask of each chunk with a bias by distance (`sdpa.biased_mask`), computed once per batch."""
        found = self._biased.get(id(bias))
        if found is None:
            own = bias.to(self.pool.dtype)  # on CUDA, masks must have the dtype of the queries
            found = [biased_mask(own, *span) for span in zip(self.starts, self.counts, strict=True)]
            self._biased[id(bias)] = found
        return found

    @property
    def block_tokens(self) -> int:
        return self.pool.block_tokens

    @property
    def locations(self) -> list[Location]:
        """Of each chunk's keys and values."""
        if not self._locations:
            ends = map(operator.add, self.starts, self.counts)
            self._locations = [self._locate(*each) for each in zip(self.slots, ends, strict=True)]
        return self._locations

    @property
    def encoded(self) -> list[Location]:
        """Of the keys and values of each chunk's encoder."""
        for slot in self.slots[len(self._encoded) :]:
            encoder = self.pool.encoder_slot(slot)
            assert encoder is not None
            self._encoded.append(self._locate(encoder, self.pool.length(encoder)))
        return self._encoded

    def _locate(self, slot: int, end: int) -> Location:
        blocks, is_contiguous = self.pool.blocks_to(slot, end)
        none = self.masks.no_rows
        if is_contiguous:
            return Location(blocks[0] * self.block_tokens, none, end)
        return Location(0, torch.tensor(blocks, device=none.device), end)

    @property
    def slot_mapping(self) -> Tensor:
        """`[T]`: the position in memory of each row."""
        if self._slot_mapping is None:
            spans = zip(self.slots, self.starts, self.counts, strict=True)
            places = [self.pool.slot_mapping(slot, start, start + count) for slot, start, count in spans]
            self._slot_mapping = torch.tensor([at for own in places for at in own], device=self.masks.no_rows.device)
        return self._slot_mapping

    def position_ids(self, device: torch.device) -> Tensor:
        """`[T]`: the position of each row in its sequence."""
        if len(self.starts) == 1:
            return torch.arange(self.starts[0], self.starts[0] + self.rows, device=device)
        spans = zip(self.starts, self.counts, strict=True)
        return torch.tensor(
            [position for start, count in spans for position in range(start, start + count)], device=device
        )


def pack(
    spans: Iterable[tuple[int, int, int]], pool: KVPool, masks: CausalMasks, later_rows: Sequence[int] = ()
) -> PackedBatch:
    """Packs (slot, start, count) spans in order; `later_rows` of each slot get blocks, too."""
    batch = PackedBatch([], [], 0, [], masks, pool)
    for i, (slot, start, count) in enumerate(spans):
        pool.grow_contiguous(slot, start + count + (later_rows[i] if later_rows else 0))
        if (encoder := pool.encoder_slot(slot)) is not None:
            pool.grow_contiguous(encoder, pool.length(encoder))
        batch.slots.append(slot)
        batch.starts.append(start)
        batch.counts.append(count)
        batch.rows += count
    return batch


_LONG, _INT = np.int64, np.int32

Shape = tuple[int, int, int, int, int]
"""T, R, S, P and W of a `HostBatch`."""


@dataclass(frozen=True, slots=True, eq=False)
class HostBatch:
    """A batch of T rows of S sequences; R of the rows need logits.

    Attributes:
        tokens: int64 `[T]`, one sequence after the other.
        positions: int64 `[T]`, of each row in its sequence.
        slot_mapping: int64 `[T]`: where the row's keys and values are written: block · block_tokens + offset.
        rows: int64 `[R]`: the rows that need logits, ascending.
        row_starts: int32 `[S + 1]`: the first row of each sequence, and T.
        lengths: int32 `[S]`: positions of each sequence with keys and values, this batch included.
        block_tables: int32 `[S, P]`: the blocks of each sequence, in order; entries beyond its length are not read.
        items: int32 `[W, 5]`: the work list of attention, see `kernels.attention_work.Work`.
        row_partials: int32 `[T]`: see `items`.
    """

    tokens: np.ndarray
    positions: np.ndarray
    slot_mapping: np.ndarray
    rows: np.ndarray
    row_starts: np.ndarray
    lengths: np.ndarray
    block_tables: np.ndarray
    items: np.ndarray
    row_partials: np.ndarray

    @property
    def shape(self) -> Shape:
        """T, R, S, P and W."""
        return len(self.tokens), len(self.rows), *self.block_tables.shape, len(self.items)

    @property
    def partials(self) -> int:
        """How many partial results the work list of attention has."""
        return int(self.items[:, 4].max(initial=-1)) + 1

    @staticmethod
    def empty() -> "HostBatch":
        none, ints = np.zeros(0, _LONG), np.zeros(0, _INT)
        return HostBatch(
            none, none, none, none, np.zeros(1, _INT), ints, np.zeros((0, 0), _INT), np.zeros((0, ITEM), _INT), ints
        )

    def packed(self, *, pinned: bool = False) -> Tensor:
        """All arrays in one buffer on the host, as `layout` has them."""
        arrays = layout(self.shape)
        buffer = arrays.buffer(torch.device("cpu"), pinned)
        for name, staged in arrays.arrays(buffer).items():
            staged[...] = getattr(self, name)
        return buffer

    @staticmethod
    def view(shape: Shape, buffer: Tensor) -> "HostBatch":
        """The arrays in a buffer on the host, see `layout`."""
        return HostBatch(**layout(shape).arrays(buffer))

    def pad_into(self, padded: "HostBatch", *, null_position: int) -> None:
        """Writes the batch into a larger one of fixed size, as a CUDA graph reads it.

        Padding rows belong to no sequence and write to `null_position`; padding sequences have no rows.

        Raises:
            ValueError: the batch does not fit.
        """
        T, R, S, P, W = self.shape
        if any(map(operator.gt, self.shape, padded.shape)):
            raise ValueError(
                f"a batch of {self.shape} (rows, rows with logits, sequences, blocks, work items) does not fit "
                f"{padded.shape}"
            )
        padded.block_tables[:S, :P] = self.block_tables  # the rest is not read
        padded.items[:W] = self.items
        padded.items[W:, 2] = 0  # items of no rows
        for own, whole, count, value in (
            (self.tokens, padded.tokens, T, 0),
            (self.positions, padded.positions, T, 0),
            (self.slot_mapping, padded.slot_mapping, T, null_position),
            (self.rows, padded.rows, R, 0),
            (self.row_starts, padded.row_starts, S + 1, T),
            (self.lengths, padded.lengths, S, 0),
            (self.row_partials, padded.row_partials, T, -1),
        ):
            whole[:count] = own
            whole[count:] = value


def layout(shape: Shape) -> PackedArrays:
    """The arrays of a `HostBatch` in one buffer."""
    T, R, S, P, W = shape
    longs = {"tokens": (T,), "positions": (T,), "slot_mapping": (T,), "rows": (R,)}
    ints = {"row_starts": (S + 1,), "lengths": (S,), "block_tables": (S, P), "items": (W, ITEM), "row_partials": (T,)}
    fields = {name: Field(_LONG, size) for name, size in longs.items()}
    return PackedArrays(fields | {name: Field(_INT, size) for name, size in ints.items()})


def build_batch(chunks: Sequence[Chunk], pool: KVPool) -> HostBatch:
    """Takes blocks for the chunks in a paged pool and returns the batch.

    Raises:
        PoolExhausted: see `KVPool.grow`. Some slots may hold more blocks then; no length has changed.
    """
    # Lists, not arrays: most batches have few rows, and a round waits for this.
    tokens, positions, slots, rows = list[int](), list[int](), list[int](), list[int]()
    row_starts, lengths, tables = [0], list[int](), list[tuple[int, ...]]()
    for chunk in chunks:
        start, end, first = chunk.start, chunk.start + len(chunk.tokens), len(tokens)
        pool.grow(chunk.slot, end)
        table = pool.block_table(chunk.slot)
        tokens += chunk.tokens
        positions += range(start, end)
        slots += pool.slot_mapping(chunk.slot, start, end)
        rows += range(first + chunk.logits_from, len(tokens))
        row_starts.append(len(tokens))
        lengths.append(end)
        tables.append(table)
    block_tables = np.zeros((len(chunks), max(map(len, tables))), _INT)
    for own, table in zip(block_tables, tables, strict=True):
        own[: len(table)] = table
    work = work_list(row_starts, lengths)
    return HostBatch(
        tokens=np.array(tokens, _LONG),
        positions=np.array(positions, _LONG),
        slot_mapping=np.array(slots, _LONG),
        rows=np.array(rows, _LONG),
        row_starts=np.array(row_starts, _INT),
        lengths=np.array(lengths, _INT),
        block_tables=block_tables,
        items=work.items,
        row_partials=work.row_partials,
    )


class PagedAttention(Protocol):
    """Attention over block tables."""

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor, batch: "PagedBatch", scoring: Scoring) -> Tensor:
        """Causal attention of each row over its own sequence. Keys and values of all rows are written before.

        Args:
            query: `[T, heads, head_dim]`.
            keys: blocks of a layer, `[blocks, block_tokens, kv_heads, head_dim]`.
            values: like `keys`.

        Returns:
            `[T, heads, head_dim]`; padding rows may hold any values.
        """


@dataclass(slots=True)
class PagedBatch:
    """A batch on its device. The model hands it to the attention as a keyword argument.

    The tensors from `tokens` to `row_partials` are those of `HostBatch`.

    Attributes:
        partials: how many partial results `items` may name.
        memory: keys and values of all blocks.
        attention: the implementation of attention.
        host_batch: the same batch on the host; None in a CUDA graph, whose tensors are overwritten before each replay.
        logits: `[T, V]`, where a program may write the logits of all rows; None is a new tensor.
    """

    tokens: Tensor
    positions: Tensor
    slot_mapping: Tensor
    rows: Tensor
    row_starts: Tensor
    lengths: Tensor
    block_tables: Tensor
    items: Tensor
    row_partials: Tensor
    partials: int
    memory: PagedMemory
    attention: PagedAttention
    host_batch: HostBatch | None = None
    logits: Tensor | None = None

    @property
    def max_length(self) -> int:
        """The longest sequence that the block tables can hold, in positions."""
        return self.block_tables.size(1) * self.memory.block_tokens

    def position_ids(self, device: torch.device) -> Tensor:
        """`[T]`: the position of each row in its sequence."""
        return self.positions

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Writes keys and values of all rows, `[T, kv_heads, head_dim]` each, to the blocks of a layer."""
        for blocks, new in ((self.memory.keys[layer], keys), (self.memory.values[layer], values)):
            blocks.flatten(0, 1).index_copy_(0, self.slot_mapping, new.to(blocks.dtype))


def to_device(
    host_batch: HostBatch, memory: PagedMemory, attention: PagedAttention, device: torch.device
) -> PagedBatch:
    """The batch on its device, by one copy."""
    buffer = host_batch.packed(pinned=device.type == "cuda")
    batch = on_device(buffer.to(device, non_blocking=True), host_batch.shape, host_batch.partials, memory, attention)
    batch.host_batch = host_batch
    return batch


def on_device(
    buffer: Tensor, shape: Shape, partials: int, memory: PagedMemory, attention: PagedAttention
) -> PagedBatch:
    """The batch packed in `buffer` on the device: views, no copies."""
    tensors = layout(shape).tensors(buffer)
    return PagedBatch(**tensors, partials=partials, memory=memory, attention=attention, host_batch=None)
