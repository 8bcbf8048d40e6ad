"""Slow a verifier's steps down, or hold them up, so that a test can act in the middle of a text.

While the file that `OUTRIDER_TEST_STEP_SECONDS` names exists, each step takes the number of seconds it holds. A line
in the log says when one waits.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import structlog

STEP_SECONDS = "OUTRIDER_TEST_STEP_SECONDS"
SLOW_STEP = "slow step"
_LOOK_S = 0.01

_log = structlog.get_logger()


@contextmanager
def slow_steps(file: Path, seconds: float) -> Iterator[None]:
    """Let each step take so long meanwhile; may be within another such block."""
    before = file.read_bytes() if file.exists() else b"0"
    _write(file, str(seconds).encode())
    try:
        yield
    finally:
        _write(file, before)


def install() -> None:
    """Slow down the verifier that this process is about to become."""
    from verifier_service.engine import VerifierEngine

    forward = VerifierEngine.forward

    def slow_forward(self: VerifierEngine, work: Any) -> Any:
        output = forward(self, work)
        _wait(Path(os.environ[STEP_SECONDS]))
        return output

    VerifierEngine.forward = slow_forward  # type: ignore[method-assign]


def _wait(file: Path) -> None:
    since = time.monotonic()
    if _seconds(file):
        _log.info(SLOW_STEP)
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
