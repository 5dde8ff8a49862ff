"""Caffe's messages in Protocol Buffers' wire format: what describes layers is read, the numbers of tensors are only found."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from convert._guard import MAX_RANK
from convert.formats import _wire
from convert.formats._caffe_schema import SHAPE
from weights.errors import LimitExceeded, MalformedFile

MAX_FIELDS = 400_000
"""Of a whole file. ResNet-152 has some 60,000."""
MAX_TEXT = 2**16
MAX_DIM = 2**31 - 1
MAX_PIECES = 10_000
"""Of one tensor's numbers. A library that writes unpacked lists leaves one piece, an interrupted writer a few."""

# BlobProto: field number to dtype of its numbers, and the one-byte tag of each that is not in a packed list
NUMBERS = {5: "<f4", 8: "<f8"}
TAGS = {5 << 3 | _wire.FIXED32: "<f4", 8 << 3 | _wire.FIXED64: "<f8"}
LEGACY = {1: 0, 2: 1, 3: 2, 4: 3}
"""Before `shape` there were four fields: num, channels, height, width."""


@dataclass(slots=True)
class Blob:
    """A tensor where it lies in the file.

    Attributes:
        shape: as the file says it.
        dtype: of its numbers.
        pieces: (bytes, distance between two numbers): packed numbers lie side by side, others behind a tag each.
        count: how many numbers there are.
    """

    shape: tuple[int, ...] = ()
    dtype: str = "<f4"
    pieces: list[tuple[memoryview, int]] = field(default_factory=list[tuple[memoryview, int]])
    count: int = 0

    def load(self) -> np.ndarray:
        """Read it as a flat array: a view where its numbers lie in one piece."""
        size = np.dtype(self.dtype).itemsize
        parts: list[np.ndarray] = []
        for data, step in self.pieces:
            if step == size:
                parts.append(np.frombuffer(data, self.dtype))
            else:  # a copy, for a number behind a tag begins anywhere
                behind_tags = np.frombuffer(data, np.uint8).reshape(-1, step)[:, 1:]
                parts.append(np.ascontiguousarray(behind_tags).view(self.dtype)[:, 0])
        return parts[0] if len(parts) == 1 else np.concatenate(parts or [np.empty(0, self.dtype)])

    def add(self, data: memoryview, step: int, dtype: str) -> None:
        size = np.dtype(dtype).itemsize
        if len(data) % step:
            raise MalformedFile(f"{len(data)} bytes are no whole number of {size}-byte numbers")
        if self.pieces and self.dtype != dtype:
            raise MalformedFile("a tensor has numbers of two sizes")
        if len(self.pieces) == MAX_PIECES:
            raise LimitExceeded(f"a tensor lies in more than {MAX_PIECES} pieces")
        if data:
            self.dtype = dtype
            self.count += len(data) // step
            self.pieces.append((data, step))


def values(kind: str, wire: int, value: int | memoryview, budget: _wire.Budget) -> list[Any]:
    """Read a field of Caffe's: "int", "bool" and "float" may be packed, and each number counts as a field."""
    if kind == "blob":
        return [blob(_wire.content(wire, value), budget)]
    if kind == "string":
        if len(_wire.content(wire, value)) > MAX_TEXT:
            raise LimitExceeded(f"a name has {len(_wire.content(wire, value))} bytes; at most {MAX_TEXT} are read")
        return [_wire.text(wire, value)]
    if kind == "float":
        if wire == _wire.BYTES and not isinstance(value, int):
            budget.spend(len(value) // 4)
        return _wire.reals(wire, value)
    if not isinstance(value, int):
        budget.spend(len(value))
    numbers = _wire.numbers(wire, value)
    return [bool(number) for number in numbers] if kind == "bool" else numbers


def blob(data: memoryview, budget: _wire.Budget) -> Blob:
    """Read a BlobProto, all but its numbers.

    Raises:
        MalformedFile: its numbers don't fill its shape.
        LimitExceeded: it has more axes or pieces than a tensor has.
    """
    legacy: dict[int, int] = {}
    dims: list[int] | None = None
    found, at = Blob(), 0
    while at < len(data):
        budget.spend(1)
        if data[at] in TAGS:
            dtype = TAGS[data[at]]
            step = np.dtype(dtype).itemsize + 1
            end = at + step * _tagged(data, at, step)
            found.add(data[at:end], step, dtype)
            at = end
            continue
        end = _field_end(data, at)
        for number, wire, value in _wire.fields(data[at:end], budget):
            if number in NUMBERS:
                found.add(_wire.content(wire, value), np.dtype(NUMBERS[number]).itemsize, NUMBERS[number])
            elif number in LEGACY:
                legacy[LEGACY[number]] = _wire.number(wire, value)
            elif number == 7:
                dims = _wire.message(_wire.content(wire, value), SHAPE, budget, values).get("dim", [])
        at = end
    if dims is None:
        dims = [legacy.get(axis, 1) for axis in range(4)] if legacy else [found.count]
    if len(dims) > MAX_RANK:
        raise LimitExceeded(f"a tensor has {len(dims)} axes; at most {MAX_RANK} are read")
    if any(not 0 <= dim <= MAX_DIM for dim in dims):
        raise MalformedFile(f"a tensor claims the shape {dims}")
    if found.pieces and math.prod(dims) != found.count:
        raise MalformedFile(f"a tensor of shape {dims} has {found.count} numbers")
    found.shape = tuple(dims)
    return found


def _tagged(data: memoryview, at: int, step: int) -> int:
    """Count the numbers that follow one another behind the same tag; looks ahead in growing strides, so that odd ends cost little."""
    count, look = 0, 64
    whole = (len(data) - at) // step
    if not whole:
        raise MalformedFile("a tensor's last number is cut short")
    while count < whole:
        seen = min(look, whole - count)
        tags = np.frombuffer(data, np.uint8, (seen - 1) * step + 1, at + count * step)[::step]
        other = np.flatnonzero(tags != data[at])
        if len(other):
            return count + int(other[0])
        count, look = count + seen, look * 4
    return count


def _field_end(data: memoryview, at: int) -> int:
    tag, at = _wire.varint(data, at)
    if tag & 7 == _wire.VARINT:
        return _wire.varint(data, at)[1]
    if tag & 7 == _wire.BYTES:
        length, at = _wire.varint(data, at)
    else:
        length = 4 if tag & 7 == _wire.FIXED32 else 8
    return at + length  # beyond the end where it is cut off, which `fields` finds out
