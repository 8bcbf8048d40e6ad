"""A brake on a service's passes, so that what is to happen in the middle of a text does. It knows no service.

While there is a file where `OUTRIDER_TEST_BRAKE` says, each pass takes so many seconds as it holds, and no longer once
it is gone.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

BRAKE = "OUTRIDER_TEST_BRAKE"
_LOOK_S = 0.01


@contextmanager
def braking(file: Path, seconds: float) -> Iterator[None]:
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


def held_up() -> None:
    """Returns when a pass may end that has run just now."""
    file, since = Path(os.environ[BRAKE]), time.monotonic()
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
