"""What a TFLite file says, as plain objects: its tensors, where they lie and what their numbers stand for, and its operators."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from convert import _guard
from convert.formats._flatbuffer import Table
from convert.formats._operators import dequantised
from convert.source import Stored
from weights.errors import LimitExceeded, MalformedFile

DTYPES = {
    0: "float32", 1: "float16", 2: "int32", 3: "uint8", 4: "int64", 6: "bool", 7: "int16", 9: "int8", 10: "float64", 12: "uint64",
    15: "uint32", 16: "uint16", 18: "bfloat16",
}  # fmt: skip
"""TensorType's numbers; texts, complex numbers and handles are no weights."""
NIBBLES = 17
"""Numbers of four bits with a sign, two to a byte."""

WEIGHTED = (3, 4, 9, 67)
"""Operators whose second input is a weight: CONV_2D, DEPTHWISE_CONV_2D, FULLY_CONNECTED; a transposed convolution's is too."""
NOTES = "kernelzoo"
"""What is kept of a file's metadata: what `export` has written."""


@dataclass(slots=True)
class Tensor:
    """A value of the graph: a constant, or what flows.

    Attributes:
        name: unique in the file.
        shape: None where free.
        held: its numbers, if it is a constant; dequantised.
        kind: a number of TensorType, what it is stored as.
    """

    name: str
    shape: tuple[int | None, ...]
    held: Stored | None
    kind: int = 0


@dataclass(slots=True)
class Operator:
    """A step: `code` is a number of BuiltinOperator, `custom` the name of one that has none; a missing input is None."""

    code: int
    custom: str
    inputs: list[Tensor | None]
    outputs: list[Tensor]
    options: Table | None


@dataclass(slots=True)
class Model:
    """A whole file: the first of its graphs, for further ones are parts of it that are called."""

    version: int
    description: str
    tensors: list[Tensor] = field(default_factory=list[Tensor])
    operators: list[Operator] = field(default_factory=list[Operator])
    inputs: list[Tensor] = field(default_factory=list[Tensor])
    outputs: list[Tensor] = field(default_factory=list[Tensor])
    quantised: str = ""
    notes: list[str] = field(default_factory=list[str])
    facts: dict[str, str] = field(default_factory=dict[str, str])


def parse(root: Table, data: memoryview) -> Model:
    """Read a file's tables; of tensors nothing but where they are."""
    graphs, buffers = root.tables(2), root.tables(4)
    if not graphs:
        raise MalformedFile("it has no graph")
    graph, model = graphs[0], Model(root.number(0, "I"), root.text(3)[:100])
    if len(graphs) > 1:
        model.notes.append(f"{len(graphs) - 1} further graphs, which operators call, were left out")
    taken: dict[str, int] = {}
    kinds: dict[str, int] = {}
    for number, table in enumerate(graph.tables(0)):
        name = table.text(3) or f"tensor {number}"
        taken[name] = taken.get(name, 0) + 1
        model.tensors.append(_tensor(table, name if taken[name] == 1 else f"{name}#{number}", buffers, data, kinds, model.notes))
    for note in root.tables(6):
        held = buffers[which] if 0 < (which := note.number(1, "I")) < len(buffers) else None
        if note.text(0) == NOTES and held is not None and (content := _content(held, data)) is not None:
            model.facts[NOTES] = bytes(content[: _guard.MAX_FACT]).decode("utf-8", "replace")
    model.quantised = ", ".join(f"{count} of {kind}" for kind, count in kinds.items())
    codes = [(max(code.number(0, "b"), code.number(3, "i")), code.text(1)) for code in root.tables(1)]
    for table in graph.tables(3):
        which = table.number(0, "I")
        if which >= len(codes):
            raise MalformedFile(f"an operator is of kind {which}, of {len(codes)}")
        given = [None if i < 0 else _at(model.tensors, i) for i in table.numbers(1, "<i4")]
        gives = [_at(model.tensors, i) for i in table.numbers(2, "<i4")]
        model.operators.append(Operator(*codes[which], given, gives, table.table(4)))
    model.inputs = [_at(model.tensors, i) for i in graph.numbers(1, "<i4")]
    model.outputs = [_at(model.tensors, i) for i in graph.numbers(2, "<i4")]
    return model


def rounds(model: Model) -> bool:
    """Whether a runtime rounds the reals that a layer reads to eight bits: one whose weights are whole numbers (dynamic range)."""
    layers = (operator.inputs for operator in model.operators if operator.code in WEIGHTED and len(operator.inputs) > 1)
    pairs = ((x, weight) for x, weight, *_ in layers if x is not None and weight is not None and weight.held is not None)
    return any(x.kind == 0 and (weight.kind == NIBBLES or DTYPES.get(weight.kind) in ("int8", "uint8")) for x, weight in pairs)


def _at(tensors: list[Tensor], place: int) -> Tensor:
    if not 0 <= place < len(tensors):
        raise MalformedFile(f"an operator names tensor {place}, of {len(tensors)}")
    return tensors[place]


def _tensor(table: Table, name: str, buffers: list[Table], data: memoryview, kinds: dict[str, int], notes: list[str]) -> Tensor:
    dims, kind, which = [int(n) for n in table.numbers(0, "<i4")], table.number(1, "b"), table.number(2, "I")
    if len(dims) > _guard.MAX_RANK:
        raise LimitExceeded(f"{name:.100} has {len(dims)} axes; at most {_guard.MAX_RANK} are read")
    signature = [int(n) for n in table.numbers(7, "<i4")]
    free: tuple[int | None, ...] = tuple(n if n > 0 else None for n in (signature if len(signature) == len(dims) else dims))
    raw = _content(buffers[which], data) if 0 < which < len(buffers) else None
    if raw is None or not len(raw):
        return Tensor(name, free, None, kind)
    if table.table(6) is not None:
        notes.append(f"left out, being sparse: {name:.100}")
        return Tensor(name, free, None)
    if kind not in DTYPES and kind != NIBBLES:
        return Tensor(name, free, None)
    shape, dtype = tuple(dims), _guard.dtype_of(DTYPES.get(kind, "int8"))
    needed = (math.prod(shape) + 1) // 2 if kind == NIBBLES else math.prod(shape) * dtype.itemsize
    if min(shape, default=0) < 0 or needed != len(raw):
        raise MalformedFile(f"{name:.100} of shape {shape} needs {needed} bytes and has {len(raw)}")
    stored = Stored(name, shape, dtype, partial(_numbers, raw, dtype, shape, kind == NIBBLES))
    quantisation = table.table(4)
    scales = quantisation.numbers(2, "<f4") if quantisation is not None else np.empty(0, np.float32)
    if quantisation is not None and len(scales) and dtype.kind in "iu":
        stored = dequantised(stored, scales, quantisation.numbers(3, "<i8"), quantisation.number(6, "i"))
        label = "int4" if kind == NIBBLES else str(dtype)
        kinds[label] = kinds.get(label, 0) + 1
    return Tensor(name, free, stored, kind)


def _content(buffer: Table, data: memoryview) -> memoryview | None:
    """Find a tensor's bytes: in its buffer, or, in files beyond 2 GB, behind the last of the tables."""
    inside = buffer.content(0)
    offset, size = buffer.number(1, "Q"), buffer.number(2, "Q")
    if inside is not None or offset <= 1:
        return inside
    if offset + size > len(data):
        raise MalformedFile(f"a tensor lies at byte {offset}, outside of the file")
    return data[offset : offset + size]


def _numbers(raw: memoryview, dtype: np.dtype, shape: tuple[int, ...], nibbles: bool) -> np.ndarray:
    if not nibbles:
        return np.frombuffer(raw, dtype).reshape(shape)
    pairs = np.frombuffer(raw, np.uint8)
    halves = np.stack([pairs & 15, pairs >> 4], axis=1).reshape(-1)[: math.prod(shape)]
    return ((halves ^ 8).astype(np.int8) - 8).astype(np.int8).reshape(shape)
