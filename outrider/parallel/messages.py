"""What ranks tell each other, as bytes. It knows layouts and blocks, and nothing of connections."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar

import numpy as np

from outrider.runtime.paged import Layout

_SHAPE = struct.Struct("!5I")
_BLOCK = np.dtype(np.int64)

TOKEN_BYTES = 16
_GREETING = struct.Struct(f"!I{TOKEN_BYTES}s")


class Kind(IntEnum):
    """Of a frame. `FACTS` goes both ways; `WOE` says why its sender ends; the rest are rank 0's."""

    FACTS = 1
    PASS = 2
    COPY = 3
    END = 4
    WOE = 5


@dataclass(frozen=True, slots=True)
class Greeting:
    """The first bytes on a connection, from a follower: which rank it is, and that rank 0 told it where to come."""

    rank: int
    token: bytes

    SIZE: ClassVar[int] = _GREETING.size

    def pack(self) -> bytes:
        """`SIZE` bytes."""
        return _GREETING.pack(self.rank, self.token)

    @staticmethod
    def unpack(data: bytes) -> "Greeting":
        """What `pack` was made of."""
        return Greeting(*_GREETING.unpack(data))


def pack_pass(layout: Layout) -> tuple[bytes, bytes]:
    """A pass, in two parts."""
    return _SHAPE.pack(*layout.shape), layout.pack()


def unpack_pass(data: bytes) -> Layout:
    """What `pack_pass` was made of.

    Raises:
        ValueError: that is not what it is.
    """
    T, R, S, P, W = _SHAPE.unpack_from(data)
    return Layout.unpack((T, R, S, P, W), data[_SHAPE.size :])


def pack_copy(source: Sequence[int], target: Sequence[int]) -> tuple[bytes, bytes]:
    """A copy of blocks, in two parts of one size."""
    return np.array(source, _BLOCK).tobytes(), np.array(target, _BLOCK).tobytes()


def unpack_copy(data: bytes) -> tuple[list[int], list[int]]:
    """What `pack_copy` was made of."""
    blocks = np.frombuffer(data, _BLOCK).tolist()
    half = len(blocks) // 2
    return blocks[:half], blocks[half:]
