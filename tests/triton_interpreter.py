"""Triton's interpreter, in some two thirds of its time."""

import os
from collections.abc import Callable
from typing import Any


def patch_language_once() -> None:
    """Patch Triton's language at the call of a kernel alone.

    The interpreter searches the language for functions to patch at each call of a device function as well, where it
    finds none: the kernel that calls it has patched them.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    try:
        import triton.language as tl
        from triton.runtime import interpreter
    except ImportError:  # this platform has no Triton
        return
    patch: Callable[[Any], Any] = interpreter._patch_lang

    def patch_once(function: Any) -> Any:
        languages = [each for each in function.__globals__.values() if each is tl or each is tl.core]
        is_patched = not any(tl.core.is_builtin(each.load) for each in languages)
        return interpreter._LangPatchScope() if is_patched else patch(function)

    interpreter._patch_lang = patch_once
