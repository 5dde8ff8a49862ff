"""Writers of operators, from ONNX to TFLite: `HANDLERS` has one for each name. A BatchNorm behind a layer is folded into it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from convert.formats._tflite_writer import LAST, SAME, VALID, Handler, Node, Numbers, Writer

NONE, RELU, RELU6 = 0, 1, 3
LOWEST = float(np.finfo(np.float32).min)
"""What a maximum never takes."""
PLAIN = {"Relu": "RELU", "Sigmoid": "LOGISTIC", "Tanh": "TANH", "HardSwish": "HARD_SWISH", "Elu": "ELU"}
BINARY = {
    "Add": ("ADD", "AddOptions"), "Sub": ("SUB", "SubOptions"), "Mul": ("MUL", "MulOptions"), "Div": ("DIV", "DivOptions"),
    "Max": ("MAXIMUM", "MaximumMinimumOptions"), "Min": ("MINIMUM", "MaximumMinimumOptions"),
}  # fmt: skip


def _conv(out: Writer, node: Node) -> None:
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


def _folded(out: Writer, node: Node, weight: np.ndarray, bias: np.ndarray | None, axis: int = 0) -> tuple[np.ndarray, np.ndarray | None]:
    """Fold the BatchNorm behind a layer, if it has one, into what the layer holds, in float64; its outputs lie along `axis`."""
    if node.norm is None:
        return weight, bias
    scale, shift = _scale(out, node.norm)
    wide = scale.reshape(*(-1 if place == axis else 1 for place in range(weight.ndim)))
    moved = shift if bias is None else shift + scale * bias
    folded = (weight * wide).astype(np.float32), moved.astype(np.float32)
    out.numbers.append(Numbers(node.module, _owner(node.norm), *folded))
    return folded


def _owner(norm: Any) -> str:
    """Name a BatchNorm by its mean, which each has."""
    return norm.input[3].rpartition(".")[0]


def _scale(out: Writer, norm: Any) -> tuple[np.ndarray, np.ndarray]:
    found = [out.constants[name].astype(np.float64) for name in norm.input[1:5]]
    eps = next((one.f for one in norm.attribute if one.name == "epsilon"), 1e-5)
    gamma, beta, mean, var = found
    scale = gamma / np.sqrt(var + eps)
    return scale, beta - mean * scale


def _norm(out: Writer, node: Node) -> None:
    scale, shift = _scale(out, node.node)
    module = _owner(node.node)
    out.numbers.append(Numbers(module, module, scale.astype(np.float32), shift.astype(np.float32)))
    place = out.value(node.inputs[0])
    place = out.add("MUL", [place, out.held(scale, f"{module}/weights")], node.lies, kind="MulOptions")
    out.done(node.output, out.add("ADD", [place, out.held(shift, f"{module}/bias")], node.lies, f"{module}/BiasAdd", "AddOptions"))


def _transposed(out: Writer, node: Node) -> None:
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


def _cut(out: Writer, place: int, begin: Sequence[int], end: Sequence[int], step: Sequence[int]) -> int:
    """Take a part of a value, of all images."""
    shape = [-(-(last - first) // by) for first, last, by in zip(begin, end, step, strict=True)]
    inputs = [place, *(out.held(np.array(numbers)) for numbers in (begin, end, step))]
    return out.add("STRIDED_SLICE", inputs, shape, kind="StridedSliceOptions", beginMask=1, endMask=1)


def _dense(out: Writer, node: Node) -> None:
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


def _plain(out: Writer, node: Node) -> None:
    out.done(node.output, out.add(PLAIN[node.node.op_type], [out.value(node.inputs[0])], node.lies))


def _same(out: Writer, node: Node) -> None:
    out.done(node.output, out.value(node.inputs[0]))


def _clip(out: Writer, node: Node) -> None:
    low, high = (None if (found := node.constant(place)) is None else float(found) for place in (1, 2))
    place = out.value(node.inputs[0])
    if (low, high) == (0, 6):
        out.done(node.output, out.add("RELU6", [place], node.lies))
        return
    for op, bound in (("MAXIMUM", low), ("MINIMUM", high)):
        if bound is not None:
            place = out.add(op, [place, out.held(np.float32(bound))], node.lies, kind="MaximumMinimumOptions")
    out.done(node.output, place)


def _hard_sigmoid(out: Writer, node: Node) -> None:
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


def _leaky(out: Writer, node: Node) -> None:
    made = out.add("LEAKY_RELU", [out.value(node.inputs[0])], node.lies, kind="LeakyReluOptions", alpha=node.how.get("alpha", 0.01))
    out.done(node.output, made)


def _prelu(out: Writer, node: Node) -> None:
    slope = node.constant(1)
    if slope is None or len(node.shape) not in (2, 4):
        node.refuse("has a slope that is computed")
    wide = slope.reshape((1,) * (len(node.shape) - 2) + (-1,))
    out.done(node.output, out.add("PRELU", [out.value(node.inputs[0]), out.held(wide, f"{node.module}/weights")], node.lies))


def _binary(out: Writer, node: Node) -> None:
    op, kind = BINARY[node.node.op_type]
    rank = len(node.shape)
    if any(name not in out.constants and len(out.shapes[name]) != rank for name in node.inputs):
        node.refuse("joins values of different ranks")
    out.done(node.output, out.add(op, [out.value(name, rank) for name in node.inputs], node.lies, kind=kind))


def _pool(out: Writer, node: Node) -> None:
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


def _explicit(node: Node, kernel: Sequence[int], stride: Sequence[int]) -> list[int]:
    pads = list(node.how.get("pads") or (0, 0, 0, 0))
    ends = [max((node.shape[2 + i] - 1) * stride[i] + kernel[i] - node.given[2 + i] - pads[i], 0) for i in range(2)]
    return [pads[0], pads[1], *ends]


def _same_before(node: Node, kernel: Sequence[int], stride: Sequence[int]) -> tuple[int, int]:
    totals = (max((node.shape[2 + i] - 1) * stride[i] + kernel[i] - node.given[2 + i], 0) for i in range(2))
    top, left = (total // 2 for total in totals)
    return top, left


def _counted(node: Node, kernel: Sequence[int], stride: Sequence[int]) -> np.ndarray:
    """Say by how many numbers ONNX divides the sum of each window."""
    pads = node.how.get("pads") or (0, 0, 0, 0)
    counting = node.how.get("count_include_pad", 0)
    return _windows(node, kernel, stride, pads[0], pads[1], counting=counting)


def _windows(node: Node, kernel: Sequence[int], stride: Sequence[int], top: int, left: int, *, counting: int) -> np.ndarray:
    pads = node.how.get("pads") or (0, 0, 0, 0)
    sides: list[np.ndarray] = []
    for axis, before in enumerate((top, left)):
        starts = np.asarray([place * stride[axis] - before for place in range(int(node.shape[2 + axis]))], np.int64)
        low, high = (-pads[axis], node.given[2 + axis] + pads[axis + 2]) if counting else (0, node.given[2 + axis])
        sides.append(np.minimum(starts + kernel[axis], high) - np.maximum(starts, low))
    return sides[0][:, None] * sides[1][None, :]


def _mean(out: Writer, node: Node) -> None:
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


def _concat(out: Writer, node: Node) -> None:
    axis, rank = node.how["axis"] % len(node.shape), len(node.shape)
    theirs = LAST.index(axis) if rank == 4 else axis
    made = out.add("CONCATENATION", [out.value(name, rank) for name in node.inputs], node.lies, kind="ConcatenationOptions", axis=theirs)
    out.done(node.output, made)


def _reshape(out: Writer, node: Node) -> None:
    out.done(node.output, out.reshaped(out.as_onnx(node.inputs[0]), node.shape), as_onnx=True)


def _transpose(out: Writer, node: Node) -> None:
    perm = list(node.how["perm"])
    if perm[0] != 0:
        node.refuse("moves the images")
    out.done(node.output, out.turned(out.as_onnx(node.inputs[0]), perm), as_onnx=True)


def _softmax(out: Writer, node: Node) -> None:
    if node.how.get("axis", -1) % len(node.shape) != (1 if len(node.shape) == 4 else len(node.shape) - 1):
        node.refuse("is not over the channels")
    out.done(node.output, out.add("SOFTMAX", [out.value(node.inputs[0])], node.lies, kind="SoftmaxOptions", beta=1.0))


def _pad(out: Writer, node: Node) -> None:
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


def _slice(out: Writer, node: Node) -> None:
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


def _split(out: Writer, node: Node) -> None:
    axis, rank, at = node.how.get("axis", 0) % len(node.given), len(node.given), 0
    if axis == 0:
        node.refuse("divides images")
    for name in node.node.output:
        begin, end = [0] * rank, list(node.given)
        begin[axis], end[axis] = at, at + out.shapes[name][axis]
        at = end[axis]
        ways = (tuple(numbers[i] for i in LAST) if rank == 4 else tuple(numbers) for numbers in (begin, end, [1] * rank))
        out.done(name, _cut(out, out.value(node.inputs[0]), *ways))


def _resize(out: Writer, node: Node) -> None:
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


HANDLERS: dict[str, Handler] = {
    "Conv": _conv, "ConvTranspose": _transposed, "BatchNormalization": _norm, "Gemm": _dense, "MatMul": _dense, "Identity": _same,
    "Dropout": _same, "Clip": _clip, "HardSigmoid": _hard_sigmoid, "LeakyRelu": _leaky, "PRelu": _prelu, "MaxPool": _pool,
    "AveragePool": _pool, "GlobalAveragePool": _mean, "GlobalMaxPool": _mean, "ReduceMean": _mean, "ReduceMax": _mean, "Concat": _concat,
    "Reshape": _reshape, "Flatten": _reshape, "Squeeze": _reshape, "Unsqueeze": _reshape, "Transpose": _transpose, "Softmax": _softmax,
    "Pad": _pad, "Slice": _slice, "Split": _split, "Resize": _resize,
    **dict.fromkeys(PLAIN, _plain), **dict.fromkeys(BINARY, _binary),
}  # fmt: skip
"""By ONNX's operators: how each is said."""
