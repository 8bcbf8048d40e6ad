"""Who holds which block of a KV pool: counts of holders, and which unheld block goes next.

A block is held by one sequence or several, or by none. One that nobody holds may still be known by a key for what lies
in it, and is found again until somebody needs the room. What was not used for longest goes first, and before that what
nobody knows.

Blocks are promised in runs: a sequence that grows into its run lies in one piece of memory, which attention likes. A
promise is soft: where nothing else is left, promised blocks are given to others.

It knows numbers and keys, and nothing of memory, tokens or sequences. Every method takes time in the blocks it is told
of, save `check_integrity`.
"""

from collections import OrderedDict
from collections.abc import Iterable

from outrider.runtime.errors import PoolCorrupted, PoolExhausted

# How many blocks are looked at for a run, over its length.
_LOOKS = 4
_LOOKS_AT_LEAST = 64


class Blocks:
    """The books of `count` blocks, numbered from 0. One thread owns them; `find` may be called from any."""

    def __init__(self, count: int) -> None:
        if count < 1:
            raise ValueError(f"count is {count}; a pool has at least 1 block")
        self.count = count
        self._holders = [0] * count
        # Blocks that nobody holds, those to go next first: of no run, and of a promised one.
        self._open = OrderedDict.fromkeys(range(count))
        self._promised: OrderedDict[int, None] = OrderedDict()
        self._in_promise = bytearray(count)
        self._keys: dict[int, bytes] = {}
        self._known: dict[bytes, int] = {}
        self._cursor = 0  # where the search for a run goes on
        self._clock = 0  # how many times a known block was let go
        self._let_go = [0] * count  # and when each last was

    @property
    def unheld(self) -> int:
        """How many can be taken."""
        return len(self._open) + len(self._promised)

    def holders(self, block: int) -> int:
        """How many hold a block."""
        return self._holders[block]

    # -------------------------------------------------------------------------------------------------------- holding

    def take(self, wanted: int | None = None) -> int:
        """Takes a block that nobody holds: `wanted`, or else the one to go next. What was in it is known no more.

        Raises:
            PoolExhausted: all are held.
        """
        if wanted is not None and self._holders[wanted] == 0:
            block = wanted
            del self._shelf(block)[block]
        elif self._open:
            block, _ = self._open.popitem(last=False)
        elif self._promised:
            block, _ = self._promised.popitem(last=False)
        else:
            raise PoolExhausted(f"all {self.count} blocks of the KV pool are held")
        self.forget(block)
        self._holders[block] = 1
        return block

    def hold(self, block: int) -> None:
        """Holds a block once more; what is in it stays."""
        if self._holders[block] == 0:
            del self._shelf(block)[block]
        self._holders[block] += 1

    def release(self, block: int) -> None:
        """Lets go of a block.

        Raises:
            ValueError: nobody holds it.
        """
        if self._holders[block] < 1:
            raise ValueError(f"block {block} is released, and nobody holds it")
        self._holders[block] -= 1
        if self._holders[block] == 0:
            if block in self._keys:
                self._clock += 1
                self._let_go[block] = self._clock
            self._put(block)

    # ------------------------------------------------------------------------------------------------------- contents

    def name(self, block: int, key: bytes) -> None:
        """Says that what lies in a block will be asked for by `key`; the first block of a key keeps it."""
        if key not in self._known:
            self.forget(block)
            self._known[key] = block
            self._keys[block] = key

    def forget(self, block: int) -> None:
        """What lies in a block is to be found no more."""
        key = self._keys.pop(block, None)
        if key is not None:
            del self._known[key]

    def find(self, key: bytes) -> int | None:
        """The block of a key, held or not; None where it is gone or never was."""
        return self._known.get(key)

    # ----------------------------------------------------------------------------------------------------------- runs

    def promise(self, count: int) -> int | None:
        """Promises `count` blocks in a row that nobody holds or was promised, and that were not used of late.

        Returns:
            The first of them, or None where no such run was met nearby.
        """
        start = at = self._cursor
        for _ in range(_LOOKS * count + _LOOKS_AT_LEAST):
            if at >= self.count:
                start = at = 0
            if not self._is_open(at):
                start = at + 1
            at += 1
            if at - start == count:
                self._cursor = at
                for block in range(start, at):
                    self._in_promise[block] = 1
                    self._promised[block] = self._open.pop(block)
                return start
        return None

    def withdraw(self, promised: Iterable[int]) -> None:
        """Takes promises back."""
        for block in promised:
            self._in_promise[block] = 0
            if self._holders[block] == 0:
                del self._promised[block]
                # They were to go before others when they were promised, and nothing has used them since.
                self._open[block] = None
                self._open.move_to_end(block, last=False)

    def _is_open(self, block: int) -> bool:
        if self._holders[block] or self._in_promise[block]:
            return False
        return block not in self._keys or self._clock - self._let_go[block] >= len(self._open) // 2

    def _shelf(self, block: int) -> OrderedDict[int, None]:
        return self._promised if self._in_promise[block] else self._open

    def _put(self, block: int) -> None:
        shelf = self._shelf(block)
        shelf[block] = None
        if block not in self._keys:
            shelf.move_to_end(block, last=False)

    # ------------------------------------------------------------------------------------------------------ integrity

    def check_integrity(self, tables: Iterable[Iterable[int]]) -> None:
        """Checks the books against those who hold blocks, each with the blocks it holds.

        Raises:
            PoolCorrupted: a block is lost, is owned by more or fewer than hold it, or is known under two names.
        """
        held = [0] * self.count
        for table in tables:
            for block in table:
                held[block] += 1
        for block in range(self.count):
            if held[block] != self._holders[block]:
                raise PoolCorrupted(f"block {block} counts {self._holders[block]} holders, and {held[block]} hold it")
            shelves = (block in self._open) + (block in self._promised)
            if shelves != (held[block] == 0) or (shelves and block not in self._shelf(block)):
                raise PoolCorrupted(f"block {block} has {held[block]} holders and lies on {shelves} shelves")
        if len(self._open) + len(self._promised) > self.count:
            raise PoolCorrupted("a block that does not exist can be taken")
        if {key: block for block, key in self._keys.items()} != self._known:
            raise PoolCorrupted("a block is known by a key that does not lead to it")
