"""Makes each call of one `Component` of a running service raise: a shared file says which, and when.

`outrider.service.best_effort.Component` is what services use; the condition `broken_components` puts this into one.
"""

from __future__ import annotations

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

Result = TypeVar("Result")


def break_component(file: Path, component: str, how: str) -> None:
    """Let that component fail from now on, and no other."""
    new = file.with_suffix(".new")
    new.write_text(f"{how} {component}", encoding="utf-8")
    os.replace(new, file)


def install() -> None:
    """Let the components of this process obey the file that the environment names."""
    file = Path(os.environ[FILE])
    honest = Component.run

    def run(self: Component, call: Callable[[], Result], default: Result) -> Result:
        def broken() -> Result:
            how, _, component = file.read_text(encoding="utf-8").partition(" ")
            fails = component in (self.name, EVERY)
            if fails and how == INSTEAD:
                raise RuntimeError(f"{self.name} is out of order")
            result = call()
            if fails:
                raise RuntimeError(f"{self.name} is out of order")
            return result

        return honest(self, broken, default)

    Component.run = run  # type: ignore[method-assign]
