"""What a Darknet network computes, from the sections of its .cfg."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from convert.formats._darknet_cfg import Section
from convert.graph import Graph, Node

ACTIVATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "leaky": ("leaky_relu", {"slope": 0.1}),
    "relu": ("relu", {}),
    "relu6": ("relu6", {}),
    "logistic": ("sigmoid", {}),
    "tanh": ("tanh", {}),
    "elu": ("elu", {"alpha": 1.0}),
    "swish": ("silu", {}),
}
HEADS = ("yolo", "region", "detection", "gaussian_yolo", "cost")
"""What reads the results; the network ends before them."""


def graph(sections: Sequence[Section], *, alexey: bool, transposed: bool) -> Graph:
    """Build the graph.

    Args:
        sections: of the description, [net] first.
        alexey: whether AlexeyAB's Darknet trained it, which adds 1e-5 to a variance; pjreddie's adds 1e-6 to its root.
        transposed: dense weights lie (inputs, outputs).
    """
    builder = _Builder(alexey, "IO" if transposed else "OI")
    builder.put("input", "input", (), {"layout": "nchw", "shape": sections[0].makes})
    builder.made[-1] = "input"
    builder.widths = {-1: sections[0].makes[0]} | {section.index: section.makes[0] for section in sections[1:]}
    for section in sections[1:]:
        builder.add(section)
    read = {name for node in builder.nodes.values() for name in node.inputs} - builder.heads
    ends = [name for name in builder.nodes if name not in read and name != "input"]
    return Graph(tuple(builder.nodes.values()), tuple(ends))


class _Builder:
    def __init__(self, alexey: bool, dense: str) -> None:
        self.dense = dense
        self.eps = {"eps": 1e-5, "moment": "variance"} if alexey else {"eps": 1e-6, "moment": "sqrt+eps"}
        self.nodes: dict[str, Node] = {}
        self.made: dict[int, str] = {}
        self.heads: set[str] = set()
        self.widths: dict[int, int] = {}

    def put(self, name: str, op: str, inputs: Sequence[str], attrs: dict[str, Any] | None = None) -> str:
        self.nodes[name] = Node(name, op, tuple(inputs), attrs or {})
        return name

    def add(self, section: Section) -> None:
        name = str(section.index)
        inputs = [self.made[index] for index in section.feeds]
        if section.kind in HEADS:
            self.heads.update(inputs)
            self.made[section.index] = inputs[0]
            return
        made = self.layer(section, name, inputs)
        if section.number("batch_normalize") and section.kind in ("convolutional", "deconvolutional", "connected"):
            made = self.put(f"{name}.norm", "norm", [made], dict(self.eps))
        default = "logistic" if section.kind in ("convolutional", "connected", "deconvolutional", "local") else "linear"
        activation = section.settings.get("activation", default)
        if activation != "linear":
            op, attrs = ACTIVATIONS.get(activation, (f"unknown:{activation}", {}))
            made = self.put(f"{name}.{activation}", op, [made], dict(attrs))
        self.made[section.index] = made

    def layer(self, section: Section, name: str, inputs: list[str]) -> str:
        kind, stride = section.kind, section.stride
        if kind in ("convolutional", "deconvolutional"):
            return self.convolution(section, name, inputs)
        if kind == "connected":
            if section.reads[1] * section.reads[2] != 1 or not inputs[0].endswith(("dense", "flatten")):
                inputs = [self.put(f"{name}.flatten", "flatten", inputs, {"order": "chw"})]
            return self.put(f"{name}.dense", "dense", inputs, {"layout": self.dense})
        if kind == "batchnorm":
            return self.put(f"{name}.norm", "norm", inputs, dict(self.eps))
        if kind == "maxpool" and not section.number("maxpool_depth"):
            size = section.number("size", stride[0])
            pad = section.number("padding", size - 1)
            first, last = pad // 2, pad - pad // 2
            attrs = {"kernel": (size, size), "stride": stride, "pads": (first, first, last, last), "rounding": "floor"}
            return self.put(f"{name}.maxpool", "maxpool", inputs, attrs)
        if kind == "avgpool":
            return self.put(f"{name}.avgpool", "global_avgpool", inputs, {"keepdims": True})
        if kind == "upsample" and section.number("stride", 2) > 0 and float(section.settings.get("scale", 1)) == 1:
            factor = section.number("stride", 2)
            return self.put(f"{name}.upsample", "upsample", inputs, {"factor": (factor, factor), "mode": "nearest"})
        if kind == "route":
            return self.route(section, name, inputs)
        if kind == "shortcut":
            alike = len({section.reads, section.makes}) == 1 and section.settings.get("weights_type", "none") == "none"
            return self.put(f"{name}.shortcut", "add" if alike else "unknown:shortcut with weights", inputs)
        if kind == "dropout":
            return self.put(f"{name}.dropout", "identity", inputs)
        if kind == "softmax" and section.number("groups", 1) == 1:
            return self.put(f"{name}.softmax", "softmax", inputs)
        if kind == "activation":
            return inputs[0]
        return self.put(f"{name}.{kind}", f"unknown:{kind}", inputs)

    def convolution(self, section: Section, name: str, inputs: list[str]) -> str:
        dilation = section.number("dilation", 1)
        pad = section.padding * dilation
        transposed = section.kind == "deconvolutional"
        attrs = {
            "layout": "IOHW" if transposed else "IHWO" if section.number("flipped") else "OIHW",
            "convention": "correlation",
            "stride": section.stride,
            "pads": (pad, pad, pad, pad),
            "dilation": (dilation, dilation),
            "groups": section.number("groups", 1),
        }
        if transposed:
            attrs["output_padding"] = (0, 0)
        unusual = [key for key in ("antialiasing", "share_index", "binary", "xnor", "deform", "rotate") if section.number(key)]
        op = f"unknown:convolution with {unusual[0]}" if unusual else "transposed" if transposed else "conv"
        return self.put(f"{name}.conv", op, inputs, attrs)

    def route(self, section: Section, name: str, inputs: list[str]) -> str:
        groups, which = section.number("groups", 1), section.number("group_id")
        parts = list(inputs)
        for place, feed in enumerate(section.feeds if groups > 1 else ()):  # each map gives its own part
            width = self.widths[feed] // groups
            cut = {"start": which * width, "stop": (which + 1) * width}
            parts[place] = self.put(f"{name}.group{place or ''}", "slice", [inputs[place]], cut)
        return self.put(f"{name}.route", "concat", parts) if len(parts) > 1 else parts[0]
