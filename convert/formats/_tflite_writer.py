"""A network in TFLite's operators while it is being written: its tensors, operators and buffers, and each operator of ONNX's at hand."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np

from convert.steps import laid
from weights.errors import ConvertError

LAST, FIRST = (0, 2, 3, 1), (0, 3, 1, 2)
SAME, VALID = 0, 1
LARGEST_BYTES = 2**31 - 2**24
"""A FlatBuffer ends at 2 GiB; the rest is for its tables."""
VERSIONS = {"TRANSPOSE_CONV": 3, "FULLY_CONNECTED": 1, "CONV_2D": 1, "STRIDED_SLICE": 1, "RESIZE_BILINEAR": 3, "RESIZE_NEAREST_NEIGHBOR": 3}
FOLDS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
"""Operators that take up the BatchNorm behind them."""


class Numbers(NamedTuple):
    """What a layer became into which a BatchNorm was folded, or a BatchNorm that stands alone, as PyTorch's layers have it."""

    layer: str
    norm: str
    weight: np.ndarray
    bias: np.ndarray


class Writer:
    """A graph of ONNX that is being said in TFLite's operators.

    Maps lie with their channels last; a value of any other rank lies as ONNX has it.
    """

    def __init__(self, tables: Any, onnx: Any, model: Any, path: Path, handlers: Mapping[str, Handler]) -> None:
        self.tables, self.onnx, self.path, self.handlers = tables, onnx, path, handlers
        self.graph = model.graph
        self.constants: dict[str, np.ndarray] = {one.name: onnx.numpy_helper.to_array(one) for one in self.graph.initializer}
        for node in self.graph.node:
            if node.op_type == "Constant":
                self.constants[node.output[0]] = onnx.numpy_helper.to_array(node.attribute[0].t)
        self.origins = {name: name for name in self.constants}
        for node in self.graph.node:
            if (
                node.op_type in ("Transpose", "Identity", "Reshape") and node.input[0] in self.constants
            ):  # a dense layer's weight, as MatMul wants it
                held, perm = self.constants[node.input[0]], [list(one.ints) for one in node.attribute if one.name == "perm"]
                if node.op_type == "Reshape":
                    held = held.reshape(self.constants[node.input[1]])
                self.constants[node.output[0]] = held.transpose(perm[0] if perm else None) if node.op_type == "Transpose" else held
                self.origins[node.output[0]] = self.origins[node.input[0]]
        values = [*self.graph.value_info, *self.graph.input, *self.graph.output]
        self.shapes = {one.name: tuple(axis.dim_value for axis in one.type.tensor_type.shape.dim) for one in values}
        self.tensors: list[Any] = []
        self.buffers: list[Any] = [tables.BufferT()]
        self.operators: list[Any] = []
        self.codes: dict[str, int] = {}
        self.places: dict[str, int] = {}
        self.size_bytes = 0
        self.folded: dict[str, Any] = {}
        self.numbers: list[Numbers] = []
        self.named = set[str]()

    def file(self, metadata: Mapping[str, str]) -> bytes:
        """Say the whole graph, and pack it."""
        tables = self.tables
        flatbuffers: Any = importlib.import_module("flatbuffers")
        given = self.graph.input[0].name
        self.places[given] = self._tensor("images", self.laid_out(self.shapes[given]))
        for node in self._needed():
            if self.folded.get(node.output[0]) is None:
                self._say(node)
        outputs = [self.places[one.name] for one in self.graph.output]
        graph = tables.SubGraphT()
        graph.name, graph.tensors, graph.operators = "network", self.tensors, self.operators
        graph.inputs, graph.outputs = [self.places[given]], outputs
        model: Any = tables.ModelT()
        model.version, model.description, model.subgraphs = 3, "kernelzoo", [graph]
        codes: list[Any] = []
        notes: list[Any] = []
        for name in self.codes:
            code, number = tables.OperatorCodeT(), getattr(tables.BuiltinOperator, name)
            code.builtinCode, code.deprecatedBuiltinCode, code.version = number, min(number, 127), VERSIONS.get(name, 1)
            codes.append(code)
        for key in sorted(metadata):
            note = tables.MetadataT()
            note.name, note.buffer = key, self._buffer(np.frombuffer(metadata[key].encode(), np.uint8))
            notes.append(note)
        model.operatorCodes, model.metadata, model.buffers = codes, notes, self.buffers
        builder = flatbuffers.Builder(self.size_bytes + 2**20)
        builder.Finish(model.Pack(builder), b"TFL3")
        return bytes(builder.Output())

    def _needed(self) -> list[Any]:
        """List the nodes that pixels flow through, and note which BatchNorm is part of the layer before it."""
        makers = {name: node for node in self.graph.node for name in node.output}
        readers: dict[str, list[Any]] = {}
        for node in self.graph.node:
            for name in node.input:
                readers.setdefault(name, []).append(node)
        ends = {one.name for one in self.graph.output}
        wanted, left = set[int](), [makers[name] for name in ends]
        while left:
            node = left.pop()
            if id(node) in wanted:
                continue
            wanted.add(id(node))
            data = node.input[:1] if node.op_type in ("Reshape", "Resize", "Expand", "Pad", "Slice", "Unsqueeze", "Squeeze") else node.input
            left += [makers[name] for name in data if name in makers and name not in self.constants]
            before = makers.get(node.input[0]) if node.op_type == "BatchNormalization" else None
            alone = before is not None and readers[before.output[0]] == [node] and before.output[0] not in ends
            if before is not None and alone and before.op_type in FOLDS and len(before.input) > 1 and before.input[1] in self.constants:
                self.folded[before.output[0]] = node
        folds = {node.output[0]: node for node in self.folded.values()}
        self.before = {name: makers[node.input[0]] for name, node in folds.items()}
        return [node for node in self.graph.node if id(node) in wanted and node.output[0] not in self.constants]

    def _say(self, node: Any) -> None:
        before = self.before.get(node.output[0])
        handler = self.handlers.get((before if before is not None else node).op_type)
        if handler is None:
            self.refuse(node, "is no operator that is written for TFLite")
        handler(self, Node(self, before if before is not None else node, node if before is not None else None))

    def refuse(self, node: Any, why: str) -> NoReturn:
        """Say which operator has no word."""
        name = f" ({node.name.strip('/')})" if node.name else ""
        raise ConvertError(f"{self.path}: the network's {node.op_type}{name} {why}; .onnx and .xml take every network")

    def laid_out(self, shape: Sequence[int]) -> tuple[int, ...]:
        return tuple(shape[axis] for axis in LAST) if len(shape) == 4 else tuple(shape)

    def _buffer(self, array: np.ndarray) -> int:
        buffer = self.tables.BufferT()
        buffer.data = np.ascontiguousarray(laid(array)).reshape(-1).view(np.uint8)
        self.size_bytes += buffer.data.size
        if self.size_bytes > LARGEST_BYTES:
            raise ConvertError(f"{self.path}: a TFLite file holds 2 GiB at the most, and the network has more")
        self.buffers.append(buffer)
        return len(self.buffers) - 1

    def _tensor(self, name: str, shape: Sequence[int], array: np.ndarray | None = None) -> int:
        tensor = self.tables.TensorT()
        tensor.name, tensor.shape, tensor.buffer = name, list(shape), 0
        if array is None:
            tensor.shapeSignature = [-1, *shape[1:]]
            tensor.type = self.tables.TensorType.FLOAT32
        else:
            tensor.type = self.tables.TensorType.INT32 if array.dtype.kind == "i" else self.tables.TensorType.FLOAT32
            tensor.buffer = self._buffer(array.astype("<i4" if array.dtype.kind == "i" else "<f4", copy=False))
        self.tensors.append(tensor)
        return len(self.tensors) - 1

    def held(self, array: Any, name: str = "") -> int:
        """Keep a constant."""
        found = np.asarray(array)
        found = found.astype(np.int32 if found.dtype.kind in "iu" else np.float32, copy=False)
        if name and name in self.named:
            raise ConvertError(
                f"{self.path}: {name.rpartition('/')[0]} is called more than once, which a TFLite file can't say; .onnx and .xml can"
            )
        self.named.add(name)
        return self._tensor(name or f"constant_{len(self.tensors)}", found.shape, found)

    def value(self, name: str, rank: int = 0) -> int:
        """Find a value, or keep a constant that meets maps of so many axes."""
        if name in self.constants:
            array = self.constants[name]
            if rank == 4 and array.ndim:
                array = array.reshape((1,) * (4 - array.ndim) + array.shape).transpose(LAST)
            return self.held(array, name.removesuffix(".weight") + "/weights" if name.endswith(".weight") else "")
        return self.places[name]

    def add(self, op: str, inputs: Sequence[int], shape: Sequence[int], name: str = "", kind: str = "", **options: Any) -> int:
        """Say an operator, and return where its result is."""
        operator = self.tables.OperatorT()
        operator.opcodeIndex = self.codes.setdefault(op, len(self.codes))
        operator.inputs = list(inputs)
        made = self._tensor(name or f"{op.lower()}_{len(self.tensors)}", shape)
        operator.outputs = [made]
        if kind:
            operator.builtinOptionsType = getattr(self.tables.BuiltinOptions, kind)
            operator.builtinOptions = getattr(self.tables, f"{kind}T")()
            for key, value in options.items():
                setattr(operator.builtinOptions, key, value)
        self.operators.append(operator)
        return made

    def turned(self, place: int, perm: Sequence[int]) -> int:
        """Put a value's axes into another order; where that leaves the numbers in their order, only the shape changes."""
        shape = self.tensors[place].shape
        after = [shape[axis] for axis in perm]
        moved = [axis for axis in perm if shape[axis] != 1 or axis == 0]
        if moved == sorted(moved):
            return self.reshaped(place, after)
        return self.add("TRANSPOSE", [place, self.held(np.array(perm))], after, kind="TransposeOptions")

    def reshaped(self, place: int, shape: Sequence[int]) -> int:
        """Give a value another shape; the batch is free."""
        wanted = [-1, *shape[1:]]
        return self.add("RESHAPE", [place, self.held(np.array(wanted))], shape, kind="ReshapeOptions", newShape=wanted)

    def as_onnx(self, name: str) -> int:
        """Find a value with its axes as ONNX has them."""
        return self.turned(self.places[name], FIRST) if len(self.shapes[name]) == 4 else self.places[name]

    def done(self, name: str, place: int, *, as_onnx: bool = False) -> None:
        """Note where a value of ONNX's is."""
        self.places[name] = self.turned(place, LAST) if as_onnx and len(self.shapes[name]) == 4 else place

    def padded(self, place: int, pads: Sequence[int], value: float | None = None) -> int:
        """Put a margin around a map: top, left, bottom, right."""
        if not any(pads):
            return place
        top, left, bottom, right = pads
        n, h, w, c = self.tensors[place].shape
        sides = self.held(np.array([[0, 0], [top, bottom], [left, right], [0, 0]]))
        shape = (n, h + top + bottom, w + left + right, c)
        if value is None:
            return self.add("PAD", [place, sides], shape, kind="PadOptions")
        return self.add("PADV2", [place, sides, self.held(np.array([value], np.float32))], shape, kind="PadV2Options")


class Node:
    """An operator of ONNX's, its attributes and shapes at hand."""

    def __init__(self, writer: Writer, node: Any, norm: Any = None) -> None:
        self.writer, self.node, self.norm = writer, node, norm
        self.inputs, self.output = list(node.input), (norm or node).output[0]
        self.how = {one.name: writer.onnx.helper.get_attribute_value(one) for one in node.attribute}
        self.shape = writer.shapes.get(self.output, ())
        self.given = writer.shapes.get(self.inputs[0], ()) if self.inputs else ()
        if not self.shape or 0 in self.shape:
            self.refuse("has a size that is not known beforehand")

    def refuse(self, why: str) -> NoReturn:
        self.writer.refuse(self.node, why)

    @property
    def lies(self) -> tuple[int, ...]:
        return self.writer.laid_out(self.shape)

    def constant(self, place: int) -> np.ndarray | None:
        name = self.inputs[place] if place < len(self.inputs) else ""
        return self.writer.constants.get(name)

    @property
    def module(self) -> str:
        return self.writer.origins.get(self.inputs[1], "").rpartition(".")[0] or self.output.strip("/").replace("/", ".")

    def margins(self, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> tuple[int, list[int]]:
        """Say which padding TFLite has for the windows, and the margin that it needs beforehand."""
        pads = list(self.how.get("pads") or (0, 0, 0, 0))
        if self.how.get("auto_pad", b"NOTSET") not in (b"NOTSET", b"VALID"):
            self.refuse("pads in a way that PyTorch never writes")
        ends: list[int] = []
        same = True
        for axis in range(2):
            size, out = self.given[2 + axis], self.shape[2 + axis]
            span = (kernel[axis] - 1) * dilation[axis] + 1
            end = max((out - 1) * stride[axis] + span - size - pads[axis], 0)
            ends.append(end)
            total = max((-(-size // stride[axis]) - 1) * stride[axis] + span - size, 0)
            same = same and out == -(-size // stride[axis]) and (total // 2, total - total // 2) == (pads[axis], end)
        if same:
            return SAME, [0, 0, 0, 0]
        return VALID, [pads[0], pads[1], *ends]


Handler = Callable[[Writer, Node], None]
"""Says one operator of ONNX's in TFLite's."""
