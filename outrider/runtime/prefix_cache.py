"""Finds the blocks of text that begins alike, so that it is not run again.

A block of a pool is known by the block before it and by its own tokens, so what is found has the same tokens from the
first on. Salts keep apart those who must not learn what others have asked: a prefix is found under its own salt alone.
Blocks are shared, not copied; those that no sequence holds any more stay until the pool needs the room.

It knows the pool, and nothing of models, passes or who asks.
"""

from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b

from outrider.runtime.kv_pool import KVPool

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
            table = self._pool.table(slot)
            for block, key in zip(table, self._keys(tokens, self._pool.length(slot), salt), strict=False):
                self._pool.blocks.name(block, key)

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
