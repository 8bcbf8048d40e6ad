"""Slow a service's steps down, so that a test can act in the middle of a text.

While the file that `OUTRIDER_TEST_STEP_SECONDS` names exists, each step takes the number of seconds it holds.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

STEP_SECONDS = "OUTRIDER_TEST_STEP_SECONDS"
_LOOK_S = 0.01


@contextmanager
def slow_steps(file: Path, seconds: float) -> Iterator[None]:
    """Each pass takes so long meanwhile; may be within another one."""
    before = file.read_bytes() if file.exists() else None
    _write(file, str(seconds).encode())
    try:
        yield
    finally:
        if before is None:
            file.unlink()
        else:
            _write(file, before)


def wait_out() -> None:
    """Returns when a pass may end that has run just now."""
    file, since = Path(os.environ[STEP_SECONDS]), time.monotonic()
    while time.monotonic() - since < _seconds(file):
        time.sleep(_LOOK_S)


def _seconds(file: Path) -> float:
    try:
        return float(file.read_bytes())
    except FileNotFoundError:
        return 0.0


def _write(file: Path, content: bytes) -> None:
    new = file.with_suffix(".new")
    new.write_bytes(content)
    os.replace(new, file)
