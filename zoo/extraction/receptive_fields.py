"""What a graph's tensors are without running it: channels, stride and receptive field, from the layers' own numbers.

Source for the arithmetic: Araujo, Norris & Sim 2019, Computing Receptive Fields of Convolutional Neural Networks, section 2
(https://distill.pub/2019/computing-receptive-fields), here with intervals, so that branches that are shifted against each other count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from zoo.extraction.dilated_layers import AtrousAvgPool2d, AtrousAvgPoolSame, AtrousConv2d, AtrousMaxPool2d
from zoo.extraction.shapes import values
from zoo.networks.layers import AvgPoolSame, Conv2dEven, Conv2dSame, MaxPoolSame, PaddedShortcut, Permute, SpaceToDepth
from zoo.networks.model import Model

Pair = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Window:
    """What a layer reads for one output, on the axes (height, width): `size` elements `dilation` apart, the first `before` the output."""

    size: Pair
    stride: Pair
    dilation: Pair
    before: Pair


@dataclass(frozen=True, slots=True)
class Reach:
    """One axis: element i depends on the pixels from ``first + i * step`` to ``last + i * step``."""

    first: int = 0
    last: int = 0
    step: int = 1

    def through(self, window: Window, axis: int) -> Reach:
        """Return the reach of a layer's output."""
        first = self.first - window.before[axis] * self.step
        span = (window.size[axis] - 1) * window.dilation[axis] * self.step
        return Reach(first, self.last - window.before[axis] * self.step + span, self.step * window.stride[axis])


@dataclass(frozen=True, slots=True)
class Field:
    """What one tensor is.

    Attributes:
        shape: for one image of the network's own size, the batch axis left out; None where nothing tells.
        axis: which axis of the tensor is the channels'.
        reach: on (height, width) of a map; None where elements have no place in the image any more, behind a global pool or in tokens.
        unknown: of a map whose places are not known, the layer behind which they are not, and why; "" elsewhere.
    """

    shape: tuple[int, ...] | None = None
    axis: int = 1
    reach: tuple[Reach, Reach] | None = None
    unknown: str = ""

    @property
    def channels(self) -> int | None:
        """How many channels there are."""
        return self.shape[self.axis - 1] if self.shape is not None and self.axis <= len(self.shape) else None

    @property
    def sides(self) -> tuple[int, int] | None:
        """Height and width of a map."""
        if self.shape is None or len(self.shape) != 3:
            return None
        height, width = (size for axis, size in enumerate(self.shape, start=1) if axis != self.axis)
        return height, width

    @property
    def stride(self) -> int | None:
        """Pixels of the image between neighbours."""
        return self.reach[0].step if self.reach else None

    @property
    def receptive_field(self) -> int | None:
        """Pixels on the longer side of what one element sees."""
        return max(axis.last - axis.first + 1 for axis in self.reach) if self.reach else None


def window(layer: nn.Module) -> Window | None:
    """Return what a convolution or pool reads; None for any other layer.

    TensorFlow's SAME padding depends on the image's size; it is taken as for sizes that the strides divide.
    """
    if isinstance(layer, AtrousAvgPool2d | AtrousAvgPoolSame | AtrousConv2d | AtrousMaxPool2d):
        return Window(_pair(layer.kernel_size), (1, 1), _pair(layer.dilation), layer.before)
    if isinstance(layer, PaddedShortcut):
        return Window((1, 1), (layer.stride, layer.stride), (1, 1), (0, 0))
    if isinstance(layer, SpaceToDepth):
        return Window((2, 2), (2, 2), (1, 1), (0, 0))
    if isinstance(layer, nn.ZeroPad2d):
        left, right, top, bottom = layer.padding
        if (left, top) == (-right, -bottom):  # a shift, which is no padding
            return Window((1, 1), (1, 1), (1, 1), (top, left))
        return None
    if isinstance(layer, nn.Conv2d | nn.MaxPool2d | nn.AvgPool2d):
        size, stride = _pair(layer.kernel_size), _pair(layer.stride)
        dilation = (1, 1) if isinstance(layer, nn.AvgPool2d) else _pair(layer.dilation)
        if isinstance(layer, AvgPoolSame | Conv2dSame | Conv2dEven | MaxPoolSame) or layer.padding == "same":
            reach = [(k - 1) * d + 1 for k, d in zip(size, dilation, strict=True)]
            before = [max(r - s, 0) // 2 for r, s in zip(reach, stride, strict=True)]
            return Window(size, stride, dilation, (before[0], before[1]))
        return Window(size, stride, dilation, (0, 0) if layer.padding == "valid" else _pair(layer.padding))
    return None


def fields(graph: fx.Graph, network: Model) -> dict[fx.Node, Field]:
    """Tell for every node of a graph what its tensor is; the graph's input is an image.

    Shapes are computed, so that no layer needs a rule for them. A layer that is neither a convolution nor a pool, and whose output
    has the height and width of its input, leaves pixels where they are. Behind any other layer places are unknown.
    """
    layers, made = dict(network.named_modules()), values(graph, network)
    known: dict[fx.Node, Field] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            known[node] = Field(tuple(made[node].shape[1:]), 1, (Reach(), Reach()))
        elif node.op != "output":
            known[node] = _field(node, made[node], [known[n] for n in node.all_input_nodes], layers)
    return known


def _field(node: fx.Node, value: Any, inputs: list[Field], layers: Mapping[str, nn.Module]) -> Field:
    """Describe the tensor of one node."""
    behind = next((x.unknown for x in inputs if x.unknown), "")
    if isinstance(value, Exception):
        why = f"its shape can't be computed ({type(value).__name__})"
        return Field(unknown=behind or _said(node, layers, why))
    if not isinstance(value, Tensor) or value.dim() < 2:
        return Field(unknown=behind)
    shape = tuple(value.shape[1:])
    layer = layers[str(node.target)] if node.op == "call_module" else None
    made = Field(shape, _axis(node, layer, len(shape), inputs))
    if made.sides is None or node.op == "get_attr":
        return made
    if behind:
        return replace(made, unknown=behind)
    maps = [x for x in inputs if x.reach]
    if layer is not None and (read := window(layer)) is not None:
        reach = inputs[0].reach
        return replace(made, reach=(reach[0].through(read, 0), reach[1].through(read, 1)) if reach else None)
    if isinstance(layer, nn.AdaptiveAvgPool2d | nn.AdaptiveMaxPool2d) or node.target in ADAPTIVE:
        return made
    if node.target in REDUCTIONS and made.sides == (1, 1):
        return made
    if not maps:  # a gate, behind a global pool; what makes a map of tokens or vectors places them again, and nothing says where
        placed = all(x.sides == made.sides for x in inputs if x.shape is not None and len(x.shape) == 3)
        return made if inputs and placed and any(x.sides for x in inputs) else replace(made, unknown=_said(node, layers, "it makes a map"))
    if any(x.sides != made.sides for x in maps):
        return replace(made, unknown=_said(node, layers, f"its output is {made.sides} for a map of {maps[0].sides}"))
    return replace(made, reach=_join(maps))


def _axis(node: fx.Node, layer: nn.Module | None, rank: int, inputs: list[Field]) -> int:
    """Tell which axis of a node's output is the channels'; `rank` is without the batch."""
    before = next((x for x in inputs if x.shape is not None), None)
    if before is None or before.shape is None:
        return 1 if rank != 2 else 2
    old = len(before.shape)
    if isinstance(layer, Permute):
        return layer.dims.index(before.axis)
    if node.target in ("permute", torch.permute) and rank == old:
        dims = node.args[1] if isinstance(node.args[1], tuple | list) else node.args[1:]
        return [int(d) % (rank + 1) for d in dims].index(before.axis)  # pyright: ignore[reportArgumentType]
    if node.target in ("transpose", torch.transpose) and rank == old:
        one, other = (int(d) % (rank + 1) for d in node.args[1:3])  # pyright: ignore[reportArgumentType]
        return {one: other, other: one}.get(before.axis, before.axis)
    if rank == old:
        return before.axis
    if rank == 2 and old == 3 and before.axis == 1 and node.target in ("flatten", torch.flatten):
        return 1  # (B, C, H * W)
    return 2 if rank == 2 else 1


def _join(inputs: list[Field]) -> tuple[Reach, Reach] | None:
    """Describe what is made of several maps, pixel by pixel; None where their strides differ."""
    axes = []
    for axis in (0, 1):
        ways = [x.reach[axis] for x in inputs if x.reach]
        if len({way.step for way in ways}) > 1:
            return None
        axes.append(Reach(min(way.first for way in ways), max(way.last for way in ways), ways[0].step))
    return axes[0], axes[1]


def _said(node: fx.Node, layers: Mapping[str, nn.Module], why: str) -> str:
    """Name a node as its user knows it."""
    if node.op == "call_module":
        return f"{node.target}, a {type(layers[str(node.target)]).__name__}: {why}"
    return f"{getattr(node.target, '__name__', node.target)}(): {why}"


ADAPTIVE = (F.adaptive_avg_pool2d, F.adaptive_max_pool2d)
REDUCTIONS = (torch.mean, torch.amax, torch.sum, "mean", "amax", "sum")
"""Functions and methods whose output has no place in the image any more: always, and where one element is left."""


def _pair(value: Any) -> Pair:
    return (value[0], value[1]) if isinstance(value, tuple | list) else (value, value)
