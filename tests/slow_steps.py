"""Slows a verifier's steps down, or holds them up, so that a test can act in the middle of a text.

While the file that `TEST_STEP_SECONDS` names exists, each step takes the number of seconds in it. The log says
when one waits.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import structlog

STEP_SECONDS = "TEST_STEP_SECONDS"
SLOW_STEP = "slow step"

_log = structlog.get_logger()


@contextmanager
def slow_steps(file: Path, seconds: float) -> Iterator[None]:
    """Let each step take so long meanwhile; may be within another such block."""
    before = file.read_text() if file.exists() else "0"
    _write(file, str(seconds))
    try:
        yield
    finally:
        _write(file, before)


def _write(file: Path, content: str) -> None:
    new = file.with_suffix(".new")
    new.write_text(content)
    os.replace(new, file)


def install() -> None:
    """Slow down the verifier that this process is about to become."""
    from verifier_service.engine import VerifierEngine

    forward = VerifierEngine.forward

    def slow_forward(self: VerifierEngine, work: Any) -> Any:
        output = forward(self, work)
        since = time.monotonic()
        if _seconds():
            _log.info(SLOW_STEP)
        while time.monotonic() - since < _seconds():
            time.sleep(0.01)
        return output

    VerifierEngine.forward = slow_forward  # type: ignore[method-assign]


def _seconds() -> float:
    try:
        return float(Path(os.environ[STEP_SECONDS]).read_text())
    except FileNotFoundError:
        return 0.0
