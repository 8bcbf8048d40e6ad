"""Triton's interpreter, several times as fast.

While a kernel is interpreted the members of `triton.language` are replaced by ones that compute, and put back after the
launch. The interpreter replaces them all anew at each call of one device function by another: more than half of the
time of an interpreted test. A third of the rest went into types and shapes, worked out anew for each value.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any


def patch_once_a_launch() -> None:
    """Make the interpreter patch `triton.language` once a launch. Does nothing where triton is missing or differs."""
    if find_spec("triton") is None:
        return
    from triton.runtime import interpreter

    patch = getattr(interpreter, "_patch_lang", None)
    if patch is not None and not isinstance(patch, _Once):
        interpreter._patch_lang = _Once(patch, (interpreter.tl, interpreter.tl.core))
        _remember_types(interpreter)


def _remember_types(interpreter: Any) -> None:
    """Work out the NumPy dtype of each type, and the shape of its values, once; a type is identified by its name."""
    core, numpy_dtype = interpreter.tl.core, interpreter._get_np_dtype
    make_tensor, with_element = core.tensor.__init__, core.block_type.with_element_ty
    dtypes: dict[str, Any] = {}
    shapes: dict[str, tuple[Any, Any]] = {}
    blocks: dict[tuple[str, str], Any] = {}

    def get_np_dtype(type_: Any) -> Any:
        name = type_.name
        if name not in dtypes:
            dtypes[name] = numpy_dtype(type_)
        return dtypes[name]

    def init(self: Any, handle: Any, kind: Any) -> None:
        name = kind.name
        if name not in shapes:
            make_tensor(self, handle, kind)
            shapes[name] = (self.numel, self.shape)
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.numel, self.shape = shapes[name]

    def with_element_ty(self: Any, element: Any) -> Any:
        names = (self.name, element.name)
        if names not in blocks:
            blocks[names] = with_element(self, element)
        return blocks[names]

    interpreter._get_np_dtype = get_np_dtype
    core.tensor.__init__ = init
    core.block_type.with_element_ty = with_element_ty


class _Once:
    """Replaces the interpreter's `patch`, which patches the `modules` that a function refers to."""

    def __init__(self, patch: Callable[[Any], Any], modules: tuple[Any, ...]) -> None:
        self._patch = patch
        self._modules = modules
        self._seen: dict[Any, frozenset[int]] = {}
        self._patched: set[int] = set()

    def __call__(self, function: Any) -> SimpleNamespace:
        """Patch modules that this launch has not patched yet. The launch calls `restore` of the result at its end."""
        if function not in self._seen:
            values = list(function.__globals__.values())
            self._seen[function] = frozenset(id(each) for each in self._modules if any(each is it for it in values))
        seen, is_launch = self._seen[function], not self._patched
        if not is_launch and seen <= self._patched:
            return SimpleNamespace(restore=lambda: None)
        undo = self._patch(function)
        self._patched |= seen

        def put_back() -> None:
            undo.restore()
            if is_launch:
                self._patched.clear()

        return SimpleNamespace(restore=put_back)
