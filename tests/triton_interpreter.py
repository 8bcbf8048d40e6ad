"""Triton's interpreter, several times as fast.

It computes with NumPy, but finds out at each operation what the types of the operands make of it: some thirty calls of
Python around one of NumPy. Here it does so for the first operation on operands of these types (which include shapes);
the following ones call NumPy at once. And its language stays patched, where it patched it anew for each launch, and for
each call of a device function.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np

Call = Callable[..., Any]
Plan = tuple[Call, Call, list[Call]]
"""What makes the result of an array, what computes the array, and what makes its arguments of the operands."""

_OF_TENSORS: dict[str, Call] = {
    "__add__": np.add, "__radd__": np.add, "__sub__": np.subtract, "__rsub__": lambda a, b: b - a,
    "__mul__": np.multiply, "__rmul__": np.multiply, "__truediv__": np.divide, "__rtruediv__": lambda a, b: b / a,
    "__floordiv__": lambda a, b: (a - np.fmod(a, b)) // b, "__mod__": np.fmod,
    "__and__": np.bitwise_and, "__rand__": np.bitwise_and, "__or__": np.bitwise_or, "__ror__": np.bitwise_or,
    "__xor__": np.bitwise_xor, "__rxor__": np.bitwise_xor, "__lshift__": np.left_shift, "__rshift__": np.right_shift,
    "__lt__": np.less, "__le__": np.less_equal, "__gt__": np.greater, "__ge__": np.greater_equal,
    "__eq__": np.equal, "__ne__": np.not_equal,
}  # fmt: skip
_OF_TWO: dict[str, Call] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "minimum": np.minimum, "maximum": np.maximum,
    "umulhi": lambda a, b: (a.astype(np.uint64) * b.astype(np.uint64) >> 32).astype(np.uint32),
}  # fmt: skip
_OF_ONE: dict[str, Call] = {"exp2": np.exp2, "log2": np.log2, "exp": np.exp, "log": np.log}
_ENCODED = ("bf16", "fp8")  # in integers: to convert one is no cast of NumPy's


def patch_language_once() -> None:
    """Patch Triton's language for good. Does nothing where kernels are compiled, and without Triton."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    try:
        from triton.runtime import interpreter
    except ImportError:  # this platform has no Triton
        return
    if interpreter._patch_lang.__module__ == __name__:
        return
    language, builder = interpreter.tl, interpreter.interpreter_builder
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": language, "core": language.core}))
    interpreter._patch_lang = lambda _: interpreter._LangPatchScope()  # it has nothing to undo
    if not builder.options.debug:  # only then are sums in 64 bits compared with those in 32
        builder.options = replace(builder.options, sanitize_overflow=False)
    _Shortcuts(interpreter).install()


class _NotInShort(Exception):
    """Operands that are left to the interpreter."""


def _data(operand: Any) -> Any:
    return operand.handle.data


def _always(array: np.ndarray) -> Call:
    return lambda _: array


def _casting(dtype: Any) -> Call:
    return lambda operand: operand.handle.data.astype(dtype)


class _Shortcuts:
    """Operations of the language that remember, by the types of their operands, what the interpreter does."""

    def __init__(self, interpreter: Any) -> None:
        self.interpreter = interpreter
        self.language, self.semantic = interpreter.tl, interpreter.interpreter_semantic
        self.tensor, self.constexpr = self.language.tensor, self.language.constexpr

    def install(self) -> None:
        self._remember_types()
        for name, compute in _OF_TENSORS.items():
            setattr(self.tensor, name, self._remembered(getattr(self.tensor, name), self._of_two(compute)))
        self.tensor.to = self._remembered(self.tensor.to, self._of_cast)
        self.tensor.__getitem__ = self._remembered(self.tensor.__getitem__, self._of_index)
        plans = {
            **{name: self._of_two(compute) for name, compute in _OF_TWO.items()},
            **{name: self._of_one(compute) for name, compute in _OF_ONE.items()},
            "where": self._of_where,
            "arange": self._of_constant,
            "full": self._of_constant,
        }
        for name, plan in plans.items():
            self._replace(name, self._remembered(getattr(self.language, name), plan))
        load = self._remembered(self.language.load, self._of_load)
        store = self._remembered(self.language.store, self._of_store)
        self._replace("load", lambda pointer, mask=None, other=None, **named: load(pointer, mask, other, **named))
        self._replace("store", lambda pointer, value, mask=None, **named: store(pointer, value, mask, **named))

    def _replace(self, name: str, function: Call) -> None:
        for module in (self.language, self.language.core, self.language.math):
            if hasattr(module, name):
                setattr(module, name, function)

    def _remember_types(self) -> None:
        """Work out the NumPy dtype of each type, and the shape of its values, once; a type's name identifies it."""
        numpy_dtype, make_tensor = self.interpreter._get_np_dtype, self.tensor.__init__
        dtypes: dict[str, Any] = {}
        shapes: dict[str, tuple[Any, Any]] = {}

        def get_np_dtype(kind: Any) -> Any:
            if kind.name not in dtypes:
                dtypes[kind.name] = numpy_dtype(kind)
            return dtypes[kind.name]

        def init(self: Any, handle: Any, kind: Any) -> None:
            if kind.name not in shapes:
                make_tensor(self, handle, kind)
                shapes[kind.name] = (self.numel, self.shape)
            self.handle, self.type, self.dtype = handle, kind, kind.scalar
            self.numel, self.shape = shapes[kind.name]

        self.interpreter._get_np_dtype = get_np_dtype
        self.tensor.__init__ = init

    def _remembered(self, plain: Call, plan: Call) -> Call:
        """Return `plain` with a memory. `plan` makes the plan of the first result and its operands."""
        plans, tensor, constexpr = dict[Any, Plan | None](), self.tensor, self.constexpr

        def call(*given: Any, **options: Any) -> Any:
            operands = [each.value if type(each) is constexpr else each for each in given]  # which may be a tensor
            # Of numbers the representation: 0, 0.0, -0.0 and False are equal.
            types = [each.type.name if type(each) is tensor else (type(each), repr(each)) for each in operands]
            if options:
                options.pop("_semantic", None)
                types += options.items()
            key = tuple(types)
            try:
                known = plans[key]
            except KeyError:
                result = plain(*given, **options)
                plans[key] = self._plan_of(plan, result, operands, options)
                return result
            if known is None:
                return plain(*given, **options)
            make, compute, prepare = known
            return make(compute(*[get(each) for get, each in zip(prepare, operands, strict=False)]))

        return call

    def _plan_of(self, plan: Call, result: Any, operands: list[Any], options: dict[str, Any]) -> Plan | None:
        """Return the plan of an operation if it gives this result; None: it is left to the interpreter."""
        try:
            made: Plan = plan(result, *operands, **options)
        except _NotInShort:
            return None
        if result.handle is None:  # of a store
            return made
        _, compute, prepare = made
        found, wanted = compute(*[get(each) for get, each in zip(prepare, operands, strict=False)]), _data(result)
        is_same = (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
        return made if is_same and np.array_equal(found, wanted, equal_nan=wanted.dtype.kind == "f") else None

    def _maker(self, like: Any) -> Call:
        """Return what makes a tensor of an array, with the types of another."""
        tensor, handle_type = self.tensor, self.interpreter.TensorHandle
        kind, dtype, shape, numel, inner = like.type, like.dtype, like.shape, like.numel, like.handle.dtype

        def make(data: np.ndarray) -> Any:
            handle, made = object.__new__(handle_type), object.__new__(tensor)
            handle.data, handle.dtype, handle.attr = data, inner, {}
            made.handle, made.type, made.dtype, made.shape, made.numel = handle, kind, dtype, shape, numel
            return made

        return make

    def _array_of(self, operand: Any, cast: Any, shape: tuple[int, ...] | None = None) -> Call:
        """Return what gives the array of `operand`, cast as `cast` is, and spread to a shape."""
        if type(operand) is not self.tensor:
            array = _data(cast)
            return _always(array if shape is None else np.ascontiguousarray(np.broadcast_to(array, shape)))
        if operand.dtype == cast.dtype:
            get = _data
        elif any(each in kind.name for kind in (operand.dtype, cast.dtype) for each in _ENCODED):
            raise _NotInShort
        else:
            get = _casting(_data(cast).dtype)
        return get if shape in (None, _data(operand).shape) else lambda given: np.broadcast_to(get(given), shape)

    # ------------------------------------------------------------------------------------------------------------ plans

    def _of_two(self, compute: Call) -> Call:
        def plan(result: Any, a: Any, b: Any, **_: Any) -> Plan:
            if any(type(each) is self.tensor and each.dtype.is_ptr() for each in (a, b)):
                return self._of_pointer(result, a, b)
            casts = self.semantic.binary_op_type_checking_impl(a, b, div_or_mod=compute is np.divide)
            return self._maker(result), compute, [self._array_of(a, casts[0]), self._array_of(b, casts[1])]

        return plan

    def _of_pointer(self, result: Any, pointer: Any, offset: Any) -> Plan:
        if result.dtype != pointer.dtype:  # a comparison, or the pointer is the second
            raise _NotInShort
        size = max(1, pointer.dtype.element_ty.primitive_bitwidth // 8)
        offsets = self._array_of(offset, self.semantic.to_tensor(offset))
        return self._maker(result), lambda a, b: a + size * b.astype(np.uint64), [_data, offsets]

    def _of_one(self, compute: Call) -> Call:
        def plan(result: Any, operand: Any) -> Plan:
            return self._maker(result), compute, [self._array_of(operand, result)]

        return plan

    def _of_constant(self, result: Any, *operands: Any, **named: Any) -> Plan:
        if any(type(each) is self.tensor for each in (*operands, *named.values())):
            raise _NotInShort
        return self._maker(result), lambda: _data(result), []

    def _of_where(self, result: Any, condition: Any, a: Any, b: Any) -> Plan:
        if type(condition) is not self.tensor or condition.dtype.name != "int1":
            raise _NotInShort
        casts = self.semantic.binary_op_type_checking_impl(a, b, True, True)
        return self._maker(result), np.where, [_data, self._array_of(a, casts[0]), self._array_of(b, casts[1])]

    def _of_cast(self, result: Any, operand: Any, *_: Any, bitcast: bool = False, **__: Any) -> Plan:
        if bitcast:
            return self._maker(result), lambda data: data.view(_data(result).dtype), [_data]
        return self._maker(result), lambda data: data, [self._array_of(operand, result)]

    def _of_index(self, result: Any, *_: Any) -> Plan:
        shape = _data(result).shape
        return self._maker(result), lambda data: data.reshape(shape), [_data]

    def _of_load(self, result: Any, pointer: Any, mask: Any, other: Any, **_: Any) -> Plan:
        dtype, shape = _data(result).dtype, _data(result).shape
        load = self.interpreter._interpreter.load
        if not pointer.dtype.is_ptr() or pointer.dtype.element_ty != result.dtype:  # pointers of blocks, or to bool
            raise _NotInShort
        default = self.semantic.cast(self.semantic.to_tensor(0 if other is None else other), result.dtype)
        prepare = [
            self._array_of(pointer, pointer, shape),
            self._mask(mask, shape),
            self._array_of(other, default, shape),
        ]
        return self._maker(result), lambda *arrays: load(*arrays, dtype), prepare

    def _of_store(self, result: Any, pointer: Any, value: Any, mask: Any, **_: Any) -> Plan:
        if not pointer.dtype.is_ptr() or pointer.dtype.element_ty.name == "int1":
            raise _NotInShort
        shape, cast = _data(pointer).shape, self.semantic.cast(self.semantic.to_tensor(value), pointer.dtype.element_ty)
        prepare = [_data, self._array_of(value, cast, shape), self._mask(mask, shape)]
        return lambda _: result, self.interpreter._interpreter.store, prepare

    def _mask(self, mask: Any, shape: tuple[int, ...]) -> Call:
        if mask is None:
            return _always(np.ones(shape, bool))
        if type(mask) is not self.tensor or mask.dtype.name != "int1":
            raise _NotInShort
        return self._array_of(mask, mask, shape)
