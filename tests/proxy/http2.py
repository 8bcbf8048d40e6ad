"""What an eavesdropper reads off HTTP/2 without understanding a word: sizes of DATA frames, and when they came.

Under TLS the sizes of records say the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from tests.proxy.flow import Segment, Way

_HEADER, _DATA = 9, 0
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


@dataclass(frozen=True, slots=True)
class DataFrame:
    """A DATA frame that held something: `size` is that of its payload, in bytes; `seconds` when its last byte came."""

    seconds: float
    size: int


def data_frames(segments: Iterable[Segment], way: Way) -> list[DataFrame]:
    """The DATA frames of all connections in one direction. Connections that had begun before must have been silent."""
    buffers: dict[int, bytes] = defaultdict(bytes)
    frames = []
    for segment in segments:
        if segment.way is not way:
            continue
        buffer = buffers[segment.connection] + segment.data
        if buffer.startswith(_PREFACE):
            buffer = buffer[len(_PREFACE) :]
        while len(buffer) >= _HEADER:
            length, kind = int.from_bytes(buffer[:3], "big"), buffer[3]
            if len(buffer) < _HEADER + length:
                break
            if kind == _DATA and length:
                frames.append(DataFrame(segment.seconds, length))
            buffer = buffer[_HEADER + length :]
        buffers[segment.connection] = buffer
    return frames
