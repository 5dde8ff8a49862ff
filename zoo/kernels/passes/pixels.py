"""Maps seen with their channels last, (N, H, W, C): another shape of the same memory where that is channels_last."""

from __future__ import annotations

from typing import Any

import torch

from zoo.kernels.passes.aten import bound
from zoo.kernels.passes.graph import Graph, Node, const_value
from zoo.kernels.passes.trace import Ref

aten = torch.ops.aten

LAST, SECOND = [0, 2, 3, 1], [0, 3, 1, 2]
"""Where a map's channels go: behind its pixels, and back."""


def map_of(x: Node) -> Node | None:
    """Return the map (N, C, H, W) that `x` shows as (N, H, W, C), or (N, C, L, 1) as (N, L, C), if it does."""
    if x.op == "view" and len(x.shape) == 3 and x.inputs[0].shape == _as_rows(x.shape):
        x = x.inputs[0]
    if x.op != "aten" or x.attrs["func"] is not aten.permute.default or len(x.shape) != 4:
        return None
    source, dims = bound(x)
    return source if [dim % 4 for dim in dims] == LAST else None


def as_map(x: Node) -> Node:
    """See (N, H, W, C) as the map (N, C, H, W), whose memory is the same where that is channels_last; tokens (N, L, C) as (N, C, L, 1)."""
    if (values := const_value(x)) is not None:
        made = values.reshape(_as_rows(x.shape)).permute(SECOND)
        return Node("const", [], {"tensor": made, "name": x.attrs["name"]}, tuple(made.shape), x.dtype)
    if (source := map_of(x)) is not None:
        return source
    return permuted(viewed(x, _as_rows(x.shape)), SECOND)


def shown(x: Node, shape: tuple[int, ...]) -> Node:
    """Show a map with its channels last, as an operator's result of this shape."""
    return viewed(permuted(x, LAST), shape)


def viewed(x: Node, shape: tuple[int, ...], layers: tuple[str, ...] | None = None) -> Node:
    """Show a value in another shape, as the work of these layers, or of the value's own; of a view what that shows."""
    if x.shape == shape:
        return x
    layers = x.layers if layers is None else layers
    while x.op == "view":
        x = x.inputs[0]
    return x if x.shape == shape else Node("view", [x], {"shape": shape}, shape, x.dtype, ["x"], layers)


def _as_rows(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Tokens (N, L, C) as rows of one pixel each, (N, L, 1, C)."""
    return (*shape[:2], 1, shape[2]) if len(shape) == 3 else shape


def permuted(x: Node, dims: list[int]) -> Node:
    """Permute a value."""
    attrs = {"func": aten.permute.default, "args": (Ref(0), dims), "kwargs": {}}
    return Node("aten", [x], attrs, tuple(x.shape[dim] for dim in dims), x.dtype, layers=x.layers)


def share(graph: Graph) -> None:
    """Permute and view a value once for all that read it so: where its memory has to be laid out anew, once is enough."""
    first: dict[tuple[Any, ...], Node] = {}
    for node in graph.nodes:
        if node.op == "aten" and node.attrs["func"] is aten.permute.default:
            source, dims = bound(node)
            key = (source, "permute", *(dim % len(dims) for dim in dims))
        elif node.op == "view":
            key = (node.inputs[0], "view", *node.shape)
        else:
            continue
        if (kept := first.setdefault(key, node)) is not node:
            graph.replace(node, kept)
    graph.prune()
