"""A file mapped into memory, and arrays that are views of it."""

from __future__ import annotations

import math
import mmap
from pathlib import Path
from typing import Any

import numpy as np

from convert.source import Shape, Stored
from weights.errors import MalformedFile


def mapped(path: Path) -> memoryview:
    """Map a file; the map lives as long as a view of it. MalformedFile if there is nothing in it."""
    with path.open("rb") as file:
        if not path.stat().st_size:
            raise MalformedFile(f"{path} is empty")
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def stored(origin: str, buffer: memoryview, dtype: np.dtype[Any], shape: Shape, order: str = "C") -> Stored:
    """Describe an array that fills a buffer; MalformedFile if it doesn't."""
    count = math.prod(shape)
    if count * dtype.itemsize != len(buffer) or min(shape, default=0) < 0:
        raise MalformedFile(f"{origin}: {dtype} of shape {shape} does not fill {len(buffer)} bytes")

    def load() -> np.ndarray:
        flat = np.frombuffer(buffer, dtype) if count else np.empty(0, dtype)
        return flat.reshape(shape, order="F" if order == "F" else "C")

    return Stored(origin, shape, dtype, load)
