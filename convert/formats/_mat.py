"""MATLAB's values as a MAT file of either kind holds them: structs are dicts, cells and arrays of structs lists, text is str."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from convert.source import Shape, Stored

MAX_VALUES = 300_000
"""In one file. A network of a thousand layers has thirty thousand."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """Numbers, read when they are asked for.

    Attributes:
        origin: where they are in the file: "layers{3}.weights{1}".
        dims: as MATLAB shows them; it drops ones at the end.
        dtype: of the numbers.
        load: reads them, of shape `dims`, or of the reverse where `reverse` says so.
        reverse: whether the file keeps the axes in the opposite order, as HDF5 shows MATLAB's.
    """

    origin: str
    dims: Shape
    dtype: np.dtype[Any]
    load: Callable[[], np.ndarray]
    reverse: bool = False

    @property
    def count(self) -> int:
        return int(np.prod(self.dims, dtype=object)) if self.dims else 0

    def stored(self, axes: int = 1) -> Stored:
        """Describe it as a tensor of so many axes: a vector, or a kernel whose last axes of one were dropped."""
        dims = (self.count,) if axes == 1 else (*self.dims, *(1,) * (axes - len(self.dims)))
        shape = dims[::-1] if self.reverse else dims
        return Stored(self.origin, shape, self.dtype, lambda: self.load().reshape(shape, order="C" if self.reverse else "F"))

    def column(self, number: int) -> Stored:
        """Describe one column of a matrix as a vector."""
        count = self.dims[0]

        def load() -> np.ndarray:
            return self.load()[number] if self.reverse else self.load()[:, number]

        return Stored(f"{self.origin}(:,{number + 1})", (count,), self.dtype, load)

    def numbers(self, most: int = 64) -> list[float]:
        """Read a short list of numbers, in MATLAB's order; [] if it is long."""
        return [float(n) for n in self.load().reshape(-1, order="C" if self.reverse else "F")] if 0 < self.count <= most else []


Value = dict[str, Any] | list[Any] | str | Matrix | None
