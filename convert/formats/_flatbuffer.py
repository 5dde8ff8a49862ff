"""FlatBuffers without their library, which believes every offset: tables and vectors in mapped bytes, checked as they are followed."""

from __future__ import annotations

import struct

import numpy as np

from convert.formats._wire import Budget
from weights.errors import MalformedFile


class Table:
    """A table of a buffer: fields by their number in the schema; those that it lacks have their defaults.

    Every method raises MalformedFile where the field leads out of the buffer, and LimitExceeded where the budget is spent.
    """

    __slots__ = ("_at", "_budget", "_data", "_fields")

    def __init__(self, data: memoryview, at: int, budget: Budget) -> None:
        budget.spend(1)
        self._data, self._at, self._budget = data, at, budget
        fields = at - _read(data, "<i", at)
        size = _read(data, "<H", fields)
        if size < 4 or size % 2 or fields + size > len(data):
            raise MalformedFile(f"the table at byte {at} has fields where none can be")
        self._fields = (fields, (size - 4) // 2)

    def _place(self, field: int) -> int:
        """Find a field; 0 where there is none."""
        first, count = self._fields
        offset = _read(self._data, "<H", first + 4 + 2 * field) if field < count else 0
        return self._at + offset if offset else 0

    def number(self, field: int, kind: str, default: float = 0) -> int:
        """Read a whole number; `kind` as `struct` calls it."""
        place = self._place(field)
        return int(_read(self._data, f"<{kind}", place)) if place else int(default)

    def real(self, field: int, default: float = 0.0) -> float:
        """Read a float."""
        place = self._place(field)
        return float(_read(self._data, "<f", place)) if place else default

    def table(self, field: int) -> Table | None:
        """Follow a field to another table."""
        place = self._place(field)
        return Table(self._data, place + _read(self._data, "<I", place), self._budget) if place else None

    def tables(self, field: int) -> list[Table]:
        """Follow a vector of tables."""
        start, count = self._vector(field, 4)
        places = (start + 4 * i for i in range(count))
        return [Table(self._data, place + _read(self._data, "<I", place), self._budget) for place in places]

    def numbers(self, field: int, dtype: str) -> np.ndarray:
        """Read a vector of numbers; empty where there is none."""
        width = np.dtype(dtype).itemsize
        start, count = self._vector(field, width)
        return np.frombuffer(self._data[start : start + count * width], dtype)

    def content(self, field: int) -> memoryview | None:
        """View a vector of bytes; None where there is none."""
        if not self._place(field):
            return None
        start, count = self._vector(field, 1, spend=False)
        return self._data[start : start + count]

    def text(self, field: int) -> str:
        """Read a string; bytes that are no UTF-8 are shown escaped."""
        found = self.content(field)
        if found is None:
            return ""
        self._budget.spend(len(found) // 256)
        return str(bytes(found[:4096]), "utf-8", "backslashreplace")

    def _vector(self, field: int, width: int, *, spend: bool = True) -> tuple[int, int]:
        place = self._place(field)
        if not place:
            return 0, 0
        start = place + _read(self._data, "<I", place)
        count = _read(self._data, "<I", start)
        if start + 4 + count * width > len(self._data):
            raise MalformedFile(f"a list of {count} at byte {start} leads out of the file")
        if spend:
            self._budget.spend(count)
        return start + 4, count


def root(data: memoryview, budget: Budget) -> Table:
    """Find the table that a buffer begins with."""
    return Table(data, _read(data, "<I", 0), budget)


def _read(data: memoryview, kind: str, at: int) -> int:
    if at < 0 or at + struct.calcsize(kind) > len(data):
        raise MalformedFile(f"byte {at} is outside of the file")
    return struct.unpack_from(kind, data, at)[0]
