"""Orbax's checkpoint folders: zarr arrays, each in a folder of its own or all in one OCDBT store; tensorstore reads both."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import numpy as np

from convert._guard import MAX_TENSORS, SPARE_BYTES, guarded, need, reading
from convert.kinds import is_dict
from convert.source import Stored
from weights.documents import json_file
from weights.errors import LimitExceeded, MalformedFile, UnsafeFormat

MARKS = ("_METADATA", "manifest.ocdbt", "_CHECKPOINT_METADATA")
ITEMS = ("", "default", "state", "params", "items", "model")
"""Where a step's folder keeps the tree; "" is the folder itself."""
MAX_FILES = 1_000_000
MAX_METADATA_BYTES = 64 * 2**20
PART = re.compile(r"'((?:[^'\\]|\\.)*)'|\"((?:[^\"\\]|\\.)*)\"|(\d+)")


def is_checkpoint(path: Path) -> bool:
    """Tell whether a folder is a checkpoint of Orbax."""
    return any((path / mark).is_file() for mark in MARKS) or next(iter(path.glob("*/.zarray")), None) is not None


def tensors(path: Path) -> tuple[dict[tuple[str, ...], Stored], int, str]:
    """Describe every array of a checkpoint by its place in the tree.

    Returns:
        The arrays; the bytes of all files; and what wrote them.
    """
    ts = need("tensorstore")
    size = _size(path)
    folder = next((path / item for item in ITEMS if _holds_arrays(path / item)), None)
    if folder is None:
        raise MalformedFile(f"{path} holds no arrays: neither manifest.ocdbt nor folders with .zarray")
    with reading(path, "Orbax checkpoint"):
        metadata = _metadata(folder)
        one_store = (folder / "manifest.ocdbt").is_file()
        driver = "zarr3" if metadata.get("use_zarr3") is True else "zarr"
        store = {"driver": "ocdbt", "base": folder.resolve().as_uri()} if one_store else {"driver": "file", "path": f"{folder.resolve()}/"}
        keys = _keys(ts, store, driver)
        places = _places(metadata)
        if len(keys) > MAX_TENSORS:
            raise LimitExceeded(f"it has more than {MAX_TENSORS} tensors")
        found = {places.get(key, tuple(key.split("."))): _stored(ts, store, driver, key, size) for key in keys}
    kind = "OCDBT" if one_store else "a folder an array"
    return found, size, f"Flax, Orbax ({kind})"


def _size(path: Path) -> int:
    total = 0
    for number, entry in enumerate(path.rglob("*")):
        if number > MAX_FILES:
            raise LimitExceeded(f"{path} has more than {MAX_FILES} files")
        if entry.is_symlink():
            raise UnsafeFormat(f"{path} holds a link, {entry.relative_to(path)}, which could lead anywhere; a checkpoint of Orbax has none")
        if entry.is_file():
            total += entry.stat().st_size
    return total


def _holds_arrays(folder: Path) -> bool:
    return (folder / "manifest.ocdbt").is_file() or next(
        (p for mark in (".zarray", "zarr.json") for p in folder.glob(f"*/{mark}")), None
    ) is not None


def _metadata(folder: Path) -> dict[str, Any]:
    file = folder / "_METADATA"
    if not file.is_file():
        return {}
    metadata = json_file(file, most_bytes=MAX_METADATA_BYTES)
    return metadata if is_dict(metadata) else {}


def _places(metadata: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    """Say where in the tree an array is: its key joins the places by dots, which a name may hold as well."""
    found: dict[str, tuple[str, ...]] = {}
    tree = metadata.get("tree_metadata")
    for text in tree if is_dict(tree) else ():
        # "('params', 'conv1', 'kernel')": the strings are read one by one, as no expression
        parts = tuple(ast.literal_eval(part.group(0)) if part.group(3) is None else part.group(3) for part in PART.finditer(text))
        if parts:
            found[".".join(parts)] = parts
    return found


def _keys(ts: Any, store: dict[str, Any], driver: str) -> list[str]:
    mark = "zarr.json" if driver == "zarr3" else ".zarray"
    if store["driver"] == "file":
        folder = Path(store["path"])
        return sorted(entry.parent.name for entry in folder.glob(f"*/{mark}"))
    listed = ts.KvStore.open(store).result().list().result()
    return sorted(key.decode().removesuffix(f"/{mark}") for key in listed if key.endswith(f"/{mark}".encode()))


def _stored(ts: Any, store: dict[str, Any], driver: str, key: str, size: int) -> Stored:
    place = {**store, "path": f"{key}/"} if store["driver"] == "ocdbt" else {**store, "path": f"{store['path']}{key}/"}
    spec = {"driver": driver, "kvstore": place, "open": True}
    opened = ts.open(spec, read=True).result()
    shape, dtype = tuple(opened.shape), np.dtype(opened.dtype.numpy_dtype)
    chunk = int(np.prod(opened.chunk_layout.read_chunk.shape or (1,), dtype=object)) * dtype.itemsize
    if chunk > 2 * size + SPARE_BYTES:
        raise LimitExceeded(f"{key} has chunks of {chunk} bytes; all files together have {size}")

    stored = Stored(key, shape, dtype, lambda: np.asarray(ts.open(spec, read=True).result().read().result()))
    return guarded(stored, Path(key), "array of an Orbax checkpoint")
