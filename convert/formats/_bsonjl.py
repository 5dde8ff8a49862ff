"""BSON.jl's tagged documents to Julia values; code in them stays bytes.

Source: https://github.com/JuliaIO/BSON.jl, src/write.jl, read.jl and extensions.jl.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from convert._guard import MAX_TENSORS
from convert.formats._bsondoc import MAX_DEPTH
from convert.formats._julia import DTYPES, Array, Opaque, Struct, reshaped, turned
from convert.kinds import is_dict, is_list, is_row, is_tuple, is_view
from weights.errors import LimitExceeded, MalformedFile

CODE = ("jl_anonymous", "ref", "unionall", "svec", "jl_bottom_type")
MAX_RANK = 32


class Reader:
    """Turn documents into values; each back-reference once, so that a file can't make one value into many."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        backrefs = root.get("_backrefs", [])
        self.backrefs: Sequence[Any] = backrefs if is_list(backrefs) else []
        self.known: dict[int, Any] = {}
        self.opened: set[int] = set()
        self.skipped: list[str] = []
        self.arrays = 0
        self.types: set[str] = set()

    def value(self, raw: Any, depth: int = 0) -> Any:
        if depth > MAX_DEPTH:
            raise LimitExceeded(f"values nest deeper than {MAX_DEPTH}")
        if is_list(raw):
            return [self.value(item, depth + 1) for item in raw]
        if is_view(raw):
            return self._array(np.dtype("u1"), (len(raw),), raw)
        if not is_dict(raw):
            return raw
        tag = raw.get("tag")
        if not isinstance(tag, str):
            return {key: self.value(item, depth + 1) for key, item in raw.items()}
        if tag == "backref":
            return self._backref(raw, depth)
        if tag == "array":
            return self._tagged_array(raw, depth)
        if tag == "struct":
            return self._struct(raw, depth)
        if tag == "tuple":
            return tuple(self.value(item, depth + 1) for item in self._list(raw, "data"))
        if tag == "symbol":
            return str(raw.get("name", ""))
        if tag == "datatype":
            return Opaque(".".join(self.path(raw)))
        if tag in CODE:
            return Opaque(tag)
        return {key: self.value(item, depth + 1) for key, item in raw.items()}  # a Dict{Symbol} that has a :tag of its own

    def path(self, raw: Any) -> tuple[str, ...]:
        """Read the modules and the name of a type, without the Main that older files begin with."""
        raw = self._resolved(raw)
        if not is_dict(raw):
            return ()
        name = raw.get("name")
        if not is_list(name):
            return ()
        words = tuple(str(word) for word in name[:16])
        return words[1:] if len(words) > 1 and words[0] == "Main" else words

    def _resolved(self, raw: Any) -> Any:
        for _ in range(MAX_DEPTH):
            if not is_dict(raw) or raw.get("tag") != "backref":
                return raw
            raw = self.backrefs[self._index(raw)]
        raise MalformedFile("back-references lead to each other")

    def _index(self, raw: Mapping[str, Any]) -> int:
        ref = raw.get("ref")
        if not isinstance(ref, int) or not 1 <= ref <= len(self.backrefs):
            raise MalformedFile(f"a back-reference to value {ref!r} of {len(self.backrefs)}")
        return ref - 1

    def _backref(self, raw: Mapping[str, Any], depth: int) -> Any:
        index = self._index(raw)
        if index not in self.known:
            if index in self.opened:
                return Opaque("cycle")
            self.opened.add(index)
            self.known[index] = self.value(self.backrefs[index], depth + 1)
            self.opened.discard(index)
        return self.known[index]

    def _list(self, raw: Mapping[str, Any], key: str) -> list[Any]:
        data = self._resolved(raw.get(key))
        if is_dict(data) and data.get("tag") in ("tuple", "array"):
            data = data.get("data")
        return data if is_list(data) else []

    def _tagged_array(self, raw: Mapping[str, Any], depth: int) -> Any:
        data = self._resolved(raw.get("data"))
        sizes = self._list(raw, "size")
        if len(sizes) > MAX_RANK or not all(isinstance(size, int) and not isinstance(size, bool) and size >= 0 for size in sizes):
            raise MalformedFile(f"an array of size {str(sizes)[:80]}")
        if is_list(data):
            return [self.value(item, depth + 1) for item in data]
        if not is_view(data):
            raise MalformedFile("an array without data")
        dtype = self._dtype(raw.get("type"))
        if dtype is None and not len(data):
            return []
        if dtype is None:
            self.skipped.append(".".join(self.path(raw.get("type"))) or "?")
            return Opaque("array")
        return self._array(dtype, tuple(reversed(sizes)), data)

    def _array(self, dtype: np.dtype[Any], shape: tuple[int, ...], data: memoryview) -> Array:
        self.arrays += 1
        if self.arrays > MAX_TENSORS:
            raise LimitExceeded(f"more than {MAX_TENSORS} arrays")
        if math.prod(shape) * dtype.itemsize != len(data):
            raise MalformedFile(f"an array of {dtype} and shape {shape} in {len(data)} bytes")
        return Array(shape, dtype, lambda: np.frombuffer(data, dtype).reshape(shape))

    def _dtype(self, raw: Any) -> np.dtype[Any] | None:
        name = (self.path(raw) or ("",))[-1]
        if name == "Complex":
            raw = self._resolved(raw)
            params = self._list(raw, "params")
            inner = (self.path(params[0]) or ("",))[-1] if params else ""
            return {"Float32": np.dtype("<c8"), "Float64": np.dtype("<c16")}.get(inner)
        return np.dtype(DTYPES[name]) if name in DTYPES else None

    def _struct(self, raw: Mapping[str, Any], depth: int) -> Any:
        path = self.path(raw.get("type"))
        name = path[-1] if path else ""
        self.types.add(".".join(path))
        data = self._resolved(raw.get("data"))
        if is_view(data):
            return self._bits(name, data)
        if not is_list(data):
            return Opaque(name)
        if name == "Undef":
            return None
        if name == "TrackedArray" and len(data) > 1:  # the tracker before it holds the gradient's history
            return self.value(data[1], depth + 1)
        fields = tuple(self.value(item, depth + 1) for item in data)
        return self._wrapper(path, name, fields, raw)

    def _wrapper(self, path: tuple[str, ...], name: str, fields: tuple[Any, ...], raw: Mapping[str, Any]) -> Any:
        """See through what only wraps arrays."""
        first = fields[0] if fields else None
        if name in ("Dict", "IdDict", "OrderedDict") and len(fields) >= 2 and is_list(first) and is_list(fields[1]):
            return {str(key): item for key, item in zip(first, fields[1], strict=False) if isinstance(key, str | int)}
        if name == "NamedTuple":
            return dict(zip(self._names(raw), fields, strict=False))
        if name == "Params":
            return _first_list(fields)
        if name == "Buffer" and fields:
            return first
        if name in ("Adjoint", "Transpose") and isinstance(first, Array) and 1 <= len(first.shape) <= 2:
            return turned(first)
        if name == "ReshapedArray" and isinstance(first, Array) and len(fields) > 1 and is_tuple(fields[1]):
            shape = tuple(reversed([size for size in fields[1] if isinstance(size, int)]))
            return reshaped(first, shape) if math.prod(shape) == math.prod(first.shape) and min(shape, default=0) >= 0 else Opaque(name)
        return Struct(path, fields)

    def _names(self, raw: Mapping[str, Any]) -> list[str]:
        kind = self._resolved(raw.get("type"))
        params = self._list(kind, "params") if is_dict(kind) else []
        names = self.value(params[0]) if params else ()
        return [str(name) for name in names] if is_row(names) else []

    def _bits(self, name: str, data: memoryview) -> Any:
        if name in DTYPES and len(data) == np.dtype(DTYPES[name]).itemsize:
            return np.frombuffer(data, DTYPES[name])[0].item()
        return Opaque(name)


def _first_list(fields: Sequence[Any]) -> Any:
    """Find the list of arrays in what Tracker and Zygote wrap around one; the set beside it holds the same arrays without order."""
    for item in fields:
        while isinstance(item, Struct) and item.fields:
            item = item.fields[0]
        if is_row(item) and any(isinstance(entry, Array) for entry in item):
            return [entry for entry in item if isinstance(entry, Array)]
    return []
