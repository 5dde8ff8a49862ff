"""What a file says its network computes: layers in order, each with the source framework's own conventions.

A graph holds no tensors; a layer's tensors are those of the module of its name in `convert.source.Source.tensors`. Where a file
carries no graph there is none, and nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

OPS: dict[str, str] = {
    "input": "layout: 'nchw' or 'nhwc'; shape: without the batch, None where free",
    "conv": "layout of the stored kernel ('HWIO'), convention, stride (h, w), pads, dilation (h, w), groups",
    "depthwise": "as conv, layout with C and M ('HWCM')",
    "transposed": "as conv, and output_padding (h, w); pads are those that the forward convolution would have",
    "dense": "layout 'IO' or 'OI'",
    "norm": "eps; moment: 'variance' (x - m) / sqrt(v + eps), 'std' (x - m) / s, 'std+eps' (x - m) / (s + eps), "
    "'sqrt+eps' (x - m) / (sqrt(v) + eps), 'inv_std' (x - m) * s; factor: what mean and variance are divided by, 1",
    "scale": "weight and bias of each channel, without statistics",
    "relu": "",
    "relu6": "",
    "leaky_relu": "slope",
    "prelu": "the module's weight is the slope of each channel",
    "elu": "alpha",
    "sigmoid": "",
    "hardsigmoid": "clip(x * alpha + beta, 0, 1); PyTorch's and Keras 3's is alpha 1/6, beta 1/2",
    "hardswish": "",
    "tanh": "",
    "silu": "",
    "gelu": "approximate: bool",
    "softplus": "",
    "softmax": "over the channels",
    "clip": "low, high",
    "maxpool": "kernel (h, w), stride (h, w), pads, rounding: 'floor', 'ceil' or 'caffe' (ceil, the last window starts inside)",
    "avgpool": "as maxpool, and count_pad: 'none', 'all' or 'caffe'",
    "global_avgpool": "keepdims: bool",
    "global_maxpool": "keepdims: bool",
    "add": "",
    "sub": "",
    "mul": "broadcasts (B, C, 1, 1) over the pixels",
    "maximum": "",
    "average": "",
    "concat": "over the channels, in the order of the inputs",
    "pad": "pads, value",
    "crop": "pads",
    "slice": "start, stop of the channels",
    "flatten": "order: 'chw', 'hwc'; of a map (B, C, H, W), which is how the executor holds every map",
    "reshape": "shape without the batch, -1 where free, in the order of layout: 'nchw' or 'nhwc'; three axes make a map",
    "upsample": "factor (h, w), mode 'nearest' or 'bilinear'",
    "lrn": "size, alpha, beta, k: x / (k + alpha / size * sum of squares over size channels) ** beta",
    "affine": "x * scale + offset, numbers or a number per channel: pixels to what the network was trained on",
    "permute_channels": "order: channel i of the result is channel order[i] of the input",
    "identity": "dropout and the like",
}
"""Every kind of layer, and its attributes. ``pads`` is (top, left, bottom, right), "same_upper" (TensorFlow: the odd pixel at the
end), "same_lower" or "valid"; missing attributes are stride 1, pads 0, dilation 1, groups 1. An operation that a format has
and this list has not becomes "unknown:ItsName", which nothing executes."""


@dataclass(frozen=True, slots=True)
class Node:
    """One layer.

    Attributes:
        name: unique; the module of its tensors, where it has any.
        op: a key of `OPS`, or "unknown:…".
        inputs: names of the layers that it reads, in order.
        attrs: as `OPS` says.
    """

    name: str
    op: str
    inputs: tuple[str, ...] = ()
    attrs: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def may_shift(self) -> bool:
        """Whether it may add numbers of the file to what it reads, as a bias does."""
        return self.op in ("affine", "scale") or self.op not in OPS or (self.op in ("add", "sub", "mul") and len(self.inputs) < 2)


@dataclass(frozen=True, slots=True)
class Graph:
    """Layers in an order in which they can be computed; `outputs` names those whose values are the network's."""

    nodes: tuple[Node, ...]
    outputs: tuple[str, ...]

    def __post_init__(self) -> None:
        known: set[str] = set()
        for node in self.nodes:
            if node.name in known:
                raise ValueError(f"two layers are called {node.name!r}")
            if absent := [name for name in node.inputs if name not in known]:
                raise ValueError(f"layer {node.name!r} reads {absent[0]!r}, which no layer before it is")
            known.add(node.name)
        if absent := [name for name in self.outputs if name not in known]:
            raise ValueError(f"the output {absent[0]!r} is no layer")

    @property
    def unknown(self) -> list[str]:
        """What nothing here can execute, by the format's own words."""
        return sorted({node.op.removeprefix("unknown:") for node in self.nodes if node.op not in OPS})
