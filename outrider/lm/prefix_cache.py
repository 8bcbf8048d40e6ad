"""Keys and values of prefixes, kept when their sequences go on or end: text that begins alike is not run again.

Prefixes are cut into blocks of a few tokens. A block is known by the block before it and by its own tokens, so what is
found has the same tokens from the first on. Salts keep apart those who must not learn what others have asked: a prefix
is found under its own salt alone. What was not used for longest goes first, ends before beginnings.

It knows the pool, and nothing of models, passes or who asks.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from torch import Tensor

from outrider.lm.errors import PoolCorrupted
from outrider.lm.kv_pool import KVPool

BLOCK_TOKENS = 32

_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Keys and values of the tokens of one block, at their positions; `tensors` as `KVPool.read` gives them."""

    key: bytes
    parent: bytes
    tokens: array[int]
    tensors: tuple[Tensor, ...]
    size: int


@dataclass(frozen=True, slots=True)
class Prefix:
    """Blocks that belong together, from the first on. Whoever holds it may restore it, whatever is evicted."""

    blocks: tuple[Block, ...] = ()

    @property
    def length(self) -> int:
        """Tokens in it."""
        return sum(len(block.tokens) for block in self.blocks)


class PrefixCache:
    """Blocks of prefixes, up to a number of bytes. `find` may be called from any thread, all else from the pool's.

    Args:
        pool: whose slots are read and written.
        capacity: bytes of keys and values to keep at most; 0 keeps nothing.
        block_tokens: tokens of a block.
    """

    def __init__(self, pool: KVPool, *, capacity: int, block_tokens: int = BLOCK_TOKENS) -> None:
        if capacity < 0 or block_tokens < 1:
            raise ValueError(f"capacity is {capacity} and block_tokens is {block_tokens}; at least 0 and 1")
        self._pool = pool
        self._capacity = capacity
        self._block_tokens = block_tokens
        self._blocks: OrderedDict[bytes, Block] = OrderedDict()  # what was used last comes last
        self._size = 0

    @property
    def size(self) -> int:
        """Bytes of keys and values that are kept."""
        return self._size

    def find(self, tokens: Sequence[int], salt: str = "") -> Prefix:
        """Return the longest known prefix of `tokens`, without the last of them: that one has to be run."""
        found: list[Block] = []
        for key, piece in self._chain(tokens, len(tokens) - 1, salt):
            block = self._blocks.get(key)
            if block is None or block.tokens != piece:
                break
            found.append(block)
        return Prefix(tuple(found))

    def restore(self, slot: int, prefix: Prefix) -> None:
        """Write a prefix into an empty slot, which then holds its positions.

        Raises:
            ValueError: the slot is not empty, or has no such room.
        """
        if self._pool.length(slot):
            raise ValueError(f"slot {slot} holds {self._pool.length(slot)} positions; a prefix needs an empty one")
        at = 0
        for block in prefix.blocks:
            self._pool.write(slot, at, block.tensors)
            at += len(block.tokens)
        self._pool.extend(slot, at)
        self._use(prefix.blocks)

    def keep(self, slot: int, tokens: Sequence[int], salt: str = "") -> None:
        """Remember the full blocks of what a slot holds; `tokens` are those of its positions, or more."""
        if not self._capacity:
            return
        kept: list[Block] = []
        parent = b""
        at = 0
        for key, piece in self._chain(tokens, min(len(tokens), self._pool.length(slot)), salt):
            block = self._blocks.get(key)
            if block is None:
                block = self._add(key, parent, piece, self._pool.read(slot, at, at + len(piece)))
            kept.append(block)
            parent = key
            at += len(piece)
        self._use(kept)
        while self._size > self._capacity:
            _, oldest = self._blocks.popitem(last=False)
            self._size -= oldest.size

    def check_integrity(self) -> None:
        """Check that the books agree.

        Raises:
            PoolCorrupted: sizes do not add up, too much is kept, or a block is kept without the one before it.
        """
        if self._size != sum(block.size for block in self._blocks.values()) or self._size > self._capacity:
            raise PoolCorrupted(f"the prefix cache claims {self._size} bytes of {self._capacity}")
        for key, block in self._blocks.items():
            if block.key != key or (block.parent and block.parent not in self._blocks):
                raise PoolCorrupted(f"block {key.hex()} of the prefix cache has lost what comes before it")

    def _add(self, key: bytes, parent: bytes, tokens: array[int], tensors: tuple[Tensor, ...]) -> Block:
        block = Block(key, parent, tokens, tensors, sum(each.numel() * each.element_size() for each in tensors))
        self._blocks[key] = block
        self._size += block.size
        return block

    def _use(self, blocks: Sequence[Block]) -> None:
        """Note that these were used: ends first, so that a beginning outlives what follows it."""
        for block in reversed(blocks):
            if block.key in self._blocks:
                self._blocks.move_to_end(block.key)

    def _chain(self, tokens: Sequence[int], end: int, salt: str) -> Iterator[tuple[bytes, array[int]]]:
        """Yield key and tokens of each full block of the first `end` tokens."""
        key = blake2b(salt.encode(), person=b"salt", digest_size=_DIGEST_BYTES).digest()
        for at in range(0, end - self._block_tokens + 1, self._block_tokens):
            piece = array("I", tokens[at : at + self._block_tokens])
            key = blake2b(piece.tobytes(), key=key, digest_size=_DIGEST_BYTES).digest()
            yield key, piece
