"""JLD2.jl's files: the state of a Flux.jl model (`Flux.state`) or a model whole, in HDF5 that libhdf5 is not needed for.

Arrays lie with their axes reversed, as in BSON: nothing is copied. JLD2 leaves out what has no size (functions, empty tuples),
so the layers of a Chain that carry nothing are missing and numbers have gaps; it names the fields of every struct, but no types
are read: what a layer is follows from the fields it keeps.

Written files hold a group `model_state` of plain groups and datasets. They are read back here, and by h5py; that JLD2.jl reads
them follows from the format's rules and is not verified: `docs/from-metalhead.md` shows how.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from convert._guard import check, reading
from convert.formats import _flux
from convert.formats._hdf5 import Dataset, Group, Hdf5, Type
from convert.formats._hdf5_bytes import UNDEFINED
from convert.formats._jld2write import write_tree
from convert.formats._julia import Array, Opaque
from convert.formats._juliatree import document, fill, naming
from convert.kinds import is_dict
from convert.source import Convention, Part, Source
from weights.errors import ConvertError, LimitExceeded

SUFFIXES = (".jld2",)
WRITES = True

HEADERS = (b"HDF5-based Julia Data Format", b"Julia data file (HDF5)")
MAX_DEPTH = 100
MAX_CHARACTERS = 10_000_000
"""Of all strings: many may be one in the file."""
TYPES = "_types"


def sniff(path: Path, head: bytes) -> bool:
    """Tell by the words in the 512 bytes that JLD2 puts before the HDF5 file."""
    del path
    return head.startswith(HEADERS)


def read(path: Path) -> Source:
    """Open a JLD2 file; its bytes are mapped, and a tensor is a view of them.

    Raises:
        ConvertError: as `convert.formats.read` says.
    """
    with reading(path, "JLD2 file"), naming(path):
        file = Hdf5(path, "JLD2 file")
        values = _Values(file)
        top = values.top()
        source = Source(path, "jld2", "JLD2.jl", {}, facts=_flux.facts(top), spatial="unknown", notes=values.notes)
        fill(source, top, set(), state_only=False)
        check(path, source.tensors.values(), file.size)
    return source


class _Values:
    """Turn objects into Julia values, each once."""

    def __init__(self, file: Hdf5) -> None:
        self.file = file
        self.known: dict[int, Any] = {}
        self.opened: set[int] = set()
        self.visits = 0
        self.characters = 0
        self.notes: list[str] = []

    def top(self) -> dict[str, Any]:
        return self._group(self.file.root, 0)

    def value(self, address: int, depth: int) -> Any:
        if address in (0, UNDEFINED):
            return None
        if address in self.opened:
            return Opaque("cycle")
        if address not in self.known:
            if depth > MAX_DEPTH:
                raise LimitExceeded(f"{self.file.path} nests deeper than any network")
            self.opened.add(address)
            self.known[address] = self._read(self.file.at(address), depth)
            self.opened.discard(address)
        return self.known[address]

    def _count(self) -> None:
        self.visits += 1
        if self.visits > _flux.MAX_VISITS:
            raise LimitExceeded(f"{self.file.path} holds more than {_flux.MAX_VISITS} values")

    def _group(self, group: Group, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, link in group.links.items():
            if link.kind != "hard":
                self.notes.append(f"{name}: a link to {link.target!r}, which is not followed")
            elif name != TYPES:
                found[name] = self.value(link.address, depth + 1)
        return found

    def _read(self, thing: Any, depth: int) -> Any:
        self._count()
        if isinstance(thing, Group):
            return self._group(thing, depth)
        if not isinstance(thing, Dataset):
            return Opaque("type")
        kind, shape = thing.type, thing.shape
        if kind.kind in ("number", "enum", "bitfield") and shape and not kind.bfloat16 and kind.dtype.kind != "V":
            thing.name = thing.name or f"the array at {thing.address}"
            return Array(shape, kind.dtype, thing.load)
        if math.prod(shape) > _flux.MAX_VISITS:
            return Opaque(kind.kind)
        raw = thing.load()
        if not shape:
            return self._cell(kind, raw[()], depth)
        items = [self._cell(kind, item, depth) for item in raw.reshape(-1)]
        if kind.kind == "compound" and [name for name, _ in kind.members] == ["first", "second"]:  # a Dict
            return {str(item["first"]): item["second"] for item in items if isinstance(item["first"], str | int)}
        return items

    def _cell(self, kind: Type, item: Any, depth: int) -> Any:
        self._count()
        if kind.kind == "reference":
            return self.value(int(item), depth + 1)
        if kind.kind in ("number", "bitfield", "enum"):
            return item.item()
        if kind.text:
            text = self.file.value(kind, np.asarray(item))
            self.characters += len(text)
            if self.characters > MAX_CHARACTERS:
                raise LimitExceeded(f"{self.file.path} holds more than {MAX_CHARACTERS} characters of text")
            return text
        if kind.kind != "compound" or not kind.members:
            return Opaque(kind.kind)
        found = {name: self._cell(member, item[name], depth + 1) for name, member in kind.members if member is not None}
        names = list(found)
        if names == ["kvvec"] and is_dict(found["kvvec"]):
            return found["kvvec"]
        if names == [str(index + 1) for index in range(len(names))]:  # a tuple, unless what has no size is missing from it
            return tuple(found.values())
        return found


def write(parts: Sequence[Part], path: Path, *, convention: Convention = "convolution", metadata: Mapping[str, str] | None = None) -> None:
    """Write the modules as nested groups under `model_state`, arrays with reversed axes.

    Args:
        parts: the modules; their names nest by dots and count from 1, "layers.1.layers.3".
        path: the file.
        convention: "convolution" is Flux's Conv, and what a file says for itself; "correlation" is CrossCor's.
        metadata: words that are kept beside the network, in the group `kernelzoo`.

    Raises:
        UnsupportedFormat: a dtype is not Julia's, or names contradict each other.
    """
    try:
        write_tree(document(parts, convention, metadata, lambda array: array), path)
    except OverflowError as error:
        raise ConvertError(f"{path}: a name or a text is longer than HDF5 can hold: {error}") from error
