"""safetensors: a JSON header, every word of which `weights.header` checks, then the tensors' bytes."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from convert._kept import Kept, Settling, write_all
from convert.formats import _sharded
from convert.source import FromFile, Part, Source, Stored
from convert.steps import NEAR, laid
from weights.errors import ConvertError, MalformedFile, UnsupportedFormat
from weights.header import DTYPES, MAX_HEADER_BYTES, Entry, beginning, entries, is_safetensors, metadata, parsed

if TYPE_CHECKING:
    from torch import Tensor
    from typing_extensions import Buffer

SUFFIXES = (".safetensors",)
WRITES = True
SLAB_BYTES = 1 << 25
"""Of a tensor whose numbers have to move, as much as is laid out before it is written."""


def sniff(path: Path, head: bytes) -> bool:
    """Tell a safetensors file by its beginning, or an index of several."""
    return path.is_file() and (is_safetensors(head, path.stat().st_size) or _sharded.sniff(head, b".safetensors"))


def read(path: Path) -> Source:
    """Open a safetensors file, or those that an index names; files of Flax and of our own converter are known by names and notes.

    This is the one reader that works in the process that asks, so nothing is mapped: a file that somebody cuts short would end it. Its
    tensors are read when they are asked for, each into memory of its own.

    Raises:
        MalformedFile, LimitExceeded, UnsupportedFormat: as `entries` does.
    """
    from convert.formats import flax
    from convert.formats._torch import numpy_dtype

    if path.name.endswith(".json"):
        whole = _sharded.read(path, read)
        return flax.canonical(whole) if flax.looks_like_flax({name: one.stored_shape for name, one in whole.tensors.items()}) else whole
    file = Kept(path)
    try:
        head = _head(file)
        found = entries(head, file.size_bytes)
        notes = metadata(head, file.size_bytes)
    except ConvertError as error:
        file.close()
        raise type(error)(f"{path}: {error}") from error

    def stored(name: str, entry: Entry) -> Stored:
        dtype = numpy_dtype(DTYPES[entry.dtype][1])
        kernel = name.endswith("weight") and len(entry.shape) > 2

        def load() -> np.ndarray:
            array = np.empty(entry.shape, dtype)
            if array.size:
                file.fill(array.reshape(-1).view(np.uint8).data, entry.start, name)
            if dtype == np.bool_:
                _see_booleans(array.reshape(-1).view(np.uint8).tobytes(), name)
            return array

        def pour(into: FileIO) -> bool:
            file.pour(into, entry.start, entry.stop - entry.start, name)
            return True

        return Stored(name, entry.shape, dtype, FromFile(load, pour), convention="correlation" if kernel else None)

    tensors = {name: stored(name, entry) for name, entry in found.items()}
    source = Source(path, "safetensors", "PyTorch", tensors, facts=notes, close=file.close)
    return flax.canonical(source) if flax.looks_like_flax({name: entry.shape for name, entry in found.items()}) else source


def _see_booleans(data: bytes, name: str) -> None:
    if data.strip(b"\0\1"):
        raise MalformedFile(f"tensor {name!r} is boolean and holds bytes other than 0 and 1")


def _head(file: Kept) -> bytes:
    """Read the length and the header, no more of it than is believed."""
    first = file.beginning(8)
    length = int.from_bytes(first, "little")
    if len(first) < 8 or length > min(MAX_HEADER_BYTES, file.size_bytes - 8):
        return first
    text = bytearray(length)
    file.fill(memoryview(text), 8, "")
    return first + text


def tensors(buffer: Buffer) -> dict[str, Tensor]:
    """Read the tensors: views of `buffer`, which they keep alive.

    A tensor is copied when the buffer can't be written, as torch has no read-only tensors, or its bytes are misaligned.

    Raises:
        MalformedFile, LimitExceeded, UnsupportedFormat: as `entries` does.
    """
    import torch

    found = entries(buffer)
    view = memoryview(buffer).cast("B")
    if not found:
        return {}
    address = None if view.readonly else torch.frombuffer(view, dtype=torch.uint8).data_ptr()
    read: dict[str, Tensor] = {}
    for name, entry in found.items():
        itemsize, dtype_name = DTYPES[entry.dtype]
        dtype = getattr(torch, dtype_name)
        if entry.start == entry.stop:
            read[name] = torch.empty(entry.shape, dtype=dtype)
            continue
        if entry.dtype == "BOOL":
            _see_booleans(view[entry.start : entry.stop].tobytes(), name)
        if address is None or (address + entry.start) % itemsize:
            flat = torch.frombuffer(bytearray(view[entry.start : entry.stop]), dtype=dtype)
        else:
            flat = torch.frombuffer(view, dtype=dtype, count=(entry.stop - entry.start) // itemsize, offset=entry.start)
        read[name] = flat.reshape(entry.shape)
    return read


def save(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write torch's tensors; the same tensors and metadata always give the same bytes.

    (The safetensors library writes metadata in random order, so the file's hash would change from run to run.)

    Args:
        tensors: by name; on any device, of any strides.
        path: the file to write, not atomically: whoever needs that writes beside it and renames.
        metadata: free-form notes.

    Raises:
        UnsupportedFormat: a tensor is not dense, or its dtype is not one of `DTYPES`.
    """
    import torch

    from convert.formats._torch import stored

    known = {getattr(torch, name) for _, name in DTYPES.values()}
    for name, tensor in tensors.items():
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.dtype not in known:
            raise UnsupportedFormat(f"safetensors can't hold {name!r}: {tensor.dtype}, {tensor.layout}")
    save_stored({name: stored(name, tensor) for name, tensor in tensors.items()}, path, metadata)


def write(parts: Sequence[Part], path: Path, *, convention: str | None = None, metadata: Mapping[str, str]) -> None:
    """Write the modules' tensors under ``module.leaf``, one after the other; the same input always gives the same bytes.

    "naming": "flax" in the metadata writes a Flax tree: names with slashes, kernels HWIO.

    Raises:
        ConvertError: kernels of true convolution were asked for, or a dtype is not one of `DTYPES`.
    """
    from convert._guard import correlation_only
    from convert.formats import flax

    if metadata.get("naming") == "flax":
        save_stored(flax.flat_names(parts, convention), path, metadata)
        return
    correlation_only(convention, "PyTorch, which reads safetensors,")
    save_stored({f"{part.name}.{leaf}": stored for part in parts for leaf, stored in part.leaves.items()}, path, metadata)


def save_stored(
    tensors: Mapping[str, Stored],
    path: Path,
    metadata: Mapping[str, str] | None = None,
    written: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Write tensors of a source, holding two of them in memory at most; raises as `save` does.

    Args:
        tensors: by name.
        path: the file to write.
        metadata: free-form notes.
        written: told the bytes done and all bytes before each tensor.
    """
    from convert.formats._torch import numpy_dtype

    codes = {numpy_dtype(name): (code, itemsize) for code, (itemsize, name) in DTYPES.items()}
    dtypes = {name: stored.dtype.newbyteorder("=") for name, stored in tensors.items()}
    for name, dtype in dtypes.items():
        if dtype not in codes:
            raise UnsupportedFormat(f"safetensors can't hold {name!r}: {dtype}")
    described = {name: (*codes[dtypes[name]], stored.shape) for name, stored in tensors.items()}
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    order = sorted(described, key=lambda name: (-described[name][1], name))  # widest first: all stay aligned
    end = 0
    for name in order:
        code, itemsize, shape = described[name]
        start, end = end, end + math.prod(shape) * itemsize
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    places = {name: header[name]["data_offsets"] for name in order}
    filled = [name for name in order if places[name][0] < places[name][1]]
    read = [name for name in filled if not tensors[name].poured]
    with path.open("wb", buffering=0) as file, ThreadPoolExecutor(1, "zoo-next-tensor") as ahead, Settling(file):
        write_all(file, memoryview(len(text).to_bytes(8, "little") + text))
        coming = {name: ahead.submit(_spread, tensors[name]) for name in read[:1]}
        for name in filled:
            written(places[name][0], end)
            if name not in coming and tensors[name].poured_into(file):
                continue
            view = coming.pop(name).result() if name in coming else _spread(tensors[name])
            follow = read[read.index(name) + 1 :][:1] if name in read else []
            coming |= {after: ahead.submit(_spread, tensors[after]) for after in follow}  # it is read while this one is written
            for part in _next_beside(in_order(view, dtypes[name])) if view.nbytes > 2 * SLAB_BYTES else in_order(view, dtypes[name]):
                write_all(file, part.reshape(-1).view(np.uint8).data)


def _next_beside(parts: Generator[np.ndarray]) -> Generator[np.ndarray]:
    """Lay the next part out while the last one is written."""
    with ThreadPoolExecutor(1, "zoo-next-part") as beside:
        coming = beside.submit(next, parts, None)
        while (part := coming.result()) is not None:
            coming = beside.submit(next, parts, None)
            yield part


def _spread(tensor: Stored) -> np.ndarray:
    array = tensor.spread()
    if array.size != math.prod(tensor.shape):
        raise MalformedFile(f"{tensor.origin} should have the shape {tensor.shape} and came as {array.shape}")
    return array


def in_order(view: np.ndarray, dtype: np.dtype[Any]) -> Generator[np.ndarray]:
    """Give an array's numbers one behind the other in the order of its axes.

    Where they have to move, the parts share their memory: each may be read until the one after the next is asked for.
    """
    if view.flags.c_contiguous or not view.ndim or view.nbytes <= SLAB_BYTES:
        yield np.ascontiguousarray(laid(view), dtype)
        return
    rows = max(1, SLAB_BYTES // (view.nbytes // len(view)))
    rows -= rows % NEAR if rows > NEAR else 0
    slabs = np.empty((2, rows, *view.shape[1:]), view.dtype)
    for number, start in enumerate(range(0, len(view), rows)):
        part = view[start : start + rows]
        yield np.ascontiguousarray(laid(part, slabs[number % 2, : len(part)]), dtype)


def amend(path: Path, metadata: Mapping[str, str]) -> None:
    """Give a file other metadata, in place where the header has room for it.

    Raises:
        MalformedFile, LimitExceeded: as `entries` does.
    """
    with path.open("rb") as file:
        size = path.stat().st_size
        header, data, _ = parsed(beginning(file, size), size)
    header = {"__metadata__": None, **header} | {"__metadata__": dict(sorted(metadata.items()))}
    length = data - 8
    new = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    if len(new) <= length:
        with path.open("r+b") as file:
            file.seek(8)
            file.write(new + b" " * (length - len(new)))
        return
    new += b" " * (-len(new) % 8)
    longer = path.with_name(path.name + ".longer")
    with path.open("rb") as old, longer.open("wb") as file:
        old.seek(data)
        file.write(len(new).to_bytes(8, "little") + new)
        shutil.copyfileobj(old, file, 1 << 22)
    longer.replace(path)
