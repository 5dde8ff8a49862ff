"""Maps seen with their channels last, (N, H, W, C): another shape of the same memory where that is channels_last."""

from __future__ import annotations

import torch

from zoo.kernels.passes.aten import bound
from zoo.kernels.passes.graph import Graph, Node, const_value
from zoo.kernels.passes.trace import Ref

aten = torch.ops.aten

LAST, SECOND = [0, 2, 3, 1], [0, 3, 1, 2]
"""Where a map's channels go: behind its pixels, and back."""


def map_of(x: Node) -> Node | None:
    """Return the map (N, C, H, W) that `x` shows as (N, H, W, C), if it does."""
    if x.op != "aten" or x.attrs["func"] is not aten.permute.default or len(x.shape) != 4:
        return None
    source, dims = bound(x)
    return source if [dim % 4 for dim in dims] == LAST else None


def as_map(x: Node) -> Node:
    """See (N, H, W, C) as the map (N, C, H, W), whose memory is the same where that is channels_last."""
    if (values := const_value(x)) is not None:
        made = values.permute(SECOND)
        return Node("const", [], {"tensor": made, "name": x.attrs["name"]}, tuple(made.shape), x.dtype)
    return map_of(x) or permuted(x, SECOND)


def permuted(x: Node, dims: list[int]) -> Node:
    """Permute a value."""
    attrs = {"func": aten.permute.default, "args": (Ref(0), dims), "kwargs": {}}
    return Node("aten", [x], attrs, tuple(x.shape[dim] for dim in dims), x.dtype, layers=x.layers)


def share(graph: Graph) -> None:
    """Permute a value once for all that read it so: where its memory has to be laid out anew, once is enough."""
    first: dict[tuple[Node, tuple[int, ...]], Node] = {}
    for node in graph.nodes:
        if node.op == "aten" and node.attrs["func"] is aten.permute.default:
            source, dims = bound(node)
            if (kept := first.setdefault((source, tuple(dim % len(dims) for dim in dims)), node)) is not node:
                graph.replace(node, kept)
    graph.prune()
