"""Julia values as two containers keep them, BSON.jl's documents and JLD2's HDF5, reduced to what weight files need.

A value is an `Array`, a `Struct`, an `Opaque`, a dict (NamedTuple or Dict), a list or tuple, a number, a str, a bool or None.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from convert.steps import Shape

SIZES = {("Float", "f"): (2, 4, 8), ("Int", "i"): (1, 2, 4, 8), ("UInt", "u"): (1, 2, 4, 8)}
DTYPES = {f"{name}{8 * size}": np.dtype(f"<{code}{size}").str for (name, code), sizes in SIZES.items() for size in sizes} | {"Bool": "|b1"}
"""Element types by Julia's name; complex ones are `Complex` of a float."""


@dataclass(frozen=True, slots=True)
class Array:
    """An array with its axes reversed: Julia's first axis is the last one here, so the bytes are in C order as they lie."""

    shape: Shape
    dtype: np.dtype[Any]
    load: Callable[[], np.ndarray]


@dataclass(frozen=True, slots=True)
class Struct:
    """A value of a named type.

    Attributes:
        path: modules and name of the type: ("Flux", "Conv"); a function's type is called "#relu".
        fields: in the order of the type's declaration.
        params: of the type, as far as anybody asks: other paths, numbers.
    """

    path: tuple[str, ...]
    fields: tuple[Any, ...] = ()
    params: tuple[Any, ...] = field(default=())

    @property
    def name(self) -> str:
        """The type's name without its modules."""
        return self.path[-1] if self.path else ""

    @property
    def function(self) -> str | None:
        """The function's name if this is one; None for a closure, whose name is a number, and for everything else."""
        name = self.name.removeprefix("typeof(").removesuffix(")").removeprefix("#")
        return name if self.name.startswith(("#", "typeof(")) and name and name[0] not in "#0123456789" and not self.fields else None


@dataclass(frozen=True, slots=True)
class Opaque:
    """What nobody here looks into: a closure's code, a module, a type."""

    what: str


def turned(array: Array) -> Array:
    """Transpose a matrix, or make a row of a vector, as LinearAlgebra's lazy wrappers say they are."""
    if len(array.shape) == 1:
        return Array((array.shape[0], 1), array.dtype, lambda: array.load().reshape(-1, 1))
    return Array(array.shape[::-1], array.dtype, lambda: array.load().T)


def reshaped(array: Array, shape: Shape) -> Array:
    """Give the numbers another shape (already reversed)."""
    return Array(shape, array.dtype, lambda: array.load().reshape(shape))
