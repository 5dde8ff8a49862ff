"""What each layer of ncnn's is in ONNX's words, and which weights it takes; one that has no word keeps its place under its own name."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from convert.formats._ncnn_param import Layer, Numbers
from convert.formats._operators import Transcript
from convert.source import Stored
from weights.errors import MalformedFile, UnsupportedFormat

SAME = {-233: "SAME_UPPER", -234: "SAME_LOWER"}
WEIGHTLESS = (
    "AbsVal", "ArgMax", "BNLL", "CELU", "Cast", "Crop", "CumulativeSum", "DetectionOutput", "Diag", "Erf", "Exp", "ExpandDims", "Fold",
    "GLU", "Interp", "Log", "LogSoftmax", "MatMul", "Mish", "PSROIPooling", "Packing", "Permute", "PixelShuffle", "Power", "PriorBox",
    "Proposal", "ROIAlign", "ROIPooling", "Reduction", "Reorg", "SELU", "Shrink", "ShuffleChannel", "Slice", "Softplus", "Squeeze",
    "Threshold", "Tile", "UnaryOp", "Unfold", "Yolov3DetectionOutput", "Input", "Noop", "CopyTo", "Eltwise", "Concat", "BinaryOp",
)  # fmt: skip
"""Layers that take nothing of the .bin, whether or not they have a word here."""


class Said(Transcript):
    """A network's layers as they are said."""

    def __init__(self, numbers: Numbers) -> None:
        super().__init__()
        self.bin = numbers
        self.now: dict[str, str] = {}

    def given(self, layer: Layer) -> list[str]:
        return [self.now.get(name, name) for name in layer.inputs]

    def gives(self, layer: Layer, *values: str) -> bool:
        self.now.update(zip(layer.outputs, values, strict=False))
        return True

    def weight(self, layer: Layer, shape: Sequence[int]) -> str:
        return self._kept(layer, self.bin.weight(f"{layer.name}.weight", _sizes(layer, shape)))

    def plain(self, layer: Layer, leaf: str, *shape: int) -> str:
        return self._kept(layer, self.bin.plain(f"{layer.name}.{leaf}", _sizes(layer, shape)))

    def _kept(self, layer: Layer, held: Stored) -> str:
        del layer
        return self.constant(self.fresh(), held)


def _sizes(layer: Layer, shape: Sequence[int]) -> tuple[int, ...]:
    if min(shape, default=0) < 0 or math.prod(shape) > 2**40:
        raise MalformedFile(f"layer {layer.name:.100} has weights of shape {tuple(shape)}")
    return tuple(shape)


def said(layers: Sequence[Layer], numbers: Numbers) -> Said:
    """Say a whole network."""
    out = Said(numbers)
    read = {name for layer in layers for name in layer.inputs}
    for layer in layers:
        handler = HANDLERS.get(layer.type)
        if handler is None and layer.type not in WEIGHTLESS:
            raise UnsupportedFormat(
                f"layer {layer.name:.100} is of kind {layer.type!r:.40}, which may have weights of its own: those behind it can't be found"
            )
        mark = len(out.model.operators)
        if handler is None or (not layer.inputs and layer.type not in ("Input", "MemoryData")) or not handler(out, layer):
            del out.model.operators[mark:]
            values = [out.fresh() for _ in layer.outputs]
            out.unknown(layer.type, out.given(layer), values, layer.name)
            out.gives(layer, *values)
    if numbers.at != len(numbers.data):
        raise MalformedFile(f"{len(numbers.data) - numbers.at} bytes of the .bin belong to no layer: the two files don't belong together")
    ends = [name for layer in layers for name in layer.outputs if name not in read]
    out.model.outputs = list(dict.fromkeys(out.now.get(name, name) for name in ends))
    return out


def source(out: Said, layer: Layer) -> bool:
    shape = [layer.whole(number) for number in (2, 1, 0)]
    if not layer.outputs:
        return False
    if not out.model.inputs or len(layer.outputs) == 1:
        out.input(layer.outputs[0], [None, *shape] if all(n > 0 for n in shape) else ())
    return True


def plain(op: str, out: Said, layer: Layer, **attrs: Any) -> bool:
    return out.gives(layer, out.add(op, out.given(layer)[:1], name=layer.name, **attrs))


def _pair(layer: Layer, number: int, default: int = 1) -> tuple[int, int]:
    """Read a setting of height and width: that of the width, and ten behind it that of the height where it differs."""
    wide = layer.whole(number, default)
    return layer.whole(number + 10, wide), wide


def _pads(layer: Layer) -> dict[str, Any]:
    left = layer.whole(4)
    if left in SAME:
        return {"auto_pad": SAME[left]}
    top = layer.whole(14, left)
    return {"pads": (top, left, layer.whole(16, top), layer.whole(15, left))}


def _activated(out: Said, layer: Layer, value: str, at: int) -> bool:
    """Say the activation that is part of a layer."""
    kind, numbers = layer.whole(at), layer.settings.get(at + 1, [])
    name = f"{layer.name}/activation"
    if kind == 0:
        return out.gives(layer, value)
    if kind == 1:
        return out.gives(layer, out.add("Relu", [value], name=name))
    if kind == 2 and len(numbers) == 1:
        return out.gives(layer, out.add("LeakyRelu", [value], name=name, alpha=numbers[0]))
    if kind == 3 and len(numbers) == 2:
        return out.gives(layer, out.add("Clip", [value, *(out.numbers(n, "float32") for n in numbers)], name=name))
    if kind == 4:
        return out.gives(layer, out.add("Sigmoid", [value], name=name))
    if kind == 6 and len(numbers) == 2:
        gate = out.add("HardSigmoid", [value], alpha=numbers[0], beta=numbers[1])
        return out.gives(layer, out.add("Mul", [value, gate], name=name))
    return False


def conv(out: Said, layer: Layer) -> bool:
    outs, size, back = layer.whole(0), layer.whole(6), layer.type.startswith("Deconvolution")
    group = layer.whole(7, 1) if layer.type.endswith("DepthWise") else 1
    kernel = _pair(layer, 1)
    each = outs * math.prod(kernel)
    if layer.whole(8) or layer.whole(19 if not back else 28):
        raise UnsupportedFormat(f"layer {layer.name:.100} is quantised, or has a weight that is computed; neither is read")
    if each < 1 or size % each or group < 1 or outs % group:
        raise MalformedFile(f"layer {layer.name:.100}: {size} numbers are no kernel of {outs} outputs of {kernel[0]} x {kernel[1]}")
    ins = size // each  # of one group
    how: dict[str, Any] = {"strides": _pair(layer, 3), "dilations": _pair(layer, 2), "group": group, **_pads(layer)}
    if back:
        weight = out.weight(layer, (group, outs // group, ins, *kernel))
        turned = out.turned(weight, (0, 2, 1, 3, 4))
        weight = out.add("Reshape", [turned, out.numbers([group * ins, outs // group, *kernel])])
        how["output_padding"] = (layer.whole(19, layer.whole(18)), layer.whole(18))
    else:
        weight = out.weight(layer, (outs, ins, *kernel))
    bias = [out.plain(layer, "bias", outs)] if layer.whole(5) else []
    if back and ("auto_pad" in how or layer.whole(20) or layer.whole(21)):
        return False
    if layer.real(18) and not back:
        return False  # margins of another number than nought
    made = out.add("ConvTranspose" if back else "Conv", [*out.given(layer)[:1], weight, *bias], module=layer.name, **how)
    return _activated(out, layer, made, 9)


def dense(out: Said, layer: Layer) -> bool:
    outs, size = layer.whole(0), layer.whole(2)
    if outs < 1 or size % outs:
        raise MalformedFile(f"layer {layer.name:.100}: {size} numbers are no weight of {outs} outputs")
    if layer.whole(8):
        raise UnsupportedFormat(f"layer {layer.name:.100} is quantised to eight bits (ncnn2int8); read the network from before that")
    weight = out.weight(layer, (outs, size // outs))
    bias = [out.plain(layer, "bias", outs)] if layer.whole(1) else []
    x = out.add("Flatten", out.given(layer)[:1], name=f"{layer.name}/flatten", axis=1)
    return _activated(out, layer, out.add("Gemm", [x, weight, *bias], module=layer.name, transB=1), 9)


def norm(out: Said, layer: Layer) -> bool:
    width = layer.whole(0)
    weight, mean, spread, bias = (out.plain(layer, leaf, width) for leaf in ("weight", "running_mean", "running_var", "bias"))
    inputs = [*out.given(layer)[:1], weight, bias, mean, spread]
    return out.gives(layer, out.add("BatchNormalization", inputs, module=layer.name, epsilon=layer.real(1)))


def scale(out: Said, layer: Layer) -> bool:
    """Numbers of each channel, at least two axes behind them."""
    if layer.whole(0) < 0:
        return False
    value, width = out.given(layer)[0], layer.whole(0)
    leaves = [("Mul", "weight")] if layer.type == "Scale" else [("Add", "bias")]
    if layer.type == "Scale" and layer.whole(1):
        leaves.append(("Add", "bias"))
    for op, leaf in leaves:
        held = out.add("Reshape", [out.plain(layer, leaf, width), out.numbers([width, 1, 1])])
        value = out.add(op, [value, held], module=layer.name)
    return out.gives(layer, value)


def prelu(out: Said, layer: Layer) -> bool:
    width = layer.whole(0)
    slope = out.plain(layer, "weight", width)
    shaped = out.add("Reshape", [slope, out.numbers([width, 1, 1] if width > 1 else [1])])
    return out.gives(layer, out.add("PRelu", [*out.given(layer)[:1], shaped], module=layer.name))


def memory(out: Said, layer: Layer) -> bool:
    """A constant: its sizes are those that are not nought, the channels first."""
    shape = [n for n in (layer.whole(2), layer.whole(11), layer.whole(1), layer.whole(0)) if n] or [1]
    held = out.plain(layer, "value", *shape)
    return out.gives(layer, held)


def pool(out: Said, layer: Layer) -> bool:
    kind, mode = layer.whole(0), layer.whole(5)
    if kind not in (0, 1) or layer.whole(7):
        return False
    if layer.whole(4):
        return plain("GlobalAveragePool" if kind else "GlobalMaxPool", out, layer)
    left = layer.whole(3)
    sides = (layer.whole(13, left), left, layer.whole(15, layer.whole(13, left)), layer.whole(14, left))
    how: dict[str, Any] = {"kernel_shape": _pair(layer, 1), "strides": _pair(layer, 2)}
    how |= {"auto_pad": "SAME_UPPER" if mode == 2 else "SAME_LOWER"} if mode in (2, 3) else {"pads": sides, "ceil_mode": int(mode == 0)}
    if kind:
        if layer.whole(6) and mode != 1:
            return False
        how["count_include_pad"] = layer.whole(6)
    return plain("AveragePool" if kind else "MaxPool", out, layer, **how)


def eltwise(out: Said, layer: Layer) -> bool:
    op = {0: "Mul", 1: "Add", 2: "Max"}.get(layer.whole(0))
    values = out.given(layer)
    if op is None or any(factor != 1 for factor in layer.settings.get(1, [])) or len(values) < 2:
        return False
    value = values[0]
    for other in values[1:]:
        value = out.add(op, [value, other], name=layer.name)
    return out.gives(layer, value)


def binary(out: Said, layer: Layer) -> bool:
    op = {0: "Add", 1: "Sub", 2: "Mul", 3: "Div", 4: "Max", 5: "Min"}.get(layer.whole(0))
    values = out.given(layer)
    if layer.whole(1):
        values = [*values[:1], out.numbers(layer.real(2), "float32")]
    if op is None or len(values) != 2:
        return False
    return out.gives(layer, out.add(op, values, name=layer.name))


def copies(out: Said, layer: Layer) -> bool:
    return out.gives(layer, *(out.given(layer)[0] for _ in layer.outputs))


def relu(out: Said, layer: Layer) -> bool:
    return plain("LeakyRelu", out, layer, alpha=layer.real(0)) if layer.real(0) else plain("Relu", out, layer)


def clip(out: Said, layer: Layer) -> bool:
    limits = [out.numbers(layer.real(number, default), "float32") for number, default in ((0, -math.inf), (1, math.inf))]
    return out.gives(layer, out.add("Clip", [*out.given(layer)[:1], *limits], name=layer.name))


def hard_swish(out: Said, layer: Layer) -> bool:
    x = out.given(layer)[0]
    gate = out.add("HardSigmoid", [x], alpha=layer.real(0, 0.2), beta=layer.real(1, 0.5))
    return out.gives(layer, out.add("Mul", [x, gate], name=layer.name))


def swish(out: Said, layer: Layer) -> bool:
    x = out.given(layer)[0]
    return out.gives(layer, out.add("Mul", [x, out.add("Sigmoid", [x])], name=layer.name))


def concat(out: Said, layer: Layer) -> bool:
    return layer.whole(0) == 0 and out.gives(layer, out.add("Concat", out.given(layer), name=layer.name, axis=1))


def parts(out: Said, layer: Layer) -> bool:
    sizes = [int(n) for n in layer.settings.get(0, [])]
    values = [out.fresh() for _ in layer.outputs]
    if layer.whole(1) or len(sizes) != len(values):
        return False
    given = [out.numbers(sizes)] if min(sizes) > 0 else []
    if not given and set(sizes) != {-233}:
        return False
    return out.gives(layer, *out.several("Split", [*out.given(layer)[:1], *given], values, name=layer.name, axis=1))


def softmax(out: Said, layer: Layer) -> bool:
    return layer.whole(0) == 0 and plain("Softmax", out, layer, axis=1)


def reshape(out: Said, layer: Layer) -> bool:
    sizes = [layer.whole(number, -233) for number in (2, 11, 1, 0)]
    shape = [n for n in sizes if n != -233]
    if not shape or min(shape) < -1 or sizes[1] != -233:
        return False
    return out.gives(layer, out.add("Reshape", [*out.given(layer)[:1], out.numbers([0, *shape])], name=layer.name))


def resize(out: Said, layer: Layer) -> bool:
    kind, factors = layer.whole(0), [layer.real(1, 1), layer.real(2, 1)]
    if kind not in (1, 2) or layer.whole(3) or layer.whole(4) or layer.whole(6) or len(layer.inputs) > 1:
        return False
    how = {"coordinate_transformation_mode": "asymmetric" if kind == 1 else "half_pixel", "nearest_mode": "floor"}
    inputs = [*out.given(layer)[:1], "", out.numbers([1, 1, *factors], "float32")]
    return out.gives(layer, out.add("Resize", inputs, name=layer.name, mode="nearest" if kind == 1 else "linear", **how))


def margin(out: Said, layer: Layer) -> bool:
    top, bottom, left, right = (layer.whole(number) for number in range(4))
    if layer.whole(4) or layer.whole(6) or layer.whole(7) or layer.whole(8):
        return False
    inputs = [*out.given(layer)[:1], out.numbers([0, 0, top, left, 0, 0, bottom, right]), out.numbers(layer.real(5), "float32")]
    return out.gives(layer, out.add("Pad", inputs, name=layer.name))


def lrn(out: Said, layer: Layer) -> bool:
    if layer.whole(0) or not 0 < layer.whole(1, 5) < 10_000:
        return False
    how = {"alpha": layer.real(2, 1), "beta": layer.real(3, 0.75), "bias": layer.real(4, 1)}
    return plain("LRN", out, layer, size=layer.whole(1, 5), **how)


def dropout(out: Said, layer: Layer) -> bool:
    factor = layer.real(0, 1)
    if factor == 1:
        return copies(out, layer)
    return out.gives(layer, out.add("Mul", [*out.given(layer)[:1], out.numbers(factor, "float32")], name=layer.name))


HANDLERS: dict[str, Callable[[Said, Layer], bool]] = {
    "Input": source,
    **dict.fromkeys(("Convolution", "ConvolutionDepthWise", "Deconvolution", "DeconvolutionDepthWise"), conv),
    "InnerProduct": dense,
    "BatchNorm": norm,
    **dict.fromkeys(("Scale", "Bias"), scale),
    "PReLU": prelu,
    "MemoryData": memory,
    "Pooling": pool,
    "Eltwise": eltwise,
    "BinaryOp": binary,
    **dict.fromkeys(("Split", "Noop"), copies),
    "Dropout": dropout,
    "ReLU": relu,
    "Sigmoid": partial(plain, "Sigmoid"),
    "TanH": partial(plain, "Tanh"),
    "ELU": lambda out, layer: plain("Elu", out, layer, alpha=layer.real(0, 0.1)),
    "Clip": clip,
    "HardSigmoid": lambda out, layer: plain("HardSigmoid", out, layer, alpha=layer.real(0, 0.2), beta=layer.real(1, 0.5)),
    "HardSwish": hard_swish,
    "Swish": swish,
    "GELU": lambda out, layer: plain("Gelu", out, layer, approximate="tanh" if layer.whole(0) else "none"),
    "Softmax": softmax,
    "Concat": concat,
    "Slice": parts,
    "Flatten": partial(plain, "Flatten", axis=1),
    "Reshape": reshape,
    "Interp": resize,
    "Padding": margin,
    "LRN": lrn,
}
