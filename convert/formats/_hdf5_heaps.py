"""The heaps and indexes of HDF5: where groups keep names, dense groups their links, and strings their characters."""

from __future__ import annotations

from collections.abc import Iterator

from convert.formats._hdf5_bytes import UNDEFINED, Bytes
from weights.errors import LimitExceeded, MalformedFile, UnsupportedFormat

MAX_LEVELS = 32


def symbol_table(data: Bytes, message: memoryview) -> Iterator[tuple[str, int, str | None]]:
    """Go through a group of the old kind: each entry's name, address, and target if it is a soft link."""
    heap = data.word(message, 8)
    head = data.expect(heap, b"HEAP", 32)
    names = data.take(data.word(head, 24), data.word(head, 8), counted=False)
    for node, _ in tree(data, data.word(message, 0), 0, 8):
        head = data.expect(node, b"SNOD", 8)
        for number in range(data.word(head, 6, 2)):
            entry = data.take(node + 8 + 40 * number, 40)
            soft = data.word(entry, 16, 4) == 2
            target = _name(data, names, data.word(entry, 24, 4)) if soft else None
            yield _name(data, names, data.word(entry, 0)), data.word(entry, 8), target


def _name(data: Bytes, heap: memoryview, at: int) -> str:
    end = bytes(heap[at : at + 4096]).find(b"\0")
    if at >= len(heap) or end < 0:
        raise MalformedFile(f"{data.path} is no readable {data.what}: a name lies beyond its heap")
    return bytes(heap[at : at + end]).decode("utf-8", "surrogateescape")


def tree(data: Bytes, address: int, kind: int, key_bytes: int, depth: int = 0) -> Iterator[tuple[int, memoryview]]:
    """Go through a version 1 tree: the address of each leaf, and the key before it."""
    if address == UNDEFINED:
        return
    head = data.expect(address, b"TREE", 24)
    if head[4] != kind or depth > MAX_LEVELS:
        raise MalformedFile(f"{data.path} is no readable {data.what}: a tree of the wrong kind or of no end")
    level, count = head[5], data.word(head, 6, 2)
    body = data.take(address + 24, count * (key_bytes + 8))
    for number in range(count):
        at = number * (key_bytes + 8)
        child = data.word(body, at + key_bytes)
        if level:
            below = data.take(child, 6)
            if below[5] >= level:
                raise MalformedFile(f"{data.path} is no readable {data.what}: a tree that doesn't get lower")
            yield from tree(data, child, kind, key_bytes, depth + 1)
        else:
            yield child, body[at : at + key_bytes]


def global_object(data: Bytes, address: int, index: int) -> memoryview:
    """Find an object of a global heap: the characters of a string, the items of a sequence."""
    if not address or address == UNDEFINED:
        return memoryview(b"")
    head = data.expect(address, b"GCOL", 16)
    size = data.word(head, 8)
    at = 16
    while at + 16 <= size:
        entry = data.take(address + at, 16)
        number, count = data.word(entry, 0, 2), data.word(entry, 8)
        if number == index:
            return data.take(address + at + 16, count, counted=False)
        if not number:
            break
        at += 16 + -(-count // 8) * 8
    raise MalformedFile(f"{data.path} is no readable {data.what}: a heap has no object {index}")


def records(data: Bytes, address: int, kind: int) -> Iterator[memoryview]:
    """Go through the records of a version 2 tree."""
    if address == UNDEFINED:
        return
    head = data.expect(address, b"BTHD", 38)
    node, size, depth = data.word(head, 6, 4), data.word(head, 10, 2), data.word(head, 12, 2)
    if head[5] != kind or not size or depth > MAX_LEVELS or node < 2 * size + 10:
        raise MalformedFile(f"{data.path} is no readable {data.what}: an index of kind {head[5]}, {kind} was expected")
    most = [(node - 10) // size]
    counts = [most[0]]  # of all records below a node of this level
    width = (most[0].bit_length() - 1) // 8 + 1
    for level in range(1, depth + 1):
        pointer = 8 + width + _width(counts[level - 1], level - 1)
        most.append((node - 10 - pointer) // (size + pointer))
        counts.append((most[level] + 1) * counts[level - 1] + most[level])
    yield from _records(data, data.word(head, 16), data.word(head, 24, 2), size, depth, (width, counts))


def _width(count: int, level: int) -> int:
    return (count.bit_length() - 1) // 8 + 1 if level > 0 else 0


def _records(data: Bytes, address: int, count: int, size: int, level: int, widths: tuple[int, list[int]]) -> Iterator[memoryview]:
    width, counts = widths
    body = data.expect(address, b"BTIN" if level else b"BTLF", 6 + count * size)
    if not level:
        for number in range(count):
            yield body[6 + number * size : 6 + (number + 1) * size]
        return
    extra = _width(counts[level - 1], level - 1)
    pointers = data.cursor(data.take(address + 6 + count * size, (count + 1) * (8 + width + extra)))
    for number in range(count + 1):
        child, below = pointers.number(8), pointers.number(width)
        pointers.skip(extra)
        yield from _records(data, child, below, size, level - 1, widths)
        if number < count:
            yield body[6 + number * size : 6 + (number + 1) * size]


def heap_object(data: Bytes, address: int, identifier: bytes) -> memoryview:
    """Find an object of a fractal heap by its identifier: a link or an attribute of a dense group."""
    if not identifier:
        raise MalformedFile(f"{data.path} is no readable {data.what}: a heap's identifier is empty")
    kind = identifier[0] >> 4 & 3
    if kind == 2:
        count = (identifier[0] & 15) + 1
        return memoryview(identifier)[1 : 1 + count]
    head = data.expect(address, b"FRHP", 144)
    if kind == 1 or data.word(head, 7, 2):
        raise UnsupportedFormat(
            f"{data.path}: an HDF5 heap that is filtered, or an object too large for it; h5repack writes the file plainly"
        )
    bits = data.word(head, 128, 2)
    largest, managed = data.word(head, 120), data.word(head, 10, 4)
    wide = (bits + 7) // 8
    long = (min(largest, managed).bit_length() - 1) // 8 + 1
    offset = int.from_bytes(identifier[1 : 1 + wide], "little")
    count = int.from_bytes(identifier[1 + wide : 1 + wide + long], "little")
    width, start = data.word(head, 110, 2), data.word(head, 112)
    root, rows = data.word(head, 132), data.word(head, 140, 2)
    if not (width and start and largest) or start & start - 1 or largest & largest - 1 or rows > 64:
        raise MalformedFile(f"{data.path} is no readable {data.what}: a heap with blocks of {start} to {largest} bytes in {width} columns")
    if not rows:
        return _piece(data, root, start, offset, count)
    direct_rows = largest.bit_length() - start.bit_length() + 2
    return _indirect(data, root, rows, (width, start, wide, direct_rows), offset, count, 0)


def _piece(data: Bytes, address: int, size: int, offset: int, count: int) -> memoryview:
    data.expect(address, b"FHDB", 4)
    if offset + count > size:
        raise MalformedFile(f"{data.path} is no readable {data.what}: an object reaches beyond its block")
    return data.take(address + offset, count)


def _indirect(data: Bytes, address: int, rows: int, shape: tuple[int, int, int, int], offset: int, count: int, depth: int) -> memoryview:
    width, start, wide, direct_rows = shape
    if depth > MAX_LEVELS:
        raise LimitExceeded(f"{data.path}: a heap nests more than {MAX_LEVELS} deep")
    data.expect(address, b"FHIB", 4)
    first = 0
    for row in range(rows):
        size = start << max(row - 1, 0)
        if offset < first + size * width:
            column = (offset - first) // size
            child = data.word(data.take(address + 13 + wide + 8 * (row * width + column), 8), 0)
            inside = offset - first - column * size
            if row < direct_rows:
                return _piece(data, child, size, inside, count)
            # an indirect block of `size` bytes has the rows that add up to it
            below = (size // width).bit_length() - start.bit_length() + 1
            return _indirect(data, child, max(below, 1), shape, inside, count, depth + 1)
        first += size * width
    raise MalformedFile(f"{data.path} is no readable {data.what}: an object lies beyond its heap")
