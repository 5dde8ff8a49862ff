"""What each layer of an IR is in ONNX's words; one that has none keeps its place under its own name."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from convert.formats._onnx_graph import scope
from convert.formats._onnx_proto import Operator
from convert.formats._openvino_xml import DTYPES, Layer, Net, constant
from convert.formats._operators import Transcript
from convert.source import Stored
from convert.steps import Cast, Reshape

PADS = {"same_upper": "SAME_UPPER", "same_lower": "SAME_LOWER", "valid": "VALID"}
Compute = Callable[[list[np.ndarray]], Any]
LONGEST_CHAIN = 16
"""Of layers between a constant and the layer that it is a weight of."""
WEIGHT = re.compile(r"(?:self\.|module\.self\.)?(.+)\.(?:weight|bias|running_mean|running_var)$")
"""How constants are called that were a state dict's."""
TORCH = re.compile(r"__module\.(.+?)/(?:aten|ov_ext|prim)::")
LAYER = re.compile(r"(.+)/(?:WithoutBiases|Conv2D|convolution|depthwise|DepthwiseConv2dNative|MatMul|Conv|Gemm|BiasAdd)(?:/.*)?$")


class Said(Transcript):
    """An IR's layers as they are said.

    Attributes:
        held: the constants' file.
        chains: how many layers a constant has come through.
        same: values that are others under another name.
        notes: what was left out.
    """

    def __init__(self, held: memoryview) -> None:
        super().__init__(named=True)  # by PyTorch's names, where it was converted from there
        self.bytes = held
        self.chains: dict[str, int] = {}
        self.same: dict[str, str] = {}
        self.notes: list[str] = []

    def named(self, layer: Layer) -> str:
        """Name a layer's module: after its weight's name, if that was a state dict's, else after the layer's own."""
        for value in layer.inputs[1:]:
            stored = self.model.tensors.get(value)
            if stored is not None and (match := WEIGHT.match(stored.origin.split(", ")[0])):
                return match[1]
        if match := TORCH.match(layer.name):
            return match[1]
        if found := scope(Operator(layer.name.rpartition("/")[2], layer.name, "", [], [], {})):
            return found
        return match[1] if (match := LAYER.match(layer.name)) else layer.name

    def ints(self, value: str) -> list[int] | None:
        """Read a short constant list of whole numbers."""
        array = self.held(value)
        return [int(n) for n in array.reshape(-1)] if array is not None and array.dtype.kind in "iu" else None


def said(net: Net) -> Said:
    """Say a whole IR."""
    out = Said(net.held)
    kept: list[str] = []
    for layer in net.layers:
        layer.inputs = [out.same.get(value, value) for value in layer.inputs]
        if layer.type == "Parameter":
            shape = layer.outputs[0][1] if layer.outputs else ()
            out.input(layer.name, shape)
            out.add("Identity", [layer.name], layer.value())
        elif layer.type == "Result":
            kept += layer.inputs
        elif layer.type == "Const":
            if (stored := constant(layer, out.bytes)) is not None:
                out.constant(layer.value(), stored)
        elif not _folded(out, layer):
            mark = len(out.model.operators)
            handler = HANDLERS.get(layer.type)
            if handler is None or not layer.inputs or not layer.outputs or not handler(out, layer):
                del out.model.operators[mark:]
                out.unknown(layer.type, layer.inputs, [layer.value(place) for place in range(len(layer.outputs))], layer.name)
    out.model.outputs = kept
    return out


def _folded(out: Said, layer: Layer) -> bool:
    """Compute what has constants alone as inputs, when it is asked for: weights in fewer bits become what they stand for."""
    stored = [out.model.tensors.get(value) for value in layer.inputs]
    if not stored or len(layer.outputs) != 1 or any(one is None for one in stored):
        return False
    first, *rest = (one for one in stored if one is not None)
    chain = 1 + max(out.chains.get(value, 0) for value in layer.inputs)
    made: Stored | None = None
    if chain > LONGEST_CHAIN:
        return False
    if layer.type == "Convert" and (target := DTYPES.get(layer.data.get("destination_type", ""))) is not None:
        if {str(first.dtype), target} <= {"float16", "float32", "float64", "int32", "int64"}:
            made = first.then(Cast(str(first.dtype), target)) if str(first.dtype) != target else first
        else:
            made = _lazily(layer, first, [], lambda a: a[0].astype(target), first.shape, target)
    elif layer.type in ("Multiply", "Divide") and len(rest) == 1 and _is_one(out, layer.inputs[1]):
        made = first
    elif layer.type == "Multiply" and len(rest) == 1 and _is_one(out, layer.inputs[0]):
        made = rest[0]
    elif layer.type in ARITHMETIC and rest and first.dtype.kind == rest[0].dtype.kind == "f":
        shape = np.broadcast_shapes(first.shape, rest[0].shape)
        if math.prod(shape) == max(math.prod(first.shape), math.prod(rest[0].shape)):
            made = _lazily(layer, first, rest, ARITHMETIC[layer.type], shape, str(first.dtype))
    elif layer.type == "FakeQuantize" and len(rest) == 4 and all(math.prod(one.shape) <= math.prod(first.shape) for one in rest):
        if np.broadcast_shapes(first.shape, *(one.shape for one in rest)) == first.shape:
            levels = int(layer.data.get("levels", "256"))
            made = _lazily(layer, first, rest, partial(_quantised, levels), first.shape, str(first.dtype))
    elif layer.type in ("Reshape", "Squeeze", "Unsqueeze") and (shape := layer.outputs[0][1]) and None not in shape:
        sizes = tuple(n or 0 for n in shape)
        if math.prod(sizes) == math.prod(first.shape) and first.dtype.kind == "f":
            step = Reshape(first.shape, sizes)
            made = _lazily(layer, first, [], lambda a: a[0].reshape(sizes), sizes, str(first.dtype), str(step))
    if made is None:
        return False
    out.constant(layer.value(), made)
    out.chains[layer.value()] = chain
    return True


def _is_one(out: Said, value: str) -> bool:
    """Tell a factor of one, as ONNX's Gemm leaves it behind."""
    held = out.held(value, 1)
    return held is not None and held.size == 1 and bool(held.reshape(-1)[0] == 1)


def _lazily(
    layer: Layer,
    first: Stored,
    rest: list[Stored],
    compute: Callable[[list[np.ndarray]], Any],
    shape: tuple[int, ...],
    dtype: str,
    how: str = "",
) -> Stored:
    def load() -> np.ndarray:
        with np.errstate(all="ignore"):
            return np.asarray(compute([first.array(), *(one.array() for one in rest)])).astype(dtype, copy=False)

    return Stored(f"{first.origin}, {how or layer.type}", tuple(shape), np.dtype(dtype), load)


def _quantised(levels: int, arrays: list[np.ndarray]) -> np.ndarray:
    """Round to so many numbers between two limits, as OpenVINO defines it."""
    x, low, high, out_low, out_high = arrays
    inside = np.rint((np.clip(x, low, high) - low) / (high - low) * (levels - 1)) / (levels - 1)
    return inside * (out_high - out_low) + out_low


ARITHMETIC: Mapping[str, Compute] = {
    "Add": lambda a: a[0] + a[1],
    "Subtract": lambda a: a[0] - a[1],
    "Multiply": lambda a: a[0] * a[1],
    "Divide": lambda a: a[0] / a[1],
}


def _list(layer: Layer, name: str, default: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Read an attribute of whole numbers with commas between."""
    text = layer.data.get(name, "")
    return tuple(int(n) for n in text.split(",")) if text.strip() else default


def _flag(layer: Layer, name: str, default: bool = False) -> bool:
    return layer.data.get(name, str(default)).lower() in ("true", "1")


def _pads(layer: Layer) -> dict[str, Any]:
    if (auto := layer.data.get("auto_pad", "explicit").lower()) in PADS:
        return {"auto_pad": PADS[auto]}
    return {"pads": (*_list(layer, "pads_begin", (0, 0)), *_list(layer, "pads_end", (0, 0)))}


def plain(op: str, out: Said, layer: Layer, **attrs: Any) -> bool:
    out.add(op, layer.inputs[:1], layer.value(), name=layer.name, **attrs)
    return True


def elementwise(op: str, out: Said, layer: Layer) -> bool:
    if op in ("Mul", "Div") and len(layer.inputs) == 2:  # a factor of one, as ONNX's Gemm leaves it behind
        for value, factor in (layer.inputs, *([layer.inputs[::-1]] if op == "Mul" else [])):
            if _is_one(out, factor):
                out.same[layer.value()] = value
                return True
    constants = [value for value in layer.inputs if value in out.model.tensors]
    module = out.named(Layer(layer.id, layer.name, layer.type, {}, ["", *constants])) if constants else ""
    out.add(op, layer.inputs, layer.value(), name=layer.name, module=module)
    return True


def conv(out: Said, layer: Layer) -> bool:
    weight = out.model.tensors.get(layer.inputs[1]) if len(layer.inputs) > 1 else None
    grouped, back = layer.type.startswith("Group"), layer.type.endswith("BackpropData")
    if weight is None or len(weight.shape) != 4 + grouped or (back and len(layer.inputs) > 2):
        return False
    module, kernel, group = out.named(layer), layer.inputs[1], 1
    if grouped:
        group, first, second, *window = weight.shape
        kernel = out.add("Reshape", [kernel, out.numbers([group * first, second, *window])])
    how: dict[str, Any] = {
        "strides": _list(layer, "strides", (1, 1)),
        "dilations": _list(layer, "dilations", (1, 1)),
        "group": group,
        **_pads(layer),
    }
    if back:
        how["output_padding"] = _list(layer, "output_padding", (0, 0))
    out.add("ConvTranspose" if back else "Conv", [layer.inputs[0], kernel], layer.value(), name=layer.name, module=module, **how)
    return True


def matmul(out: Said, layer: Layer) -> bool:
    if len(layer.inputs) != 2 or _flag(layer, "transpose_a") or layer.inputs[1] not in out.model.tensors:
        return False
    weight = out.model.tensors[layer.inputs[1]]
    turned = _flag(layer, "transpose_b")
    op = "Gemm" if turned and len(weight.shape) == 2 else "MatMul"
    kernel = out.turned(layer.inputs[1], (1, 0)) if turned and op == "MatMul" else layer.inputs[1]
    how: dict[str, Any] = {"transB": 1} if op == "Gemm" else {}
    out.add(op, [layer.inputs[0], kernel], layer.value(), name=layer.name, module=out.named(layer), **how)
    return True


def norm(out: Said, layer: Layer) -> bool:
    if len(layer.inputs) != 5:
        return False
    order = (0, 1, 2, 3, 4) if layer.inputs[0] not in out.model.tensors else (2, 0, 1, 3, 4)  # the first operator set has gamma in front
    inputs = [layer.inputs[place] for place in order]
    module = out.named(Layer(layer.id, layer.name, layer.type, {}, inputs))
    eps = float(layer.data.get("epsilon", layer.data.get("eps", "1e-5")))
    out.add("BatchNormalization", inputs, layer.value(), name=layer.name, module=module, epsilon=eps)
    return True


def prelu(out: Said, layer: Layer) -> bool:
    slope = out.held(layer.inputs[1]) if len(layer.inputs) > 1 else None
    if slope is None:
        return False
    if slope.size == 1 and not layer.name.rpartition("/")[2].startswith("PRelu"):  # ONNX's LeakyReLU becomes a PReLU too, by its own name
        return plain("LeakyRelu", out, layer, alpha=float(slope.reshape(-1)[0]))
    if slope.ndim == 1:
        shaped = out.add("Reshape", [layer.inputs[1], out.numbers([slope.size, 1, 1])])
        out.add("PRelu", [layer.inputs[0], shaped], layer.value(), name=layer.name, module=out.named(layer))
        return True
    out.add("PRelu", layer.inputs, layer.value(), name=layer.name, module=out.named(layer))
    return True


def clamp(out: Said, layer: Layer) -> bool:
    limits = [out.numbers(float(layer.data[name]), "float32") for name in ("min", "max")]
    out.add("Clip", [layer.inputs[0], *limits], layer.value(), name=layer.name)
    return True


def swish(out: Said, layer: Layer) -> bool:
    beta = out.held(layer.inputs[1]) if len(layer.inputs) > 1 else np.ones(1)
    if beta is None or beta.size != 1 or float(beta.reshape(-1)[0]) != 1:
        return False
    gate = out.add("Sigmoid", layer.inputs[:1])
    out.add("Mul", [layer.inputs[0], gate], layer.value(), name=layer.name)
    return True


def pool(op: str, out: Said, layer: Layer) -> bool:
    ceil = layer.data.get("rounding_type", "floor")
    if ceil not in ("ceil", "floor") or len(layer.outputs) > 2:
        return False
    how: dict[str, Any] = {
        "kernel_shape": _list(layer, "kernel"),
        "strides": _list(layer, "strides", (1, 1)),
        **_pads(layer),
        "ceil_mode": int(ceil == "ceil"),
    }
    if op == "AveragePool":
        how["count_include_pad"] = int(not _flag(layer, "exclude-pad", default=True))
    elif (dilations := _list(layer, "dilations")) and set(dilations) != {1}:
        return False
    out.add(op, layer.inputs[:1], layer.value(), name=layer.name, **how)
    return True


def reduced(op: str, out: Said, layer: Layer) -> bool:
    axes = out.ints(layer.inputs[1]) if len(layer.inputs) > 1 else None
    return axes is not None and plain(op, out, layer, axes=axes, keepdims=int(_flag(layer, "keep_dims")))


def reshape(out: Said, layer: Layer) -> bool:
    if len(layer.inputs) < 2:
        return False
    if layer.type == "Reshape":
        known = out.held(layer.inputs[1])
        allow: dict[str, Any] = {} if _flag(layer, "special_zero") or known is None or 0 not in known else {"allowzero": 1}
        out.add("Reshape", layer.inputs, layer.value(), name=layer.name, **allow)
        return True
    return plain(layer.type, out, layer, axes=out.ints(layer.inputs[1]))


def transpose(out: Said, layer: Layer) -> bool:
    order = out.ints(layer.inputs[1]) if len(layer.inputs) > 1 else None
    return order is not None and plain("Transpose", out, layer, perm=order)


def gather(out: Said, layer: Layer) -> bool:
    axis = out.ints(layer.inputs[2]) if len(layer.inputs) > 2 else None
    if axis is None or len(axis) != 1 or int(layer.data.get("batch_dims", "0")):
        return False
    out.add("Gather", layer.inputs[:2], layer.value(), name=layer.name, axis=axis[0])
    return True


def concat(out: Said, layer: Layer) -> bool:
    out.add("Concat", layer.inputs, layer.value(), name=layer.name, axis=int(layer.data.get("axis", "0")))
    return True


def softmax(out: Said, layer: Layer) -> bool:
    return plain("Softmax", out, layer, axis=int(layer.data.get("axis", "1")))


def margin(out: Said, layer: Layer) -> bool:
    before, after = (out.ints(value) for value in (*layer.inputs[1:3], "", "")[:2])
    if before is None or after is None or layer.data.get("pad_mode", "constant") != "constant":
        return False
    out.add("Pad", [layer.inputs[0], out.numbers([*before, *after]), *layer.inputs[3:4]], layer.value(), name=layer.name)
    return True


def lrn(out: Said, layer: Layer) -> bool:
    if len(layer.inputs) > 1 and out.ints(layer.inputs[1]) != [1]:
        return False
    alpha, beta, bias = (float(layer.data[name]) for name in ("alpha", "beta", "bias"))
    return plain("LRN", out, layer, size=int(layer.data["size"]), alpha=alpha, beta=beta, bias=bias)


def split(out: Said, layer: Layer) -> bool:
    axis = out.ints(layer.inputs[1]) if len(layer.inputs) > 1 else None
    if axis is None or len(axis) != 1:
        return False
    inputs = [layer.inputs[0], *layer.inputs[2:3]]
    out.several("Split", inputs, [layer.value(place) for place in range(len(layer.outputs))], name=layer.name, axis=axis[0])
    return True


def cut(out: Said, layer: Layer) -> bool:
    if layer.type == "Slice":
        if len(layer.inputs) != 5:
            return False
        x, start, stop, step, axes = layer.inputs
        out.add("Slice", [x, start, stop, axes, step], layer.value(), name=layer.name)
        return True
    bounds = [out.ints(value) for value in layer.inputs[1:4]]
    masks = [_list(layer, name) for name in ("begin_mask", "end_mask")]
    if (
        len(bounds) != 3
        or any(bound is None for bound in bounds)
        or any(any(_list(layer, f"{n}_mask")) for n in ("new_axis", "shrink_axis", "ellipsis"))
    ):
        return False
    begin, end, step = (bound or [] for bound in bounds)
    if not len(begin) == len(end) == len(step) or len(begin) > 8:
        return False
    free = [[i < len(mask) and bool(mask[i]) for i in range(len(begin))] for mask in masks]
    first = [0 if free[0][i] else n for i, n in enumerate(begin)]
    last = [2**31 - 1 if free[1][i] else n for i, n in enumerate(end)]
    at = [i for i in range(len(begin)) if (first[i], last[i], step[i]) != (0, 2**31 - 1, 1)]
    if not at:
        return plain("Identity", out, layer)
    lists = [out.numbers([values[i] for i in at]) for values in (first, last)]
    out.add("Slice", [layer.inputs[0], *lists, out.numbers(at), out.numbers([step[i] for i in at])], layer.value(), name=layer.name)
    return True


def resize(out: Said, layer: Layer) -> bool:
    mode = {"nearest": "nearest", "linear_onnx": "linear", "linear": "linear", "bilinear_pillow": ""}.get(layer.data.get("mode", ""), "")
    dims = layer.outputs[0][1]
    factors = out.held(layer.inputs[2]) if len(layer.inputs) > 2 else None
    if not mode or any(_list(layer, "pads_begin")) or any(_list(layer, "pads_end")) or _flag(layer, "antialias"):
        return False
    axes = out.ints(layer.inputs[3]) if len(layer.inputs) > 3 else list(range(len(dims)))
    if (
        layer.data.get("shape_calculation_mode") != "scales"
        or factors is None
        or axes is None
        or len(axes) != factors.size
        or len(dims) != 4
    ):
        return False
    scales = [1.0] * 4
    for axis, factor in zip(axes, factors.reshape(-1), strict=True):
        scales[axis % 4] = float(factor)
    how = {
        "coordinate_transformation_mode": layer.data.get("coordinate_transformation_mode", "half_pixel"),
        "nearest_mode": layer.data.get("nearest_mode", "round_prefer_floor"),
    }
    out.add("Resize", [layer.inputs[0], "", out.numbers(scales, "float32")], layer.value(), name=layer.name, mode=mode, **how)
    return True


def rounded(out: Said, layer: Layer) -> bool:
    """Values between layers that are rounded to some bits: they are left as they are, and that is said."""
    note = "values between layers, which this file rounds to fewer bits (FakeQuantize), are left as they are"
    if note not in out.notes:
        out.notes.append(note)
    return plain("Identity", out, layer)


def gelu(out: Said, layer: Layer) -> bool:
    return plain("Gelu", out, layer, approximate="tanh" if layer.data.get("approximation_mode", "").lower() == "tanh" else "none")


HANDLERS: dict[str, Callable[[Said, Layer], bool]] = {
    **dict.fromkeys(("Convolution", "GroupConvolution", "ConvolutionBackpropData", "GroupConvolutionBackpropData"), conv),
    "MatMul": matmul,
    "BatchNormInference": norm,
    "PReLU": prelu,
    "Add": partial(elementwise, "Add"),
    "Subtract": partial(elementwise, "Sub"),
    "Multiply": partial(elementwise, "Mul"),
    "Divide": partial(elementwise, "Div"),
    "Maximum": partial(elementwise, "Max"),
    "Minimum": partial(elementwise, "Min"),
    "ReLU": partial(plain, "Relu"),
    "Relu": partial(plain, "Relu"),
    "Sigmoid": partial(plain, "Sigmoid"),
    "Tanh": partial(plain, "Tanh"),
    "SoftPlus": partial(plain, "Softplus"),
    "HSwish": partial(plain, "HardSwish"),
    "HSigmoid": partial(plain, "HardSigmoid", alpha=1 / 6, beta=0.5),
    "Elu": lambda out, layer: plain("Elu", out, layer, alpha=float(layer.data.get("alpha", "1"))),
    "Gelu": gelu,
    "Clamp": clamp,
    "Swish": swish,
    "MaxPool": partial(pool, "MaxPool"),
    "AvgPool": partial(pool, "AveragePool"),
    "ReduceMean": partial(reduced, "ReduceMean"),
    "ReduceMax": partial(reduced, "ReduceMax"),
    **dict.fromkeys(("Reshape", "Squeeze", "Unsqueeze"), reshape),
    "Transpose": transpose,
    "ShapeOf": partial(plain, "Shape"),
    "Gather": gather,
    "Concat": concat,
    **dict.fromkeys(("Softmax", "SoftMax"), softmax),
    "Pad": margin,
    "LRN": lrn,
    **dict.fromkeys(("Split", "VariadicSplit"), split),
    **dict.fromkeys(("StridedSlice", "Slice"), cut),
    "Interpolate": resize,
    "FakeQuantize": rounded,
    "Convert": partial(plain, "Identity"),
}
