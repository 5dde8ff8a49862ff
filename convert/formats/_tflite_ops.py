"""What each operator of TFLite is in ONNX's words; one that has none keeps its place under its own name."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from convert.formats._flatbuffer import Table
from convert.formats._operators import Transcript
from convert.formats._tflite_model import Model, Operator, Tensor
from convert.steps import Cast

PADS = {0: "SAME_UPPER", 1: "VALID"}
RELU, RELU_1, RELU6, TANH = 1, 2, 3, 4
"""Activations that are part of other operators."""
LAYER = re.compile(
    r"(.+)/(?:Conv2D|DepthwiseConv2dNative|depthwise|separable_conv2d|convolution|conv2d_transpose|MatMul|BiasAdd|weights|kernel)\d*$"
)
"""How TensorFlow names what a layer computes, and its layer."""

NAMES = {
    5: "DEPTH_TO_SPACE", 7: "EMBEDDING_LOOKUP", 16: "LSTM", 26: "SPACE_TO_DEPTH", 36: "GATHER", 56: "ARG_MAX", 74: "SUM", 83: "PACK",
    88: "UNPACK", 126: "BATCH_MATMUL",
}  # fmt: skip
"""Of some that are met in networks for images and have no place in ONNX's words here."""


class Said(Transcript):
    """TFLite's operators as they are said, each with its constants at the moment it needs them."""

    def __init__(self, model: Model) -> None:
        super().__init__(channels_last=not _turned_first(model))
        self.names: dict[str, str] = {}
        self.layers: set[str] = set()
        roots = {
            name.split("/", 1)[0] for tensor in model.tensors if tensor.held is not None for name in tensor.name.split(";") if "/" in name
        }
        self.prefix = f"{next(iter(roots))}/" if len(roots) == 1 else ""

    def value(self, tensor: Tensor | None) -> str:
        """Name an input of an operator, "" where it is missing."""
        if tensor is None:
            return ""
        if tensor.held is not None and tensor.name not in self.model.tensors:
            self.constant(tensor.name, tensor.held)
        return tensor.name

    def named(self, *tensors: Tensor | None) -> str:
        """Name a layer: fused operators have all names of what they were, and those of others that share a constant with them."""
        found: list[str] = []
        for tensor in tensors:
            pieces = tensor.name.split(";") if tensor is not None else []
            matched = [match[1] for piece in pieces if (match := LAYER.match(piece.split("/ReadVariableOp")[0]))]
            found += matched if len(pieces) == 1 else [match for match in matched if f"{match}/BiasAdd" in pieces or len(matched) == 1]
        name = next((name for name in found if name not in self.layers), "")
        self.layers.add(name)
        return name.removeprefix(self.prefix)

    def activated(self, value: str, tensor: Tensor, activation: int, name: str = "") -> bool:
        """Say the activation that is part of an operator, and name the value."""
        if activation == 0:
            return self.add("Identity", [value], tensor.name) != ""
        if activation not in (RELU, RELU_1, RELU6, TANH):
            return False
        return _activation(activation, self, value, tensor.name, f"{name}/activation" if name else "")


def said(model: Model) -> Transcript:
    """Say a whole file."""
    out = Said(model)
    for tensor in model.inputs:
        out.input(tensor.name, tensor.shape)
    for operator in model.operators:
        handler = HANDLERS.get(operator.code)
        mark = len(out.model.operators)
        if not operator.outputs or handler is None or not all(operator.inputs[:1]) or not handler(out, operator):
            del out.model.operators[mark:]
            op = operator.custom or NAMES.get(operator.code, f"TFLite operator {operator.code}")
            out.unknown(op, [out.value(tensor) for tensor in operator.inputs], [tensor.name for tensor in operator.outputs])
    out.model.outputs = [tensor.name for tensor in model.outputs]
    return out


def _turned_first(model: Model) -> bool:
    """Tell whether the images come with their channels first, as networks of PyTorch's do: then they are turned at once."""
    for operator in model.operators:
        if operator.code == 39 and len(operator.inputs) > 1 and operator.inputs[0] in model.inputs:
            order = operator.inputs[1].held if operator.inputs[1] is not None else None
            return order is not None and order.shape == (4,) and order.array().tolist() == [0, 2, 3, 1]
    return False


def _number(options: Table | None, field: int, kind: str = "b", default: int = 0) -> int:
    return options.number(field, kind, default) if options is not None else default


def _activation(kind: int, out: Said, value: str, output: str, name: str = "") -> bool:
    if kind in (RELU_1, RELU6):
        low, high = (out.numbers(n, "float32") for n in ((-1, 1) if kind == RELU_1 else (0, 6)))
        out.add("Clip", [value, low, high], output, name=name)
    else:
        out.add("Relu" if kind == RELU else "Tanh", [value], output, name=name)
    return True


def plain(op: str, out: Said, operator: Operator, **attrs: Any) -> bool:
    out.add(op, [out.value(operator.inputs[0])], operator.outputs[0].name, name=operator.outputs[0].name, **attrs)
    return True


def fused(kind: int, out: Said, operator: Operator) -> bool:
    return _activation(kind, out, out.value(operator.inputs[0]), operator.outputs[0].name)


def conv(out: Said, operator: Operator) -> bool:
    x, weight, *rest = operator.inputs
    options, depthwise = operator.options, operator.code == 4
    if weight is None or weight.held is None or len(weight.held.shape) != 4 or options is None:
        return False
    bias = rest[0] if rest else None
    at = 4 if depthwise else 3  # where the options go on behind the depth multiplier
    pads = PADS.get(options.number(0, "b"))
    groups = _groups(x, weight.held.shape, depthwise)
    if pads is None or groups is None:
        return False
    module = out.named(weight, operator.outputs[0], bias)
    kernel = out.turned(out.value(weight), (3, 0, 1, 2) if depthwise else (0, 3, 1, 2))
    inputs = [out.first(out.value(x)), kernel, *([out.value(bias)] if bias is not None else [])]
    strides, dilations = (
        (options.number(2, "i", 1), options.number(1, "i", 1)),
        (options.number(at + 2, "i", 1), options.number(at + 1, "i", 1)),
    )
    made = out.add("Conv", inputs, module=module, auto_pad=pads, strides=strides, dilations=dilations, group=groups)
    return out.activated(out.last(made), operator.outputs[0], options.number(at, "b"), module)


def _groups(x: Tensor | None, kernel: Sequence[int], depthwise: bool) -> int | None:
    channels = x.shape[3] if x is not None and len(x.shape) == 4 else None
    if depthwise:
        return channels if channels and kernel[0] == 1 and kernel[3] % channels == 0 else None
    if channels is None or not kernel[3] or channels % kernel[3]:
        return 1 if channels is None else None
    return channels // kernel[3]


def transposed(out: Said, operator: Operator) -> bool:
    if len(operator.inputs) < 3:
        return False
    sizes, weight, x, *rest = operator.inputs
    options, bias = operator.options, rest[0] if rest else None
    if weight is None or weight.held is None or len(weight.held.shape) != 4 or options is None or x is None or sizes is None:
        return False
    wanted = out.held(out.value(sizes))
    stride = (options.number(2, "i", 1), options.number(1, "i", 1))
    pads = PADS.get(options.number(0, "b"))
    if wanted is None or wanted.size != 4 or pads is None or len(x.shape) != 4 or min(stride) < 1:
        return False
    kernel, large = weight.held.shape[1:3], [int(n) for n in wanted.reshape(-1)[1:3]]
    small = [-(-n // s) if pads == "SAME_UPPER" else -(-(n - k + 1) // s) for n, k, s in zip(large, kernel, stride, strict=True)]
    if any(size is not None and size != n for size, n in zip(x.shape[1:3], small, strict=True)):
        return False
    total = [max((n - 1) * s + k - size, 0) for n, s, k, size in zip(small, stride, kernel, large, strict=True)]
    more = [size + t - ((n - 1) * s + k) for n, s, k, t, size in zip(small, stride, kernel, total, large, strict=True)]
    before = [t // 2 for t in total]
    module = out.named(weight, operator.outputs[0], bias)
    inputs = [out.first(out.value(x)), out.turned(out.value(weight), (3, 0, 1, 2)), *([out.value(bias)] if bias is not None else [])]
    sides = (*before, *(t - b for t, b in zip(total, before, strict=True)))
    made = out.add("ConvTranspose", inputs, module=module, pads=sides, strides=stride, dilations=(1, 1), output_padding=tuple(more))
    return out.activated(out.last(made), operator.outputs[0], options.number(3, "b"), module)


def dense(out: Said, operator: Operator) -> bool:
    x, weight, *rest = operator.inputs
    bias = rest[0] if rest else None
    if x is None or weight is None or weight.held is None or len(weight.held.shape) != 2 or _number(operator.options, 1):
        return False
    module, value = out.named(weight, operator.outputs[0], bias), out.value(x)
    if len(x.shape) > 2 and _number(operator.options, 2):
        return False
    if len(x.shape) > 2:
        value = out.add("Flatten", [value], axis=1)
    inputs = [value, out.value(weight), *([out.value(bias)] if bias is not None else [])]
    made = out.add("Gemm", inputs, module=module, transB=1)
    return out.activated(made, operator.outputs[0], _number(operator.options, 0), module)


def pool(out: Said, operator: Operator) -> bool:
    options = operator.options
    if options is None or (pads := PADS.get(options.number(0, "b"))) is None:
        return False
    kernel, strides = (options.number(4, "i"), options.number(3, "i")), (options.number(2, "i", 1), options.number(1, "i", 1))
    op, name = "AveragePool" if operator.code == 1 else "MaxPool", operator.outputs[0].name
    made = out.on_maps(op, out.value(operator.inputs[0]), name=name, kernel_shape=kernel, strides=strides, auto_pad=pads)
    return out.activated(made, operator.outputs[0], options.number(5, "b"))


def arithmetic(op: str, out: Said, operator: Operator) -> bool:
    if len(operator.inputs) != 2:
        return False
    constant = [tensor for tensor in operator.inputs if tensor is not None and tensor.held is not None]
    module = out.named(*constant) if constant else ""
    name = operator.outputs[0].name
    made = out.add(op, [out.value(tensor) for tensor in operator.inputs], module=module, name=module or name)
    return out.activated(made, operator.outputs[0], _number(operator.options, 0))


def concatenation(out: Said, operator: Operator) -> bool:
    name, axis = operator.outputs[0].name, _number(operator.options, 0, "i")
    made = out.add("Concat", [out.value(tensor) for tensor in operator.inputs], name=name, axis=axis)
    return out.activated(made, operator.outputs[0], _number(operator.options, 1))


def reshape(out: Said, operator: Operator) -> bool:
    shape = operator.outputs[0].shape
    if not shape or sum(n is None for n in shape[1:]) > 1:
        return False
    wanted = out.numbers([0, *(-1 if n is None else n for n in shape[1:])])
    out.add("Reshape", [out.value(operator.inputs[0]), wanted], operator.outputs[0].name, name=operator.outputs[0].name)
    return True


def margin(out: Said, operator: Operator) -> bool:
    pads = out.held(out.value(operator.inputs[1])) if len(operator.inputs) > 1 else None
    if pads is None or pads.ndim != 2 or pads.shape[1] != 2:
        return False
    inputs = [out.value(operator.inputs[0]), out.numbers(pads.T.reshape(-1).astype("int64"))]
    if len(operator.inputs) > 2:
        inputs.append(out.value(operator.inputs[2]))
    out.add("Pad", inputs, operator.outputs[0].name, name=operator.outputs[0].name)
    return True


def mean(op: str, out: Said, operator: Operator) -> bool:
    axes = out.held(out.value(operator.inputs[1])) if len(operator.inputs) > 1 else None
    if axes is None:
        return False
    how: dict[str, Any] = {"axes": [int(n) for n in axes.reshape(-1)], "keepdims": _number(operator.options, 0, "?")}
    out.add(op, [out.value(operator.inputs[0])], operator.outputs[0].name, name=operator.outputs[0].name, **how)
    return True


def softmax(out: Said, operator: Operator) -> bool:
    beta = operator.options.real(0, 0.0) if operator.options is not None else 1.0
    value = out.value(operator.inputs[0])
    if beta != 1:
        value = out.add("Mul", [value, out.numbers(beta, "float32")])
    out.add("Softmax", [value], operator.outputs[0].name, name=operator.outputs[0].name, axis=-1)
    return True


def leaky(out: Said, operator: Operator) -> bool:
    slope = operator.options.real(0, 0.0) if operator.options is not None else 0.0
    return plain("LeakyRelu", out, operator, alpha=slope)


def prelu(out: Said, operator: Operator) -> bool:
    x, slope = operator.inputs[0], operator.inputs[1] if len(operator.inputs) > 1 else None
    if slope is None or slope.held is None or math.prod(slope.held.shape) != slope.held.shape[-1]:
        return False
    module = out.named(slope, operator.outputs[0])
    out.add("PRelu", [out.value(x), out.value(slope)], operator.outputs[0].name, module=module)
    return True


def resize(mode: str, out: Said, operator: Operator) -> bool:
    x, made = operator.inputs[0], operator.outputs[0]
    sides, larger = (x.shape if x is not None else ())[1:3], made.shape[1:3]
    at = 2 if mode == "linear" else 0
    if len(sides) != 2 or len(larger) != 2 or None in (*sides, *larger) or _number(operator.options, at, "?"):
        return False
    scales = [1.0, 1.0, *((big or 0) / (small or 1) for big, small in zip(larger, sides, strict=True))]
    half = _number(operator.options, at + 1, "?")
    way = {
        "coordinate_transformation_mode": "half_pixel" if half else "asymmetric",
        "nearest_mode": "round_prefer_floor" if half else "floor",
    }
    value = out.first(out.value(x))
    value = out.add("Resize", [value, "", out.numbers(scales, "float32")], name=made.name, mode=mode, **way)
    out.last(value, made.name)
    return True


def transpose(out: Said, operator: Operator) -> bool:
    perm = out.held(out.value(operator.inputs[1])) if len(operator.inputs) > 1 else None
    if perm is None:
        return False
    out.add("Transpose", [out.value(operator.inputs[0])], operator.outputs[0].name, perm=[int(n) for n in perm.reshape(-1)])
    return True


def cut(out: Said, operator: Operator) -> bool:
    """A slice with strides and no masks but those of the begins and ends."""
    bounds = [out.held(out.value(tensor)) for tensor in operator.inputs[1:4]]
    options = operator.options
    if len(bounds) != 3 or any(bound is None for bound in bounds) or options is None or any(options.number(i, "i") for i in (2, 3, 4)):
        return False
    begin, end, step = ([int(n) for n in bound.reshape(-1)] for bound in bounds if bound is not None)
    if not len(begin) == len(end) == len(step) or any(n < 1 for n in step):
        return False
    masks = options.number(0, "i"), options.number(1, "i")
    first = [0 if masks[0] >> i & 1 else n for i, n in enumerate(begin)]
    last = [2**31 - 1 if masks[1] >> i & 1 else n for i, n in enumerate(end)]
    return _sliced(out, operator, first, last, step)


def piece(out: Said, operator: Operator) -> bool:
    bounds = [out.held(out.value(tensor)) for tensor in operator.inputs[1:3]]
    if len(bounds) != 2 or any(bound is None for bound in bounds):
        return False
    begin, size = ([int(n) for n in bound.reshape(-1)] for bound in bounds if bound is not None)
    if len(begin) != len(size):
        return False
    last = [2**31 - 1 if n < 0 else b + n for b, n in zip(begin, size, strict=True)]
    return _sliced(out, operator, begin, last, [1] * len(begin))


def _sliced(out: Said, operator: Operator, first: list[int], last: list[int], step: list[int]) -> bool:
    x = operator.inputs[0]
    dims = x.shape if x is not None else ()
    if len(dims) != len(first):
        return False
    whole = [
        b == 0 and s == 1 and (e >= (n if n is not None else 2**31 - 1) or (n is None and e == 1))
        for b, e, s, n in zip(first, last, step, dims, strict=True)
    ]
    at = [axis for axis, kept in enumerate(whole) if not kept]
    if not at:
        return out.add("Identity", [out.value(x)], operator.outputs[0].name) != ""
    lists = [out.numbers([values[axis] for axis in at]) for values in (first, last)]
    inputs = [out.value(x), *lists, out.numbers(at), out.numbers([step[axis] for axis in at])]
    out.add("Slice", inputs, operator.outputs[0].name, name=operator.outputs[0].name)
    return True


def split(out: Said, operator: Operator) -> bool:
    if len(operator.inputs) != 2:
        return False
    axis = out.held(out.value(operator.inputs[0]))
    if axis is None or axis.size != 1:
        return False
    out.several(
        "Split",
        [out.value(operator.inputs[1])],
        [t.name for t in operator.outputs],
        name=operator.outputs[0].name,
        axis=int(axis.reshape(-1)[0]),
    )
    return True


def lrn(out: Said, operator: Operator) -> bool:
    options = operator.options
    if options is None or not 0 <= (radius := options.number(0, "i")) < 10_000:
        return False
    size = 2 * radius + 1
    how: dict[str, Any] = {"size": size, "bias": options.real(1), "alpha": options.real(2) * size, "beta": options.real(3)}
    value = out.on_maps("LRN", out.value(operator.inputs[0]), name=operator.outputs[0].name, **how)
    return out.add("Identity", [value], operator.outputs[0].name) != ""


def passed(out: Said, operator: Operator) -> bool:
    """Between numbers of one precision and another: the numbers stay what they stand for."""
    given, made = operator.inputs[0], operator.outputs[0]
    if given is not None and given.held is not None:
        wide = given.held.dtype == np.float32
        made.held = given.held if wide else given.held.then(Cast(str(given.held.dtype), "float32"))
        return True
    return out.add("Identity", [out.value(operator.inputs[0])], operator.outputs[0].name) != ""


def gelu(out: Said, operator: Operator) -> bool:
    approximate = "tanh" if _number(operator.options, 0, "?") else "none"
    out.add("Gelu", [out.value(operator.inputs[0])], operator.outputs[0].name, approximate=approximate)
    return True


HANDLERS: dict[int, Callable[[Said, Operator], bool]] = {
    0: partial(arithmetic, "Add"),
    1: pool,
    2: concatenation,
    3: conv,
    4: conv,
    6: passed,
    9: dense,
    13: lrn,
    14: partial(plain, "Sigmoid"),
    17: pool,
    18: partial(arithmetic, "Mul"),
    19: partial(fused, RELU),
    20: partial(fused, RELU_1),
    21: partial(fused, RELU6),
    22: reshape,
    23: partial(resize, "linear"),
    25: softmax,
    28: partial(plain, "Tanh"),
    34: margin,
    39: transpose,
    40: partial(mean, "ReduceMean"),
    41: partial(arithmetic, "Sub"),
    42: partial(arithmetic, "Div"),
    43: reshape,
    45: cut,
    49: split,
    54: prelu,
    55: partial(arithmetic, "Max"),
    57: partial(arithmetic, "Min"),
    60: margin,
    65: piece,
    67: transposed,
    70: reshape,
    82: partial(mean, "ReduceMax"),
    97: partial(resize, "nearest"),
    98: leaky,
    111: partial(plain, "Elu"),
    114: passed,
    117: partial(plain, "HardSwish"),
    150: gelu,
}
