"""What each operation of TensorFlow's is in ONNX's words, those that its optimiser fuses too; one that has none keeps its place."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from convert.formats._operators import Transcript
from convert.formats._tf_nodes import Node

LAYER = re.compile(
    r"(.+)/(?:Conv2D|DepthwiseConv2dNative|depthwise|separable_conv2d|convolution|conv2d_transpose|MatMul|BiasAdd|FusedBatchNorm\w*)$"
)
"""How TensorFlow names what a layer computes, and its layer."""
VARIABLE = re.compile(
    r"(?:StatefulPartitionedCall/)?(.+)/(?:weights|biases|kernel|bias|depthwise_weights|depthwise_kernel|pointwise_kernel|gamma|beta|moving_mean|moving_variance)$"
)
"""How a variable was called, and its layer."""
SILENT = ("NoOp", "Assert", "CheckNumerics", "Const")


class Said(Transcript):
    """A graph of TensorFlow's as it is said; `same` names values that are others under another name."""

    def __init__(self, *, channels_last: bool) -> None:
        super().__init__(channels_last=channels_last)
        self.same: dict[str, str] = {}
        self.notes: list[str] = []

    def value(self, name: str) -> str:
        return self.same.get(name, name)

    def given(self, node: Node) -> list[str]:
        """Name a node's inputs."""
        return [self.value(name) for name in node.inputs]

    def alias(self, node: Node, value: str) -> bool:
        self.same[node.name] = value
        return True

    def ints(self, name: str) -> list[int] | None:
        """Read a short constant list of whole numbers."""
        array = self.held(name)
        return [int(n) for n in array.reshape(-1)] if array is not None and array.dtype.kind in "iu" else None

    def named(self, node: Node, *weights: str) -> str:
        """Name a layer by its variables, else by what computes it."""
        for name in weights:
            stored = self.model.tensors.get(name)
            if stored is not None and (match := VARIABLE.match(stored.origin)):
                return match[1]
        match = LAYER.match(node.name)
        return match[1] if match else node.name


def said(nodes: Sequence[Node]) -> Said:
    """Say a whole graph; its outputs are what nobody reads."""
    last = next((node.attrs["data_format"] != "NCHW" for node in nodes if "Conv" in node.op and node.attrs.get("data_format")), True)
    out = Said(channels_last=last)
    read = {value for node in nodes for value in node.inputs}
    for node in nodes:
        mark, handler = len(out.model.operators), HANDLERS.get(node.op)
        if node.op == "Const":
            if node.held is not None:
                out.constant(node.name, node.held)
        elif node.op == "Placeholder":
            out.input(node.name, node.attrs.get("shape") or node.attrs.get("_output_shapes") or ())
        elif node.op not in SILENT and (handler is None or not node.inputs or not handler(out, node)):
            del out.model.operators[mark:]
            values = (
                [node.name, *sorted(value for value in read if value.startswith(f"{node.name}:"))] if len(nodes) < 5000 else [node.name]
            )
            out.unknown(node.op, out.given(node), values, node.name)
    origins = {value.partition(":")[0] for value in read}
    ends = [node.name for node in nodes if node.name not in origins and node.op not in (*SILENT, "Placeholder")]
    out.model.outputs = list(dict.fromkeys(out.value(name) for name in ends))
    return out


def _last(node: Node) -> bool:
    return node.attrs.get("data_format") in (None, "", "NHWC")


def _sides(node: Node, name: str) -> tuple[int, int] | None:
    """Read an attribute that has a number for each axis: those of height and width."""
    given: Sequence[int] | None = node.attrs.get(name)
    held: Sequence[int] = given or (1, 1, 1, 1)
    at = (1, 2) if _last(node) else (2, 3)
    others = [held[axis] for axis in range(4) if axis not in at] if len(held) == 4 else [0]
    return (int(held[at[0]]), int(held[at[1]])) if set(others) == {1} else None


def _pads(node: Node) -> dict[str, Any] | None:
    padding = node.attrs.get("padding")
    if padding == "EXPLICIT":
        given: Sequence[int] | None = node.attrs.get("explicit_paddings")
        held, at = given or (), (2, 4) if _last(node) else (4, 6)
        return {"pads": (held[at[0]], held[at[1]], held[at[0] + 1], held[at[1] + 1])} if len(held) == 8 else None
    return {"auto_pad": {"SAME": "SAME_UPPER", "VALID": "VALID"}[padding]} if padding in ("SAME", "VALID") else None


def _on_maps(out: Said, node: Node, op: str, inputs: Sequence[str], output: str, **how: Any) -> str:
    """Say an operator that has its channels first, wherever this node has them."""
    if not _last(node):
        return out.add(op, inputs, output, **how)
    return out.last(out.add(op, [out.first(inputs[0]), *inputs[1:]], **how), output)


def plain(op: str, out: Said, node: Node, **attrs: Any) -> bool:
    out.add(op, out.given(node)[:1], node.name, name=node.name, **attrs)
    return True


def same(out: Said, node: Node) -> bool:
    return out.alias(node, out.given(node)[0])


def conv(out: Said, node: Node) -> bool:
    x, weight, *rest = out.given(node)
    fused = _words(node)
    shape, depthwise = out.weights.get(weight), "epthwise" in node.op
    strides, dilations, pads = _sides(node, "strides"), _sides(node, "dilations"), _pads(node)
    if shape is None or len(shape) != 4 or strides is None or dilations is None or pads is None:
        return False
    module, groups, channels = out.named(node, weight), 1, _channels(out, x, node)
    if depthwise:
        height, width, groups, multiplier = shape
        kernel = out.turned(weight, (2, 3, 0, 1))
        kernel = out.add("Reshape", [kernel, out.numbers([groups * multiplier, 1, height, width])])
    else:
        kernel = out.turned(weight, (3, 2, 0, 1))
        if channels is not None and shape[2] and channels % shape[2] == 0:
            groups = channels // shape[2]
    biased = fused[:1] == ["BiasAdd"]
    inputs = [x, kernel, *(rest[:1] if biased else [])]
    end = _rest_of(fused[1:] if biased else fused)
    if end is None:
        return False
    made = _on_maps(
        out, node, "Conv", inputs, "" if end else node.name, module=module, strides=strides, dilations=dilations, group=groups, **pads
    )
    return _ended(out, node, made, end)


def _channels(out: Said, x: str, node: Node) -> int | None:
    """Tell how many channels an image has; further on nobody asks, for graphs of groups are new and rare."""
    shape = out.model.inputs.get(x)
    return shape[3 if _last(node) else 1] if shape is not None and len(shape) == 4 else None


def _rest_of(fused: list[str]) -> list[str] | None:
    """Tell what is left of fused operations; None where it is none that is known here."""
    return fused if all(word in FUSED for word in fused) else None


FUSED = ("Relu", "Relu6", "Elu", "Tanh", "Sigmoid")
"""Activations that are fused, and are called as ONNX calls them but for one."""


def _words(node: Node) -> list[str]:
    held: list[object] | None = node.attrs.get("fused_ops")
    return [str(word) for word in held or ()]


def _ended(out: Said, node: Node, value: str, words: list[str]) -> bool:
    for place, word in enumerate(words):
        name = node.name if place == len(words) - 1 else ""
        value = _six(out, value, name) if word == "Relu6" else out.add(word, [value], name)
    return True


def _six(out: Said, value: str, output: str, name: str = "") -> str:
    return out.add("Clip", [value, out.numbers(0, "float32"), out.numbers(6, "float32")], output, name=name)


def relu6(out: Said, node: Node) -> bool:
    return _six(out, out.given(node)[0], node.name, node.name) != ""


def transposed(out: Said, node: Node) -> bool:
    if len(node.inputs) != 3:
        return False
    sizes, weight, x = out.given(node)
    shape, wanted, strides = out.weights.get(weight), out.ints(sizes), _sides(node, "strides")
    if shape is None or len(shape) != 4 or strides is None or node.attrs.get("padding") not in ("SAME", "VALID"):
        return False
    kernel = out.turned(weight, (3, 2, 0, 1))
    same = node.attrs["padding"] == "SAME"
    large = None if wanted is None or len(wanted) != 4 else (wanted[1:3] if _last(node) else wanted[2:4])
    total, more = [0, 0], [0, 0]
    for axis in (0, 1):
        size, stride, taps = None if large is None else large[axis], strides[axis], shape[axis]
        if size is not None and size > 0:
            small = -(-size // stride) if same else -(-(size - taps + 1) // stride)
            total[axis] = max((small - 1) * stride + taps - size, 0)
            more[axis] = size + total[axis] - ((small - 1) * stride + taps)
        elif same:  # as large as the stride makes it, which is what a free size means in practice
            total[axis], more[axis] = max(taps - stride, 0), max(stride - taps, 0)
        else:
            more[axis] = max(stride - taps, 0)
    before = [count // 2 for count in total]
    pads = (*before, *(count - first for count, first in zip(total, before, strict=True)))
    how = {"module": out.named(node, weight), "strides": strides, "pads": pads, "output_padding": tuple(more)}
    _on_maps(out, node, "ConvTranspose", [x, kernel], node.name, **how)
    return True


def matmul(out: Said, node: Node) -> bool:
    x, weight, *rest = out.given(node)
    fused = _words(node)
    biased = fused[:1] == ["BiasAdd"]
    end = _rest_of(fused[1:] if biased else fused)
    if node.attrs.get("transpose_a") or node.attrs.get("adj_x") or weight not in out.weights or end is None:
        return False
    kernel = out.turned(weight, (1, 0)) if node.attrs.get("transpose_b") or node.attrs.get("adj_y") else weight
    op = "Gemm" if biased else "MatMul"
    made = out.add(op, [x, kernel, *(rest[:1] if biased else [])], "" if end else node.name, module=out.named(node, weight, *rest[:1]))
    return _ended(out, node, made, end)


def bias(out: Said, node: Node) -> bool:
    x, added = out.given(node)
    stored = out.model.tensors.get(added)
    if stored is None or len(stored.shape) != 1:
        return False
    if not _last(node):
        added = out.add("Reshape", [added, out.numbers([1, -1, 1, 1])])
    out.add("Add", [x, added], node.name, name=node.name, module=out.named(node, added))
    return True


def norm(out: Said, node: Node) -> bool:
    inputs = out.given(node)
    if len(inputs) != 5 or node.attrs.get("is_training"):
        return False
    eps = float(node.attrs.get("epsilon") or 1e-4)
    _on_maps(out, node, "BatchNormalization", inputs, node.name, module=out.named(node, *inputs[1:]), epsilon=eps)
    return True


def arithmetic(op: str, out: Said, node: Node) -> bool:
    values = out.given(node)
    if len(values) != 2:
        return False
    for place, value in enumerate(values):
        held = out.held(value, 1)
        neutral = {"Mul": 1, "Add": 0}.get(op) if place == 0 else {"Mul": 1, "Div": 1, "Add": 0, "Sub": 0}.get(op)
        if held is not None and held.size == 1 and neutral is not None and held.reshape(-1)[0] == neutral:
            return out.alias(node, values[1 - place])  # a factor of one, as converters leave it
    module = out.named(node, *values)
    out.add(op, values, node.name, name=node.name, module=module)
    return True


def many(op: str, out: Said, node: Node) -> bool:
    out.add(op, out.given(node), node.name, name=node.name)
    return True


def pool(op: str, out: Said, node: Node) -> bool:
    kernel, strides, pads = _sides(node, "ksize"), _sides(node, "strides"), _pads(node)
    if kernel is None or strides is None or pads is None:
        return False
    _on_maps(out, node, op, out.given(node)[:1], node.name, name=node.name, kernel_shape=kernel, strides=strides, **pads)
    return True


def reduced(op: str, out: Said, node: Node) -> bool:
    axes = out.ints(out.given(node)[1]) if len(node.inputs) > 1 else None
    return axes is not None and plain(op, out, node, axes=axes, keepdims=int(bool(node.attrs.get("keep_dims"))))


def reshape(out: Said, node: Node) -> bool:
    shape = out.given(node)[1] if len(node.inputs) > 1 else ""
    if (sizes := out.ints(shape)) is not None:
        shape = out.numbers(sizes)
    out.add("Reshape", [out.given(node)[0], shape], node.name, name=node.name)
    return bool(shape)


def squeeze(out: Said, node: Node) -> bool:
    axes = node.attrs.get("squeeze_dims") or node.attrs.get("axis")
    return plain("Squeeze", out, node, **({"axes": [int(n) for n in axes]} if axes else {}))


def expand(out: Said, node: Node) -> bool:
    axis = out.ints(out.given(node)[1]) if len(node.inputs) > 1 else None
    return axis is not None and plain("Unsqueeze", out, node, axes=axis)


def transpose(out: Said, node: Node) -> bool:
    order = out.ints(out.given(node)[1]) if len(node.inputs) > 1 else None
    return order is not None and plain("Transpose", out, node, perm=order)


def margin(out: Said, node: Node) -> bool:
    values = out.given(node)
    pads = out.held(values[1]) if len(values) > 1 else None
    if pads is None or pads.ndim != 2 or pads.shape[1] != 2 or pads.dtype.kind not in "iu":
        return False
    if not pads.any():
        return same(out, node)
    out.add("Pad", [values[0], out.numbers(pads.T.reshape(-1)), *values[2:3]], node.name, name=node.name)
    return True


def concat(out: Said, node: Node) -> bool:
    values = out.given(node)
    parts, axis = (values[1:], values[0]) if node.op == "Concat" else (values[:-1], values[-1])
    at = out.ints(axis)
    if at is None or len(at) != 1 or not parts:
        return False
    out.add("Concat", parts, node.name, name=node.name, axis=at[0])
    return True


def pack(out: Said, node: Node) -> bool:
    """Numbers put together to a shape."""
    if node.attrs.get("axis"):
        return False
    parts = [out.add("Unsqueeze", [value], axes=[0]) for value in out.given(node)]
    out.add("Concat", parts, node.name, name=node.name, axis=0)
    return True


def cut(out: Said, node: Node) -> bool:
    values = out.given(node)
    bounds = [out.ints(value) for value in values[1:4]]
    if len(bounds) != 3 or any(bound is None for bound in bounds) or node.attrs.get("new_axis_mask") or node.attrs.get("ellipsis_mask"):
        return False
    begin, end, step = (bound or [] for bound in bounds)
    if not len(begin) == len(end) == len(step) or len(begin) > 8:
        return False
    masks = [int(node.attrs.get(name) or 0) for name in ("begin_mask", "end_mask", "shrink_axis_mask")]
    if masks[2]:
        out.add("Gather", [values[0], out.numbers(begin[0])], node.name, name=node.name, axis=0)
        return len(begin) == 1
    first = [0 if masks[0] >> i & 1 else n for i, n in enumerate(begin)]
    last = [2**31 - 1 if masks[1] >> i & 1 else n for i, n in enumerate(end)]
    return _sliced(out, node, values[0], first, last, step)


def piece(out: Said, node: Node) -> bool:
    values = out.given(node)
    begin, size = (out.ints(value) for value in (*values[1:3], "", "")[:2])
    if begin is None or size is None or len(begin) != len(size) or len(begin) > 8:
        return False
    return _sliced(out, node, values[0], begin, [2**31 - 1 if n < 0 else b + n for b, n in zip(begin, size, strict=True)], [1] * len(begin))


def _sliced(out: Said, node: Node, x: str, first: list[int], last: list[int], step: list[int]) -> bool:
    at = [i for i in range(len(first)) if (first[i], last[i], step[i]) != (0, 2**31 - 1, 1)]
    if not at:
        return out.alias(node, x)
    lists = [out.numbers([values[i] for i in at]) for values in (first, last)]
    out.add("Slice", [x, *lists, out.numbers(at), out.numbers([step[i] for i in at])], node.name, name=node.name)
    return True


def split(out: Said, node: Node) -> bool:
    values = out.given(node)
    count = int(node.attrs.get("num_split") or 0)
    if len(values) < 2 or not 0 < count <= 10_000:
        return False
    x, axis, sizes = (values[1], values[0], None) if node.op == "Split" else (values[0], values[2], out.ints(values[1]))
    at = out.ints(axis)
    if count == 1:
        return out.alias(node, x)
    if at is None or len(at) != 1 or (node.op == "SplitV" and (sizes is None or min(sizes) < 0)):
        return False
    outputs = [node.name if place == 0 else f"{node.name}:{place}" for place in range(count)]
    out.several("Split", [x, *([out.numbers(sizes)] if sizes else [])], outputs, name=node.name, axis=at[0])
    return True


def resize(mode: str, out: Said, node: Node) -> bool:
    """Enlarge by whole factors: the size that is asked for, by that of what comes in, which only the graph's walk knows."""
    sizes = out.ints(out.given(node)[1]) if len(node.inputs) > 1 else None
    if sizes is None or len(sizes) != 2 or node.attrs.get("align_corners"):
        return False
    half = bool(node.attrs.get("half_pixel_centers"))
    way = "half_pixel" if half else "asymmetric"
    value = out.first(out.given(node)[0])
    wanted = out.numbers([1, 1, *sizes])
    how = {"coordinate_transformation_mode": way, "nearest_mode": "round_prefer_floor" if half else "floor"}
    out.last(out.add("Resize", [value, "", "", wanted], name=node.name, mode=mode, **how), node.name)
    return True


def lrn(out: Said, node: Node) -> bool:
    radius = node.attrs.get("depth_radius")
    size = 2 * int(5 if radius is None else radius) + 1
    alpha, beta, bias_ = (node.attrs.get(name) for name in ("alpha", "beta", "bias"))
    if not 0 < size < 10_000:
        return False
    how = {"size": size, "alpha": float(1 if alpha is None else alpha) * size, "beta": float(0.5 if beta is None else beta)}
    _on_maps(out, node, "LRN", out.given(node)[:1], node.name, name=node.name, bias=float(1 if bias_ is None else bias_), **how)
    return True


def inverse_root(out: Said, node: Node) -> bool:
    out.add("Reciprocal", [out.add("Sqrt", out.given(node)[:1])], node.name, name=node.name)
    return True


def leaky(out: Said, node: Node) -> bool:
    alpha = node.attrs.get("alpha")
    return plain("LeakyRelu", out, node, alpha=float(0.2 if alpha is None else np.float32(alpha)))


HANDLERS: dict[str, Callable[[Said, Node], bool]] = {
    **dict.fromkeys(("Identity", "StopGradient", "PlaceholderWithDefault", "Snapshot", "PreventGradient", "IdentityN"), same),
    **dict.fromkeys(("Conv2D", "_FusedConv2D", "DepthwiseConv2dNative", "FusedDepthwiseConv2dNative", "_FusedDepthwiseConv2dNative"), conv),
    "Conv2DBackpropInput": transposed,
    **dict.fromkeys(("MatMul", "_FusedMatMul", "BatchMatMul", "BatchMatMulV2"), matmul),
    **dict.fromkeys(("BiasAdd", "BiasAddV1"), bias),
    **dict.fromkeys(("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3"), norm),
    **dict.fromkeys(("Add", "AddV2"), partial(arithmetic, "Add")),
    "AddN": partial(many, "Sum"),
    "Sub": partial(arithmetic, "Sub"),
    "Mul": partial(arithmetic, "Mul"),
    **dict.fromkeys(("Div", "RealDiv"), partial(arithmetic, "Div")),
    "Maximum": partial(many, "Max"),
    "Minimum": partial(many, "Min"),
    "Relu": partial(plain, "Relu"),
    "Relu6": relu6,
    "LeakyRelu": leaky,
    "Elu": partial(plain, "Elu"),
    "Sigmoid": partial(plain, "Sigmoid"),
    "Tanh": partial(plain, "Tanh"),
    "Softplus": partial(plain, "Softplus"),
    "Softmax": partial(plain, "Softmax", axis=-1),
    "MaxPool": partial(pool, "MaxPool"),
    "AvgPool": partial(pool, "AveragePool"),
    "Mean": partial(reduced, "ReduceMean"),
    "Max": partial(reduced, "ReduceMax"),
    "Reshape": reshape,
    "Squeeze": squeeze,
    "ExpandDims": expand,
    "Transpose": transpose,
    "Shape": partial(plain, "Shape"),
    **dict.fromkeys(("Pad", "PadV2"), margin),
    **dict.fromkeys(("Concat", "ConcatV2"), concat),
    "Pack": pack,
    "StridedSlice": cut,
    "Slice": piece,
    **dict.fromkeys(("Split", "SplitV"), split),
    "ResizeBilinear": partial(resize, "linear"),
    "ResizeNearestNeighbor": partial(resize, "nearest"),
    "LRN": lrn,
    "Rsqrt": inverse_root,
    "Sqrt": partial(plain, "Sqrt"),
    "Cast": same,
}
