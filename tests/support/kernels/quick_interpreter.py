"""Triton's interpreter without what it does again and again, and with products whose bits are the same everywhere."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from types import FunctionType
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def patch_language_once() -> None:
    """Leave out of a launch what takes most of its time and changes nothing.

    Interpreted functions are put in the place of the language's once, not in each call of a function. What follows from
    a shape or a dtype alone is kept. Sums and products of integers are not made a second time, in 64 bits, for a check
    of their bounds that Triton makes in its debug mode only.

    Products of blocks are those of `_dot`.
    """
    interpreter._patch_lang = _Patches(interpreter._patch_lang)
    interpreter._get_np_dtype = _NumpyDtypes(interpreter._get_np_dtype)
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)
    type(builder).create_dot = _dot(type(builder).create_dot)
    tl.tensor.__init__ = _init_tensor
    tl.block_type.__init__ = _InitBlockType(tl.block_type.__init__)
    tl.block_type.__eq__ = _are_equal
    semantics = type(interpreter.interpreter_semantic)
    semantics.broadcast_impl_value = _broadcasting(semantics.broadcast_impl_value)


def _dot(create_dot: Callable[..., Any]) -> Callable[..., Any]:
    """Triton's product of blocks, in float64 and rounded once where it is one of float32.

    Which order NumPy's library adds float32 in follows from a block's shape and from the CPU, so that a row would have
    other bits in a block of another one.
    """

    def dot(builder: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        if not (a.data.dtype == b.data.dtype == d.data.dtype == np.float32):
            return create_dot(builder, a, b, d, *options)
        product = np.matmul(a.data, b.data, dtype=np.float64)
        return interpreter.TensorHandle(product.astype(np.float32) + d.data, d.dtype.scalar)

    return dot


class _NumpyDtypes:
    """Stands in for Triton's `_get_np_dtype`, which makes a table of all dtypes whenever it is asked for one."""

    def __init__(self, dtype_of: Callable[[Any], Any]) -> None:
        self._dtype_of = dtype_of
        self._by_name: dict[str, Any] = {}

    def __call__(self, dtype: Any) -> Any:
        element = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
        if element.name not in self._by_name:
            self._by_name[element.name] = self._dtype_of(element)
        return self._by_name[element.name]


def _init_tensor(tensor: Any, handle: Any, type: Any) -> None:
    """The constructor of Triton's tensors, whose shapes are made once each."""
    tensor.handle = handle
    tensor.type = type
    tensor.dtype = type.scalar
    tensor.shape, tensor.numel = _shape_of(tuple(type.shape) if type.is_block() else ())


@functools.cache
def _shape_of(shape: tuple[int, ...]) -> tuple[Any, Any]:
    """(a shape as tensors have it, its number of elements)."""
    return tl.tuple([tl.constexpr(size) for size in shape]), tl.constexpr(math.prod(shape))


class _InitBlockType:
    """Stands in for the constructor of a block's type, which checks the shape and writes it down each time."""

    def __init__(self, init: Callable[..., None]) -> None:
        self._init = init
        self._made: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}

    def __get__(self, block_type: Any, owner: Any) -> Any:
        return functools.partial(self, block_type)

    def __call__(self, block_type: Any, element_ty: Any, shape: Any) -> None:
        sizes = [size.value if isinstance(size, tl.constexpr) else size for size in shape]
        key = element_ty.name, tuple(sizes)
        if key not in self._made:
            self._init(block_type, element_ty, sizes)
            self._made[key] = vars(block_type).copy()
        vars(block_type).update(self._made[key], element_ty=element_ty)


def _are_equal(block_type: Any, other: Any) -> bool:
    """Whether two types are the same, whose names say shape and dtype."""
    return isinstance(other, tl.block_type) and bool(block_type.name == other.name)


def _broadcasting(broadcast: Callable[..., Any]) -> Callable[..., Any]:
    """Triton's way to bring two operands to one shape, for those that do not have it already."""

    def bring_together(semantics: Any, one: Any, other: Any) -> Any:
        shapes = [operand.type.is_block() and operand.type.shape.values for operand in (one, other)]
        return (one, other) if shapes[0] == shapes[1] else broadcast(semantics, one, other)

    return bring_together


class _Patches:
    """Stands in for Triton's `_patch_lang`."""

    def __init__(self, patch: Callable[[Any], Any]) -> None:
        self._patch = patch
        self._languages: dict[FunctionType, tuple[bool, bool]] = {}
        self._patched: set[tuple[bool, bool]] = set()

    def __call__(self, function: FunctionType) -> Any:
        """Patch the language that a function sees, if no one has in this launch; what restores it."""
        if function not in self._languages:
            seen = function.__globals__.values()
            self._languages[function] = any(value is tl for value in seen), any(value is tl.core for value in seen)
        languages = self._languages[function]
        if languages in self._patched:
            return _Scope(lambda: None)
        self._patched.add(languages)
        scope = self._patch(function)
        if scope is None:  # versions that leave the language patched
            return None
        return _Scope(lambda: self._restore(scope))

    def _restore(self, scope: Any) -> None:
        self._patched.clear()
        scope.restore()


class _Scope:
    """What Triton asks to restore the language at the end of a launch."""

    def __init__(self, restore: Callable[[], None]) -> None:
        self.restore = restore
