"""Another output stride: layers behind it keep their kernels and lose their stride, and read pixels further apart instead."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from torch import fx, nn

from weights.arguments import forgiving, whole
from zoo.extraction.dilated_layers import AtrousAvgPool2d, AtrousAvgPoolSame, AtrousConv2d, AtrousMaxPool2d
from zoo.extraction.receptive_fields import Pair, Window, fields, window
from zoo.extraction.taps import BODY, trace
from zoo.networks.layers import (
    AvgPoolSame,
    Conv2dEven,
    Conv2dSame,
    MaxPoolSame,
    MaxPoolZero,
    PaddedShortcut,
    StandardisedConv2d,
    ZeroPaddedMaxPool2d,
)
from zoo.networks.model import Model


@dataclass(frozen=True, slots=True)
class Change:
    """What becomes of one layer: the rate at which it reads, and whether its stride goes."""

    name: str
    layer: nn.Module
    window: Window
    rate: int
    loses_stride: bool


@forgiving
def dilate(network: Model, output_stride: int) -> None:
    """Let the body's last map have `output_stride`, in place; parameters and their names stay as they are.

    In the order of execution, a layer whose stride would exceed `output_stride` computes at every pixel, and what follows is dilated;
    the layer itself keeps the dilation so far, as torchvision's ``replace_stride_with_dilation`` has it. So every n-th pixel of the
    new map, n old strides by new ones, is a pixel of the old map, as long as the sizes of maps divide. Pools are dilated likewise,
    those inside Inception's branches too; pools that dropped no pixel keep the size of the map. Auxiliary heads stay as they are.

    Args:
        network: one of the zoo's.
        output_stride: pixels of the image between neighbours of the last map; a power of two, at most the network's own.

    Raises:
        ValueError: another number, or one that falls inside the stride of a layer (AlexNet's first has 4); or attention inside windows
            would have to be dilated.

    Source:
        Chen et al. 2016, section 3.1 (https://arxiv.org/abs/1606.00915).
    """
    different = changes(network, output_stride)
    for change in different:
        network.set_submodule(change.name, changed(change))
    if different and network.checkpoint is not None:  # its metrics hold for the network that was measured
        network.checkpoint = replace(network.checkpoint, metrics={}, metrics_data=None)


def whole_stride(output_stride: Any) -> int:
    """Return a stride as a Python number; ValueError where it is no power of two."""
    with suppress(ValueError):
        stride = whole("output_stride", output_stride)
        if not stride & (stride - 1):
            return stride
    raise ValueError(f"output_stride is a power of two, 8 or 16, got {output_stride!r}")


def changes(network: Model, output_stride: int) -> list[Change]:
    """List what `dilate` does, and do nothing; arguments and errors are the same."""
    kind = type(network).__name__
    output_stride = whole_stride(output_stride)
    written = trace(network)
    modules = dict(network.named_modules())
    body = written.outputs[BODY]
    known = fields(written.graph, network)[body]
    own = known.stride
    if own is None or output_stride > own:
        none = f"no stride is known behind {known.unknown}" if known.unknown else f"the body of {kind} gives no map with a stride"
        has = f"the last map of {kind} has stride {own} already" if own else none
        raise ValueError(f"output_stride={output_stride} is more than there is: {has}; give a smaller one, or none")
    found: list[Change] = []
    state: dict[fx.Node, Pair] = {}  # stride and rate
    for node in written.graph.nodes:
        before = next((state[n] for n in node.all_input_nodes), (1, 1))
        state[node] = before
        if before[1] > 1 and str(node.target) in written.closed:
            raise ValueError(f"{kind} can't have output_stride={output_stride}: {node.target} can't be looked into, and so not be dilated")
        layer = modules.get(str(node.target)) if node.op == "call_module" else None
        if layer is not None and (read := window(layer)) is not None:
            change, state[node] = _step(str(node.target), layer, read, before, output_stride, kind)
            found += [change] if change else []
        if node is body:
            return found
    raise ValueError(f"the body of {kind} gives no map")


def _step(name: str, layer: nn.Module, read: Window, before: Pair, output_stride: int, kind: str) -> tuple[Change | None, Pair]:
    """Tell what becomes of one layer, and the stride and rate behind it."""
    (stride, rate), (step, _) = before, read.stride
    if step > 1 and stride * step > output_stride:
        if stride < output_stride or read.stride != (step, step):
            raise ValueError(
                f"{kind} can't have output_stride={output_stride}: the stride of {name} leads from {stride} to {stride * step}"
            )
        return Change(name, layer, read, rate, True), (stride, rate * step)
    after = (stride * step, rate)
    if rate == 1 or (read.size == (1, 1) and read.before == (0, 0)):
        return None, after
    if step > 1:
        raise ValueError(f"{kind} can't have output_stride={output_stride}: {name} has a stride behind a layer that has lost its own")
    return Change(name, layer, read, rate, False), after


def changed(change: Change) -> nn.Module:
    """Make the layer anew, with the very parameters of the old one and with its mode."""
    layer, read, rate = change.layer, change.window, change.rate
    dilation = (read.dilation[0] * rate, read.dilation[1] * rate)
    before = (read.before[0] * rate, read.before[1] * rate)
    if isinstance(layer, PaddedShortcut):
        new: nn.Module = PaddedShortcut(layer.in_channels, layer.out_channels)
        new.stride = 1
    elif isinstance(layer, Conv2dSame | Conv2dEven):
        new = AtrousConv2d(layer, read.stride, dilation[0], even=isinstance(layer, Conv2dEven))
    elif isinstance(layer, nn.Conv2d):
        size = (read.size[0], read.size[1])
        gaps = (1, 1) if size == (1, 1) else dilation  # none to skip, and other kernels compute it
        kind = StandardisedConv2d if isinstance(layer, StandardisedConv2d) else nn.Conv2d
        new = kind(layer.in_channels, layer.out_channels, size, 1, before, gaps, layer.groups, bias=False, device="meta")
        new.weight, new.bias = layer.weight, layer.bias
    elif isinstance(layer, nn.MaxPool2d):
        if isinstance(layer, MaxPoolSame):
            padded = 0.0 if isinstance(layer, MaxPoolZero) else float("-inf")
            new = AtrousMaxPool2d(read.size, read.stride, rate, None, padded)
        elif before != (0, 0) or (change.loses_stride and _drops_nothing(layer, read)):
            fill = 0.0 if isinstance(layer, ZeroPaddedMaxPool2d) else float("-inf")
            # PyTorch's own pads no more than half of its undilated window
            new = AtrousMaxPool2d(read.size, read.stride, rate, before, fill)
        else:
            new = nn.MaxPool2d(read.size, 1, 0, dilation)
    elif isinstance(layer, AvgPoolSame):
        new = AtrousAvgPoolSame(read.size, read.stride, rate)
    elif isinstance(layer, nn.ZeroPad2d):  # a shift
        new = nn.ZeroPad2d(tuple(rate * pixels for pixels in layer.padding))  # pyright: ignore[reportArgumentType]
    elif isinstance(layer, nn.AvgPool2d):
        keeps = change.loses_stride and _drops_nothing(layer, read)
        new = AtrousAvgPool2d(read.size, rate, before, keeps, layer.count_include_pad)
    else:
        raise ValueError(f"{change.name} is a {type(layer).__name__}, whose stride can't be traded for dilation")
    return new.train(layer.training)


def _drops_nothing(layer: nn.MaxPool2d | nn.AvgPool2d, read: Window) -> bool:
    """Tell whether a pool's windows cover its map to the end, so that the map keeps its size where the stride goes."""
    return layer.ceil_mode or read.size == read.stride
