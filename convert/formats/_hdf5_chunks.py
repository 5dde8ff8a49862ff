"""Datasets of HDF5 that are cut into chunks, compressed or not."""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from convert._guard import SPARE_BYTES
from convert.formats._hdf5_bytes import UNDEFINED, Bytes
from convert.formats._hdf5_heaps import tree
from convert.formats._hdf5_messages import Layout
from convert.source import Shape
from weights.errors import LimitExceeded, MalformedFile, UnsupportedFormat

Filter = tuple[str, tuple[int, ...]]


def read(data: Bytes, layout: Layout, shape: Shape, dtype: np.dtype[Any], filters: Sequence[Filter], fill: Any, name: str) -> np.ndarray:
    """Put a dataset together from its chunks.

    Raises:
        MalformedFile: a chunk is cut, doesn't decompress, or lies outside.
        LimitExceeded: chunks are larger than the file can honestly hold.
        UnsupportedFormat: their index is of a kind that isn't read.
    """
    chunk, item = layout.chunk[:-1], dtype.itemsize
    if len(chunk) != len(shape) or not all(chunk) or layout.chunk[-1] != item:
        raise MalformedFile(f"{data.path}: {name} of shape {shape} in chunks of {layout.chunk}")
    nbytes = math.prod(chunk) * item
    if math.prod(shape) * item + 3 * nbytes > 2 * len(data.buffer) + SPARE_BYTES:
        raise LimitExceeded(f"{data.path} has {len(data.buffer)} bytes and claims {name} of shape {shape} in chunks of {chunk}")
    array = np.zeros(shape, dtype) if not np.any(fill) else np.full(shape, fill, dtype)
    for where, size, address, mask in _index(data, layout, shape, nbytes, bool(filters)):
        if address == UNDEFINED:
            continue
        if any(start >= length or start % step for start, length, step in zip(where, shape, chunk, strict=True)):
            raise MalformedFile(f"{data.path}: {name} has a chunk at {where}, outside of {shape}")
        data.budget -= nbytes // 256  # so that one chunk that is named a million times ends
        raw: Any = data.take(address, size)
        for number, (kind, options) in reversed(list(enumerate(filters))):
            if not mask >> number & 1:
                raw = _undo(data, kind, options, raw, nbytes, item)
        if len(raw) != nbytes:
            raise MalformedFile(f"{data.path}: a chunk of {name} has {len(raw)} bytes, not {nbytes}")
        piece = np.frombuffer(raw, dtype).reshape(chunk)
        target = tuple(slice(start, start + step) for start, step in zip(where, chunk, strict=True))
        inner = tuple(slice(0, max(0, min(step, length - start))) for start, step, length in zip(where, chunk, shape, strict=True))
        array[target] = piece[inner]
    return array


def _undo(data: Bytes, kind: str, options: tuple[int, ...], raw: Any, nbytes: int, item: int) -> Any:
    if kind == "fletcher32":
        return raw[:-4]
    if kind == "shuffle":
        width = options[0] if options else item
        if width < 2 or len(raw) < width:
            return raw
        whole = len(raw) // width * width
        mixed = np.frombuffer(raw, np.uint8)
        return np.concatenate([mixed[:whole].reshape(width, -1).T.reshape(-1), mixed[whole:]]).data
    limit = nbytes + 64  # what a filter behind may have added
    try:
        unpack = zlib.decompressobj()
        found = unpack.decompress(raw, limit)
    except zlib.error as error:
        raise MalformedFile(f"{data.path}: a chunk doesn't decompress: {error}") from error
    if unpack.unconsumed_tail and len(found) >= limit:
        raise LimitExceeded(f"{data.path}: a chunk of {len(raw)} bytes decompresses to more than its {nbytes}")
    return found


def _index(data: Bytes, layout: Layout, shape: Shape, nbytes: int, filtered: bool) -> Iterator[tuple[Shape, int, int, int]]:
    """Go through the chunks: where each lies in the array, its bytes in the file, its address, and the filters it went without."""
    rank, chunk = len(shape), layout.chunk[:-1]
    if layout.index == "btree":
        for address, key in tree(data, layout.address, 1, 8 + 8 * (rank + 1)):
            where = tuple(data.word(key, 8 + 8 * axis) for axis in range(rank))
            yield where, data.word(key, 0, 4), address, data.word(key, 4, 4)
    elif layout.index == "single":
        yield (0,) * rank, layout.size if filtered and layout.size else nbytes, layout.address, layout.mask
    elif layout.index == "implicit":
        if layout.address != UNDEFINED:
            for number, where in enumerate(_grid(shape, chunk)):
                yield where, nbytes, layout.address + number * nbytes, 0
    elif layout.index == "fixed":
        yield from _fixed(data, layout, shape, chunk, nbytes)
    else:
        raise UnsupportedFormat(f"{data.path}: chunks in an HDF5 index of kind {layout.index!r}; h5repack writes the file plainly")


def _grid(shape: Shape, chunk: Shape) -> Iterator[Shape]:
    return itertools.product(*(range(0, length, step) for length, step in zip(shape, chunk, strict=True)))


def _fixed(data: Bytes, layout: Layout, shape: Shape, chunk: Shape, nbytes: int) -> Iterator[tuple[Shape, int, int, int]]:
    if layout.address == UNDEFINED:
        return
    head = data.expect(layout.address, b"FAHD", 28)
    client, size, bits, count, block = head[5], head[6], head[7], data.word(head, 8), data.word(head, 16)
    total = math.prod(-(-length // step) for length, step in zip(shape, chunk, strict=True))
    if client > 1 or count != total or size != (8 if not client else size) or size < 8:
        raise MalformedFile(f"{data.path}: an index of {count} chunks where {total} are needed")
    if block == UNDEFINED:
        return
    data.expect(block, b"FADB", 14)
    page = 1 << bits
    paged = count > page
    start = block + 14 + ((-(-count // page) + 7) // 8 if paged else 0) + (4 if paged else 0)
    for number, where in enumerate(_grid(shape, chunk)):
        entry = data.take(start + number * size + (number // page * 4 if paged else 0), size)
        if client:
            width = size - 12
            yield where, data.word(entry, 8, width), data.word(entry, 0), data.word(entry, 8 + width, 4)
        else:
            yield where, nbytes, data.word(entry, 0), 0
