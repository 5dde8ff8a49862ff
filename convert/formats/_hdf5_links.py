"""Where an HDF5 file begins, what its groups lead to, and where objects keep their attributes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from convert.formats import _hdf5_heaps as heaps
from convert.formats._hdf5_bytes import UNDEFINED, Bytes
from convert.formats._hdf5_messages import Message
from weights.errors import MalformedFile, UnsafeFormat, UnsupportedFormat

SIGNATURE = b"\x89HDF\r\n\x1a\n"


@dataclass(frozen=True, slots=True)
class Link:
    """What a group's entry leads to: "hard" to an address, "soft" to a path in this file, "external" to another file."""

    kind: str
    address: int = UNDEFINED
    target: str = ""


def superblock(data: Bytes) -> int:
    """Find the address of the root group, and set what all addresses are relative to.

    Raises:
        MalformedFile, UnsafeFormat, UnsupportedFormat.
    """
    start = 0
    while bytes(data.buffer[start : start + 8]) != SIGNATURE:
        start = start * 2 or 512
        if start >= len(data.buffer):
            raise MalformedFile(f"{data.path} is no {data.what}: HDF5's signature is missing. Is it cut short, or a web page?")
    version = data.take(start + 8, 1)[0]
    if version in (0, 1):
        head = data.take(start, 104 if version else 100)
        sizes, at = (head[13], head[14]), 28 if version else 24
        base, driver, root = data.word(head, at), data.word(head, at + 24), data.word(head, at + 40)
    elif version in (2, 3):
        head = data.take(start, 48)
        sizes = (head[9], head[10])
        base, driver, root = data.word(head, 12), UNDEFINED, data.word(head, 36)
    else:
        raise UnsupportedFormat(f"{data.path}: HDF5 superblock version {version}; 0 to 3 are read")
    if sizes != (8, 8):
        raise UnsupportedFormat(f"{data.path}: HDF5 with offsets of {sizes[0]} and lengths of {sizes[1]} bytes; 8 and 8 are read")
    if driver != UNDEFINED:
        raise UnsafeFormat(f"{data.path} is one of several files that HDF5 joins; other files are never opened")
    if base not in (0, start):
        raise MalformedFile(f"{data.path}: HDF5's data should begin at {start} or 0, not {base}")
    data.base = base
    return root


def links(data: Bytes, found: Sequence[Message]) -> Iterator[tuple[str, Link]]:
    """Go through a group's entries."""
    for message in found:
        if message.kind == 0x11:
            for name, address, target in heaps.symbol_table(data, message.data):
                yield name, Link("soft", target=target) if target is not None else Link("hard", address)
        elif message.kind == 6:
            yield _link(data, message.data)
        elif message.kind == 2:
            for record, heap in _dense(data, message, 8, 5):
                yield _link(data, heaps.heap_object(data, heap, bytes(record[4:])))


def _link(data: Bytes, view: memoryview) -> tuple[str, Link]:
    cursor = data.cursor(view)
    _, flags = cursor.byte(), cursor.byte()
    kind = cursor.byte() if flags & 8 else 0
    cursor.skip((8 if flags & 4 else 0) + (1 if flags & 16 else 0))
    name = bytes(cursor.take(cursor.number(1 << (flags & 3)))).decode("utf-8", "surrogateescape")
    if kind == 0:
        return name, Link("hard", cursor.number(8))
    target = bytes(cursor.take(cursor.number(2))).decode("utf-8", "replace")
    return name, Link("soft" if kind == 1 else "external", target=target)


def attributes(data: Bytes, found: Sequence[Message]) -> Iterator[Message]:
    """Go through the messages of an object's attributes."""
    for message in found:
        if message.kind == 0x0C:
            yield message
        elif message.kind == 0x15:
            for record, heap in _dense(data, message, 2, 8):
                yield Message(0x0C, heaps.heap_object(data, heap, bytes(record[:8])), bool(record[8] & 2))


def _dense(data: Bytes, message: Message, order_bytes: int, kind: int) -> Iterator[tuple[memoryview, int]]:
    """Go through what an object keeps in an index: the records, and the heap that they refer to."""
    at = 2 + (order_bytes if message.data[1] & 1 else 0)
    heap, index = data.word(message.data, at), data.word(message.data, at + 8)
    if heap != UNDEFINED:
        for record in heaps.records(data, index, kind):
            yield record, heap
