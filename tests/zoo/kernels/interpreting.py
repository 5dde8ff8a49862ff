"""Triton's interpreter without what it does in vain, which is most of its time; every number stays what it is.

For each sum, difference and product of integers it computes in 64 bits whether they overflow, and throws the answer away, for its
assertions are off; for each call of a device function it patches the language anew that the launch has patched; it writes its table
of types down whenever it looks one up; and of every tensor it works out what follows from its shape. `test_interpreting.py` compares
with the interpreter as it comes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import triton
import triton.language as tl
from triton.language import core
from triton.runtime import interpreter

np_dtype, patch_lang, launch = interpreter._get_np_dtype, interpreter._patch_lang, interpreter.GridExecutor.__call__
new_block, new_tensor = tl.block_type.__init__, tl.tensor.__init__
SCALARS = {each.name: each for each in vars(tl).values() if type(each) is tl.dtype and each.name != "void"}
TYPES = {name: np_dtype(scalar) for name, scalar in SCALARS.items()}
KNOWN = triton.__version__.startswith(("3.8.", "3.9."))  # PyTorch 2.14's and 2.15's
"""Whether this is an interpreter that was read for what it does in vain."""
now = SimpleNamespace(patched=False)
"""Whether a launch runs, and has patched the language."""


def quick_np_dtype(dtype: Any) -> np.dtype[Any]:
    scalar = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
    return np.dtype(np.uint64) if isinstance(scalar, tl.pointer_type) else TYPES[scalar.name]


def quick_launch(self: Any, *args: Any, **options: Any) -> None:
    now.patched = False
    try:
        launch(self, *args, **options)
    finally:
        now.patched = False
        is_patched.cache_clear()


@cache
def is_patched(fn: Callable[..., Any]) -> bool:
    """Whether all that a function sees of the language is patched; `static_print` is among what is patched last."""
    return all(seen.static_print is print for seen in fn.__globals__.values() if inspect.ismodule(seen) and seen in (tl, core))


def quick_patch_lang(fn: Callable[..., Any]) -> Any:
    if now.patched and is_patched(fn):
        return None  # what comes of a device function's patches is thrown away
    scope = patch_lang(fn)
    now.patched = True
    is_patched.cache_clear()
    return scope


# What follows from a shape: of a block's type, then of a tensor
SHAPES: dict[tuple[int, ...], tuple[Any, int, str]] = {}
AXES: dict[tuple[int, ...], tuple[Any, Any]] = {}


def quick_new_block(self: Any, element_ty: Any, shape: Any) -> None:
    sizes = tuple([size.value if isinstance(size, tl.constexpr) else size for size in shape])
    known = SHAPES.get(sizes)
    if known is None:  # or not allowed
        new_block(self, element_ty, shape)
        SHAPES[sizes] = self.shape, self.numel, str(self.shape)
    else:
        self.shape, self.numel, told = known
        self.element_ty, self.name = element_ty, f"<{told}, {element_ty}>"


def quick_new_tensor(self: Any, handle: Any, type: Any) -> None:
    sizes = tuple(getattr(type.shape, "values", type.shape)) if type.is_block() else ()  # a tuple of Triton's from 3.9 on
    known = AXES.get(sizes)
    if known is None:
        new_tensor(self, handle, type)
        AXES[sizes] = self.shape, self.numel
    else:
        self.shape, self.numel = known
        self.handle, self.type, self.dtype = handle, type, type.scalar


patch = pytest.MonkeyPatch()


def install() -> None:
    """Make the interpreter quick for as long as the process lives; one of another version is left as it comes."""
    if not KNOWN:
        return
    builder = interpreter.interpreter_builder
    patch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))
    patch.setattr(interpreter, "_get_np_dtype", quick_np_dtype)
    patch.setattr(interpreter, "_patch_lang", quick_patch_lang)
    patch.setattr(interpreter.GridExecutor, "__call__", quick_launch)
    patch.setattr(tl.block_type, "__init__", quick_new_block)
    patch.setattr(tl.tensor, "__init__", quick_new_tensor)


@contextmanager
def as_it_comes() -> Iterator[None]:
    patch.undo()
    try:
        yield
    finally:
        install()
