"""What each layer of a Core ML network is in ONNX's words; one that has none keeps its place under its own name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from convert.formats._operators import Transcript
from convert.formats._wire import Budget, Message, message, one, schema
from convert.source import Stored
from weights.errors import LimitExceeded, MalformedFile

WEIGHT = schema(
    "bytes wide 1, bytes half 2, bytes raw 30, bytes whole 31, quantised quantised 40",
    quantised=schema(
        "int bits 1, linear linear 101, table table 102", linear=schema("floats scale 1, floats bias 2"), table=schema("floats values 1")
    ),
)
BORDER = schema("edge edges 10", edge=schema("int start 1, int end 2"))
VALID = schema("border borders 1", border=BORDER)
NUMBER = schema("float alpha 1, float beta 2")
SCHEMAS: Mapping[str, Any] = {
    "convolution": schema(
        """int outs 1, int ins 2, int groups 10, ints kernel 20, ints stride 30, ints dilation 40, valid valid 50, same same 51,
        int back 60, int biased 70, weight weight 90, weight bias 91, ints shape 100""",
        valid=VALID, same=schema("int mode 1"), weight=WEIGHT,
    ),
    "pooling": schema(
        "int type 1, ints kernel 10, ints stride 20, valid valid 30, same same 31, last last 32, int inside 50, int whole 60",
        valid=VALID, same=schema("int mode 1"), last=schema("ints pads 10"),
    ),
    "activation": schema(
        """number linear 5, number relu 10, number leaky 15, number thresholded 20, prelu prelu 25, number tanh 30, number scaled 31,
        number sigmoid 40, number hard 41, number elu 50, number softsign 60, number softplus 70""",
        number=NUMBER, prelu=schema("weight alpha 1", weight=WEIGHT),
    ),
    "innerProduct": schema("int ins 1, int outs 2, int biased 10, weight weight 20, weight bias 21", weight=WEIGHT),
    "batchnorm": schema(
        "int channels 1, int computed 5, int instance 6, float eps 10, weight gamma 15, weight beta 16, weight mean 17, weight variance 18",
        weight=WEIGHT,
    ),
    "softmax": schema("int nothing 1"),
    "lrn": schema("float alpha 1, float beta 2, int size 3, float k 4"),
    "padding": schema("constant constant 1, int reflection 2, border borders 10", constant=schema("float value 1"), border=BORDER),
    "upsample": schema("ints factor 1, int mode 5"),
    "unary": schema("int type 1, float alpha 2, float eps 3, float shift 4, float scale 5"),
    "add": schema("float alpha 1"), "multiply": schema("float alpha 1"),
    "average": schema("int nothing 1"), "max": schema("int nothing 1"),
    "scale": schema("ints shape 1, weight scale 2, int biased 3, ints bias_shape 4, weight bias 5", weight=WEIGHT),
    "bias": schema("ints shape 1, weight bias 2", weight=WEIGHT),
    "concat": schema("int sequence 100"),
    "split": schema("int count 1"),
    "flatten": schema("int mode 1"),
    "reduce": schema("int type 1, int axis 3"),
    "clip": schema("float low 1, float high 2"),
    "gelu": schema("int mode 1"),
    "softmaxND": schema("int axis 1"),
    "concatND": schema("int axis 1, int interleave 2"),
    "transpose": schema("ints axes 1"),
    "batchedMatmul": schema(
        "int first 1, int second 2, int ins 5, int outs 6, int biased 7, weight weight 8, weight bias 9", weight=WEIGHT
    ),
    "squeeze": schema("ints axes 1, int all 2"),
    "expandDims": schema("ints axes 1"),
    "flattenTo2D": schema("int axis 1"),
    "reshapeStatic": schema("ints shape 1"),
    "constantPad": schema("float value 1, ints pads 2, int mode 3"),
    "reduceMean": schema("ints axes 1, int keep 2, int all 3"),
}  # fmt: skip
NUMBERS = {
    100: "convolution", 120: "pooling", 130: "activation", 140: "innerProduct", 150: "embedding", 160: "batchnorm", 165: "mvn",
    170: "l2normalize", 175: "softmax", 180: "lrn", 190: "crop", 200: "padding", 210: "upsample", 211: "resizeBilinear", 220: "unary",
    230: "add", 231: "multiply", 240: "average", 245: "scale", 250: "bias", 260: "max", 261: "min", 270: "dot", 280: "reduce",
    290: "loadConstant", 300: "reshape", 301: "flatten", 310: "permute", 320: "concat", 330: "split", 345: "reorganizeData", 350: "slice",
    500: "custom", 660: "clip", 795: "gelu", 875: "maxBroadcastable", 880: "addBroadcastable", 890: "divideBroadcastable",
    900: "multiplyBroadcastable", 905: "subtractBroadcastable", 950: "softmaxND", 975: "splitND", 980: "concatND", 985: "transpose",
    995: "sliceStatic", 1045: "batchedMatmul", 1120: "squeeze", 1125: "expandDims", 1130: "flattenTo2D", 1140: "reshapeStatic",
    1150: "rankPreservingReshape", 1155: "constantPad", 1280: "reduceMean", 1350: "layerNormalization",
}  # fmt: skip
"""The fields of a layer that say what it is."""
SCALER = schema("float scale 10, float blue 20, float green 21, float red 22, float gray 30")
NETWORK = schema("bytes layers 1, before before 2", before=schema("string name 1, scaler scalers 10, bytes mean 11", scaler=SCALER))
LAYER = schema("string name 1, string inputs 2, string outputs 3, " + ", ".join(f"field what {number}" for number in NUMBERS))
MOST_LAYERS = 200_000


class Layer:
    """One layer: what it is, and its parameters."""

    def __init__(self, data: memoryview, budget: Budget) -> None:
        told = message(data, LAYER, budget)
        self.name: str = one(told, "name", "")
        self.inputs: list[str] = told.get("inputs", [])
        self.outputs: list[str] = told.get("outputs", [])
        number, wire, held = told["what"][-1] if told.get("what") else (0, 2, memoryview(b""))
        self.kind = NUMBERS.get(number, "a layer of a kind that is not known here")
        self.told: Message = message(held, SCHEMAS[self.kind], budget) if self.kind in SCHEMAS and wire == 2 else {}

    def number(self, name: str, default: float) -> float:
        return one(self.told, name, float(default))

    def whole(self, name: str, default: int = 0) -> int:
        return one(self.told, name, default)

    def pair(self, name: str, default: tuple[int, int]) -> tuple[int, int]:
        held = self.told.get(name, [])
        return (int(held[0]), int(held[1])) if len(held) == 2 else default


class Said(Transcript):
    """A network's layers as they are said; `now` has the values that were written again under one name."""

    def __init__(self) -> None:
        super().__init__()
        self.now: dict[str, str] = {}
        self.notes: list[str] = []

    def given(self, layer: Layer) -> list[str]:
        return [self.now.get(name, name) for name in layer.inputs]

    def gives(self, layer: Layer, *values: str) -> bool:
        self.now.update(zip(layer.outputs, values, strict=False))
        return True

    def weight(self, layer: Layer, field: str, shape: tuple[int, ...]) -> str:
        """Keep a layer's tensor, "" where it has none."""
        held = layer.told.get(field)
        if not held:
            return ""
        name = f"{layer.name}.{field}"
        return self.constant(name if name not in self.model.tensors else self.fresh(), described(held[-1], name, shape))


def described(told: Message, name: str, shape: tuple[int, ...]) -> Stored:
    """Describe a tensor in any of the ways that Core ML writes one."""
    count = math.prod(shape)
    if min(shape, default=0) < 0 or count > 2**40:
        raise MalformedFile(f"{name:.100} has shape {shape}")
    if "wide" in told:
        chunks: list[memoryview] = told["wide"]
        if sum(map(len, chunks)) != 4 * count:
            raise MalformedFile(f"{name:.100} of shape {shape} needs {4 * count} bytes and has {sum(map(len, chunks))}")
        return Stored(name, shape, np.dtype(np.float32), lambda: np.concatenate([np.frombuffer(c, "<f4") for c in chunks]).reshape(shape))
    if "half" in told:
        raw = told["half"][-1]
        if len(raw) != 2 * count:
            raise MalformedFile(f"{name:.100} of shape {shape} needs {2 * count} bytes and has {len(raw)}")
        return Stored(name, shape, np.dtype(np.float16), lambda: np.frombuffer(raw, "<f2").reshape(shape))
    quantised: Message = told["quantised"][-1] if told.get("quantised") else {}
    bits, raw = one(quantised, "bits", 0), told["raw"][-1] if "raw" in told else memoryview(b"")
    if not 1 <= bits <= 8 or len(raw) != (count * bits + 7) // 8:
        raise MalformedFile(f"{name:.100} of shape {shape} has {len(raw)} bytes of numbers of {bits} bits")
    origin = f"{name}, {bits} bits"
    if quantised.get("table"):
        table = np.array(quantised["table"][-1].get("values", []), np.float32)
        if len(table) != 1 << bits:
            raise MalformedFile(f"{name:.100} has a table of {len(table)} values for {bits} bits")
        return Stored(origin, shape, np.dtype(np.float32), lambda: table[_bits(raw, bits, count)].reshape(shape))
    linear: Message = quantised["linear"][-1] if quantised.get("linear") else {}
    scale, bias = (np.array(linear.get(field, []), np.float32) for field in ("scale", "bias"))
    if len(scale) not in (1, shape[0]) or len(bias) not in (0, 1, len(scale)):
        raise MalformedFile(f"{name:.100} of shape {shape} has {len(scale)} scales and {len(bias)} offsets")
    sides = [vector.reshape(-1, *(1,) * (len(shape) - 1)) if len(vector) else np.float32(0) for vector in (scale, bias)]
    return Stored(
        origin, shape, np.dtype(np.float32), lambda: _bits(raw, bits, count).reshape(shape).astype(np.float32) * sides[0] + sides[1]
    )


def _bits(raw: memoryview, bits: int, count: int) -> np.ndarray:
    """Unpack numbers of so many bits each, the highest bit first."""
    flat = np.frombuffer(raw, np.uint8)
    if bits == 8:
        return flat
    pieces = [np.unpackbits(flat[start : start + bits << 20]) for start in range(0, len(flat), bits << 20)]
    single = np.concatenate(pieces)[: count * bits].reshape(count, bits)
    return (single * (1 << np.arange(bits - 1, -1, -1, dtype=np.uint8))).sum(1, dtype=np.uint8)


def said(network: memoryview, described_: Message, budget: Budget) -> Said:
    """Say a whole network."""
    told = message(network, NETWORK, budget)
    layers = [Layer(data, budget) for data in told.get("layers", [])]
    if len(layers) > MOST_LAYERS:
        raise LimitExceeded(f"it has more than {MOST_LAYERS} layers")
    out = Said()
    for feature in described_.get("inputs", []):
        kinds = feature.get("types", [])
        images = [image for kind in kinds for image in kind.get("images", [])]
        arrays = [array for kind in kinds for array in kind.get("arrays", [])]
        name, shape = one(feature, "name", ""), tuple(arrays[-1].get("shape", [])) if arrays else ()
        if images:
            shape = (1 if one(images[-1], "space", 0) == 10 else 3, one(images[-1], "height", 0), one(images[-1], "width", 0))
        out.input(name, [None, *shape] if len(shape) in (1, 3) else shape)
    for before in told.get("before", []):
        _before(out, before, layers)
    made: set[str] = set()
    read: set[str] = set()
    for layer in layers:
        mark, handler = len(out.model.operators), HANDLERS.get(layer.kind)
        read.update(layer.inputs)
        made.update(layer.outputs)
        if handler is None or not layer.inputs or not layer.outputs or not handler(out, layer):
            del out.model.operators[mark:]
            values = [out.fresh() for _ in layer.outputs]
            out.unknown(layer.kind, out.given(layer), values, layer.name)
            out.gives(layer, *values)
    wanted = [name for feature in described_.get("outputs", []) if (name := one(feature, "name", "")) in made]
    ends: list[str] = wanted or [name for name in made if name not in read]
    out.model.outputs = list(dict.fromkeys(out.now.get(name, name) for name in ends))
    return out


def _before(out: Said, told: Message, layers: Sequence[Layer]) -> None:
    """Say what is done to an image's values: a factor, and a number that is added to each colour."""
    name = one(told, "name", "") or (layers[0].inputs[0] if layers and layers[0].inputs else "")
    if "mean" in told:
        out.notes.append("a mean image is subtracted from the input in this file, which is left out here")
    for scaler in told.get("scalers", []):
        scale = one(scaler, "scale", 1.0)
        channels = (out.model.inputs.get(name) or (None, 3))[1]
        colours = ("red", "green", "blue")
        added = [one(scaler, "gray", 0.0)] if channels == 1 else [one(scaler, colour, 0.0) for colour in colours]
        value = out.now.get(name, name)
        if scale != 1:
            value = out.add("Mul", [value, out.numbers(scale, "float32")], name=f"{name}/scale")
        if any(added):
            value = out.add("Add", [value, out.numbers(np.reshape(added, (-1, 1, 1)), "float32")], name=f"{name}/bias")
        out.now[name] = value


def _pads(layer: Layer) -> dict[str, Any]:
    if layer.told.get("same"):
        return {"auto_pad": "SAME_LOWER" if one(layer.told["same"][-1], "mode", 0) else "SAME_UPPER"}
    valid: Message = layer.told["valid"][-1] if layer.told.get("valid") else {}
    return {"pads": _edges(valid.get("borders", []))}


def _edges(borders: Sequence[Message]) -> tuple[int, int, int, int]:
    edges: list[Message] = borders[-1].get("edges", []) if borders else []
    if len(edges) not in (0, 2):
        raise MalformedFile(f"a border of {len(edges)} sides")
    sizes = [(one(edge, "start", 0), one(edge, "end", 0)) for edge in edges] or [(0, 0), (0, 0)]
    return sizes[0][0], sizes[1][0], sizes[0][1], sizes[1][1]


def conv(out: Said, layer: Layer) -> bool:
    kernel, back, group = layer.pair("kernel", (3, 3)), layer.whole("back"), layer.whole("groups") or 1
    outs, ins, pads = layer.whole("outs"), layer.whole("ins"), _pads(layer)
    if layer.told.get("shape") or min(outs, ins, *kernel) < 1 or (back and "auto_pad" in pads):
        return False
    shape = (ins, outs // group, *kernel) if back else (outs, ins, *kernel)
    weight = out.weight(layer, "weight", shape)
    bias = out.weight(layer, "bias", (outs,)) if layer.whole("biased") else ""
    how: dict[str, Any] = {"strides": layer.pair("stride", (1, 1)), "dilations": layer.pair("dilation", (1, 1)), "group": group, **pads}
    inputs = [*out.given(layer)[:1], weight, *([bias] if bias else [])]
    return bool(weight) and out.gives(layer, out.add("ConvTranspose" if back else "Conv", inputs, module=layer.name, **how))


def dense(out: Said, layer: Layer) -> bool:
    outs, ins = layer.whole("outs"), layer.whole("ins")
    weight = out.weight(layer, "weight", (outs, ins))
    bias = out.weight(layer, "bias", (outs,)) if layer.whole("biased") else ""
    x = out.add("Flatten", out.given(layer)[:1], axis=1)
    return bool(weight) and out.gives(layer, out.add("Gemm", [x, weight, *([bias] if bias else [])], module=layer.name, transB=1))


def norm(out: Said, layer: Layer) -> bool:
    if layer.whole("computed") or layer.whole("instance"):
        return False
    leaves = [out.weight(layer, field, (layer.whole("channels"),)) for field in ("gamma", "beta", "mean", "variance")]
    eps = layer.number("eps", 1e-5) or 1e-5
    return all(leaves) and out.gives(layer, out.add("BatchNormalization", [*out.given(layer)[:1], *leaves], module=layer.name, epsilon=eps))


def pool(out: Said, layer: Layer) -> bool:
    kind, kernel = layer.whole("type"), layer.pair("kernel", (3, 3))
    if kind not in (0, 1):
        return False
    x = out.given(layer)[:1]
    if layer.whole("whole"):
        return out.gives(layer, out.add("GlobalAveragePool" if kind else "GlobalMaxPool", x, name=layer.name))
    how: dict[str, Any] = {"kernel_shape": kernel, "strides": layer.pair("stride", (1, 1))}
    if layer.told.get("last"):  # as Caffe's: the last window starts inside
        pads = layer.told["last"][-1].get("pads", [])
        sides = (int(pads[0]), int(pads[1])) if len(pads) == 2 else (0, 0)
        if kind and any(sides):
            return False
        how |= {"pads": (*sides, *sides), "ceil_mode": 1}
    else:
        how |= _pads(layer)
    if kind:
        how["count_include_pad"] = int(not layer.whole("inside") and "auto_pad" not in how)
        if "auto_pad" in how and not layer.whole("inside"):
            return False  # the zeros of SAME are counted, which ONNX has no word for
    return out.gives(layer, out.add("AveragePool" if kind else "MaxPool", x, name=layer.name, **how))


def activation(out: Said, layer: Layer) -> bool:
    x = out.given(layer)[:1]
    kind = next(iter(layer.told), "")
    told: Message = layer.told[kind][-1] if kind else {}
    plain = {"relu": "Relu", "tanh": "Tanh", "sigmoid": "Sigmoid", "softplus": "Softplus"}
    if kind in plain:
        return out.gives(layer, out.add(plain[kind], x, name=layer.name))
    if kind in ("leaky", "elu"):
        op = "LeakyRelu" if kind == "leaky" else "Elu"
        return out.gives(layer, out.add(op, x, name=layer.name, alpha=one(told, "alpha", 0.0)))
    if kind == "hard":
        return out.gives(layer, out.add("HardSigmoid", x, name=layer.name, alpha=one(told, "alpha", 0.0), beta=one(told, "beta", 0.0)))
    if kind == "linear":
        return out.gives(layer, _affine(out, x[0], one(told, "alpha", 0.0), one(told, "beta", 0.0), layer.name))
    if kind == "prelu" and (held := told.get("alpha")):
        count = sum(len(chunk) for chunk in held[-1].get("wide", [])) // 4
        slope = out.constant(f"{layer.name}.alpha", described(held[-1], f"{layer.name}.alpha", (count,)))
        shaped = out.add("Reshape", [slope, out.numbers([count, 1, 1] if count > 1 else [1])])
        return out.gives(layer, out.add("PRelu", [*x, shaped], module=layer.name))
    return False


def _affine(out: Said, x: str, scale: float, shift: float, name: str) -> str:
    if scale != 1:
        x = out.add("Mul", [x, out.numbers(scale, "float32")], name=name)
    return out.add("Add", [x, out.numbers(shift, "float32")], name=name) if shift else out.add("Identity", [x])


def unary(out: Said, layer: Layer) -> bool:
    """A threshold, max(x, alpha), which with another one is ReLU6."""
    if layer.whole("type") != 7:
        return False
    scale = layer.number("scale", 1) if "scale" in layer.told else 1.0
    x = _affine(out, out.given(layer)[0], scale, layer.number("shift", 0), layer.name)
    return out.gives(layer, out.add("Max", [x, out.numbers(layer.number("alpha", 0), "float32")], name=layer.name))


def many(op: str, out: Said, layer: Layer) -> bool:
    """Values that are joined one by one; a single one with a number."""
    xs = out.given(layer)
    if len(xs) == 1:
        xs = [*xs, out.numbers(layer.number("alpha", 0), "float32")]
    value = xs[0]
    for place, other in enumerate(xs[1:]):
        value = out.add(op, [value, other], name=layer.name if place == len(xs) - 2 else "")
    return out.gives(layer, value)


def averaged(out: Said, layer: Layer) -> bool:
    return out.gives(layer, out.add("Mean", out.given(layer), name=layer.name))


def scale(out: Said, layer: Layer) -> bool:
    value = out.given(layer)[0]
    for field, sizes, op in (("scale", "shape", "Mul"), ("bias", "bias_shape", "Add")):
        shape = tuple(int(n) for n in layer.told.get("shape" if layer.kind == "bias" else sizes, []))
        held = out.weight(layer, field, shape) if shape else ""
        if held:
            value = out.add(op, [value, held], module=layer.name)
    return value != out.given(layer)[0] and out.gives(layer, value)


def concat(out: Said, layer: Layer) -> bool:
    return not layer.whole("sequence") and out.gives(layer, out.add("Concat", out.given(layer), name=layer.name, axis=1))


def split(out: Said, layer: Layer) -> bool:
    values = [out.fresh() for _ in layer.outputs]
    if layer.whole("count") != len(values):
        return False
    return out.gives(layer, *out.several("Split", out.given(layer)[:1], values, name=layer.name, axis=1))


def flatten(out: Said, layer: Layer) -> bool:
    x = out.given(layer)[0]
    value = out.last(x) if layer.whole("mode") else x
    return out.gives(layer, out.add("Flatten", [value], name=layer.name, axis=1))


def softmax(out: Said, layer: Layer) -> bool:
    return out.gives(layer, out.add("Softmax", out.given(layer)[:1], name=layer.name, axis=1))


def lrn(out: Said, layer: Layer) -> bool:
    how: dict[str, Any] = {
        "size": layer.whole("size"),
        "alpha": layer.number("alpha", 0),
        "beta": layer.number("beta", 0),
        "bias": layer.number("k", 0),
    }
    return 0 < layer.whole("size") < 10_000 and out.gives(layer, out.add("LRN", out.given(layer)[:1], name=layer.name, **how))


def margin(out: Said, layer: Layer) -> bool:
    top, left, bottom, right = _edges(layer.told.get("borders", []))
    if not layer.told.get("constant"):
        return False
    value = out.numbers(one(layer.told["constant"][-1], "value", 0.0), "float32")
    pads = out.numbers([0, 0, top, left, 0, 0, bottom, right])
    return out.gives(layer, out.add("Pad", [*out.given(layer)[:1], pads, value], name=layer.name))


def upsample(out: Said, layer: Layer) -> bool:
    tall, wide = layer.pair("factor", (1, 1))
    if layer.whole("mode"):
        return False
    how = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    inputs = [*out.given(layer)[:1], "", out.numbers([1, 1, tall, wide], "float32")]
    return out.gives(layer, out.add("Resize", inputs, name=layer.name, **how))


def reduced(out: Said, layer: Layer) -> bool:
    if layer.whole("type") != 1 or layer.whole("axis") != 1:
        return False
    return out.gives(layer, out.add("GlobalAveragePool", out.given(layer)[:1], name=layer.name))


def clip(out: Said, layer: Layer) -> bool:
    bounds = [out.numbers(layer.number(name, 0), "float32") for name in ("low", "high")]
    return out.gives(layer, out.add("Clip", [*out.given(layer)[:1], *bounds], name=layer.name))


def gelu(out: Said, layer: Layer) -> bool:
    kind = {0: "none", 1: "tanh"}.get(layer.whole("mode"))
    return kind is not None and out.gives(layer, out.add("Gelu", out.given(layer)[:1], name=layer.name, approximate=kind))


def product(out: Said, layer: Layer) -> bool:
    """A product with a matrix of the file's, which is a dense layer; one of two values is none."""
    outs, ins = layer.whole("outs"), layer.whole("ins")
    if len(layer.inputs) != 1 or layer.whole("first") or layer.whole("second"):
        return False
    weight = out.weight(layer, "weight", (ins, outs))
    bias = out.weight(layer, "bias", (outs,)) if layer.whole("biased") else ""
    inputs = [*out.given(layer)[:1], weight, *([bias] if bias else [])]
    return bool(weight) and out.gives(layer, out.add("Gemm", inputs, module=layer.name, transB=0))


def with_axis(op: str, out: Said, layer: Layer) -> bool:
    if layer.whole("interleave"):
        return False
    return out.gives(layer, out.add(op, out.given(layer), name=layer.name, axis=layer.whole("axis")))


def with_numbers(op: str, field: str, out: Said, layer: Layer) -> bool:
    """Give a value another shape, by numbers that the layer has."""
    held = layer.told.get(field, [])
    if not held or layer.whole("all"):
        return False
    return out.gives(layer, out.add(op, [*out.given(layer)[:1], out.numbers(held)], name=layer.name))


def turned(out: Said, layer: Layer) -> bool:
    perm: list[int] = layer.told.get("axes", [])
    return bool(perm) and out.gives(layer, out.add("Transpose", out.given(layer)[:1], name=layer.name, perm=tuple(perm)))


def margins(out: Said, layer: Layer) -> bool:
    pads: list[int] = layer.told.get("pads", [])
    if layer.whole("mode") or not 0 < len(pads) <= 8 or len(pads) % 2:
        return False
    pads = [0] * (8 - len(pads)) + pads
    inputs = [*out.given(layer)[:1], out.numbers([*pads[::2], *pads[1::2]]), out.numbers(layer.number("value", 0), "float32")]
    return out.gives(layer, out.add("Pad", inputs, name=layer.name))


def flatten_to_2d(out: Said, layer: Layer) -> bool:
    return out.gives(layer, out.add("Flatten", out.given(layer)[:1], name=layer.name, axis=layer.whole("axis")))


def mean(out: Said, layer: Layer) -> bool:
    axes: list[int] = layer.told.get("axes", [])
    how: dict[str, Any] = {"axes": tuple(axes), "keepdims": layer.whole("keep")}
    return bool(axes) and not layer.whole("all") and out.gives(layer, out.add("ReduceMean", out.given(layer)[:1], name=layer.name, **how))


HANDLERS: dict[str, Callable[[Said, Layer], bool]] = {
    "convolution": conv,
    "innerProduct": dense,
    "batchnorm": norm,
    "pooling": pool,
    "activation": activation,
    "unary": unary,
    "add": partial(many, "Add"),
    "multiply": partial(many, "Mul"),
    "max": partial(many, "Max"),
    "average": averaged,
    "scale": scale,
    "bias": scale,
    "concat": concat,
    "split": split,
    "flatten": flatten,
    "softmax": softmax,
    "lrn": lrn,
    "padding": margin,
    "upsample": upsample,
    "reduce": reduced,
    "clip": clip,
    "gelu": gelu,
    "addBroadcastable": partial(many, "Add"),
    "multiplyBroadcastable": partial(many, "Mul"),
    "subtractBroadcastable": partial(many, "Sub"),
    "divideBroadcastable": partial(many, "Div"),
    "maxBroadcastable": partial(many, "Max"),
    "softmaxND": partial(with_axis, "Softmax"),
    "concatND": partial(with_axis, "Concat"),
    "transpose": turned,
    "batchedMatmul": product,
    "squeeze": partial(with_numbers, "Squeeze", "axes"),
    "expandDims": partial(with_numbers, "Unsqueeze", "axes"),
    "flattenTo2D": flatten_to_2d,
    "reshapeStatic": partial(with_numbers, "Reshape", "shape"),
    "constantPad": margins,
    "reduceMean": mean,
}
