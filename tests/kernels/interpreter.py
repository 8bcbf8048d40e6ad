"""Triton's interpreter, several times as fast.

While a kernel is interpreted the members of `triton.language` are replaced by ones that compute, and put back after the
launch. The interpreter replaces them all anew at each call of one device function by another: more than half of the
time of an interpreted test. Half of the rest went into types and shapes, worked out anew for each value, and into sums
in 64 bits for checks of overflow that it leaves out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
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
        _skip_needless_work(interpreter)


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


def _skip_needless_work(interpreter: Any) -> None:
    """Operands of one type need neither a cast nor a broadcast, a number becomes a tensor once for each type, and sums
    are not repeated in 64 bits: whether they overflow is checked with `debug` alone.
    """
    core, builder = interpreter.tl.core, interpreter.interpreter_builder
    tensor, semantic = core.tensor, type(interpreter.interpreter_semantic)
    check_types, broadcast, unwrap = (
        semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value, core._unwrap_if_constexpr
    )  # fmt: skip
    wide = frozenset(("int1", "int32", "uint32", "int64", "uint64", "fp32", "fp64"))
    numbers: dict[Any, Any] = {}

    def binary_op_type_checking_impl(self: Any, lhs: Any, rhs: Any, *flags: bool, **named: bool) -> tuple[Any, Any]:
        operands = lhs, rhs
        is_tensor = isinstance(lhs, tensor), isinstance(rhs, tensor)
        if all(is_tensor) and lhs.type.name == rhs.type.name and lhs.dtype.name in wide:
            return operands  # a quotient of narrower floats would be wider
        if not any(is_tensor) or all(is_tensor):
            both: tuple[Any, Any] = check_types(self, lhs, rhs, *flags, **named)
            return both
        at, number = (0, rhs) if is_tensor[0] else (1, lhs)
        key = operands[at].type.name, at, type(number), repr(number), flags, *named.items()
        if key not in numbers:
            checked = check_types(self, lhs, rhs, *flags, **named)
            if checked[at] is not operands[at]:
                return checked[0], checked[1]
            numbers[key] = checked[1 - at]
        return (lhs, numbers[key]) if at == 0 else (numbers[key], rhs)

    def broadcast_impl_value(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        a, b = (each.type.shape.values if each.type.is_block() else None for each in (lhs, rhs))
        if a == b:
            return lhs, rhs
        cast: tuple[Any, Any] = broadcast(self, lhs, rhs)
        return cast

    def unwrap_if_constexpr(value: Any) -> Any:
        return value if type(value) is tensor else unwrap(value)

    def patch_attr(target: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        function, given = getattr(member, "__wrapped__", member), interpreter.interpreter_semantic

        def call(*arguments: Any, **named: Any) -> Any:
            named["_semantic"] = given
            return function(*arguments, **named)

        scope.set_attr(target, name, call)

    semantic.binary_op_type_checking_impl = binary_op_type_checking_impl
    semantic.broadcast_impl_value = broadcast_impl_value
    core._unwrap_if_constexpr = unwrap_if_constexpr
    core.block_type.to_ir = lambda self, _: self  # the builder's type is equal
    interpreter._patch_attr = patch_attr
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)


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
