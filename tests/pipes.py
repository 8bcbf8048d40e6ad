"""Pipes whose reader has stopped: full from the beginning, so that one more byte finds no room."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def full_pipe() -> Iterator[tuple[int, int]]:
    """Its read end and its write end; writes to that block, as those of a service's standard output do."""
    reading, writing = os.pipe()
    try:
        os.set_blocking(writing, False)
        for size in (4096, 1):
            with suppress(BlockingIOError):
                while True:
                    os.write(writing, b"\n" * size)
        os.set_blocking(writing, True)
        yield reading, writing
    finally:
        for descriptor in (reading, writing):
            with suppress(OSError):  # closed by the test
                os.close(descriptor)
