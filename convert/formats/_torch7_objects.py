"""Torch7's serialised objects, as plain ones: numbers, texts, tables, and tensors whose numbers stay in the file."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from convert import _guard
from convert.source import Shape
from weights.errors import LimitExceeded, MalformedFile

NIL, NUMBER, TEXT, TABLE, OBJECT, BOOLEAN, FUNCTION, LEGACY_FUNCTION, RECURSIVE_FUNCTION = range(9)
ELEMENTS = {
    "Byte": "u1", "Char": "i1", "Short": "<i2", "Int": "<i4", "Long": "<i8", "Float": "<f4", "Double": "<f8", "Half": "<f2",
    "Cuda": "<f4", "CudaByte": "u1", "CudaChar": "i1", "CudaShort": "<i2", "CudaInt": "<i4", "CudaLong": "<i8", "CudaDouble": "<f8",
    "CudaHalf": "<f2",
}  # fmt: skip
"""What a class torch.XTensor or torch.XStorage holds; what lay on a GPU is stored as if it had not."""
MAX_DEPTH = 250
"""Of objects in objects; a module is three of them deep."""
MAX_OBJECTS = 2_000_000


@dataclass(slots=True, eq=False)
class Tensor:
    """A tensor: where its numbers lie, as many of them as its shape needs, with the strides of a view."""

    shape: Shape
    strides: tuple[int, ...]
    offset: int
    storage: Storage | None

    def array(self) -> np.ndarray:
        """View its numbers; MalformedFile where the storage has them not."""
        if not math.prod(self.shape):
            return np.empty(self.shape, self.dtype)
        if self.storage is None:
            raise MalformedFile(f"a tensor of shape {self.shape} has no numbers")
        flat = self.storage.numbers()
        last = self.offset + sum((size - 1) * step for size, step in zip(self.shape, self.strides, strict=True))
        if self.offset < 0 or min(self.strides, default=0) < 0 or last >= len(flat):
            raise MalformedFile(f"a tensor of shape {self.shape} needs {last + 1} numbers of {len(flat)}")
        item = flat.itemsize
        return np.lib.stride_tricks.as_strided(flat[self.offset :], self.shape, [item * step for step in self.strides], writeable=False)

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype("<f4") if self.storage is None else self.storage.dtype


@dataclass(slots=True, eq=False)
class Storage:
    """Numbers that tensors share."""

    data: memoryview
    dtype: np.dtype[Any]

    def numbers(self) -> np.ndarray:
        return np.frombuffer(self.data, self.dtype)


@dataclass(slots=True, eq=False)
class Object:
    """An object of a class: what it holds, by its names."""

    kind: str
    fields: Table


@dataclass(slots=True, eq=False)
class Table:
    """A table of Lua's: a list from 1 on, and whatever else."""

    items: dict[Any, Any] = field(default_factory=dict[Any, Any])

    def get(self, name: Any, default: Any = None) -> Any:
        return self.items.get(name, default)

    def listed(self) -> list[Any]:
        """List what stands under 1, 2, 3 and so on."""
        found: list[Any] = []
        while len(found) + 1 in self.items:
            found.append(self.items[len(found) + 1])
        return found


def parse(data: memoryview) -> Any:
    """Read the first object of a file.

    Raises:
        MalformedFile: it is cut short or no such file.
        LimitExceeded: it nests too deep, or has too many objects.
    """
    return _Reading(data).object(0)


class _Reading:
    def __init__(self, data: memoryview) -> None:
        self.data, self.at, self.count = data, 0, 0
        self.seen: dict[int, Any] = {}

    def take(self, count: int) -> memoryview:
        if count < 0 or count > len(self.data) - self.at:
            raise MalformedFile(f"{count} bytes are wanted at byte {self.at}, where {len(self.data) - self.at} are left")
        self.at += count
        return self.data[self.at - count : self.at]

    def int(self) -> int:
        return struct.unpack("<i", self.take(4))[0]

    def longs(self, count: int) -> list[int]:
        return list(struct.unpack(f"<{count}q", self.take(8 * count)))

    def text(self) -> str:
        return bytes(self.take(self.int())).decode("utf-8", "replace")

    def object(self, depth: int) -> Any:
        self.count += 1
        if depth > MAX_DEPTH or self.count > MAX_OBJECTS:
            raise LimitExceeded("it nests deeper than any network does, or has more objects")
        kind = self.int()
        if kind == NIL:
            return None
        if kind == NUMBER:
            number = struct.unpack("<d", self.take(8))[0]
            return int(number) if math.isfinite(number) and number == int(number) else number
        if kind == TEXT:
            return self.text()
        if kind == BOOLEAN:
            return self.int() == 1
        if kind == FUNCTION:
            return self.function(depth)
        if kind not in (TABLE, OBJECT, LEGACY_FUNCTION, RECURSIVE_FUNCTION):
            raise MalformedFile(f"an object at byte {self.at - 4} is of kind {kind}, which Torch7 has not; ASCII files are not read")
        index = self.int()
        if index in self.seen:
            return self.seen[index]
        if kind == TABLE:
            return self.table(index, depth)
        if kind == OBJECT:
            return self.instance(index, depth)
        self.seen[index] = None
        return self.function(depth)

    def function(self, depth: int) -> None:
        """Pass over a function: its code, and the values that it has closed over."""
        self.take(self.int())
        self.object(depth + 1)

    def table(self, index: int, depth: int) -> Table:
        made = self.seen[index] = Table()
        for _ in range(self.int()):
            key, value = self.object(depth + 1), self.object(depth + 1)
            if isinstance(key, str | int | float) and key == key:
                made.items[key] = value
        return made

    def instance(self, index: int, depth: int) -> Any:
        version = self.text()
        name = self.text() if version.startswith("V ") else version
        element, _, what = name.removeprefix("torch.").rpartition("Tensor")
        if name.startswith("torch.") and not what and element in ELEMENTS:
            return self.tensor(index, element, depth)
        element, _, what = name.removeprefix("torch.").rpartition("Storage")
        if name.startswith("torch.") and not what and element in ELEMENTS:
            (size,), dtype = self.longs(1), np.dtype(ELEMENTS[element])
            if size < 0:
                raise MalformedFile(f"a storage has {size} numbers")
            made = self.seen[index] = Storage(self.take(size * dtype.itemsize), dtype)
            return made
        made = self.seen[index] = Object(name, Table())
        held = self.object(depth + 1)
        if isinstance(held, Table):
            made.fields = held
        return made

    def tensor(self, index: int, element: str, depth: int) -> Tensor:
        axes = self.int()
        if not 0 <= axes <= _guard.MAX_RANK:
            raise LimitExceeded(f"a tensor has {axes} axes; at most {_guard.MAX_RANK} are read")
        shape, strides, (offset,) = self.longs(axes), self.longs(axes), self.longs(1)
        if min(shape, default=0) < 0:
            raise MalformedFile(f"a tensor has the shape {shape}")
        made = self.seen[index] = Tensor(tuple(shape) if axes else (0,), tuple(strides) if axes else (1,), offset - 1, None)
        storage = self.object(depth + 1)
        if storage is not None and (not isinstance(storage, Storage) or storage.dtype != np.dtype(ELEMENTS[element])):
            raise MalformedFile(f"a {element}Tensor has something else than its numbers")
        made.storage = storage
        return made
