"""MAT files of version 5 (and 7, which are the same compressed): read from a map within limits, and written value by value.

SciPy's reader makes room for whatever a header claims before it looks for it; and its writer puts the time into the file.

Source:
    MAT-File Format, MathWorks, chapter 1
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

import numpy as np

from convert._guard import MAX_DEPTH, MAX_RANK, SPARE_BYTES
from convert.formats._mat import MAX_VALUES, Matrix, Value
from convert.formats._zipped import inflated
from weights.errors import ConvertError, LimitExceeded, MalformedFile

HEADER_BYTES = 128
ENDIAN = {b"IM": "<", b"MI": ">"}
NUMBERS = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
TEXTS = {16: "utf-8", 17: "utf-16", 18: "utf-32", 1: "latin-1", 2: "latin-1", 4: "utf-16"}
MATRIX, COMPRESSED = 14, 15
CELL, STRUCT, OBJECT, CHAR = 1, 2, 3, 4
CLASSES = {6: "f8", 7: "f4", 8: "i1", 9: "u1", 10: "i2", 11: "u2", 12: "i4", 13: "u4", 14: "i8", 15: "u8"}
COMPLEX = 0x800
WORDS_BYTES = 2**20
NAME_BYTES = 64
"""Of a struct's field, as MATLAB allows; the zero at the end is one of them."""


def variables(buffer: memoryview) -> dict[str, Value]:
    """Read every variable of a file.

    Raises:
        MalformedFile, LimitExceeded.
    """
    order = ENDIAN.get(bytes(buffer[126:128]))
    if order is None:
        raise MalformedFile("the mark of MATLAB's version 5 is missing at byte 126")
    reader = _Reader(order, 2 * len(buffer) + SPARE_BYTES // 2)
    found: dict[str, Value] = {}
    for kind, data in reader.elements(buffer[HEADER_BYTES:], padded=False):
        if kind == COMPRESSED:
            kind, data = next(reader.elements(reader.unpacked(data)), (0, data))
        if kind == MATRIX:
            name, value = reader.matrix(data, "", 0)
            found[name] = value
    return found


class _Reader:
    def __init__(self, order: str, budget: int) -> None:
        self.order, self.budget, self.values = order, budget, 0

    def unpacked(self, data: memoryview) -> memoryview:
        """Unpack a variable, whose own tag says how long it is."""
        try:
            size = 8 + self.word(inflated(data, 8, whole=False), 4)
            self.budget -= size
            if self.budget < 0:
                raise LimitExceeded("it would unpack to more than twice its size: it is damaged or hostile")
            return inflated(data, size)
        except EOFError as error:
            raise MalformedFile(f"a compressed variable is damaged: {error}") from error

    def elements(self, data: memoryview, padded: bool = True) -> Iterator[tuple[int, memoryview]]:
        """Go through the elements of some bytes: the type of each, and its data."""
        at = 0
        while len(data) - at >= 8:
            first = self.word(data, at)
            if first >> 16:  # up to four bytes stand in the tag itself
                kind, size, start = first & 0xFFFF, first >> 16, at + 4
                after = at + 8
                if size > 4:
                    raise MalformedFile(f"a small element of {size} bytes")
            else:
                kind, size, start = first, self.word(data, at + 4), at + 8
                after = start + (size if kind == COMPRESSED or (kind == MATRIX and not padded) else -(-size // 8) * 8)
            if start + size > len(data):
                raise MalformedFile(f"an element of {size} bytes is announced and {len(data) - start} are left")
            yield kind, data[start : start + size]
            at = after

    def word(self, data: memoryview, at: int) -> int:
        return int.from_bytes(data[at : at + 4], "little" if self.order == "<" else "big")

    def matrix(self, data: memoryview, origin: str, depth: int) -> tuple[str, Value]:
        self.values += 1
        if self.values > MAX_VALUES or depth > MAX_DEPTH:
            raise LimitExceeded(f"more than {MAX_VALUES} values, or more than {MAX_DEPTH} levels of them")
        parts = self.elements(data)
        flags_kind, flags = next(parts, (0, data[:0]))
        if flags_kind != 6 or len(flags) != 8:
            return "", None  # empty, or of a kind that has other parts: an object of a class, a function
        what, bits = self.word(flags, 0) & 0xFF, self.word(flags, 0)
        if what not in (CELL, STRUCT, OBJECT, CHAR, *CLASSES):
            return "", None
        dims = tuple(int(n) for n in self.integers(parts))
        if not 2 <= len(dims) <= MAX_RANK or min(dims) < 0:
            raise LimitExceeded(f"{origin}: a value of {len(dims)} axes, {str(dims)[:80]}")
        name = bytes(self.part(parts)[1]).decode("latin-1")
        origin = origin or name
        count = math.prod(dims)
        if what == CELL:
            self.announced(count, data)
            return name, [self.matrix(self.inner(parts), f"{origin}{{{n + 1}}}", depth + 1)[1] for n in range(count)]
        if what in (STRUCT, OBJECT):
            return name, self.struct(parts, what, count, data, origin, depth)
        if what == CHAR:
            return name, self.text(parts, count)
        if bits & COMPLEX:
            return name, None
        return name, self.numeric(parts, what, dims, origin)

    def part(self, parts: Iterator[tuple[int, memoryview]]) -> tuple[int, memoryview]:
        found = next(parts, None)
        if found is None:
            raise MalformedFile("a value ends before its parts do")
        return found

    def inner(self, parts: Iterator[tuple[int, memoryview]]) -> memoryview:
        kind, data = self.part(parts)
        if kind != MATRIX:
            raise MalformedFile(f"an element of type {kind} stands where a value is due")
        return data

    def integers(self, parts: Iterator[tuple[int, memoryview]]) -> np.ndarray:
        kind, data = self.part(parts)
        if kind not in (5, 6) or len(data) > 4 * MAX_RANK or len(data) % 4:
            raise MalformedFile("a value without its sizes")
        return np.frombuffer(data, f"{self.order}i4")

    def announced(self, count: int, data: memoryview) -> None:
        if count > min(len(data) // 8, MAX_VALUES):  # an empty value takes a tag
            raise MalformedFile(f"{count} values are announced in {len(data)} bytes")

    def struct(self, parts: Any, what: int, count: int, data: memoryview, origin: str, depth: int) -> Value:
        if what == OBJECT:
            self.part(parts)  # the name of its class
        length = int(self.integers(parts)[0])
        names = bytes(self.part(parts)[1])
        if not 0 < length <= 2 * NAME_BYTES or len(names) % length:
            raise MalformedFile(f"{origin}: a struct's names are {length} bytes each, {len(names)} together")
        fields = [names[at : at + length].split(b"\0", 1)[0].decode("latin-1") for at in range(0, len(names), length)]
        self.announced(count * len(fields), data)
        many = count != 1
        made = [
            {
                field: self.matrix(self.inner(parts), f"{origin}{f'({number + 1})' if many else ''}.{field}", depth + 1)[1]
                for field in fields
            }
            for number in range(count if fields else 0)
        ]
        return made if many else made[0] if made else {}

    def text(self, parts: Any, count: int) -> str:
        if not count:
            return ""
        kind, data = self.part(parts)
        if kind not in TEXTS or len(data) > WORDS_BYTES:
            raise MalformedFile(f"text of type {kind} and {len(data)} bytes")
        code = TEXTS[kind] + (("-le" if self.order == "<" else "-be") if TEXTS[kind] in ("utf-16", "utf-32") else "")
        return bytes(data).decode(code, "replace")

    def numeric(self, parts: Any, what: int, dims: tuple[int, ...], origin: str) -> Value:
        count = math.prod(dims)
        kind, data = self.part(parts) if count else (9, memoryview(b""))
        if kind not in NUMBERS:
            raise MalformedFile(f"{origin}: numbers of type {kind}")
        raw, meant = np.dtype(self.order + NUMBERS[kind]), np.dtype(self.order + CLASSES[what])
        if count * raw.itemsize != len(data) or count * meant.itemsize > 8 * len(data):
            raise MalformedFile(f"{origin}: {count} numbers of {raw.itemsize} bytes in {len(data)}")

        def load() -> np.ndarray:
            flat = np.frombuffer(data, raw) if count else np.empty(0, raw)
            return flat.reshape(dims, order="F").astype(meant, copy=False)  # MATLAB keeps round numbers in the smallest type

        return Matrix(origin, dims, meant, load)


def write(file: BinaryIO, values: Mapping[str, Value]) -> None:
    """Write variables, the same bytes for the same values."""
    file.write(b"MATLAB 5.0 MAT-file, written by kernelzoo".ljust(124) + (0x0100).to_bytes(2, "little") + b"IM")
    for name, value in values.items():
        _put(file, name, value)


def _put(file: BinaryIO, name: str, value: Value) -> None:
    size = _size(name, value)
    if size >= 2**32:
        raise ConvertError(f"{name or 'a value'} takes {size} bytes; a variable of MATLAB's version 5 has less than 4 GiB")
    file.write(MATRIX.to_bytes(4, "little") + size.to_bytes(4, "little"))
    what, dims = _described(value)
    _element(file, 6, np.array([what, 0], "<u4"))
    _element(file, 5, np.array(dims, "<i4"))
    _element(file, 1, np.frombuffer(name.encode("ascii"), "u1"))
    if isinstance(value, dict):
        fields = list(value)
        _element(file, 5, np.array([NAME_BYTES], "<i4"))
        _element(file, 1, np.frombuffer(b"".join(_field(field) for field in fields), "u1"))
        for item in value.values():
            _put(file, "", item)
    elif isinstance(value, list):
        for item in value:
            _put(file, "", item)
    elif isinstance(value, str):
        _element(file, 17, np.frombuffer(value.encode("utf-16-le"), "<u2"))
    elif isinstance(value, Matrix):
        _element(file, next(kind for kind, code in NUMBERS.items() if code == value.dtype.str[1:]), value.load().reshape(-1, order="F"))
    else:
        _element(file, 9, np.empty(0, "<f8"))


def _field(name: str) -> bytes:
    if not re.fullmatch(r"[A-Za-z]\w*", name) or len(name) >= NAME_BYTES:
        raise ConvertError(f"MATLAB can't call a field {name!r}")
    return name.encode("ascii").ljust(NAME_BYTES, b"\0")


def _described(value: Value) -> tuple[int, tuple[int, ...]]:
    """Say of which class a value is, and its sizes."""
    match value:
        case dict():
            return STRUCT, (1, 1)
        case list():
            return CELL, (1, len(value))
        case str():
            return CHAR, (1, len(value.encode("utf-16-le")) // 2)
        case Matrix():
            code = value.dtype.newbyteorder("<").str[1:]
            if code not in CLASSES.values():
                raise ConvertError(f"MATLAB has no {value.dtype.name}, which {value.origin} is: cast to float32 first")
            return next(what for what, known in CLASSES.items() if known == code), (*value.dims, *(1,) * (2 - len(value.dims)))
        case None:
            return next(what for what, known in CLASSES.items() if known == "f8"), (0, 0)


def _size(name: str, value: Value) -> int:
    """Count the bytes of a value's parts."""
    _, dims = _described(value)
    total = 16 + _padded(4 * len(dims)) + _padded(len(name))
    if isinstance(value, dict):
        total += 16 + _padded(NAME_BYTES * len(value))
        total += sum(8 + _size("", item) for item in value.values())
    elif isinstance(value, list):
        total += sum(8 + _size("", item) for item in value)
    elif isinstance(value, str):
        total += _padded(len(value.encode("utf-16-le")))
    elif isinstance(value, Matrix):
        total += _padded(value.count * value.dtype.itemsize)
    else:
        total += 8
    return total


def _padded(size: int) -> int:
    return 8 + -(-size // 8) * 8


def _element(file: BinaryIO, kind: int, array: np.ndarray) -> None:
    file.write(kind.to_bytes(4, "little") + array.nbytes.to_bytes(4, "little"))
    if array.nbytes:
        file.write(np.ascontiguousarray(array, array.dtype.newbyteorder("<")).view(np.uint8).data)
    file.write(b"\0" * (-array.nbytes % 8))
