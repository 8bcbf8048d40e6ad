"""Keys and values of many sequences in one place: fixed slots now, a page table behind the same methods later.

It knows nothing of models, tokens or passes. One thread owns a pool; no method locks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.lm.errors import PoolCorrupted, PoolExhausted

__all__ = ["KVPool", "PoolCorrupted", "PoolExhausted", "SlotViews"]

_FREE = -1


@dataclass(slots=True)
class SlotViews:
    """Views of one sequence's keys and values, one entry per layer: nothing is copied.

    Attributes:
        keys: `[kv_heads, 1, end, head_dim]` each: heads as a batch, so that attention leaves its result in their order.
        values: like `keys`.
        new: `[2, kv_heads, end - start, head_dim]` each: keys and values of the positions from `start` on.
    """

    keys: list[Tensor]
    values: list[Tensor]
    new: list[Tensor]


class KVPool:
    """Room for `max_sequences` sequences of `max_length` positions each, reserved at once.

    A sequence's keys (values) of one layer are one view `[kv_heads, length, head_dim]`, contiguous within each head. On
    a CPU the memory is only reserved here, and taken as positions are written.

    Args:
        layers: how many layers hold keys and values.
        kv_heads: heads per layer; a sequence where layers differ.
        head_dim: size of a head; a sequence where layers differ.
        max_sequences: slots.
        max_length: positions of a slot.
        dtype: of the stored keys and values.
        device: where they lie.
    """

    def __init__(
        self,
        layers: int,
        kv_heads: int | Sequence[int],
        head_dim: int | Sequence[int],
        *,
        max_sequences: int,
        max_length: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        for name, value in (("layers", layers), ("max_sequences", max_sequences), ("max_length", max_length)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        shapes = list(
            zip(_per_layer("kv_heads", kv_heads, layers), _per_layer("head_dim", head_dim, layers), strict=True)
        )
        self.layers = layers
        self.max_sequences = max_sequences
        self.max_length = max_length
        self.dtype = dtype
        self.device = torch.device(device)
        # Layers of one shape share a tensor [layers, 2, slots, kv_heads, max_length, head_dim]: one call makes the
        # views of them all.
        self._members = [[i for i in range(layers) if shapes[i] == shape] for shape in dict.fromkeys(shapes)]
        self._stores = [
            torch.empty(
                (len(members), 2, max_sequences, shapes[members[0]][0], max_length, shapes[members[0]][1]),
                dtype=dtype,
                device=self.device,
            )
            for members in self._members
        ]
        self._lengths = [_FREE] * max_sequences
        self._free = list(range(max_sequences - 1, -1, -1))

    # ---------------------------------------------------------------------------------------------------------- slots

    def allocate(self) -> int:
        """Takes a free slot, empty.

        Raises:
            PoolExhausted: all slots are taken.
        """
        if not self._free:
            raise PoolExhausted(f"all {self.max_sequences} slots of the KV pool are taken")
        slot = self._free.pop()
        self._lengths[slot] = 0
        return slot

    def fork(self, slot: int) -> int:
        """Takes a free slot and copies the positions of `slot` into it.

        Raises:
            PoolExhausted: all slots are taken.
            ValueError: `slot` is not taken.
        """
        length = self.length(slot)
        fork = self.allocate()
        for store in self._stores:
            store[:, :, fork, :, :length] = store[:, :, slot, :, :length]
        self._lengths[fork] = length
        return fork

    def free(self, slot: int) -> None:
        """Gives a slot back.

        Raises:
            ValueError: it is not taken.
        """
        self.length(slot)
        self._lengths[slot] = _FREE
        self._free.append(slot)

    @property
    def free_slots(self) -> int:
        """How many slots are free."""
        return len(self._free)

    # -------------------------------------------------------------------------------------------------------- lengths

    def length(self, slot: int) -> int:
        """How many positions of a slot are held.

        Raises:
            ValueError: it is not taken.
        """
        if not 0 <= slot < self.max_sequences or self._lengths[slot] == _FREE:
            raise ValueError(f"slot {slot} is not taken (the pool has slots 0 to {self.max_sequences - 1})")
        return self._lengths[slot]

    def extend(self, slot: int, length: int) -> None:
        """Says that positions up to `length` have been written.

        Raises:
            ValueError: the slot is not taken, already longer, or has no such room.
        """
        held = self.length(slot)
        if not held <= length <= self.max_length:
            raise ValueError(
                f"slot {slot} holds {held} positions of {self.max_length}: it cannot be extended to {length}"
            )
        self._lengths[slot] = length

    def rollback(self, slot: int, length: int) -> None:
        """Forgets the positions from `length` on: a number, not a copy.

        Raises:
            ValueError: the slot is not taken, or holds fewer.
        """
        held = self.length(slot)
        if not 0 <= length <= held:
            raise ValueError(f"slot {slot} holds {held} positions: it cannot be rolled back to {length}")
        self._lengths[slot] = length

    # ---------------------------------------------------------------------------------------------------------- memory

    def views(self, slot: int, start: int, end: int) -> SlotViews:
        """Views of positions 0 to `end` of a slot, to attend to, and of `start` to `end`, to write."""
        if len(self._stores) == 1:
            return _views(self._stores[0], slot, start, end)
        keys: list[Tensor] = [torch.empty(0)] * self.layers
        values, new = list(keys), list(keys)
        for store, members in zip(self._stores, self._members, strict=True):
            part = _views(store, slot, start, end)
            for i, layer in enumerate(members):
                keys[layer], values[layer], new[layer] = part.keys[i], part.values[i], part.new[i]
        return SlotViews(keys, values, new)

    def read(self, slot: int, start: int, end: int) -> tuple[Tensor, ...]:
        """Copies of the keys and values of some positions, for `write`.

        Raises:
            ValueError: the slot is not taken, or does not hold them.
        """
        if not 0 <= start <= end <= self.length(slot):
            raise ValueError(f"slot {slot} holds {self.length(slot)} positions, not {start} to {end}")
        return tuple(store[:, :, slot, :, start:end].clone() for store in self._stores)

    def write(self, slot: int, start: int, tensors: Sequence[Tensor]) -> None:
        """Puts back what `read` gave, at positions from `start` on; `extend` then says that they are there.

        Raises:
            ValueError: the slot is not taken, or has no such room.
        """
        end = start + tensors[0].shape[-2]
        if not self.length(slot) <= start <= end <= self.max_length:
            raise ValueError(
                f"slot {slot} holds {self.length(slot)} positions of {self.max_length}: {start} to {end} cannot be put"
            )
        for store, part in zip(self._stores, tensors, strict=True):
            store[:, :, slot, :, start:end].copy_(part)

    @property
    def memory_bytes(self) -> int:
        """Bytes reserved; on a CPU those of positions never written are not taken."""
        return sum(store.numel() * store.element_size() for store in self._stores)

    def check_integrity(self) -> None:
        """Checks that the books agree.

        Raises:
            PoolCorrupted: a slot is both free and taken, or neither, or a length is impossible.
        """
        if len(set(self._free)) != len(self._free):
            raise PoolCorrupted(f"a slot is free twice: {sorted(self._free)}")
        free = {slot for slot, length in enumerate(self._lengths) if length == _FREE}
        if free != set(self._free):
            raise PoolCorrupted(f"slots {sorted(free ^ set(self._free))} are free in one book and taken in the other")
        for slot, length in enumerate(self._lengths):
            if length != _FREE and not 0 <= length <= self.max_length:
                raise PoolCorrupted(f"slot {slot} claims {length} positions of {self.max_length}")


def _per_layer(name: str, value: int | Sequence[int], layers: int) -> list[int]:
    values = [value] * layers if isinstance(value, int) else list(value)
    if len(values) != layers:
        raise ValueError(f"{name} names {len(values)} layers of {layers}")
    if min(values) < 1:
        raise ValueError(f"{name} must be at least 1, not {min(values)}")
    return values


def _views(store: Tensor, slot: int, start: int, end: int) -> SlotViews:
    # store: [layers, 2, slots, kv_heads, max_length, head_dim]
    held = store.flatten(0, 1).select(1, slot).narrow(2, 0, end).unsqueeze(2).unbind(0)
    new = store.select(2, slot).narrow(3, start, end - start).unbind(0)
    return SlotViews(list(held[0::2]), list(held[1::2]), list(new))
