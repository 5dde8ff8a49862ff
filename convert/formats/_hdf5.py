"""HDF5 as weight files use it, read from a map of the file and without its library: groups, attributes and datasets.

The reference library hangs or crashes on damaged files (one mutation in a few hundred keeps it busy for ever), so the structure
is read here, byte by byte and within limits. Nothing outside the file is ever opened: external links, external storage and
virtual datasets are errors. A contiguous dataset is a view of the map.

    file = Hdf5(path); file.root["model_weights/conv1"].attrs["weight_names"]; file.root["a/b"].load()

Addresses are relative to the superblock's base, as in the file; an object reference is such an address, and `Hdf5.at` follows it.

Source:
    HDF5 File Format Specification 3.0, docs.hdfgroup.org
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from convert._guard import MAX_RANK, MAX_TENSORS, SPARE_BYTES, reading
from convert.formats import _hdf5_chunks as chunks
from convert.formats import _hdf5_heaps as heaps
from convert.formats._hdf5_bytes import UNDEFINED, Bytes
from convert.formats._hdf5_links import SIGNATURE, Link, attributes, links, superblock
from convert.formats._hdf5_messages import Layout, Message, data_layout, dataspace, fill_value, filters, messages
from convert.formats._hdf5_types import Type, datatype
from convert.formats._mapped import mapped
from convert.source import Shape, Stored
from weights.errors import ConvertError, LimitExceeded, MalformedFile, UnsafeFormat, UnsupportedFormat


def sniff(path: Path, head: bytes) -> bool:
    """Tell an HDF5 file, also one with another program's block of 512, 1024 or 2048 bytes before it (MATLAB, JLD2)."""
    del path
    return any(head[at : at + 8] == SIGNATURE for at in (0, 512, 1024, 2048))


@dataclass(slots=True)
class Hdf5:
    """An open file.

    Args:
        path: an HDF5 file.
        what: how errors call it, "Keras file".
        buffer: the bytes, where they are not the whole of the file at `path`.

    Raises:
        MalformedFile, LimitExceeded, UnsafeFormat, UnsupportedFormat: here and from everything that is asked of the file later.
    """

    path: Path
    what: str = "HDF5 file"
    buffer: memoryview | None = None
    data: Bytes = field(init=False)
    root: Group = field(init=False)
    _objects: dict[int, Any] = field(init=False, default_factory=dict[int, Any])

    def __post_init__(self) -> None:
        self.data = Bytes(mapped(self.path) if self.buffer is None else self.buffer, self.path, self.what)
        root = self.at(superblock(self.data))
        if not isinstance(root, Group):
            raise MalformedFile(f"{self.path}: the root of this {self.what} is no group")
        root.name = "/"
        self.root = root

    @property
    def size(self) -> int:
        return len(self.data.buffer)

    def at(self, address: int) -> Any:
        """Find the `Group`, `Dataset` or `Named` type whose header lies at an address."""
        if address not in self._objects:
            if len(self._objects) > MAX_TENSORS * 4:
                raise LimitExceeded(f"{self.path} has more than {MAX_TENSORS * 4} objects")
            found = messages(self.data, address)
            kinds = {message.kind for message in found}
            make = Dataset if 8 in kinds else Named if 3 in kinds and 1 not in kinds else Group
            if 3 in kinds and 1 in kinds and 8 not in kinds:
                raise MalformedFile(f"{self.path}: a dataset at {address} says not where its numbers are")
            self._objects[address] = make(self, address, found)
        return self._objects[address]

    def close(self) -> None:
        """Forget the map; arrays that are views of it keep it alive."""
        self._objects.clear()

    def value(self, kind: Type, raw: np.ndarray) -> Any:
        """Turn numbers as they are stored into what they mean: strings of any kind to `str`, sequences to arrays.

        Args:
            kind: their type; a compound comes back as it is.
            raw: of dtype `kind.dtype`.

        Returns:
            An array, or a list of `str` or of arrays where numpy has no such thing; the bare value where `raw` has no axis.
        """
        if kind.kind not in ("string", "vlen"):
            return raw if raw.ndim else raw[()]
        if len(flat := raw.reshape(-1)) > MAX_TENSORS:
            raise LimitExceeded(f"{self.path}: {len(flat)} strings or sequences in one place")
        values = [self._text(item, kind) if kind.text else self._sequence(item, kind) for item in flat]
        return values if raw.ndim else values[0]

    def _text(self, item: Any, kind: Type) -> str:
        data = bytes(item) if kind.kind == "string" else bytes(heaps.global_object(self.data, int(item["address"]), int(item["index"])))
        if kind.kind == "vlen":
            data = data[: int(item["length"])]
        return data.split(b"\0", 1)[0].decode("utf-8", "surrogateescape")

    def _sequence(self, item: Any, kind: Type) -> Any:
        base = kind.base
        if base is None or not int(item["length"]):
            return np.empty(0, base.dtype if base else "u1")
        data = heaps.global_object(self.data, int(item["address"]), int(item["index"]))
        count = int(item["length"])
        if count * base.dtype.itemsize > len(data):
            raise MalformedFile(f"{self.path}: a sequence of {count} items has {len(data)} bytes")
        return self.value(base, np.frombuffer(data, base.dtype, count))


@dataclass(slots=True)
class Named:
    """An object of a file with attributes: here a type that has a name of its own (Julia commits its structs)."""

    file: Hdf5
    address: int
    messages: list[Message]
    name: str = ""
    _attrs: dict[str, Any] | None = None

    @property
    def type(self) -> Type:
        message = next(message for message in self.messages if message.kind == 3)
        return _type(self.file, message.data, message.shared)

    @property
    def attrs(self) -> dict[str, Any]:
        """Its attributes, in the file's order: numbers, arrays, `str`, lists of `str`; None for an empty one."""
        if self._attrs is None:
            self._attrs = {}
            for message in attributes(self.file.data, self.messages):
                name, value = _attribute(self.file, message)
                self._attrs[name] = value
        return self._attrs


@dataclass(slots=True)
class Group(Named):
    """A folder of a file."""

    _links: dict[str, Link] | None = None

    @property
    def links(self) -> dict[str, Link]:
        """Its entries, by name, none of them followed."""
        if self._links is None:
            self._links = {}
            for name, link in links(self.file.data, self.messages):
                if name in self._links:
                    raise MalformedFile(f"{self.file.path}: two things are called {name!r} in one group")
                self._links[name] = link
                if len(self._links) > MAX_TENSORS:
                    raise LimitExceeded(f"{self.file.path}: a group of more than {MAX_TENSORS} things")
        return self._links

    def __iter__(self) -> Iterator[str]:
        return iter(self.links)

    def __contains__(self, path: str) -> bool:
        try:
            return self[path] is not None
        except KeyError:
            return False

    def __getitem__(self, path: str) -> Any:
        """Follow a path, "a/b/c", relative to this group, or to the root if it begins with a slash.

        Raises:
            KeyError: there is nothing there.
            UnsafeFormat: an external link stands in the way; a link within the file that leads round in circles.
        """
        return self._walk(path, 0)

    def _walk(self, path: str, hops: int) -> Any:
        here: Any = self.file.root if path.startswith("/") else self
        for part in path.split("/"):
            if not part or part == ".":
                continue
            if not isinstance(here, Group) or part not in here.links:
                raise KeyError(path)
            link = here.links[part]
            if link.kind == "external":
                raise UnsafeFormat(f"{self.file.path}: {part!r} is a link to the file {link.target!r}; other files are never opened")
            if link.kind == "soft":
                if hops > 8:
                    raise UnsafeFormat(f"{self.file.path}: the link {part!r} leads through more than 8 others")
                here = here._walk(link.target, hops + 1)
                continue
            found = self.file.at(link.address)
            found.name = found.name or f"{here.name.rstrip('/')}/{part}"
            here = found
        return here


@dataclass(slots=True)
class Dataset(Named):
    """An array of a file; the shape is as HDF5 has it (C order), so a Julia or MATLAB array shows its axes reversed."""

    _shape: Shape | None = None
    _kind: Type | None = None

    @property
    def type(self) -> Type:
        """What its elements are."""
        if self._kind is None:
            self._kind = _type(self.file, *_one(self, 3))
        return self._kind

    @property
    def dtype(self) -> np.dtype[Any]:
        """The NumPy dtype of its elements as they are stored."""
        return self.type.dtype

    @property
    def shape(self) -> Shape:
        """Its axes; () for a single element, (0,) for an empty one."""
        if self._shape is None:
            shape = dataspace(self.file.data, _one(self, 1)[0])
            self._shape = (0,) if shape is None else shape
            if len(self._shape) > MAX_RANK:
                raise LimitExceeded(f"{self.file.path}: {self.name} has {len(self._shape)} axes; at most {MAX_RANK} are read")
            if math.prod(self._shape) * self.dtype.itemsize > 2 * self.file.size + SPARE_BYTES:
                raise LimitExceeded(f"{self.file.path} has {self.file.size} bytes and claims {self.name} of shape {self._shape}")
        return self._shape

    def load(self) -> np.ndarray:
        """Read it: a read-only view of the map where it lies in one piece, else a new array."""
        with reading(self.file.path, self.file.what):
            return self._read()

    def _read(self) -> np.ndarray:
        if any(message.kind == 7 for message in self.messages):
            raise UnsafeFormat(f"{self.file.path}: {self.name} lies in another file; other files are never opened")
        data = self.file.data
        layout = data_layout(data, _one(self, 8)[0])
        shape, dtype = self.shape, self.dtype
        nbytes = math.prod(shape) * dtype.itemsize
        if layout.kind == "virtual":
            raise UnsafeFormat(f"{self.file.path}: {self.name} is put together from other datasets; such are never opened")
        if layout.kind == "chunked" and nbytes:
            return chunks.read(data, layout, shape, dtype, self._filters(), self._fill(), self.name)
        raw = layout.data if layout.kind == "compact" else None
        if not nbytes or (raw is None and layout.address == UNDEFINED):
            return np.full(shape, self._fill(), dtype) if nbytes else np.empty(shape, dtype)
        if raw is None:
            if layout.size < nbytes:
                raise MalformedFile(f"{self.file.path}: {self.name} of shape {shape} needs {nbytes} bytes, its storage has {layout.size}")
            raw = data.take(layout.address, nbytes, counted=False)
        if len(raw) < nbytes:
            raise MalformedFile(f"{self.file.path}: {self.name} of shape {shape} needs {nbytes} bytes and has {len(raw)}")
        return np.frombuffer(raw, dtype, math.prod(shape)).reshape(shape)

    def value(self) -> Any:
        """Read it and say what it means, as `Hdf5.value` does."""
        return self.file.value(self.type, self.load())

    def stored(self, origin: str = "", load: Callable[[], np.ndarray] | None = None) -> Stored:
        """Describe it as a tensor with no steps; UnsupportedFormat if it doesn't hold numbers."""
        if self.type.kind not in ("number", "enum"):
            raise UnsupportedFormat(f"{self.file.path}: {self.name} holds {self.type.kind}, not numbers")
        return Stored(origin or self.name, self.shape, self.dtype, load or self.load)

    def _filters(self) -> list[Any]:
        found = [message for message in self.messages if message.kind == 0x0B]
        return filters(self.file.data, found[0].data) if found else []

    def _fill(self) -> Any:
        found = next((message for message in self.messages if message.kind == 5), None)
        raw = fill_value(found.data) if found else None
        return np.frombuffer(raw, self.dtype, 1)[0] if raw and len(raw) == self.dtype.itemsize else np.zeros((), self.dtype)


def _one(named: Named, kind: int) -> tuple[memoryview, bool]:
    found = [message for message in named.messages if message.kind == kind]
    if len(found) != 1:
        raise MalformedFile(f"{named.file.path}: {named.name or named.address} has {len(found)} HDF5 messages of kind {kind}, not 1")
    return found[0].data, found[0].shared


def _type(file: Hdf5, data: memoryview, shared: bool) -> Type:
    if not shared:
        return datatype(file.data.cursor(data))
    address = _shared(file, data)
    named = file.at(address)
    if type(named) is not Named:
        raise MalformedFile(f"{file.path}: a type is said to be at {address}, where there is none")
    if any(message.kind == 3 and message.shared for message in named.messages):
        raise MalformedFile(f"{file.path}: the type at {address} refers to another")
    return named.type


def _shared(file: Hdf5, data: memoryview) -> int:
    if len(data) < 10 or data[0] not in (1, 2, 3) or (data[0] == 3 and data[1] != 2):
        raise UnsupportedFormat(f"{file.path}: an HDF5 message shared in a way that is not read; h5repack writes the file plainly")
    return file.data.word(data, 8 if data[0] == 1 else 2)


def _attribute(file: Hdf5, message: Message) -> tuple[str, Any]:
    if message.shared:
        raise UnsupportedFormat(f"{file.path}: an attribute that several objects share; h5repack writes the file plainly")
    cursor = file.data.cursor(message.data)
    version, flags = cursor.byte(), cursor.byte()
    if version not in (1, 2, 3):
        raise UnsupportedFormat(f"{file.path}: an HDF5 attribute of version {version}; 1 to 3 are read")
    sizes = [cursor.number(2) for _ in range(3)]
    cursor.skip(1 if version == 3 else 0)
    name, kind_bytes, space_bytes = (cursor.take(size, pad=8 if version == 1 else 1) for size in sizes)
    text = bytes(name).split(b"\0", 1)[0].decode("utf-8", "surrogateescape")
    try:
        kind = _type(file, kind_bytes, version > 1 and bool(flags & 1))
        if version > 1 and flags & 2:
            raise UnsupportedFormat(f"{file.path}: a dataspace that several objects share; h5repack writes the file plainly")
        shape = dataspace(file.data, space_bytes)
        if shape is None:
            return text, None
        count = math.prod(shape)
        raw = cursor.rest()
        if count * kind.dtype.itemsize > len(raw):
            raise MalformedFile(f"{file.path}: the attribute {text!r} of shape {shape} has {len(raw)} bytes")
        return text, file.value(kind, np.frombuffer(raw, kind.dtype, count).reshape(shape))
    except ConvertError as error:
        raise type(error)(f"{error} (attribute {text!r})") from error


__all__ = ["SIGNATURE", "Dataset", "Group", "Hdf5", "Layout", "Link", "Named", "Type", "sniff"]
