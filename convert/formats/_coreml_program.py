"""ML programs of Core ML: the constants that operations name, in the program or in the weights' file beside it.

Nothing of a program is executed.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from convert import _guard
from convert.formats._mapped import Maps
from convert.formats._wire import Budget, Message, message, one, schema
from convert.source import Source, Stored
from weights.errors import LimitExceeded, MalformedFile, UnsafeFormat

DTYPES = {10: "float16", 11: "float32", 12: "float64", 13: "bfloat16"}
BLOBS = {1: 10, 2: 11, 9: 13}
"""What the weights' file calls the types of reals."""
DIMENSION = schema("constant constants 1", constant=schema("int size 1"))
KIND = schema("tensor tensors 1", tensor=schema("int dtype 1, int rank 2, dim dims 3", dim=DIMENSION))
IMMEDIATE = schema(
    "floats floats 1, strings strings 4, raw raws 7",
    floats=schema("floats values 1"),
    strings=schema("string values 1"),
    raw=schema("bytes values 1"),
)
VALUE = schema(
    "kind kinds 2, immediate immediates 3, blob blobs 5",
    kind=KIND,
    immediate=schema("tensor tensors 1", tensor=IMMEDIATE),
    blob=schema("string file 1, int offset 2"),
)
OPERATION = schema(
    "string type 1, output outputs 3, attribute attributes 5",
    output=schema("string name 1"),
    attribute=schema("string key 1, value values 2", value=VALUE),
)
SPECIAL = schema("special specials 3", special=schema("block blocks 2", block=schema("bytes operations 3")))
PROGRAM = schema("function functions 2", function=schema("held helds 2", held=SPECIAL))
LEAF = re.compile(
    r"(.+?)[._](weight|bias|gamma|beta|running_mean|running_var|moving_mean|moving_variance|mean|variance)(?:_\d+)?"
    r"(?:_to_fp16|_palettized|_quantized)?$"
)
LEAVES = {
    "gamma": "weight", "beta": "bias", "moving_mean": "running_mean", "moving_variance": "running_var", "mean": "running_mean",
    "variance": "running_var",
}  # fmt: skip


def read(path: Path, model: Path, program: memoryview, files: Maps, framework: str, facts: Mapping[str, str]) -> Source:
    """Describe a program's constants of reals."""
    found: dict[str, Stored] = {}
    for name, stored in _constants(program, model, files):
        match = LEAF.match(name)
        key = f"{match[1]}.{LEAVES.get(match[2], match[2])}" if match else name
        key = key if key not in found else name
        if key in found:
            raise MalformedFile(f"{path} has two constants called {name!r:.100}")
        kernel = key.endswith(".weight") and len(stored.shape) > 2
        found[key] = Stored(name, stored.shape, stored.stored_dtype, stored.load, convention="correlation" if kernel else None)
    if not found:
        raise MalformedFile(f"{path} is an ML program without constants of reals")
    _guard.check(path, found.values(), files.size_bytes)
    notes = ["an ML program's operations are not read: the weights are, and a network of ours must say what they are for"]
    guarded = {name: _guard.guarded(stored, path, "Core ML model") for name, stored in found.items()}
    return Source(path, "coreml", f"{framework}, ML program", guarded, facts=dict(facts), notes=notes, close=files.close)


def _constants(program: memoryview, model: Path, files: Maps) -> Iterator[tuple[str, Stored]]:
    budget = Budget()
    functions = message(program, PROGRAM, budget).get("functions", [])
    specials = [special for function in functions for held in function.get("helds", []) for special in held.get("specials", [])]
    blocks = [block for special in specials for block in special.get("blocks", [])]
    for operation in (data for block in blocks for data in block.get("operations", [])):
        told = message(operation, OPERATION, budget)
        if not one(told, "type", "").startswith("const") or not told.get("outputs"):
            continue
        attributes = {one(entry, "key", ""): one(entry, "values", dict[str, Any]()) for entry in told.get("attributes", [])}
        name = _text(attributes.get("name", {})) or one(told["outputs"][-1], "name", "")
        if (held := attributes.get("val")) is not None and (stored := _value(held, name, model, files)) is not None:
            yield name, stored


def _text(value: Message) -> str:
    for immediate in value.get("immediates", []):
        for tensor in immediate.get("tensors", []):
            for strings in tensor.get("strings", []):
                return one(strings, "values", "")
    return ""


def _value(value: Message, name: str, model: Path, files: Maps) -> Stored | None:
    """Describe a constant; None where it is a setting or of whole numbers."""
    tensors = [tensor for kind in value.get("kinds", []) for tensor in kind.get("tensors", [])]
    kind = one(tensors[-1], "dtype", 0) if tensors else 0
    dims = [one(constant, "size", 0) for dim in tensors[-1].get("dims", []) for constant in dim.get("constants", [])] if tensors else []
    if kind not in DTYPES or not dims:
        return None
    if len(dims) > _guard.MAX_RANK:
        raise LimitExceeded(f"{name:.100} has {len(dims)} axes; at most {_guard.MAX_RANK} are read")
    shape, dtype = tuple(dims), _guard.dtype_of(DTYPES[kind])
    raw: memoryview | None = None
    if value.get("blobs"):
        raw = _blob(value["blobs"][-1], name, kind, model, files)
    for immediate in value.get("immediates", []):
        for tensor in immediate.get("tensors", []):
            if tensor.get("raws"):
                raw = tensor["raws"][-1].get("values", [memoryview(b"")])[-1]
            elif tensor.get("floats"):
                raw = memoryview(np.array(tensor["floats"][-1].get("values", []), "<f4").tobytes())
                dtype = np.dtype(np.float32)
    if raw is None:
        return None
    if min(shape) < 0 or len(raw) != math.prod(shape) * dtype.itemsize:
        raise MalformedFile(f"{name:.100} of shape {shape} needs {math.prod(shape) * dtype.itemsize} bytes and has {len(raw)}")
    return Stored(name, shape, dtype, partial(_numbers, raw, dtype, shape))


def _numbers(raw: memoryview, dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray:
    return np.frombuffer(raw, dtype).reshape(shape)


def _blob(told: Message, name: str, kind: int, model: Path, files: Maps) -> memoryview:
    """Find a constant in the weights' file, which must be a plain one in the model's folder."""
    location = one(told, "file", "")
    parts = Path(location.removeprefix("@model_path/")).parts
    if not location.startswith("@model_path/") or ".." in parts or "\0" in location:
        raise UnsafeFormat(f"{name:.100} is kept in {location!r:.100}; only files inside the model's folder are read")
    folder = model.absolute().parent.resolve()
    place = folder.joinpath(*parts)
    if not place.is_file() or place.resolve() != place:
        raise MalformedFile(f"{name:.100} is kept in {location!r:.100}, which is not there, or a link. Fetch it too")
    data, at = files.view(place), one(told, "offset", 0)
    if not 0 <= at <= len(data) - 24:
        raise MalformedFile(f"{name:.100} is described at byte {at} of {len(data)} in {location:.100}")
    sentinel, stored, size, begin = struct.unpack_from("<IIQQ", data, at)
    if sentinel != 0xDEADBEEF or BLOBS.get(stored) != kind or begin + size > len(data):
        raise MalformedFile(f"{name:.100}: what lies at byte {at} of {location:.100} is another thing than the program says")
    return data[begin : begin + size]
