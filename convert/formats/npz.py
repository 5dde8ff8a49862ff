"""NumPy's .npz and .npy: tensors by any name, Flax's trees, Caffe's blobs, and the lists that Lasagne keeps without names.

A member is mapped where it is stored as it is, and unpacked when it is asked for where it is compressed. Objects in such a file are
pickles: they are read as data, by `convert.formats._pickles`.
"""

from __future__ import annotations

import io
import json
import math
import re
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from convert._guard import MAX_RANK, MAX_TENSORS, SPARE_BYTES, check, reading
from convert.core import COUNTER
from convert.formats import _chainer, _lasagne, _named, _pickles, _zipped, flax
from convert.formats._mapped import mapped, stored
from convert.kinds import is_dict
from convert.source import Part, Shape, Source, Stored, in_memory, laid_out
from weights.documents import read_json
from weights.errors import ConvertError, LimitExceeded, MalformedFile

SUFFIXES = (".npz", ".npy")
WRITES = True

MAGIC = b"\x93NUMPY"
NUMBERED = re.compile(r"arr_(\d+)")
NOTES = "__metadata__"
"""The member in which a file of our own keeps what it says of itself: JSON, as a string of NumPy's."""
MAX_HEADER_BYTES = 65_536
EPOCH = (1980, 1, 1, 0, 0, 0)


def sniff(path: Path, head: bytes) -> bool:
    """Tell a .npy by its magic number, and a zip archive whose first member is one."""
    del path
    if head.startswith(MAGIC):
        return True
    if not head.startswith(b"PK\3\4") or len(head) < 30:
        return False
    length = int.from_bytes(head[26:28], "little")
    return head[30 : 30 + length].endswith(b".npy")


def read(path: Path) -> Source:
    """Open a file of NumPy's.

    Raises:
        MalformedFile, LimitExceeded: the file is damaged or claims more than it can hold.
        UnsafeFormat: it holds pickled objects other than arrays, lists and dicts.
    """
    with reading(path, "file of NumPy's"):
        buffer = mapped(path)
        single = bytes(buffer[: len(MAGIC)]) == MAGIC
        members = {"arr_0": _member(buffer, "arr_0")} if single else _archive(path, buffer)
        return _understood(path, members, len(buffer))


def write(parts: Sequence[Part], path: Path, *, convention: str | None = None, metadata: Mapping[str, str]) -> None:
    """Write a network's tensors, one in memory at a time; the same input gives the same bytes.

    Args:
        parts: the modules in order.
        path: the file.
        convention: "convolution" writes flipped kernels.
        metadata: kept in the member ``__metadata__``. "naming": "lasagne" writes Lasagne's list arr_0, arr_1 … instead, which has no
            place for it; "naming": "flax" writes a tree's leaves, HWIO, with slashes.
    """
    naming = metadata.get("naming")
    if naming == "lasagne":
        tensors = {f"arr_{number}": tensor for number, tensor in enumerate(_lasagne.listed(parts, convention))}
    elif naming == "flax":
        tensors = flax.flat_names(parts, convention)
    else:
        tensors = {
            f"{part.name}.{leaf}": _turned(t, leaf, convention) for part in parts for leaf, t in part.leaves.items() if leaf != COUNTER
        }
    if naming != "lasagne":
        notes = json.dumps({**metadata, "kernel_convention": convention or "correlation"}, sort_keys=True)
        tensors = {NOTES: in_memory(NOTES, np.array(notes)), **tensors}
    with zipfile.ZipFile(path, "w", allowZip64=True) as archive:
        for name, tensor in tensors.items():
            array = np.ascontiguousarray(tensor.array()).reshape(tensor.shape)
            with archive.open(zipfile.ZipInfo(f"{name}.npy", EPOCH), "w", force_zip64=array.nbytes > 2**31 - 2**16) as file:
                _put(file, array)


def _turned(tensor: Stored, leaf: str, convention: str | None) -> Stored:
    if leaf != "weight" or convention != "convolution" or len(tensor.shape) < 3:
        return tensor
    return laid_out(tensor, "conv", "OI" + "DHW"[5 - len(tensor.shape) :], flipped=True)


def _put(file: Any, array: np.ndarray) -> None:
    if array.dtype.type.__module__ != "numpy":
        raise ConvertError(f"NumPy's files hold no {array.dtype.name}: write another format, or cast to float32 first")
    np.lib.format.write_array(file, array, version=(1, 0), allow_pickle=False)


def _archive(path: Path, buffer: memoryview) -> dict[str, _Member]:
    infos = _zipped.listed(buffer, MAX_TENSORS)
    if (total := sum(info.file_size for info in infos)) > 2 * len(buffer) + SPARE_BYTES:
        raise LimitExceeded(f"{path} has {len(buffer)} bytes and would unpack to {total}: it is damaged or hostile")
    found: dict[str, _Member] = {}
    for info in infos:
        name = info.filename.removesuffix(".npy")
        if name in found:
            raise MalformedFile(f"{path} has two members {name!r}")
        if info.compress_type == zipfile.ZIP_STORED:
            found[name] = _member(_zipped.contents(buffer, info), name)
        else:
            found[name] = _packed_member(path, buffer, info, name)
    return found


class _Member:
    """One array: its description, and how to read it; objects have a pickle instead."""

    def __init__(self, tensor: Stored | None, pickle: Callable[[], memoryview] | None = None) -> None:
        self.tensor, self.pickle = tensor, pickle


def _member(data: memoryview, name: str) -> _Member:
    head = io.BytesIO(bytes(data[: MAX_HEADER_BYTES + 16]))
    shape, order, dtype = _header(head, name)
    body = data[head.tell() :]
    if dtype.hasobject:
        return _Member(None, lambda: body)
    return _Member(stored(name, body, dtype, shape, order))


def _packed_member(path: Path, buffer: memoryview, info: zipfile.ZipInfo, name: str) -> _Member:
    def unpacked(start: int) -> memoryview:
        with reading(path, "file of NumPy's"):
            return _zipped.contents(buffer, info)[start:]

    head = io.BytesIO(_zipped.contents(buffer, info, MAX_HEADER_BYTES + 16))
    shape, order, dtype = _header(head, name)
    start = head.tell()
    if dtype.hasobject:
        return _Member(None, lambda: unpacked(start))
    if math.prod(shape) * dtype.itemsize != info.file_size - start:
        raise MalformedFile(f"{name}: {dtype} of shape {shape} does not fill {info.file_size - start} bytes")

    def load() -> np.ndarray:
        return stored(name, unpacked(start), dtype, shape, order).load()

    return _Member(Stored(name, shape, dtype, load))


def _header(file: BinaryIO, name: str) -> tuple[Shape, str, np.dtype[Any]]:
    version = np.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0), (3, 0)):
        raise MalformedFile(f"{name} is of version {version} of NumPy's format; 1 to 3 are read")
    # version 3 differs from 2 in the names of a structure's fields only, and structures are refused
    parse = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = parse(file, max_header_size=MAX_HEADER_BYTES)
    if len(shape) > MAX_RANK or any(type(dim) is not int or dim < 0 for dim in shape):
        raise LimitExceeded(f"{name} has the shape {str(shape)[:100]}; at most {MAX_RANK} axes are read")
    if dtype.fields is not None or dtype.subdtype is not None:
        raise MalformedFile(f"{name} holds structures, not numbers")
    return tuple(shape), "F" if fortran else "C", dtype


def _understood(path: Path, members: Mapping[str, _Member], size: int) -> Source:
    """Find out whose names these are."""
    check(path, (member.tensor for member in members.values() if member.tensor is not None), size)
    facts: dict[str, str] = {}
    tensors: dict[str, Stored] = {}
    notes: list[str] = []
    for name, member in members.items():
        if member.pickle is not None:
            if len(members) == 1:
                return _lasagne.from_pickle(path, "npz", _pickles.load(member.pickle(), path), size)
            found = _pickles.arrays(_pickles.load(member.pickle(), path))
            tensors |= {".".join((name, *place)): tensor for place, tensor in found.items()}
        elif (member.tensor is not None and member.tensor.stored_dtype.kind in "fiubc") or name == NOTES:
            if name == NOTES and member.tensor is not None and member.tensor.stored_dtype.kind == "U":
                facts = _facts(member.tensor)
            elif member.tensor is not None:
                tensors[name] = member.tensor
        else:
            notes.append(f"left out {name}, which holds no numbers")
    if not tensors:
        raise MalformedFile(f"{path} holds no tensors")
    if all(NUMBERED.fullmatch(name) for name in tensors):
        order = sorted(tensors, key=lambda name: int(name.removeprefix("arr_")))
        return _lasagne.positional(path, "npz", [tensors[name] for name in order], notes)
    if flax.looks_like_flax({name: tensor.stored_shape for name, tensor in tensors.items()}):
        return flax.canonical(Source(path, "npz", "NumPy", tensors, facts=facts, notes=notes))
    if NOTES not in members and _chainer.looks({name: tensor.stored_shape for name, tensor in tensors.items()}):
        return _chainer.source(path, "npz", tensors, facts, notes)
    return _named.source(path, "npz", tensors, facts, notes)


def _facts(tensor: Stored) -> dict[str, str]:
    if math.prod(tensor.stored_shape) != 1:
        return {}
    found = read_json(str(tensor.load()), NOTES)
    return {str(key): str(value) for key, value in found.items()} if is_dict(found) else {}
