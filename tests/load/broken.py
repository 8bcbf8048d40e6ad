"""Makes each call of one `Component` of a running service raise: a shared file says which, and when.

`outrider.service.best_effort.Component` is what services use; `tests.exactness.mutants.faults` puts this into one.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from outrider.service.best_effort import Component

FILE = "OUTRIDER_TEST_BROKEN"
INSTEAD, AFTER = "instead", "after"
"""The call raises in place of what it does, or once it has done it."""
EVERY = "*"
"""In place of a name: all components at once."""

_SIZE = 256

Result = TypeVar("Result")


class Switch:
    """Which component fails, and how. The same file is the same switch in every process."""

    def __init__(self, file: Path) -> None:
        if not file.exists():
            file.write_bytes(bytes(_SIZE))
        with file.open("r+b") as opened:
            self._shared = mmap.mmap(opened.fileno(), _SIZE)

    def set(self, component: str = "", how: str = INSTEAD) -> None:
        """Let that component fail from now on, and no other; none where it is empty."""
        self._shared[:] = f"{how} {component}".encode().ljust(_SIZE, b"\0")

    def how(self, component: str) -> str:
        """Return how this one fails; empty where it does not."""
        how, _, broken = self._shared[:].rstrip(b"\0").decode().partition(" ")
        return how if broken in (component, EVERY) else ""


def install() -> None:
    """Let the components of this process obey the switch that the environment names."""
    switch = Switch(Path(os.environ[FILE]))
    honest = Component.run

    def run(self: Component, call: Callable[[], Result], default: Result) -> Result:
        def broken() -> Result:
            how = switch.how(self.name)
            if how != INSTEAD:
                result = call()
            if how:
                raise RuntimeError(f"{self.name} is out of order")
            return result

        return honest(self, broken, default)

    Component.run = run  # type: ignore[method-assign]
