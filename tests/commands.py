"""A command as its user runs it, with the processes that it leaves behind, and a pipe that is full."""

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.project.tree import ROOT

linux = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes in /proc")


class Command:
    """`python -m MODULE ARGUMENTS...` as a process. A mark in its environment finds every process it started."""

    def __init__(self, module: str, *arguments: str, **environment: str) -> None:
        self._mark = {"TEST_OF_OUTRIDER": str(uuid.uuid4())}
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=ROOT,
            env=os.environ | self._mark | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def ended(self, within: float = 110.0) -> tuple[int, str, str]:
        """Exit code, stdout and stderr."""
        try:
            out, err = self.process.communicate(timeout=within)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        return self.process.returncode, out, err

    def left_behind(self) -> list[str]:
        """Command lines of processes that it started and that still run."""
        (mark,) = ("=".join(item).encode() for item in self._mark.items())
        marked = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended, or belongs to another user
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    marked.append((folder / "cmdline").read_text().replace("\0", " "))
        return marked


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
