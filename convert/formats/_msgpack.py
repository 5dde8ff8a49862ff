"""MessagePack, as far as checkpoints use it: decoded without a copy, every count checked against the bytes that are left.

The usual library makes room for as many elements as an array's header claims before it looks for them, once for each level of
nesting; that is how a file of a megabyte asks for gigabytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from convert._guard import MAX_DEPTH
from convert.kinds import is_dict, is_row
from weights.errors import LimitExceeded, MalformedFile

MAX_NODES = 1_000_000

FIXED = {0xCA: ">f", 0xCB: ">d", 0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q", 0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q"}
FIRSTS = {"bin": (0xC4, (1, 2, 4)), "str": (0xD9, (1, 2, 4)), "array": (0xDC, (2, 4)), "map": (0xDE, (2, 4)), "ext": (0xC7, (1, 2, 4))}
SIZED = {first + place: (kind, width) for kind, (first, widths) in FIRSTS.items() for place, width in enumerate(widths)}
"""First byte: what follows, and how many bytes its size has."""
CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}


@dataclass(frozen=True, slots=True)
class Extension:
    """A value of an application's own: its code, and its bytes in the file."""

    code: int
    data: memoryview


def unpack(buffer: memoryview) -> Any:
    """Decode one value that fills the buffer; binary values and extensions are views of it.

    Raises:
        MalformedFile: the bytes are cut, go on behind the value, or are no MessagePack.
        LimitExceeded: the value nests too deep or has more parts than any checkpoint.
    """
    decoder = _Decoder(buffer)
    value = decoder.value(0)
    if decoder.at != len(buffer):
        raise MalformedFile(f"{len(buffer) - decoder.at} bytes follow the MessagePack value")
    return value


class _Decoder:
    def __init__(self, buffer: memoryview) -> None:
        self.buffer, self.at, self.nodes = buffer, 0, 0

    def take(self, size: int) -> memoryview:
        if size > len(self.buffer) - self.at:
            raise MalformedFile(f"{size} bytes are announced at byte {self.at} and {len(self.buffer) - self.at} are left")
        self.at += size
        return self.buffer[self.at - size : self.at]

    def value(self, depth: int) -> Any:
        self.nodes += 1
        if self.nodes > MAX_NODES or depth > MAX_DEPTH:
            raise LimitExceeded(f"more than {MAX_NODES} values, or more than {MAX_DEPTH} levels of them")
        first = self.take(1)[0]
        if first < 0x80:
            return first
        if first >= 0xE0:
            return first - 0x100
        if first in CONSTANTS:
            return CONSTANTS[first]
        if first in FIXED:
            return struct.unpack(FIXED[first], self.take(struct.calcsize(FIXED[first])))[0]
        if 0xD4 <= first <= 0xD8:
            return self.extension(1 << (first - 0xD4))
        if first < 0xC0:
            kind, size = ("map", first & 15) if first < 0x90 else ("array", first & 15) if first < 0xA0 else ("str", first & 31)
        elif first in SIZED:
            kind, width = SIZED[first]
            size = int.from_bytes(self.take(width), "big")
        else:
            raise MalformedFile(f"byte {first:#x} begins no MessagePack value")
        return self.sized(kind, size, depth)

    def sized(self, kind: str, size: int, depth: int) -> Any:
        if kind == "bin":
            return self.take(size)
        if kind == "str":
            return str(self.take(size), "utf-8")
        if kind == "ext":
            return self.extension(size)
        if kind == "array":
            return [self.value(depth + 1) for _ in range(self.announced(size))]
        found: dict[Any, Any] = {}
        for _ in range(self.announced(2 * size) // 2):
            key = self.value(depth + 1)
            if not isinstance(key, str | int):
                raise MalformedFile(f"a {type(key).__name__} is the key of a map")
            if key in found:
                raise MalformedFile(f"a map has the key {str(key)[:80]!r} twice")
            found[key] = self.value(depth + 1)
        return found

    def announced(self, count: int) -> int:
        if count > len(self.buffer) - self.at:  # a value takes one byte at least
            raise MalformedFile(f"{count} values are announced at byte {self.at} and {len(self.buffer) - self.at} bytes are left")
        return count

    def extension(self, size: int) -> Extension:
        code = struct.unpack("b", self.take(1))[0]
        return Extension(code, self.take(size))


def pack(value: Any) -> bytes:
    """Encode None, bool, int, str, bytes, and lists and dicts of such."""
    return b"".join(_packed(value))


def header(kind: str, size: int, code: int = 0) -> bytes:
    """Encode what comes before the contents of a "str", "bin", "array", "map" or "ext" of `size` (bytes, elements or pairs)."""
    small = {"str": (0xA0, 32), "array": (0x90, 16), "map": (0x80, 16)}
    if kind in small and size < small[kind][1]:
        return bytes([small[kind][0] | size])
    if kind == "ext" and size in (1, 2, 4, 8, 16):
        return bytes([0xD4 + size.bit_length() - 1]) + struct.pack("b", code)
    first, widths = FIRSTS[kind]
    for place, width in enumerate(widths):
        if size < 1 << (8 * width):
            return bytes([first + place]) + size.to_bytes(width, "big") + (struct.pack("b", code) if kind == "ext" else b"")
    raise LimitExceeded(f"MessagePack holds no {kind} of {size}")


def _packed(value: Any) -> Iterator[bytes]:
    if value is None or isinstance(value, bool):
        yield bytes([next(first for first, constant in CONSTANTS.items() if constant is value)])
    elif isinstance(value, int):
        yield _integer(value)
    elif isinstance(value, str | bytes):
        data = value.encode() if isinstance(value, str) else value
        yield header("str" if isinstance(value, str) else "bin", len(data))
        yield data
    elif is_dict(value):
        yield header("map", len(value))
        for item in value.items():
            for part in item:
                yield from _packed(part)
    elif is_row(value):
        yield header("array", len(value))
        for part in value:
            yield from _packed(part)
    else:
        raise TypeError(f"no MessagePack for a {type(value).__name__}")


def _integer(value: int) -> bytes:
    if -32 <= value < 128:
        return struct.pack("b" if value < 0 else "B", value)
    for first, form in (
        ((0xCC, ">B"), (0xCD, ">H"), (0xCE, ">I"), (0xCF, ">Q")) if value > 0 else ((0xD0, ">b"), (0xD1, ">h"), (0xD2, ">i"), (0xD3, ">q"))
    ):
        try:
            return bytes([first]) + struct.pack(form, value)
        except struct.error:
            continue
    raise LimitExceeded(f"MessagePack holds no integer {value}")
