"""Triton's interpreter, without the work that it does again and again.

While a kernel is interpreted the members of `triton.language` are replaced by ones that compute, and put back after the
launch. The interpreter replaces them all anew at each call of one kernel's function by another, where they have been
replaced already: that alone was more than half of the time of an interpreted test. It knows no kernel of ours.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any


def patch_once_a_launch() -> None:
    """Has the interpreter do it once in a launch. Does nothing where triton is missing, or has no such thing."""
    if find_spec("triton") is None:
        return
    from triton.runtime import interpreter

    patch = getattr(interpreter, "_patch_lang", None)
    if patch is not None and not isinstance(patch, _Once):
        interpreter._patch_lang = _Once(patch, (interpreter.tl, interpreter.tl.core))


class _Once:
    """In the place of the `patch` of the interpreter, which replaces what a function sees of `modules`."""

    def __init__(self, patch: Callable[[Any], Any], modules: tuple[Any, ...]) -> None:
        self._patch = patch
        self._modules = modules
        self._seen: dict[Any, frozenset[int]] = {}
        self._patched: set[int] = set()

    def __call__(self, function: Any) -> _Undo:
        """Replace what has not been replaced in this launch. What it returns is for the launch to put back."""
        if function not in self._seen:
            values = list(function.__globals__.values())
            self._seen[function] = frozenset(id(each) for each in self._modules if any(each is it for it in values))
        seen, is_launch = self._seen[function], not self._patched
        if not is_launch and seen <= self._patched:
            return _Undo(lambda: None)
        undo = self._patch(function)
        self._patched |= seen

        def put_back() -> None:
            undo.restore()
            if is_launch:
                self._patched.clear()

        return _Undo(put_back)


class _Undo:
    """What the interpreter asks to put back what was replaced."""

    def __init__(self, restore: Callable[[], Any]) -> None:
        self.restore = restore
