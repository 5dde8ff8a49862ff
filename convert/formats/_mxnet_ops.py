"""What each node of an MXNet symbol is in ONNX's words; one that has none keeps its place under its own name."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from convert.formats._operators import Transcript
from convert.kinds import is_dict, is_list
from convert.source import Stored, constant
from weights.errors import LimitExceeded, MalformedFile

MOST_NODES = 200_000
NUMBER = re.compile(r"-?\d+")


@dataclass(slots=True)
class Node:
    """One node; all that a symbol says of it is text."""

    op: str
    name: str
    attrs: Mapping[str, str]
    inputs: list[str]

    def ints(self, name: str, default: tuple[int, ...] = ()) -> tuple[int, ...]:
        text = self.attrs.get(name, "")
        return tuple(int(n) for n in NUMBER.findall(text)) or default

    def number(self, name: str, default: float) -> float:
        return float(self.attrs.get(name, default))

    def flag(self, name: str, default: bool = False) -> bool:
        return self.attrs.get(name, str(default)).lower() in ("true", "1")


class Said(Transcript):
    """A symbol's nodes as they are said."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []


def said(symbol: Any, arrays: Mapping[str, Stored]) -> Said:
    """Say a whole symbol, with the arrays of its variables."""
    nodes, heads = _nodes(symbol)
    out, used = Said(), set[str]()
    labels = {name for node in nodes for name in node.inputs[1:] if node.op.endswith("Output")}
    for node in nodes:
        mark, handler = len(out.model.operators), HANDLERS.get(node.op)
        if node.op == "null":
            if node.name in arrays:
                out.constant(node.name, arrays[node.name])
                used.add(node.name)
            elif node.name not in labels:
                out.input(node.name, node.ints("__shape__"))
        elif handler is None or not node.inputs or not handler(out, node):
            del out.model.operators[mark:]
            out.unknown(node.op, node.inputs, [node.name], node.name)
    out.model.outputs = heads
    if left := arrays.keys() - used:
        out.notes.append(f"left out, being of no variable of the symbol: {', '.join(sorted(left)[:10])}")
    return out


def _nodes(symbol: Any) -> tuple[list[Node], list[str]]:
    """Read a symbol's nodes, which stand behind those that they read."""
    listed = symbol.get("nodes") if is_dict(symbol) else None
    if not is_list(listed) or len(listed) > MOST_NODES:
        raise MalformedFile("its symbol is no list of nodes") if not is_list(listed) else LimitExceeded(f"more than {MOST_NODES} nodes")
    nodes: list[Node] = []
    names: set[str] = set()
    for told in listed:
        held: dict[Any, Any] = next((told[key] for key in ("attrs", "attr", "param") if told.get(key)), dict[Any, Any]())
        attrs = {str(key): str(value) for key, value in held.items()}
        name = str(told["name"])
        if name in names:
            raise MalformedFile(f"two nodes of its symbol are called {name!r:.100}")
        names.add(name)
        nodes.append(Node(str(told["op"]), name, attrs, [_value(nodes, place) for place in told["inputs"]]))
    return nodes, [_value(nodes, place) for place in symbol["heads"]]


def _value(nodes: list[Node], place: Any) -> str:
    number, output = int(place[0]), int(place[1])
    if not 0 <= number < len(nodes):
        raise MalformedFile(f"a node of its symbol reads node {number}, which does not stand before it")
    return nodes[number].name if not output else f"{nodes[number].name}:{output}"


def plain(op: str, out: Said, node: Node, **attrs: Any) -> bool:
    out.add(op, node.inputs[:1], node.name, name=node.name, **attrs)
    return True


def conv(out: Said, node: Node) -> bool:
    kernel, back = node.ints("kernel"), node.op == "Deconvolution"
    usual = node.attrs.get("layout", "None") in ("None", "NCHW") and not any(node.ints("target_shape", (0,)))
    if len(kernel) != 2 or not usual:
        return False
    side = node.ints("pad", (0, 0))
    how: dict[str, Any] = {"strides": node.ints("stride", (1, 1)), "dilations": node.ints("dilate", (1, 1)), "pads": (*side, *side)}
    if back:
        how["output_padding"] = node.ints("adj", (0, 0))
    inputs = node.inputs[: 2 if node.flag("no_bias", back) else 3]
    group = int(node.number("num_group", 1))
    out.add("ConvTranspose" if back else "Conv", inputs, node.name, module=node.name, group=group, **how)
    return True


def dense(out: Said, node: Node) -> bool:
    x = node.inputs[0]
    if node.flag("flatten", True):
        x = out.add("Flatten", [x], name=f"{node.name}/flatten")
    inputs = [x, *node.inputs[1 : 2 if node.flag("no_bias") else 3]]
    out.add("Gemm", inputs, node.name, module=node.name, transB=1)
    return True


def norm(out: Said, node: Node) -> bool:
    inputs = list(node.inputs)
    gamma = out.model.tensors.get(inputs[1]) if len(inputs) == 5 else None
    if gamma is None or int(node.number("axis", 1)) != 1:
        return False
    if node.flag("fix_gamma", True):
        ones = constant(1, gamma.shape, gamma.dtype, f"{gamma.origin} (fixed: ones)")
        inputs[1] = out.constant(out.fresh(), ones)
    out.add("BatchNormalization", inputs, node.name, module=node.name, epsilon=node.number("eps", 1e-3))
    return True


ACTIVATIONS = {"relu": "Relu", "sigmoid": "Sigmoid", "tanh": "Tanh", "softrelu": "Softplus"}


def activation(out: Said, node: Node) -> bool:
    op = ACTIVATIONS.get(node.attrs.get("act_type", ""))
    return op is not None and plain(op, out, node)


def leaky(out: Said, node: Node) -> bool:
    kind = node.attrs.get("act_type", "leaky")
    if kind == "prelu" and len(node.inputs) > 1 and (slope := out.model.tensors.get(node.inputs[1])) is not None and len(slope.shape) == 1:
        shaped = out.add("Reshape", [node.inputs[1], out.numbers([slope.shape[0], 1, 1] if slope.shape[0] > 1 else [1])])
        out.add("PRelu", [node.inputs[0], shaped], node.name, module=node.name)
        return True
    if kind == "gelu":
        return plain("Gelu", out, node, approximate="none")
    names = {"leaky": "LeakyRelu", "elu": "Elu"}
    return kind in names and plain(names[kind], out, node, alpha=float(np.float32(node.number("slope", 0.25))))


def pool(out: Said, node: Node) -> bool:
    kind, way = node.attrs.get("pool_type", "max"), node.attrs.get("pooling_convention", "valid")
    if kind not in ("max", "avg"):
        return False
    if node.flag("global_pool"):
        return plain("GlobalMaxPool" if kind == "max" else "GlobalAveragePool", out, node)
    side, kernel = node.ints("pad", (0, 0)), node.ints("kernel")
    if len(kernel) != 2 or way not in ("valid", "full") or (kind == "avg" and way == "full" and any(side)):
        return False
    how: dict[str, Any] = {"kernel_shape": kernel, "strides": node.ints("stride", (1, 1)), "pads": (*side, *side)}
    how["ceil_mode"] = int(way == "full")
    if kind == "avg":  # windows beyond the edge count the pixels that are there
        how["count_include_pad"] = int(way == "valid" and node.flag("count_include_pad", True))
    return plain("MaxPool" if kind == "max" else "AveragePool", out, node, **how)


def many(op: str, out: Said, node: Node, **attrs: Any) -> bool:
    constants = [name for name in node.inputs if name in out.model.tensors]
    out.add(op, node.inputs, node.name, name=node.name, module=node.name if constants else "", **attrs)
    return True


def concat(out: Said, node: Node) -> bool:
    return many("Concat", out, node, axis=int(node.number("dim", 1)))


def scalar(op: str, out: Said, node: Node, *, reverse: bool = False) -> bool:
    number = out.numbers(node.number("scalar", 1), "float32")
    inputs = [number, node.inputs[0]] if reverse else [node.inputs[0], number]
    out.add(op, inputs, node.name, name=node.name)
    return True


def reshape(out: Said, node: Node) -> bool:
    shape = node.ints("shape")
    if not shape or min(shape) < -1:
        return False
    out.add("Reshape", [node.inputs[0], out.numbers(shape)], node.name, name=node.name)
    return True


def clip(out: Said, node: Node) -> bool:
    limits = [out.numbers(node.number(name, 0), "float32") for name in ("a_min", "a_max")]
    out.add("Clip", [node.inputs[0], *limits], node.name, name=node.name)
    return True


def softmax(out: Said, node: Node) -> bool:
    first = node.op == "SoftmaxOutput" or node.op == "SoftmaxActivation"
    return plain("Softmax", out, node, axis=1 if first else int(node.number("axis", -1)))


def lrn(out: Said, node: Node) -> bool:
    size = int(node.number("nsize", 5))
    how = {"alpha": node.number("alpha", 1e-4), "beta": node.number("beta", 0.75), "bias": node.number("knorm", 2)}
    return plain("LRN", out, node, size=size, **how)


def margin(out: Said, node: Node) -> bool:
    widths = node.ints("pad_width")
    if node.attrs.get("mode", "constant") != "constant" or len(widths) != 8:
        return False
    value = out.numbers(node.number("constant_value", 0), "float32")
    out.add("Pad", [node.inputs[0], out.numbers([*widths[::2], *widths[1::2]]), value], node.name, name=node.name)
    return True


def mean(out: Said, node: Node) -> bool:
    axes = node.ints("axis")
    return bool(axes) and plain("ReduceMean", out, node, axes=list(axes), keepdims=int(node.flag("keepdims")))


def upsample(out: Said, node: Node) -> bool:
    factor = float(node.number("scale", 1))
    if node.attrs.get("sample_type") != "nearest" or len(node.inputs) != 1:
        return False
    how = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    out.add("Resize", [node.inputs[0], "", out.numbers([1, 1, factor, factor], "float32")], node.name, name=node.name, **how)
    return True


def transpose(out: Said, node: Node) -> bool:
    return bool(node.ints("axes")) and plain("Transpose", out, node, perm=node.ints("axes"))


def split(out: Said, node: Node) -> bool:
    count = int(node.number("num_outputs", 0))
    if not 0 < count <= 10_000 or node.flag("squeeze_axis"):
        return False
    outputs = [node.name if place == 0 else f"{node.name}:{place}" for place in range(count)]
    out.several("Split", node.inputs[:1], outputs, name=node.name, axis=int(node.number("axis", 1)))
    return True


def piece(out: Said, node: Node) -> bool:
    end = node.attrs.get("end", "None")
    last = 2**31 - 1 if end == "None" else int(end)
    lists = [out.numbers([n]) for n in (int(node.number("begin", 0)), last, int(node.number("axis", 0)))]
    out.add("Slice", [node.inputs[0], *lists], node.name, name=node.name)
    return True


HANDLERS: dict[str, Callable[[Said, Node], bool]] = {
    **dict.fromkeys(("Convolution", "Deconvolution", "Convolution_v1"), conv),
    "FullyConnected": dense,
    **dict.fromkeys(("BatchNorm", "BatchNorm_v1", "CuDNNBatchNorm", "SyncBatchNorm"), norm),
    "Activation": activation,
    "LeakyReLU": leaky,
    **dict.fromkeys(("Pooling", "Pooling_v1"), pool),
    "Concat": concat,
    **dict.fromkeys(("elemwise_add", "_Plus", "_plus", "broadcast_add", "broadcast_plus"), partial(many, "Add")),
    **dict.fromkeys(("elemwise_mul", "_Mul", "_mul", "broadcast_mul"), partial(many, "Mul")),
    **dict.fromkeys(("elemwise_sub", "_Minus", "_sub", "broadcast_sub", "broadcast_minus"), partial(many, "Sub")),
    **dict.fromkeys(("elemwise_div", "_Div", "_div", "broadcast_div"), partial(many, "Div")),
    **dict.fromkeys(("broadcast_maximum", "_maximum"), partial(many, "Max")),
    **dict.fromkeys(("_plus_scalar", "_PlusScalar"), partial(scalar, "Add")),
    **dict.fromkeys(("_minus_scalar", "_MinusScalar"), partial(scalar, "Sub")),
    **dict.fromkeys(("_rminus_scalar", "_RMinusScalar"), partial(scalar, "Sub", reverse=True)),
    **dict.fromkeys(("_mul_scalar", "_MulScalar"), partial(scalar, "Mul")),
    **dict.fromkeys(("_div_scalar", "_DivScalar"), partial(scalar, "Div")),
    "relu": partial(plain, "Relu"),
    "sigmoid": partial(plain, "Sigmoid"),
    "tanh": partial(plain, "Tanh"),
    **dict.fromkeys(("Flatten", "flatten"), partial(plain, "Flatten", axis=1)),
    **dict.fromkeys(("Reshape", "reshape"), reshape),
    **dict.fromkeys(("SoftmaxOutput", "softmax", "SoftmaxActivation"), softmax),
    **dict.fromkeys(("Dropout", "identity", "_copy", "BlockGrad", "Cast", "LinearRegressionOutput"), partial(plain, "Identity")),
    "LRN": lrn,
    "clip": clip,
    **dict.fromkeys(("Pad", "pad"), margin),
    "mean": mean,
    "UpSampling": upsample,
    "transpose": transpose,
    **dict.fromkeys(("SliceChannel", "split"), split),
    "slice_axis": piece,
}
