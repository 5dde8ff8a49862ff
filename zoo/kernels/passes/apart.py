"""Whether a network answers for each image of a batch by itself, so that the batch may be computed in parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from zoo.kernels.passes.aten import bound
from zoo.kernels.passes.graph import Graph, Node

aten = torch.ops.aten

_LAYERS = {"conv", "affine", "act", "add", "gate", "cat", "pool", "mean", "pad", "rows", "view", "layer_norm"}
"""What `lower` makes of operators: layers, which never look beyond an image, and views, whose first dimension is asked for below."""
_POINTWISE = {aten._to_copy.default, aten._prelu_kernel.default}
"""Beside those that PyTorch calls so."""


def apart(graph: Graph) -> bool:
    """Tell whether all that a network returns for an image follows from that image alone, whatever is beside it.

    It is read off the operators, not off an example, for a branch that one strange image takes for all would not show in most. What is
    not known to keep images apart counts as mixing them. How many there are may still matter, for `forward` can ask: see `alike`.

    Args:
        graph: lowered, not folded.

    Returns:
        True if that is certain, and every input and output is a batch of the same size, above one.
    """
    images = graph.inputs[0].shape[0] if graph.inputs[0].shape else 0
    several = {node.inputs[0] for node in graph.nodes if node.op == "item"}
    computed = [node for node in graph.nodes if node.op != "const"]
    if images < 2 or any(isinstance(leaf, Node) and leaf.op == "const" for leaf in graph.outputs):
        return False
    if not all(node.shape[:1] == (images,) for node in computed if node not in several):
        return False
    return all(node.op in ("input", "item") or _keeps(node, images) for node in computed)


def alike(graph: Graph, other: Graph) -> bool:
    """Tell whether two lowered graphs of a network, at batches of other sizes, do the same with each image."""
    places = [{node: index for index, node in enumerate(each.nodes)} for each in (graph, other)]
    leaves = [
        [at.get(leaf, leaf) if isinstance(leaf, Node) else leaf for leaf in g.outputs] for g, at in zip((graph, other), places, strict=True)
    ]
    if len(graph.nodes) != len(other.nodes) or graph.spec != other.spec or leaves[0] != leaves[1]:
        return False
    return all(
        (a.op, a.dtype, a.roles, a.shape[1:]) == (b.op, b.dtype, b.roles, b.shape[1:])
        and [places[0][source] for source in a.inputs] == [places[1][source] for source in b.inputs]
        and _equal(a.attrs, b.attrs, 1 if a.op == "view" else 0)
        for a, b in zip(graph.nodes, other.nodes, strict=True)
    )


def _equal(a: Any, b: Any, skipped: int = 0) -> bool:
    """Compare what nodes are made of; of a view's shape not the first number."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a is b or (a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(a[name], b[name], skipped) for name in a)
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(map(_equal, a[skipped:], b[skipped:]))
    return type(a) is type(b) and a == b


def _keeps(node: Node, images: int) -> bool:
    """Tell whether a node that reads batches computes each row from the same row of each."""
    if not node.inputs:
        return False  # made from nothing, perhaps of a batch's size
    if node.op in _LAYERS:
        return not any(source.op == "const" and source.shape[:1] == (images,) for source in node.inputs)
    if node.op != "aten":
        return False
    func = node.attrs["func"]
    if torch.Tag.pointwise in func.tags or func in _POINTWISE:
        return all(_aligned(source, node) for source in node.inputs)
    rule = _RULES.get(func)
    return rule is not None and rule(*bound(node))


def _aligned(source: Node, node: Node) -> bool:
    """Tell whether broadcasting lays a batch's rows beside the node's, or the same constant beside each."""
    if source.op != "const":
        return len(source.shape) == len(node.shape)
    return len(source.shape) < len(node.shape) or source.shape[0] == 1


def _behind(x: Node, *dims: int) -> bool:
    """Tell whether all dimensions lie behind the first, and there are some."""
    return len(dims) > 0 and all(dim % len(x.shape) for dim in dims)


def _along(x: Node, dim: Any, *_: Any) -> bool:
    return dim is not None and _behind(x, *(dim if isinstance(dim, list | tuple) else (dim,)))


def _split(x: Node, sizes: Any, dim: int = 0) -> bool:
    return _behind(x, dim)


def _cat(parts: list[Node], dim: int = 0) -> bool:
    return _behind(parts[0], dim) and not any(part.op == "const" for part in parts)


def _padded(x: Node, amounts: list[int], *_: Any) -> bool:
    return len(amounts) < 2 * len(x.shape)  # from the last dimension on


def _each(*_: Any) -> bool:
    return True  # of a pool; and a slice whose first dimension is still a batch took all of it


def _convolution(x: Node, weight: Node, bias: Node | None, *_: Any) -> bool:
    return all(node is None or node.op == "const" for node in (weight, bias)) and len(x.shape) == len(weight.shape)


_RULES: Mapping[Any, Callable[..., bool]] = {
    aten.slice.Tensor: _each, aten.select.int: _along,
    aten.mean.dim: _along, aten.sum.dim_IntList: _along, aten.amax.default: _along, aten.argmax.default: _along,
    aten._softmax.default: _along, aten._log_softmax.default: _along,
    aten.transpose.int: lambda x, *dims: _behind(x, *dims),
    aten.permute.default: lambda x, dims: dims[0] % len(dims) == 0,
    aten.split.Tensor: _split, aten.split_with_sizes.default: _split,
    aten.cat.default: _cat,
    aten.constant_pad_nd.default: _padded,
    aten.convolution.default: _convolution,
    aten.upsample_nearest2d.default: _each, aten.upsample_bilinear2d.default: _each,
    aten.max_pool2d_with_indices.default: _each, aten.avg_pool2d.default: _each,
    aten._adaptive_avg_pool2d.default: _each,
}  # fmt: skip
"""What else is known, by operator: from its arguments, whether it leaves the first dimension alone."""
