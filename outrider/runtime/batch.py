"""One forward pass: the next tokens of each sequence, which rows they are, and where their keys and values lie.

A `PackedBatch` has each sequence in one piece of memory, as attention on a CPU reads it. A `Layout` is a pass over
block tables as plain numbers, also as bytes that one rank sends another; a `PagedBatch` is the same on its device.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from kernels.attention_work import ITEM, work_list
from outrider.runtime.block_pool import PagedMemory, SlotViews
from outrider.runtime.kv_cache import KVPool
from outrider.runtime.sdpa import CausalMasks, Scoring


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


_LONG = np.dtype(np.int64)
_INT = np.dtype(np.int32)
_TENSORS = {_LONG: torch.int64, _INT: torch.int32}

Shape = tuple[int, int, int, int, int]
"""T, R, S, P and W of a `Layout`."""


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """A pass of T rows of S sequences, S of which R rows need logits.

    Attributes:
        tokens: int64 `[T]`, one sequence after the other.
        positions: int64 `[T]`, of each row in its sequence.
        places: int64 `[T]`: where its keys and values go, among the positions of all blocks.
        rows: int64 `[R]`: those that need logits, ascending.
        row_starts: int32 `[S + 1]`: the first row of each sequence, and T.
        lengths: int32 `[S]`: how many positions of each hold keys and values, those of this pass included.
        tables: int32 `[S, P]`: the blocks of each, in order; what lies beyond its length is not read.
        items: int32 `[W, 5]`: the work of attention; see `kernels.attention_work.Work`.
        row_slots: int32 `[T]`: likewise.
    """

    tokens: np.ndarray
    positions: np.ndarray
    places: np.ndarray
    rows: np.ndarray
    row_starts: np.ndarray
    lengths: np.ndarray
    tables: np.ndarray
    items: np.ndarray
    row_slots: np.ndarray

    @property
    def shape(self) -> Shape:
        """T, R, S, P and W."""
        return len(self.tokens), len(self.rows), *self.tables.shape, len(self.items)

    @property
    def slots(self) -> int:
        """How many slots the work of attention has."""
        return int(self.items[:, 4].max(initial=-1)) + 1

    @staticmethod
    def empty() -> "Layout":
        """A pass of no rows."""
        none, ints = np.zeros(0, _LONG), np.zeros(0, _INT)
        return Layout(
            none, none, none, none, np.zeros(1, _INT), ints, np.zeros((0, 0), _INT), np.zeros((0, ITEM), _INT), ints
        )

    def pack(self) -> bytes:
        """All of it as bytes, for `unpack`: `shape` says how they are to be read."""
        return b"".join(array.tobytes() for array in self._arrays())

    def pack_into(self, room: np.ndarray) -> None:
        """Writes `pack` into uint8 `[size]`."""
        at = 0
        for array in self._arrays():
            room[at : at + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            at += array.nbytes

    def _arrays(self) -> list[np.ndarray]:
        return [getattr(self, each.name) for each in fields(self)]

    @staticmethod
    def size(shape: Shape) -> int:
        """Bytes of `pack` by its shape."""
        return sum(kind.itemsize * int(np.prod(size)) for size, kind in _parts(shape))

    @staticmethod
    def unpack(shape: Shape, data: bytes) -> "Layout":
        """What `pack` was made of.

        Raises:
            ValueError: the bytes are not as many as the shape has.
        """
        if len(data) != Layout.size(shape):
            raise ValueError(f"a layout of shape {shape} has {Layout.size(shape)} bytes, not {len(data)}")
        room = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return Layout(*(part.numpy() for part in _split(room, shape)))

    def padded(self, shape: Shape, *, nowhere: int) -> "Layout":
        """The same pass, filled up to a fixed size; all rows of the result have logits, and those added are nobody's.

        They belong to no sequence, and write to `nowhere`; the sequences added have no rows and hold nothing.

        Raises:
            ValueError: the pass is larger than that, or lacks logits of some row.
        """
        (T, R, S, P, W), (rows, _, sequences, pages, work) = self.shape, shape
        if not all((T == R, rows >= T, sequences >= S, pages >= P, work >= W)):
            raise ValueError(
                f"a pass of {self.shape} (rows, with logits, sequences, pages, items of work) does not fit {shape}"
            )
        tables, items = np.zeros((sequences, pages), _INT), np.zeros((work, ITEM), _INT)
        tables[:S, :P], items[:W] = self.tables, self.items
        return Layout(
            tokens=_fill(self.tokens, rows, 0),
            positions=_fill(self.positions, rows, 0),
            places=_fill(self.places, rows, nowhere),
            rows=np.arange(rows, dtype=_LONG),
            row_starts=_fill(self.row_starts, sequences + 1, T),
            lengths=_fill(self.lengths, sequences, 0),
            tables=tables,
            items=items,
            row_slots=_fill(self.row_slots, rows, -1),
        )


def _fill(array: np.ndarray, length: int, value: int) -> np.ndarray:
    return np.concatenate((array, np.full(length - len(array), value, array.dtype)))


def lay_out(chunks: Sequence[Chunk], pool: KVPool) -> Layout:
    """Makes room for the chunks in a paged pool, and says where each row goes.

    Raises:
        PoolExhausted: see `KVPool.grow`; slots before may have grown, and none has another length.
    """
    tables: list[tuple[int, ...]] = []
    for chunk in chunks:
        pool.grow(chunk.slot, chunk.start + len(chunk.tokens))
        tables.append(pool.block_table(chunk.slot))
    counts = np.array([len(chunk.tokens) for chunk in chunks], _LONG)
    starts = np.array([chunk.start for chunk in chunks], _LONG)
    froms = np.array([chunk.logits_from for chunk in chunks], _LONG)
    row_starts = np.concatenate(([0], counts.cumsum()))
    owner = np.arange(len(chunks)).repeat(counts)
    within = np.arange(row_starts[-1]) - row_starts[owner]
    positions = starts[owner] + within
    table = np.zeros((len(chunks), max(map(len, tables))), _INT)
    for own, blocks in zip(table, tables, strict=True):
        own[: len(blocks)] = blocks
    index, offset = np.divmod(positions, pool.block_tokens)
    work = work_list(row_starts, starts + counts)
    return Layout(
        tokens=np.array([token for chunk in chunks for token in chunk.tokens], _LONG),
        positions=positions,
        places=table[owner, index].astype(_LONG) * pool.block_tokens + offset,
        rows=np.flatnonzero(within >= froms[owner]),
        row_starts=row_starts.astype(_INT),
        lengths=(starts + counts).astype(_INT),
        tables=table,
        items=work.items,
        row_slots=work.row_slots,
    )


class PagedAttention(Protocol):
    """How rows attend to their sequences' pages."""

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor, batch: "PagedBatch", scoring: Scoring) -> Tensor:
        """Lets each row see its own sequence up to itself. Keys and values of all rows have been written before.

        Args:
            query: `[T, heads, head_dim]`.
            keys: pages of a layer, `[blocks, block_tokens, kv_heads, head_dim]`.
            values: like `keys`.
            batch: the pass.
            scoring: of the layer.

        Returns:
            `[T, heads, head_dim]`; rows of no sequence are no numbers to rely on.
        """


@dataclass(slots=True)
class PagedBatch:
    """A pass on its device; it travels through the model to the attention as a keyword argument.

    Attributes:
        tokens: int64 `[T]`; likewise `positions`, `places` and `rows` `[R]`, see `Layout`.
        positions: see `tokens`.
        places: see `tokens`.
        rows: see `tokens`.
        row_starts: int32 `[S + 1]`; likewise `lengths` `[S]`, `tables` `[S, P]`, `items` `[W, 5]`, `row_slots` `[T]`.
        lengths: see `row_starts`.
        tables: see `row_starts`.
        items: see `row_starts`.
        row_slots: see `row_starts`.
        slots: how many slots `items` may name.
        memory: keys and values of all blocks.
        attention: how rows attend to them.
        layout: the same as numbers on the host; None where the tensors are filled anew behind it (a captured pass).
        observer: None; see `outrider.runtime.batch.PackedBatch`, beside which a model's attention takes this.
    """

    tokens: Tensor
    positions: Tensor
    places: Tensor
    rows: Tensor
    row_starts: Tensor
    lengths: Tensor
    tables: Tensor
    items: Tensor
    row_slots: Tensor
    slots: int
    memory: PagedMemory
    attention: PagedAttention
    layout: Layout | None = None
    observer: Any = None

    @property
    def max_length(self) -> int:
        """How many positions the tables have room for."""
        return self.tables.size(1) * self.memory.keys[0].size(1)

    def position_ids(self, device: torch.device) -> Tensor:
        """`[T]`: the position of each row in its sequence."""
        return self.positions

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Puts keys and values of all rows, `[T, kv_heads, head_dim]` each, where they belong."""
        for pages, new in ((self.memory.keys[layer], keys), (self.memory.values[layer], values)):
            pages.flatten(0, 1).index_copy_(0, self.places, new.to(pages.dtype))


def to_device(layout: Layout, memory: PagedMemory, attention: PagedAttention, device: torch.device) -> PagedBatch:
    """A pass on its device, after one copy."""
    room = torch.empty(Layout.size(layout.shape), dtype=torch.uint8, pin_memory=device.type == "cuda")
    layout.pack_into(room.numpy())
    batch = on_device(room.to(device, non_blocking=True), layout.shape, layout.slots, memory, attention)
    batch.layout = layout
    return batch


def on_device(room: Tensor, shape: Shape, slots: int, memory: PagedMemory, attention: PagedAttention) -> PagedBatch:
    """The pass whose packed layout lies in `room`, uint8 on the device: views of it, no copies."""
    tokens, positions, places, rows, row_starts, lengths, tables, items, row_slots = _split(room, shape)
    return PagedBatch(
        tokens, positions, places, rows, row_starts, lengths, tables, items, row_slots, slots, memory, attention
    )


def _parts(shape: Shape) -> list[tuple[tuple[int, ...], np.dtype[Any]]]:
    """Size and dtype of each array of a layout."""
    T, R, S, P, W = shape
    longs, ints = [(T,), (T,), (T,), (R,)], [(S + 1,), (S,), (S, P), (W, ITEM), (T,)]
    return [(size, _LONG) for size in longs] + [(size, _INT) for size in ints]


def _split(room: Tensor, shape: Shape) -> list[Tensor]:
    """The arrays of a packed layout, in the order of its fields."""
    parts, at = [], 0
    for size, kind in _parts(shape):
        count = kind.itemsize * int(np.prod(size))
        parts.append(room.narrow(0, at, count).view(_TENSORS[kind]).view(size))
        at += count
    return parts
