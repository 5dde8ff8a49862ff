"""ML programs of Core ML: their operations, and the constants that these name, in the program or in the weights' file beside it.

Nothing of a program is executed. Where it has an operation that is not known here, its weights are read by their names alone.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from convert import _guard
from convert.formats import _coreml_mil
from convert.formats._coreml_mil import Held, Operation, Program
from convert.formats._mapped import Maps
from convert.formats._operators import dequantised
from convert.formats._wire import Budget, Message, message, one, schema
from convert.source import Source, Stored
from weights.errors import LimitExceeded, MalformedFile, UnsafeFormat, UnsupportedFormat

DTYPES = {
    1: "bool", 10: "float16", 11: "float32", 12: "float64", 13: "bfloat16", 21: "int8", 22: "int16", 23: "int32", 24: "int64", 31: "uint8",
    32: "uint16", 33: "uint32",
}  # fmt: skip
REALS = (10, 11, 12, 13)
TEXT = 2
BLOBS = {1: 10, 2: 11, 3: 31, 4: 21, 5: 13, 6: 22, 7: 32, 9: 13, 14: 23, 15: 33}
"""What the weights' file calls the types of numbers."""
MOST_OPERATIONS = 200_000
PIECE = 1 << 20
"""Places in a table that are unpacked at a time; a multiple of 8."""
DIMENSION = schema("constant constants 1", constant=schema("int size 1"))
KIND = schema("tensor tensors 1", tensor=schema("int dtype 1, int rank 2, dim dims 3", dim=DIMENSION))
IMMEDIATE = schema(
    "floats floats 1, ints ints 2, ints bools 3, strings strings 4, ints longs 5, raw raws 7",
    floats=schema("floats values 1"),
    ints=schema("ints values 1"),
    strings=schema("string values 1"),
    raw=schema("bytes values 1"),
)
VALUE = schema(
    "kind kinds 2, immediate immediates 3, blob blobs 5",
    kind=KIND,
    immediate=schema("tensor tensors 1", tensor=IMMEDIATE),
    blob=schema("string file 1, int offset 2"),
)
NAMED = schema("string name 1, kind kinds 2", kind=KIND)
BINDING = schema("string name 1, value values 2", value=VALUE)
OPERATION = schema(
    "string type 1, input inputs 2, output outputs 3, attribute attributes 5",
    input=schema("string key 1, argument arguments 2", argument=schema("binding bindings 1", binding=BINDING)),
    output=schema("string name 1"),
    attribute=schema("string key 1, value values 2", value=VALUE),
)
SPECIAL = schema("special specials 3", special=schema("block blocks 2", block=schema("string outputs 2, bytes operations 3")))
PROGRAM = schema(
    "function functions 2",
    function=schema(
        "string key 1, held helds 2",
        held=schema("named inputs 1, special specials 3", named=NAMED, special=SPECIAL[3][1]),
    ),
)
LEAF = re.compile(
    r"(.+?)[._](weight|bias|gamma|beta|running_mean|running_var|moving_mean|moving_variance|mean|variance)(?:_\d+)?"
    r"(?:_to_fp16|_palettized|_quantized)?$"
)
LEAVES = {
    "gamma": "weight", "beta": "bias", "moving_mean": "running_mean", "moving_variance": "running_var", "mean": "running_mean",
    "variance": "running_var",
}  # fmt: skip


def read(path: Path, model: Path, program: memoryview, files: Maps, framework: str, facts: Mapping[str, str]) -> Source:
    """Describe a program; where it has operations that are not known here, its constants of reals alone."""
    told = _program(program, model, files)
    said, unknown = _coreml_mil.said(told)
    framework = f"{framework}, ML program"
    if not unknown and said.model.operators:
        return said.finished(
            path, "coreml", framework, files.size_bytes, "Core ML model", facts=facts, close=files.close, beside=_beside(path, files)
        )
    found: dict[str, Stored] = {}
    for place, stored in told.constants.items():
        if not isinstance(stored, Stored):
            continue
        name = told.names.get(place, place)
        match = LEAF.match(name)
        key = f"{match[1]}.{LEAVES.get(match[2], match[2])}" if match else name
        key = key if key not in found else name
        if key in found:
            raise MalformedFile(f"{path} has two constants called {name!r:.100}")
        kernel = key.endswith(".weight") and len(stored.shape) > 2
        found[key] = Stored(name, stored.shape, stored.dtype, stored.array, convention="correlation" if kernel else None)
    if not found:
        raise MalformedFile(f"{path} is an ML program without constants of reals")
    _guard.check(path, found.values(), files.size_bytes)
    kinds = ", ".join(unknown[:5])
    notes = [f"operations of the program that are not known here: {kinds}; so its weights alone are read, and what it computes is not"]
    guarded = {name: _guard.guarded(stored, path, "Core ML model") for name, stored in found.items()}
    return Source(path, "coreml", framework, guarded, facts=dict(facts), notes=notes, beside=_beside(path, files), close=files.close)


def _beside(path: Path, files: Maps) -> tuple[str, ...]:
    """Name the weights' file of a model that is read without its package, whose own hash covers all of it."""
    return () if path.is_dir() else files.others(path)


def _program(program: memoryview, model: Path, files: Maps) -> Program:
    """Read the function "main", or the only one."""
    budget = Budget()
    functions: list[Message] = message(program, PROGRAM, budget).get("functions", [])
    chosen: Message = next((each for each in functions if one(each, "key", "") == "main"), functions[0] if functions else {})
    held: Message = chosen["helds"][-1] if chosen.get("helds") else {}
    blocks: list[Message] = [block for special in held.get("specials", []) for block in special.get("blocks", [])]
    if not blocks:
        raise MalformedFile("it is an ML program without a block of operations")
    inputs = {one(named, "name", ""): _shape(named.get("kinds", []))[1] for named in held.get("inputs", [])}
    found = Program(inputs, blocks[-1].get("outputs", []))
    listed: list[memoryview] = blocks[-1].get("operations", [])
    if len(listed) > MOST_OPERATIONS:
        raise LimitExceeded(f"it has {len(listed)} operations; at most {MOST_OPERATIONS} are read")
    for data in listed:
        told = message(data, OPERATION, budget)
        kind, outputs = one(told, "type", ""), [one(each, "name", "") for each in told.get("outputs", [])]
        if kind.startswith("const") and outputs:
            attributes = {one(entry, "key", ""): one(entry, "values", dict[str, Any]()) for entry in told.get("attributes", [])}
            name = _text(attributes.get("name", {})) or outputs[-1]
            constant = _constant(kind, attributes, name, model, files)
            if constant is not None:
                found.constants[outputs[-1]], found.names[outputs[-1]] = constant, name
                continue
        roles: dict[str, list[str]] = {}
        for entry in told.get("inputs", []):
            bindings = [binding for argument in entry.get("arguments", []) for binding in argument.get("bindings", [])]
            names = [_bound(binding, found, model, files) for binding in bindings]
            if None in names:
                kind = f"{kind} (with a value of a type that is not read)"
            roles[one(entry, "key", "")] = [name or "" for name in names]
        found.operations.append(Operation(kind, roles, outputs))
    return _coreml_mil.checked(found)


def _bound(binding: Message, found: Program, model: Path, files: Maps) -> str | None:
    """Name what an operation reads; a constant in place gets a name of its own. None of one that is not read."""
    if not binding.get("values"):
        return one(binding, "name", "")
    name = f"\0held {len(found.constants)}"
    constant = _value(binding["values"][-1], name, model, files)
    if constant is None:
        return None
    found.constants[name] = constant
    return name


def _constant(kind: str, attributes: Mapping[str, Message], name: str, model: Path, files: Maps) -> Held | None:
    """Describe what an operation makes of constants alone; None where that is not known here."""

    def held(key: str) -> Held | None:
        keep = key in ("quantized_data", "indices")
        return _value(attributes[key], f"{name}/{key}", model, files, keep=keep) if key in attributes else None

    if kind == "const":
        return _value(attributes["val"], name, model, files) if "val" in attributes else None
    if kind == "constexpr_cast":
        return held("source_val")
    if kind == "constexpr_affine_dequantize":
        data, scale, zero, axis = (held(key) for key in ("quantized_data", "scale", "zero_point", "axis"))
        if isinstance(data, Stored) and scale is not None and not isinstance(scale, str):
            zeros = zero if isinstance(zero, np.ndarray) else np.zeros(0, np.int64)
            scales = np.asarray(scale.array() if isinstance(scale, Stored) else scale).reshape(-1)
            zeros = zeros.reshape(-1) if zeros.size in (0, scales.size) else np.repeat(zeros.reshape(-1)[:1], scales.size)
            along = int(axis.reshape(-1)[0]) % max(len(data.shape), 1) if isinstance(axis, np.ndarray) and axis.size else 0
            return dequantised(data, scales, zeros, along)
    if kind == "constexpr_lut_to_dense":
        places, table, shape = held("indices"), held("lut"), held("shape")
        if isinstance(places, Stored) and isinstance(table, Stored) and isinstance(shape, np.ndarray):
            return _of_table(name, places, table, tuple(int(n) for n in shape.reshape(-1)))
    if kind.startswith("constexpr_"):
        raise UnsupportedFormat(f"{name:.100} is compressed by {kind}, which is not read; save the model with its weights uncompressed")
    return None


def _of_table(name: str, places: Stored, table: Stored, shape: tuple[int, ...]) -> Stored:
    """Describe the numbers that places in a table stand for, each place in as few bits as the table needs."""
    count, size = math.prod(shape), math.prod(table.shape)
    bits = max(size - 1, 1).bit_length()
    if size != 1 << bits or bits > 8 or min(shape, default=0) < 0 or math.prod(places.shape) != (count * bits + 7) // 8:
        raise MalformedFile(f"{name:.100} of shape {shape} has {math.prod(places.shape)} bytes of places in a table of {size} numbers")

    def load() -> np.ndarray:
        packed = places.array().reshape(-1).view(np.uint8)
        at = packed if bits == 8 else np.empty(count, np.uint8)
        for first in range(0, count if bits < 8 else 0, PIECE):
            some = min(PIECE, count - first)
            single = np.unpackbits(packed[first * bits // 8 : -(-(first + some) * bits // 8)], count=some * bits, bitorder="little")
            padded = np.zeros((some, 8), np.uint8)
            padded[:, :bits] = single.reshape(some, bits)
            at[first : first + some] = np.packbits(padded, axis=1, bitorder="little").reshape(-1)
        return table.array().reshape(-1).astype(np.float32)[at].reshape(shape)

    return Stored(f"{name}, of a table of {size}", shape, np.dtype(np.float32), load)


def _text(value: Message) -> str:
    for immediate in value.get("immediates", []):
        for tensor in immediate.get("tensors", []):
            for strings in tensor.get("strings", []):
                return one(strings, "values", "")
    return ""


def _shape(kinds: list[Message]) -> tuple[int, tuple[int, ...]]:
    """Tell a value's type and its sides; one that is free is 0."""
    tensors = [tensor for kind in kinds for tensor in kind.get("tensors", [])]
    if not tensors:
        return 0, ()
    sides = [([one(constant, "size", 0) for constant in dim.get("constants", [])] or [0])[-1] for dim in tensors[-1].get("dims", [])]
    return one(tensors[-1], "dtype", 0), tuple(sides)


def _value(value: Message, name: str, model: Path, files: Maps, *, keep: bool = False) -> Held | None:
    """Read a constant: reals, and with `keep` all numbers, are described; other numbers and words are read; None where it is neither."""
    kind, shape = _shape(value.get("kinds", []))
    if kind == TEXT:
        return _text(value)
    if kind not in DTYPES:
        return None
    if len(shape) > _guard.MAX_RANK:
        raise LimitExceeded(f"{name:.100} has {len(shape)} axes; at most {_guard.MAX_RANK} are read")
    dtype = _guard.dtype_of(DTYPES[kind])
    raw: memoryview | None = None
    if value.get("blobs"):
        raw = _blob(value["blobs"][-1], name, kind, model, files)
    for tensor in (tensor for immediate in value.get("immediates", []) for tensor in immediate.get("tensors", [])):
        if tensor.get("raws"):
            raw = tensor["raws"][-1].get("values", [memoryview(b"")])[-1]
        elif tensor.get("floats"):
            raw = memoryview(np.array(tensor["floats"][-1].get("values", []), "<f4").tobytes())
            dtype = np.dtype(np.float32)
        elif whole := next((tensor[word] for word in ("ints", "bools", "longs") if tensor.get(word)), None):
            dtype = np.dtype(np.int64)
            raw = memoryview(np.array(whole[-1].get("values", []), "<i8").tobytes())
    if raw is None:
        return None
    if min(shape, default=0) < 0 or len(raw) != math.prod(shape) * dtype.itemsize:
        raise MalformedFile(f"{name:.100} of shape {shape} needs {math.prod(shape) * dtype.itemsize} bytes and has {len(raw)}")
    stored = Stored(name, shape, dtype, partial(_numbers, raw, dtype, shape))
    return stored if keep or (kind in REALS and shape) else _numbers(raw, dtype, shape)


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
