"""Write nested groups and datasets as JLD2.jl lays them out: addresses are planned first, then everything streams in order.

The result is plain HDF5 behind a user block of 512 bytes, the same bytes for the same input.

Source: HDF5 File Format Specification, version 3.0.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from convert.formats._hdf5 import SIGNATURE
from convert.formats._hdf5_bytes import UNDEFINED
from convert.kinds import is_mapping
from convert.source import Stored
from weights.errors import UnsupportedFormat

SPACE, LINK_INFO, TYPE, FILL, LINK, LAYOUT, GROUP_INFO = 0x01, 0x02, 0x03, 0x05, 0x06, 0x08, 0x0A
USER_BLOCK = b"HDF5-based Julia Data Format, version 0.1.1\0 (written by kernelzoo, not by Julia)".ljust(512, b"\0")
SUPERBLOCK_BYTES = 48
# (sign bit, exponent's place and bits, mantissa's bits, bias) by bytes
FLOATS = {2: (15, 10, 5, 10, 15), 4: (31, 23, 8, 23, 127), 8: (63, 52, 11, 52, 1023)}


def write_tree(root: Mapping[str, Any], path: Path) -> None:
    """Write a dict of dicts, `Stored`s, which are computed when their turn comes, ints and strs.

    Raises:
        UnsupportedFormat: an array's dtype is none of Julia's.
        OverflowError: a text or a name has more than 64 KiB.
    """
    plan = _Plan()
    address = plan.group(root)
    end = plan.end
    with path.open("wb") as file:
        file.write(USER_BLOCK)
        file.write(_superblock(address, end))
        for piece in plan.pieces:
            file.write(piece if isinstance(piece, bytes) else piece())


class _Plan:
    """Where everything goes, counted from the end of the user block; groups come after what they link to."""

    def __init__(self) -> None:
        self.end = SUPERBLOCK_BYTES
        self.pieces: list[bytes | Callable[[], Any]] = []

    def put(self, piece: bytes) -> int:
        address, self.end = self.end, self.end + len(piece)
        self.pieces.append(piece)
        pad = -self.end % 8
        self.pieces.append(b"\0" * pad)
        self.end += pad
        return address

    def group(self, items: Mapping[str, Any]) -> int:
        links = {name: self.item(item) for name, item in items.items()}
        info = struct.pack("<BBQQ", 0, 0, UNDEFINED, UNDEFINED)
        return self.put(_header([(LINK_INFO, info), (GROUP_INFO, b"\0\0"), *((LINK, _link(name, at)) for name, at in links.items())]))

    def item(self, item: Any) -> int:
        if is_mapping(item):
            return self.group(item)
        if isinstance(item, int):
            return self.bytes_of(item.to_bytes(8, "little", signed=True), _number(np.dtype("<i8")))
        if isinstance(item, str):
            text = item.encode() + b"\0"
            return self.bytes_of(text, struct.pack("<BBBBI", 0x13, 0x10, 0, 0, len(text)))
        return self.dataset(item)

    def bytes_of(self, data: bytes, kind: bytes) -> int:
        space = struct.pack("<BBBB", 2, 0, 0, 0)
        at = self.put(data)
        return self.put(_header([(SPACE, space), (TYPE, kind), (FILL, b"\3\t"), (LAYOUT, struct.pack("<BBQQ", 3, 1, at, len(data)))]))

    def dataset(self, data: Stored) -> int:
        little, size = data.dtype.newbyteorder("<"), math.prod(data.shape) * data.dtype.itemsize
        at = self.end if size else UNDEFINED
        pad = -size % 8
        self.pieces += [lambda: data.load().astype(little, copy=False).data if size else b"", b"\0" * pad]
        self.end += size + pad
        space = struct.pack(f"<BBBB{len(data.shape)}Q", 2, len(data.shape), 0, 1 if data.shape else 0, *data.shape)
        layout = struct.pack("<BBQQ", 3, 1, at, size)
        return self.put(_header([(SPACE, space), (TYPE, _number(data.dtype, data.origin)), (FILL, b"\3\t"), (LAYOUT, layout)]))


def _number(dtype: np.dtype[Any], name: str = "") -> bytes:
    size = dtype.itemsize
    if dtype.kind == "f" and size in FLOATS:
        sign, place, exponent, mantissa, bias = FLOATS[size]
        return struct.pack("<BBBBIHHBBBBI", 0x11, 0x20, sign, 0, size, 0, 8 * size, place, exponent, 0, mantissa, bias)
    if dtype.kind == "b":
        return struct.pack("<BBBBIHH", 0x14, 0, 0, 0, 1, 0, 1)  # a bit field, as Julia's Bool
    if dtype.kind in "iu":
        return struct.pack("<BBBBIHH", 0x10, 8 if dtype.kind == "i" else 0, 0, 0, size, 0, 8 * size)
    raise UnsupportedFormat(f"{name}: JLD2 has no {dtype}; cast it to float32 first")


def _link(name: str, address: int) -> bytes:
    text = name.encode()
    _short(text)
    return struct.pack("<BBBH", 1, 0x11, 1, len(text)) + text + struct.pack("<Q", address)


def _header(messages: list[tuple[int, bytes]]) -> bytes:
    body = b"".join(struct.pack("<BHB", kind, _short(data), 0) + data for kind, data in messages)
    head = b"OHDR" + struct.pack("<BBI", 2, 2, len(body)) + body
    return head + struct.pack("<I", checksum(head))


def _short(data: bytes) -> int:
    if len(data) > 0xFFFF:
        raise OverflowError(f"{len(data)} bytes in one header message")
    return len(data)


def _superblock(root: int, end: int) -> bytes:
    head = SIGNATURE + struct.pack("<BBBBQQQQ", 2, 8, 8, 0, len(USER_BLOCK), UNDEFINED, end + len(USER_BLOCK), root)
    return head + struct.pack("<I", checksum(head))


def checksum(data: bytes) -> int:
    """Compute Bob Jenkins's lookup3 of 2006 with seed 0, which HDF5 puts behind its headers."""
    mask = 0xFFFFFFFF
    length = len(data)
    a = b = c = (0xDEADBEEF + length) & mask

    def rot(x: int, k: int) -> int:
        return ((x << k) | (x >> (32 - k))) & mask

    at = 0
    while length - at > 12:
        x, y, z = struct.unpack_from("<III", data, at)
        state = [(a + x) & mask, (b + y) & mask, (c + z) & mask]
        for place, turn in enumerate((4, 6, 8, 16, 19, 4)):
            left, right, other = place % 3, (place + 2) % 3, (place + 1) % 3
            state[left] = ((state[left] - state[right]) & mask) ^ rot(state[right], turn)
            state[right] = (state[right] + state[other]) & mask
        a, b, c = state
        at += 12
    if at == length:
        return c
    x, y, z = struct.unpack("<III", data[at:].ljust(12, b"\0"))
    a, b, c = (a + x) & mask, (b + y) & mask, (c + z) & mask
    for left, right, turn in ((2, 1, 14), (0, 2, 11), (1, 0, 25), (2, 1, 16), (0, 2, 4), (1, 0, 14), (2, 1, 24)):
        state = [a, b, c]
        state[left] = ((state[left] ^ state[right]) - rot(state[right], turn)) & mask
        a, b, c = state
    return c
