"""A .keras archive: a zip of the model's config and its weights, which are looked at in place."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from convert._guard import MAX_TENSORS, SPARE_BYTES
from convert.formats import _pickles, _zipped
from convert.formats._keras_config import MAX_CONFIG_BYTES, parse
from convert.formats._keras_v3 import Entry
from convert.formats._mapped import mapped
from convert.source import Stored
from weights.errors import LimitExceeded, MalformedFile, UnsupportedFormat

MAX_ENTRIES = 10_000
FIRST = (b"metadata.json", b"config.json", b"model.weights.")
"""How the name of an archive's first member begins; the list of all is read where the file is."""


@dataclass(frozen=True, slots=True)
class Archive:
    """An opened archive.

    Attributes:
        config: of the model.
        metadata: of the writing, "keras_version".
        members: bytes of the weights and whatever else there is, by name.
    """

    config: Mapping[str, Any]
    metadata: Mapping[str, Any]
    members: Mapping[str, memoryview]


def sniff(head: bytes) -> bool:
    """Tell a .keras archive by its first member."""
    return head[:4] == b"PK\x03\x04" and head[30 : 30 + int.from_bytes(head[26:28], "little")].startswith(FIRST)


def opened(path: Path) -> Archive:
    """Open an archive: a member that is stored plainly is a view of the file, one that is compressed is unpacked within limits.

    Raises:
        MalformedFile, LimitExceeded, UnsupportedFormat.
    """
    buffer = mapped(path)
    infos = {info.filename: info for info in _zipped.listed(buffer, MAX_ENTRIES)}
    left = 2 * len(buffer) + SPARE_BYTES // 2
    members: dict[str, memoryview] = {}
    for name, info in infos.items():
        if name.startswith("model.weights") or name.endswith(".weights.h5") or name in ("config.json", "metadata.json"):
            left -= 0 if info.compress_type == zipfile.ZIP_STORED else info.file_size
            if left < 0 or (name.endswith("json") and info.file_size > MAX_CONFIG_BYTES):
                raise LimitExceeded(f"{path}: {name} claims to unpack to {info.file_size} bytes")
            members[name] = _member(path, buffer, info)
    if "config.json" not in members:
        raise MalformedFile(f"{path} is no .keras file: it has no config.json")
    metadata = parse(bytes(members["metadata.json"]), path) if "metadata.json" in members else {}
    return Archive(parse(bytes(members["config.json"]), path), metadata, members)


def numpy_entries(path: Path, data: memoryview) -> dict[tuple[str, ...], Entry]:
    """Read weights in NumPy's archive, a pickled dict of arrays for each layer, without running the pickle."""
    found: dict[tuple[str, ...], Entry] = {}
    left = 2 * len(data) + SPARE_BYTES // 2
    for info in _zipped.listed(data, MAX_TENSORS):
        name = info.filename.removesuffix(".npy")
        left -= 0 if info.compress_type == zipfile.ZIP_STORED else info.file_size
        if left < 0:
            raise LimitExceeded(f"{path}: {info.filename} claims to unpack to {info.file_size} bytes")
        if name.split("/")[0] == "optimizer":
            continue
        key = () if name == "__root__" else tuple(name.split("/"))
        found[key] = Entry(key, "", len(found), _pickled(path, _zipped.contents(data, info)))
    return found


def _pickled(path: Path, data: memoryview) -> dict[str, Stored]:
    start = io.BytesIO(data)
    version = np.lib.format.read_magic(start)
    head = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = head(start)
    del fortran
    if not dtype.hasobject or shape != ():
        raise MalformedFile(f"{path}: weights of a layer are {dtype} of shape {shape}, not a dict")
    tree = _pickles.load(data[start.tell() :], path)
    return {".".join(key).rsplit(".", 1)[-1]: stored for key, stored in _pickles.arrays(tree).items()}


def _member(path: Path, buffer: memoryview, info: zipfile.ZipInfo) -> memoryview:
    if info.flag_bits & 1:
        raise UnsupportedFormat(f"{path}: {info.filename} is encrypted")
    return _zipped.contents(buffer, info)
