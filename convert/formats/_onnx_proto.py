"""What an ONNX file says, as plain objects: its operators, and its tensors where they lie, in the file or in one beside it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from convert import _guard
from convert.formats import _wire
from convert.formats._mapped import Maps
from convert.formats._wire import Budget
from convert.steps import Shape
from weights.errors import LimitExceeded, MalformedFile, UnsafeFormat, UnsupportedFormat

MAX_NODES = 200_000

DTYPES = {
    1: "float32", 2: "uint8", 3: "int8", 4: "uint16", 5: "int16", 6: "int32", 7: "int64", 9: "bool", 10: "float16", 11: "float64",
    12: "uint32", 13: "uint64", 14: "complex64", 15: "complex128", 16: "bfloat16", 17: "float8_e4m3fn", 18: "float8_e4m3fnuz",
    19: "float8_e5m2", 20: "float8_e5m2fnuz", 24: "float8_e8m0fnu",
}  # fmt: skip
NIBBLES = {21: False, 22: True}
"""Types of four bits, two to a byte, and whether they have a sign."""


@dataclass(slots=True)
class Tensor:
    """A constant; `load` reads it."""

    name: str
    shape: Shape
    dtype: np.dtype[Any]
    load: Callable[[], np.ndarray]

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(slots=True)
class Operator:
    """A node of the graph; `name` may be empty."""

    op: str
    name: str
    domain: str
    inputs: list[str]
    outputs: list[str]
    attrs: dict[str, Any]


@dataclass(slots=True)
class Model:
    """A whole file.

    Attributes:
        inputs: name to shape, None where a dimension is free; initialisers that older files list as inputs are left out.
        size_bytes: of the file and of those beside it that it points to.
    """

    producer: str = ""
    opset: int = 1
    metadata: dict[str, str] = field(default_factory=dict[str, str])
    operators: list[Operator] = field(default_factory=list[Operator])
    tensors: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    inputs: dict[str, tuple[int | None, ...]] = field(default_factory=dict[str, tuple[int | None, ...]])
    outputs: list[str] = field(default_factory=list[str])
    left_out: list[str] = field(default_factory=list[str])
    size_bytes: int = 0
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
    model = Model(close=files.close)
    graph: memoryview | None = None
    for number, wire, value in _wire.fields(files.view(path), budget):
        if number == 2:
            model.producer = (_wire.text(wire, value)[:100] + " " + model.producer).strip()
        elif number == 3:
            model.producer = (model.producer + " " + _wire.text(wire, value)[:40]).strip()
        elif number == 7:
            graph = _wire.content(wire, value)
        elif number == 8:
            domain, version = _pair(_wire.content(wire, value), budget)
            if domain in ("", "ai.onnx"):
                model.opset = max(version if isinstance(version, int) else 1, 1)
        elif number == 14:
            key, entry = _pair(_wire.content(wire, value), budget)
            model.metadata[key] = str(entry)
    if graph is None:
        raise MalformedFile(f"{path} is no ONNX file: it has no graph")
    _graph(graph, model, files, budget)
    model.size_bytes = files.size_bytes
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
            elif tensor.name in model.tensors:
                raise MalformedFile(f"{files.path} has two tensors called {tensor.name!r}")
            else:
                model.tensors[tensor.name] = tensor
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
    node = Operator("", "", "", [], [], {})
    for number, wire, value in _wire.fields(data, budget):
        if number == 1:
            node.inputs.append(_wire.text(wire, value))
        elif number == 2:
            node.outputs.append(_wire.text(wire, value))
        elif number == 3:
            node.name = _wire.text(wire, value)
        elif number == 4:
            node.op = _wire.text(wire, value)
        elif number == 5:
            name, held = _attribute(_wire.content(wire, value), files, budget)
            node.attrs[name] = held
        elif number == 7:
            node.domain = _wire.text(wire, value)
    return node


def _attribute(data: memoryview, files: Files, budget: Budget) -> tuple[str, Any]:
    """Read an attribute: a number, a text, a list of numbers, or a `Tensor`; None for graphs and the like."""
    floats: list[float] = []
    ints: list[int] = []
    single: Any = None
    name, listed, kind = "", False, 0
    for number, wire, value in _wire.fields(data, budget):
        if number == 1:
            name = _wire.text(wire, value)
        elif number == 2:
            single = _wire.real(wire, value)
        elif number == 3:
            single = _wire.number(wire, value)
        elif number == 4:
            single = _wire.text(wire, value)
        elif number == 5:
            single = _tensor(_wire.content(wire, value), files, budget)
        elif number == 7:
            listed = True
            floats.extend([_wire.real(wire, value)] if wire == _wire.FIXED32 else np.frombuffer(_wire.content(wire, value), "<f4").tolist())
        elif number == 8:
            listed = True
            ints.extend(_wire.numbers(wire, value))
        elif number == 20:
            kind = _wire.number(wire, value)
    if len(floats) + len(ints) > 1_000_000:
        raise LimitExceeded(f"{files.path}: the attribute {name!r} lists {len(floats) + len(ints)} numbers")
    if single is None and kind in (1, 2, 3):  # proto3 writers leave zeros out
        single = {1: 0.0, 2: 0, 3: ""}[kind]
    return name, (floats or ints) if listed else [] if kind in (6, 7) else single


def _tensor(data: memoryview, files: Files, budget: Budget) -> Tensor | str:
    """Describe a tensor, or say why it can't be had."""
    dims: list[int] = []
    name, kind, outside = "", 0, False
    raw: memoryview | None = None
    typed: list[tuple[int, int, int | memoryview]] = []
    entries: dict[str, str] = {}
    for number, wire, value in _wire.fields(data, budget):
        if number == 1:
            dims.extend(_wire.numbers(wire, value))
        elif number == 2:
            kind = _wire.number(wire, value)
        elif number in (4, 5, 7, 10, 11):
            typed.append((number, wire, value))
        elif number == 8:
            name = _wire.text(wire, value)
        elif number == 9:
            raw = _wire.content(wire, value)
        elif number == 13:
            key, entry = _pair(_wire.content(wire, value), budget)
            entries[key] = str(entry)
        elif number == 14:
            outside = _wire.number(wire, value) == 1
    if len(dims) > _guard.MAX_RANK:
        raise LimitExceeded(f"{files.path}: {name} has {len(dims)} axes; at most {_guard.MAX_RANK} are read")
    if any(dim < 0 for dim in dims):
        raise MalformedFile(f"{files.path}: {name} has shape {dims}")
    if kind not in DTYPES and kind not in NIBBLES:
        return f"{name or 'a constant'} (of type {kind})"
    shape, count = tuple(dims), math.prod(dims)
    dtype = _guard.dtype_of(DTYPES.get(kind, "int8" if NIBBLES.get(kind) else "uint8"))
    nbytes = (count + 1) // 2 if kind in NIBBLES else count * dtype.itemsize
    if outside:
        raw = files.beside(entries, nbytes, name)
    if raw is not None:
        if len(raw) != nbytes:
            raise MalformedFile(f"{files.path}: {name} of shape {shape} needs {nbytes} bytes and has {len(raw)}")
        return Tensor(name, shape, dtype, lambda: _plain(raw, kind, dtype, shape))
    held = sum(len(value) if not isinstance(value, int) else 1 for _, _, value in typed)
    if (nbytes if kind in NIBBLES else count) > held:  # a number takes a byte at the very least
        raise MalformedFile(f"{files.path}: {name} of shape {shape} has {held} bytes")
    return Tensor(name, shape, dtype, lambda: _from_fields(typed, kind, dtype, shape, f"{files.path}: {name}"))


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


def _pair(data: memoryview, budget: Budget) -> tuple[str, str | int]:
    """Read a message of a text and a text or a number: metadata, an operator set, a piece of external data."""
    key: str = ""
    entry: str | int = ""
    for number, wire, value in _wire.fields(data, budget):
        if number == 1:
            key = _wire.text(wire, value)
        elif number == 2:
            entry = _wire.number(wire, value) if wire == _wire.VARINT else _wire.text(wire, value)
    return key, entry


def _value_info(data: memoryview, budget: Budget) -> tuple[str, tuple[int | None, ...]]:
    """Read an input's or output's name and shape."""
    name = ""
    dims: list[int | None] = []
    for number, wire, value in _wire.fields(data, budget):
        if number == 1:
            name = _wire.text(wire, value)
        elif number == 2:
            for shape in _inside(_inside(iter([_wire.content(wire, value)]), 1, budget), 2, budget):
                for number_, wire_, value_ in _wire.fields(shape, budget):
                    if number_ == 1:
                        free = [_wire.number(w, v) for n, w, v in _wire.fields(_wire.content(wire_, value_), budget) if n == 1]
                        dims.append(free[0] if free and free[0] > 0 else None)
    if len(dims) > _guard.MAX_RANK:
        raise UnsupportedFormat(f"{name} has {len(dims)} axes; at most {_guard.MAX_RANK} are read")
    return name, tuple(dims)


def _inside(messages: Iterator[memoryview], wanted: int, budget: Budget) -> Iterator[memoryview]:
    for data in messages:
        for number, wire, value in _wire.fields(data, budget):
            if number == wanted:
                yield _wire.content(wire, value)
