"""The KV pool of llama.cpp, and its prefix cache.

llama.cpp keeps keys and values in cells that it places itself, so the pool counts blocks, and tells llama.cpp which
positions of a sequence to drop or to share.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.runtime.block_pool import PoolCorrupted, PoolExhausted
from outrider.runtime.kv_cache import KVPool
from outrider.runtime.llama_loader import LlamaModel, errors
from outrider.runtime.prefix_cache import PrefixCache

# A shorter prefix is not saved: it would take the place of one that takes longer to read.
LEAST_SAVED_TOKENS = 32
# The search for the longest common prefix goes through all of them.
MOST_SAVED = 64


class LlamaPool(KVPool):
    """Counts blocks as the pool of torch does, and keeps llama.cpp's sequences at the same lengths.

    A sequence never takes more cells than its blocks have positions, so that llama.cpp cannot run out of cells before
    the pool is exhausted. The memory of its blocks has a size and no content: keys and values are in llama.cpp's cells,
    and a sequence that goes on from a shared block writes cells of its own.

    Args:
        context: of llama.cpp, with a cell for each position of all blocks.
        sequences: the most that hold positions at once.
        copies: sequences of llama.cpp for each of ours, `sequences` apart.

    Attributes:
        holds_nan: whether a cell may hold NaN. Attention without flash attention reads the cells of other sequences and
            free ones too, and multiplies them by 0. So no pass is of use until all sequences have left.
    """

    holds_nan = False

    def __init__(
        self,
        llama_cpp: ModuleType,
        context: Any,
        loaded: LlamaModel,
        *,
        sequences: int,
        blocks: int,
        max_length: int,
        copies: int = 1,
    ) -> None:
        self._llama_cpp = llama_cpp
        self._context = context
        self._copies = range(0, copies * sequences, sequences)
        self._memory_handle = llama_cpp.llama_get_memory(context)
        self._most = sequences
        self._sequences: dict[int, int] = {}  # llama.cpp's sequence of each slot that has one
        self._free_sequences = list(range(self._most))
        self._written: dict[int, int] = {}  # positions of each slot in llama.cpp
        layer = loaded.layers[0]  # all are alike
        assert loaded.kv_dtype is not None
        super().__init__(
            len(loaded.layers), layer.kv_heads, layer.head_dim,
            blocks=blocks, max_length=max_length, dtype=loaded.kv_dtype, device="meta",
        )  # fmt: skip

    def sequence(self, slot: int) -> int:
        """llama.cpp's sequence of a slot.

        Raises:
            PoolExhausted: llama.cpp has no more.
        """
        found = self._sequences.get(slot)
        if found is None:
            if not self._free_sequences:
                raise PoolExhausted(f"llama.cpp holds {self._most} sequences at most")
            found = self._sequences[slot] = self._free_sequences.pop()
            self._written[slot] = 0
        return found

    def blocks_needed(self, slot: int, length: int) -> int:
        """See `KVPool`; more than there are if llama.cpp has no sequence left for the slot."""
        if slot not in self._sequences and not self._free_sequences:
            return self.blocks.count + 1
        return super().blocks_needed(slot, length)

    def grow(self, slot: int, length: int) -> None:
        super().grow(slot, length)
        if not self.is_empty(slot):
            self.sequence(slot)

    def wrote(self, slot: int, length: int) -> None:
        """llama.cpp holds `length` positions of a slot now."""
        self._written[slot] = length

    def truncate(self, slot: int, length: int) -> None:
        """Drops the positions from `length` on in llama.cpp; the length of the slot is unchanged."""
        if self._written.get(slot, 0) > length:
            for copy in self._copies:
                self._llama_cpp.llama_memory_seq_rm(self._memory_handle, self._sequences[slot] + copy, length, -1)
            self._written[slot] = length

    def rollback(self, slot: int, length: int) -> None:
        super().rollback(slot, length)
        self.truncate(slot, length)
        if not length and slot in self._sequences:
            self._free_sequences.append(self._sequences.pop(slot))
            del self._written[slot]
            if self.holds_nan and not self._sequences:
                self._clear()

    def fork(self, slot: int) -> int:
        length = self.length(slot)
        if length and not self._free_sequences:
            raise PoolExhausted(f"llama.cpp holds {self._most} sequences at most")
        fork = super().fork(slot)
        if length:
            source, target = self._sequences[slot], self.sequence(fork)
            for copy in self._copies:
                self._llama_cpp.llama_memory_seq_cp(self._memory_handle, source + copy, target + copy, 0, length)
            self.wrote(fork, length)
        return fork

    @property
    def can_be_saved(self) -> bool:
        """Whether `save` saves all positions. Of a model with sliding windows llama.cpp saves the last window only."""
        return len(self._copies) == 1

    def save(self, slot: int) -> NDArray[np.uint8]:
        """The keys and values of a slot's positions, for `restore`."""
        self.truncate(slot, self.length(slot))
        sequence = self._sequences[slot]
        state = np.empty(self._llama_cpp.llama_state_seq_get_size(self._context, sequence), np.uint8)
        count = self._llama_cpp.llama_state_seq_get_data(self._context, _pointer(state), state.size, sequence)
        if count != state.size:
            raise RuntimeError(f"llama.cpp saved {count} of {state.size} bytes of slot {slot}: {errors()}")
        return state

    def restore(self, slot: int, state: NDArray[np.uint8], saved: int, length: int) -> None:
        """Fills a slot that has blocks and no positions with the first `length` of the `saved` positions of a state.

        Raises:
            PoolExhausted: llama.cpp has too few cells for all of them.
        """
        sequence = self.sequence(slot)
        if not self._llama_cpp.llama_state_seq_set_data(self._context, _pointer(state), state.size, sequence):
            raise PoolExhausted(f"llama.cpp cannot restore {saved} positions: {errors()}")
        self.wrote(slot, saved)
        self.truncate(slot, length)
        self.extend(slot, length)

    def reset(self) -> None:
        super().reset()
        self._clear()
        self._sequences, self._written = {}, {}
        self._free_sequences = list(range(self._most))

    def _clear(self) -> None:
        """Sets all cells to zeros."""
        self._llama_cpp.llama_memory_clear(self._memory_handle, True)
        self.holds_nan = False

    def check_integrity(self) -> None:
        super().check_integrity()
        for slot, sequence in self._sequences.items():
            held = self._llama_cpp.llama_memory_seq_pos_max(self._memory_handle, sequence) + 1
            first = self._llama_cpp.llama_memory_seq_pos_min(self._memory_handle, sequence)
            if held != self._written[slot] or held < self.length(slot) or (held and first):
                raise PoolCorrupted(
                    f"slot {slot} holds {self.length(slot)} positions, and llama.cpp {first} to {held - 1} of them"
                )


def _pointer(state: NDArray[np.uint8]) -> Any:
    return state.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))


# --------------------------------------------------------------------------------------------------------- prefix cache


@dataclass(frozen=True, slots=True, eq=False)
class _Saved:
    salt: str
    tokens: NDArray[np.int32]
    state: NDArray[np.uint8]


class SavedPrefixes(PrefixCache):
    """Copies of the last sequences of a pool, each of all positions; all together as large as the pool at most.

    Cells that keep a prefix would make every pass slower: llama.cpp goes through all that are in use. So a sequence is
    copied, and another one begins with what both have in common.
    """

    _pool: LlamaPool

    def __init__(self, pool: LlamaPool, *, enabled: bool = True) -> None:
        super().__init__(pool, enabled=enabled)
        self._saved: list[_Saved] = []  # the longest unused first; replaced whole, as other threads read it

    def find(self, tokens: Sequence[int], salt: str = "") -> int:
        return self._longest(tokens, salt)[1]

    def adopt(self, slot: int, tokens: Sequence[int], salt: str = "") -> int:
        pool = self._pool
        if not pool.is_empty(slot):
            raise ValueError(f"slot {slot} holds {pool.length(slot)} positions; only an empty one adopts a prefix")
        saved, length = self._longest(tokens, salt)
        # The whole sequence is restored before it is cut. Without blocks for all tokens the slot would have to wait.
        needed = max(pool.blocks_needed(slot, len(tokens)), 0 if saved is None else pool.blocks_for(len(saved.tokens)))
        if saved is None or needed > pool.blocks.num_free:
            return 0
        pool.grow(slot, length)
        pool.restore(slot, saved.state, len(saved.tokens), length)
        self._saved = [*(each for each in self._saved if each is not saved), saved]
        return length

    def keep(self, slot: int, tokens: Sequence[int], salt: str = "") -> None:
        pool, length = self._pool, self._pool.length(slot)
        if not self.enabled or length < LEAST_SAVED_TOKENS or pool.holds_nan:
            return
        own = np.asarray(tokens[:length], np.int32)
        kept = list[_Saved]()
        for each in self._saved:
            common = _common(each.tokens, own) if each.salt == salt else 0
            if common == length:  # it is saved already
                return
            if common < len(each.tokens):  # else the new one replaces it
                kept.append(each)
        kept.append(_Saved(salt, own, pool.save(slot)))
        size = sum(each.state.nbytes for each in kept)
        while size > pool.memory_bytes or len(kept) > MOST_SAVED:
            size -= kept.pop(0).state.nbytes
        self._saved = kept

    def _longest(self, tokens: Sequence[int], salt: str) -> tuple[_Saved | None, int]:
        """The saved sequence with the longest common prefix with `tokens` without the last, and its length."""
        found, length = None, LEAST_SAVED_TOKENS - 1
        wanted = np.asarray(tokens[:-1], np.int32)
        for each in self._saved if len(wanted) > length else ():
            common = _common(each.tokens, wanted) if each.salt == salt else 0
            if common > length:
                found, length = each, common
        return found, 0 if found is None else length


def _common(left: NDArray[np.int32], right: NDArray[np.int32]) -> int:
    """The length of the common prefix."""
    count = min(len(left), len(right))
    differs = left[:count] != right[:count]
    return int(differs.argmax()) if differs.any() else count
