"""Flax: MessagePack files of `flax.serialization`, folders of Orbax, and the names by which its safetensors and npz files are known.

A parameter tree is the same in all of them, and `convert.formats._flaxtree` knows it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from convert._guard import check, correlation_only, reading
from convert.formats import _flaxtree, _msgpack, _orbax
from convert.formats._mapped import mapped, stored
from convert.kinds import is_dict, is_list, is_row, is_view
from convert.source import Part, Shape, Source, Stored
from weights.errors import ConvertError, LimitExceeded, MalformedFile

SUFFIXES = (".msgpack", ".flax")
WRITES = True
WEAK = True

ARRAY, COMPLEX, SCALAR = 1, 2, 3
"""Codes of Flax's extensions of MessagePack."""
CHUNKED = "__msgpack_chunked_array__"
CHUNK_BYTES = 2**30
"""Flax cuts larger arrays, and so do we: MessagePack ends at 4 GiB."""
FOREIGN = re.compile(r"(^|[./])(weight|gamma|beta|moving_mean|moving_variance|running_mean|running_var|W|b)$")
OWN = ("b", "params/b", "params.b")
"""What SigLIP's loss learns; it is no module's bias."""
FIRST_KEY = re.compile(rb"[\x81-\x8f](?:[\xa1-\xbf]|\xd9.)[A-Za-z_0-9]", re.DOTALL)


def sniff(path: Path, head: bytes) -> bool:
    """Tell a MessagePack map that begins with a word, or a folder of Orbax."""
    return _orbax.is_checkpoint(path) if path.is_dir() else FIRST_KEY.match(head) is not None


def read(path: Path) -> Source:
    """Open a MessagePack file or an Orbax folder; what is no weight in it, as an optimiser's state, is left out and noted.

    Raises:
        MalformedFile, LimitExceeded: the file is damaged or claims more than it can hold.
        MissingLibrary: tensorstore reads Orbax's folders, and is not installed.
    """
    if path.is_dir():
        flat, size, framework = _orbax.tensors(path)
    else:
        with reading(path, "Flax file"):
            buffer = mapped(path)
            size, framework = len(buffer), "Flax, msgpack"
            tree = _msgpack.unpack(buffer)
            if not is_dict(tree):
                raise MalformedFile(f"it holds a {type(tree).__name__}, not a tree of parameters")
            flat = _flat(tree)
    with reading(path, "Flax checkpoint"):
        check(path, flat.values(), size)
        found, notes = _flaxtree.weights(flat)
        tensors = _flaxtree.canonical(found)
    if not tensors:
        raise MalformedFile(f"{path} holds no tensors")
    return Source(path, "flax", framework, tensors, flatten="hwc", notes=notes)


def write(parts: Sequence[Part], path: Path, *, convention: str | None = None, metadata: Mapping[str, str]) -> None:
    """Write the variables of a Flax network as `flax.serialization.to_bytes` does, one tensor in memory at a time.

    Args:
        parts: the modules; dots nest.
        path: the file.
        convention: None or "correlation": a Conv's kernels are as Flax computes with them. A ConvTranspose's are always flipped, which
            is how Flax computes with those.
        metadata: not kept: `from_bytes` refuses a tree with anything more than the network has.

    Raises:
        ConvertError: kernels of true convolution were asked for, which Flax's Conv does not compute.
    """
    del metadata
    correlation_only(convention, "Flax's Conv")
    tree: dict[str, Any] = {}
    for names, tensor in _flaxtree.raw(parts, convention):
        node = tree
        for name in names[:-1]:
            node = node.setdefault(name, {})
            if not is_dict(node):
                raise ConvertError(f"{'.'.join(names)}: Flax has no module that is a tensor as well")
        if names[-1] in node:
            raise ConvertError(f"two tensors are called {'.'.join(names)}")
        node[names[-1]] = tensor
    with path.open("wb") as file:
        _put(file, tree)


def flat_names(parts: Sequence[Part], convention: str | None = None) -> dict[str, Stored]:
    """Give a network's tensors Flax's form and names joined by slashes, as its safetensors files have them."""
    return {"/".join(names): tensor for names, tensor in _flaxtree.raw(parts, convention)}


def looks_like_flax(shapes: Mapping[str, Shape]) -> bool:
    """Tell by the names whether tensors of a safetensors or npz file are a Flax tree: kernels and scales, nobody else's words."""
    leaves = [re.split(r"[./]", re.sub(r"[./](raw_)?value$", "", name))[-1] for name in shapes]
    return "kernel" in leaves and not any(FOREIGN.search(name) for name in shapes if name not in OWN)


def canonical(source: Source) -> Source:
    """Read the names of a safetensors or npz file as those of a Flax tree; a note says so."""
    separator = "/" if any("/" in name for name in source.tensors) else "."
    found, notes = _flaxtree.weights({tuple(name.split(separator)): stored for name, stored in source.tensors.items()})
    note = "its names are those of a Flax tree: kernels are HWIO"
    return replace(
        source, framework="Flax", tensors=_flaxtree.canonical(found), flatten="hwc", positional=False, notes=[*source.notes, note, *notes]
    )


def _flat(tree: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Stored]:
    """List the arrays of a tree; whatever else it holds is no weight."""
    found: dict[tuple[str, ...], Stored] = {}
    items = tree.items() if is_dict(tree) else enumerate(tree) if is_list(tree) else ()
    for key, value in items:
        here = (*path, str(key))
        if is_dict(value) and value.get(CHUNKED):
            found[here] = _joined(value, "/".join(here))
        elif isinstance(value, _msgpack.Extension):
            if value.code in (ARRAY, SCALAR):
                found[here] = _array(value, "/".join(here))
        else:
            found |= _flat(value, here)
    return found


def _array(value: _msgpack.Extension, origin: str) -> Stored:
    match _msgpack.unpack(value.data):
        case [shape, str(name), data] if is_row(shape) and is_view(data) and all(type(dim) is int and dim >= 0 for dim in shape):
            return stored(origin, data, _dtype(name), tuple(shape))
        case _:
            raise MalformedFile(f"{origin} is no array as Flax writes them")


def _dtype(name: str) -> np.dtype[Any]:
    if name not in ("bool", "complex64", "complex128") and not re.fullmatch(r"(u?int|float|bfloat)\d+(_\w+)?", name):
        raise MalformedFile(f"{name[:40]!r} is no dtype")
    return np.dtype(getattr(ml_dtypes, name, name))


def _joined(value: dict[Any, Any], origin: str) -> Stored:
    """Join the pieces of an array that was too large for one."""

    def listed(key: str) -> list[Any]:
        numbered = value.get(key)
        if not is_dict(numbered) or sorted(numbered) != sorted(map(str, range(len(numbered)))):
            raise MalformedFile(f"{origin}: {key} of an array in chunks is no numbered list")
        return [numbered[str(number)] for number in range(len(numbered))]

    shape = listed("shape")
    pieces = [_array(piece, origin) for piece in listed("chunks") if isinstance(piece, _msgpack.Extension)]
    if not pieces or len({piece.stored_dtype for piece in pieces}) > 1 or not all(type(dim) is int and dim >= 0 for dim in shape):
        raise MalformedFile(f"{origin} is no array in chunks as Flax writes them")
    if math.prod(shape) != sum(math.prod(piece.stored_shape) for piece in pieces):
        raise MalformedFile(f"{origin}: its chunks don't fill the shape {tuple(shape)}")

    def load() -> np.ndarray:
        return np.concatenate([piece.load().reshape(-1) for piece in pieces]).reshape(shape)

    return Stored(origin, tuple(shape), pieces[0].stored_dtype, load)


def _put(file: BinaryIO, value: Any) -> None:
    if is_dict(value):
        file.write(_msgpack.header("map", len(value)))
        for key, item in value.items():
            file.write(_msgpack.pack(key))
            _put(file, item)
        return
    array = np.ascontiguousarray(value.load(), value.stored_dtype.newbyteorder("=")).reshape(value.stored_shape)
    if array.nbytes <= CHUNK_BYTES:
        _put_array(file, array)
        return
    flat, count = array.reshape(-1), CHUNK_BYTES // array.itemsize
    pieces = [flat[at : at + count] for at in range(0, flat.size, count)]
    file.write(_msgpack.header("map", 3) + _msgpack.pack(CHUNKED) + _msgpack.pack(True) + _msgpack.pack("shape"))
    file.write(_msgpack.pack({str(axis): dim for axis, dim in enumerate(array.shape)}) + _msgpack.pack("chunks"))
    file.write(_msgpack.header("map", len(pieces)))
    for number, piece in enumerate(pieces):
        file.write(_msgpack.pack(str(number)))
        _put_array(file, piece)


def _put_array(file: BinaryIO, array: np.ndarray) -> None:
    if array.nbytes >= 2**32 - 2**16:
        raise LimitExceeded(f"MessagePack holds no array of {array.nbytes} bytes")
    head = _msgpack.header("array", 3) + _msgpack.pack(list(array.shape)) + _msgpack.pack(array.dtype.name)
    head += _msgpack.header("bin", array.nbytes)
    file.write(_msgpack.header("ext", len(head) + array.nbytes, ARRAY) + head)
    file.write(array.reshape(-1).view(np.uint8).data)
