"""The datatypes of HDF5, as NumPy sees them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from convert.formats._hdf5_bytes import Bytes, Cursor
from weights.errors import LimitExceeded, MalformedFile, UnsupportedFormat

MAX_NESTING = 40  # a state of Flux nests a struct and a tuple for every level of the network
MAX_MEMBERS = 10_000

VLEN = np.dtype([("length", "<u4"), ("address", "<u8"), ("index", "<u4")])
"""A sequence as it is stored: how long, and where in the file's heap."""


@dataclass(frozen=True, slots=True)
class Type:
    """What an element is.

    Attributes:
        kind: "number", "string", "compound", "reference" (an address), "region", "enum", "vlen", "array", "opaque" or "bitfield".
        dtype: of an element as it is stored.
        text: whether it is text: a string, or a vlen of characters.
        base: of an enum, array or vlen.
        members: of a compound (name, type); of an enum (name, None). Offsets are the dtype's.
        bfloat16: a number of 16 bits with an exponent of 8; the dtype is uint16.
    """

    kind: str
    dtype: np.dtype[Any]
    text: bool = False
    base: Type | None = None
    members: tuple[tuple[str, Type | None], ...] = ()
    bfloat16: bool = False


def datatype(cursor: Cursor, depth: int = 0) -> Type:
    """Read a datatype message, and move on behind it.

    Raises:
        MalformedFile, LimitExceeded, UnsupportedFormat.
    """
    data = cursor.data
    if depth > MAX_NESTING:
        raise LimitExceeded(f"{data.path}: a type within a type, more than {MAX_NESTING} times")
    first, bits, size = cursor.byte(), cursor.number(3), cursor.number(4)
    version = first >> 4
    if not 0 < size <= max(len(data.buffer), 16):
        raise MalformedFile(f"{data.path}: a type of {size} bytes")
    match first & 15:
        case 0:
            return _integer(cursor, bits, size)
        case 1:
            return _real(cursor, bits, size)
        case 3:
            return Type("string", np.dtype(f"S{size}"), text=True)
        case 4:
            cursor.skip(4)
            return Type("bitfield", np.dtype(f"<u{size}" if size in (1, 2, 4, 8) else f"V{size}"))
        case 5:
            cursor.skip(bits & 255)
            return Type("opaque", np.dtype(f"V{size}"))
        case 6:
            return _compound(cursor, version, bits & 0xFFFF, size, depth)
        case 7:
            address = bits & 15 == 0 and size == 8
            return Type("reference", np.dtype("<u8")) if address else Type("region", np.dtype(f"V{size}"))
        case 8:
            return _enum(cursor, version, bits & 0xFFFF, depth)
        case 9:
            base = datatype(cursor, depth + 1)
            if size != VLEN.itemsize:
                raise UnsupportedFormat(f"{data.path}: a sequence stored in {size} bytes; 16 are read")
            return Type("vlen", VLEN, text=bits & 15 == 1, base=base)
        case 10:
            return _array(cursor, version, size, depth)
        case number:
            raise UnsupportedFormat(f"{data.path}: HDF5 datatype class {number} is not read")


def _integer(cursor: Cursor, bits: int, size: int) -> Type:
    offset, precision = cursor.number(2), cursor.number(2)
    if size not in (1, 2, 4, 8) or offset or precision != 8 * size:
        raise UnsupportedFormat(f"{cursor.data.path}: integers of {precision} bits in {size} bytes")
    return Type("number", np.dtype(f"{'>' if bits & 1 else '<'}{'i' if bits & 8 else 'u'}{size}"))


def _real(cursor: Cursor, bits: int, size: int) -> Type:
    offset, precision = cursor.number(2), cursor.number(2)
    layout = tuple(cursor.take(4))
    cursor.skip(4)
    order = ">" if bits & 1 else "<"
    if bits & 64 or offset or precision != 8 * size:
        raise UnsupportedFormat(f"{cursor.data.path}: floats of {precision} bits in {size} bytes")
    if (size, layout) == (2, (7, 8, 0, 7)):
        return Type("number", np.dtype(f"{order}u2"), bfloat16=True)
    if (size, layout) not in ((2, (10, 5, 0, 10)), (4, (23, 8, 0, 23)), (8, (52, 11, 0, 52))):
        raise UnsupportedFormat(f"{cursor.data.path}: floats of {size} bytes that are not IEEE's")
    return Type("number", np.dtype(f"{order}f{size}"))


def _compound(cursor: Cursor, version: int, count: int, size: int, depth: int) -> Type:
    data = cursor.data
    if count > MAX_MEMBERS:
        raise LimitExceeded(f"{data.path}: a struct of {count} fields")
    members: list[tuple[str, Type]] = []
    offsets: list[int] = []
    for _ in range(count):
        name = cursor.name(8 if version < 3 else 1).decode("utf-8", "surrogateescape")
        offset = cursor.number(4 if version < 3 else max(1, (size.bit_length() + 7) // 8))
        dims: tuple[int, ...] = ()
        if version == 1:
            rank = cursor.byte()
            cursor.skip(11)
            dims = tuple(cursor.number(4) for _ in range(4))[:rank]
        member = datatype(cursor, depth + 1)
        if dims:
            member = _array_of(data, member, dims)
        if offset + member.dtype.itemsize > size:
            raise MalformedFile(f"{data.path}: the field {name!r} reaches beyond its struct")
        members.append((name, member))
        offsets.append(offset)
    names = [name for name, _ in members]
    if len(set(names)) != len(names) or "" in names:
        raise MalformedFile(f"{data.path}: a struct has two fields of one name, or one without")
    formats = [member.dtype for _, member in members]
    dtype = np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": size}) if names else np.dtype(f"V{size}")
    return Type("compound", dtype, members=tuple(members))


def _enum(cursor: Cursor, version: int, count: int, depth: int) -> Type:
    base = datatype(cursor, depth + 1)
    if count > MAX_MEMBERS:
        raise LimitExceeded(f"{cursor.data.path}: an enumeration of {count}")
    names = tuple((cursor.name(8 if version < 3 else 1).decode("utf-8", "replace"), None) for _ in range(count))
    cursor.skip(count * base.dtype.itemsize)
    return Type("enum", base.dtype, base=base, members=names)


def _array(cursor: Cursor, version: int, size: int, depth: int) -> Type:
    rank = cursor.byte()
    cursor.skip(3 if version < 3 else 0)
    dims = tuple(cursor.number(4) for _ in range(rank))
    cursor.skip(4 * rank if version < 3 else 0)
    made = _array_of(cursor.data, datatype(cursor, depth + 1), dims)
    if made.dtype.itemsize != size:
        raise MalformedFile(f"{cursor.data.path}: an array type of {dims} takes {made.dtype.itemsize} bytes, not {size}")
    return made


def _array_of(data: Bytes, base: Type, dims: tuple[int, ...]) -> Type:
    count = 1
    for dim in dims:
        count *= dim
        if not dim or count * base.dtype.itemsize > len(data.buffer) or len(dims) > 8:
            raise MalformedFile(f"{data.path}: an array type of {dims}")
    return Type("array", np.dtype((base.dtype, dims)), base=base)
