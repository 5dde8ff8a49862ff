"""Apache MXNet's .params, of modules and of Gluon, with the -symbol.json beside it, which says what the network computes.

Kernels are OIHW, dense weights (out, in). A symbol's BatchNorm has a gamma of one unless it says otherwise (`fix_gamma`), whatever stands
in the file.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from convert import _guard
from convert.formats import _mxnet_ops
from convert.formats._mapped import Maps, stored
from convert.source import Source, Stored
from weights.documents import json_file
from weights.errors import LimitExceeded, MalformedFile, UnsupportedFormat

SUFFIXES = (".params",)
WRITES = False

MAGIC = (0x112).to_bytes(8, "little")
ARRAYS = (0xF993FAC8, 0xF993FAC9, 0xF993FACA)
"""How arrays begin, since 0.9, 0.11 and 1.6; before, with the number of their axes."""
DTYPES = {
    0: "float32", 1: "float64", 2: "float16", 3: "uint8", 4: "int32", 5: "int8", 6: "int64", 7: "bool", 8: "int16", 12: "bfloat16",
}  # fmt: skip


def sniff(path: Path, head: bytes) -> bool:
    """Tell it by the number that a list of arrays begins with."""
    del path
    return head.startswith(MAGIC)


def read(path: Path) -> Source:
    """Open a file of arrays; a -symbol.json of the same name beside it is read too.

    Raises:
        ConvertError: as `convert.formats.read`.
    """
    path = Path(path)
    with _guard.reading(path, "MXNet file"):
        files = Maps()
        arrays = _arrays(files.view(path), path)
        described = _symbol(path)
        size = files.size_bytes
        if described is None:
            notes = ["no -symbol.json lies beside it: whether BatchNorms have a gamma of one (fix_gamma) and what they add isn't said"]
            tensors = {_named(name): held for name, held in arrays.items()}
            if len(tensors) < len(arrays):
                raise MalformedFile("two of its arrays have one name")
            _guard.check(path, tensors.values(), size)
            found = {name: _kept(name, _guard.guarded(held, path, "MXNet file")) for name, held in tensors.items()}
            return Source(path, "mxnet", "MXNet", found, notes=notes, close=files.close)
        said = _mxnet_ops.said(json_file(described), {name.partition(":")[2] or name: held for name, held in arrays.items()})
        return said.finished(
            path,
            "mxnet",
            "MXNet",
            size + described.stat().st_size,
            "MXNet file",
            facts={"symbol": described.name},
            notes=said.notes,
            close=files.close,
            beside=(described.name,),
        )


def _symbol(path: Path) -> Path | None:
    """Find what describes the network: without the number of the epoch in its name."""
    found = path.with_name(re.sub(r"(-\d{4,})?\.params$", "", path.name) + "-symbol.json")
    return found if found.is_file() and not found.is_symlink() else None


LEAVES = {
    "weight": "weight", "bias": "bias", "gamma": "weight", "beta": "bias", "moving_mean": "running_mean", "moving_var": "running_var",
    "running_mean": "running_mean", "running_var": "running_var",
}  # fmt: skip
LEAF = re.compile(rf"(.+)[._]({'|'.join(sorted(LEAVES, key=len, reverse=True))})$")


def _named(name: str) -> str:
    """Give an array of a network without a description its module's name and PyTorch's leaf."""
    plain = name.partition(":")[2] if name.startswith(("arg:", "aux:")) else name
    match = LEAF.match(plain)
    return f"{match[1]}.{LEAVES[match[2]]}" if match else plain


def _kept(name: str, held: Stored) -> Stored:
    kernel = name.endswith(".weight") and len(held.shape) > 2
    return Stored(held.origin, held.stored_shape, held.stored_dtype, held.load, held.steps, "correlation" if kernel else None)


def _arrays(data: memoryview, path: Path) -> Mapping[str, Stored]:
    """Read the list of arrays, and that of their names behind it."""
    at = 24
    (count,) = struct.unpack_from("<Q", data, 16)
    if count > _guard.MAX_TENSORS or count > len(data) // 4:
        raise LimitExceeded(f"{path} claims {count} arrays; at most {_guard.MAX_TENSORS} are read")
    described: list[tuple[memoryview, np.dtype[Any], tuple[int, ...]]] = []
    for number in range(count):
        shape, at = _shape(data, at, f"array {number}")
        if not shape:  # one that was never given numbers
            described.append((memoryview(b""), np.dtype(np.float32), (0,)))
            continue
        _, _, kind = struct.unpack_from("<iii", data, at)
        if kind not in DTYPES:
            raise UnsupportedFormat(f"{path}: array {number} has numbers of kind {kind}, which is not read")
        dtype = _guard.dtype_of(DTYPES[kind])
        size = math.prod(shape) * dtype.itemsize
        if at + 12 + size > len(data):
            raise MalformedFile(f"{path}: array {number} of shape {shape} leads out of the file. Is it cut short? Fetch it again")
        described.append((data[at + 12 : at + 12 + size], dtype, shape))
        at += 12 + size
    (names,) = struct.unpack_from("<Q", data, at)
    if names not in (0, count):
        raise MalformedFile(f"{path} has {count} arrays and {names} names")
    at += 8
    found: dict[str, Stored] = {}
    for number, (raw, dtype, shape) in enumerate(described):
        name = str(number)
        if names:
            (length,) = struct.unpack_from("<Q", data, at)
            if length > 4096 or at + 8 + length > len(data):
                raise MalformedFile(f"{path}: the name of array {number} leads out of the file")
            name = str(bytes(data[at + 8 : at + 8 + length]), "utf-8", "backslashreplace")
            at += 8 + length
        if name in found:
            raise MalformedFile(f"{path} has two arrays called {name!r:.100}")
        if math.prod(shape):
            found[name] = stored(name, raw, dtype, shape)
    if not found:
        raise MalformedFile(f"{path} holds no weights")
    return found


def _shape(data: memoryview, at: int, what: str) -> tuple[tuple[int, ...], int]:
    """Read an array's shape, as each generation wrote it; and where it ends."""
    (first,) = struct.unpack_from("<I", data, at)
    at += 4
    wide = first in ARRAYS
    if first in ARRAYS[1:]:
        (storage,) = struct.unpack_from("<i", data, at)
        at += 4
        if storage:
            raise UnsupportedFormat(f"{what} is sparse; dense ones are read")
    if wide:
        (first,) = struct.unpack_from("<I", data, at)
        at += 4
    if first > _guard.MAX_RANK:
        raise LimitExceeded(f"{what} has {first} axes; at most {_guard.MAX_RANK} are read")
    width = 8 if wide else 4
    shape = struct.unpack_from(f"<{first}{'q' if wide else 'I'}", data, at)
    if min(shape, default=0) < 0:
        raise MalformedFile(f"{what} has shape {shape}")
    return shape, at + width * first
