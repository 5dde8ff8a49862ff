"""Protocol Buffers without their library: fields of a message, found in mapped bytes without copying any tensor."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from convert._guard import MAX_DEPTH
from convert.kinds import is_dict
from weights.errors import LimitExceeded, MalformedFile

MAX_FIELDS = 2_000_000
"""Fields that a whole file may have; a large network's graph has a tenth of them, and each costs a microsecond."""

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5

Message = dict[str, list[Any]]
"""What a message holds, by its fields' names."""
Schema = Mapping[int, tuple[str, Any]]
"""Field number to name and type: the schema of a message, or a word of `VALUES` or of a format's own."""


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


def schema(text: str, **messages: Schema) -> Schema:
    """Read fields as they stand in a .proto, `optional uint32 pad = 3` as "int pad 3"; a message's field has the message's name."""
    fields = (field.split() for field in text.split(","))
    return {int(number): (name, messages.get(kind, kind)) for kind, name, number in fields}


def message(data: memoryview, schema: Schema, budget: Budget, values: Values | None = None, depth: int = 0) -> Message:
    """Read a message; fields that `schema` has not are passed over.

    Args:
        data: the message.
        schema: its fields. One of type "field" is kept as `fields` gives it.
        budget: of the file.
        values: reads one field, if the format's types are not those of `VALUES`.
        depth: how deep the message lies in others.

    Raises:
        MalformedFile: a length leads out of its message, a number is cut short, a field has another type than it should.
        LimitExceeded: messages nest deeper, or have more fields, than networks do.
    """
    if depth > MAX_DEPTH:
        raise LimitExceeded("messages nest deeper than any network's")
    found: Message = {}
    for number, wire, value in fields(data, budget):
        if number in schema:
            name, kind = schema[number]
            held = found.setdefault(name, [])
            if is_dict(kind):
                held.append(message(content(wire, value), kind, budget, values, depth + 1))
            elif kind == "field":
                held.append((number, wire, value))
            else:
                held.extend(VALUES[kind](wire, value) if values is None else values(kind, wire, value, budget))
    return found


def one(message: Message, field: str, default: Any) -> Any:
    """Return a field that occurs at most once, the last time if it does more often; as the type that `default` has."""
    if not message.get(field):
        return default
    value = message[field][-1]
    if is_dict(default):
        return value if is_dict(value) else default
    return type(default)(value)


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


def reals(wire: int, value: int | memoryview) -> list[float]:
    """Read floats of a repeated field: one, or a packed list."""
    return np.frombuffer(content(wire, value), "<f4").tolist() if wire == BYTES else [real(wire, value)]


Values = Callable[[str, int, "int | memoryview", Budget], list[Any]]
VALUES: dict[str, Callable[[int, int | memoryview], list[Any]]] = {
    "int": lambda wire, value: [number(wire, value)],
    "ints": numbers,
    "floats": reals,
    "float": lambda wire, value: [real(wire, value)],
    "string": lambda wire, value: [text(wire, value)],
    "bytes": lambda wire, value: [content(wire, value)],
}
"""Types of fields, and what reads one; those in the plural may be packed."""


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
