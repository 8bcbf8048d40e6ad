"""Makes each call of one `Component` of a running service raise: a shared file has its name, and when.

`outrider.service.best_effort.Component` guards the code that must not fail a text; the fault `broken_components`
installs this in a service.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from outrider.service.best_effort import Component

FILE = "TEST_BROKEN"
INSTEAD, AFTER = "instead", "after"
"""The call raises without running, or once it has run."""
EVERY = "*"
"""In place of a name: all components at once."""

Result = TypeVar("Result")


def break_component(file: Path, component: str, when: str) -> None:
    """Let that component fail from now on, and no other."""
    new = file.with_suffix(".new")
    new.write_text(f"{when} {component}", encoding="utf-8")
    os.replace(new, file)


def install() -> None:
    """Let the components of this process obey the file that the environment names."""
    file = Path(os.environ[FILE])
    original = Component.run

    def run(self: Component, call: Callable[[], Result], default: Result) -> Result:
        def broken() -> Result:
            when, _, component = file.read_text(encoding="utf-8").partition(" ")
            fails = component in (self.name, EVERY)
            result = default if fails and when == INSTEAD else call()
            if fails:
                raise RuntimeError(f"{self.name} is out of order")
            return result

        return original(self, broken, default)

    Component.run = run  # type: ignore[method-assign]
