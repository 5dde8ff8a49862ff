"""TensorFlow's checkpoints of both versions: which tensors there are, where their bytes lie, and what the object graph calls them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from convert import _guard
from convert.formats import _tf_table, _wire
from convert.formats._mapped import Maps
from convert.formats._wire import Budget, Message, message, one, schema
from convert.source import Stored
from convert.steps import Shape
from weights.errors import LimitExceeded, MalformedFile

DTYPES = {
    1: "float32", 2: "float64", 3: "int32", 4: "uint8", 5: "int16", 6: "int8", 8: "complex64", 9: "int64", 10: "bool", 14: "bfloat16",
    17: "uint16", 18: "complex128", 19: "float16", 22: "uint32", 23: "uint64", 24: "float8_e5m2", 25: "float8_e4m3fn",
}  # fmt: skip
SHAPE = schema("dim dims 2", dim=schema("int size 1"))
SLICE = schema("extent extents 1", extent=schema("int start 1, int length 2"))
HEADER = schema("int shards 1, int endianness 2")
PLACE = schema("int dtype 1, shape shape 2, int shard 3, int offset 4, int size 5, field crc 6, slice slices 7", shape=SHAPE, slice=SLICE)
OBJECTS = schema("node nodes 1", node=schema("attribute attributes 2", attribute=schema("string name 2, string key 3")))
DESCRIPTIONS = schema(
    "meta metas 1", meta=schema("tensor tensors 1", tensor=schema("string name 1, shape shape 2, int dtype 3", shape=SHAPE))
)
SAVED = schema("bytes slices 2")
SAVED_SLICE = schema("string name 1, slice slice 2, bytes tensor 3", slice=SLICE)
"""Of tensor_bundle.proto, trackable_object_graph.proto and saved_tensor_slice.proto what is read here."""
STRING = 7
OBJECT_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
VALUES = {5: "<f4", 6: "<f8"}
"""Fields of a TensorProto that hold floats and doubles; the others hold varints."""

Extent = tuple[int, int | None]


@dataclass(frozen=True, slots=True)
class Entry(Stored):
    """One tensor of a checkpoint, whose origin is its key; `same` is equal for entries of equal content."""

    same: object = None


@dataclass(slots=True)
class Bundle:
    """A checkpoint.

    Attributes:
        names: checkpoint key to the variable's own full name, as the object graph has it.
        left_out: keys of what is no tensor of numbers.
    """

    version: int
    entries: list[Entry] = field(default_factory=list[Entry])
    names: dict[str, str] = field(default_factory=dict[str, str])
    left_out: list[str] = field(default_factory=list[str])
    files: Maps = field(default_factory=Maps)


def parse(index: Path) -> Bundle:
    """Read the index of a checkpoint: of the second version beside its shards, or a file of the first, which holds everything.

    Raises:
        ConvertError: it is damaged, beyond the limits, or a shard is missing.
    """
    bundle, budget = Bundle(2), Budget()
    values = {str(item.key, "utf-8", "backslashreplace"): item for item in _tf_table.items(bundle.files.view(index))}
    first = values.pop("", None)
    if first is None:
        raise MalformedFile(f"{index} is a table, but no checkpoint's: it has no header")
    if index.name.endswith(".index"):
        _second_version(bundle, index, first, values, budget)
    else:
        bundle.version = 1
        _first_version(bundle, first, values, budget)
    return bundle


def _second_version(bundle: Bundle, index: Path, header: _tf_table.Item, values: dict[str, _tf_table.Item], budget: Budget) -> None:
    told = message(header.value, HEADER, budget)
    shards, big = one(told, "shards", 1), one(told, "endianness", 0) == 1
    if not 0 < shards <= 10_000:
        raise MalformedFile(f"{index} claims {shards} shards")

    def data(key: str, place: _Place) -> memoryview:
        if not 0 <= place.shard < shards:
            raise MalformedFile(f"{key} lies in shard {place.shard} of {shards}")
        path = index.with_name(f"{index.name.removesuffix('.index')}.data-{place.shard:05d}-of-{shards:05d}")
        if not path.is_file():
            raise MalformedFile(f"{index}: its shard {path.name} is not beside it. Fetch it too.")
        view = bundle.files.view(path)
        if place.offset < 0 or place.size < 0 or place.offset + place.size > len(view):
            raise MalformedFile(f"{key} has {place.size} bytes from {place.offset} of a shard of {len(view)}")
        return view[place.offset : place.offset + place.size]

    places = {key: _place(item.value, budget) for key, item in values.items() if not key.startswith("\0")}
    for key, place in places.items():
        if key == OBJECT_GRAPH and place.dtype == STRING:
            bundle.names = _object_graph(_strings(key, data(key, place), place)[0], budget)
        elif place.dtype not in DTYPES:
            bundle.left_out.append(key)
        elif place.slices:
            pieces: list[tuple[Any, Any]] = []
            for extents in place.slices:
                item = values.get(str(_slice_key(key, extents), "utf-8", "backslashreplace"))
                if item is None:
                    raise MalformedFile(f"{key} lacks its part {extents}")
                part = _place(item.value, budget)
                pieces.append((extents, _plain(key, data(key, part), part, _part(place.shape, extents, key), big)))
            bundle.entries.append(_assembled(key, place.shape, _guard.dtype_of(DTYPES[place.dtype]), pieces))
        else:
            bundle.entries.append(_plain(key, data(key, place), place, place.shape, big))


@dataclass(slots=True)
class _Place:
    """A BundleEntryProto."""

    dtype: int = 0
    shape: Shape = ()
    shard: int = 0
    offset: int = 0
    size: int = 0
    crc: int | None = None
    slices: list[list[Extent]] = field(default_factory=list[list[Extent]])


def _place(data: memoryview, budget: Budget) -> _Place:
    told = message(data, PLACE, budget)
    dtype, shard, offset, size = (one(told, field, 0) for field in ("dtype", "shard", "offset", "size"))
    crcs = [int.from_bytes(value, "little") for _, wire, value in told.get("crc", []) if wire == _wire.FIXED32]
    slices = [_extents(extents) for extents in told.get("slices", [])]
    return _Place(dtype, _shape(one(told, "shape", {})), shard, offset, size, crcs[-1] if crcs else None, slices)


def _shape(told: Message) -> Shape:
    dims = [dim.get("size", [0])[0] for dim in told.get("dims", [])]
    if len(dims) > _guard.MAX_RANK:
        raise LimitExceeded(f"a tensor has more than {_guard.MAX_RANK} axes")
    if min(dims, default=0) < 0:
        raise MalformedFile(f"a tensor has shape {dims}")
    return tuple(dims)


def _extents(told: Message) -> list[Extent]:
    """Read which part of a tensor a slice is: of each axis the start and the length, None for all of it."""
    extents: list[Extent] = [(one(extent, "start", 0), extent.get("length", [None])[-1]) for extent in told.get("extents", [])]
    if len(extents) > _guard.MAX_RANK:
        raise LimitExceeded(f"a part of a tensor has {len(extents)} axes")
    return extents


def _part(shape: Shape, extents: Sequence[Extent], key: str) -> Shape:
    if len(extents) != len(shape):
        raise MalformedFile(f"{key} of shape {shape} has a part {extents}")
    part = tuple(size if length is None else length for size, (_, length) in zip(shape, extents, strict=True))
    if any(start < 0 or length < 0 or start + length > size for size, length, (start, _) in zip(shape, part, extents, strict=True)):
        raise MalformedFile(f"{key} of shape {shape} has a part {extents}")
    return part


def _plain(key: str, data: memoryview, place: _Place, shape: Shape, big: bool) -> Entry:
    if place.dtype not in DTYPES:
        raise MalformedFile(f"{key} has no type")
    dtype = _guard.dtype_of(DTYPES[place.dtype])
    if math.prod(shape) * dtype.itemsize != len(data):
        raise MalformedFile(f"{key} of shape {shape} needs {math.prod(shape) * dtype.itemsize} bytes and has {len(data)}")
    order = ">" if big else "<"

    def load() -> np.ndarray:
        if place.crc is not None and _tf_table.masked(_tf_table.crc32c(data)) != place.crc:
            raise MalformedFile(f"{key} is damaged: its checksum differs. Fetch it again.")
        array = np.frombuffer(data, dtype.newbyteorder(order) if dtype.isbuiltin == 1 else dtype).reshape(shape)
        return array.astype(dtype, copy=False)

    return Entry(key, shape, dtype, load, same=(place.crc, place.dtype, shape) if place.crc else None)


def _assembled(key: str, shape: Shape, dtype: np.dtype[Any], pieces: Sequence[tuple[list[Extent], Entry]]) -> Entry:
    """Join the parts of a partitioned variable."""
    if sum(math.prod(entry.shape) for _, entry in pieces) != math.prod(shape) or any(entry.dtype != dtype for _, entry in pieces):
        raise MalformedFile(f"the parts of {key} don't fill its shape {shape}")

    def load() -> np.ndarray:
        whole = np.zeros(shape, dtype)
        for extents, entry in pieces:
            where = tuple(slice(start, start + size) for (start, _), size in zip(extents, entry.shape, strict=True))
            whole[where] = entry.load()
        return whole

    return Entry(key, shape, dtype, load)


def _strings(key: str, data: memoryview, place: _Place) -> list[memoryview]:
    """Read a tensor of strings: their lengths, a checksum of those, the strings."""
    lengths: list[int] = []
    count, at = math.prod(place.shape), 0
    if count > len(data):
        raise MalformedFile(f"{key} claims {count} strings in {len(data)} bytes")
    for _ in range(count):
        length, at = _wire.varint(data, at)
        lengths.append(length)
    at += 4
    if at + sum(lengths) != len(data) or not lengths:
        raise MalformedFile(f"{key} is cut off")
    found: list[memoryview] = []
    for length in lengths:
        found.append(data[at : at + length])
        at += length
    return found


def _object_graph(data: memoryview, budget: Budget) -> dict[str, str]:
    """Read the variables' own names: checkpoint key to "block1_conv1/kernel"."""
    attributes = [attribute for node in message(data, OBJECTS, budget).get("nodes", []) for attribute in node.get("attributes", [])]
    return {one(attribute, "key", ""): one(attribute, "name", "") for attribute in attributes}


def _slice_key(name: str, extents: Sequence[Extent]) -> bytes:
    """Write the key of a part as TensorFlow does: in an order-preserving code."""
    key = _ordered(0) + name.encode().replace(b"\xff", b"\xff\0").replace(b"\0", b"\0\xff") + b"\0\1" + _ordered(len(extents))
    return key + b"".join(_ordered_signed(start) + _ordered_signed(-1 if length is None else length) for start, length in extents)


def _ordered(value: int) -> bytes:
    digits = value.to_bytes((value.bit_length() + 7) // 8, "big")
    return bytes([len(digits)]) + digits


def _ordered_signed(value: int) -> bytes:
    """Write the number in as few bytes as hold it and a header of as many ones as there are bytes."""
    size = 1
    while not -(1 << 7 * size - 1) <= value < 1 << 7 * size - 1:
        size += 1
    header = ((1 << size) - 1) << (8 - size) if size <= 8 else 0xFF
    bits = value & (1 << 8 * size) - 1
    return (bits ^ header << 8 * (size - 1)).to_bytes(size, "big")


def _first_version(bundle: Bundle, meta: _tf_table.Item, values: dict[str, _tf_table.Item], budget: Budget) -> None:
    """Read a SavedTensorSlices of descriptions, and one for each part of each tensor."""
    known: dict[str, tuple[Shape, int]] = {}
    for tensor in (tensor for held in message(meta.value, DESCRIPTIONS, budget).get("metas", []) for tensor in held.get("tensors", [])):
        known[one(tensor, "name", "")] = (_shape(one(tensor, "shape", {})), one(tensor, "dtype", 0))
    pieces: dict[str, list[tuple[list[Extent], Entry]]] = {}
    for item in values.values():
        for part in message(item.value, SAVED, budget).get("slices", []):
            found = _saved_slice(part, known, item.check, budget)
            if found is not None:
                pieces.setdefault(found[1].origin, []).append(found)
    for name, (shape, dtype) in known.items():
        if dtype not in DTYPES:
            bundle.left_out.append(name)
        elif len(pieces.get(name, [])) == 1 and pieces[name][0][1].shape == shape:
            bundle.entries.append(pieces[name][0][1])
        else:
            bundle.entries.append(_assembled(name, shape, _guard.dtype_of(DTYPES[dtype]), pieces.get(name, [])))


def _saved_slice(
    data: memoryview, known: dict[str, tuple[Shape, int]], check: Callable[[], None], budget: Budget
) -> tuple[list[Extent], Entry] | None:
    told = message(data, SAVED_SLICE, budget)
    name, extents, tensor = one(told, "name", ""), _extents(one(told, "slice", {})), told.get("tensor", [memoryview(b"")])[-1]
    if name not in known or known[name][1] not in DTYPES:
        return None
    shape, kind = known[name]
    part, dtype = _part(shape, extents, name), _guard.dtype_of(DTYPES[kind])
    held: list[tuple[int, memoryview]] = []
    for number, wire, value in _wire.fields(tensor, budget):
        if number in (4, 5, 6, 7, 9, 10, 11, 13, 16, 17) and wire == _wire.BYTES:
            held.append((number, _wire.content(wire, value)))
    if len(held) != 1 or math.prod(part) > len(held[0][1]):
        raise MalformedFile(f"{name} of shape {part} does not hold its numbers")
    number, content = held[0]

    def load() -> np.ndarray:
        check()
        if number == 4:
            return np.frombuffer(content, dtype).reshape(part)
        flat = np.frombuffer(content, VALUES[number]) if number in VALUES else _wire.packed(content)
        if number == 13:  # halves and bfloat16 are written as their bits
            flat = flat.astype(np.uint16).view(dtype)
        if flat.size != math.prod(part):
            raise MalformedFile(f"{name} of shape {part} has {flat.size} numbers")
        return flat.astype(dtype, copy=False).reshape(part)

    return extents, Entry(name, part, dtype, load)
