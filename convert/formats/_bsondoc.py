"""BSON at the level of bytes: documents to dicts, lists and numbers and back, binaries as views of the file, never copied.

Only what BSON.jl writes is read (https://github.com/JuliaIO/BSON.jl, src/read.jl): doubles, strings, documents, arrays,
binaries of subtype 0, booleans, null, int32 and int64.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weights.errors import LimitExceeded, MalformedFile, UnsupportedFormat

DOUBLE, STRING, DOCUMENT, ARRAY, BINARY, BOOLEAN, NULL, INT32, INT64 = 1, 2, 3, 4, 5, 8, 10, 16, 18
TYPES = frozenset((DOUBLE, STRING, DOCUMENT, ARRAY, BINARY, BOOLEAN, NULL, INT32, INT64))

MAX_DEPTH = 200
"""Documents in documents: a network of four levels takes about 30, and as many again for the types of its layers."""
MAX_ELEMENTS = 300_000
"""Of a file: each costs some hundred bytes here, whatever it holds."""
MAX_KEY_BYTES = 4096
MAX_BYTES = 2**31 - 1
"""Of a document: lengths are int32."""

_INT32, _INT64, _DOUBLE = struct.Struct("<i"), struct.Struct("<q"), struct.Struct("<d")
_NUMBERS = {DOUBLE: _DOUBLE, INT64: _INT64, INT32: _INT32}


def parse(buffer: memoryview) -> dict[str, Any]:
    """Read a document; a binary becomes a memoryview of `buffer`.

    Raises:
        MalformedFile: a length leads out of its document, or a key or a string has no end.
        LimitExceeded: the documents nest deeper, or hold more elements, than any network's.
        UnsupportedFormat: an element has a type that BSON.jl does not write.
    """
    parser = _Parser(buffer)
    root, end = parser.document(0, len(buffer), 0)
    if end != len(buffer):
        raise MalformedFile(f"the document ends at byte {end}, the file at {len(buffer)}")
    return root


class _Parser:
    def __init__(self, buffer: memoryview) -> None:
        self.buffer = buffer
        self.elements = 0

    def document(self, start: int, limit: int, depth: int) -> tuple[dict[str, Any], int]:
        end = self._end(start, limit)
        return dict(self._elements(start, end, depth)), end

    def array(self, start: int, limit: int, depth: int) -> tuple[list[Any], int]:
        end = self._end(start, limit)
        return [value for _, value in self._elements(start, end, depth)], end

    def _end(self, start: int, limit: int) -> int:
        size = self._unpack(_INT32, start, limit)
        if size < 5 or start + size > limit:
            raise MalformedFile(f"a document at byte {start} claims {size} bytes of the {limit - start} that there are")
        if self.buffer[start + size - 1] != 0:
            raise MalformedFile(f"the document at byte {start} does not end with a zero")
        return start + size

    def _elements(self, start: int, end: int, depth: int) -> Iterator[tuple[str, Any]]:
        if depth > MAX_DEPTH:
            raise LimitExceeded(f"documents nest deeper than {MAX_DEPTH}")
        at = start + 4
        while at < end - 1:
            self.elements += 1
            if self.elements > MAX_ELEMENTS:
                raise LimitExceeded(f"more than {MAX_ELEMENTS} elements")
            kind = self.buffer[at]
            key, at = self._key(at + 1, end - 1)
            value, at = self._value(kind, at, end - 1, depth)
            yield key, value

    def _key(self, start: int, limit: int) -> tuple[str, int]:
        head = bytes(self.buffer[start : min(start + MAX_KEY_BYTES, limit)])
        length = head.find(b"\0")
        if length < 0:
            raise MalformedFile(f"the key at byte {start} has no end")
        return head[:length].decode("utf-8", "replace"), start + length + 1

    def _value(self, kind: int, at: int, limit: int, depth: int) -> tuple[Any, int]:
        if kind == DOCUMENT:
            return self.document(at, limit, depth + 1)
        if kind == ARRAY:
            return self.array(at, limit, depth + 1)
        if kind == BINARY:
            size = self._size(at, limit - 5)
            return self.buffer[at + 5 : at + 5 + size], at + 5 + size
        if kind == STRING:
            size = self._size(at, limit - 4)
            return bytes(self.buffer[at + 4 : at + 4 + max(size - 1, 0)]).decode("utf-8", "replace"), at + 4 + size
        if kind in _NUMBERS:
            return self._unpack(_NUMBERS[kind], at, limit), at + _NUMBERS[kind].size
        if kind == BOOLEAN:
            if at >= limit:
                raise MalformedFile(f"the file ends in the boolean at byte {at}")
            return self.buffer[at] != 0, at + 1
        if kind == NULL:
            return None, at
        raise UnsupportedFormat(f"an element of type {kind:#04x} before byte {at}: BSON.jl writes no such thing")

    def _size(self, at: int, room_until: int) -> int:
        size = self._unpack(_INT32, at, room_until + 5)
        if size < 0 or at + size > room_until:
            raise MalformedFile(f"{size} bytes are claimed at byte {at}, {max(room_until - at, 0)} are there")
        return size

    def _unpack(self, form: struct.Struct, at: int, limit: int) -> Any:
        if at + form.size > limit:
            raise MalformedFile(f"the document ends in the number at byte {at}")
        return form.unpack_from(self.buffer, at)[0]


@dataclass(frozen=True, slots=True)
class Blob:
    """A binary of `size` bytes that is made when it is written."""

    size: int
    make: Callable[[], Any]


def encode(document: Mapping[str, Any]) -> Iterator[Any]:
    """Write a document piece by piece: dicts, lists, str, bool, int (always as int64), float, None and `Blob`.

    Raises:
        UnsupportedFormat: it would have 2 GiB or more, which BSON can't hold.
    """
    sizes: dict[int, int] = {}
    total = _measure(document, sizes)
    if total > MAX_BYTES:
        raise UnsupportedFormat(f"BSON holds at most 2 GiB, these tensors take {total} bytes; JLD2 has no such limit")
    return _pieces(document, sizes)


def _items(value: Mapping[str, Any] | Sequence[Any]) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from value.items()
    else:
        yield from ((str(index), item) for index, item in enumerate(value))


def _measure(value: Any, sizes: dict[int, int]) -> int:
    """Tell how many bytes a document takes, and remember it by the object's id, as all of them outlive the writing."""
    size = 5
    for key, item in _items(value):
        size += 2 + len(key.encode()) + _length(item, sizes)
    sizes[id(value)] = size
    return size


def _length(item: Any, sizes: dict[int, int]) -> int:
    if item is None:
        return 0
    if isinstance(item, bool):
        return 1
    if isinstance(item, int | float):
        return 8
    if isinstance(item, str):
        return 5 + len(item.encode())
    if isinstance(item, Blob):
        return 5 + item.size
    return _measure(item, sizes)


def _pieces(value: Any, sizes: Mapping[int, int]) -> Iterator[Any]:
    yield _INT32.pack(sizes[id(value)])
    for key, item in _items(value):
        name = key.encode() + b"\0"
        if item is None:
            yield bytes((NULL,)) + name
        elif isinstance(item, bool):
            yield bytes((BOOLEAN,)) + name + bytes((item,))
        elif isinstance(item, int):
            yield bytes((INT64,)) + name + _INT64.pack(item)
        elif isinstance(item, float):
            yield bytes((DOUBLE,)) + name + _DOUBLE.pack(item)
        elif isinstance(item, str):
            text = item.encode() + b"\0"
            yield bytes((STRING,)) + name + _INT32.pack(len(text)) + text
        elif isinstance(item, Blob):
            yield bytes((BINARY,)) + name + _INT32.pack(item.size) + b"\0"
            yield item.make()
        else:
            yield bytes((DOCUMENT if isinstance(item, Mapping) else ARRAY,)) + name
            yield from _pieces(item, sizes)
    yield b"\0"
