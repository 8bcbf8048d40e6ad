"""The prefix cache: sequences that begin alike share the blocks of their common prefix."""

from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b

from outrider.runtime.kv_cache import KVPool

_DIGEST_BYTES = 32  # collisions cannot be found, even on purpose


class PrefixCache:
    """The cached prefixes of a pool. `find` may be called from any thread, the other methods from the pool's thread.

    Attributes:
        enabled: whether prefixes are cached.
    """

    def __init__(self, pool: KVPool, *, enabled: bool = True) -> None:
        self._pool = pool
        self.enabled = enabled

    def find(self, tokens: Sequence[int], salt: str = "") -> int:
        """The length of the cached prefix of `tokens`; always below `len(tokens)`, since the last token must run."""
        return len(self._cached(tokens, salt)) * self._pool.block_tokens

    def adopt(self, slot: int, tokens: Sequence[int], salt: str = "") -> int:
        """Lets an empty slot hold the longest cached prefix of `tokens` without the last. Returns its length.

        Raises:
            ValueError: the slot is not empty.
        """
        blocks = self._cached(tokens, salt)
        length = len(blocks) * self._pool.block_tokens
        self._pool.share(slot, blocks, length)
        return length

    def keep(self, slot: int, tokens: Sequence[int], salt: str = "") -> None:
        """Caches the full blocks of a slot. `tokens` are those of its positions, or more."""
        if self.enabled:
            table = self._pool.block_table(slot)
            for block, key in zip(table, self._keys(tokens, self._pool.length(slot), salt), strict=False):
                self._pool.blocks.cache(block, key)

    def _cached(self, tokens: Sequence[int], salt: str) -> list[int]:
        found: list[int] = []
        if self.enabled:
            for key in self._keys(tokens, len(tokens) - 1, salt):
                block = self._pool.blocks.find(key)
                if block is None:
                    break
                found.append(block)
        return found

    def _keys(self, tokens: Sequence[int], end: int, salt: str) -> Iterator[bytes]:
        """Yields the key of each full block of the first `end` tokens."""
        count = self._pool.block_tokens
        key = blake2b(salt.encode(), person=b"salt", digest_size=_DIGEST_BYTES).digest()
        for at in range(0, min(end, len(tokens)) - count + 1, count):
            key = blake2b(array("I", tokens[at : at + count]).tobytes(), key=key, digest_size=_DIGEST_BYTES).digest()
            yield key
