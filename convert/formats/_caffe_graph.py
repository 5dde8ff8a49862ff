"""What a Caffe network computes, from its layers: windows, flattening and sums as Caffe means them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from convert.formats._caffe_layers import CONVOLUTIONS, INPUTS, NOBODYS, NORMS, Layer, factor
from convert.formats._caffe_schema import Message, one, word
from convert.graph import Graph, Node
from convert.kinds import is_dict

PLAIN = {"Sigmoid": "sigmoid", "TanH": "tanh", "Dropout": "identity", "ReLU6": "relu6", "PReLU": "prelu", "Mish": "unknown:Mish"}
READ: dict[str, tuple[str, str, dict[str, tuple[str, float]]]] = {
    "ELU": ("elu", "elu_param", {"alpha": ("alpha", 1.0)}),
    "Clip": ("clip", "clip_param", {"low": ("min", -math.inf), "high": ("max", math.inf)}),
    "Power": ("affine", "power_param", {"scale": ("scale", 1.0), "offset": ("shift", 0.0)}),
    "LRN": ("lrn", "lrn_param", {"size": ("local_size", 5), "alpha": ("alpha", 1.0), "beta": ("beta", 0.75), "k": ("k", 1.0)}),
}
"""Layers of one input that their own numbers describe: the operation, their message, and of each attribute its field and default."""
KEEPS = ("relu", "relu6", "leaky_relu", "prelu", "elu", "sigmoid", "tanh", "softmax", "clip", "affine", "identity", "norm", "scale", "lrn")
"""Operations whose result has as many channels, and is as flat, as what they read."""


def graph(net: Message, layers: Sequence[Layer]) -> Graph:
    """Build the graph of a network's layers.

    Args:
        net: the description, for the inputs that it declares.
        layers: as `convert.formats._caffe_layers.layers` lists them.
    """
    return _Builder(net, layers).build()


def fed_channels(net: Message, layers: Sequence[Layer]) -> Mapping[str, int | None]:
    """Tell how many channels each layer reads from its first input, as far as the layers say it."""
    builder = _Builder(net, layers)
    builder.build()
    return builder.fed


class _Builder:
    def __init__(self, net: Message, layers: Sequence[Layer]) -> None:
        self.layers = layers
        self.nodes: dict[str, Node] = {}
        self.outputs: dict[tuple[str, int], str] = {}
        self.channels: dict[str, int | None] = {}
        self.fed: dict[str, int | None] = {}
        self.flat: set[str] = set()
        self.permuted: set[str] = set()
        self.read: set[str] = set()
        self.declared = declared(net)
        self.names = {layer.name for layer in layers if layer.kind not in INPUTS}

    def build(self) -> Graph:
        for layer in self.layers:
            if layer.kind in INPUTS:
                for index, top in enumerate(layer.tops):
                    shape = _input_shape(layer, index)
                    self.outputs[layer.name, index] = top
                    self.declared.setdefault(top, shape)
                continue
            inputs = [self.input(bottom) for bottom in layer.bottoms]
            self.fed[layer.name] = self.channels.get(inputs[0]) if inputs else None
            self.read.update(inputs)
            self.add(layer, inputs)
            self.read.update(inputs)  # once more: a sum puts its scaled summands in their place
            if layer.name in self.nodes:
                self.outputs.setdefault((layer.name, 0), layer.name)
        used = {name for node in self.nodes.values() for name in node.inputs}
        for name in self.permuted & self.read - used:  # whoever read it has taken its order into its own
            del self.nodes[name]
        ends = [name for name, node in self.nodes.items() if name not in self.read | used and node.op != "input"]
        return Graph(tuple(self.nodes.values()), tuple(ends))

    def input(self, bottom: tuple[str, int]) -> str:
        """Name the node that a layer reads; what no layer makes is an input of the network."""
        name = self.outputs.get(bottom, bottom[0])
        shape = self.declared.get(name, ())
        if bottom[1] == NOBODYS and name in self.names:
            name += ":input"
        if name not in self.nodes:
            self.put(Node(name, "input", (), {"layout": "nchw", "shape": shape or (None, None, None)}), shape[0] if shape else None)
        return name

    def put(self, node: Node, channels: int | None = None) -> None:
        self.nodes[node.name] = node
        if node.inputs and (node.op in KEEPS or node.op.endswith("pool")):
            channels = self.channels.get(node.inputs[0])
            if node.op in KEEPS and node.inputs[0] in self.flat:
                self.flat.add(node.name)
        self.channels[node.name] = channels

    def add(self, layer: Layer, inputs: list[str]) -> None:
        kinds: Mapping[str, Callable[[Layer, list[str]], None]] = {
            **dict.fromkeys(CONVOLUTIONS, self.convolution),
            **dict.fromkeys(NORMS, self.norm),
            "Deconvolution": self.convolution,
            "InnerProduct": self.dense,
            "Pooling": self.pooling,
            "Eltwise": self.eltwise,
            "Slice": self.slice,
            "Scale": self.scale,
            "Axpy": self.axpy,
            "Permute": self.permute,
            "Flatten": self.flatten,
            "Reshape": self.reshape,
            "Concat": self.concat,
        }
        if layer.kind in kinds and inputs:
            kinds[layer.kind](layer, inputs)
        else:
            self.put(Node(layer.name, *_simple(layer, inputs)))

    def convolution(self, layer: Layer, inputs: list[str]) -> None:
        p = _param(layer, "convolution_param")
        channels = one(p, "num_output", 0) or None
        transposed = layer.kind == "Deconvolution"
        groups = one(p, "group", 1)
        if layer.kind not in ("Convolution", "Deconvolution") and "group" not in p:
            groups = self.channels.get(inputs[0]) or channels or 1
        top, left = _pair(p, "pad", 0)
        attrs = {
            "layout": "IOHW" if transposed else "OIHW",
            "convention": "correlation",
            "stride": _pair(p, "stride", 1),
            "pads": (top, left, top, left),
            "dilation": _pair(p, "dilation", 1),
            "groups": groups,
        }
        if transposed:
            attrs["output_padding"] = (0, 0)
        if one(p, "axis", 1) != 1 or (layer.blobs and len(layer.blobs[0].shape) != 4):
            self.put(Node(layer.name, f"unknown:{layer.kind} over other than two axes", tuple(inputs[:1])), channels)
        else:
            self.put(Node(layer.name, "transposed" if transposed else "conv", tuple(inputs[:1]), attrs), channels)

    def dense(self, layer: Layer, inputs: list[str]) -> None:
        p = _param(layer, "inner_product_param")
        source = inputs[0]
        if source not in self.flat:
            source = f"{layer.name}.flatten"
            self.put(Node(source, "flatten", (inputs[0],), {"order": "chw"}))
        if one(p, "axis", 1) != 1:
            self.put(Node(layer.name, "unknown:InnerProduct over some axes", (source,)))
        else:
            layout = "IO" if one(p, "transpose", False) else "OI"
            self.put(Node(layer.name, "dense", (source,), {"layout": layout}), one(p, "num_output", 0) or None)
        self.flat.add(layer.name)

    def norm(self, layer: Layer, inputs: list[str]) -> None:
        eps = one(_param(layer, "batch_norm_param"), "eps", 1e-5)
        self.put(Node(layer.name, "norm", tuple(inputs[:1]), {"eps": eps, "moment": "variance", "factor": factor(layer)}))

    def pooling(self, layer: Layer, inputs: list[str]) -> None:
        p = _param(layer, "pooling_param")
        kind = {"MAX": "maxpool", "AVE": "avgpool"}.get(word(p, "pool", ("MAX", "AVE", "STOCHASTIC")))
        if kind is None:
            self.put(Node(layer.name, "unknown:stochastic Pooling", tuple(inputs[:1])))
        elif one(p, "global_pooling", False):
            self.put(Node(layer.name, f"global_{kind}", tuple(inputs[:1]), {"keepdims": True}))
        else:
            floor = word(p, "round_mode", ("CEIL", "FLOOR")) == "FLOOR" or not one(p, "ceil_mode", True)
            top, left = _pair(p, "pad", 0)
            attrs = {
                "kernel": _pair(p, "kernel_size", 1, "kernel"),
                "stride": _pair(p, "stride", 1),
                "pads": (top, left, top, left),
                "rounding": "floor" if floor else "caffe",
            }
            self.put(Node(layer.name, kind, tuple(inputs[:1]), attrs if kind == "maxpool" else {**attrs, "count_pad": "caffe"}))

    def eltwise(self, layer: Layer, inputs: list[str]) -> None:
        p = _param(layer, "eltwise_param")
        operation = word(p, "operation", ("PROD", "SUM", "MAX")) if "operation" in p else "SUM"
        coefficients = [float(c) for c in p.get("coeff", [])]
        op = {"PROD": "mul", "SUM": "add", "MAX": "maximum"}.get(operation, f"unknown:Eltwise {operation}")
        if op == "add" and coefficients and len(coefficients) == len(inputs) and set(coefficients) != {1.0}:
            if coefficients == [1.0, -1.0]:
                op = "sub"
            else:
                for index, coefficient in enumerate(coefficients):
                    if coefficient != 1:
                        scaled = f"{layer.name}.times{index}"
                        self.put(Node(scaled, "affine", (inputs[index],), {"scale": coefficient, "offset": 0.0}))
                        inputs[index] = scaled
        self.put(Node(layer.name, op, tuple(inputs)), self.channels.get(inputs[0]))
        self._as_flat(layer.name, inputs)

    def scale(self, layer: Layer, inputs: list[str]) -> None:
        if len(inputs) == 2:  # a gate: the second blob is the factor
            self.put(Node(layer.name, "mul", tuple(inputs)), self.channels.get(inputs[0]))
        else:
            op = "scale" if one(_param(layer, "scale_param"), "axis", 1) == 1 else "unknown:Scale of another axis"
            self.put(Node(layer.name, op, tuple(inputs[:1])))

    def axpy(self, layer: Layer, inputs: list[str]) -> None:
        """Squeeze-and-excitation's own: gate times map plus shortcut."""
        if len(inputs) != 3:
            self.put(Node(layer.name, "unknown:Axpy", tuple(inputs)))
            return
        self.put(Node(f"{layer.name}.times", "mul", (inputs[1], inputs[0])), self.channels.get(inputs[1]))
        self.put(Node(layer.name, "add", (f"{layer.name}.times", inputs[2])), self.channels.get(inputs[1]))

    def slice(self, layer: Layer, inputs: list[str]) -> None:
        p = _param(layer, "slice_param")
        channels = self.channels.get(inputs[0])
        points = [int(point) for point in p.get("slice_point", [])]
        count = max(1, len(layer.tops))
        if not points and channels:
            points = [channels // count * index for index in range(1, count)]
        if one(p, "axis", one(p, "slice_dim", 1)) != 1 or len(points) != count - 1:
            self.put(Node(layer.name, "unknown:Slice", tuple(inputs[:1])))
            return
        for index, (start, stop) in enumerate(zip([0, *points], [*points, channels], strict=True)):
            name = f"{layer.name}:{index}"
            self.put(Node(name, "slice", tuple(inputs[:1]), {"start": start, "stop": stop}), stop - start if stop is not None else None)
            self.outputs[layer.name, index] = name

    def concat(self, layer: Layer, inputs: list[str]) -> None:
        p = _param(layer, "concat_param")
        widths = [self.channels.get(name) for name in inputs]
        channels = sum(width or 0 for width in widths) if all(widths) else None
        op = "concat" if one(p, "axis", one(p, "concat_dim", 1)) == 1 else "unknown:Concat of another axis"
        self.put(Node(layer.name, op, tuple(inputs)), channels)
        self._as_flat(layer.name, inputs)

    def permute(self, layer: Layer, inputs: list[str]) -> None:
        """Channels to the end: detectors do so before they flatten, which the flattening can say as its order."""
        self.put(Node(layer.name, "unknown:Permute", tuple(inputs[:1])))
        if [int(axis) for axis in _param(layer, "permute_param").get("order", [])] == [0, 2, 3, 1]:
            self.permuted.add(layer.name)

    def flatten(self, layer: Layer, inputs: list[str]) -> None:
        p = _param(layer, "flatten_param")
        if one(p, "axis", 1) != 1 or one(p, "end_axis", -1) not in (-1, 3):
            self.put(Node(layer.name, "unknown:Flatten of some axes", tuple(inputs[:1])))
            return
        source, last = self._unpermuted(inputs[0])
        self.put(Node(layer.name, "flatten", (source,), {"order": "hwc" if last else "chw"}))
        self.flat.add(layer.name)

    def reshape(self, layer: Layer, inputs: list[str]) -> None:
        p = _param(layer, "reshape_param")
        dims = [int(dim) for dim in one(p, "shape", {}).get("dim", [])]
        source, last = self._unpermuted(inputs[0])
        if len(dims) > 1 and dims[1] == 0 and not last:
            dims[1] = self.channels.get(source) or 0
        if one(p, "axis", 0) != 0 or one(p, "num_axes", -1) != -1 or not dims or dims[0] not in (0, 1, -1) or 0 in dims[1:]:
            self.put(Node(layer.name, "unknown:Reshape", tuple(inputs[:1])))
            return
        attrs = {"shape": tuple(dims[1:]), "layout": "nhwc" if last else "nchw"}
        self.put(Node(layer.name, "reshape", (source,), attrs), dims[1] if len(dims) > 1 and not last else None)
        if len(dims) == 2:
            self.flat.add(layer.name)

    def _unpermuted(self, name: str) -> tuple[str, bool]:
        """Tell what a Permute to channels last reads, and that it was one; any other layer itself."""
        return (self.nodes[name].inputs[0], True) if name in self.permuted else (name, False)

    def _as_flat(self, name: str, inputs: Sequence[str]) -> None:
        if inputs and all(source in self.flat for source in inputs):
            self.flat.add(name)


def _simple(layer: Layer, inputs: Sequence[str]) -> tuple[str, tuple[str, ...], Mapping[str, Any]]:
    """Tell the operation of a layer that reads one value and needs nothing but its own parameters."""
    reads = tuple(inputs[:1])
    if layer.kind in PLAIN:
        return PLAIN[layer.kind], reads, {}
    if layer.kind == "ReLU":
        slope = one(_param(layer, "relu_param"), "negative_slope", 0.0)
        return ("leaky_relu", reads, {"slope": slope}) if slope else ("relu", reads, {})
    if layer.kind == "Softmax":
        axis = one(_param(layer, "softmax_param"), "axis", 1)
        return "softmax" if axis == 1 else f"unknown:Softmax over axis {axis}", reads, {}
    if layer.kind == "Bias" and len(inputs) == 1:
        return "scale", reads, {}
    if layer.kind == "Padding":
        pad = one(_param(layer, "pooling_param"), "pad", 0)
        return "pad", reads, {"pads": (pad, pad, pad, pad), "value": 0.0}
    if layer.kind in READ:
        op, message, fields = READ[layer.kind]
        p = _param(layer, message)
        across = word(p, "norm_region", ("ACROSS_CHANNELS", "WITHIN_CHANNEL")) == "ACROSS_CHANNELS"
        if one(p, "power", 1.0) == 1 and across:  # else nothing here computes it
            return op, reads, {ours: one(p, field, default) for ours, (field, default) in fields.items()}
    return f"unknown:{layer.kind}", tuple(inputs), {}


def declared(net: Message) -> dict[str, tuple[int, ...]]:
    """Tell the inputs that a network declares outside its layers, with their shapes less the batch, as far as it says them."""
    names = [str(name) for name in net.get("input", [])]
    dims = [int(dim) for dim in net.get("input_dim", [])]
    shapes = [[int(dim) for dim in shape.get("dim", [])] for shape in net.get("input_shape", []) if is_dict(shape)]
    shapes = shapes or [dims[index : index + 4] for index in range(0, len(dims), 4)]
    shapes += [[]] * (len(names) - len(shapes))
    return {name: tuple(shape[1:]) for name, shape in zip(names, shapes, strict=False)}


def _input_shape(layer: Layer, index: int) -> tuple[int, ...]:
    shapes = _param(layer, "input_param").get("shape", [])
    if not shapes:
        return ()
    shape = shapes[min(index, len(shapes) - 1)]
    return tuple(int(dim) for dim in shape.get("dim", [])[1:]) if is_dict(shape) else ()


def _param(layer: Layer, name: str) -> Message:
    return one(layer.message, name, {})


def _pair(message: Message, name: str, default: int, stem: str = "") -> tuple[int, int]:
    """Return a setting of height and width, which Caffe has as one number, as two, or under names of their own."""
    stem = stem or name
    if f"{stem}_h" in message or f"{stem}_w" in message:
        return one(message, f"{stem}_h", default), one(message, f"{stem}_w", default)
    values = [int(value) for value in message.get(name, [])]
    return (values[0], values[-1]) if values else (default, default)
