"""Protocol Buffers without their library: fields of a message, found in mapped bytes without copying any tensor."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from weights.errors import LimitExceeded, MalformedFile

MAX_FIELDS = 2_000_000
"""Fields that a whole file may have; a large network's graph has a tenth of them, and each costs a microsecond."""

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5


@dataclass(slots=True)
class Budget:
    """How many fields may still be read; one for a whole file, however deep its messages nest."""

    left: int = MAX_FIELDS

    def spend(self, count: int) -> None:
        """Count fields, and raise LimitExceeded where there are too many."""
        self.left -= count
        if self.left < 0:
            raise LimitExceeded(f"it has more than {MAX_FIELDS} fields, more than any network needs")


def fields(data: memoryview, budget: Budget) -> Iterator[tuple[int, int, int | memoryview]]:
    """Read a message's fields in their order: number, wire type, and an integer or a view of the bytes.

    Raises:
        MalformedFile: a field is cut off or has no such wire type.
        LimitExceeded: the budget is spent.
    """
    at, end = 0, len(data)
    while at < end:
        budget.spend(1)
        key, at = varint(data, at)
        number, wire = key >> 3, key & 7
        if number == 0:
            raise MalformedFile("a field has number 0")
        if wire == VARINT:
            value, at = varint(data, at)
            yield number, wire, value
            continue
        if wire == BYTES:
            length, at = varint(data, at)
        elif wire in (FIXED32, FIXED64):
            length = 4 if wire == FIXED32 else 8
        else:
            raise MalformedFile(f"field {number} has wire type {wire}")
        if length > end - at:
            raise MalformedFile(f"field {number} claims {length} bytes where {end - at} are left")
        yield number, wire, data[at : at + length]
        at += length


def varint(data: memoryview, at: int) -> tuple[int, int]:
    """Read an unsigned integer of up to ten bytes, and tell where it ends."""
    value = shift = 0
    for position in range(at, min(at + 10, len(data))):
        byte = data[position]
        value |= (byte & 127) << shift
        if byte < 128:
            return value & (1 << 64) - 1, position + 1
        shift += 7
    raise MalformedFile("an integer is cut off")


def signed(value: int) -> int:
    """Read the two's complement of 64 bits that negative int32 and int64 are written as."""
    return value - (1 << 64) if value >= 1 << 63 else value


def number(wire: int, value: int | memoryview) -> int:
    """Read an int32, int64, bool or enum."""
    if wire != VARINT or not isinstance(value, int):
        raise MalformedFile("an integer was due, not bytes")
    return signed(value)


def content(wire: int, value: int | memoryview) -> memoryview:
    """Read the bytes of a string, a message or a packed list."""
    if wire != BYTES or isinstance(value, int):
        raise MalformedFile("bytes were due, not a number")
    return value


def text(wire: int, value: int | memoryview) -> str:
    """Read a string; bytes that are no UTF-8 are shown escaped."""
    return str(bytes(content(wire, value)), "utf-8", "backslashreplace")


def real(wire: int, value: int | memoryview) -> float:
    """Read a float or a double."""
    if wire not in (FIXED32, FIXED64) or isinstance(value, int):
        raise MalformedFile("a floating-point number was due")
    return struct.unpack("<f" if wire == FIXED32 else "<d", value)[0]


def numbers(wire: int, value: int | memoryview) -> list[int]:
    """Read integers of a repeated field: one, or a packed list."""
    return [number(wire, value)] if wire == VARINT else [int(n) for n in packed(content(wire, value))]


def packed(data: memoryview) -> np.ndarray:
    """Read a packed list of varints as int64; a list of a million takes milliseconds."""
    raw = np.frombuffer(data, np.uint8)
    if not len(raw):
        return np.empty(0, np.int64)
    last = raw < 128
    ends = np.flatnonzero(last)
    if not last[-1] or np.diff(ends, prepend=-1).max() > 10:
        raise MalformedFile("a list of integers is cut off")
    starts = np.concatenate(([0], ends[:-1] + 1))
    values = np.zeros(len(ends), np.uint64)
    lengths = ends - starts + 1
    for place in range(int(lengths.max())):
        reached = np.flatnonzero(lengths > place)
        values[reached] |= (raw[starts[reached] + place].astype(np.uint64) & np.uint64(127)) << np.uint64(7 * place)
    return values.view(np.int64)
