"""Write a network as TFLite: as ONNX first, whose operators are then said in TFLite's, with channels last and BatchNorms folded.

The tables of the file are made by the schema that ai-edge-litert brings along, which also runs it.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np

from convert.formats import _onnx_export
from convert.steps import laid
from weights.errors import ConvertError, MissingLibrary

if TYPE_CHECKING:
    from torch import nn

LAST, FIRST = (0, 2, 3, 1), (0, 3, 1, 2)
SAME, VALID = 0, 1
NONE, RELU, RELU6 = 0, 1, 3
LARGEST_BYTES = 2**31 - 2**24
"""A FlatBuffer ends at 2 GiB; the rest is for its tables."""
VERSIONS = {"TRANSPOSE_CONV": 3, "FULLY_CONNECTED": 1, "CONV_2D": 1, "STRIDED_SLICE": 1, "RESIZE_BILINEAR": 3, "RESIZE_NEAREST_NEIGHBOR": 3}
LOWEST = float(np.finfo(np.float32).min)
"""What a maximum never takes."""
FOLDS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
"""Operators that take up the BatchNorm behind them."""
PLAIN = {"Relu": "RELU", "Sigmoid": "LOGISTIC", "Tanh": "TANH", "HardSwish": "HARD_SWISH", "Elu": "ELU"}
BINARY = {
    "Add": ("ADD", "AddOptions"), "Sub": ("SUB", "SubOptions"), "Mul": ("MUL", "MulOptions"), "Div": ("DIV", "DivOptions"),
    "Max": ("MAXIMUM", "MaximumMinimumOptions"), "Min": ("MINIMUM", "MaximumMinimumOptions"),
}  # fmt: skip


def schema() -> Any:
    """Import the tables of the format.

    Raises:
        MissingLibrary: they are not installed.
    """
    try:
        importlib.import_module("flatbuffers")
        return importlib.import_module("ai_edge_litert.schema_py_generated")
    except ImportError as error:
        raise MissingLibrary(
            "ai-edge-litert is needed to write a .tflite file and is not installed: pip install 'kernelzoo[tflite]'"
        ) from error


def write(network: nn.Module, path: Path, *, input_shape: Sequence[int], metadata: Mapping[str, str]) -> tuple[nn.Module, Any, nn.Module]:
    """Write a network, as `convert.formats.tflite.export` says.

    Returns:
        The copy that was traced, its images, and a copy with the numbers of the file, whose BatchNorms are folded.
    """
    tables = schema()
    onnx: Any = importlib.import_module("onnx")
    with tempfile.TemporaryDirectory() as folder:
        between = Path(folder) / "network.onnx"
        twin, example = _onnx_export.write(
            network, between, input_shape=input_shape, metadata={}, preprocessing=None, opset=_onnx_export.OPSET
        )
        model = onnx.load(str(between))
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 1
    model = _computed(model, onnx)
    writer = _Writer(tables, onnx, model, path)
    content = writer.file(metadata)
    with path.open("wb") as file:
        file.write(content)
    return twin, example, _with_numbers(twin, writer.numbers)


def _with_numbers(network: nn.Module, numbers: Sequence[_Numbers]) -> nn.Module:
    """Copy a network and give its layers the numbers of the file; a layer that is called twice keeps its own."""
    import copy

    import torch

    made = copy.deepcopy(network)
    calls = Counter(each.layer for each in numbers)
    for each in numbers:
        if calls[each.layer] > 1:
            continue
        layer: Any = made.get_submodule(each.layer)
        norm: Any = made.get_submodule(each.norm)
        weight, bias = (torch.from_numpy(np.array(array)) for array in (each.weight, each.bias))  # pyright: ignore[reportUnknownMemberType]  # its argument is untyped
        layer.weight = torch.nn.Parameter(weight, requires_grad=False)
        layer.bias = torch.nn.Parameter(bias, requires_grad=False)
        norm.running_mean, norm.running_var, norm.eps = torch.zeros_like(norm.running_mean), torch.ones_like(norm.running_var), 0.0
        if layer is not norm:
            norm.weight = norm.bias = None
    return made


class _Numbers(NamedTuple):
    """What a layer became into which a BatchNorm was folded, or a BatchNorm that stands alone, as PyTorch's layers have it."""

    layer: str
    norm: str
    weight: np.ndarray
    bias: np.ndarray


def _computed(model: Any, onnx: Any) -> Any:
    """Compute what depends on no pixel, the sizes of maps and of margins, and tell the shape of every value."""
    reference: Any = importlib.import_module("onnx.reference")
    known = {n.output[0]: onnx.numpy_helper.to_array(n.attribute[0].t) for n in model.graph.node if n.op_type == "Constant"}
    while True:
        del model.graph.value_info[:]
        model = onnx.shape_inference.infer_shapes(model, data_prop=True)
        shapes = {
            one.name: [axis.dim_value for axis in one.type.tensor_type.shape.dim]
            for one in model.graph.value_info
            if len(one.type.tensor_type.shape.dim)
        }
        left: list[Any] = []
        for node in model.graph.node:
            if node.op_type == "Shape" and 0 not in shapes.get(node.input[0], [0]):
                found = np.array(shapes[node.input[0]], np.int64)
            elif (
                node.op_type == "Constant"
                or not node.input
                or not all(name in known for name in node.input if name)
                or len(node.output) > 1
            ):
                left.append(node)
                continue
            else:
                given = {name: known[name] for name in node.input if name}
                whole = onnx.helper.make_graph(
                    [node], "one", [onnx.helper.make_empty_tensor_value_info(name) for name in given],
                    [onnx.helper.make_empty_tensor_value_info(node.output[0])],
                )  # fmt: skip
                alone = onnx.helper.make_model(whole, opset_imports=model.opset_import)
                found = np.asarray(reference.ReferenceEvaluator(alone).run(None, given)[0])
            known[node.output[0]] = found
            model.graph.initializer.append(onnx.numpy_helper.from_array(found, node.output[0]))
        if len(left) == len(model.graph.node):
            return model
        kind: Any = onnx.NodeProto
        kept: list[Any] = [kind.FromString(node.SerializeToString()) for node in left]
        del model.graph.node[:]
        model.graph.node.extend(kept)


def outputs(path: Path, images: np.ndarray, last: bool) -> tuple[np.ndarray, str] | str:
    """Let LiteRT run a file on images (B, C, H, W); `last` turns them for a file that takes the channels last. Or say why not."""
    module: Any = importlib.import_module("ai_edge_litert.interpreter")
    plain = module.OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES
    interpreter = module.Interpreter(model_content=path.read_bytes(), num_threads=1, experimental_op_resolver_type=plain)
    interpreter.allocate_tensors()
    (given, *_), (gives, *_) = interpreter.get_input_details(), interpreter.get_output_details()
    if given["dtype"] != np.float32 or gives["dtype"] != np.float32:
        return "its images or outputs are whole numbers, which it rounds"
    made: list[np.ndarray] = []
    for image in images:
        interpreter.set_tensor(given["index"], (image.transpose(1, 2, 0) if last else image)[None])
        interpreter.invoke()
        made.append(interpreter.get_tensor(gives["index"]).copy())
    return np.concatenate(made), f"LiteRT {importlib.metadata.version('ai-edge-litert')}"


class _Writer:
    """A graph of ONNX that is being said in TFLite's operators.

    Maps lie with their channels last; a value of any other rank lies as ONNX has it.
    """

    def __init__(self, tables: Any, onnx: Any, model: Any, path: Path) -> None:
        self.tables, self.onnx, self.path = tables, onnx, path
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
        self.numbers: list[_Numbers] = []
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
        handler = HANDLERS.get((before if before is not None else node).op_type)
        if handler is None:
            self.refuse(node, "is no operator that is written for TFLite")
        handler(self, _Node(self, before if before is not None else node, node if before is not None else None))

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


class _Node:
    """An operator of ONNX's, its attributes and shapes at hand."""

    def __init__(self, writer: _Writer, node: Any, norm: Any = None) -> None:
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


def _conv(out: _Writer, node: _Node) -> None:
    weight, bias = node.constant(1), node.constant(2)
    if weight is None or weight.ndim != 4:
        node.refuse("has a kernel that is computed, or not two sides")
    kernel: tuple[int, ...] = tuple(weight.shape)[2:]
    groups = node.how.get("group", 1)
    stride, dilation = node.how.get("strides", [1, 1]), node.how.get("dilations", [1, 1])
    weight, bias = _folded(out, node, weight, bias)
    bias = np.zeros(len(weight), np.float32) if bias is None else bias  # LiteRT runs no convolution without
    module = node.module
    padding, margin = node.margins(kernel, stride, dilation)
    x = out.padded(out.value(node.inputs[0]), margin)
    how = {"padding": padding, "strideH": stride[0], "strideW": stride[1], "dilationHFactor": dilation[0], "dilationWFactor": dilation[1]}
    if groups > 1 and tuple(node.given[1:2]) == (groups,) and weight.size == len(weight) * kernel[0] * kernel[1]:
        held = out.held(weight.transpose(1, 2, 3, 0), f"{module}/weights")
        op, kind = "DEPTHWISE_CONV_2D", "DepthwiseConv2DOptions"
        how["depthMultiplier"] = len(weight) // groups
    else:
        held, op, kind = out.held(weight.transpose(0, 2, 3, 1), f"{module}/weights"), "CONV_2D", "Conv2DOptions"
    inputs = [x, held, out.held(bias, f"{module}/bias")]
    out.done(node.output, out.add(op, inputs, node.lies, f"{module}/Conv2D", kind, **how))


def _folded(out: _Writer, node: _Node, weight: np.ndarray, bias: np.ndarray | None, axis: int = 0) -> tuple[np.ndarray, np.ndarray | None]:
    """Fold the BatchNorm behind a layer, if it has one, into what the layer holds, in float64; its outputs lie along `axis`."""
    if node.norm is None:
        return weight, bias
    scale, shift = _scale(out, node.norm)
    wide = scale.reshape(*(-1 if place == axis else 1 for place in range(weight.ndim)))
    moved = shift if bias is None else shift + scale * bias
    folded = (weight * wide).astype(np.float32), moved.astype(np.float32)
    out.numbers.append(_Numbers(node.module, _owner(node.norm), *folded))
    return folded


def _owner(norm: Any) -> str:
    """Name a BatchNorm by its mean, which each has."""
    return norm.input[3].rpartition(".")[0]


def _scale(out: _Writer, norm: Any) -> tuple[np.ndarray, np.ndarray]:
    found = [out.constants[name].astype(np.float64) for name in norm.input[1:5]]
    eps = next((one.f for one in norm.attribute if one.name == "epsilon"), 1e-5)
    gamma, beta, mean, var = found
    scale = gamma / np.sqrt(var + eps)
    return scale, beta - mean * scale


def _norm(out: _Writer, node: _Node) -> None:
    scale, shift = _scale(out, node.node)
    module = _owner(node.node)
    out.numbers.append(_Numbers(module, module, scale.astype(np.float32), shift.astype(np.float32)))
    place = out.value(node.inputs[0])
    place = out.add("MUL", [place, out.held(scale, f"{module}/weights")], node.lies, kind="MulOptions")
    out.done(node.output, out.add("ADD", [place, out.held(shift, f"{module}/bias")], node.lies, f"{module}/BiasAdd", "AddOptions"))


def _transposed(out: _Writer, node: _Node) -> None:
    weight, bias = node.constant(1), node.constant(2)
    stride, more = node.how.get("strides", [1, 1]), node.how.get("output_padding", [0, 0])
    pads = node.how.get("pads", [0, 0, 0, 0])
    if weight is None or weight.ndim != 4 or node.how.get("group", 1) != 1 or any(n != 1 for n in node.how.get("dilations", [1, 1])):
        node.refuse("has groups, dilations or a kernel that is computed")
    weight, bias = _folded(out, node, weight, bias, axis=1)
    module, whole = node.module, [size + pads[i] + pads[i + 2] - more[i] for i, size in enumerate(node.shape[2:])]
    channels = node.shape[1]
    if any(more):
        node.refuse("has an output padding")
    held = out.held(weight.transpose(1, 2, 3, 0), f"{module}/weights")
    sizes = out.held(np.array([1, *whole, channels]))
    if len(out.graph.input) and out.tensors[out.places[out.graph.input[0].name]].shapeSignature[0] == -1:
        out.tensors[out.places[out.graph.input[0].name]].shapeSignature[0] = 1  # its outputs' sizes are numbers, the batch among them
    how = {"padding": VALID, "strideH": stride[0], "strideW": stride[1]}
    shape = (1, *whole, channels)
    inputs = [sizes, held, out.value(node.inputs[0]), *([] if bias is None else [out.held(bias, f"{module}/bias")])]
    made = out.add("TRANSPOSE_CONV", inputs, shape, f"{module}/conv2d_transpose", "TransposeConvOptions", **how)
    if any(pads):
        made = _cut(out, made, [0, pads[0], pads[1], 0], [1, pads[0] + node.shape[2], pads[1] + node.shape[3], channels], [1] * 4)
    out.done(node.output, made)


def _cut(out: _Writer, place: int, begin: Sequence[int], end: Sequence[int], step: Sequence[int]) -> int:
    """Take a part of a value, of all images."""
    shape = [-(-(last - first) // by) for first, last, by in zip(begin, end, step, strict=True)]
    inputs = [place, *(out.held(np.array(numbers)) for numbers in (begin, end, step))]
    return out.add("STRIDED_SLICE", inputs, shape, kind="StridedSliceOptions", beginMask=1, endMask=1)


def _dense(out: _Writer, node: _Node) -> None:
    weight, bias = node.constant(1), node.constant(2)
    gemm = node.node.op_type == "Gemm"
    plain = not gemm or (node.how.get("alpha", 1.0) == 1 and node.how.get("beta", 1.0) == 1 and not node.how.get("transA", 0))
    if weight is None or weight.ndim != 2 or not plain or len(node.given) != 2:
        node.refuse("is no dense layer of a vector per image")
    if not (gemm and node.how.get("transB", 0)):
        weight = weight.T
    weight, bias = _folded(out, node, weight, bias)
    module = node.module
    inputs = [out.value(node.inputs[0]), out.held(weight, f"{module}/weights")]
    inputs.append(out.held(np.zeros(len(weight), np.float32) if bias is None else bias, f"{module}/bias"))
    out.done(node.output, out.add("FULLY_CONNECTED", inputs, node.shape, f"{module}/MatMul", "FullyConnectedOptions"))


def _plain(out: _Writer, node: _Node) -> None:
    out.done(node.output, out.add(PLAIN[node.node.op_type], [out.value(node.inputs[0])], node.lies))


def _same(out: _Writer, node: _Node) -> None:
    out.done(node.output, out.value(node.inputs[0]))


def _clip(out: _Writer, node: _Node) -> None:
    low, high = (None if (found := node.constant(place)) is None else float(found) for place in (1, 2))
    place = out.value(node.inputs[0])
    if (low, high) == (0, 6):
        out.done(node.output, out.add("RELU6", [place], node.lies))
        return
    for op, bound in (("MAXIMUM", low), ("MINIMUM", high)):
        if bound is not None:
            place = out.add(op, [place, out.held(np.float32(bound))], node.lies, kind="MaximumMinimumOptions")
    out.done(node.output, place)


def _hard_sigmoid(out: _Writer, node: _Node) -> None:
    alpha, beta = node.how.get("alpha", 0.2), node.how.get("beta", 0.5)
    place = out.value(node.inputs[0])
    if abs(alpha - 1 / 6) < 1e-6 and beta == 0.5:  # as everybody writes it, and exact at both of its ends
        place = out.add("ADD", [place, out.held(np.float32(3))], node.lies, kind="AddOptions")
        place = out.add("RELU6", [place], node.lies)
        out.done(node.output, out.add("MUL", [place, out.held(np.float32(1 / 6))], node.lies, kind="MulOptions"))
        return
    place = out.add("MUL", [place, out.held(np.float32(alpha))], node.lies, kind="MulOptions")
    place = out.add("ADD", [place, out.held(np.float32(beta))], node.lies, kind="AddOptions")
    place = out.add("MAXIMUM", [place, out.held(np.float32(0))], node.lies, kind="MaximumMinimumOptions")
    out.done(node.output, out.add("MINIMUM", [place, out.held(np.float32(1))], node.lies, kind="MaximumMinimumOptions"))


def _leaky(out: _Writer, node: _Node) -> None:
    made = out.add("LEAKY_RELU", [out.value(node.inputs[0])], node.lies, kind="LeakyReluOptions", alpha=node.how.get("alpha", 0.01))
    out.done(node.output, made)


def _prelu(out: _Writer, node: _Node) -> None:
    slope = node.constant(1)
    if slope is None or len(node.shape) not in (2, 4):
        node.refuse("has a slope that is computed")
    wide = slope.reshape((1,) * (len(node.shape) - 2) + (-1,))
    out.done(node.output, out.add("PRELU", [out.value(node.inputs[0]), out.held(wide, f"{node.module}/weights")], node.lies))


def _binary(out: _Writer, node: _Node) -> None:
    op, kind = BINARY[node.node.op_type]
    rank = len(node.shape)
    if any(name not in out.constants and len(out.shapes[name]) != rank for name in node.inputs):
        node.refuse("joins values of different ranks")
    out.done(node.output, out.add(op, [out.value(name, rank) for name in node.inputs], node.lies, kind=kind))


def _pool(out: _Writer, node: _Node) -> None:
    kernel, stride = node.how["kernel_shape"], node.how.get("strides", [1, 1])
    dilation = node.how.get("dilations", [1, 1])
    if len(kernel) != 2 or any(n != 1 for n in dilation) or len(node.node.output) > 1:
        node.refuse("has dilations, indices or not two sides")
    average = node.node.op_type == "AveragePool"
    padding, margin = node.margins(kernel, stride, dilation)
    place, factor = out.value(node.inputs[0]), None
    if average:
        counted = _counted(node, kernel, stride)
        if padding == SAME:
            theirs = _windows(node, kernel, stride, *_same_before(node, kernel, stride), counting=0)
            if not np.array_equal(theirs, counted):
                padding, margin = VALID, _explicit(node, kernel, stride)
        if padding == VALID and any(margin):
            factor = (kernel[0] * kernel[1] / counted).astype(np.float32)
        place = out.padded(place, margin)
    else:
        place = out.padded(place, margin, LOWEST)
    how: dict[str, Any] = {
        "padding": padding,
        "strideH": stride[0],
        "strideW": stride[1],
        "filterHeight": kernel[0],
        "filterWidth": kernel[1],
    }
    place = out.add("AVERAGE_POOL_2D" if average else "MAX_POOL_2D", [place], node.lies, kind="Pool2DOptions", **how)
    if factor is not None and (factor != 1).any():
        place = out.add("MUL", [place, out.held(factor[None, :, :, None])], node.lies, kind="MulOptions")
    out.done(node.output, place)


def _explicit(node: _Node, kernel: Sequence[int], stride: Sequence[int]) -> list[int]:
    pads = list(node.how.get("pads") or (0, 0, 0, 0))
    ends = [max((node.shape[2 + i] - 1) * stride[i] + kernel[i] - node.given[2 + i] - pads[i], 0) for i in range(2)]
    return [pads[0], pads[1], *ends]


def _same_before(node: _Node, kernel: Sequence[int], stride: Sequence[int]) -> tuple[int, int]:
    totals = (max((node.shape[2 + i] - 1) * stride[i] + kernel[i] - node.given[2 + i], 0) for i in range(2))
    top, left = (total // 2 for total in totals)
    return top, left


def _counted(node: _Node, kernel: Sequence[int], stride: Sequence[int]) -> np.ndarray:
    """Say by how many numbers ONNX divides the sum of each window."""
    pads = node.how.get("pads") or (0, 0, 0, 0)
    counting = node.how.get("count_include_pad", 0)
    return _windows(node, kernel, stride, pads[0], pads[1], counting=counting)


def _windows(node: _Node, kernel: Sequence[int], stride: Sequence[int], top: int, left: int, *, counting: int) -> np.ndarray:
    pads = node.how.get("pads") or (0, 0, 0, 0)
    sides: list[np.ndarray] = []
    for axis, before in enumerate((top, left)):
        starts = np.asarray([place * stride[axis] - before for place in range(int(node.shape[2 + axis]))], np.int64)
        low, high = (-pads[axis], node.given[2 + axis] + pads[axis + 2]) if counting else (0, node.given[2 + axis])
        sides.append(np.minimum(starts + kernel[axis], high) - np.maximum(starts, low))
    return sides[0][:, None] * sides[1][None, :]


def _mean(out: _Writer, node: _Node) -> None:
    op = "REDUCE_MAX" if "Max" in node.node.op_type else "MEAN"
    rank, whole = len(node.given), node.node.op_type.startswith("Global")
    axes = [2, 3] if whole else [axis % rank for axis in node.how.get("axes") or ()]
    keep = whole or bool(node.how.get("keepdims", 1))
    if not axes or 0 in axes:
        node.refuse("joins images")
    place = out.value(node.inputs[0])
    theirs = sorted(LAST.index(axis) for axis in axes) if rank == 4 else sorted(axes)
    lies = [1 if axis in theirs else size for axis, size in enumerate(out.tensors[place].shape)]
    shape = lies if keep else [size for axis, size in enumerate(lies) if axis not in theirs]
    made = out.add(op, [place, out.held(np.array(theirs))], shape, kind="ReducerOptions", keepDims=keep)
    kept = [LAST[axis] for axis in range(rank) if axis not in theirs] if rank == 4 else [0]
    if not keep and kept != sorted(kept):
        node.refuse("leaves a map without channels")
    out.done(node.output, made)


def _concat(out: _Writer, node: _Node) -> None:
    axis, rank = node.how["axis"] % len(node.shape), len(node.shape)
    theirs = LAST.index(axis) if rank == 4 else axis
    made = out.add("CONCATENATION", [out.value(name, rank) for name in node.inputs], node.lies, kind="ConcatenationOptions", axis=theirs)
    out.done(node.output, made)


def _reshape(out: _Writer, node: _Node) -> None:
    out.done(node.output, out.reshaped(out.as_onnx(node.inputs[0]), node.shape), as_onnx=True)


def _transpose(out: _Writer, node: _Node) -> None:
    perm = list(node.how["perm"])
    if perm[0] != 0:
        node.refuse("moves the images")
    out.done(node.output, out.turned(out.as_onnx(node.inputs[0]), perm), as_onnx=True)


def _softmax(out: _Writer, node: _Node) -> None:
    if node.how.get("axis", -1) % len(node.shape) != (1 if len(node.shape) == 4 else len(node.shape) - 1):
        node.refuse("is not over the channels")
    out.done(node.output, out.add("SOFTMAX", [out.value(node.inputs[0])], node.lies, kind="SoftmaxOptions", beta=1.0))


def _pad(out: _Writer, node: _Node) -> None:
    pads, value = node.constant(1), node.constant(2)
    if pads is None or node.how.get("mode", b"constant") != b"constant" or len(node.shape) != 4 or any(pads[i] for i in (0, 4)):
        node.refuse("pads otherwise than a map by a number")
    sides = [[int(pads[axis]), int(pads[axis + 4])] for axis in LAST]
    if min(map(min, sides)) < 0:
        node.refuse("takes away margins")
    inputs = [out.value(node.inputs[0]), out.held(np.array(sides))]
    if value is not None and float(value):
        made = out.add("PADV2", [*inputs, out.held(np.array([float(value)], np.float32))], node.lies, kind="PadV2Options")
    else:
        made = out.add("PAD", inputs, node.lies, kind="PadOptions")
    out.done(node.output, made)


def _slice(out: _Writer, node: _Node) -> None:
    first, last, axes, steps = (node.constant(place) for place in (1, 2, 3, 4))
    rank = len(node.shape)
    if first is None or last is None:
        node.refuse("has bounds that are computed")
    begin: list[int]
    begin, end, step = [0] * rank, [int(n) for n in node.given], [1] * rank
    for number, axis in enumerate(range(len(first)) if axes is None else axes):
        size, by = node.given[axis], 1 if steps is None else int(steps[number])
        low, high = (min(max(int(n) + (size if n < 0 else 0), 0), size) for n in (first[number], last[number]))
        if by < 1 or axis % rank == 0:
            node.refuse("runs backwards, or over images")
        begin[axis], end[axis], step[axis] = low, high, by
    ways = (tuple(numbers[axis] for axis in LAST) if rank == 4 else tuple(numbers) for numbers in (begin, end, step))
    out.done(node.output, _cut(out, out.value(node.inputs[0]), *ways))


def _split(out: _Writer, node: _Node) -> None:
    axis, rank, at = node.how.get("axis", 0) % len(node.given), len(node.given), 0
    if axis == 0:
        node.refuse("divides images")
    for name in node.node.output:
        begin, end = [0] * rank, list(node.given)
        begin[axis], end[axis] = at, at + out.shapes[name][axis]
        at = end[axis]
        ways = (tuple(numbers[i] for i in LAST) if rank == 4 else tuple(numbers) for numbers in (begin, end, [1] * rank))
        out.done(name, _cut(out, out.value(node.inputs[0]), *ways))


def _resize(out: _Writer, node: _Node) -> None:
    mode, way = node.how.get("mode", b"nearest"), node.how.get("coordinate_transformation_mode", b"half_pixel")
    if mode not in (b"nearest", b"linear") or len(node.shape) != 4:
        node.refuse("enlarges in a way that TFLite has not")
    nearest = mode == b"nearest"
    half = way in (b"half_pixel", b"pytorch_half_pixel") and not nearest
    if way == b"align_corners" or (not nearest and not half) or (nearest and way != b"asymmetric"):
        node.refuse("enlarges in a way that TFLite has not")
    op, kind = ("RESIZE_NEAREST_NEIGHBOR", "ResizeNearestNeighborOptions") if nearest else ("RESIZE_BILINEAR", "ResizeBilinearOptions")
    inputs = [out.value(node.inputs[0]), out.held(np.array(node.shape[2:]))]
    out.done(node.output, out.add(op, inputs, node.lies, kind=kind, halfPixelCenters=half, alignCorners=False))


HANDLERS: dict[str, Callable[[_Writer, _Node], None]] = {
    "Conv": _conv, "ConvTranspose": _transposed, "BatchNormalization": _norm, "Gemm": _dense, "MatMul": _dense, "Identity": _same,
    "Dropout": _same, "Clip": _clip, "HardSigmoid": _hard_sigmoid, "LeakyRelu": _leaky, "PRelu": _prelu, "MaxPool": _pool,
    "AveragePool": _pool, "GlobalAveragePool": _mean, "GlobalMaxPool": _mean, "ReduceMean": _mean, "ReduceMax": _mean, "Concat": _concat,
    "Reshape": _reshape, "Flatten": _reshape, "Squeeze": _reshape, "Unsqueeze": _reshape, "Transpose": _transpose, "Softmax": _softmax,
    "Pad": _pad, "Slice": _slice, "Split": _split, "Resize": _resize,
    **dict.fromkeys(PLAIN, _plain), **dict.fromkeys(BINARY, _binary),
}  # fmt: skip
"""By ONNX's operators: how each is said."""
