"""safetensors: a JSON header, every word of which `weights.header` checks, then the tensors' bytes."""

from __future__ import annotations

import json
import math
import os
import shutil
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from convert.source import Part, Source, Stored
from convert.steps import laid
from weights.errors import ConvertError, MalformedFile, UnsupportedFormat
from weights.header import DTYPES, MAX_HEADER_BYTES, Entry, beginning, entries, is_safetensors, metadata, parsed

if TYPE_CHECKING:
    from torch import Tensor
    from typing_extensions import Buffer

SUFFIXES = (".safetensors",)
WRITES = True


def sniff(path: Path, head: bytes) -> bool:
    """Tell a safetensors file by its beginning."""
    return path.is_file() and is_safetensors(head, path.stat().st_size)


def read(path: Path) -> Source:
    """Open a safetensors file; files of Flax and of our own converter are known by their names and notes.

    This is the one reader that works in the process that asks, so nothing is mapped: a file that somebody cuts short would end it. Its
    tensors are read when they are asked for, each into memory of its own.

    Raises:
        MalformedFile, LimitExceeded, UnsupportedFormat: as `entries` does.
    """
    from convert.formats import flax
    from convert.formats._torch import numpy_dtype

    file = _Kept(path)
    try:
        head = file.head()
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

        return Stored(name, entry.shape, dtype, load, convention="correlation" if kernel else None)

    tensors = {name: stored(name, entry) for name, entry in found.items()}
    source = Source(path, "safetensors", "PyTorch", tensors, facts=notes, close=file.close)
    return flax.canonical(source) if flax.looks_like_flax({name: entry.shape for name, entry in found.items()}) else source


def _see_booleans(data: bytes, name: str) -> None:
    if data.strip(b"\0\1"):
        raise MalformedFile(f"tensor {name!r} is boolean and holds bytes other than 0 and 1")


class _Kept:
    """An open file whose parts are read when they are asked for; dropped, it is closed."""

    def __init__(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        self.close = weakref.finalize(self, os.close, fd)
        self._path = path
        self._file = open(fd, "rb", buffering=0, closefd=False)  # noqa: SIM115  `close` ends it
        self._turn = threading.Lock()
        self.size_bytes = os.fstat(fd).st_size

    def head(self) -> bytes:
        """Read the length and the header, no more of it than is believed."""
        first = self._file.read(8) or b""
        length = int.from_bytes(first, "little")
        if len(first) < 8 or length > min(MAX_HEADER_BYTES, self.size_bytes - 8):
            return first
        text = bytearray(length)
        self.fill(memoryview(text), 8, "")
        return first + text

    def fill(self, memory: memoryview, start: int, name: str) -> None:
        """Read as much as there is room, from `start` of the file."""
        if not self.close.alive:
            raise ConvertError(f"{self._path} is closed; its tensors can't be read any more")
        done = 0
        with self._turn:
            self._file.seek(start)
            while done < len(memory):
                if not (count := self._file.readinto(memory[done:])):
                    what = f"the tensor {name!r}" if name else "its header"
                    raise MalformedFile(f"{self._path} was cut short while it was read, in {what}: is somebody writing it? Fetch it again")
                done += count


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
    with path.open("wb") as file, ThreadPoolExecutor(1, "zoo-next-tensor") as ahead:
        file.write(len(text).to_bytes(8, "little") + text)
        read = partial(_in_order, tensors, dtypes)
        coming = ahead.submit(read, filled[0]) if filled else None
        for number, name in enumerate(filled):  # the next one is read while this one is written
            written(places[name][0], end)
            assert coming is not None
            array = coming.result()
            coming = ahead.submit(read, filled[number + 1]) if number + 1 < len(filled) else None
            file.write(array.reshape(-1).view(np.uint8).data)


def _in_order(tensors: Mapping[str, Stored], dtypes: Mapping[str, np.dtype[Any]], name: str) -> np.ndarray:
    """Read a tensor, its numbers one behind the other in the order of its axes."""
    array = tensors[name].array()
    if tuple(array.shape) != tensors[name].shape:
        raise MalformedFile(f"{tensors[name].origin} should have the shape {tensors[name].shape} and came as {array.shape}")
    return np.ascontiguousarray(laid(array), dtypes[name])


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
