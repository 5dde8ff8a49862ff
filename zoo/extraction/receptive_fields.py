"""What a graph's tensors are without running it: channels, stride and receptive field, from the layers' own numbers.

Source for the arithmetic: Araujo, Norris & Sim 2019, Computing Receptive Fields of Convolutional Neural Networks, section 2
(https://distill.pub/2019/computing-receptive-fields), here with intervals, so that branches that are shifted against each other count.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from zoo.extraction.dilated_layers import AtrousAvgPool2d, AtrousConv2d, AtrousMaxPool2d
from zoo.networks.layers import Conv2dEven, Conv2dSame, MaxPoolSame, PaddedShortcut, StochasticDepth, imagenet_to_inception

Pair = tuple[int, int]

POINTWISE = (
    nn.BatchNorm2d,
    nn.Dropout,
    nn.Identity,
    nn.ReLU,
    nn.ReLU6,
    nn.LeakyReLU,
    nn.Hardswish,
    nn.Hardsigmoid,
    nn.SiLU,
    nn.Sigmoid,
    StochasticDepth,
)
"""Layers that leave every pixel where it is, and the channels as they are."""


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
    """What one tensor is; `reach` on (height, width) is None where pixels have no place any more, behind a global pool."""

    channels: int | None
    reach: tuple[Reach, Reach] | None = None
    pixels: int | None = None
    """How many pixels an adaptive pool has left, which a flatten multiplies into the channels."""

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
    if isinstance(layer, AtrousAvgPool2d | AtrousConv2d | AtrousMaxPool2d):
        return Window(_pair(layer.kernel_size), (1, 1), _pair(layer.dilation), layer.before)
    if isinstance(layer, PaddedShortcut):
        return Window((1, 1), (layer.stride, layer.stride), (1, 1), (0, 0))
    if isinstance(layer, nn.Conv2d | nn.MaxPool2d | nn.AvgPool2d):
        size, stride = _pair(layer.kernel_size), _pair(layer.stride)
        dilation = (1, 1) if isinstance(layer, nn.AvgPool2d) else _pair(layer.dilation)
        if isinstance(layer, Conv2dSame | Conv2dEven | MaxPoolSame) or layer.padding == "same":
            reach = [(k - 1) * d + 1 for k, d in zip(size, dilation, strict=True)]
            before = [max(r - s, 0) // 2 for r, s in zip(reach, stride, strict=True)]
            return Window(size, stride, dilation, (before[0], before[1]))
        return Window(size, stride, dilation, (0, 0) if layer.padding == "valid" else _pair(layer.padding))
    return None


def fields(graph: fx.Graph, modules: Mapping[str, nn.Module]) -> dict[fx.Node, Field]:
    """Tell for every node of a graph what its tensor is; its input is an image."""
    known: dict[fx.Node, Field] = {}
    for node in graph.nodes:
        inputs = [known[n] for n in node.all_input_nodes]
        if node.op == "placeholder":
            known[node] = Field(None, (Reach(), Reach()))
        elif node.op == "call_module":
            known[node] = _layer(modules[str(node.target)], inputs[0]) if inputs else Field(None)
        elif node.op == "output":
            continue
        else:
            rule = RULES.get(node.target)
            known[node] = rule(node, inputs) if rule and inputs else Field(None)
    return known


def _layer(layer: nn.Module, x: Field) -> Field:
    if isinstance(layer, POINTWISE):
        return x
    if isinstance(layer, nn.AdaptiveAvgPool2d | nn.AdaptiveMaxPool2d):
        rows, columns = layer.output_size if isinstance(layer.output_size, tuple) else (layer.output_size, layer.output_size)
        return Field(x.channels, None, None if rows is None or columns is None else rows * columns)
    if isinstance(layer, nn.Linear):
        return Field(layer.out_features)
    if isinstance(layer, nn.Flatten):
        return _flatten(x)
    if (read := window(layer)) is None:
        return Field(None)
    channels = getattr(layer, "out_channels", x.channels)
    if x.reach is None:
        return Field(channels, None, x.pixels if read.size == read.stride == (1, 1) else None)
    return Field(channels, (x.reach[0].through(read, 0), x.reach[1].through(read, 1)))


def _join(inputs: list[Field], channels: int | None) -> Field:
    """Describe what is made of several tensors, pixel by pixel."""
    reaches = [x.reach for x in inputs]
    if None in reaches or not reaches:
        return Field(channels, None, inputs[0].pixels)
    axes = []
    for axis in (0, 1):
        ways = [reach[axis] for reach in reaches if reach]
        if len({way.step for way in ways}) > 1:
            return Field(channels)
        axes.append(Reach(min(way.first for way in ways), max(way.last for way in ways), ways[0].step))
    return Field(channels, (axes[0], axes[1]))


def _flatten(x: Field) -> Field:
    return Field(x.channels * x.pixels if x.channels is not None and x.pixels else None)


def _add(node: fx.Node, inputs: list[Field]) -> Field:
    del node
    return _join(inputs, inputs[0].channels)


def _gate(node: fx.Node, inputs: list[Field]) -> Field:
    """Describe a product; a factor from behind a global pool is a gate, and left out."""
    maps = [x for x in inputs if x.reach] or inputs
    return _add(node, maps)


def _concatenate(node: fx.Node, inputs: list[Field]) -> Field:
    axis = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    widths = [x.channels for x in inputs]
    return _join(inputs, sum(w for w in widths if w is not None) if axis == 1 and None not in widths else None)


def _flattened(node: fx.Node, inputs: list[Field]) -> Field:
    whole = [*node.args[1:], *node.kwargs.values()] == [1]
    return _flatten(inputs[0]) if whole else Field(None)


def _same(node: fx.Node, inputs: list[Field]) -> Field:
    del node
    return inputs[0]


def _mean(node: fx.Node, inputs: list[Field]) -> Field:
    del node
    return replace(inputs[0], reach=None, pixels=None)


RULES: dict[Any, Callable[[fx.Node, list[Field]], Field]] = {
    operator.add: _add,
    torch.add: _add,
    operator.mul: _gate,
    torch.mul: _gate,
    torch.cat: _concatenate,
    torch.flatten: _flattened,
    "flatten": _flattened,
    "mean": _mean,
    imagenet_to_inception: _same,
}


def _pair(value: Any) -> Pair:
    return (value[0], value[1]) if isinstance(value, tuple | list) else (value, value)
