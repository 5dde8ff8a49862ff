"""What an ONNX file says, as plain objects: its operators, and its tensors where they lie, in the file or in one beside it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from convert import _guard
from convert.formats import _wire
from convert.formats._mapped import Maps
from convert.formats._wire import Budget, Message, message, one, schema
from convert.source import Stored
from convert.steps import Shape
from weights.errors import LimitExceeded, MalformedFile, UnsafeFormat, UnsupportedFormat

MAX_NODES = 200_000

DTYPES = {
    1: "float32", 2: "uint8", 3: "int8", 4: "uint16", 5: "int16", 6: "int32", 7: "int64", 9: "bool", 10: "float16", 11: "float64",
    12: "uint32", 13: "uint64", 14: "complex64", 15: "complex128", 16: "bfloat16", 17: "float8_e4m3fn", 18: "float8_e4m3fnuz",
    19: "float8_e5m2", 20: "float8_e5m2fnuz", 24: "float8_e8m0fnu",
}  # fmt: skip
ENTRY = schema("string key 1, string value 2")
MODEL = schema(
    "string producer 2, string version 3, bytes graph 7, opset opsets 8, entry metadata 14",
    opset=schema("string domain 1, int version 2"),
    entry=ENTRY,
)
SHAPE = schema("dim dims 1", dim=schema("int size 1"))
VALUE = schema("string name 1, type types 2", type=schema("tensor tensors 1", tensor=schema("shape shapes 2", shape=SHAPE)))
OPERATOR = schema("string inputs 1, string outputs 2, string name 3, string op 4, bytes attrs 5, string domain 7")
ATTRIBUTE = schema("string name 1, float f 2, int i 3, string s 4, bytes t 5, floats floats 7, ints ints 8, int type 20")
TENSOR = schema(
    """ints dims 1, int type 2, field typed 4, field typed 5, field typed 7, string name 8, bytes raw 9, field typed 10,
    field typed 11, entry external 13, int location 14""",
    entry=ENTRY,
)
"""Of onnx.proto what is read here; numbers of a tensor that are not raw stay in their fields until they are asked for."""
NIBBLES = {21: False, 22: True}
"""Types of four bits, two to a byte, and whether they have a sign."""


@dataclass(slots=True)
class Operator:
    """A node of the graph; `name` may be empty. Readers of other formats know the layer's `module`; ONNX's own files only hint at it."""

    op: str
    name: str
    domain: str
    inputs: list[str]
    outputs: list[str]
    attrs: dict[str, Any]
    module: str = ""


@dataclass(slots=True)
class Model:
    """A whole file.

    Attributes:
        inputs: name to shape, None where a dimension is free; initialisers that older files list as inputs are left out.
        size_bytes: of the file and of those beside it that it points to.
        channels_last: whether the network takes its images so, where the format says it.
        named: tensors may be called as a state dict calls them; in some formats each layer's are called alike.
    """

    producer: str = ""
    opset: int = 1
    metadata: dict[str, str] = field(default_factory=dict[str, str])
    operators: list[Operator] = field(default_factory=list[Operator])
    tensors: dict[str, Stored] = field(default_factory=dict[str, Stored])
    inputs: dict[str, tuple[int | None, ...]] = field(default_factory=dict[str, tuple[int | None, ...]])
    outputs: list[str] = field(default_factory=list[str])
    left_out: list[str] = field(default_factory=list[str])
    size_bytes: int = 0
    beside: tuple[str, ...] = ()
    channels_last: bool = False
    named: bool = True
    close: Callable[[], None] = lambda: None


class Files(Maps):
    """The file's bytes and those of the files beside it, mapped when they are needed."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def beside(self, entries: dict[str, str], needed: int, name: str) -> memoryview:
        """Find a tensor's bytes in another file, which must be a plain one inside this file's folder."""
        location, folder = entries.get("location", ""), self.path.absolute().parent.resolve()
        parts = Path(location).parts
        if not location or Path(location).is_absolute() or ".." in parts or "\\" in location or ":" in location or "\0" in location:
            raise UnsafeFormat(f"{self.path}: {name} is kept in {location!r}; only files inside its own folder are read")
        try:
            found = (folder / location).resolve(strict=True)
        except (OSError, RuntimeError) as error:
            raise MalformedFile(f"{self.path}: {name} is kept in {location!r}, which is not there. Fetch it too.") from error
        if found != folder / location or not found.is_file() or found.stat().st_nlink > 1:
            raise UnsafeFormat(f"{self.path}: {name} is kept in {location!r}, a link or no plain file; only plain files are read")
        view = self.view(found)
        try:
            offset, length = int(entries.get("offset") or 0), int(entries.get("length") or needed)
        except ValueError as error:
            raise MalformedFile(f"{self.path}: {name} has offset {entries.get('offset')!r}, length {entries.get('length')!r}") from error
        if offset < 0 or length != needed or offset + length > len(view):
            raise MalformedFile(f"{self.path}: {name} has {needed} bytes and claims {length} from {offset} of {len(view)} in {location}")
        return view[offset : offset + length]


def parse(path: Path) -> Model:
    """Read an ONNX file.

    Raises:
        ConvertError: it is damaged, beyond the limits, or reaches outside its folder.
    """
    files, budget = Files(path), Budget()
    told = message(files.view(path), MODEL, budget)
    producer = f"{one(told, 'producer', '')[:100]} {one(told, 'version', '')[:40]}".strip()
    model = Model(producer, metadata=_entries(told.get("metadata", [])), close=files.close)
    for opset in told.get("opsets", []):
        if one(opset, "domain", "") in ("", "ai.onnx"):
            model.opset = max(one(opset, "version", 1), 1)
    if "graph" not in told:
        raise MalformedFile(f"{path} is no ONNX file: it has no graph")
    _graph(told["graph"][-1], model, files, budget)
    model.size_bytes, model.beside = files.size_bytes, files.others(path)
    return model


def _graph(data: memoryview, model: Model, files: Files, budget: Budget) -> None:
    inputs: dict[str, tuple[int | None, ...]] = {}
    for number, wire, value in _wire.fields(data, budget):
        if number == 1:
            if len(model.operators) >= MAX_NODES:
                raise LimitExceeded(f"{files.path} has more than {MAX_NODES} operators")
            model.operators.append(_operator(_wire.content(wire, value), files, budget))
        elif number == 5:
            tensor = _tensor(_wire.content(wire, value), files, budget)
            if isinstance(tensor, str):
                model.left_out.append(tensor)
            elif tensor.origin in model.tensors:
                raise MalformedFile(f"{files.path} has two tensors called {tensor.origin!r}")
            else:
                model.tensors[tensor.origin] = tensor
        elif number == 11:
            name, shape = _value_info(_wire.content(wire, value), budget)
            inputs[name] = shape
        elif number == 12:
            model.outputs.append(_value_info(_wire.content(wire, value), budget)[0])
        elif number == 15:
            model.left_out.append("a sparse tensor")
        if len(model.tensors) > _guard.MAX_TENSORS:
            raise LimitExceeded(f"{files.path} has more than {_guard.MAX_TENSORS} tensors")
    model.inputs = {name: shape for name, shape in inputs.items() if name not in model.tensors}


def _operator(data: memoryview, files: Files, budget: Budget) -> Operator:
    told = message(data, OPERATOR, budget)
    attrs = dict(_attribute(attribute, files, budget) for attribute in told.get("attrs", []))
    op, name, domain = (one(told, field, "") for field in ("op", "name", "domain"))
    return Operator(op, name, domain, told.get("inputs", []), told.get("outputs", []), attrs)


def _attribute(data: memoryview, files: Files, budget: Budget) -> tuple[str, Any]:
    """Read an attribute: a number, a text, a list of numbers, or a tensor; None for graphs and the like."""
    told = message(data, ATTRIBUTE, budget)
    name, kind = one(told, "name", ""), one(told, "type", 0)
    floats, ints, listed = told.get("floats", []), told.get("ints", []), "floats" in told or "ints" in told
    single = _tensor(told["t"][-1], files, budget) if "t" in told else next((told[field][-1] for field in "fis" if field in told), None)
    if len(floats) + len(ints) > 1_000_000:
        raise LimitExceeded(f"{files.path}: the attribute {name!r} lists {len(floats) + len(ints)} numbers")
    if single is None and kind in (1, 2, 3):  # proto3 writers leave zeros out
        single = {1: 0.0, 2: 0, 3: ""}[kind]
    return name, (floats or ints) if listed else [] if kind in (6, 7) else single


def _tensor(data: memoryview, files: Files, budget: Budget) -> Stored | str:
    """Describe a tensor, or say why it can't be had."""
    told = message(data, TENSOR, budget)
    name, kind, dims = one(told, "name", ""), one(told, "type", 0), told.get("dims", [])
    raw: memoryview | None = told["raw"][-1] if "raw" in told else None
    typed: list[tuple[int, int, int | memoryview]] = told.get("typed", [])
    if len(dims) > _guard.MAX_RANK:
        raise LimitExceeded(f"{files.path}: {name} has {len(dims)} axes; at most {_guard.MAX_RANK} are read")
    if any(dim < 0 for dim in dims):
        raise MalformedFile(f"{files.path}: {name} has shape {dims}")
    if kind not in DTYPES and kind not in NIBBLES:
        return f"{name or 'a constant'} (of type {kind})"
    shape, count = tuple(dims), math.prod(dims)
    dtype = _guard.dtype_of(DTYPES.get(kind, "int8" if NIBBLES.get(kind) else "uint8"))
    nbytes = (count + 1) // 2 if kind in NIBBLES else count * dtype.itemsize
    if one(told, "location", 0) == 1:
        raw = files.beside(_entries(told.get("external", [])), nbytes, name)
    if raw is not None:
        if len(raw) != nbytes:
            raise MalformedFile(f"{files.path}: {name} of shape {shape} needs {nbytes} bytes and has {len(raw)}")
        return Stored(name, shape, dtype, lambda: _plain(raw, kind, dtype, shape))
    held = sum(len(value) if not isinstance(value, int) else 1 for _, _, value in typed)
    if (nbytes if kind in NIBBLES else count) > held:  # a number takes a byte at the very least
        raise MalformedFile(f"{files.path}: {name} of shape {shape} has {held} bytes")
    return Stored(name, shape, dtype, lambda: _from_fields(typed, kind, dtype, shape, f"{files.path}: {name}"))


def _plain(raw: memoryview, kind: int, dtype: np.dtype[Any], shape: Shape) -> np.ndarray:
    if kind in NIBBLES:
        return _nibbles(np.frombuffer(raw, np.uint8), kind, shape)
    return np.frombuffer(raw, dtype.newbyteorder("<") if dtype.isbuiltin == 1 else dtype).reshape(shape)


def _from_fields(typed: list[tuple[int, int, int | memoryview]], kind: int, dtype: np.dtype[Any], shape: Shape, what: str) -> np.ndarray:
    """Read numbers that are written one by one instead of as raw bytes."""
    chunks: list[np.ndarray] = []
    for number, wire, value in typed:
        if number in (4, 10):
            width = "<f4" if number == 4 else "<f8"
            if isinstance(value, int) or len(value) % int(width[2]):
                raise MalformedFile(f"{what} is cut off")
            chunks.append(np.frombuffer(value, width))
        else:
            chunks.append(np.array(_wire.number(wire, value), np.int64)[None] if isinstance(value, int) else _wire.packed(value))
    flat = np.concatenate(chunks) if chunks else np.empty(0, np.int64)
    if kind in NIBBLES:
        return _nibbles(flat.astype(np.uint8), kind, shape)
    if dtype.kind == "c":
        flat = flat.astype(f"f{dtype.itemsize // 2}").view(dtype) if len(flat) % 2 == 0 else flat
    elif flat.dtype.kind == "i" and dtype.itemsize <= 2 and dtype.kind not in "iub":  # halves are written as their bits
        flat = flat.astype(f"u{dtype.itemsize}").view(dtype)
    if flat.size != math.prod(shape):
        raise MalformedFile(f"{what} of shape {shape} has {flat.size} numbers")
    return flat.astype(dtype, copy=False).reshape(shape)


def _nibbles(raw: np.ndarray, kind: int, shape: Shape) -> np.ndarray:
    """Unpack two numbers a byte, the lower half first."""
    if raw.size != (math.prod(shape) + 1) // 2:
        raise MalformedFile(f"a tensor of shape {shape} has {raw.size} bytes of two numbers each")
    values = np.stack([raw & 15, raw >> 4], axis=1).reshape(-1)[: math.prod(shape)].reshape(shape)
    return ((values ^ 8).astype(np.int8) - 8).astype(np.int8) if NIBBLES[kind] else values


def _entries(told: list[Message]) -> dict[str, str]:
    return {one(entry, "key", ""): one(entry, "value", "") for entry in told}


def _value_info(data: memoryview, budget: Budget) -> tuple[str, tuple[int | None, ...]]:
    """Read an input's or output's name and shape."""
    told = message(data, VALUE, budget)
    name, tensors = one(told, "name", ""), [tensor for kind in told.get("types", []) for tensor in kind.get("tensors", [])]
    dims = [dim.get("size", [0])[0] for tensor in tensors for shape in tensor.get("shapes", []) for dim in shape.get("dims", [])]
    if len(dims) > _guard.MAX_RANK:
        raise UnsupportedFormat(f"{name} has {len(dims)} axes; at most {_guard.MAX_RANK} are read")
    return name, tuple(dim if dim > 0 else None for dim in dims)
