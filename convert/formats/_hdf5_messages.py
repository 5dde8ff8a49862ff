"""The messages in an HDF5 object's header: its shape, where its numbers lie, what they went through."""

from __future__ import annotations

from dataclasses import dataclass

from convert.formats._hdf5_bytes import UNDEFINED, Bytes
from convert.source import Shape
from weights.errors import LimitExceeded, MalformedFile, UnsupportedFormat

MAX_MESSAGES = 200_000
"""Of one object; a group of many entries has a message for each, where it has no index."""
FILTERS = {1: "deflate", 2: "shuffle", 3: "fletcher32"}


@dataclass(frozen=True, slots=True)
class Message:
    """One message: its number in the specification, its bytes, and whether they only say where it is."""

    kind: int
    data: memoryview
    shared: bool = False


@dataclass(frozen=True, slots=True)
class Layout:
    """Where a dataset's numbers lie.

    Attributes:
        kind: "compact", "contiguous", "chunked" or "virtual".
        address: of the bytes, or of the index of chunks.
        size: of contiguous bytes; of the single chunk after its filters.
        data: compact bytes.
        chunk: its shape, and behind that the size of an element.
        index: "btree", "single", "implicit", "fixed", or what isn't read.
        mask: filters that the single chunk went without.
    """

    kind: str
    address: int = UNDEFINED
    size: int = 0
    data: memoryview | None = None
    chunk: Shape = ()
    index: str = "btree"
    mask: int = 0


def messages(data: Bytes, address: int) -> list[Message]:
    """Read the header of the object at an address, with all its continuations.

    Raises:
        MalformedFile, LimitExceeded.
    """
    new = bytes(data.take(address, 4)) == b"OHDR"
    found: list[Message] = []
    if new:
        head = data.expect(address, b"OHDR", 6)
        flags = head[5]
        at = 6 + (16 if flags & 0x20 else 0) + (4 if flags & 0x10 else 0)
        count = int.from_bytes(data.take(address + at, 1 << (flags & 3)), "little")
        blocks = [data.take(address + at + (1 << (flags & 3)), count)]
    else:
        head = data.take(address, 16)
        if head[0] != 1:
            raise MalformedFile(f"{data.path} is no readable {data.what}: no object's header at {data.base + address}")
        flags = 0
        blocks = [data.take(address + 16, data.word(head, 8, 4))]
    seen: set[int] = set()
    while blocks:
        for message in _block(data, blocks.pop(0), new, bool(flags & 4)):
            if message.kind == 0x10:
                where, count = data.word(message.data, 0), data.word(message.data, 8)
                if where in seen:
                    raise MalformedFile(f"{data.path} is no readable {data.what}: a header continues itself")
                seen.add(where)
                block = data.expect(where, b"OCHK", count)[4:-4] if new else data.take(where, count)
                blocks.append(block)
            elif message.kind:
                found.append(message)
                if len(found) > MAX_MESSAGES:
                    raise LimitExceeded(f"{data.path}: an object with more than {MAX_MESSAGES} messages")
    return found


def _block(data: Bytes, block: memoryview, new: bool, ordered: bool) -> list[Message]:
    found: list[Message] = []
    at = 0
    size = (4 + (2 if ordered else 0)) if new else 8
    while at + size <= len(block):
        kind = block[at] if new else data.word(block, at, 2)
        count = data.word(block, at + (1 if new else 2), 2)
        flags = block[at + (3 if new else 4)]
        if at + size + count > len(block):
            raise MalformedFile(f"{data.path} is no readable {data.what}: a message reaches beyond its header")
        found.append(Message(kind, block[at + size : at + size + count], bool(flags & 2)))
        at += size + count
    return found


def dataspace(data: Bytes, view: memoryview) -> Shape | None:
    """Read a shape; None where there is no element."""
    version, rank = data.word(view, 0, 1), data.word(view, 1, 1)
    if version not in (1, 2):
        raise UnsupportedFormat(f"{data.path}: an HDF5 dataspace of version {version}; 1 and 2 are read")
    if version == 2 and data.word(view, 3, 1) == 2:
        return None
    start = 8 if version == 1 else 4
    if rank > 32:
        raise LimitExceeded(f"{data.path}: an array of {rank} axes")
    return tuple(data.word(view, start + 8 * axis) for axis in range(rank))


def data_layout(data: Bytes, view: memoryview) -> Layout:
    """Read where the numbers lie."""
    cursor = data.cursor(view)
    version, kind = cursor.byte(), cursor.byte()
    if version not in (3, 4):
        raise UnsupportedFormat(f"{data.path}: an HDF5 data layout of version {version}; 3 and 4 are read. h5repack writes one")
    if kind == 0:
        return Layout("compact", data=cursor.take(cursor.number(2)))
    if kind == 1:
        return Layout("contiguous", cursor.number(8), cursor.number(8))
    if kind == 3:
        return Layout("virtual")
    if kind != 2:
        raise MalformedFile(f"{data.path}: an HDF5 data layout of class {kind}")
    if version == 3:
        rank = cursor.byte()
        address = cursor.number(8)
        return Layout("chunked", address, chunk=tuple(cursor.number(4) for _ in range(rank)))
    flags, rank, width = cursor.byte(), cursor.byte(), cursor.byte()
    chunk = tuple(cursor.number(width) for _ in range(rank))
    index = {1: "single", 2: "implicit", 3: "fixed", 4: "extensible", 5: "btree2"}.get(cursor.byte(), "unknown")
    size, mask = (cursor.number(8), cursor.number(4)) if index == "single" and flags & 2 else (0, 0)
    cursor.skip({"fixed": 1, "extensible": 5, "btree2": 6}.get(index, 0))
    return Layout("chunked", cursor.number(8), size, chunk=chunk, index=index, mask=mask)


def filters(data: Bytes, view: memoryview) -> list[tuple[str, tuple[int, ...]]]:
    """Read what chunks went through, the first filter first; UnsupportedFormat for one that isn't read."""
    cursor = data.cursor(view)
    version, count = cursor.byte(), cursor.byte()
    if version not in (1, 2) or count > 32:
        raise MalformedFile(f"{data.path}: {count} HDF5 filters of version {version}")
    cursor.skip(6 if version == 1 else 0)
    found: list[tuple[str, tuple[int, ...]]] = []
    for _ in range(count):
        number = cursor.number(2)
        length = cursor.number(2) if version == 1 or number >= 256 else 0
        cursor.skip(2)
        values = cursor.number(2)
        cursor.take(length, pad=8 if version == 1 else 1)
        options = tuple(cursor.number(4) for _ in range(values))
        cursor.skip(4 if version == 1 and values % 2 else 0)
        if number not in FILTERS:
            raise UnsupportedFormat(f"{data.path}: data compressed by HDF5 filter {number}; deflate is read. h5repack -f GZIP=1 writes it")
        found.append((FILTERS[number], options))
    return found


def fill_value(view: memoryview) -> memoryview | None:
    """Read the bytes of the element that stands where nothing was written."""
    version = view[0] if len(view) > 1 else 0
    defined = (len(view) > 4 and view[3]) if version in (1, 2) else version == 3 and view[1] & 0x20
    if not defined:
        return None
    at = 4 if version in (1, 2) else 2
    return view[at + 4 : at + 4 + int.from_bytes(view[at : at + 4], "little")]
