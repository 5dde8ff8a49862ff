"""Third pass: put into weights what is linear and constant: BatchNorm behind a convolution, padding in front of it."""

from __future__ import annotations

import torch
from torch import Tensor

from zoo.kernels.passes.graph import Graph, joined


def fold(graph: Graph) -> None:
    """Fold padding into the convolutions and pools that read it, and affine layers into the convolutions in front of them.

    A fold needs a single reader; weights are scaled in float64 and kept in the precision that they had.
    """
    _views(graph)
    _padding(graph)
    _affine(graph)
    graph.prune()


def _views(graph: Graph) -> None:
    """Let a view of a view look at the first map; a view back to the map's own shape is the map."""
    for node in graph.nodes:
        if node.op != "view":
            continue
        while node.inputs[0].op == "view":
            node.inputs[0] = node.inputs[0].inputs[0]
        if node.inputs[0].shape == node.shape:
            graph.replace(node, node.inputs[0])
    graph.prune()


def _padding(graph: Graph) -> None:
    users = graph.users()
    for node in graph.nodes:
        if node.op != "pad" or len(users[node]) != 1:
            continue
        reader = users[node][0]
        fits = (reader.op == "conv" and node.attrs["value"] == 0) or (
            reader.op == "pool" and reader.attrs["kind"] == "max" and node.attrs["value"] == float("-inf") and not reader.attrs["ceil_mode"]
        )
        if fits and reader.inputs[0] is node:
            reader.attrs["padding"] = tuple(a + b for a, b in zip(reader.attrs["padding"], node.attrs["padding"], strict=True))
            reader.inputs[0] = node.inputs[0]
            reader.layers = node.layers + reader.layers


def _affine(graph: Graph) -> None:
    users = graph.users()
    for node in list(graph.nodes):
        if node.op != "affine":
            continue
        conv = node.inputs[0]
        if conv.op != "conv" or conv.attrs["act"] != "none" or len(users[conv]) != 1 or conv.argument("residual") is not None:
            continue
        scale, shift = node.attrs["scale"], node.attrs["shift"]
        weight: Tensor = conv.attrs["weight"]
        bias = conv.attrs["bias"]
        scaled = weight.double() * scale.view(-1, 1, 1, 1)
        if not shift.any() and _vanishes(scaled) > _vanishes(weight) + 0.01:
            continue  # a factor as small as those that ConvNeXt begins with
        conv.attrs["weight"] = scaled.to(weight.dtype)
        conv.attrs["bias"] = (shift if bias is None else bias.double() * scale + shift).to(torch.float32)
        conv.layers = joined(conv, node)
        graph.replace(node, conv)
        users[conv] = users[node]


def _vanishes(weight: Tensor) -> float:
    """Return which part of weights float16, in which a plan may compute, would round to few bits."""
    small = weight.abs() < torch.finfo(torch.float16).smallest_normal
    return int(small.count_nonzero()) / max(1, small.numel())
