"""Shapes of every tensor of a graph, computed on the meta device: no numbers, no copies of weights, no hooks, and no state changed."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx, nn

from zoo.networks.model import Model

IMAGES = 2
"""Of a batch, so that a layer that needs several is content."""

POINTWISE = {nn.ReLU, nn.ReLU6, nn.SiLU, nn.GELU, nn.Sigmoid, nn.Hardswish, nn.Hardsigmoid, nn.LeakyReLU, nn.Dropout, nn.Identity}
"""Layers that keep a shape, as a BatchNorm does: PyTorch computes it in Python, a hundred times slower than a convolution's."""


def values(graph: fx.Graph, network: Model) -> dict[fx.Node, Any]:
    """Return what each node of a graph gives for images of the network's own size: tensors on the meta device, or anything else.

    A node that can't be computed so, for it needs numbers, has the exception that it raised.
    """
    twin = without_numbers(network)
    layers = dict(twin.named_modules())
    dtype = next((p.dtype for p in network.parameters() if p.is_floating_point()), torch.float32)
    size = (IMAGES, network.in_channels, network.input_size, network.input_size)
    found: dict[fx.Node, Any] = {}
    with torch.no_grad():
        for node in graph.nodes:
            if node.op == "placeholder":
                found[node] = torch.empty(size, dtype=dtype, device="meta")
            elif node.op != "output":
                found[node] = _computed(node, found, twin, layers)
    return found


def without_numbers(module: nn.Module) -> nn.Module:
    """Return a module of the same classes whose tensors are on the meta device, without hooks; the one that is given stays as it is."""
    twin = module.__class__.__new__(module.__class__)
    twin.__dict__ = {name: _empty(value) for name, value in module.__dict__.items()}
    for kind in ("_parameters", "_buffers"):
        twin.__dict__[kind] = {name: _empty(tensor) for name, tensor in module.__dict__[kind].items()}
    twin.__dict__["_modules"] = {name: child and without_numbers(child) for name, child in module._modules.items()}
    for hooks in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
        twin.__dict__[hooks] = {}
    return twin


def _empty(value: Any) -> Any:
    if not isinstance(value, Tensor) or value.is_meta:
        return value
    made = torch.empty_like(value, device="meta")
    return nn.Parameter(made, requires_grad=False) if isinstance(value, nn.Parameter) else made


def _keeps(layer: nn.Module, x: Any = None, *rest: Any) -> bool:
    """Tell whether a layer's output has the shape of its input, so that it need not be computed."""
    normed = type(layer) is nn.BatchNorm2d and isinstance(x, Tensor) and x.dim() == 4 and x.shape[1] == layer.num_features
    return not rest and (normed or (type(layer) in POINTWISE and isinstance(x, Tensor)))


def _computed(node: fx.Node, found: dict[fx.Node, Any], twin: nn.Module, layers: dict[str, nn.Module]) -> Any:
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: found[n])
    target: Any = node.target
    try:
        if node.op == "get_attr":
            return operator.attrgetter(target)(twin)
        if node.op == "call_module":
            layer = layers[target]
            if _keeps(layer, *args):
                return torch.empty_like(args[0])  # pyright: ignore[reportArgumentType]
            return layer(*args, **kwargs)
        if node.op == "call_method":
            return getattr(args[0], target)(*args[1:], **kwargs)
        return target(*args, **kwargs)
    except Exception as error:  # whatever a layer raises that needs numbers, or what an earlier one has not given
        return error
